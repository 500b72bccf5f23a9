"""The commands from end to end: every task prepared, trained, evaluated and asked; every format read; every mistake answered.

One small run per task is trained by the real command in a process of its own. What only looks at such a run, or goes wrong
before anything is learnt, runs in this process: a process of its own needs seconds to import what it needs.
"""

import csv
import gc
import gzip
import json
import math
import os
import re
import resource
import shutil
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pytest
import sacrebleu
import torch
import transformers
import yaml
from accelerate.state import AcceleratorState
from filelock import FileLock
from pyarrow import parquet
from rich.console import Console
from safetensors.torch import load_file
from torch.nn import functional
from training_zoo import (
    NUMBERS,
    TASKS,
    classification_rows,
    linformer,
    pair_rows,
    running_lines,
    sentence_pairs,
    write_data,
    write_jsonl,
    write_lines,
    yaml_for,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from typer.testing import CliRunner

from linformer_kit import __version__
from linformer_kit.cli import app
from linformer_kit.training.batches import masked, with_masked_spans
from linformer_kit.training.checkpoint import checkpoints_in, damage, step_of
from linformer_kit.training.config import from_tree, load_config
from linformer_kit.training.data import read_splits
from linformer_kit.training.prepare import classified_texts, ended, few_at_a_time, prepare
from linformer_kit.training.run import RunFolder
from linformer_kit.training.train import make_trainer

QUIET = Console(quiet=True)
AUTO_CLASSES = {
    "classification": AutoModelForSequenceClassification,
    "pairs": AutoModelForSequenceClassification,
    "masked-lm": AutoModelForMaskedLM,
    "causal-lm": AutoModelForCausalLM,
    "translation": AutoModelForSeq2SeqLM,
    "denoising": AutoModelForSeq2SeqLM,
}
# chance, or the best that can be had without looking at the input, and what the model must reach; it reaches 0.95 and more
LEARNT = {
    "classification": ("accuracy", 0.5, 0.85),
    "pairs": ("accuracy", 0.5, 0.75),
    "masked-lm": ("accuracy", 0.1, 0.75),
    "causal-lm": ("accuracy", 0.1, 0.9),
    "translation": ("bleu", 3, 50),
    "denoising": ("accuracy", 0.1, 0.9),
}


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind():
    """What a command sets for its process is set back: other tests share this one."""
    environment, threads, level = dict(os.environ), torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "300"
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()
    datasets.enable_progress_bars()
    AcceleratorState._reset_state(reset_partial_state=True)


class Trained(NamedTuple):
    """A run that `linformer train` has made, with what it printed."""

    task: str
    folder: Path
    yaml: Path
    printed: str

    @property
    def run(self):
        return self.folder / "run"

    @property
    def data(self):
        return self.folder / f"{self.task} data"

    def copy(self, folder):
        """The run again, for tests that write into it."""
        return Path(shutil.copytree(self.run, folder / "run"))

    def load(self):
        """Its model and tokenizer, by transformers alone."""
        tokenizer = AutoTokenizer.from_pretrained(self.run / "model")
        return AUTO_CLASSES[self.task].from_pretrained(self.run / "model").eval(), tokenizer


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """The run of a task, trained when it is first asked for; the processes of xdist share it."""
    root = tmp_path_factory.getbasetemp()
    root = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "trained"
    root.mkdir(exist_ok=True)

    def train(task):
        folder = root / task
        with FileLock(root / f"{task}.lock"):
            if not (folder / "printed.txt").exists():
                shutil.rmtree(folder, ignore_errors=True)
                path = yaml_for(task, folder)
                (folder / "printed.txt").write_text(linformer("train", path, cwd=folder).stdout, encoding="utf-8")
        return Trained(task, folder, folder / f"{task}.yaml", (folder / "printed.txt").read_text(encoding="utf-8"))

    return train


@pytest.fixture(params=TASKS)
def trained(request, trained_run):
    return trained_run(request.param)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """YAML of a short training, with data and cache that all of them share."""
    shared = tmp_path_factory.mktemp("quick")

    def write(task, folder, **overrides):
        if not (shared / task).exists():
            write_data(task, shared / task)
        few = {"training.steps": 4, "training.evaluate_every": None, "data.path": shared / task, "data.cache": shared / "cache"}
        return yaml_for(task, folder, **{**few, **overrides})

    return write


def command(*args, input=None):
    """A command in this process, which must end well."""
    result = CliRunner().invoke(app, list(map(str, args)), input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.stderr
    return result


def refused(*args, input=None):
    """What a command says before it ends with exit code 2: one line."""
    result = CliRunner().invoke(app, list(map(str, args)), input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 2, result.stdout
    return the_error(result.stderr)


def the_error(stderr):
    """The one line of an error; before it may stand what was being done."""
    doing = r"(?:(?:Prepared data found|Reading the data|Training a tokenizer|Tokenizing) [^\n]+\n)*"
    found = re.fullmatch(rf"{doing}Error: ([^\n]+)\n", stderr)
    assert found, stderr
    return found.group(1)


def answers(*args, **options):
    """The lines of JSON that `linformer predict` writes."""
    return [json.loads(line) for line in command("predict", *args, "--json", **options).stdout.split("\n")[:-1]]


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows_of(table):
    """The cells of a table without lines, by their first column."""
    return dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in table.splitlines() if re.search(r"\S\s{2,}\S", line))


# a run and its folder


@pytest.mark.slow
def test_the_folder_of_a_run_holds_everything(trained):
    run = RunFolder(trained.run)
    # everything that was decided, the defaults included, and readable again
    stored = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    assert from_tree(stored) == load_config(run.config) == load_config(trained.yaml)
    assert stored["training"]["schedule"] == "cosine"
    assert stored["data"]["validation_share"] == 0.05
    environment = read_json(run.environment)
    assert environment["packages"]["linformer-kit"] == __version__
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["command"] == f"linformer train {trained.yaml}"
    # checkpoints are whole; the best one stays beside the newest
    result = read_json(run.result)
    kept = checkpoints_in(run.checkpoints)
    assert not any(damage(path) for path in kept)
    assert step_of(kept[-1]) == result["steps"] == load_config(trained.yaml).training.steps
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
def test_metrics_tell_how_it_went(trained):
    lines = read_lines(trained.run / "metrics.jsonl")
    training = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "validation_loss" in line]
    result, settings = read_json(trained.run / "result.json"), load_config(trained.yaml).training
    assert [line["step"] for line in evaluations] == [settings.evaluate_every * count for count in (1, 2, 3)]
    assert {line["step"] for line in training} >= set(range(10, settings.steps + 1, 10))
    assert training[-1]["loss"] < 0.6 * training[0]["loss"]
    assert all(line["tokens_per_second"] > 0 and line["grad_norm"] > 0 for line in training)
    assert training[-1]["tokens"] == result["tokens"]
    # the best is the first of those with the best value, and its metrics are the run's
    key, choose = ("validation_accuracy", max) if "validation_macro_f1" in evaluations[0] else ("validation_loss", min)
    best = choose(evaluations, key=lambda line: line[key])
    assert best["step"] == result["best_step"]
    for name, value in best.items():
        if name.startswith("validation_"):
            assert result[name] == value
    assert f"Best at step {best['step']}: validation loss {best['validation_loss']:.4f}" in trained.printed


@pytest.mark.slow
def test_it_has_learnt(trained, tmp_path):
    metric, chance, enough = LEARNT[trained.task]
    run = trained.copy(tmp_path)
    printed = rows_of(command("evaluate", run).stdout)
    stored = read_json(run / "evaluation.json")
    assert chance < enough < stored[metric]
    assert stored["split"] == "test"
    assert stored["data"] == str(trained.data)
    assert float(printed[metric]) == pytest.approx(stored[metric], abs=1e-4)


@pytest.mark.slow
def test_the_validation_split_gives_what_training_has_found(trained, tmp_path):
    """So model/ is the best checkpoint, and evaluating is the same wherever it happens."""
    run = trained.copy(tmp_path)
    command("evaluate", run, "--split", "validation")
    stored, result = read_json(run / "evaluation.json"), read_json(run / "result.json")
    assert stored["split"] == "validation"
    compared = {name.removeprefix("validation_"): value for name, value in result.items() if name.startswith("validation_")}
    assert len(compared) > 2
    for name, value in compared.items():
        assert stored[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5)), name


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "translation"])
def test_prepare_tells_what_there_is_and_train_finds_it(task, tmp_path):
    path = yaml_for(task, tmp_path, **{"training.steps": 2, "training.evaluate_every": None})
    printed = linformer("prepare", path, cwd=tmp_path).stdout
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
def test_a_finished_run_says_so_and_stays_as_it_is(trained_run):
    trained = trained_run("classification")
    files = {path: path.stat().st_mtime_ns for path in trained.run.rglob("*") if path.is_file() and path.name != ".lock"}
    for source in (trained.yaml, trained.run / "config.yaml"):
        assert command("train", source).stdout == f"The run in {trained.run} is finished.\n"
    assert files == {path: path.stat().st_mtime_ns for path in files}
    said = refused("train", trained.yaml, "training.learning_rate=1e-3", "seed=1")
    assert said == (
        f"{trained.run} holds a run with seed=0, now seed=1 is wanted and 1 more differences; "
        "give run=ANOTHER_FOLDER, or remove that one"
    )


