"""Unit tests of training: configuration, tokenizers, batches, metrics, checkpoints, device and precision."""

import ctypes
import dataclasses
import gc
import io
import json
import math
import os
import random
import re
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import sacrebleu
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch.nn import functional
from transformers import TrainingArguments

from linformer_kit import (
    LinformerConfig,
    LinformerForConditionalGeneration,
    LinformerForMaskedLM,
    LinformerForSequenceClassification,
)
from linformer_kit.errors import UserError
from linformer_kit.models.window_linformer import DistanceBias
from linformer_kit.process_memory import is_out_of_memory, status_bytes
from linformer_kit.training import announce, batches, checkpoint, metrics, prepare, training_state
from linformer_kit.training.arguments import is_on_gpu, resolve_hardware, training_arguments
from linformer_kit.training.config import (
    RunConfig,
    TokenizerConfig,
    config_to_dict,
    load_config,
    model_settings,
    resolve_model_config,
    shipped_configs,
    to_yaml,
)
from linformer_kit.training.config_page import reference
from linformer_kit.training.estimate import estimate
from linformer_kit.training.model import build_model, convert_attention, count_parameters, max_length
from linformer_kit.training.run import RunFolder, differences, stored_config
from linformer_kit.training.tokenizer import SPECIAL, train_tokenizer
from linformer_kit.training.tokens import blocks, digest
from linformer_kit.training.train import announce_hardware_change, best_checkpoint, make_trainer
from linformer_kit.training.trainer import (
    FREE_MEMORY,
    FlowCallback,
    LinformerTrainer,
    best_evaluation,
    evaluation_is_due,
    evaluations_since_best,
)
from linformer_kit.yaml_loader import parse_yaml

QUIET = Console(quiet=True)


@pytest.fixture
def write(tmp_path):
    """Write a YAML and load it."""

    def load(text: str, *overrides: str) -> RunConfig:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load_config(path, list(overrides))

    return load


# configuration

SMALL = "task: classification\ndata: {path: x.csv}\n"


def test_defaults_overrides_and_the_run_directory(write):
    config = write(
        SMALL, "training.learning_rate=1e-3", "model.projected_length=64", "model.hidden_dropout_prob=0", "seed=7"
    )
    assert config.training.learning_rate == 0.001
    assert config.model == {"projected_length": 64, "hidden_dropout_prob": 0.0}
    assert (config.seed, config.folder, config.training.batch_size) == (7, Path("runs/run"), 32)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5e1", 5.0),
        ("3", 3),
        ("0.1", 0.1),
        ("e5", "e5"),
        ("1e", "1e"),
        ("no", False),
    ],
)
def test_yaml_numbers_have_their_types(text, value):
    found = parse_yaml(text, "here")
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.learning_rat=1", "no key training.learning_rat; did you mean 'learning_rate'? allowed: "),
        ("modell.x=1", "no key modell; did you mean 'model'?"),
        ("training.epochs=many", "training.epochs is the string 'many'; allowed: a number"),
        ("training.steps=1.5", "training.steps is the number 1.5; allowed: an integer"),
        ("training.batch_size=true", "training.batch_size is true; allowed: an integer"),
        ("data.streaming=1", "data.streaming is the number 1; allowed: true or false"),
        ("task=clasification", "task is the string 'clasification'; allowed: classification, masked-lm, causal-lm,"),
        ("training.schedule=cosin", "did you mean 'cosine'?"),
        ("data.header=a", "data.header is the string 'a'; allowed: a list of strings"),
        ("data.header=[1]", "data.header[0] is the number 1; allowed: a string"),
        ("training=3", "training is the number 3; allowed: a mapping"),
        ("data.columns.txt=a", "no key data.columns.txt; did you mean 'text'?"),
        ("data.path.x=1", "data.path is a value, the string 'x.csv', and has no keys"),
        ("model.projected_lenght=1", "no key model.projected_lenght; did you mean 'projected_length'?"),
        ("model.hidden_size=big", "model.hidden_size is the string 'big'; allowed: an integer"),
        ("model.vocab_size=5", "model.vocab_size is derived from the tokenizer"),
        ("model.decoder_vocab_size=5", "model.decoder_vocab_size is derived from the tokenizer of both sides"),
        ("model.attention=none", "model.attention is the string 'none'; allowed: linformer, full"),
        ("training.batch_size=0", "training.batch_size is 0; it must be at least 1"),
        ("seed=5000000000", "seed is 5000000000; it must be at least 0 and less than 4 billion"),
        (f"training.learning_rate=1{'0' * 400}", "; allowed: a number"),
        ("data.encoding=hex", "data.encoding is 'hex', which Python does not know"),
        ("model.projected_length=0", "model: projected_length is 0, which only layers with a window can have"),
        ("training.warmup=1", "training.warmup is 1.0; it must be at least 0 and less than 1"),
        ("training.learning_rate=-1", "training.learning_rate is -1.0; it must be larger than 0"),
        ("training.learning_rate=.nan", "training.learning_rate is the number nan; allowed: a number"),
        ("data.generated=listops", "' and data.generated is 'listops'; remove one of them"),
        ("data.path=null", "there is no data; set data.path to a file, a directory or a name on the Hub"),
        ("data.streaming=true", "data.streaming requires training.steps"),
        ("nonsense", "'nonsense' is not an override; write key=value"),
        ("training.epochs=[", "the value in 'training.epochs=[' is not YAML"),
    ],
)  # fmt: skip
def test_errors_name_the_value_and_what_is_allowed(write, override, said):
    with pytest.raises(UserError) as error:
        write(SMALL, override)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: {path: x}", "the key task is missing; allowed: classification, masked-lm"),
        ("task: classification", "there is no data; set data.path"),
        (SMALL + "task: masked-lm\n", "the key 'task' occurs twice"),
        ("- a", "must contain a mapping"),
        (f"- {'word ' * 100}", r"it contains the list \['(word ){11}wor …$"),
        ("", "must contain a mapping"),
        ("task: [", "is not YAML"),
        (SMALL + "training: {epochs: 1, steps: 2}", "both set"),
        (
            SMALL + "model: {reversible: true}\ntraining: {gradient_checkpointing: true}",
            "keep no activations that it could save; set it to false",
        ),
        (SMALL + "model: {decoder_hidden_size: 24}", "has one stack of layers; set model.hidden_size instead"),
        (SMALL + "model: {from: a, hidden_size: 3}", "determines model.hidden_size; remove that key"),
    ],
)
def test_invalid_configurations_are_rejected(write, text, said):
    with pytest.raises(UserError, match=said):
        write(text)


