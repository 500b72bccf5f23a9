"""A run that was killed, stopped or damaged ends with the same bits as an undisturbed one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest
import yaml
from safetensors.torch import load_file
from training_zoo import environment

from linformer_kit.training import checkpoint

# not the end of an epoch, which has six steps, and not a multiple of any interval below
LAST = 25
# with dropout and masks, so that random states matter
CONFIG = {
    "task": "masked-lm",
    "model": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
        "projected_length": 4,
    },
    "data": {"path": "text.txt", "cache": "cache"},
    "tokenizer": {"kind": "words"},
    "training": {
        "steps": LAST,
        "batch_size": 4,
        "accumulate": 2,
        "save_every": 5,
        "evaluate_every": 8,
        "log_every": 3,
        "keep": 3,
    },
}
ENVIRONMENT = environment()

# `linformer`, but the process is killed when a function is called for the n-th time
DYING = """
import os, signal, sys
from linformer_kit import cli, files
from linformer_kit.training import checkpoint, train, trainer

where, count, *arguments = sys.argv[1:]
home, name = {
    "step": (trainer.LinformerTrainer, "training_step"),
    "optimizer step": (trainer.LinformerTrainer, "_clip_grad_norm"),
    "evaluation": (trainer.LinformerTrainer, "prediction_step"),
    "checkpoint": (trainer, "save_optimizer"),
    "write_manifest": (checkpoint, "write_manifest"),
    "rename": (files.os, "rename"),
    "removal": (trainer, "remove_old"),
    "finish": (train, "write_text"),
}[where]
function, calls = getattr(home, name), 0


def deadly(*given, **named):
    global calls
    calls += 1
    if calls == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*given, **named)


setattr(home, name, deadly)
cli.app(arguments)
"""


def write_run(folder: Path, run: str = "run", **changes) -> Path:
    """A small corpus and the YAML of a run on it."""
    folder.mkdir(exist_ok=True)
    words = [f"w{number}" for number in range(20)]
    lines = [
        " ".join(words[(start * step + place) % 20] for place in range(9)) for start in range(15) for step in (1, 3, 7)
    ]
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    config = {**CONFIG, "run": run, **{key: {**CONFIG.get(key, {}), **value} for key, value in changes.items()}}
    path = folder / f"{run}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(path: Path, *before: str, real: bool = False) -> subprocess.Popen:
    command = [*(before or (sys.executable, "-m", "linformer_kit.cli")), "train", path.name]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return fork_server.Popen(command, cwd=path.parent, env=ENVIRONMENT, text=True, real=real, **pipes)


def train(path: Path, *before: str, code: int = 0, real: bool = False) -> tuple[str, str]:
    process = start(path, *before, real=real)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors[-3000:]
    return output, errors


def weights(path: Path) -> dict[str, bytes]:
    """The bytes of every tensor in the last checkpoint of a run, including the optimizer."""
    run = path.parent / path.stem
    last = checkpoint.checkpoints_in(run / "checkpoints")[-1]
    assert last.name == f"checkpoint-{LAST}"
    found = {}
    for name in ("model.safetensors", "optimizer.safetensors"):
        found |= {f"{name} {key}": tensor.numpy().tobytes() for key, tensor in load_file(last / name).items()}
    found |= {
        f"result {key}": tensor.numpy().tobytes()
        for key, tensor in load_file(run / "model" / "model.safetensors").items()
    }
    return found


def metrics(path: Path) -> list[dict]:
    """The lines of metrics.jsonl without tokens per second."""
    lines = (path.parent / path.stem / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "tokens_per_second"} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run without interruption; the others share its prepared data."""
    path = write_run(tmp_path_factory.mktemp("resume"), "undisturbed")
    train(path, real=True)
    return path


def is_the_same(path: Path, undisturbed: Path) -> None:
    assert metrics(path) == metrics(undisturbed)
    ours, theirs = weights(path), weights(undisturbed)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.slow