@pytest.mark.slow
def test_a_run_may_be_moved_and_its_checkpoints_removed(trained_run, tmp_path):
    trained = trained_run("classification")
    run = trained.copy(tmp_path)
    shutil.rmtree(run / "checkpoints")
    assert answers(run, "a good road") == answers(trained.run, "a good road")
    # what was learnt still belongs to its configuration
    assert "holds a run with seed=0, now seed=1" in refused("train", run / "config.yaml", f"run={run}", "seed=1")


# evaluation, counted again


def labelled_wrongly(rows):
    """Every third label is the other one, so that no metric is perfect."""
    other = {"pos": "neg", "neg": "pos"}
    return [{**row, "label": other[row["label"]] if number % 3 == 0 else row["label"]} for number, row in enumerate(rows)]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "count"), [("classification", 37), ("classification", 1), ("classification", 32), ("pairs", 19)])
def test_every_example_is_classified_and_counted_once(trained_run, tmp_path, task, count):
    trained = trained_run(task)
    rows = labelled_wrongly((pair_rows if task == "pairs" else classification_rows)(count, seed=7))
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
    """The tokens of a text, line after line with an end behind each, in pieces."""
    tokens = []
    for line in filter(None, path.read_text(encoding="utf-8").splitlines()):
        tokens += [*tokenizer(line, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return [np.array(tokens[start : start + length]) for start in range(0, len(tokens), length)]


def asked_and_wanted(task, block, number, tokenizer):
    """What the model gets of a block, and what it should say at each place; None where nothing is asked."""
    special, generator = np.array(tokenizer.all_special_ids), np.random.default_rng((0, 0, number))
    if task == "causal-lm":
        return {"input_ids": block[:-1]}, block[1:].tolist()
    if task == "masked-lm":
        example = masked(block, generator, 0.15, tokenizer.mask_token_id, len(tokenizer), special)
        return {"input_ids": example["input_ids"]}, [None if label == -100 else label for label in example["labels"].tolist()]
    source = with_masked_spans(block, generator, 0.15, 3.0, tokenizer.mask_token_id, special)
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
        scores = model(**{name: torch.tensor(ids)[None] for name, ids in inputs.items()}).logits[0].double().log_softmax(-1)
        for place, token in enumerate(wanted):
            if token is not None:
                loss, tokens, right = loss - scores[place, token].item(), tokens + 1, right + int(scores[place].argmax() == token)
    run = trained.copy(tmp_path)
    command("evaluate", run, "--data", other)
    stored = read_json(run / "evaluation.json")
    assert stored["tokens"] == tokens
    assert stored["accuracy"] == pytest.approx(right / tokens)
    assert stored["loss"] == pytest.approx(loss / tokens, rel=1e-4)
    assert stored["perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-4)
    assert 1.01 < stored["perplexity"] < 100


@pytest.mark.slow
def test_bleu_is_sacrebleus_and_translations_stand_beside_their_references(trained_run, tmp_path):
    trained = trained_run("translation")
    pairs = sentence_pairs(37, seed=9)
    # references that no translation is like, so that the score is not simply 100
    pairs = [(source, "ganz anders , aber gut" if number % 4 == 0 else target) for number, (source, target) in enumerate(pairs)]
    # and sources of different lengths, which are translated in another order
    pairs = [(source + " again" * (number % 3 == 1), target) for number, (source, target) in enumerate(pairs)]
    other = write_lines(tmp_path / "other.tsv", ["source\ttarget", *map("\t".join, pairs)])
    run = trained.copy(tmp_path)
    printed = rows_of(linformer("evaluate", run, "--data", other, cwd=tmp_path).stdout)
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
    # the loss of the references, and the translations themselves, one sentence at a time
    model, tokenizer = trained.load()
    loss, tokens = 0.0, 0
    for (source, target), hypothesis in zip(pairs, hypotheses, strict=True):
        given, wanted = ([*tokenizer(text, add_special_tokens=False)["input_ids"], 3] for text in (source, target))  # 3 is </s>
        encoded = torch.tensor([given])
        scores = model(input_ids=encoded, decoder_input_ids=torch.tensor([[2, *wanted[:-1]]])).logits[0]  # 2 is <s>
        loss += functional.cross_entropy(scores.double(), torch.tensor(wanted), reduction="sum").item()
        tokens += len(wanted)
        assert greedily(model, tokenizer, encoded) == hypothesis
    assert stored["tokens"] == tokens
    assert stored["perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-4)


def greedily(model, tokenizer, source, most=30):
    """The likeliest token each time, without a cache and without `generate`."""
    target = [tokenizer.bos_token_id]
    while len(target) < most and (len(target) == 1 or target[-1] != tokenizer.eos_token_id):
        target.append(model(input_ids=source, decoder_input_ids=torch.tensor([target])).logits[0, -1].argmax().item())
    return tokenizer.decode(target, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["pairs", "masked-lm", "translation"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_size_of_a_batch_does_not_matter(trained_run, tmp_path, task, size):
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
def test_beams_are_more_than_one_guess(trained_run, tmp_path):
    run = trained_run("translation").copy(tmp_path)
    command("evaluate", run, "--beams", 3)
    stored = read_json(run / "evaluation.json")
    assert stored["beams"] == 3
    assert stored["bleu"] > 50


@pytest.mark.slow
def test_evaluate_without_a_test_split_names_those_that_are_there(tmp_path, quick):
    lines = write_lines(tmp_path / "text.txt", running_lines(60))
    path = quick("causal-lm", tmp_path, **{"data.path": lines, "data.validation_share": 0.5, "training.steps": 1})
    command("train", path)
    run = tmp_path / "run"
    said = "the data of the run has no test split; it has train, validation: choose one with --split, or another file with --data"
    assert refused("evaluate", run) == said
    assert "has no tset split" in refused("evaluate", run, "--split", "tset")
    assert not (run / "evaluation.json").exists()
    for split in ("train", "validation"):
        command("evaluate", run, "--split", split)
    assert "--data is 'nowhere.txt': there is no such file" in refused("evaluate", run, "--data", "nowhere.txt")
    # other text, from which another tokenizer would be learnt, must not be read by this model
    write_lines(lines, ["other words", *running_lines(60)])
    assert "has changed since the run was trained" in refused("evaluate", run, "--split", "validation")


@pytest.mark.slow
def test_other_data_is_checked_like_the_runs_own(trained_run, tmp_path):
    run = trained_run("classification").run
    rows = classification_rows(10)
    strange = write_jsonl(tmp_path / "strange.jsonl", [*rows, {"text": "so so", "label": "meh"}])
    assert "the evaluation split has the label 'meh', which the training split does not have; it has neg, pos" in refused(
        "evaluate", run, "--data", strange
    )
    renamed = write_jsonl(tmp_path / "renamed.jsonl", [{"txt": row["text"], "label": row["label"]} for row in rows])
    said = refused("evaluate", run, "--data", renamed)
    assert said == "data.columns.text is 'text', but the given split has the columns txt, label; did you mean 'txt'?"


# prediction


def by_hand(trained, text):
    """What the model of a run says to a text, by transformers and plain code."""
    model, tokenizer = trained.load()
    if model.config.architectures[0].endswith("SequenceClassification"):
        shares = model(**tokenizer(*text.split("\t"), return_tensors="pt")).logits[0].softmax(-1).tolist()
        return {model.config.id2label[number]: share for number, share in enumerate(shares)}
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if trained.task == "masked-lm":
        shares = model(torch.tensor([[*ids, tokenizer.eos_token_id]])).logits[0].softmax(-1)
        return {tokenizer.decode([token]): share.item() for token, share in enumerate(shares[ids.index(tokenizer.mask_token_id)])}
    if trained.task == "causal-lm":
        start = len(ids)
        for _ in range(6):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        return tokenizer.decode(ids[start:], skip_special_tokens=True)
    return greedily(model, tokenizer, torch.tensor([[*ids, tokenizer.eos_token_id]]))


# text, what a model that has learnt answers
QUESTIONS = {
    "classification": [("the river and a lovely road", "pos"), ("awful winter on the river by the road", "neg")],
    "pairs": [("a good cloud on the road\tthe poor letter from winter", "neg"), ("bad stone to the road\ta fine garden", "pos")],
    "masked-lm": [
        (" ".join([*NUMBERS[0][:4], "<mask>", *(NUMBERS[0] * 3)[5:23]]), "five"),
        (" ".join(["<mask>", *(NUMBERS[1] * 3)[1:23]]), "eins"),
    ],
    "causal-lm": [("one two three four", "five six seven eight nine ten"), ("dix neuf huit", "sept six cinq quatre trois deux")],
    "translation": [("mother buys red birds", "Mutter Vögel rote kauft"), ("who sees white letters", "wer Briefe weiße sieht")],
    "denoising": [
        (" ".join([*NUMBERS[0][:6], "<mask>", *(NUMBERS[0] * 3)[8:23]]), " ".join((NUMBERS[0] * 3)[:23])),
        (" ".join([*NUMBERS[2][:3], "<mask>", *(NUMBERS[2] * 3)[6:23]]), " ".join((NUMBERS[2] * 3)[:23])),
    ],
}


@pytest.mark.slow
def test_predict_answers_as_the_model_does_under_transformers(trained):
    questions = QUESTIONS[trained.task]
    found = answers(trained.run, *(text for text, _ in questions), "--tokens", 6, "--top", 1000)
    assert len(found) == len(questions)
    for (text, wanted), answer in zip(questions, found, strict=True):
        expected = by_hand(trained, text)
        assert "\t".join([answer["text"], *([answer["pair"]] if "pair" in answer else [])]) == text
        if trained.task in ("classification", "pairs"):
            assert answer["label"] == wanted
            assert answer["probabilities"] == pytest.approx(expected, abs=1e-5)
        elif trained.task == "masked-lm":
            (guesses,) = answer["masks"]
            assert guesses[0]["token"] == wanted
            assert answer["filled"] == text.replace("<mask>", wanted)
            assert {guess["token"]: guess["probability"] for guess in guesses} == pytest.approx(expected, abs=1e-5)
            assert guesses == sorted(guesses, key=lambda guess: -guess["probability"])
        else:
            key = {"causal-lm": "continuation", "translation": "translation", "denoising": "restored"}[trained.task]
            assert answer[key] == expected == wanted


@pytest.mark.slow
def test_predict_writes_for_people_too(trained):
    text, wanted = QUESTIONS[trained.task][0]
    printed = command("predict", trained.run, text, "--tokens", 6, "--top", 2).stdout
    if trained.task in ("classification", "pairs"):
        label, first, second = re.fullmatch(r"(\w+)\t\1=([01]\.\d{4}) \w+=([01]\.\d{4})\n", printed).groups()
        assert label == wanted
        assert float(first) + float(second) == pytest.approx(1, abs=1e-4)
    elif trained.task == "masked-lm":
        assert re.fullmatch(rf"{text.replace('<mask>', wanted)}\t{wanted} [01]\.\d+, \S+ [01]\.\d+\n", printed)
    else:
        assert printed == f"{wanted}\n"


@pytest.mark.slow
def test_texts_come_from_arguments_files_and_standard_input(trained_run, tmp_path):
    """More of them than a batch, each answered in its place."""
    run = trained_run("classification").run
    rows = classification_rows(40, seed=3)
    texts = [row["text"] for row in rows]
    expected = answers(run, *texts)
    assert [answer["text"] for answer in expected] == texts
    assert np.mean([answer["label"] == row["label"] for answer, row in zip(expected, rows, strict=True)]) > 0.8
    lines = "".join(f"{text}\n" for text in texts)
    assert answers(run, input=lines) == answers(run, "-", input=lines) == expected
    plain = write_lines(tmp_path / "texts.txt", texts)
    packed = tmp_path / "texts.txt.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    windows = tmp_path / "windows.txt"
    windows.write_bytes(lines.replace("\n", "\r\n").encode())
    table = tmp_path / "texts.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([["number", "text"], *enumerate(texts)])
    for path in (plain, packed, windows, write_jsonl(tmp_path / "texts.jsonl", rows), table):
        assert answers(run, path) == expected, path
    # some here, some there
    assert answers(run, texts[0], write_lines(tmp_path / "two.txt", texts[1:3]), texts[3]) == expected[:4]


@pytest.mark.slow
def test_a_whole_file_may_be_one_text(trained_run, tmp_path):
    run = trained_run("classification").run
    path = write_lines(tmp_path / "review.txt", ["the river", "a lovely garden\u2028by the road", "and winter"])
    assert [answer["text"] for answer in answers(run, path)] == path.read_text(encoding="utf-8").split("\n")[:-1]
    (answer,) = answers(run, path, "--per", "file")
    assert answer["text"] == path.read_text(encoding="utf-8")
    assert answer["label"] == "pos"
    assert answer["probabilities"] == pytest.approx(by_hand(trained_run("classification"), answer["text"]), abs=1e-5)
    assert answers(run, path, "--per", "line") == answers(run, path)


@pytest.mark.slow
def test_predict_in_a_process_of_its_own(trained_run, tmp_path):
    trained = trained_run("translation")
    (source, target), (other, _) = QUESTIONS["translation"]
    result = linformer("predict", trained.run, "--json", cwd=tmp_path, input=f"{source}\n{other} {' '.join(['red'] * 40)}\n")
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first == {"text": source, "translation": target}
    assert second["text"].startswith(other)
    assert result.stderr == "Warning: input 2 has 45 tokens, of which the model takes 24; the rest was not used\n"
    assert "Häuser" not in result.stdout  # umlauts as they are, not as \u00e4
    assert "ö" in result.stdout


@pytest.mark.slow
def test_pairs_stand_in_two_columns_or_beside_a_tab(trained_run, tmp_path):
    run = trained_run("pairs").run
    rows = pair_rows(20, seed=5)
    expected = answers(run, *(f"{row['premise']}\t{row['hypothesis']}" for row in rows))
    assert [(answer["text"], answer["pair"]) for answer in expected] == [(row["premise"], row["hypothesis"]) for row in rows]
    assert np.mean([answer["label"] == row["label"] for answer, row in zip(expected, rows, strict=True)]) > 0.7
    assert answers(run, write_jsonl(tmp_path / "pairs.jsonl", rows)) == expected
    assert "'alone' is alone; write both texts with a tab between them" in refused("predict", run, "alone")
    half = write_jsonl(tmp_path / "half.jsonl", [{"premise": "a good road"}])
    assert refused("predict", run, half) == f"{half} has no column 'hypothesis'; it has premise"


@pytest.mark.slow
def test_what_is_cut_is_told(trained_run):
    for task, text, said in (
        ("classification", "good " * 30, r"input 1 has 32 tokens, of which the model takes 24; the rest was not used"),
        ("causal-lm", "one two " * 15, r"input 1 has 30 tokens; with 6 to come the model takes 18: only the last ones were used"),
    ):
        result = command("predict", trained_run(task).run, text, "short", text, "--tokens", 6)
        warnings = result.stderr.splitlines()
        assert warnings == [f"Warning: {said}", f"Warning: {said}".replace("input 1", "input 3")]
        assert len(result.stdout.splitlines()) == 3
    # of a text that goes on, the end counts; of one that is classified, the beginning
    words, run = [*NUMBERS[1], *NUMBERS[0], *NUMBERS[2][:5]], trained_run("causal-lm").run
    whole, end, beginning = (answers(run, " ".join(part), "--tokens", 8)[0] for part in (words, words[-16:], words[:16]))
    assert whole["continuation"] == end["continuation"] != beginning["continuation"]
    words, run = ["lovely", *["river"] * 21, *["awful"] * 9], trained_run("classification").run
    whole, beginning = (answers(run, " ".join(part))[0] for part in (words, words[:22]))
    assert whole["probabilities"] == beginning["probabilities"]


@pytest.mark.slow
def test_a_continuation_may_be_drawn(trained_run):
    run = trained_run("causal-lm").run
    drawn = [
        command("predict", run, "one two three", "--tokens", 12, "--temperature", 5.0, "--seed", seed).stdout for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(command("predict", run, "one two three", "--tokens", 3).stdout.split()) == 3


@pytest.mark.slow
def test_every_mask_of_a_text_is_filled(trained_run):
    run = trained_run("masked-lm").run
    text = " ".join(["one", "<mask>", "three", "<mask>", *(NUMBERS[0] * 3)[4:23]])
    (answer,) = answers(run, text, "--top", 3)
    assert [len(mask) for mask in answer["masks"]] == [3, 3]
    assert [mask[0]["token"] for mask in answer["masks"]] == ["two", "four"]
    said = refused("predict", run, text, "one two three")
    assert said == "'one two three' has nothing to fill in; write <mask> where a token is to be guessed"


@pytest.mark.slow
def test_a_mask_stands_for_a_word_with_its_space(tmp_path, quick):
    """In a byte-level BPE the space belongs to the word; were it left before the mask, no text would look as in training."""
    path = quick("masked-lm", tmp_path, **{"tokenizer": {"kind": "bpe", "vocab_size": 400}, "training.steps": 100})
    command("train", path)
    text = " ".join((NUMBERS[0] * 3)[:23])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    whole, hidden = (tokenizer(each)["input_ids"] for each in (text, text.replace(" three", " <mask>", 1)))
    assert [(one, other) for one, other in zip(whole, hidden, strict=True) if one != other] == [
        (tokenizer.convert_tokens_to_ids("Ġthree"), tokenizer.mask_token_id)
    ]
    (answer,) = answers(tmp_path / "run", text.replace(" three", " <mask>", 1))
    assert len(answer["filled"].split()) == 23


def test_what_cannot_be_asked(tmp_path):
    assert refused("predict", tmp_path / "nowhere", "a") == (
        f"there is no folder {tmp_path / 'nowhere'}; give the folder of a run, as `linformer train` has named it"
    )
    for name in ("predict", "evaluate"):
        assert refused(name, tmp_path) == f"{tmp_path} is not the folder of a run: it has no config.yaml"


@pytest.mark.slow
def test_what_is_no_finished_run_of_this_version_is_not_asked(trained_run, tmp_path):
    trained = trained_run("classification")
    run = trained.copy(tmp_path / "unfinished")
    (run / "result.json").unlink()
    for name in ("predict", "evaluate"):
        said = refused(name, run, *(["text"] if name == "predict" else []))
        assert said == f"the run in {run} is not finished; `linformer train {run / 'config.yaml'}` goes on with it"
    other = trained.copy(tmp_path / "other")
    environment = read_json(other / "environment.json")
    environment |= {"run_format": 99, "packages": {"linformer-kit": "9.9"}}
    (other / "environment.json").write_text(json.dumps(environment))
    for args in (("predict", other, "text"), ("evaluate", other), ("train", other / "config.yaml", f"run={other}")):
        said = refused(*args)
        assert said == (
            f"{other} was written by linformer-kit 9.9 in format 99; this is version {__version__}, which reads format 1. "
            "Install that version, or train again"
        )
    (other / "environment.json").write_text("{}")
    assert "environment.json is missing or damaged" in refused("predict", other, "text")
    damaged = trained.copy(tmp_path / "damaged")
    weights = damaged / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert re.match(rf"{damaged / 'model'} cannot be loaded: .+", refused("predict", damaged, "text"))


@pytest.mark.slow
def test_files_that_cannot_be_asked_about(trained_run, tmp_path):
    run = trained_run("classification").run
    (tmp_path / "empty.txt").touch()
    assert refused("predict", run, tmp_path / "empty.txt") == f"{tmp_path / 'empty.txt'} is empty"
    (tmp_path / "latin.txt").write_bytes("schön\n".encode("latin-1"))
    assert "latin.txt: the byte 0xf6 is not utf-8; convert it with iconv" in refused("predict", run, tmp_path / "latin.txt")
    (tmp_path / "broken.gz").write_bytes(b"plain")
    assert "broken.gz is not a whole gzip file" in refused("predict", run, tmp_path / "broken.gz")
    other = write_jsonl(tmp_path / "other.jsonl", [{"txt": "a"}])
    assert refused("predict", run, other) == f"{other} has no column 'text'; it has txt"
    said = refused("predict", run, input="schön\n".encode("latin-1"))
    assert said == "standard input: the byte 0xf6 is not utf-8; convert it with iconv"
    assert refused("predict", run, "nowhere.txt").startswith(
        "there is no file 'nowhere.txt'; give a text, a file, or something on "
    )


# ways to train


def trained_quickly(path, *overrides):
    """A run of a few steps, trained in this process: what it printed, its result and its metrics."""
    printed = command("train", path, *overrides).stdout
    run = load_config(path, list(overrides)).folder
    return printed, read_json(run / "result.json"), read_lines(run / "metrics.jsonl")


def test_numbers_and_overrides(tmp_path):
    path = tmp_path / "my run.yaml"
    path.write_text("task: masked-lm\ndata: {path: text.txt}\ntraining: {learning_rate: 1e-3, steps: 1e2}\n")
    config = load_config(path, ["training.weight_decay=2E-2", "model.attention=full", "data.columns.text=content", "seed=7"])
    assert (config.training.learning_rate, config.training.steps, config.training.weight_decay) == (0.001, 100, 0.02)
    assert (config.model, config.data.columns.text, config.seed) == ({"attention": "full"}, "content", 7)
    assert config.folder == Path("runs/my run")
    assert load_config(path, ["run="]).folder == Path("runs/my run")


@pytest.mark.slow
def test_overrides_reach_the_run(tmp_path, quick, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = quick("classification", tmp_path, run=None)
    _, result, lines = trained_quickly(
        path, "training.steps=3", "training.log_every=1", "training.learning_rate=1e-3", "training.warmup=0"
    )
    assert result["steps"] == 3
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    # the rate of the first step, on its way down half a cosine
    assert lines[0]["learning_rate"] == pytest.approx(1e-3)
    stored = yaml.safe_load((tmp_path / "runs" / "classification" / "config.yaml").read_text())
    assert (stored["training"]["steps"], stored["training"]["learning_rate"]) == (3, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("wish", "steps"), [({}, 75), ({"training.epochs": 0.5}, 13), ({"training.epochs": 1}, 25)])
def test_epochs_are_whole_batches(tmp_path, quick, wish, steps):
    """400 examples in batches of 16; three epochs if nothing is said, and an evaluation after each."""
    _, result, lines = trained_quickly(quick("classification", tmp_path, **{"training.steps": None, **wish}))
    assert result["steps"] == steps
    assert [line["step"] for line in lines if "validation_loss" in line] == ([25, 50, 75] if not wish else [steps])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "causal-lm", "translation"])
def test_the_twin_with_full_attention(tmp_path, quick, task):
    command("train", quick(task, tmp_path), "model.attention=full")
    config = read_json(tmp_path / "run" / "model" / "config.json")
    assert (config["projection"], config["decoder_attention"]) == ("none", "full")
    assert not [name for name in load_file(tmp_path / "run" / "model" / "model.safetensors") if "projection" in name]
    text = QUESTIONS[task][0][0]
    assert len(answers(tmp_path / "run", text, "--tokens", 4)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "bytes", "words"])
def test_tokenizers_are_trained(tmp_path, quick, kind):
    settings = {"kind": kind, "vocab_size": 300, "min_frequency": 1, "lowercase": True}
    command("train", quick("classification", tmp_path, **{"tokenizer": settings, "model.max_position_embeddings": 128}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    ids = tokenizer("a Lovely road", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "a lovely road"
    # of 18 + 6 words and 5 special tokens, or the bytes and them
    assert len(tokenizer) == {"bpe": 300, "bytes": 261, "words": 29}[kind]
    assert len(ids) == {"bpe": len(ids), "bytes": 13, "words": 3}[kind]
    assert 3 <= len(ids) <= 13
    config = read_json(tmp_path / "run" / "model" / "config.json")
    assert config["vocab_size"] == len(tokenizer)


@pytest.mark.slow
def test_a_tokenizer_may_come_from_a_folder(tmp_path, quick, trained_run):
    other = trained_run("translation")
    command("train", quick("classification", tmp_path, **{"tokenizer": {"from": str(other.run / "tokenizer")}}))
    used = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert used.get_vocab() == other.load()[1].get_vocab()
    assert used("a lovely road", add_special_tokens=False)["input_ids"] == [used.unk_token_id] * 3


def rows_to_start_with(task):
    """Texts in the words of the language models: which language it is, or, of pairs, which the second one is."""
    names = {"one": "English", "eins": "German", "un": "French"}
    first, second = (running_lines(60, seed=seed) for seed in (0, 1))
    labels = [next(name for word, name in names.items() if word in line.split()) for line in second]
    if task == "pairs":
        return [
            {"premise": one, "hypothesis": other, "label": name} for one, other, name in zip(first, second, labels, strict=True)
        ]
    return [{"text": other, "label": name} for other, name in zip(second, labels, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "task"), [("masked-lm", "classification"), ("masked-lm", "pairs"), ("denoising", "translation")]
)
def test_a_run_starts_from_a_saved_model(tmp_path, quick, trained_run, source, task):
    """Every weight but those of the head is that of the saved model, and so are tokens and length."""
    start = trained_run(source).run / "model"
    still = {"training.learning_rate": 1e-12, "training.weight_decay": 0, "training.steps": 2}
    data = {} if task == "translation" else {"data.path": write_jsonl(tmp_path / "data.jsonl", rows_to_start_with(task))}
    path = quick(task, tmp_path, **still, **data, **{"model": {"from": str(start)}, "tokenizer": None})
    command("train", path)
    saved = tmp_path / "run" / "model"
    before, after = (load_file(folder / "model.safetensors") for folder in (start, saved))
    types = {"model.embeddings.token_type_embeddings.weight"} if task == "pairs" else set()
    assert {name for name in after.keys() - before.keys() if not name.startswith(("classifier.", "head."))} == types
    assert before.keys() - after.keys() <= {"lm_head.bias"}
    shared = before.keys() & after.keys()
    assert sum(before[name].numel() for name in shared) > 10_000
    for name in shared:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-8)
    assert AutoTokenizer.from_pretrained(saved).get_vocab() == AutoTokenizer.from_pretrained(start).get_vocab()
    config = read_json(saved / "config.json")
    assert config["max_position_embeddings"] == 24
    if task != "translation":
        assert config["id2label"] == {"0": "English", "1": "French", "2": "German"}
        # and on to another number of classes
        rows = classification_rows(60) if task == "classification" else pair_rows(60)
        more = {"data.path": write_jsonl(tmp_path / "on.jsonl", rows), "model": {"from": str(saved)}, "tokenizer": None}
        command("train", quick(task, tmp_path / "on", **still, **more))
        again = load_file(tmp_path / "on" / "run" / "model" / "model.safetensors")
        assert again["classifier.weight"].shape == (2, 32)
        torch.testing.assert_close(again["model.norm.weight"], after["model.norm.weight"], rtol=0, atol=1e-8)


@pytest.mark.slow
def test_a_model_of_another_kind_is_no_start(tmp_path, quick, trained_run):
    for source, task, said in (
        ("masked-lm", "translation", "LinformerForMaskedLM, which has no weights for decoder.embeddings.norm.bias, "),
        ("masked-lm", "causal-lm", "LinformerForMaskedLM, which has no weights for model.layers.0.attention.projection.weight "),
        ("causal-lm", "masked-lm", "model: is_decoder=True: a masked LM has to see both sides"),
        ("translation", "classification", "model: this is the configuration of an encoder-decoder"),
    ):
        start = {"from": str(trained_run(source).run / "model")}
        assert said in refused("train", quick(task, tmp_path, **{"model": start, "tokenizer": None}))
        assert not (tmp_path / "run" / "model").exists()
    said = refused("train", quick("classification", tmp_path), f"model.from={tmp_path}")
    assert said.startswith(
        "model.from starts from a saved model, which has its sizes already; remove model.attention_probs_dropout"
    )


@pytest.mark.slow
def test_pieces_of_a_batch_make_the_same_step(tmp_path, quick):
    losses = {}
    for accumulate in (1, 4):
        wish = [f"training.accumulate={accumulate}", "training.log_every=1", f"run={tmp_path / str(accumulate)}"]
        _, _, lines = trained_quickly(quick("causal-lm", tmp_path), *wish)
        losses[accumulate] = [line["loss"] for line in lines if "loss" in line]
    assert losses[4] == pytest.approx(losses[1], rel=1e-4)
    assert losses[1][-1] < losses[1][0]
    assert refused("train", quick("causal-lm", tmp_path), "training.accumulate=3", f"run={tmp_path / '3'}") == (
        "training.batch_size is 16, which 1 process(es) × training.accumulate=3 do not divide; choose a multiple of 3"
    )


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "masked-lm", "causal-lm", "translation"])
def test_label_smoothing_by_hand(tmp_path, quick, task):
    """The share of the target goes to all answers alike; evaluations are without."""
    config = load_config(quick(task, tmp_path, **{"training.label_smoothing": 0.3}))
    trainer, _ = make_trainer(config, prepare(config, QUIET), RunFolder(config.folder), QUIET)
    batch = trainer.data_collator(trainer.train_dataset.__getitems__([3, 1, 4, 9]))
    logits, labels = trainer.model(**batch).logits, batch["labels"]
    if task == "causal-lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    scores = logits.log_softmax(-1).flatten(0, -2)[labels.flatten() != -100]
    wanted = labels.flatten()[labels.flatten() != -100]
    smoothed = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=len(wanted)).item()
    plain = -scores[torch.arange(len(wanted)), wanted]
    assert smoothed == pytest.approx((0.7 * plain - 0.3 * scores.mean(-1)).mean().item(), rel=1e-5)
    assert smoothed != pytest.approx(plain.mean().item(), rel=1e-4)
    _, sums, labels = trainer.prediction_step(trainer.model, dict(batch), False)
    found = (
        functional.cross_entropy(sums, labels).item() if task == "classification" else (sums[:, 0].sum() / sums[:, 1].sum()).item()
    )
    assert found == pytest.approx(plain.mean().item(), rel=1e-5)


@pytest.mark.slow
def test_patience_ends_a_run_that_gains_nothing(tmp_path, quick):
    settings = {"training.patience": 2, "training.steps": 40, "training.evaluate_every": 2, "training.learning_rate": 1e-12}
    _, result, lines = trained_quickly(quick("classification", tmp_path, **settings))
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 6]
    assert (result["best_step"], result["steps"]) == (2, 6)
    assert "is finished" in command("train", tmp_path / "classification.yaml").stdout


@pytest.mark.slow
def test_bfloat16_on_a_cpu(tmp_path, quick):
    printed, result, _ = trained_quickly(quick("classification", tmp_path, **{"training.steps": 60}), "training.precision=bfloat16")
    assert rows_of(printed)["device"] == "cpu, 1 process(es), bfloat16"
    assert result["validation_accuracy"] > 0.8
    assert all(weights.dtype == torch.float32 for weights in load_file(tmp_path / "run" / "model" / "model.safetensors").values())


@pytest.mark.slow
def test_the_best_by_another_metric(tmp_path, quick):
    settings = {"training.best_by": "loss", "training.steps": 6, "training.evaluate_every": 2}
    _, result, lines = trained_quickly(quick("classification", tmp_path, **settings))
    losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert result["best_step"] == min(losses, key=losses.__getitem__)


@pytest.mark.slow
def test_tensorboard_finds_its_files_in_the_run(tmp_path, quick):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, _, lines = trained_quickly(quick("classification", tmp_path), "training.report=tensorboard", "training.log_every=1")
    (events,) = (tmp_path / "run").rglob("events.out.tfevents*")
    found = EventAccumulator(str(events.parent))
    found.Reload()
    losses = [event.value for event in found.Scalars("train/loss")]
    assert losses == pytest.approx([line["loss"] for line in lines if "loss" in line])
    assert "eval/accuracy" in found.Tags()["scalars"]


@pytest.mark.slow
def test_weights_and_biases_writes_into_the_run(tmp_path):
    pytest.importorskip("wandb")
    path = yaml_for(
        "classification", tmp_path, **{"training.steps": 3, "training.evaluate_every": None, "training.report": "wandb"}
    )
    linformer("train", path, cwd=tmp_path, env={"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path / "home")})
    (stored,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert stored.stat().st_size > 1000
    assert (tmp_path / "run" / "result.json").exists()


def test_max_examples_are_the_first_of_a_text_and_drawn_from_rows(tmp_path, quick):
    config = load_config(quick("causal-lm", tmp_path, **{"data.max_examples": 30}))
    splits = read_splits(config)
    assert splits["train"]["text"] == running_lines(400, seed=0)[:30]
    assert len(splits["validation"]) == 45
    drawn = read_splits(load_config(quick("classification", tmp_path, **{"data.max_examples": 30})))["train"]["text"]
    texts = [row["text"] for row in classification_rows(400)]
    assert len(drawn) == 30
    assert set(drawn) <= set(texts)
    assert drawn != texts[:30]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "ending"), [("masked-lm", "txt"), ("masked-lm", "jsonl.gz"), ("causal-lm", "txt.gz"), ("translation", "tsv")]
)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # datasets leaves it to chance when a table is closed
def test_streaming(tmp_path, task, ending):
    """The first examples are held out; the others are read again and again, as long as there are steps."""
    path = tmp_path / f"corpus.{ending.removesuffix('.gz')}"
    if task == "translation":
        write_lines(path, ["source\ttarget", *map("\t".join, sentence_pairs(150))])
    elif ending.startswith("jsonl"):
        write_jsonl(path, [{"number": number, "text": line} for number, line in enumerate(running_lines(150))])
    else:
        write_lines(path, running_lines(150))
    if ending.endswith(".gz"):
        (tmp_path / f"corpus.{ending}").write_bytes(gzip.compress(path.read_bytes()))
    wish = {"data.streaming": True, "data.streaming_validation": 21, "data.shuffle_buffer": 50}
    run = yaml_for(task, tmp_path, **{"data.path": tmp_path / f"corpus.{ending}", "training.evaluate_every": 30, **wish})
    splits = {role: list(rows) for role, rows in read_splits(load_config(run)).items()}
    assert [len(splits[role]) for role in ("validation", "train")] == [21, 129]
    name, whole = (
        ("source", [source for source, _ in sentence_pairs(150)]) if task == "translation" else ("text", running_lines(150))
    )
    assert [row[name] for role in ("validation", "train") for row in splits[role]] == whole
    printed, result, lines = trained_quickly(run, "training.steps=30")  # 480 examples of 129
    assert rows_of(printed)["train examples"] == "streamed"
    assert rows_of(printed)["validation examples"].startswith("21,")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert result["steps"] == 30
    # what was held out is measured, and can be again; what is streamed cannot
    command("evaluate", tmp_path / "run", "--split", "validation")
    assert read_json(tmp_path / "run" / "evaluation.json")["loss"] == pytest.approx(result["validation_loss"], rel=1e-5)
    assert "the train split is streamed" in refused("evaluate", tmp_path / "run", "--split", "train")
    text = QUESTIONS[task][0][0]
    asked = write_jsonl(tmp_path / "asked.jsonl", [{"source" if task == "translation" else "text": text}])
    assert answers(tmp_path / "run", asked, "--tokens", 3) == answers(tmp_path / "run", text, "--tokens", 3)
    gc.collect()


def test_a_stream_that_is_too_short_is_refused(tmp_path):
    text = write_lines(tmp_path / "text.txt", running_lines(30))
    path = yaml_for("masked-lm", tmp_path, **{"data.path": text, "data.streaming": True})
    said = refused("train", path)
    assert "the stream ends before the first training example" in said
    assert "data.streaming_validation, now 1000" in said
    assert "data.streaming needs training.steps" in refused("train", path, "training.steps=")


@pytest.mark.slow
def test_truncation_is_counted_and_told(tmp_path):
    path = yaml_for(
        "classification", tmp_path, **{"model.max_position_embeddings": 10, "training.steps": 2, "training.evaluate_every": None}
    )
    counts = {}
    for split in ("train", "validation", "test"):
        lengths = [len(row["text"].split()) + 2 for row in read_lines(tmp_path / "classification data" / f"{split}.jsonl")]
        over = [length - 10 for length in lengths if length > 10]
        counts[split] = (len(over), sum(over))
        assert 0 < len(over) < len(lengths)
    printed = command("prepare", path).stdout
    for split, (texts, _) in counts.items():
        assert re.search(rf"│ {split} .*│\s+{texts} │", printed)
    table = rows_of(command("train", path).stdout)
    for split, (texts, tokens) in counts.items():
        assert table[f"{split} examples"].endswith(f"{texts} texts cut, losing {tokens:,}")
    command("evaluate", tmp_path / "run")
    assert read_json(tmp_path / "run" / "evaluation.json")["cut_texts"] == counts["test"][0]


@pytest.mark.slow
def test_texts_encoded_a_few_at_a_time_are_the_same(trained_run, monkeypatch):
    tokenizer = trained_run("pairs").load()[1]
    first, second = ([row[name] for row in pair_rows(50)] for name in ("premise", "hypothesis"))
    for pairs in (None, second):
        whole = classified_texts(tokenizer, first, pairs, 12)
        monkeypatch.setattr(few_at_a_time, "__defaults__", (30,))
        assert len(list(few_at_a_time(first))) > 30
        assert classified_texts(tokenizer, first, pairs, 12) == whole
        assert ended(tokenizer, first, 7)[1] == [len(text.split()) + 1 for text in first]
        monkeypatch.undo()
    assert ended(tokenizer, [], 7) == ([], [])


# formats

ROWS = [
    *classification_rows(30),
    # what a reader of tables might change
    {"text": 'he said "no, never", and left', "label": "neg"},
    {"text": "007", "label": "pos"},
    {"text": "NA", "label": "neg"},
    {"text": "null", "label": "pos"},
    {"text": "1e5", "label": "neg"},
    {"text": "schöne Grüße, 東京", "label": "pos"},
    {"text": " # two  spaces ", "label": "neg"},
]


def write_table(path, rows, separator=",", heading=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        quoting = {"quoting": csv.QUOTE_NONE, "quotechar": None} if separator == "\t" else {}
        writer = csv.writer(file, delimiter=separator, lineterminator="\n", **quoting)
        writer.writerows([["label", "text"]] * heading + [[row["label"], row["text"]] for row in rows])
    return path


def write_parquet(path, rows):
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_list(path, rows):
    path.write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")
    return path


FORMATS = {
    "jsonl": lambda folder: write_jsonl(folder / "rows.jsonl", ROWS),
    "ndjson": lambda folder: write_jsonl(folder / "rows.ndjson", ROWS),
    "json": lambda folder: write_list(folder / "rows.json", ROWS),
    "csv": lambda folder: write_table(folder / "rows.csv", ROWS),
    "tsv": lambda folder: write_table(folder / "rows.tsv", ROWS, "\t"),
    "parquet": lambda folder: write_parquet(folder / "rows.parquet", ROWS),
}


def all_rows(splits):
    return sorted((row["text"], row["label"]) for rows in splits.values() for row in rows)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path, kind, packed):
    path = FORMATS[kind](tmp_path)
    if packed:
        plain, path = path, tmp_path / f"rows.{kind}.gz"
        path.write_bytes(gzip.compress(plain.read_bytes()))
    if packed and kind == "parquet":
        assert "rows.parquet.gz: Parquet is compressed by itself" in refused(
            "prepare", yaml_for("classification", tmp_path, **{"data.path": path})
        )
        return
    splits = read_splits(load_config(yaml_for("classification", tmp_path, **{"data.path": path, "data.validation_share": 0.2})))
    assert {role: len(rows) for role, rows in splits.items()} == {"train": 30, "validation": 7}
    assert all_rows(splits) == sorted((row["text"], row["label"]) for row in ROWS)


@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("tsv", "\t")])
def test_tables_without_a_heading(tmp_path, ending, separator):
    path = write_table(tmp_path / f"rows.{ending}", ROWS, separator, heading=False)
    settings = {"data.path": path, "data.validation_share": 0.2}
    splits = read_splits(load_config(yaml_for("classification", tmp_path, **settings, **{"data.header": ["label", "text"]})))
    assert all_rows(splits) == sorted((row["text"], row["label"]) for row in ROWS)
    said = refused("prepare", yaml_for("classification", tmp_path, **settings))
    assert said.startswith("data.columns.text is 'text', but the train split has the columns pos, ")
    assert said.endswith("; files without a heading need data.header")


def test_a_column_may_turn_from_numbers_into_words_late(tmp_path):
    rows = [{"text": f"{number}", "label": f"{number % 2:02}"} for number in range(12_000)] + [{"text": "end", "label": "x"}]
    splits = read_splits(
        load_config(yaml_for("classification", tmp_path, **{"data.path": write_table(tmp_path / "rows.csv", rows)}))
    )
    assert all_rows(splits) == sorted((row["text"], row["label"]) for row in rows)


def test_a_format_may_be_named(tmp_path):
    path = write_table(tmp_path / "rows.data", ROWS)
    settings = {"data.path": path, "data.validation_share": 0.2}
    said = refused("prepare", yaml_for("classification", tmp_path, **settings))
    assert said.startswith(f"{path}: the ending does not tell the format; allowed: .txt, .csv, .tsv, .jsonl")
    splits = read_splits(load_config(yaml_for("classification", tmp_path, **settings, **{"data.format": "csv"})))
    assert all_rows(splits) == sorted((row["text"], row["label"]) for row in ROWS)


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "validation.jsonl", "test.jsonl"),
        ("training.jsonl", "dev.jsonl", "test.jsonl"),
        ("train-00000-of-00001.jsonl", "valid-0.jsonl", "test-0.jsonl"),
        ("train/a.jsonl", "val/b.jsonl", "test/c.jsonl"),
    ],
    ids=lambda names: names[0],
)
def test_a_folder_of_splits(tmp_path, names):
    parts = {"train": ROWS[:20], "validation": ROWS[20:25], "test": ROWS[25:]}
    for name, rows in zip(names, parts.values(), strict=True):
        write_jsonl(tmp_path / "data" / name, rows)
    (tmp_path / "data" / "README.md").write_text("about")
    splits = read_splits(load_config(yaml_for("classification", tmp_path, **{"data.path": tmp_path / "data"})))
    assert {role: list(rows) for role, rows in splits.items()} == parts


