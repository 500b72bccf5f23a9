"""Ways to train, in a few steps each: overrides, epochs, full attention, saved models, accumulation, label smoothing,
early stopping, precision, reporting, streams."""

import gc
import gzip
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional
from training_zoo import (
    QUESTIONS,
    QUIET,
    answers,
    classification_rows,
    command,
    pair_rows,
    read_json,
    refused,
    rows_of,
    running_lines,
    sentence_pairs,
    train_here,
    write_jsonl,
    write_lines,
    yaml_for,
)
from transformers import AutoTokenizer

from linformer_kit.training.config import load_config
from linformer_kit.training.data import read_splits
from linformer_kit.training.prepare import prepare
from linformer_kit.training.run import RunFolder
from linformer_kit.training.train import make_trainer

pytestmark = pytest.mark.usefixtures("restore_global_state")


def test_numbers_and_overrides_are_parsed(tmp_path):
    path = tmp_path / "my run.yaml"
    path.write_text("task: masked-lm\ndata: {path: text.txt}\ntraining: {learning_rate: 1e-3, steps: 1e2}\n")
    config = load_config(
        path, ["training.weight_decay=2E-2", "model.attention=full", "data.columns.text=content", "seed=7"]
    )
    assert (config.training.learning_rate, config.training.steps, config.training.weight_decay) == (0.001, 100, 0.02)
    assert (config.model, config.data.columns.text, config.seed) == ({"attention": "full"}, "content", 7)
    assert config.folder == Path("runs/my run")
    assert load_config(path, ["run="]).folder == Path("runs/my run")


@pytest.mark.slow
def test_overrides_reach_the_run(tmp_path, quick, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = quick("classification", tmp_path, run=None)
    _, result, lines = train_here(
        path, "training.steps=3", "training.log_every=1", "training.learning_rate=1e-3", "training.warmup=0"
    )
    assert result["steps"] == 3
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    # the learning rate of the first step of the cosine schedule
    assert lines[0]["learning_rate"] == pytest.approx(1e-3)
    stored = yaml.safe_load((tmp_path / "runs" / "classification" / "config.yaml").read_text())
    assert (stored["training"]["steps"], stored["training"]["learning_rate"]) == (3, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("wish", "steps"), [({}, 75), ({"training.epochs": 0.5}, 13), ({"training.epochs": 1}, 25)])
def test_epochs_are_whole_batches(tmp_path, quick, wish, steps):
    """400 examples in batches of 16; by default three epochs with an evaluation after each."""
    _, result, lines = train_here(quick("classification", tmp_path, **{"training.steps": None, **wish}))
    assert result["steps"] == steps
    assert [line["step"] for line in lines if "validation_loss" in line] == ([25, 50, 75] if not wish else [steps])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "causal-lm", "translation"])
def test_a_run_can_use_full_attention(tmp_path, quick, task):
    command("train", quick(task, tmp_path), "model.attention=full")
    config = read_json(tmp_path / "run" / "model" / "config.json")
    assert (config["projection"], config["decoder_attention"]) == ("none", "full")
    assert not [name for name in load_file(tmp_path / "run" / "model" / "model.safetensors") if "projection" in name]
    text = QUESTIONS[task][0][0]
    assert len(answers(tmp_path / "run", text, "--tokens", 4)) == 1


