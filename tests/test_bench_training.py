"""The benchmark of training: all models see the same batches, no second is counted twice or lost, and what was measured is kept."""

import copy
import csv
import gzip
import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

pytest.importorskip("linformer", reason='needs pip install "linformer-kit[bench,train]"')
pytest.importorskip("datasets", reason='needs pip install "linformer-kit[bench,train]"')

from linformer_kit.bench import measure
from linformer_kit.bench.peers import FULL, LINFORMER, WrongImplementation
from linformer_kit.training import prepare
from linformer_kit.training.config import load_config
from linformer_kit.training.model import max_length

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(BENCHMARKS)  # which is no package
    training, training_summary = import_module("training"), import_module("training_summary")

QUICK = training.QUICK
LENGTH = QUICK.lengths[0]
BATCH = QUICK.tokens // LENGTH
PHASES = {training.FORWARD, training.BACKWARD, training.OPTIMIZER, training.REST}
SLEEP = 0.02


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside other tests, threads that wait for each other take many times as long
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def benchmark_in(tmp_path_factory):
    return training.Benchmark(QUICK, tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def loops(benchmark_in):
    return training.Trainings(QUICK, benchmark_in.overrides, benchmark_in.scratch).loops(LENGTH)


# data


def test_made_up_reviews_are_as_long_as_real_ones(tmp_path):
    training.write_reviews(tmp_path, 2000)
    for split in ("train", "test"):
        with gzip.open(tmp_path / f"{split}.jsonl.gz", "rt") as file:
            rows = [json.loads(line) for line in file]
        words = [len(row["text"].split()) for row in rows]
        assert len(rows) == 2000
        assert {row["label"] for row in rows} == {0, 1}
        assert np.mean(words) == pytest.approx(231, rel=0.05)  # IMDB: 234 and 228
        assert np.mean([len(row["text"].encode()) for row in rows]) == pytest.approx(1310, rel=0.05)  # 1325 and 1294
        assert np.std(np.log(words)) == pytest.approx(0.645, rel=0.05)


def test_examples_are_full_and_nothing_is_lost_between_them(benchmark_in, tmp_path):
    config = load_config("imdb", [*benchmark_in.overrides, f"data.cache={json.dumps(str(tmp_path))}"])
    prepared = prepare.prepare(config, training.quiet_console())
    longest = max_length(config)
    examples = training.in_full(prepared, longest, 100, 10**6, tmp_path).splits["train"]
    rows = prepared.splits["train"]
    stream = [(token, label) for ids, label in zip(rows["input_ids"], rows["labels"], strict=True) for token in ids]
    assert len(examples) == len(stream) // 100 > 10
    assert {len(ids) for ids in examples["input_ids"]} == {100} == set(examples["length"])
    assert [token for ids in examples["input_ids"] for token in ids] == [token for token, _ in stream][
        : 100 * len(examples)
    ]
    assert examples["labels"][:] == [label for _, label in stream[: 100 * len(examples) : 100]]


# models


@pytest.mark.parametrize("sweep", [training.COMPLETE, QUICK], ids=lambda sweep: sweep.name)
def test_the_models_agree_with_a_plain_evaluation(sweep):
    training.check_models(load_config("imdb", list(sweep.overrides)), min(sweep.lengths))


@pytest.mark.parametrize("weight", ["proj_v", "to_q.weight"])
def test_a_wrong_package_is_refused(weight, monkeypatch):
    right = training.with_package_layers

    def wrong(model):
        model = right(model)
        model.layers[0].stack.net.layers[1][0].fn.get_parameter(weight).data.mul_(1.01)
        return model

    monkeypatch.setattr(training, "with_package_layers", wrong)
    with pytest.raises(WrongImplementation, match=LINFORMER):
        training.check_models(load_config("imdb", list(QUICK.overrides)), LENGTH)


def test_the_models_differ_in_their_layers_only(loops):
    models = {name: loop.trainer.model for name, loop in loops.items()}
    for name, model in models.items():
        outside = {key: value.shape for key, value in model.state_dict().items() if ".layers." not in key}
        assert outside == {
            key: value.shape for key, value in models[training.DYNAMIC].state_dict().items() if ".layers." not in key
        }, name
    config = models[training.DYNAMIC].config
    parameters = {name: sum(parameter.numel() for parameter in model.parameters()) for name, model in models.items()}
    # linformer has no b_Q, b_K, b_V
    assert parameters[training.LINEAR] - parameters[LINFORMER] == 3 * config.num_hidden_layers * config.hidden_size
    assert parameters[FULL] == parameters[training.FULL_FUSED] < parameters[training.DYNAMIC]
    projections = {name: model.config.projection for name, model in models.items()}
    assert (projections[training.DYNAMIC], projections[training.LINEAR], projections[FULL]) == (
        "dynamic",
        "linear",
        "none",
    )
    dropouts = {name: model.config.attention_probs_dropout_prob for name, model in models.items()}
    assert {name for name, dropout in dropouts.items() if dropout == 0} == {training.DYNAMIC_FUSED, training.FULL_FUSED}
    stack = models[LINFORMER].model.layers[0].stack
    assert {module.p for module in stack.modules() if isinstance(module, torch.nn.Dropout)} == {
        config.hidden_dropout_prob
    }


# the loop


def test_all_models_see_the_same_batches_and_every_token_is_counted(loops):
    seen = {}
    for name, loop in loops.items():
        batches = seen[name] = []
        before = copy.deepcopy(loop.trainer.model.state_dict())
        hook = loop.trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs, batches=batches: batches.append(copy.deepcopy(kwargs)), with_kwargs=True
        )
        turn = loop.turn(2)
        hook.remove()
        assert turn.steps == 2
        assert turn.tokens == sum(batch["input_ids"].numel() for batch in batches[1:]) == 2 * QUICK.tokens
        assert {tuple(batch["input_ids"].shape) for batch in batches} == {(BATCH, LENGTH)}
        assert all("attention_mask" not in batch for batch in batches)
        learnt = {key for key, value in loop.trainer.model.state_dict().items() if not torch.equal(value, before[key])}
        assert any(".layers." in key for key in learnt), name
    for batches in seen.values():
        for batch, other in zip(batches, seen[training.DYNAMIC], strict=True):
            assert torch.equal(batch["input_ids"], other["input_ids"])
            assert torch.equal(batch["labels"], other["labels"])


