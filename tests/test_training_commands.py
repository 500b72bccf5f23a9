"""The commands end to end: each task is prepared, trained and evaluated; outputs and metrics are checked independently.

One small run per task is trained by the command in a separate process. Tests that only inspect a run use this process,
because starting another one takes seconds.
"""

import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import sacrebleu
import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional
from training_zoo import (
    QUIET,
    Trained,
    answers,
    classification_rows,
    command,
    decode_greedily,
    linformer,
    pair_rows,
    read_json,
    read_lines,
    refused,
    rows_of,
    running_lines,
    sentence_pairs,
    write_jsonl,
    write_lines,
    yaml_for,
)
from transformers import AutoTokenizer

from linformer_kit import __version__
from linformer_kit.training.batches import mask_spans, mask_tokens
from linformer_kit.training.checkpoint import checkpoints_in, find_damage, step_of
from linformer_kit.training.config import config_from_dict, load_config
from linformer_kit.training.prepare import prepare
from linformer_kit.training.run import RunFolder

pytestmark = pytest.mark.usefixtures("restore_global_state")

# metric, its value without looking at the input, and what the model must reach; it reaches 0.95 and more
EXPECTED_METRICS = {
    "classification": ("accuracy", 0.5, 0.85),
    "pairs": ("accuracy", 0.5, 0.75),
    "masked-lm": ("accuracy", 0.1, 0.75),
    "causal-lm": ("accuracy", 0.1, 0.9),
    "translation": ("bleu", 3, 50),
    "denoising": ("accuracy", 0.1, 0.9),
}


# a run and its directory


@pytest.mark.slow
def test_the_run_directory_is_complete(trained):
    run = RunFolder(trained.run)
    # the complete configuration, with defaults and with resolved device and precision
    stored = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    wanted = load_config(trained.yaml)
    resolved = replace(wanted, training=replace(wanted.training, precision="float32", device="cpu"))
    assert config_from_dict(stored) == load_config(run.config) == resolved
    assert stored["training"]["schedule"] == "cosine"
    assert stored["data"]["validation_share"] == 0.05
    environment = read_json(run.environment)
    assert environment["packages"]["linformer-kit"] == __version__
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["command"] == f"linformer train {trained.yaml}"
    # checkpoints are intact; the best one is kept in addition to the newest
    result = read_json(run.result)
    kept = checkpoints_in(run.checkpoints)
    assert not any(find_damage(path) for path in kept)
    assert step_of(kept[-1]) == result["steps"] == load_config(trained.yaml).training.steps
    assert result["parameters"] == sum(weight.numel() for weight in trained.load()[0].parameters())
    best = run.checkpoints / f"checkpoint-{result['best_step']}"
    assert best in kept
    saved, chosen = load_file(run.model / "model.safetensors"), load_file(best / "model.safetensors")
    assert saved.keys() == chosen.keys()
    assert all(torch.equal(saved[name], chosen[name]) for name in saved)
    assert not list(run.folder.rglob("*.bin")) + list(run.folder.rglob("*.pt")) + list(run.folder.rglob("*.unfinished"))
    assert AutoTokenizer.from_pretrained(run.tokenizer).get_vocab() == trained.load()[1].get_vocab()
    assert run.curves.read_bytes().startswith(b"\x89PNG")
    assert f"Next: linformer evaluate {trained.run}, linformer predict {trained.run} TEXT" in trained.printed


@pytest.mark.slow
def test_metrics_are_logged(trained):
    lines = read_lines(trained.run / "metrics.jsonl")
    training = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "validation_loss" in line]
    result, settings = read_json(trained.run / "result.json"), load_config(trained.yaml).training
    assert [line["step"] for line in evaluations] == [settings.evaluate_every * count for count in (1, 2, 3)]
    assert {line["step"] for line in training} >= set(range(10, settings.steps + 1, 10))
    assert training[-1]["loss"] < 0.6 * training[0]["loss"]
    assert all(line["tokens_per_second"] > 0 and line["grad_norm"] > 0 for line in training)
    assert training[-1]["tokens"] == result["tokens"]
    # the best evaluation is the first with the best value; the result has its metrics
    key, choose = ("validation_accuracy", max) if "validation_macro_f1" in evaluations[0] else ("validation_loss", min)
    best = choose(evaluations, key=lambda line: line[key])
    assert best["step"] == result["best_step"]
    for name, value in best.items():
        if name.startswith("validation_"):
            assert result[name] == value
    assert f"Best at step {best['step']}: validation loss {best['validation_loss']:.4f}" in trained.printed