@pytest.mark.parametrize("split", [None, "train"])
def test_a_folder_of_classes(tmp_path, split):
    """As of the film reviews: one file is one text, with its lines."""
    texts = {"pos": [f"good\n\nfilm {number}" for number in range(6)], "neg": [f"bad film {number}\n" for number in range(4)]}
    for label, found in texts.items():
        for number, text in enumerate(found):
            write_lines(tmp_path / "data" / (split or ".") / label / f"{number}.txt", [])
            (tmp_path / "data" / (split or ".") / label / f"{number}.txt").write_text(text)
    if split:
        write_lines(tmp_path / "data" / "test" / "neg" / "0.txt", ["bad"])
        write_lines(tmp_path / "data" / "test" / "pos" / "0.txt", ["good"])
    splits = read_splits(
        load_config(yaml_for("classification", tmp_path, **{"data.path": tmp_path / "data", "data.validation_share": 0.3}))
    )
    wanted = [(text, label) for label, found in texts.items() for text in found] + [("bad\n", "neg"), ("good\n", "pos")] * bool(
        split
    )
    assert all_rows(splits) == sorted(wanted)
    assert ("test" in splits) == bool(split)
    command("prepare", tmp_path / "classification.yaml", "data.validation_share=0.3")


def test_what_is_nested_is_reached_with_a_dot(tmp_path):
    pairs = sentence_pairs(40)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"translation": {"en": source, "de": target}} for source, target in pairs])
    columns = {"data.path": path, "data.columns": {"source": "translation.en", "target": "translation.de"}}
    prepared = prepare(load_config(yaml_for("translation", tmp_path, **columns)), QUIET)
    held_out = prepared.splits["validation"]
    assert set(zip(held_out["source"], held_out["target"], strict=True)) < set(pairs)
    said = refused("prepare", yaml_for("translation", tmp_path, **columns), "data.columns.target=translation.fr")
    assert (
        said == "the column 'translation.fr' is not everywhere in the data: where 'fr' should be, 'translation' has the keys en, de"
    )
    said = refused("prepare", yaml_for("translation", tmp_path, **columns), "data.columns.target=translation")
    assert said == "the column 'translation' holds dicts, not texts; did you mean 'translation.en'?"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(("sample", "wanted"), [("line", ["a b", "c", "", "d", "e f"]), ("paragraph", ["a b\nc", "d\ne f\n"])])