def slowly(function):
    def call(*args, **kwargs):
        time.sleep(SLEEP)
        return function(*args, **kwargs)

    return call


def slow_down(loop, phase, monkeypatch):
    """Let something within a phase sleep once per step."""
    trainer = loop.trainer
    if phase == training.REST:
        monkeypatch.setattr(trainer, "data_collator", slowly(trainer.data_collator))
    if phase == training.FORWARD:
        monkeypatch.setattr(trainer.model.classifier, "forward", slowly(trainer.model.classifier.forward))
    if phase == training.BACKWARD:
        monkeypatch.setattr(torch.Tensor, "backward", slowly(torch.Tensor.backward))
    if phase == training.OPTIMIZER:
        accelerator = trainer.accelerator
        monkeypatch.setattr(
            accelerator, "unscale_gradients", slowly(accelerator.unscale_gradients)
        )  # the first of clipping


@pytest.mark.parametrize("phase", sorted(PHASES))
def test_phases_add_up_and_each_second_counts_where_it_was_spent(phase, loops, monkeypatch):
    loop = loops[training.DYNAMIC]
    slow_down(loop, phase, monkeypatch)
    begun = time.perf_counter()
    turn = loop.turn(3)
    elapsed = time.perf_counter() - begun
    assert set(turn.seconds) == {training.STEP, *PHASES}
    assert sum(turn.seconds[each] for each in PHASES) == pytest.approx(turn.seconds[training.STEP])
    assert all(seconds > 0 for seconds in turn.seconds.values())
    assert turn.seconds[phase] >= 3 * SLEEP
    assert turn.seconds[training.STEP] < elapsed
    assert turn.per_step[phase] == turn.seconds[phase] / 3


def test_the_loop_logs_but_does_not_evaluate_or_save(loops):
    trainer = loops[LINFORMER].trainer
    loops[LINFORMER].turn(4)
    assert trainer.state.global_step == 5
    run = Path(trainer.args.output_dir).parent
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines][-2:] == [2, 4]
    assert all("loss" in line and "validation_loss" not in line for line in lines)
    assert not list(run.glob("checkpoints/*"))


class FakeLoop:
    """A loop whose steps take so many seconds, until memory runs out."""

    def __init__(self, seconds, lasts=100):
        self.seconds, self.left, self.asked = seconds, lasts, []

    def turn_if_it_fits(self, steps):
        self.asked.append(steps)
        self.left -= 1
        return None if self.left < 0 else training.Turn(steps, 100 * steps, {training.STEP: steps * self.seconds})


def test_turns_are_shorter_for_slow_models_and_end_with_memory():
    loops = {
        "quick": FakeLoop(0.1),
        "slow": FakeLoop(20.0),
        "too large": FakeLoop(1.0, lasts=0),
        "lately": FakeLoop(1.0, lasts=2),
    }
    turns = training.take_turns(loops, training.COMPLETE)
    # 1.1 + 3 · 20 + 11 seconds: three rounds in 220
    assert {name: loop.asked for name, loop in loops.items()} == {
        "quick": [1, 10, 10, 10],
        "slow": [1, 2, 2, 2],
        "too large": [1],
        "lately": [1, 10, 10],
    }
    assert {name: len(found) for name, found in turns.items()} == {"quick": 3, "slow": 3, "too large": 0, "lately": 0}