@pytest.mark.slow
def test_the_model_has_learned(trained, tmp_path):
    metric, chance, enough = EXPECTED_METRICS[trained.task]
    run = trained.copy(tmp_path)
    printed = rows_of(command("evaluate", run).stdout)
    stored = read_json(run / "evaluation.json")
    assert chance < enough < stored[metric]
    assert stored["split"] == "test"
    assert stored["data"] == str(trained.data)
    assert float(printed[metric]) == pytest.approx(stored[metric], abs=1e-4)


@pytest.mark.slow
def test_evaluate_agrees_with_training_on_the_validation_split(trained, tmp_path):
    """So model/ is the best checkpoint, and `evaluate` agrees with the evaluation during training."""
    run = trained.copy(tmp_path)
    command("evaluate", run, "--split", "validation")
    stored, result = read_json(run / "evaluation.json"), read_json(run / "result.json")
    assert stored["split"] == "validation"
    compared = {
        name.removeprefix("validation_"): value for name, value in result.items() if name.startswith("validation_")
    }
    assert len(compared) > 2
    for name, value in compared.items():
        assert stored[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5)), name


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "translation"])
def test_prepare_prints_a_summary_and_train_reuses_its_data(task, tmp_path):
    path = yaml_for(task, tmp_path, **{"training.steps": 2, "training.evaluate_every": None})
    printed = linformer("prepare", path, cwd=tmp_path, real=task == "translation").stdout
    config = load_config(path)
    prepared = prepare(config, QUIET)
    for role, rows in {"train": 400, "validation": 45, "test": 37}.items():
        lengths = prepared.splits[role]["length"]
        words = [role, rows, rows, sum(lengths), round(sum(lengths) / rows), max(lengths), 0]
        assert re.search(r"\s+│\s+".join(f"{word:,}" if isinstance(word, int) else word for word in words), printed)
    assert not (tmp_path / "run").exists()
    assert (prepared.folder / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert f"Prepared data in {prepared.folder}" in printed
    # the histogram counts each text of the training split once
    bars = re.findall(r"–\s+[\d,]+\s+█*\s*([\d,]+)$", printed, flags=re.MULTILINE)
    assert sum(int(bar.replace(",", "")) for bar in bars) == 400
    assert f"Prepared data found in {prepared.folder}" in command("train", path).stdout


@pytest.mark.slow
def test_a_finished_run_is_left_unchanged(trained_run):
    trained = trained_run("classification")

    def files():
        return {
            path: path.stat().st_mtime_ns for path in trained.run.rglob("*") if path.is_file() and path.name != ".lock"
        }

    before = files()
    for source in (trained.yaml, trained.run / "config.yaml"):
        assert command("train", source).stdout == f"The run in {trained.run} is finished.\n"
    said = refused("train", trained.yaml, "training.learning_rate=1e-3", "seed=1")
    assert said == (
        f"{trained.run} contains a run with seed=0, but seed=1 is requested (and 1 more difference); "
        "choose another directory with run=DIRECTORY, or delete the old one"
    )
    assert files() == before


@pytest.mark.slow
def test_a_run_may_be_moved_and_its_checkpoints_removed(trained_run, tmp_path):
    trained = trained_run("classification")
    run = trained.copy(tmp_path)
    shutil.rmtree(run / "checkpoints")
    assert answers(run, "a good road") == answers(trained.run, "a good road")
    # the configuration is still checked
    assert "contains a run with seed=0, but seed=1" in refused("train", run / "config.yaml", f"run={run}", "seed=1")


# evaluation, computed independently


def wrongly_labeled(rows):
    """Every third label is wrong, so that no metric is perfect."""
    other = {"pos": "neg", "neg": "pos"}
    return [
        {**row, "label": other[row["label"]] if number % 3 == 0 else row["label"]} for number, row in enumerate(rows)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "count"), [("classification", 37), ("classification", 1), ("classification", 32), ("pairs", 19)]
)
def test_every_example_is_classified_and_counted_once(trained_run, tmp_path, task, count):
    trained = trained_run(task)
    rows = wrongly_labeled((pair_rows if task == "pairs" else classification_rows)(count, seed=7))
    run = trained.copy(tmp_path)
    command("evaluate", run, "--data", write_jsonl(tmp_path / "others.jsonl", rows))
    stored = read_json(run / "evaluation.json")
    model, tokenizer = trained.load()
    matrix, loss = np.zeros((2, 2), int), 0.0
    for row in rows:  # one at a time: no batches, no padding
        texts = (row["premise"], row["hypothesis"]) if task == "pairs" else (row["text"],)
        scores = model(**tokenizer(*texts, return_tensors="pt")).logits[0].log_softmax(-1)
        label = model.config.label2id[row["label"]]
        matrix[label, scores.argmax()] += 1
        loss -= scores[label].item()
    assert stored["confusion"] == matrix.tolist()
    assert stored["labels"] == [model.config.id2label[0], model.config.id2label[1]] == ["neg", "pos"]
    assert stored["examples"] == stored["rows"] == matrix.sum() == count
    assert stored["accuracy"] == pytest.approx(np.trace(matrix) / count)
    assert stored["loss"] == pytest.approx(loss / count, rel=1e-4)
    assert stored["split"] is None
    assert stored["data"] == str(tmp_path / "others.jsonl")