def rows_to_start_with(task):
    """Texts in the vocabulary of the language models; the label is the language, for pairs that of the second text."""
    names = {"one": "English", "eins": "German", "un": "French"}
    first, second = (running_lines(60, seed=seed) for seed in (0, 1))
    labels = [next(name for word, name in names.items() if word in line.split()) for line in second]
    if task == "pairs":
        return [
            {"premise": one, "hypothesis": other, "label": name}
            for one, other, name in zip(first, second, labels, strict=True)
        ]
    return [{"text": other, "label": name} for other, name in zip(second, labels, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "task"), [("masked-lm", "classification"), ("masked-lm", "pairs"), ("denoising", "translation")]
)
def test_a_run_starts_from_a_saved_model(tmp_path, quick, trained_run, source, task):
    """All weights except the head, the tokens and the length are those of the saved model."""
    start = trained_run(source).run / "model"
    still = {"training.learning_rate": 1e-12, "training.weight_decay": 0, "training.steps": 2}
    data = (
        {} if task == "translation" else {"data.path": write_jsonl(tmp_path / "data.jsonl", rows_to_start_with(task))}
    )
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
        # start another run with another number of classes from it
        rows = classification_rows(60) if task == "classification" else pair_rows(60)
        more = {"data.path": write_jsonl(tmp_path / "on.jsonl", rows), "model": {"from": str(saved)}, "tokenizer": None}
        command("train", quick(task, tmp_path / "on", **still, **more))
        again = load_file(tmp_path / "on" / "run" / "model" / "model.safetensors")
        assert again["classifier.weight"].shape == (2, 32)
        torch.testing.assert_close(again["model.norm.weight"], after["model.norm.weight"], rtol=0, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"projection": "dynamic", "projected_length": 6, "max_position_embeddings": 48},
        {"projection": "linear", "projected_length": 6, "sharing": "kv"},
        {
            "projection": "linear",
            "projected_length": [6],
        },  # one per layer, of which the saved model knows how many it has
        {"projection": "random"},
        {"attention": "full", "max_position_embeddings": 48},
    ],
    ids=lambda changes: f"{changes.get('projection', 'full')} {changes.get('projected_length', '')}",
)
def test_a_run_starts_from_a_saved_model_with_another_attention(tmp_path, quick, trained_run, changes):
    """All weights except E and F are those of the saved model; E and F are initialized."""
    start = trained_run("masked-lm").run / "model"
    still = {"training.learning_rate": 1e-12, "training.weight_decay": 0, "training.steps": 2}
    command(
        "train", quick("masked-lm", tmp_path, **still, **{"model": {"from": str(start), **changes}, "tokenizer": None})
    )
    saved = tmp_path / "run" / "model"
    before, after = (load_file(folder / "model.safetensors") for folder in (start, saved))
    config = read_json(saved / "config.json")
    expected = {"projection": "none"} if "attention" in changes else changes
    assert {name: config[name] for name in expected} == expected
    positions = "model.embeddings.position_embeddings.weight"
    assert after.pop(positions).shape[0] == changes.get("max_position_embeddings", 24)
    fresh = {name for name in after if ".projection." in name}
    assert bool(fresh) == ("attention" not in changes)
    assert after.keys() - fresh == {name for name in before if ".projection." not in name} - {positions}
    for name in after.keys() - fresh:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-8)
    for name in fresh & before.keys():
        assert after[name].shape != before[name].shape or not torch.allclose(after[name], before[name], atol=1e-3)


@pytest.mark.slow
def test_gradient_accumulation_gives_the_same_step(tmp_path, quick):
    losses = {}
    for accumulate in (1, 4):
        wish = [f"training.accumulate={accumulate}", "training.log_every=1", f"run={tmp_path / str(accumulate)}"]
        _, _, lines = train_here(quick("causal-lm", tmp_path), *wish)
        losses[accumulate] = [line["loss"] for line in lines if "loss" in line]
    assert losses[4] == pytest.approx(losses[1], rel=1e-4)
    assert losses[1][-1] < losses[1][0]
    assert refused("train", quick("causal-lm", tmp_path), "training.accumulate=3", f"run={tmp_path / '3'}") == (
        "training.batch_size is 16, not a multiple of 1 process × training.accumulate=3; choose a multiple of 3"
    )


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "masked-lm", "causal-lm", "translation"])
def test_label_smoothing_by_hand(tmp_path, quick, task):
    """Smoothing distributes a share over all classes or tokens; evaluations use none."""
    config = load_config(quick(task, tmp_path, **{"training.label_smoothing": 0.3}))
    trainer, _ = make_trainer(config, prepare(config, QUIET), RunFolder(config.folder))
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
        functional.cross_entropy(sums, labels).item()
        if task == "classification"
        else (sums[:, 0].sum() / sums[:, 1].sum()).item()
    )
    assert found == pytest.approx(plain.mean().item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["the same", "as many others"])