def test_what_runs_out_of_memory_is_recorded(tmp_path):
    benchmark = training.Benchmark(QUICK, tmp_path)
    (row,) = benchmark.training_rows(FULL, LENGTH, [])
    assert (row["phase"], row["status"], row["rounds"]) == (training.STEP, measure.OUT_OF_MEMORY, None)


def test_other_errors_are_not_taken_for_memory(loops, monkeypatch):
    loop = loops[training.LINEAR]
    monkeypatch.setattr(
        loop, "turn", lambda steps: (_ for _ in ()).throw(RuntimeError("can't allocate memory: 10 bytes"))
    )
    assert loop.turn_if_it_fits(1) is None
    monkeypatch.setattr(loop, "turn", lambda steps: (_ for _ in ()).throw(RuntimeError("sizes differ")))
    with pytest.raises(RuntimeError, match="sizes differ"):
        loop.turn_if_it_fits(1)


def test_rates_and_shares_are_those_of_the_turns(tmp_path):
    seconds = [{training.STEP: 4.0, training.FORWARD: 3.0}, {training.STEP: 8.0, training.FORWARD: 7.0}]
    turns = [training.Turn(2, 200, one) for one in seconds]
    step, forward = training.Benchmark(QUICK, tmp_path).training_rows(FULL, LENGTH, turns)
    assert (step["seconds_median"], step["seconds_fastest"], step["seconds_slowest"], step["rounds"]) == (
        3.0,
        2.0,
        4.0,
        2,
    )
    assert step["rate"] == pytest.approx(100 / 3)
    assert (forward["share"], "rate" in forward) == (pytest.approx(10 / 12), False)


# preparation


def test_preparation_starts_anew_and_its_phases_add_up(benchmark_in, tmp_path):
    before = prepare.tokenize
    first, second = (training.prepare_here(benchmark_in.overrides, tmp_path / "cache") for _ in range(2))
    assert prepare.tokenize is before
    texts = []
    for split in ("train", "test"):
        with gzip.open(benchmark_in.data / f"{split}.jsonl.gz", "rt") as file:
            texts += [json.loads(line)["text"] for line in file]
    for done in (first, second):
        seconds = dict(done.seconds)
        assert seconds.pop(training.PROCESSOR) > 0
        whole = seconds.pop(training.EVERYTHING)
        assert sum(seconds.values()) == pytest.approx(whole)
        assert all(one > 0 for one in seconds.values())
        assert done.megabytes == pytest.approx(sum(len(text.encode()) for text in texts) / 1e6)
        assert 0 < done.learnt_megabytes < done.megabytes / 2  # of the training split some is carved out


# the command