def test_the_stored_configuration_is_complete_and_loads_unchanged(write):
    config = write(
        SMALL,
        "training.learning_rate=1e-7",
        "data.columns.pair=b",
        "model.projected_length=[8, 4]",
        "model.num_hidden_layers=2",
    )
    again = write(to_yaml(config))
    assert again == config
    assert yaml.safe_load(to_yaml(config)) == config_to_dict(config)
    assert [key for key, *_ in reference()] == [
        key for key, _ in flatten_keys(config_to_dict(dataclasses.replace(config, model=None)))
    ]


def flatten_keys(tree, path=""):
    for key, value in tree.items():
        yield from flatten_keys(value, f"{path}{key}.") if isinstance(value, dict) else [(f"{path}{key}", value)]


def test_an_unknown_configuration_suggests_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'imdb'"):
        load_config("imbd")
    assert load_config("configs/imdb.yaml") == load_config("imdb")


def test_a_file_overrides_the_keys_of_its_base(tmp_path):
    """Sections are merged, lists are replaced, `run` is not inherited; overrides come last."""
    (tmp_path / "middle.yaml").write_text("base: wmt14_en_de\nrun: runs/other\nmodel: {projected_length: 8}\nseed: 3\n")
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "last.yaml"
    path.write_text("base: ../middle.yaml\nmodel: {slots: 4}\ndata: {columns: {source: a}, name: null}\n")
    shipped = config_to_dict(load_config("wmt14_en_de"))
    found = config_to_dict(load_config(path, ["training.steps=5"]))
    assert {key: value for key, value in flatten_keys(found) if (key, value) not in list(flatten_keys(shipped))} == {
        "run": "runs/last",
        "seed": 3,
        "model.projected_length": 8,
        "model.slots": 4,
        "data.columns.source": "a",
        "data.name": None,
        "training.steps": 5,
    }
    (tmp_path / "run").mkdir()
    stored = tmp_path / "run" / "config.yaml"
    stored.write_text(to_yaml(load_config(path)))
    path.unlink()
    assert config_to_dict(load_config(stored, ["run=runs/last", "training.steps=5"])) == found


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("imbd", r"base is 'imbd', but there is no file .*imbd and no such shipped configuration; did you mean 'imdb'"),
        ("nowhere.yaml", r"there is no file .*nowhere.yaml and no such shipped configuration; shipped .*wmt14_en_de"),
        ("first.yaml", r"base is 'first.yaml', which leads back to itself: first.yaml → first.yaml; remove"),
        ("second.yaml", r"base is 'first.yaml', which leads back to itself: first.yaml → second.yaml → first.yaml"),
        ("[imdb]", r"first.yaml: base is the list \['imdb'\]; allowed: a string"),
    ],
)
def test_a_base_that_cannot_be_read_is_named(tmp_path, base, said):
    (tmp_path / "first.yaml").write_text(f"base: {base}\n")
    (tmp_path / "second.yaml").write_text("base: first.yaml\n")
    with pytest.raises(UserError, match=said):
        load_config(tmp_path / "first.yaml")
    with pytest.raises(UserError, match="base is a key of YAML files and cannot be set on the command line"):
        load_config("imdb", ["base=mnli"])


@pytest.mark.parametrize(
    ("report", "tools"),
    [("none", []), ("wandb", ["wandb"]), ("[tensorboard, wandb, wandb]", ["tensorboard", "wandb"]), ("[]", [])],
)
def test_reports_are_one_tool_or_several(report, tools):
    assert load_config("imdb", [f"training.report={report}"]).training.reports == tools


def test_a_report_that_does_not_exist_is_named():
    said = "training.report is the list .*; allowed: none, tensorboard, wandb or a list of tensorboard, wandb"
    with pytest.raises(UserError, match=said):
        load_config("imdb", ["training.report=[tensorboard, mlflow]"])


def test_the_configurations_of_one_experiment_differ_in_their_attention_only():
    configs = [load_config(f"wmt14_en_de_{name}", ["run=same"]) for name in ("k32", "k64", "full")]
    models = [resolve_model_config(config.model) for config in configs]
    assert [model.projection for model in models] == ["linear", "linear", "none"]
    assert [set(model.projected_lengths) for model in models[:2]] == [{32}, {64}]
    assert len({str(dataclasses.replace(config, model={})) for config in configs}) == 1


def test_shipped_configurations():
    names = (
        "imdb listops wikitext2_mlm wikitext2_clm wmt14_en_de tatoeba_en_de mnli bookcorpus_mlm bookcorpus_denoising"
    )
    assert set(names.split()) <= set(shipped_configs())