def test_what_one_example_of_a_text_is(tmp_path, packed, sample, wanted):
    path = tmp_path / ("text.txt.gz" if packed else "text.txt")
    path.write_bytes((gzip.compress if packed else bytes)(b"a b\nc\n\nd\ne f\n"))
    settings = {"data.path": path, "data.sample": sample, "data.validation_share": 0.5}
    splits = read_splits(load_config(yaml_for("causal-lm", tmp_path, **settings)))
    assert [*splits["train"]["text"], *splits["validation"]["text"]] == wanted


# mistakes


def bad_file(tmp_path, name, content, task="classification", **overrides):
    """What `linformer train` says of a file; it leaves nothing that could be taken for a model."""
    (tmp_path / name).write_bytes(content)
    said = refused("train", yaml_for(task, tmp_path, **{"data.path": tmp_path / name, "training.steps": 2, **overrides}))
    assert not (tmp_path / "run" / "model").exists()
    assert not checkpoints_in(tmp_path / "run" / "checkpoints")
    assert not list((tmp_path / "cache" / "prepared").glob("*"))
    assert not list((tmp_path / "cache" / "prepared").glob(".*"))
    return said.replace(f"{tmp_path}/", "")


JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


NOT_UTF8 = "the byte 0xf6 is not utf-8; set data.encoding"
BAD_FILES = {
    "empty.jsonl": (b"", "empty.jsonl is empty"),
    "empty.jsonl.gz": (gzip.compress(b""), "empty.jsonl.gz is empty"),
    "nothing.jsonl.gz": (b"", "nothing.jsonl.gz is empty"),
    "plain.jsonl.gz": (JSONL.encode(), "plain.jsonl.gz is not a whole gzip file: Not a gzipped file"),
    "cut.jsonl.gz": (gzip.compress(JSONL.encode())[:-200], "cut.jsonl.gz cannot be read to its end: Compressed file ended"),
    "latin.jsonl": (JSONL.replace(", 東京", "").encode("latin-1"), f"latin.jsonl, line 36: {NOT_UTF8}"),
    "latin.csv": ("text,label\na,b\nc,d\nschön,b\n".encode("latin-1"), f"latin.csv, line 4: {NOT_UTF8}"),
    "broken.jsonl": (
        f'{JSONL}{{"text": "a", "label":\n{JSONL}'.encode(),
        f"broken.jsonl, line {len(ROWS) + 1}: this is not JSON (",
    ),
    "list.json": (b'[{"text": "a", "label": "b"}, {"text"', "list.json cannot be read as jsonl: "),
    "ragged.tsv": (
        b"text\tlabel\na\tb\nc\td\te\n",
        "ragged.tsv cannot be read as tsv: Error tokenizing data. C error: Expected 2 fields",
    ),
    "one.jsonl": (JSONL.replace('"neg"', '"pos"').encode(), "the training split has only one label, 'pos', in the column 'label'"),
    "null.jsonl": (
        f'{JSONL}{{"text": null, "label": "pos"}}\n'.encode(),
        "the column 'text' has rows without a value; remove them",
    ),
    "few.jsonl": ("".join(JSONL.splitlines(True)[:2]).encode(), "data.validation_share is 0.05: of 2 rows that leaves 2"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name):
    content, said = BAD_FILES[name]
    assert said in bad_file(tmp_path, name, content)


def test_a_damaged_parquet_file(tmp_path):
    whole = write_parquet(tmp_path / "whole.parquet", ROWS).read_bytes()
    assert "cut.parquet cannot be read as parquet: Parquet magic bytes not found in footer" in bad_file(
        tmp_path, "cut.parquet", whole[:-40]
    )


def test_an_encoding_may_be_named(tmp_path):
    lines = [*running_lines(40), "fünf schöne Grüße", *running_lines(3)]
    text = "".join(f"{line}\n" for line in lines).encode("latin-1")
    number = next(number for number, line in enumerate(text.split(b"\n"), start=1) if b"\xfc" in line)
    assert bad_file(tmp_path, "latin.txt", text, "masked-lm") == (
        f"latin.txt, line {number}: the byte 0xfc is not utf-8; set data.encoding (latin-1, cp1252, …) for text, CSV and TSV "
        "files, or convert the file with iconv"
    )
    config = load_config(yaml_for("masked-lm", tmp_path, **{"data.path": tmp_path / "latin.txt", "data.encoding": "latin-1"}))
    assert "fünf schöne Grüße" in [text for rows in read_splits(config).values() for text in rows["text"]]
    assert prepare(config, QUIET).tokenizer.tokenize("Grüße") == ["Grüße"]
    assert refused("prepare", tmp_path / "masked-lm.yaml", "data.encoding=klingon") == (
        "data.encoding is 'klingon', which Python does not know; usual: utf-8, latin-1, cp1252"
    )


def test_text_without_text(tmp_path):
    assert bad_file(tmp_path, "blank.txt", b" \n\n\t\n" * 30, "causal-lm") == "the train split has no text at all"


def test_columns_and_labels_that_are_not_there(tmp_path):
    rows = write_jsonl(tmp_path / "data" / "train.jsonl", ROWS)
    path = yaml_for("classification", tmp_path, **{"data.path": tmp_path / "data", "data.validation_share": 0.2})
    assert refused("prepare", path, "data.columns.text=txet") == (
        "data.columns.text is 'txet', but the train split has the columns text, label; did you mean 'text'?"
    )
    assert "data.columns.label is 'stars', but the train split" in refused("prepare", path, "data.columns.label=stars")
    assert "data.validation is 'vaildation', but" in refused("prepare", path, "data.validation=vaildation")
    write_jsonl(tmp_path / "data" / "test.jsonl", [*ROWS[:3], {"text": "so so", "label": "meh"}])
    for workers in (1, 2):
        said = refused("prepare", path, f"data.workers={workers}")
        assert said == "the test split has the label 'meh', which the training split does not have; it has neg, pos"
    many = [{"text": "a", "label": f"{number}"} for number in range(2000)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in many))
    said = "the column 'label' has 1,600 different values; is it the label? Set data.columns.label"
    assert refused("prepare", path) == said