def run(*arguments: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, BENCHMARKS / "training.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training") / "results"
    done = run("--quick", "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_quick_run_writes_everything(quick_run):
    names = {"training.csv", "training_targets.csv", "training_machine.json", "training.png"}
    assert {path.name for path in quick_run.iterdir()} == names
    rows = read_rows(quick_run / "training.csv")
    assert all(row["status"] == measure.OK and float(row["seconds_median"]) > 0 for row in rows)
    trained = [row for row in rows if row["part"] == training.TRAINING]
    points = {(row["name"], row["length"], row["phase"]) for row in trained}
    phases = {training.STEP, *PHASES}
    assert points == {(name, str(n), phase) for name in training.MODELS for n in QUICK.lengths for phase in phases}
    assert {row["length"]: row["batch"] for row in trained} == {str(n): str(QUICK.tokens // n) for n in QUICK.lengths}
    for name in training.MODELS:
        for n in QUICK.lengths:
            shares = [
                float(row["share"])
                for row in trained
                if (row["name"], row["length"]) == (name, str(n)) and row["phase"] != training.STEP
            ]
            assert sum(shares) == pytest.approx(1, abs=1e-4)
    for row in trained:
        if row["phase"] == training.STEP:
            assert float(row["rate"]) == pytest.approx(QUICK.tokens / float(row["seconds_median"]), rel=1e-4)
    lengths = {row["name"]: row["length"] for row in rows if row["part"] == training.PREPARATION}
    assert lengths == {training.BPE: "1024", training.BYTES: "4096"}
    assert json.loads((quick_run / "training_machine.json").read_text())["data"] == "made-up reviews"
    verdicts = {row["verdict"] for row in read_rows(quick_run / "training_targets.csv")}
    assert verdicts <= {"met", "missed", "reported"}


def test_the_next_run_measures_only_what_is_missing(quick_run, tmp_path, monkeypatch):
    text = (quick_run / "training.csv").read_text()
    (tmp_path / "training.csv").write_text(text)
    assert all(step.is_done() for step in training.Benchmark(QUICK, tmp_path).steps())
    kept = [line for line in text.splitlines(keepends=True) if f",{QUICK.lengths[1]},{training.STEP}," not in line]
    kept = [line for line in kept if not (line.startswith("training,") and f",{QUICK.lengths[1]}," in line)]
    (tmp_path / "training.csv").write_text("".join(kept))

    called = []
    turn = training.Turn(1, QUICK.tokens, dict.fromkeys((training.STEP, *PHASES), 1.0))
    benchmark = training.Benchmark(QUICK, tmp_path)
    monkeypatch.setattr(
        benchmark, "call", lambda function, *args: called.append(args) or {name: [turn] for name in training.MODELS}
    )
    for step in benchmark.steps():
        if not step.is_done():
            list(step.run())
    assert called == [(QUICK.lengths[1],)]
    after = (tmp_path / "training.csv").read_text().splitlines(keepends=True)
    assert after[: len(kept)] == kept
    assert len(after) == len(text.splitlines())
    assert all(step.is_done() for step in training.Benchmark(QUICK, tmp_path).steps())


def test_the_targets_are_printed_as_a_table(quick_run, capsys):
    training_summary.main(quick_run)
    first, _, *table = capsys.readouterr().out.splitlines()
    assert first == "| to reach | at | wanted | measured |  |"
    assert table == [f"| {' | '.join(row.values())} |" for row in read_rows(quick_run / "training_targets.csv")]


def test_targets_are_judged_right(tmp_path):
    benchmark = training.Benchmark(training.COMPLETE, tmp_path)
    rates = {training.DYNAMIC: 300, training.LINEAR: 360, LINFORMER: 200, FULL: 100}
    benchmark.table.put(
        [
            *(
                {"part": "training", "name": name, "length": 512, "phase": "step", "rate": rate}
                for name, rate in rates.items()
            ),
            {"part": "training", "name": training.DYNAMIC, "length": 512, "phase": training.REST, "share": 0.049},
            {"part": "training", "name": training.DYNAMIC, "length": 4096, "phase": training.REST, "share": 0.06},
            {"part": "preparation", "name": "bpe", "length": 1024, "phase": training.EVERYTHING, "rate": 0.9},
            {"part": "preparation", "name": "bytes", "length": 4096, "phase": training.EVERYTHING, "rate": 1.1},
            {"part": "preparation", "name": "bpe", "length": 1024, "phase": training.LEARNING, "rate": 3.0},
        ]
    )
    table, lengths = benchmark.table, training.COMPLETE.lengths
    found = [
        *training_summary.speeds(table, lengths),
        *training_summary.overheads(table, lengths),
        *training_summary.preparations(table),
    ]
    texts = {target.texts[:2]: target.texts[2:] for target in found}
    outside = "share of a step outside forward, backward, clipping and optimizer"
    assert {key: rest for key, rest in texts.items() if rest[2] != "not measured"} == {
        ("tokens per second beside full attention", "training linformer-kit dynamic, N=512"): (
            "–",
            "3.00×",
            "reported",
        ),
        ("tokens per second beside linformer", "training linformer-kit dynamic, N=512"): ("–", "1.50×", "reported"),
        ("tokens per second beside linformer", "training linformer-kit linear, N=512"): ("–", "1.80×", "reported"),
        (outside, "training, N=512"): ("≤ 5 %", "5 %", "met"),
        (outside, "training, N=4,096"): ("≤ 5 %", "6 %", "missed"),
        ("text prepared on one core", "bpe, everything"): ("≥ 1.00 MB/s", "0.90 MB/s", "missed"),
        ("text prepared on one core", "bytes, everything"): ("≥ 1.00 MB/s", "1.10 MB/s", "met"),
        ("text prepared on one core", "bpe, training the tokenizer"): ("–", "3.00 MB/s", "reported"),
    }
    assert len(found) == 4 * 3 + 3 + 5


def test_data_are_told_apart_without_their_path(tmp_path, capsys):
    folder = tmp_path / "reviews"
    folder.mkdir()
    (folder / "train.jsonl").write_text("one")
    first = training.describe_data(folder)
    (folder / "train.jsonl").write_text("two")
    assert first != training.describe_data(folder)
    assert first.startswith("reviews, ")
    assert str(tmp_path) not in first
    with pytest.raises(typer.Exit):
        training.describe_data(tmp_path / "nowhere")
    assert "there is no such folder" in capsys.readouterr().err