def test_full_attention_resets_sharing_and_rescale():
    twin = resolve_model_config({"attention": "full", "projection": "linear", "sharing": "none", "rescale": True})
    assert (twin.projection, twin.decoder_attention, twin.sharing, twin.rescale) == ("none", "full", "headwise", False)


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_every_shipped_configuration_is_read_and_its_model_and_its_twin_are_built(name):
    tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), [])
    sizes, projections = {}, {}
    for attention in ("linformer", "full"):
        config = load_config(name, [f"model.attention={attention}"])
        with torch.device("meta"):
            model = build_model(config, tokenizer, ["a", "b", "c"] if config.task == "classification" else [])
        sizes[attention] = count_parameters(model)
        projections[attention] = model.config.projection
        biases = sum(module.weight.numel() for module in model.modules() if isinstance(module, DistanceBias))
        sizes[attention] = (sizes[attention][0] - biases, sizes[attention][1])
        assert (model.config.projection == "none") == (attention == "full")
        assert model.config.max_position_embeddings == max_length(config)
    assert (sizes["linformer"][1] > 0) == (projections["linformer"] != "mean")  # windows have no parameters
    assert sizes["full"][1] == 0
    assert sizes["linformer"][0] - sizes["linformer"][1] == sizes["full"][0]


def test_only_differences_that_matter_count(write):
    before, now = (
        write(SMALL),
        write(SMALL, "data.workers=3", "training.report=wandb", "run=elsewhere", "training.epochs=9"),
    )
    assert differences(before, now) == [("training.epochs", None, 9.0)]


# tokenizers


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_bytes_and_bpe_lose_nothing(text):
    for config in (TokenizerConfig(kind="bytes"), TokenizerConfig(vocab_size=270)):
        tokenizer = train_tokenizer(config, ["some words, some more words"])
        if not any(token in text for token in SPECIAL):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(ids) == text
            if config.kind == "bytes":
                assert len(ids) == len(text.encode())


def test_special_tokens_surround_texts_and_pairs(tmp_path):
    tokenizer = train_tokenizer(TokenizerConfig(kind="words", min_frequency=1, lowercase=True), ["A b c"])
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    for each in (tokenizer, again):
        assert each.convert_ids_to_tokens(each("b C ?")["input_ids"]) == ["<s>", "b", "c", "<unk>", "</s>"]
        pair = each("a", "b", return_token_type_ids=True)
        assert each.convert_ids_to_tokens(pair["input_ids"]) == ["<s>", "a", "</s>", "b", "</s>"]
        assert pair["token_type_ids"] == [0, 0, 0, 1, 1]
        assert (each.pad_token_id, each.unk_token_id, each.bos_token_id, each.eos_token_id, each.mask_token_id) == (
            0,
            1,
            2,
            3,
            4,
        )


def test_the_tokenizer_can_be_trained_on_a_very_long_word():
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=300), ["ab" * 500_000])
    assert len(tokenizer) > 262


def test_the_vocabulary_has_the_requested_size():
    tokenizer = train_tokenizer(
        TokenizerConfig(vocab_size=270, min_frequency=1), ["the cat sat on the mat and the dog sat on the log " * 3]
    )
    assert len(tokenizer) == 270
    with pytest.raises(UserError, match="vocab_size is 100"):
        train_tokenizer(TokenizerConfig(vocab_size=100), ["a"])


# packing


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), max_size=30), max_size=20), st.integers(1, 16))
def test_packing_loses_nothing_and_fills_every_piece_but_the_last(texts, length):
    arrays = [np.array(text, np.int32) for text in texts]
    rows = [row for table in blocks(iter(arrays), length) for row in table.column("input_ids").to_pylist()]
    flat = [token for text in texts for token in text]
    rest = len(flat) % length
    # a single token at the end is dropped, because it has no context
    assert [token for row in rows for token in row] == (flat[:-1] if rest == 1 else flat)
    assert all(len(row) == length for row in rows[:-1])


# batches


def test_a_file_of_the_same_size_and_another_time_counts_as_another(write, tmp_path):
    path, found = tmp_path / "x.csv", []
    config = write(SMALL.replace("x.csv", str(path)))
    for moment, text in enumerate(("text,label\na,0\nb,1\n", "text,label\nb,0\na,1\n")):
        path.write_text(text)
        os.utime(path, ns=(moment, moment))
        found.append(prepare.fingerprint(config))
    assert found[0] != found[1]


def test_a_digest_is_of_tokens_labels_and_their_order():
    rows = [{"input_ids": [1, 2], "labels": 0}, {"input_ids": [3], "labels": 1}]
    other = [
        rows[::-1],
        [{"input_ids": [1], "labels": 0}, {"input_ids": [2, 3], "labels": 1}],
        [{"input_ids": [1, 2], "labels": 1}, {"input_ids": [3], "labels": 0}],
        [{"input_ids": [1, 2], "labels": 0}, {"input_ids": [4], "labels": 1}],
    ]
    found = [digest(datasets.Dataset.from_list(each)) for each in (rows, *other)]
    assert len(set(found)) == 5
    with_more = datasets.Dataset.from_list([{**row, "source": "a"} for row in [*rows, *rows]]).select([2, 3])
    assert digest(with_more) == found[0]


def examples_of(rows, transform=lambda example, _: example, seed=0):
    return batches.Examples(datasets.Dataset.from_list(rows), transform, seed)


def test_every_pass_of_a_stream_has_another_order():
    rows = datasets.Dataset.from_list([{"input_ids": [number]} for number in range(20)])
    rows = rows.to_iterable_dataset().shuffle(seed=0, buffer_size=20)
    stream = batches.Stream(rows, lambda example, generator: (int(example["input_ids"][0]), generator.random()), 3)
    drawn = list(islice(stream, 40))
    first, second = drawn[:20], drawn[20:]
    assert sorted(number for number, _ in first) == sorted(number for number, _ in second) == list(range(20))
    assert [number for number, _ in first] != [number for number, _ in second]
    assert not {chance for _, chance in first} & {chance for _, chance in second}