def test_labels_are_ordered_as_numbers_where_they_are(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a", "label": label} for label in ["10", "9", "-1", "²", "--5", "b"] * 9])
    prepared = prepare(load_config(yaml_for("classification", tmp_path, **{"data.path": rows})), QUIET)
    assert prepared.labels == ["-1", "9", "10", "--5", "b", "²"]


def test_a_corrected_command_may_use_the_same_folder(tmp_path, quick):
    """What failed before the first checkpoint has left nothing that the next attempt could contradict."""
    path = quick("classification", tmp_path)
    assert "training.batch_size is 1000, but there are only 400 training examples" in refused(
        "train", path, "training.batch_size=1000"
    )
    assert "there is no such file or folder" in refused("train", path, f"data.path={tmp_path / 'nothing.jsonl'}")
    assert "model: hidden_size=32 is not divisible by num_attention_heads=5" in refused(
        "train", path, "model.num_attention_heads=5"
    )
    assert "the run in" in refused("predict", tmp_path / "run", "text")
    _, result, _ = trained_quickly(path)
    assert result["steps"] == 4
    assert load_config(tmp_path / "run" / "config.yaml").training.batch_size == 16


@pytest.mark.parametrize("clip", [0, 1])
def test_a_loss_that_is_no_number_ends_the_run(tmp_path, quick, clip):
    path = quick("classification", tmp_path, **{"training.clip": clip, "training.warmup": 0, "training.learning_rate": 1e36})
    said = refused("train", path, "training.log_every=1", "training.steps=20")
    assert re.match(
        r"the loss is (nan|inf) at step \d+; the last checkpoint from before is kept. Train again, in another folder", said
    )
    assert "smaller training.learning_rate" in said
    assert not (tmp_path / "run" / "model").exists()
    # also if only the last step ruins it
    assert "the loss is " in refused("train", path, "training.steps=1", f"run={tmp_path / 'one'}")
    assert not (tmp_path / "one" / "model").exists()


@pytest.mark.parametrize("folder", ["file/run", "file", "/proc/x"])
def test_a_folder_that_cannot_be_written(tmp_path, quick, folder):
    (tmp_path / "file").touch()
    run = tmp_path / folder  # /proc/x stays what it is
    said = refused("train", quick("classification", tmp_path), f"run={run}")
    assert re.fullmatch(rf"{re.escape(str(run))} (is a file|cannot be written \(.+\)); give run=ANOTHER_FOLDER", said)
    said = refused("prepare", quick("classification", tmp_path), f"data.cache={run}")
    assert re.fullmatch(rf"{re.escape(str(run))}/prepared cannot be written \(.+\); set data.cache to a folder that can", said)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.epochs", "'training.epochs' is not an override; write key=value, such as training.epochs=2"),
        ("training.epocs=3", "there is no key training.epocs; did you mean 'epochs'? allowed here: epochs, steps, batch_size,"),
        ("trainning.epochs=3", "there is no key trainning; did you mean 'training'? allowed here: task, run, seed, model, data,"),
        ("model.hidden_siez=8", "there is no key model.hidden_siez; did you mean 'hidden_size'? allowed here: from, attention,"),
        ("data.columns.txt=a", "there is no key data.columns.txt; did you mean 'text'? allowed here: text, pair, label, source"),
        ("training.batch_size=many", "training.batch_size is the text 'many'; allowed: a whole number"),
        ("training.steps=1.5", "training.steps is the number 1.5; allowed: a whole number"),
        ("training.steps=.inf", "training.steps is the number inf; allowed: a whole number"),
        ("training.steps=.nan", "training.steps is the number nan; allowed: a whole number"),
        ("model.hidden_size=8.5", "model.hidden_size is the number 8.5; allowed: a whole number"),
        ("model.vocab_size=8", "model.vocab_size follows from the tokenizer and is not for you to set; remove it"),
        ("model.from=nowhere", "model.from starts from a saved model, which has its sizes already; remove model."),
        ("tokenizer.kind=byte", "tokenizer.kind is the text 'byte'; allowed: bpe, bytes, words; did you mean 'bytes'?"),
        ("training.precision=float16", "training.precision is float16, which needs a GPU; allowed here: float32, bfloat16, auto"),
        ("training.batch_size=1000", "training.batch_size is 1000, but there are only 400 training examples; make it smaller"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(tmp_path, quick, override, said):
    assert refused("train", quick("classification", tmp_path), override).startswith(said)
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("task: [classification\n", "is not YAML: while parsing a flow sequence"),
        ("task: classification\ntask: masked-lm\n", "the key 'task' stands twice"),
        ("task: classification\ndata: {path: x, path: y}\n", "the key 'path' stands twice"),
        ("classification\n", "must hold keys and values, such as `task: classification`; it holds the text 'classification'"),
        ("", "it holds nothing"),
        ("data: {path: x.csv}\n", "the key task is missing; allowed: classification, masked-lm"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert said in refused("train", path)


def test_a_configuration_that_is_not_shipped():
    said = "there is no file 'imbd', and no configuration of that name is shipped; did you mean 'imdb'?"
    assert refused("train", "imbd") == refused("prepare", "imbd") == said
    assert "shipped are bookcorpus_denoising, " in refused("train", "zzzzzz")


@pytest.mark.slow
def test_models_and_tokenizers_that_are_none(tmp_path, quick, trained_run):
    (tmp_path / "empty").mkdir()
    for source in ("nowhere", str(tmp_path / "empty")):
        path = quick("classification", tmp_path, **{"model": {"from": source}, "tokenizer": None})
        assert (
            refused("train", path)
            == f"model.from is {source!r}: there is no config.json; give the folder model/ of a run, or another saved model"
        )
    foreign = tmp_path / "foreign"
    shutil.copytree(trained_run("masked-lm").run / "model", foreign)
    config = read_json(foreign / "config.json")
    (foreign / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    path = quick("classification", tmp_path, **{"model": {"from": str(foreign)}, "tokenizer": None})
    assert f"model.from is '{foreign}', a model of the type 'bert'" in refused("train", path)
    said = refused("train", quick("classification", tmp_path, **{"tokenizer": {"from": str(tmp_path / "empty")}}))
    assert said.startswith(
        f"tokenizer.from is '{tmp_path / 'empty'}': neither a folder with a tokenizer nor one that could be loaded"
    )


@pytest.mark.slow
def test_mistakes_in_a_process_of_its_own(tmp_path):
    """One line on standard error, nothing of Python; also where the hub cannot be asked."""
    path = yaml_for("classification", tmp_path)
    hub = "no file or folder here, and reading it from the Hugging Face hub failed .+; give data.path=FOLDER with local files"
    tokenizer = r"neither a folder with a tokenizer nor one that could be loaded from the hub \(.+\)"
    for override, said in {
        f"data.path={tmp_path / 'missing.jsonl'}": f"data.path is '{tmp_path}/missing.jsonl': there is no such file or folder",
        "data.path=some/reviews": f"data.path is 'some/reviews': {hub}",
        "tokenizer.from=nonsense": f"tokenizer.from is 'nonsense': {tokenizer}",
    }.items():
        result = linformer("train", path, override, cwd=tmp_path, check=False)
        assert result.returncode == 2
        assert re.fullmatch(rf"Error: {said}\n", result.stderr)
        assert not (tmp_path / "run" / "model").exists()


# a line of ten million characters


@pytest.mark.slow
def test_a_long_line_is_classified(tmp_path):
    long = ("lovely " + "abcdefghij" * 1_000_000)[:10_000_000]
    write_jsonl(tmp_path / "data" / "train.jsonl", [*classification_rows(60), {"text": long, "label": "pos"}])
    write_jsonl(tmp_path / "data" / "validation.jsonl", classification_rows(20, seed=1))
    settings = {"data.path": tmp_path / "data", "tokenizer": {"kind": "bpe", "vocab_size": 400}, "training.steps": 2}
    path = yaml_for("classification", tmp_path, **settings, **{"training.evaluate_every": None})
    printed = linformer("train", path, cwd=tmp_path).stdout
    assert re.search(r"train examples\s+61, .* texts cut, losing \d+,\d{3},?", printed)
    assert (tmp_path / "run" / "result.json").exists()
    # of any process until now, in kilobytes: the text takes 10 MB
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4_000_000


@pytest.mark.slow
def test_a_long_line_is_text_to_learn_from(tmp_path):
    words = (NUMBERS[0] * 260_000)[:2_100_000]
    write_lines(tmp_path / "data" / "train.txt", [*running_lines(20), long := " ".join(words)])
    write_lines(tmp_path / "data" / "validation.txt", running_lines(20, seed=1))
    assert len(long) > 10_000_000
    settings = {"data.path": tmp_path / "data", "training.steps": 2, "training.evaluate_every": None}
    prepared = prepare(load_config(yaml_for("causal-lm", tmp_path, **settings)), QUIET)
    counts = prepared.summary["splits"]["train"]
    assert counts["length"]["longest"] == len(words) + 1
    assert counts["examples"] == math.ceil(counts["length"]["tokens"] / 24)
    trained_quickly(tmp_path / "causal-lm.yaml")