def test_a_run_killed_repeatedly_is_bit_identical_to_an_uninterrupted_one(undisturbed):
    path = write_run(undisturbed.parent, "killed")
    points = [
        ("step", 3),  # before anything was saved
        ("step", 13),  # between the pieces of an accumulated batch, behind a checkpoint
        ("evaluation", 2),
        ("checkpoint", 2),  # of a checkpoint, the weights are written and nothing else
        ("write_manifest", 2),
        ("rename", 1),
        ("optimizer step", 2),
        ("removal", 1),
        ("finish", 1),  # everything is trained, the result is not written yet
    ]
    reached = []
    for where, count in points:
        train(path, sys.executable, "-c", DYING, where, str(count), code=-signal.SIGKILL)
        reached.append(
            [folder.name for folder in checkpoint.checkpoints_in(path.parent / "killed" / "checkpoints")][-1:]
        )
    output, _ = train(path)
    assert "Model in" in output
    assert reached[0] == []
    assert len({tuple(names) for names in reached}) > 4  # it did get on in between
    is_the_same(path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "step"),
    [(signal.SIGINT, 7), (signal.SIGTERM, 8), (signal.SIGTERM, 11)],
    ids=["Ctrl-C between two logs", "SIGTERM where an evaluation is due", "SIGTERM between a checkpoint and a log"],
)
def test_a_signal_saves_and_prints_how_to_resume(undisturbed, number, step):
    name = f"stopped-{step}"
    path = write_run(undisturbed.parent, name)
    # shells let background jobs, and so maybe this test, ignore Ctrl-C
    restore = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code = restore + DYING.replace("SIGKILL", number.name)
    batches = str(step * CONFIG["training"]["accumulate"])
    _, errors = train(path, sys.executable, "-c", code, "step", batches, code=128 + number)
    last_line = errors.strip().splitlines()[-1]
    assert last_line.startswith(f"Stopped and saved at step {step} of {LAST}.")
    assert f"linformer train {name}/config.yaml" in last_line
    last = checkpoint.checkpoints_in(path.parent / name / "checkpoints")[-1]
    assert (checkpoint.step_of(last), checkpoint.find_damage(last)) == (step, None)
    assert not (path.parent / name / "model").exists()
    train(path)
    is_the_same(path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_preparation_leaves_nothing_half_done(tmp_path, number):
    path = write_run(tmp_path, "early")
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5 w6 w7\n" * 300_000)
    prepared = tmp_path / "cache" / "prepared"
    process = start(path)
    while process.poll() is None and not (prepared.is_dir() and list(prepared.iterdir())):
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + number, "Stopped.\n")
    assert list(prepared.iterdir()) == []
    write_run(tmp_path, "early")
    train(path)
    assert (tmp_path / "early" / "result.json").is_file()


@pytest.mark.slow
def test_a_signal_during_an_evaluation_saves_and_the_evaluation_is_repeated(undisturbed):
    path = write_run(undisturbed.parent, "in-evaluation")
    _, errors = train(
        path, sys.executable, "-c", DYING.replace("SIGKILL", "SIGTERM"), "evaluation", "2", code=128 + signal.SIGTERM
    )
    assert f"Stopped and saved at step 16 of {LAST}" in errors
    assert "validation_loss" not in metrics(path)[-1]
    # and again during the pending evaluation
    train(path, sys.executable, "-c", DYING.replace("SIGKILL", "SIGTERM"), "evaluation", "1", code=128 + signal.SIGTERM)
    train(path)
    is_the_same(path, undisturbed)


@pytest.mark.slow
def test_a_run_killed_after_early_stopping_does_not_train_further(tmp_path):
    # with so small a learning rate, nothing improves
    path = write_run(tmp_path, "early", training={"patience": 1, "learning_rate": 1e-30})
    train(path, sys.executable, "-c", DYING, "finish", "1", code=-signal.SIGKILL)
    train(path)
    result = json.loads((tmp_path / "early" / "result.json").read_text())
    assert (result["best_step"], result["steps"]) == (8, 16)
    assert checkpoint.step_of(checkpoint.checkpoints_in(tmp_path / "early" / "checkpoints")[-1]) == 16
    assert [line["step"] for line in metrics(path) if "validation_loss" in line] == [8, 16]


def damaged_copy(undisturbed: Path, name: str) -> Path:
    """A copy of the run without its results, to be damaged."""
    path = write_run(undisturbed.parent, name)
    folder = path.parent / name
    shutil.copytree(undisturbed.parent / "undisturbed", folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "run": name}))
    for made in (folder / "model", folder / "tokenizer"):
        shutil.rmtree(made)
    (folder / "result.json").unlink()
    return path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("model.safetensors", truncate),
        ("optimizer.safetensors", flip_a_bit),
        ("trainer_state.json", Path.unlink),
        ("manifest.json", truncate),
    ],
    ids=["weights truncated", "one bit of the optimizer", "state missing", "manifest truncated"],
)
def test_a_damaged_checkpoint_is_detected_and_the_previous_one_is_used(undisturbed, name, harm):
    path = damaged_copy(undisturbed, f"damaged-{name}")
    harm(path.parent / path.stem / "checkpoints" / f"checkpoint-{LAST}" / name)
    output, _ = train(path)
    assert f"checkpoint-{LAST} is damaged" in output
    assert "resuming at 24" in output
    is_the_same(path, undisturbed)


