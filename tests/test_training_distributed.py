"""Several processes: the same YAML, the same curve, every example counted once, one writer."""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest
import yaml
from safetensors.torch import load_file
from test_training_resume import ENVIRONMENT

from linformer_kit.training import checkpoint

pytestmark = pytest.mark.slow

# without dropout, which differs between processes
MODEL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
    "projected_length": 4,
    "block_length": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TRAINING = {
    "steps": 16,
    "batch_size": 8,
    "precision": "float32",
    "learning_rate": 3e-3,
    "evaluate_every": 8,
    "log_every": 1,
    "weight_decay": 0.1,
}
TWO = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "linformer_kit.cli",
)
ONE = (sys.executable, "-m", "linformer_kit.cli")


def write_runs(folder: Path, task: str, **training) -> tuple[Path, Path]:
    """The YAMLs of two equal runs; lengths differ, and 53 test rows do not fill the last batch."""
    words = [f"w{number}" for number in range(12)]
    rows = [
        {
            "text": " ".join(words[(number * place) % 12] for place in range(1, 4 + number % 15)),
            "target": " ".join(words[(number + place) % 12] for place in range(1, 3 + number % 7)),
            "label": number % 3,
        }
        for number in range(200)
    ]
    for name, part in (("train", rows[:147]), ("test", rows[147:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    paths = []
    for name in ("one", "two"):
        config = {
            "task": task,
            "run": name,
            "model": MODEL,
            "data": {"path": ".", "cache": "cache", "validation_share": 0.2, "columns": {"source": "text"}},
            "tokenizer": {"kind": "words", "min_frequency": 1},
            "training": {**TRAINING, **training},
        }
        paths.append(folder / f"{name}.yaml")
        paths[-1].write_text(yaml.safe_dump(config))
    return paths[0], paths[1]


def run(folder: Path, launcher: tuple[str, ...], *arguments: str) -> str:
    done = fork_server.run([*launcher, *arguments], cwd=folder, env=ENVIRONMENT, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@contextlib.contextmanager
def start_two(folder: Path, *arguments: str):
    """What `TWO` does, without torchrun, which imports everything twice: two forks that find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for rank in ("0", "1"):
        env = ENVIRONMENT | where | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        with (folder / f"output {rank}.txt").open("w") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            processes.append(fork_server.Popen([*ONE, *arguments], cwd=folder, env=env, **streams))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def run_two(folder: Path, *arguments: str) -> str:
    """What `run` with `TWO` does."""
    with start_two(folder, *arguments) as processes:
        codes = [process.wait(120) for process in processes]
    printed = [(folder / f"output {rank}.txt").read_text() for rank in (0, 1)]
    assert codes == [0, 0], printed
    return "".join(printed)


def wait_for(path: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.005)


def start(path: Path) -> subprocess.Popen:
    command, pipes = [*TWO, "train", path.name], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return fork_server.Popen(command, cwd=path.parent, env=ENVIRONMENT, start_new_session=True, **pipes)


def ends(process: subprocess.Popen) -> None:
    """Wait for a process and its children; kill them if they do not end."""
    try:
        process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("task", "training"),
    [
        ("classification", {}),
        ("masked-lm", {"accumulate": 2}),
        ("causal-lm", {}),
        ("translation", {"label_smoothing": 0.1}),
    ],
    ids=["classification", "masked-lm accumulated", "causal-lm", "translation smoothed"],
)
def test_two_processes_learn_what_one_learns(tmp_path, task, training):
    one, two = write_runs(tmp_path, task, **training)
    run(tmp_path, ONE, "train", one.name)
    # torchrun itself once; in the other cases two forks, which start faster
    train_two = functools.partial(run, tmp_path, TWO) if task == "masked-lm" else functools.partial(run_two, tmp_path)
    printed = train_two("train", two.name)
    assert "2 processes" in printed
    assert printed.count("Model in") == 1  # one of them speaks
    ours, theirs = lines(tmp_path / "two"), lines(tmp_path / "one")
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]  # one of them writes
    for mine, other in zip(ours, theirs, strict=True):
        for name in mine.keys() - {"tokens_per_second"}:
            assert mine[name] == pytest.approx(other[name], rel=2e-4), (name, mine["step"])
    counts = {"tokens", "validation_tokens", "validation_examples"}
    assert [{name: line.get(name) for name in counts} for line in ours] == [
        {name: line.get(name) for name in counts} for line in theirs
    ]
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two")]
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() < 1e-3, name


def test_evaluation_counts_each_example_once_and_translates_in_order(tmp_path):
    one, _ = write_runs(tmp_path, "translation")
    run(tmp_path, ONE, "train", one.name)
    found = []
    for evaluate in (lambda *given: run(tmp_path, ONE, *given), lambda *given: run_two(tmp_path, *given)):
        evaluate("evaluate", "one")
        found.append(
            (
                json.loads((tmp_path / "one" / "evaluation.json").read_text()),
                (tmp_path / "one" / "translations.jsonl").read_text(),
            )
        )
    (alone, texts), (shared, same_texts) = found
    assert texts == same_texts
    assert len(texts.splitlines()) == alone["sentences"] == alone["rows"] == 53
    assert (
        shared["tokens"] == alone["tokens"] == sum(3 + number % 7 for number in range(147, 200))
    )  # with the end of each
    assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-6)


@pytest.mark.parametrize("task", ["denoising", "translation"])
def test_two_processes_share_a_stream(tmp_path, task):
    one, two = write_runs(tmp_path, task)
    for path in (one, two):
        config = yaml.safe_load(path.read_text())
        config["data"] |= {"streaming": True, "streaming_validation": 20, "shuffle_buffer": 16}
        path.write_text(yaml.safe_dump(config))
    run(tmp_path, ONE, "train", one.name)
    run_two(tmp_path, "train", two.name)
    ours, theirs = lines(tmp_path / "two"), lines(tmp_path / "one")
    assert [line["tokens"] for line in ours if "tokens" in line] == [
        line["tokens"] for line in theirs if "tokens" in line
    ]
    for mine, other in zip(ours, theirs, strict=True):
        name = "loss" if "loss" in mine else "validation_loss"
        assert mine[name] == pytest.approx(other[name], rel=2e-4)


def test_a_signal_to_one_of_them_stops_both_and_finishes_nothing(tmp_path):
    _, two = write_runs(tmp_path, "masked-lm", steps=4000, save_every=4)
    with start_two(tmp_path, "train", two.name) as processes:  # torchrun would stop the other one itself
        wait_for(tmp_path / "two" / "checkpoints" / "checkpoint-8")
        processes[1].send_signal(signal.SIGTERM)
        assert [process.wait(120) for process in processes] == [143, 143]
    assert not (tmp_path / "two" / "model").exists()
    assert not (tmp_path / "two" / "result.json").exists()
    last = checkpoint.checkpoints_in(tmp_path / "two" / "checkpoints")[-1]
    assert checkpoint.find_damage(last) is None
    # each process has its own random state
    chance = [json.loads((last / f"random-{rank}.json").read_text())["torch"] for rank in (0, 1)]
    assert chance[0] != chance[1]


def test_two_processes_stop_together_and_resume_exactly(tmp_path):
    one, two = write_runs(tmp_path, "classification", steps=40, save_every=4)
    text = two.read_text().replace("hidden_dropout_prob: 0.0", "hidden_dropout_prob: 0.2")
    two.write_text(text)
    one.write_text(text.replace("run: two", "run: one"))
    run_two(tmp_path, "train", one.name)
    process = start(two)
    wait_for(tmp_path / "two" / "checkpoints" / "checkpoint-8")
    process.send_signal(signal.SIGTERM)
    ends(process)
    assert not (tmp_path / "two" / "model").exists()
    last = checkpoint.checkpoints_in(tmp_path / "two" / "checkpoints")[-1]
    assert checkpoint.find_damage(last) is None
    assert {path.name for path in last.glob("random-*")} == {"random-0.json", "random-1.json"}
    time.sleep(1)
    run_two(tmp_path, "train", two.name)
    ours, theirs = (
        load_file(tmp_path / name / "checkpoints" / "checkpoint-40" / "model.safetensors") for name in ("two", "one")
    )
    assert all(ours[name].numpy().tobytes() == theirs[name].numpy().tobytes() for name in theirs)
    assert os.listdir(tmp_path / "two" / "model")