def test_masking_follows_berts_rule():
    tokens, special = np.tile(np.arange(5, 105), 2000), np.array([0, 1, 2, 3, 4])
    tokens[::10] = 3
    example = batches.mask_tokens(tokens, np.random.default_rng(0), 0.15, 4, 105, special)
    chosen = example["labels"] != -100
    count = (tokens > 4).sum()
    assert not chosen[tokens <= 4].any()
    assert abs(chosen.sum() / count - 0.15) < 4 * math.sqrt(0.15 * 0.85 / count)
    np.testing.assert_array_equal(example["labels"][chosen], tokens[chosen])
    np.testing.assert_array_equal(example["input_ids"][~chosen], tokens[~chosen])
    is_masked = example["input_ids"][chosen] == 4
    is_kept = example["input_ids"][chosen] == tokens[chosen]
    for share, wanted in ((is_masked.mean(), 0.8 + 0.1 / 105), (is_kept.mean(), 0.1 + 0.1 / 105)):
        assert abs(share - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / chosen.sum())


def test_even_a_short_text_has_a_masked_token():
    for seed in range(50):
        example = batches.mask_tokens(np.array([2, 7, 3]), np.random.default_rng(seed), 0.15, 4, 10, np.arange(5))
        assert example["labels"].tolist() == [-100, 7, -100]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.floats(0.05, 0.6), st.floats(1.0, 8.0), st.integers(0, 1000))
def test_masked_spans_leave_the_rest_in_order(length, share, mean, seed):
    special = np.array([0, 1, 2, 3, 4])
    ids = np.arange(10, 10 + length)
    ids[::17] = 3
    source = batches.mask_spans(ids, np.random.default_rng(seed), share, mean, 4, special).tolist()
    hidden = Counter(ids.tolist()) - Counter(source)
    assert [token for token in source if token != 4] == [
        token for token in ids.tolist() if token not in hidden or token == 3
    ]
    assert source.count(3) == ids.tolist().count(3)
    assert source.count(4) <= sum(hidden.values()) <= max(1, round(share * length))
    if length > 40:
        assert sum(hidden.values()) >= 0.7 * round(share * length)


def test_spans_have_the_requested_mean_length():
    ids = np.arange(10, 20_010)
    source = batches.mask_spans(ids, np.random.default_rng(0), 0.3, 3.0, 4, np.arange(5))
    masks = (source == 4).sum()
    hidden = len(ids) - (len(source) - masks)
    assert hidden == round(0.3 * len(ids))
    # spans of length 0 count as 1 and neighbors join, so the mean differs a little
    assert 2.7 < hidden / masks < 4.2


def test_masks_depend_on_seed_epoch_and_example_alone():
    rows = [{"input_ids": list(range(5, 45))} for _ in range(6)]

    def transform(example, generator):
        return batches.mask_tokens(example["input_ids"], generator, 0.3, 4, 45, np.arange(5))

    examples = examples_of(rows, transform, seed=3)
    alone = [examples[index]["input_ids"].tolist() for index in range(6)]
    together = [example["input_ids"].tolist() for example in examples.__getitems__([5, 3, 0])]
    assert together == [alone[5], alone[3], alone[0]]
    assert len({tuple(each) for each in alone}) == 6
    examples.set_epoch(1)
    assert examples[0]["input_ids"].tolist() != alone[0]
    examples.set_epoch(0)
    assert examples[0]["input_ids"].tolist() == alone[0]
    assert examples_of(rows, transform, seed=4)[0]["input_ids"].tolist() != alone[0]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 400), st.integers(1, 32), st.integers(0, 5))
def test_an_epoch_has_full_batches_of_similar_lengths_without_repetition(count, size, epoch):
    lengths = np.random.default_rng(count).integers(1, 1000, count)
    examples = examples_of([{"input_ids": [1], "length": int(length)} for length in lengths])
    examples.set_epoch(epoch)
    order = batches.LengthGroupedSampler(examples, size)
    indices = list(order)
    assert len(indices) == len(order) == count // size * size
    assert len(set(indices)) == len(indices)
    assert list(order) == indices
    if count >= 200 and size == 8:
        waste = sum(
            max(lengths[indices[at : at + size]]) * size - sum(lengths[indices[at : at + size]])
            for at in range(0, len(indices), size)
        )
        assert waste < 0.1 * lengths.sum()


def test_another_epoch_has_another_order_and_other_batches():
    def batches_of(order):
        return {frozenset(order[start : start + 8]) for start in range(0, len(order), 8)}

    examples = examples_of([{"input_ids": [1]}] * 64)
    order = batches.LengthGroupedSampler(examples, 8)
    first = list(order)
    examples.set_epoch(1)
    assert sorted(order) == sorted(first)
    assert list(order) != first
    assert batches_of(list(order)) != batches_of(first)


def test_padding_to_the_longest_and_a_mask_only_where_there_is_padding():
    pad = batches.PaddingCollator(9)
    batch = pad(
        [
            {"input_ids": np.array([1, 2, 3]), "labels": np.array([4])},
            {"input_ids": np.array([5]), "labels": np.array([6, 7])},
        ]
    )
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[1, 2, 3], [5, 9, 9]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[4, -100], [6, 7]],
    }
    batch = pad(
        [{"input_ids": np.array([1, 2]), "labels": np.int64(1)}, {"input_ids": np.array([3, 4]), "labels": np.int64(0)}]
    )
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[1, 2], [3, 4]],
        "labels": [1, 0],
    }


# optimizer


