"""The command line and its demo."""

import csv
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from linformer_kit import __version__, demo
from linformer_kit.cli import app
from linformer_kit.demo import learn, show

TINY = learn.Settings(
    length=48,
    marked=8,
    projected_length=8,
    width=16,
    heads=2,
    batch=4,
    steps=5,
    held_out=10,  # not a multiple of the batch
    layer_lengths=(16, 33),
    layer_width=16,
    layer_rounds=2,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Beside other work, threads that wait for each other make tiny models many times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The demo's own code, run once with tiny settings: the result, its folder and what it printed."""
    folder, printed = tmp_path_factory.mktemp("cli") / "new" / "[bold] demo", io.StringIO()
    result = demo.run(folder, TINY, Console(file=printed, width=80))
    return result, folder, printed.getvalue()


def linformer(*arguments: str):
    return CliRunner().invoke(app, arguments)


# the command line


def test_version():
    result = linformer("--version")
    assert (result.exit_code, result.output) == (0, f"linformer-kit {__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["demo", "--help"]], ids=" ".join)
def test_help_tells_of_the_demo(arguments):
    result = linformer(*arguments)
    assert result.exit_code == 0
    assert "demo" in result.output


def test_without_a_command_it_shows_the_help():
    assert "demo" in linformer().output


def test_a_typo_is_answered_with_the_nearest_command():
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


def test_a_log_that_knows_only_ascii(tmp_path):
    code = """
import sys
from linformer_kit import cli, demo
demo.measure = lambda *_: sys.exit(print("24 × as fast"))
cli.app(["demo", "--output", sys.argv[1]])
"""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "24 ? as fast" in done.stdout


# what goes wrong does so at once, in one line


@pytest.fixture
def no_work(monkeypatch):
    """Fail as soon as the demo begins to work."""
    monkeypatch.setattr(demo, "measure", lambda *_: pytest.fail("the work has begun"))


def fails_in_one_line(result, *said: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    for words in said:
        assert words in result.stderr


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("path", ["taken", "taken/below"], ids=["a file", "below a file"])
def test_an_output_that_cannot_be_a_folder(tmp_path, path):
    (tmp_path / "taken").write_text("precious")
    fails_in_one_line(linformer("demo", "--output", str(tmp_path / path)), path, "--output")
    assert (tmp_path / "taken").read_text() == "precious"


@pytest.mark.usefixtures("no_work")
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder where even root cannot write")
@pytest.mark.parametrize("path", ["/proc", "/proc/demo"])
def test_an_output_that_cannot_be_written(path):
    fails_in_one_line(linformer("demo", "--output", path), path, "--output")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", [demo.PICTURE, demo.NUMBERS])
def test_an_output_whose_files_are_folders(tmp_path, name):
    (tmp_path / name).mkdir()
    fails_in_one_line(linformer("demo", "--output", str(tmp_path)), name, "--output")


@pytest.mark.usefixtures("no_work")
def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    fails_in_one_line(linformer("demo", "--output", str(tmp_path)), 'pip install "linformer-kit[plot]"')


def test_an_interrupt_ends_in_one_line_and_130(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "measure", interrupted)
    result = linformer("demo", "--output", str(tmp_path))
    assert (result.exit_code, result.stderr) == (130, "Stopped.\n")


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_real_interrupt_leaves_neither_traceback_nor_files(tmp_path):
    # a shell may have told its background jobs, and so this test, to ignore Ctrl-C
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from linformer_kit.cli import app; app()"
    command = [sys.executable, "-c", code, "demo", "--output", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # the first words: everything is loaded
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, errors) == (130, "Stopped.\n")
    assert list((tmp_path / "out").iterdir()) == []


def test_other_errors_are_bugs_and_keep_their_traceback(tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(demo, "measure", broken)
    assert isinstance(linformer("demo", "--output", str(tmp_path)).exception, ZeroDivisionError)


# the task


def test_the_label_is_the_digit_of_every_marked_token():
    tokens, mask, labels = learn.make_batch(TINY, 200, torch.Generator().manual_seed(0))
    for example, real, label in zip(tokens.tolist(), mask.tolist(), labels.tolist(), strict=True):
        length = sum(real)
        assert TINY.length // 2 <= length <= TINY.length
        assert real == [True] * length + [False] * (TINY.length - length)
        assert example[0] == learn.START
        assert example[length:] == [learn.PADDING] * (TINY.length - length)
        marked = [token for token in example[1:length] if token >= learn.DIGITS]
        assert marked == [learn.DIGITS + label] * TINY.marked


def test_labels_lengths_and_places_take_all_their_values():
    tokens, mask, labels = learn.make_batch(TINY, 2000, torch.Generator().manual_seed(0))
    assert set(labels.tolist()) == set(range(learn.DIGITS))
    assert set(mask.sum(dim=1).tolist()) == set(range(TINY.length // 2, TINY.length + 1))
    is_marked = (tokens >= learn.DIGITS) & (tokens < learn.START)
    assert is_marked.any(dim=0).tolist() == [False] + [True] * (TINY.length - 1)


def test_the_first_token_alone_tells_nothing():
    """Without attention the answer would not depend on the digits at all."""
    model = learn.make_models(TINY)["full attention"]
    for layer in model.encoder.layers:
        torch.nn.init.zeros_(layer.attention.output.weight)
    tokens, mask, _ = learn.make_batch(TINY, 8, torch.Generator().manual_seed(0))
    logits = model(tokens, mask)
    torch.testing.assert_close(logits, logits[:1].expand_as(logits))


# the models and their training


def test_the_models_differ_in_the_projection_alone():
    linformer_weights, full_weights = (learn.make_models(TINY)[name].state_dict() for name in ("Linformer", "full attention"))
    only = set(linformer_weights) ^ set(full_weights)
    assert only == {f"encoder.layers.{layer}.attention.projection.weight" for layer in range(TINY.depth)}
    for name, weight in full_weights.items():
        torch.testing.assert_close(linformer_weights[name], weight, rtol=0, atol=0)


def test_the_same_seed_gives_the_same_training(tiny):
    result, _, _ = tiny
    *_, again = learn.train(learn.make_models(TINY), TINY)
    for name, learner in result.learners.items():
        assert again[name].losses == pytest.approx(learner.losses, rel=1e-6)
        assert again[name].hits == learner.hits


def test_another_seed_gives_another_training():
    one, two = (learn.Settings(**{**vars(TINY), "seed": seed}) for seed in (0, 1))
    (*_, first), (*_, second) = (learn.train(learn.make_models(settings), settings) for settings in (one, two))
    assert first["Linformer"].losses != second["Linformer"].losses


@pytest.mark.slow
def test_both_models_learn_the_task():
    """The task and the training of the demo, on a sequence short enough for a test."""
    settings = learn.Settings(length=128, marked=8, projected_length=16, steps=150, held_out=200)
    models = learn.make_models(settings)
    for _ in learn.train(models, settings):
        pass
    for name, model in models.items():
        assert learn.accuracy(model, settings) > 0.95, name


# what it leaves behind


def test_the_csv_holds_what_was_measured(tiny):
    result, folder, _ = tiny
    with (folder / demo.NUMBERS).open(newline="") as file:
        table = {(row["quantity"], row["model"], row["length"], row["step"]): float(row["value"]) for row in csv.DictReader(file)}
    length, steps = str(TINY.length), str(TINY.steps)
    assert len(table) == 2 * (3 + 3 * TINY.steps + len(TINY.layer_lengths))  # and no row twice
    for name in learn.PROJECTIONS:
        learner = result.learners[name]
        assert table["held-out accuracy", name, length, steps] == learn.accuracy(learner.model, TINY)
        assert table["parameters", name, length, ""] == sum(p.numel() for p in learner.model.parameters())
        times = sorted(table["step seconds", name, length, str(step)] for step in range(1, TINY.steps + 1))
        assert table["median step seconds", name, length, ""] == times[TINY.steps // 2] > 0
        assert table["batch loss", name, length, "1"] == learner.losses[0]
        assert table["batch accuracy", name, length, steps] in {0, 0.25, 0.5, 0.75, 1}
        for layer_length in TINY.layer_lengths:
            assert table["layer seconds", name, str(layer_length), ""] == result.layer_seconds[layer_length][name] > 0


def test_the_step_at_which_it_was_learnt():
    learner = learn.make_learner(learn.make_models(TINY)["Linformer"], TINY)
    learner.hits, learner.seconds = [0.0] * 3 + [1.0] * 20, [2.0] * 23
    result = show.Result(TINY, {"Linformer": learner}, {}, {})
    assert result.steps_to_learn("Linformer") == 13  # the first step whose last ten batches were all right
    assert result.seconds_to_learn("Linformer") == 26


def test_the_picture_is_a_png_with_something_on_it(tiny):
    from matplotlib.image import imread

    _, folder, _ = tiny
    pixels = imread(folder / demo.PICTURE)
    assert pixels.shape[1] > 1000
    assert pixels.min() < pixels.max()


def test_nothing_else_is_left(tiny):
    _, folder, _ = tiny
    assert {path.name for path in folder.iterdir()} == {demo.PICTURE, demo.NUMBERS}


def test_the_printed_numbers_are_those_measured(tiny):
    result, folder, printed = tiny
    for name in learn.PROJECTIONS:
        assert show.percent(result.accuracies[name]) in printed
        assert f"{result.parameters(name):,}" in printed
    ratio = result.step_seconds("full attention") / result.step_seconds("Linformer")
    assert f"{ratio:.1f} ×" in printed
    assert "never" in printed  # five steps are not enough, and it says so
    for seconds in result.layer_seconds.values():
        assert f"{1e3 * seconds['Linformer']:.2f}" in printed
    assert str(folder / demo.PICTURE) in printed.splitlines()[-1]


def test_a_log_without_a_terminal_tells_of_the_progress(tiny):
    _, _, printed = tiny
    assert f"training {TINY.steps}/{TINY.steps}" in printed
    assert "timing 2/2" in printed
    assert "\x1b" not in printed


def test_a_terminal_shows_a_bar(tmp_path):
    printed = io.StringIO()
    demo.run(tmp_path, TINY, Console(file=printed, width=80, force_terminal=True, force_interactive=True))
    assert "━" in printed.getvalue()
    assert f"training {TINY.steps}/" not in printed.getvalue()


def test_a_second_run_replaces_the_files(tmp_path):
    for name in (demo.PICTURE, demo.NUMBERS):
        (tmp_path / name).write_text("old")
    demo.run(tmp_path, TINY, Console(file=io.StringIO()))
    assert (tmp_path / demo.PICTURE).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / demo.NUMBERS).read_text().startswith("quantity,")