def test_with_all_checkpoints_damaged_training_starts_again(undisturbed):
    path = damaged_copy(undisturbed, "hopeless")
    for folder in checkpoint.checkpoints_in(path.parent / "hopeless" / "checkpoints"):
        truncate(folder / "model.safetensors")
    output, _ = train(path)
    assert output.count("is damaged") == 3
    assert "resuming at" not in output
    is_the_same(path, undisturbed)


def test_two_runs_in_one_directory_are_refused(undisturbed):
    path = write_run(undisturbed.parent, "contested")
    code = """
import time
from pathlib import Path
from linformer_kit.training.run import RunFolder
with RunFolder(Path("contested")).locked():
    print("held", flush=True)
    time.sleep(600)  # it is killed before; on a busy machine the other process takes more than a minute to start
"""
    holder = fork_server.Popen(
        [sys.executable, "-c", code], cwd=path.parent, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        _, errors = train(path, code=2)
        assert errors.startswith("Error: another process is writing to contested")
    finally:
        holder.kill()
        holder.communicate()
    train(path)  # the lock has died with its holder


# `linformer` with a limit of 20,000 bytes per file, as on a full disk; set in the process itself, because code between
# fork and exec can deadlock on a lock of another thread
LIMITED = """
import resource, signal
from linformer_kit.cli import app

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
app()
"""


@pytest.mark.skipif(os.name == "nt", reason="limits of POSIX")
def test_a_full_disk_is_reported_and_leaves_the_last_checkpoint(undisturbed):
    path = damaged_copy(undisturbed, "full")
    folder = path.parent / "full" / "checkpoints"
    for old in checkpoint.checkpoints_in(folder)[-2:]:
        shutil.rmtree(old)
    (last,) = checkpoint.checkpoints_in(folder)
    _, errors = train(path, sys.executable, "-c", LIMITED, code=2)
    assert errors.startswith("Error: ")
    assert "could not be written" in errors
    assert f"the last complete checkpoint is full/checkpoints/{last.name}" in errors
    assert [each.name for each in folder.iterdir()] == [last.name]
    assert checkpoint.find_damage(last) is None
    train(path)
    is_the_same(path, undisturbed)


@pytest.mark.parametrize("change", ["longer", "only in another order"])
def test_data_that_changed_in_between_is_detected(undisturbed, change):
    folder = undisturbed.parent / f"changed {change}"
    shutil.copytree(undisturbed.parent, folder, ignore=shutil.ignore_patterns("changed*"))
    path = damaged_copy(folder / "undisturbed.yaml", "again")
    text = (folder / "text.txt").read_text()
    turned = "".join(f"{' '.join(line.split()[::-1])}\n" for line in text.splitlines())
    (folder / "text.txt").write_text(f"{text}w1 w2 w3\n" if change == "longer" else turned)
    _, errors = train(path, code=2)
    assert "the data has changed since the run in again began" in errors


@pytest.mark.slow
def test_a_stream_resumes_exactly_after_several_passes(tmp_path):
    data = {"streaming": True, "streaming_validation": 5, "shuffle_buffer": 8}
    paths = [write_run(tmp_path, name, data=data) for name in ("alone", "killed")]
    train(paths[0])
    train(paths[1], sys.executable, "-c", DYING, "step", "45", code=-signal.SIGKILL)
    assert checkpoint.checkpoints_in(tmp_path / "killed" / "checkpoints")
    with (tmp_path / "text.txt").open("a") as file:
        file.write("w1\n")
    assert "the data has changed" in train(paths[1], code=2)[1]
    write_run(tmp_path, "killed", data=data)
    train(paths[1])
    is_the_same(paths[1], paths[0])


def test_a_run_with_other_settings_is_refused(undisturbed):
    path = write_run(undisturbed.parent, "undisturbed", model={"projected_length": 8})
    _, errors = train(path, code=2)
    assert (
        "undisturbed contains a run with model.projected_length=4, but model.projected_length=8 is requested" in errors
    )
    write_run(undisturbed.parent, "undisturbed", model={"window_length": 4})
    _, errors = train(path, code=2)
    assert "undisturbed contains a run without model.window_length, but model.window_length=4 is requested" in errors
    write_run(undisturbed.parent, "undisturbed")


def test_no_checkpoint_contains_a_pickle(undisturbed):
    files = [
        path for path in (undisturbed.parent / "undisturbed").rglob("*") if path.is_file() and path.name != ".lock"
    ]
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".safetensors", ".yaml", ".png"}