@pytest.mark.parametrize(
    ("projection", "share"), [("linear", 0.1), ("linear", 1.0), ("dynamic", 0.1), ("random", 0.1), ("none", 0.1)]
)
def test_a_learned_E_has_a_smaller_learning_rate(write, tmp_path, projection, share):
    overrides = (f"model.projection={projection}", f"training.projection_rate={share}", "training.learning_rate=0.5")
    sizes = (
        "model.hidden_size=16",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=2",
        "model.intermediate_size=24",
    )
    config = write(SMALL, *sizes, *overrides)
    model = build_model(config, train_tokenizer(TokenizerConfig(kind="bytes"), []), ["a", "b"])
    arguments = TrainingArguments(
        output_dir=str(tmp_path), learning_rate=0.5, weight_decay=0.01, use_cpu=True, report_to=[]
    )
    groups = LinformerTrainer(config=config, keep=1, model=model, args=arguments).create_optimizer().param_groups
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    names = dict(model.named_parameters())
    assert len(rates) == sum(len(group["params"]) for group in groups) == len(names)
    slow = {name for name, parameter in names.items() if rates[id(parameter)] != 0.5}
    assert slow == (
        {name for name in names if ".projection." in name} if projection == "linear" and share != 1 else set()
    )
    assert all(rates[id(names[name])] == pytest.approx(0.05) for name in slow)
    assert len(slow) == (0 if projection != "linear" or share == 1 else 2)


# metrics


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(2, 7), st.integers(0, 99), st.integers(1, 4))
def test_token_metrics_weigh_tokens_not_batches(count, length, vocabulary, seed, pieces):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, length, vocabulary, generator=generator)
    labels = torch.randint(0, vocabulary, (count, length), generator=generator)
    labels[torch.rand(count, length, generator=generator) < 0.4] = -100
    labels[0, 0] = 1
    sums = torch.cat(
        [metrics.token_sums(*pair) for pair in zip(logits.chunk(pieces), labels.chunk(pieces), strict=True)]
    )
    labeled_only = metrics.token_sums(logits[labels != -100], labels)
    torch.testing.assert_close(labeled_only, sums, rtol=1e-6, atol=1e-6)
    found = metrics.token_metrics(sums.numpy())
    loss = functional.cross_entropy(logits.flatten(0, 1).double(), labels.flatten())
    real = labels != -100
    assert found["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((logits.argmax(-1) == labels)[real].double().mean()))
    assert found["tokens"] == int(real.sum())


def test_class_metrics_by_hand():
    logits = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]]))
    labels = np.array([0, 1, 1, 2])
    found = metrics.class_metrics(logits, labels)
    assert found["accuracy"] == 0.75
    # class 0: right once, answered twice, true once: 2/3; class 1: 2·1/(1+2); class 2: 1
    assert found["macro_f1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    assert found["loss"] == pytest.approx(-np.log([0.7, 0.8, 0.3, 0.6]).mean())
    assert metrics.confusion(logits.argmax(1), labels, 3).tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


def test_bleu_is_that_of_the_corpus():
    hypotheses = ["the cat sat on the mat today", "a dog barked at me loudly", "nothing right here"]
    references = ["the cat sat on the mat yesterday", "a dog barked at me", "all of it is wrong"]
    found = metrics.translation_metrics(hypotheses, references)
    assert found["bleu"] == sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert found["bleu"] != sacrebleu.corpus_bleu(hypotheses[:1], [references[:1]]).score
    assert found["chrf"] == sacrebleu.corpus_chrf(hypotheses, [references]).score
    assert "tok:13a" in found["bleu_signature"]
    assert "version:" in found["chrf_signature"]
    assert found["sentences"] == 3


# early stopping and evaluations that are due


class History:
    """The part of TrainerState that the functions use."""

    def __init__(self, losses, step=None, every=10):
        self.log_history = [{"step": every * number, "eval_loss": loss} for number, loss in enumerate(losses, start=1)]
        self.global_step = every * len(losses) if step is None else step
        self.max_steps = 95


@pytest.mark.parametrize(("losses", "count"), [([3], 0), ([3, 2, 1], 0), ([1, 2, 3], 2), ([3, 1, 2, 1], 2)])
def test_patience_counts_from_the_first_best(losses, count):
    arguments = type("Arguments", (), {"metric_for_best_model": "loss", "greater_is_better": False})
    assert evaluations_since_best(History(losses), arguments) == count


@pytest.mark.parametrize(("step", "due"), [(0, False), (20, False), (25, False), (30, True), (95, True)])
def test_an_evaluation_is_due_where_a_checkpoint_has_none(step, due):
    assert evaluation_is_due(History([2, 1], step), 10) is due


# checkpoints


def test_random_states_are_stored_restored_and_preserved():
    def draw():
        return (
            random.random(),
            np.random.rand(),
            np.random.randn(),
            torch.rand(3).tolist(),
            torch.randn(2).tolist(),
            random.gauss(0, 1),
        )

    draw()
    state = json.loads(json.dumps(training_state.random_state()))
    drawn = draw()
    training_state.set_random_state(state)
    with training_state.preserve_rng_state():
        draw()
    assert draw() == drawn


def test_the_optimizer_is_restored_bit_for_bit(tmp_path):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(
            [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[1].parameters()}], lr=1 / 3
        )
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 3))

    def step(model, optimizer, schedule):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        schedule.step()

    model, optimizer, schedule = make()
    for _ in range(3):
        step(model, optimizer, schedule)
    training_state.save_optimizer(tmp_path, optimizer.state_dict(), schedule.state_dict())
    again, other, other_schedule = make()
    again.load_state_dict(model.state_dict())
    states = training_state.load_optimizer(tmp_path)
    other.load_state_dict(states[0])
    other_schedule.load_state_dict(states[1])
    for _ in range(3):
        step(model, optimizer, schedule)
        step(again, other, other_schedule)
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups]
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert mine.detach().numpy().tobytes() == theirs.detach().numpy().tobytes()


