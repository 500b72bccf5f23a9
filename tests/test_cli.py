"""The command line in general."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_zoo import environment
from typer.testing import CliRunner

from linformer_kit import __version__, demo
from linformer_kit.cli import app, imports
from linformer_kit.errors import Stopped, UserError


def linformer(*arguments: str):
    return CliRunner().invoke(app, arguments)


def test_version():
    result = linformer("--version")
    assert (result.exit_code, result.output) == (0, f"linformer-kit {__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["demo", "--help"]], ids=" ".join)
def test_help_names_the_demo(arguments):
    result = linformer(*arguments)
    assert result.exit_code == 0
    assert "demo" in result.output


def test_without_a_command_it_shows_the_help():
    assert "demo" in linformer().output


def test_a_typo_suggests_the_nearest_command():
    result = linformer("dmeo")
    assert result.exit_code == 2
    assert "'dmeo'" in result.output
    assert "'demo'" in result.output


# start-up

# runs a command and prints what it has imported, and whether garbage is collected
LOADED = """
import gc, sys
from linformer_kit.cli import app
code = 0
try:
    app(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(gc.isenabled(), gc.get_freeze_count(), *sys.modules, file=sys.stderr)
sys.exit(code)
"""


def imported_by(*arguments):
    """Exit code, output, whether garbage is collected, number of frozen objects, and modules of a command."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, timeout=120, env=environment()
    )
    collects, frozen, *modules = done.stderr.splitlines()[-1].split(" ")
    return done.returncode, done.stdout + done.stderr, collects == "True", int(frozen), set(modules)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "demo"),
        (["evaluate", "--help"], 0, "--split"),
        (["predict", "--help"], 0, "--beams"),
        (["train", "imbd"], 2, "'imdb'"),
        (["predict", "no_such_run", "text"], 2, "no directory no_such_run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_typos_load_no_heavy_package(arguments, code, said):
    ended, output, *_, modules = imported_by(*arguments)
    assert (ended, said in output) == (code, True)
    assert "linformer_kit.cli" in modules
    assert not {"torch", "numpy", "transformers", "datasets", "matplotlib"} & modules


@pytest.mark.parametrize("task", ["classification", "translation"])
def test_predict_loads_nothing_that_only_training_needs(trained_run, task):
    run = trained_run(task).run
    ended, output, collects, frozen, modules = imported_by("predict", str(run), "the river and a lovely road")
    assert ended == 0, output
    assert {"torch", "linformer_kit.training.predict"} <= modules
    heavy = {"datasets", "pandas", "pyarrow", "matplotlib", "sacrebleu", "sklearn", "peft", "wandb", "tensorboard"}
    assert not heavy & modules
    ours = {f"linformer_kit.training.{name}" for name in ("data", "evaluate", "prepare", "tokens", "train", "trainer")}
    assert not {"transformers.trainer", "transformers.training_args", *ours} & modules
    # modules are exempt from garbage collection, and nothing else
    assert collects
    assert frozen > 100_000


def test_a_failing_import_leaves_the_garbage_collector_on(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(gc, "freeze", lambda: None)  # of this process, which continues
    collected = []

    def fail():
        with imports():
            collected.append(gc.isenabled())
            raise ModuleNotFoundError

    with pytest.raises(ModuleNotFoundError):
        fail()
    assert [*collected, gc.isenabled()] == [False, True]


def test_the_installed_script_runs():
    script = Path(sys.executable).with_name("linformer")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"linformer-kit {__version__}\n", "")


def test_unprintable_characters_are_replaced_in_an_ascii_log(tmp_path):
    code = """
import sys
from linformer_kit import cli, demo
demo.check_ready = lambda *_: sys.exit(print("24 × as fast"))
cli.app(["demo", "--output", sys.argv[1]])
"""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "24 ? as fast" in done.stdout


# how a command ends


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "Stopped.\n"),
        (Stopped("Stopped and saved at step 3 of 10.", 143), 143, "Stopped and saved at step 3 of 10.\n"),
        (
            UserError("training.steps is 0; it must be at least 1"),
            2,
            "Error: training.steps is 0; it must be at least 1\n",
        ),
        (OSError("the disk is full"), 2, "Error: the disk is full\n"),
        (ModuleNotFoundError("it needs matplotlib"), 2, "Error: it needs matplotlib\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_user_errors_end_in_one_line(tmp_path, monkeypatch, error, code, said):
    def failing(*_):
        raise error

    monkeypatch.setattr(demo, "check_ready", failing)
    result = linformer("demo", "--output", str(tmp_path))
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", said)


def test_other_errors_are_bugs_and_keep_their_traceback(tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(demo, "check_ready", broken)
    assert isinstance(linformer("demo", "--output", str(tmp_path)).exception, ZeroDivisionError)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_workers_end_on_sigterm_at_once():
    """With the handler of the command, a worker that waits for a lock would not end, nor would the pool."""
    code = """
import os, signal
from linformer_kit.cli import end_on_signal, report_user_errors
with report_user_errors():
    assert signal.getsignal(signal.SIGTERM) is end_on_signal
    worker = os.fork()
    if worker == 0:
        os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
    assert os.waitpid(worker, 0)[1] == 0
    assert signal.getsignal(signal.SIGTERM) is end_on_signal
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_an_interrupt_in_a_destructor_is_not_lost():
    """Python ignores exceptions there; a library that is being imported may run many destructors."""
    code = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from linformer_kit.cli import report_user_errors

class Interrupted:
    def __del__(self):
        raise KeyboardInterrupt

with report_user_errors():
    Interrupted()
    time.sleep(100)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "Stopped." in run.stderr