def blocks_of(path, tokenizer, length=24):
    """The tokens of a text in blocks; each line ends with an end token."""
    tokens = []
    for line in filter(None, path.read_text(encoding="utf-8").splitlines()):
        tokens += [*tokenizer(line, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return [np.array(tokens[start : start + length]) for start in range(0, len(tokens), length)]


def asked_and_wanted(task, block, number, tokenizer):
    """The inputs of the model for a block and the expected token at each position; None without a loss."""
    special, generator = np.array(tokenizer.all_special_ids), np.random.default_rng((0, 0, number))
    if task == "causal-lm":
        return {"input_ids": block[:-1]}, block[1:].tolist()
    if task == "masked-lm":
        example = mask_tokens(block, generator, 0.15, tokenizer.mask_token_id, len(tokenizer), special)
        return {"input_ids": example["input_ids"]}, [
            None if label == -100 else label for label in example["labels"].tolist()
        ]
    source = mask_spans(block, generator, 0.15, 3.0, tokenizer.mask_token_id, special)
    return {"input_ids": source, "decoder_input_ids": np.array([tokenizer.bos_token_id, *block[:-1]])}, block.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["masked-lm", "causal-lm", "denoising"])
def test_perplexity_is_that_of_a_plain_loop(trained_run, tmp_path, task):
    trained = trained_run(task)
    other = write_lines(tmp_path / "other.txt", [*running_lines(20, seed=8), "ten one ten one nine", "", "two two two"])
    model, tokenizer = trained.load()
    loss, tokens, right = 0.0, 0, 0
    for number, block in enumerate(blocks_of(other, tokenizer)):
        inputs, wanted = asked_and_wanted(task, block, number, tokenizer)
        scores = (
            model(**{name: torch.tensor(ids)[None] for name, ids in inputs.items()}).logits[0].double().log_softmax(-1)
        )
        for place, token in enumerate(wanted):
            if token is not None:
                loss, tokens, right = (
                    loss - scores[place, token].item(),
                    tokens + 1,
                    right + int(scores[place].argmax() == token),
                )
    run = trained.copy(tmp_path)
    command("evaluate", run, "--data", other)
    stored = read_json(run / "evaluation.json")
    assert stored["tokens"] == tokens
    assert stored["accuracy"] == pytest.approx(right / tokens)
    assert stored["loss"] == pytest.approx(loss / tokens, rel=1e-4)
    assert stored["perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-4)
    assert 1.01 < stored["perplexity"] < 100


@pytest.mark.slow
def test_bleu_is_that_of_sacrebleu_and_translations_are_stored(trained_run, tmp_path):
    trained = trained_run("translation")
    pairs = sentence_pairs(37, seed=9)
    # some references match no translation, so that the score is not 100
    pairs = [
        (source, "ganz anders , aber gut" if number % 4 == 0 else target)
        for number, (source, target) in enumerate(pairs)
    ]
    # sources of different lengths are translated in another order
    pairs = [(source + " again" * (number % 3 == 1), target) for number, (source, target) in enumerate(pairs)]
    other = write_lines(tmp_path / "other.tsv", ["source\ttarget", *map("\t".join, pairs)])
    run = trained.copy(tmp_path)
    printed = rows_of(linformer("evaluate", run, "--data", other, cwd=tmp_path, real=True).stdout)
    stored, lines = read_json(run / "evaluation.json"), read_lines(run / "translations.jsonl")
    assert [(line["source"], line["reference"]) for line in lines] == pairs
    hypotheses = [line["hypothesis"] for line in lines]
    scored = sacrebleu.corpus_bleu(hypotheses, [[target for _, target in pairs]])
    assert 20 < scored.score < 90
    assert stored["bleu"] == pytest.approx(scored.score)
    assert stored["chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [[target for _, target in pairs]]).score)
    assert float(printed["bleu"]) == pytest.approx(scored.score, abs=1e-4)
    assert stored["sentences"] == stored["rows"] == 37
    assert stored["bleu_signature"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    # the loss and the translations, one sentence at a time
    model, tokenizer = trained.load()
    loss, tokens = 0.0, 0
    for (source, target), hypothesis in zip(pairs, hypotheses, strict=True):
        given, wanted = (
            [*tokenizer(text, add_special_tokens=False)["input_ids"], 3] for text in (source, target)
        )  # 3 is </s>
        encoded = torch.tensor([given])
        scores = model(input_ids=encoded, decoder_input_ids=torch.tensor([[2, *wanted[:-1]]])).logits[0]  # 2 is <s>
        loss += functional.cross_entropy(scores.double(), torch.tensor(wanted), reduction="sum").item()
        tokens += len(wanted)
        assert decode_greedily(model, tokenizer, encoded) == hypothesis
    assert stored["tokens"] == tokens
    assert stored["perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["pairs", "masked-lm", "translation"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_metrics_do_not_depend_on_the_batch_size(trained_run, tmp_path, task, size):
    run = trained_run(task).copy(tmp_path)
    command("evaluate", run)
    before = read_json(run / "evaluation.json")
    stored = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    stored["training"]["evaluation_batch_size"] = size
    (run / "config.yaml").write_text(yaml.safe_dump(stored), encoding="utf-8")
    command("evaluate", run)
    after = read_json(run / "evaluation.json")
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert after[name] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), name


@pytest.mark.slow
def test_beam_search_differs_from_greedy_decoding(tmp_path, quick):
    command(
        "train", quick("translation", tmp_path, **{"training.steps": 40})
    )  # so few that there is something to choose from
    run, hypotheses = tmp_path / "run", {}
    for beams in (1, 4):
        command("evaluate", run, "--beams", beams)
        assert read_json(run / "evaluation.json")["beams"] == beams
        hypotheses[beams] = [line["hypothesis"] for line in read_lines(run / "translations.jsonl")]
    assert hypotheses[1] != hypotheses[4]
    model, tokenizer = Trained("translation", tmp_path, tmp_path / "translation.yaml", "").load()
    for source, found in zip([source for source, _ in sentence_pairs(37, seed=2)], hypotheses[4], strict=True):
        ids = torch.tensor([[*tokenizer(source, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]])
        wanted = model.generate(ids, num_beams=4, do_sample=False, max_new_tokens=23)
        assert tokenizer.decode(wanted[0], skip_special_tokens=True).strip() == found
        (answer,) = answers(run, source, "--beams", 4)
        assert answer["translation"] == found


@pytest.mark.slow
def test_evaluate_without_a_test_split_names_those_that_are_there(tmp_path, quick):
    lines = write_lines(tmp_path / "text.txt", running_lines(60))
    path = quick("causal-lm", tmp_path, **{"data.path": lines, "data.validation_share": 0.5, "training.steps": 1})
    command("train", path)
    run = tmp_path / "run"
    said = "the data of the run has no test split; choose one of train, validation with --split, or a file with --data"
    assert refused("evaluate", run) == said
    assert "has no tset split" in refused("evaluate", run, "--split", "tset")
    assert not (run / "evaluation.json").exists()
    for split in ("train", "validation"):
        command("evaluate", run, "--split", split)
    assert "--data is 'nowhere.txt': there is no such file" in refused("evaluate", run, "--data", "nowhere.txt")
    write_lines(tmp_path / "blank.txt", ["", " "])
    assert refused("evaluate", run, "--data", tmp_path / "blank.txt") == f"{tmp_path / 'blank.txt'} contains no text"
    # other text gives another tokenizer, which does not fit the model
    write_lines(lines, ["other words", *running_lines(60)])
    assert "has changed since the run was trained" in refused("evaluate", run, "--split", "validation")


@pytest.mark.slow
def test_evaluate_detects_other_examples_of_the_same_tokens(tmp_path, quick):
    lines = write_lines(tmp_path / "text.txt", running_lines(60))
    settings = {"data.path": lines, "data.validation_share": 0.5, "training.steps": 1, "tokenizer": {"kind": "bytes"}}
    command("train", quick("causal-lm", tmp_path, **settings))
    command("evaluate", tmp_path / "run", "--split", "validation")
    write_lines(lines, running_lines(60)[::-1])
    assert "has changed since the run was trained" in refused("evaluate", tmp_path / "run", "--split", "validation")