def test_a_checkpoint_is_complete_or_absent(tmp_path):
    with checkpoint.atomic_checkpoint(tmp_path / "checkpoint-1") as folder:
        (folder / "a").write_text("1")
        assert checkpoint.checkpoints_in(tmp_path) == []
    assert checkpoint.find_damage(tmp_path / "checkpoint-1") is None
    with (
        pytest.raises(UserError, match=r"last complete checkpoint is .*checkpoint-1.*resume with the same command"),
        checkpoint.atomic_checkpoint(tmp_path / "checkpoint-2"),
    ):
        raise OSError(28, "No space left on device")
    with pytest.raises(ZeroDivisionError), checkpoint.atomic_checkpoint(tmp_path / "checkpoint-3") as folder:
        raise ZeroDivisionError
    assert [path.name for path in checkpoint.checkpoints_in(tmp_path)] == ["checkpoint-1"]


def test_old_checkpoints_are_removed_except_the_best(tmp_path):
    for step in (1, 2, 3, 10, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
    checkpoint.remove_old(tmp_path, 2, tmp_path / "checkpoint-2")
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints_in(tmp_path)] == [2, 10, 20]


def write_checkpoint(folder, step):
    with checkpoint.atomic_checkpoint(folder / f"checkpoint-{step}") as unfinished:
        (unfinished / "weights").write_text(str(step))


def test_checkpoints_newer_than_the_last_intact_one_are_removed(tmp_path):
    for step in (5, 10, 15):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-15" / "weights").write_text("damaged")
    (tmp_path / ".checkpoint-20.unfinished").mkdir()
    last = checkpoint.latest_intact(tmp_path, QUIET)
    assert last == tmp_path / "checkpoint-10"
    checkpoint.remove_newer(tmp_path, last)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-5"]


def test_the_best_checkpoint_is_the_best_intact_one(tmp_path):
    run = RunFolder(tmp_path)
    for step in (5, 10, 15):
        write_checkpoint(run.checkpoints, step)
    history = [{"step": step, "eval_accuracy": value} for step, value in ((5, 0.5), (8, 0.95), (10, 0.9), (15, 0.9))]
    arguments = SimpleNamespace(metric_for_best_model="accuracy", greater_is_better=True)
    trainer = SimpleNamespace(args=arguments, state=SimpleNamespace(log_history=history))

    def best():
        folder, entry = best_checkpoint(trainer, run, QUIET)
        return checkpoint.step_of(folder), entry["eval_accuracy"]

    assert best() == (10, 0.9)  # that of step 8 was removed as old; of equals the first
    (run.checkpoints / "checkpoint-10" / "weights").write_text("damaged")
    assert best() == (15, 0.9)
    for step in (5, 15):
        (run.checkpoints / f"checkpoint-{step}" / "weights").unlink()
    with pytest.raises(UserError, match="has no intact checkpoint"):
        best()


@pytest.mark.parametrize(("greater", "wanted"), [(True, 10), (False, 5)])
def test_the_best_is_the_highest_or_the_lowest(tmp_path, greater, wanted):
    run = RunFolder(tmp_path)
    for step in (5, 10, 15):
        write_checkpoint(run.checkpoints, step)
    history = [{"step": step, "eval_x": value} for step, value in ((5, 0.5), (10, 0.9), (15, 0.7))]
    arguments = SimpleNamespace(metric_for_best_model="x", greater_is_better=greater)
    trainer = SimpleNamespace(args=arguments, state=SimpleNamespace(log_history=history))
    assert checkpoint.step_of(best_checkpoint(trainer, run, QUIET)[0]) == wanted


# the trainer


def test_settings_reach_transformers(write, tmp_path):
    wish = ["training.warmup=0.1", "training.clip=0.5", "training.adam_beta2=0.9", "training.weight_decay=0.3"]
    arguments = training_arguments(write(SMALL, *wish), RunFolder(tmp_path / "run"), 56)
    assert (arguments.warmup_steps, arguments.max_grad_norm) == (6, 0.5)
    assert (arguments.adam_beta2, arguments.weight_decay) == (0.9, 0.3)
    assert not arguments.dataloader_drop_last
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("accuracy", True)
    arguments = training_arguments(write(SMALL, "training.best_by=loss"), RunFolder(tmp_path / "run"), 56)
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("loss", False)


@pytest.fixture
def small_trainer(write, tmp_path):
    """The trainer of a tiny model and forty texts."""

    def make(*overrides):
        (tmp_path / "x.csv").write_text(
            "text,label\n" + "".join(f"a b {number},{number % 2}\n" for number in range(40))
        )
        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        sizes = f"model={json.dumps({**small, 'max_position_embeddings': 8, 'projected_length': 4})}"
        places = [f"data.cache={tmp_path}", f"run={tmp_path / 'run'}", "training.device=cpu"]
        config = write(SMALL.replace("x.csv", str(tmp_path / "x.csv")), sizes, *places, *overrides)
        return make_trainer(config, prepare.prepare(config, QUIET), RunFolder(config.folder))[0]

    return make


def test_evaluation_leaves_the_random_state_unchanged(small_trainer):
    trainer, before = small_trainer(), training_state.random_state()
    trainer.evaluate()
    assert training_state.random_state() == before


