"""The command line in general."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linformer_kit import __version__, demo
from linformer_kit.cli import app
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


def test_help_loads_neither_torch_nor_matplotlib():
    code = """
import sys
from linformer_kit.cli import app
try:
    app(["--help"])
except SystemExit as end:
    assert end.code == 0, end.code
assert not {"torch", "matplotlib", "numpy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


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