def test_labels_decide_whether_the_classifier_starts_fresh(tmp_path, trained_run, labels):
    source = trained_run("classification").run / "model"
    names = {"pos": "pos", "neg": "neg"} if labels == "the same" else {"pos": "liked", "neg": "disliked"}
    rows = [{**row, "label": names[row["label"]]} for row in classification_rows(60)]
    settings = {"data.path": write_jsonl(tmp_path / "rows.jsonl", rows), "model": {"from": str(source)}}
    path = yaml_for("classification", tmp_path, **settings, **{"training.steps": 1, "training.learning_rate": 1e-12})
    train_here(path, "training.evaluate_every=null")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "run" / "model"))
    assert torch.allclose(before["classifier.weight"], after["classifier.weight"], atol=1e-6) == (labels == "the same")
    # the run does not depend on the model that it started from
    moved = source.rename(source.with_name("moved"))
    try:
        command("evaluate", tmp_path / "run", "--data", tmp_path / "rows.jsonl")
    finally:
        moved.rename(source)
    assert read_json(tmp_path / "run" / "evaluation.json")["rows"] == 60


@pytest.mark.slow
def test_patience_ends_a_run_without_improvement(tmp_path, quick):
    settings = {
        "training.patience": 2,
        "training.steps": 40,
        "training.evaluate_every": 2,
        "training.learning_rate": 1e-12,
    }
    _, result, lines = train_here(quick("classification", tmp_path, **settings))
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 6]
    assert (result["best_step"], result["steps"]) == (2, 6)
    assert "is finished" in command("train", tmp_path / "classification.yaml").stdout


@pytest.mark.slow
def test_a_run_can_use_bfloat16_on_a_cpu(tmp_path, quick):
    printed, result, _ = train_here(
        quick("classification", tmp_path, **{"training.steps": 60}), "training.precision=bfloat16"
    )
    assert rows_of(printed)["device"] == "cpu, 1 process, bfloat16"
    assert result["validation_accuracy"] > 0.8
    assert all(
        weights.dtype == torch.float32
        for weights in load_file(tmp_path / "run" / "model" / "model.safetensors").values()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("best_by", "metric"), [("loss", "loss"), ("macro_f1", "macro_f1"), (None, "accuracy")])
def test_the_best_checkpoint_can_be_selected_by_another_metric(tmp_path, quick, best_by, metric):
    """With a much too high learning rate, different metrics select different checkpoints."""
    swings = {"training.steps": 24, "training.evaluate_every": 1, "training.learning_rate": 0.3, "training.warmup": 0}
    path = quick("classification", tmp_path, **swings, **{"training.best_by": best_by, "training.clip": 0})
    _, result, lines = train_here(path)
    found = {line["step"]: line for line in lines if "validation_loss" in line}

    def best(name):
        values = {step: line[f"validation_{name}"] * (-1 if name == "loss" else 1) for step, line in found.items()}
        return max(values, key=values.__getitem__)

    assert best("loss") != best("accuracy")
    assert result["best_step"] == best(metric)


def test_the_recommended_commands_work_without_a_test_split(tmp_path, quick):
    path = quick("classification", tmp_path, run=tmp_path / "my run", **{"training.steps": 1})
    printed, *_ = train_here(path, f"data.path={load_config(path).data.path}/train.jsonl")
    recommended = re.search(r"^Next: linformer (evaluate .+), linformer (predict .+)$", printed, re.MULTILINE)
    command(*shlex.split(recommended[1]))
    command(*shlex.split(recommended[2]))
    assert read_json(tmp_path / "my run" / "evaluation.json")["split"] == "validation"


# sizes that train in a second
TINY = (
    *(
        "model.hidden_size=16",
        "model.num_attention_heads=2",
        "model.intermediate_size=32",
        "model.num_decoder_layers=1",
    ),
    *("model.max_position_embeddings=64", "tokenizer={kind: words, min_frequency: 1}"),
    *("training.epochs=null", "training.steps=2", "training.batch_size=8", "training.accumulate=1"),
    *("training.evaluate_every=2", "training.evaluation_batch_size=64", "training.device=cpu", "data.workers=1"),
)