def test_runs_with_other_seeds_are_evaluated_on_the_same_masks(quick, tmp_path):
    def pieces(seed):
        config = load_config(quick("masked-lm", tmp_path, seed=seed, run=tmp_path / str(seed)))
        trainer = make_trainer(config, prepare.prepare(config, QUIET), RunFolder(config.folder))[0]
        return (
            [piece["input_ids"].tolist() for piece in rows] for rows in (trainer.train_dataset, trainer.eval_dataset)
        )

    (train, asked), (other_train, other_asked) = pieces(0), pieces(1)
    assert asked == other_asked
    assert train != other_train


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("task", ["causal-lm", "translation", "denoising"])
def test_training_keeps_no_cache_but_the_trained_model_generates_with_one(quick, tmp_path, task, smoothing):
    config = load_config(quick(task, tmp_path, **{"training.label_smoothing": smoothing}))
    trainer = make_trainer(config, prepare.prepare(config, QUIET), RunFolder(config.folder))[0]
    batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])
    _, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True, num_items_in_batch=torch.tensor(1))
    assert outputs.past_key_values is None
    assert trainer.model.config.use_cache
    assert trainer.model.generation_config.use_cache


def test_converting_attention_keeps_the_generation_config():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = LinformerForConditionalGeneration(LinformerConfig(vocab_size=20, **sizes))
    model.generation_config.num_beams = 3
    assert convert_attention(model, {"projection": "dynamic"}).generation_config.num_beams == 3


def test_a_model_with_full_attention_continues_with_a_window():
    """Texts that fit into the window keep their outputs, whatever E is."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = LinformerForMaskedLM(LinformerConfig(vocab_size=20, **sizes, projection="none")).eval()
    changes = {"projection": "linear", "projected_length": 3, "window_length": 8, "global_tokens": 1}
    changed, short, long = convert_attention(model, changes).eval(), torch.arange(16)[None], torch.arange(17)[None]
    torch.testing.assert_close(changed(short).logits, model(short).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(changed(long).logits, model(long).logits, rtol=1e-4, atol=1e-5)
    # and back, also from a window without rows
    only = convert_attention(model, {"projection": "mean", "window_length": 8, "projected_length": 0})
    full = model_settings({"from": "somewhere", "attention": "full"})
    for windowed in (changed, only):
        torch.testing.assert_close(convert_attention(windowed, full).eval()(long).logits, model(long).logits)
    assert convert_attention(changed, {"window_length": 0}).config.global_tokens == 0
    # a new distance bias changes nothing; one of another window keeps the distances that both have
    biased = convert_attention(changed, {"distance_bias": True}).eval()
    torch.testing.assert_close(biased(long).logits, changed(long).logits)
    first = biased.model.layers[0].attention.distance_bias
    torch.nn.init.normal_(first.weight)
    for window in (5, 11):
        other = convert_attention(biased, {"window_length": window}).model.layers[0].attention.distance_bias
        shorter, longer = sorted((first.weight, other.weight), key=len)
        extra = (len(longer) - len(shorter)) // 2
        torch.testing.assert_close(longer[extra:-extra], shorter)
        assert window == 5 or (other.weight[:extra] == 0).all()
    assert convert_attention(biased, {"window_length": 0}).config.distance_bias is False


def test_full_attention_drops_the_window_of_a_configuration():
    window = {"window_length": 8, "global_tokens": 1, "projected_length": [0, 4], "num_hidden_layers": 2}
    window["distance_bias"] = True
    config = resolve_model_config({**window, "attention": "full"})
    assert (config.projection, config.window_length, config.global_tokens) == ("none", 0, 0)
    assert not config.distance_bias
    assert resolve_model_config(window).projected_lengths == [0, 4]


def test_an_evaluation_at_the_start_of_a_resumed_run_may_be_the_best(small_trainer):
    trainer = small_trainer()
    trainer.state.global_step = 8
    trainer.evaluate()
    assert best_evaluation(trainer.state, trainer.args)["step"] == 8


def test_norms_and_biases_do_not_decay(small_trainer):
    trainer = small_trainer("training.weight_decay=0.3")
    trainer.create_optimizer()
    decay = {
        id(parameter): group["weight_decay"]
        for group in trainer.optimizer.param_groups
        for parameter in group["params"]
    }
    for name, parameter in trainer.model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name or name.endswith("bias") else 0.3), name
    assert set(decay.values()) == {0.0, 0.3}


def test_a_directory_with_other_files_is_left_unchanged(tmp_path, write):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("precious")
    with (
        pytest.raises(UserError, match=r"not a run directory: it contains 'precious\.txt'"),
        RunFolder(tmp_path / "mine").locked(),
    ):
        RunFolder(tmp_path / "mine").begin(write(SMALL))
    assert (tmp_path / "mine" / "precious.txt").read_text() == "precious"


def test_a_run_of_another_format_is_named_as_such_before_its_keys_are_read(tmp_path):
    (tmp_path / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("a_key_of_another_version: 1")
    packages = {"linformer-kit": "9.9"}
    (tmp_path / "environment.json").write_text(json.dumps({"run_format": 99, "packages": packages}))
    with pytest.raises(UserError, match=r"written by linformer-kit 9\.9 in format 99"):
        RunFolder(tmp_path).resumable_config  # noqa: B018


# device and precision


@pytest.fixture
def pretend(monkeypatch):
    """Let PyTorch report a GPU, or none, and a CPU with or without instructions for bfloat16."""

    def set_gpu(has_gpu, has_bfloat16=True, cpu_has_bfloat16=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: cpu_has_bfloat16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: has_bfloat16)

    return set_gpu


def hardware(config):
    return config.training.device, config.training.precision


@pytest.mark.parametrize(
    ("gpu", "overrides", "expected"),
    [
        ((False,), (), ("cpu", "float32")),
        ((False, False, True), (), ("cpu", "bfloat16")),
        ((False, False, True), ("training.precision=float32",), ("cpu", "float32")),
        ((True, False, True), (), ("cuda", "float32")),
        ((True, True), (), ("cuda", "bfloat16")),
        ((True, False), (), ("cuda", "float32")),
        ((True, True), ("training.device=cpu",), ("cpu", "float32")),
        ((True, True), ("training.precision=float16",), ("cuda", "float16")),
        ((False,), ("training.precision=bfloat16",), ("cpu", "bfloat16")),
    ],
)
def test_auto_is_resolved_to_a_device_and_a_precision(write, pretend, gpu, overrides, expected):
    pretend(*gpu)
    resolved = resolve_hardware(write(SMALL, *overrides))
    assert hardware(resolved) == expected
    assert resolve_hardware(resolved) == resolved


def test_a_gpu_that_is_missing_is_an_error_for_training_only(write, pretend):
    pretend(False)
    config = write(SMALL, "training.device=cuda")
    with pytest.raises(
        UserError, match=r"training\.device is cuda, but PyTorch finds no GPU; set training\.device=cpu"
    ):
        resolve_hardware(config)
    assert not is_on_gpu(config.training)  # evaluate and predict use the CPU


def test_a_cpu_run_resumed_on_a_gpu_keeps_its_precision_and_says_so(write, pretend):
    pretend(False)
    stored = resolve_hardware(write(SMALL))
    pretend(True)
    resumed = resolve_hardware(write(SMALL), stored)
    assert hardware(resumed) == ("cuda", "float32")
    assert differences(stored, resumed) == []
    assert announced(stored, resumed) == "The run began on cpu and resumes on cuda. It keeps its precision, float32.\n"
    assert announced(resumed, resumed) == ""
    other = resolve_hardware(write(SMALL, "training.precision=bfloat16"), stored)
    assert differences(stored, other) == [("training.precision", "float32", "bfloat16")]


def test_a_float16_run_is_not_resumed_on_a_cpu(write, pretend):
    pretend(True)
    stored = resolve_hardware(write(SMALL, "training.precision=float16"))
    pretend(False)
    with pytest.raises(UserError, match="float16, which needs a GPU"):
        resolve_hardware(write(SMALL), stored)


def test_a_run_that_stored_auto_is_resumed_and_its_precision_recorded(write, pretend, tmp_path):
    pretend(False)
    run = RunFolder(tmp_path / "run")
    with run.locked():
        run.begin(write(SMALL))  # as older versions did
        assert run.resumable_config is None
        write_checkpoint(run.checkpoints, 5)
        stored = run.resumable_config
        assert hardware(stored) == ("auto", "auto")
        config = resolve_hardware(write(SMALL), stored)
        run.begin(config)
    assert "stored training.precision=auto. The run resumes on cpu in float32." in announced(stored, config)
    assert hardware(stored_config(run.folder)) == ("cpu", "float32")
    pretend(True)
    assert hardware(resolve_hardware(write(SMALL), run.resumable_config)) == ("cuda", "float32")


def announced(before, now):
    console = Console(file=io.StringIO(), width=200)
    announce_hardware_change(before, now, console)
    return console.file.getvalue()


# the estimate


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: Error code 12"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 bytes."),
        MemoryError(),
    ],
    ids=["GPU", "CPU", "Windows", "Python"],
)
def test_a_lack_of_memory_in_the_estimate_does_not_end_the_run(small_trainer, monkeypatch, error):
    trainer = small_trainer()
    prepared = prepare.prepare(trainer.config, QUIET)
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(announce, "estimate", lambda *_: raise_(error))
    announce.announce(trainer, prepared, trainer.config, None, console)
    assert re.search(r"memory +more than is available", console.file.getvalue())
    assert is_out_of_memory(error)
    other = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    monkeypatch.setattr(announce, "estimate", lambda *_: raise_(other))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        announce.announce(trainer, prepared, trainer.config, None, console)


def raise_(error):
    raise error


def count_tensors():
    gc.collect()
    return sum(type(each) is torch.Tensor for each in gc.get_objects())


def test_the_estimate_counts_what_autograd_keeps_and_leaves_nothing_behind():
    config = LinformerConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        projected_length=16,
    )
    model = LinformerForSequenceClassification(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def batch(size):
        return {"input_ids": torch.randint(1, 50, (size, 128)), "labels": torch.zeros(size, dtype=torch.long)}

    small, large = batch(4), batch(8)
    state, tensors = torch.get_rng_state(), count_tensors()
    found = [estimate(model, one, small, 1) for one in (small, large)]
    assert count_tensors() == tensors  # no graph outlives the estimate
    assert torch.equal(torch.get_rng_state(), state)
    weights = 4 * 4 * sum(parameter.numel() for parameter in model.parameters())
    kept = [each.bytes - weights for each in found]
    assert kept[0] > 4 * 128 * 32 * 4  # at least the hidden states
    assert kept[1] == pytest.approx(2 * kept[0], rel=0.1)
    assert found[0].seconds > 0
    assert estimate(model, small, small, 3).seconds > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# memory between steps


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only for glibc")
@pytest.mark.parametrize(
    ("share", "is_returned"), [(0.5, False), (1.5, True)], ids=["below-the-limit", "above-the-limit"]
)
def test_freed_memory_above_the_limit_is_returned_after_a_step(small_trainer, share, is_returned):
    trainer = small_trainer()
    flow = FlowCallback(trainer.config, evaluate_every=10)

    def end_step():
        flow.on_step_end(trainer.args, trainer.state, trainer.control)
        return status_bytes("RssAnon")

    before = end_step()
    blocks = [np.ones(2**13) for _ in range(int(share * FREE_MEMORY / 2**16))]
    blocks = blocks[31::32]  # the rest is free, but lies between these
    held = (end_step() - before) / (share * FREE_MEMORY)
    assert held < 0.2 if is_returned else held > 0.8
    assert len(blocks) > 1