@pytest.mark.slow
def test_the_shipped_experiments_train_on_local_data_and_are_drawn(tmp_path, quick, monkeypatch):
    """Translation with a learned E and with full attention, and K × sharing of the denoising model."""
    pytest.importorskip("matplotlib")
    from linformer_kit.bench.study_tables import Study, load_tables

    monkeypatch.chdir(tmp_path)
    pairs, texts = (load_config(quick(task, tmp_path)).data for task in ("translation", "denoising"))
    where = f"data={{path: '{pairs.path}', cache: '{pairs.cache}'}}"
    names = [f"wmt14_en_de_{name}" for name in ("k32", "full")]
    for name in names:
        command("train", name, *TINY, where)
    command("plot", *(f"runs/{name}" for name in names), "--what", "quality", "--output", "quality.svg")
    assert all(f"<!-- {text} -->" in Path("quality.svg").read_text() for text in ("full attention", "32"))

    study = Study(load_tables(Path("denoising_sharing")), tmp_path, tmp_path, Path(texts.path).parent)
    study.tables["denoising"] = replace(study.tables["denoising"], data=Path(texts.path).name)
    jobs = study.jobs(["denoising"])
    assert len({job.fingerprint for job in jobs}) == 1 + 3 * 4
    few = [job for job in jobs if job.variant in ("K=32, kv", "K=32, layerwise")]
    for job in few:
        command("train", *study.arguments(job), *TINY, f"data.cache={texts.cache}")
    command("plot", *(job.run.folder for job in few), "--what", "sharing", "--output", "sharing.svg")
    assert all(f"<!-- {text} -->" in Path("sharing.svg").read_text() for text in ("kv", "layerwise"))


@pytest.mark.slow
def test_several_tools_find_their_files_in_the_run(tmp_path, quick, monkeypatch):
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    overrides = "training.report=[tensorboard, wandb]", "training.log_every=1"
    _, _, lines = train_here(quick("classification", tmp_path), *overrides)
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    (events,) = (tmp_path / "run").rglob("events.out.tfevents*")
    found = EventAccumulator(str(events.parent))
    found.Reload()
    losses = [event.value for event in found.Scalars("train/loss")]
    assert losses == pytest.approx([line["loss"] for line in lines if "loss" in line])
    assert "eval/accuracy" in found.Tags()["scalars"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "ending"),
    [("masked-lm", "txt"), ("masked-lm", "jsonl.gz"), ("causal-lm", "txt.gz"), ("translation", "tsv")],
)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # datasets does not close tables
def test_a_run_can_read_a_stream(tmp_path, task, ending):
    """The first examples are used for validation; the others are read repeatedly."""
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
    run = yaml_for(
        task, tmp_path, **{"data.path": tmp_path / f"corpus.{ending}", "training.evaluate_every": 30, **wish}
    )
    splits = {role: list(rows) for role, rows in read_splits(load_config(run)).items()}
    assert [len(splits[role]) for role in ("validation", "train")] == [21, 129]
    name, whole = (
        ("source", [source for source, _ in sentence_pairs(150)])
        if task == "translation"
        else ("text", running_lines(150))
    )
    assert [row[name] for role in ("validation", "train") for row in splits[role]] == whole
    printed, result, lines = train_here(run, "training.steps=30")  # 480 examples of 129
    assert rows_of(printed)["train examples"] == "streamed"
    assert rows_of(printed)["validation examples"].startswith("21,")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert result["steps"] == 30
    # the validation split can be evaluated again, the stream cannot
    command("evaluate", tmp_path / "run", "--split", "validation")
    assert read_json(tmp_path / "run" / "evaluation.json")["loss"] == pytest.approx(result["validation_loss"], rel=1e-5)
    assert "the train split is streamed" in refused("evaluate", tmp_path / "run", "--split", "train")
    text = QUESTIONS[task][0][0]
    asked = write_jsonl(tmp_path / "asked.jsonl", [{"source" if task == "translation" else "text": text}])
    assert answers(tmp_path / "run", asked, "--tokens", 3) == answers(tmp_path / "run", text, "--tokens", 3)
    gc.collect()


HOLES = """
import sys
import torch
from rich.console import Console
from linformer_kit.process_memory import status_bytes
from linformer_kit.training.config import load_config
from linformer_kit.training.train import train

config = load_config(sys.argv[1], ["training.steps=50", "training.evaluate_every=50"])
large = torch.ones(2**22)
del large  # from now on glibc keeps freed tensors of up to 16 MiB
before = status_bytes("VmRSS")
freed, kept = zip(*((torch.ones(2**18), torch.ones(2**10)) for _ in range(400)))
del freed  # 400 MiB, between small pieces that are in use
left = status_bytes("VmRSS") - before
train(config, Console(quiet=True))
print(left // 2**20, (status_bytes("VmRSS") - before) // 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_returned_to_the_system_during_training(tmp_path, quick):
    path = quick("classification", tmp_path)
    left, after = map(int, subprocess.check_output([sys.executable, "-c", HOLES, str(path)], text=True).split())
    assert left > 300  # else there is nothing to give back
    assert after < left / 2
