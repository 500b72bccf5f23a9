"""What `linformer demo` runs: two small classifiers that differ in one value, trained, timed and drawn, on the CPU."""

import importlib.util
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..bench.table import write_atomically
from .learn import Learner, Settings, accuracy, make_models, time_layers, train
from .show import Result, draw, layer_table, percent, recent, training_table, write_numbers

PICTURE, NUMBERS = "demo.png", "demo.csv"


def run(folder: Path, settings: Settings | None = None, console: Console | None = None) -> Result:
    """The demo: measure, print, draw, and leave the picture and the numbers in `folder`."""
    check_ready(folder)
    settings, console = settings or Settings(), console or Console()
    console.print(
        f"Among {settings.length // 2:,} to {settings.length:,} random digits {settings.marked} are marked, all of them the same: "
        f"which digit is it? Two models learn it on {torch.get_num_threads()} CPU threads. They differ in one value: "
        f"projection='linear', to {settings.projected_length} rows, or 'none', every token attending to every other.",
        highlight=False,
    )
    result = measure(settings, console)
    # written before anything is printed: a terminal that goes away takes nothing with it
    write_atomically(folder / NUMBERS, lambda path: write_numbers(result, path))
    write_atomically(folder / PICTURE, lambda path: draw(result, path))
    console.print()
    console.print(training_table(result))
    console.print(layer_table(result))
    # not wrapped, so that the path can be copied
    console.print(
        f"The picture is {folder / PICTURE}, every number in {folder / NUMBERS}.", highlight=False, markup=False, soft_wrap=True
    )
    return result


def check_ready(folder: Path) -> None:
    """Find out before the work, not after it, that its results could not be drawn or written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError('the picture needs matplotlib: pip install "linformer-kit[plot]"')
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; choose a folder with --output")
    for name in (PICTURE, NUMBERS):
        if (folder / name).is_dir():
            raise IsADirectoryError(f"{folder / name} is a folder and would be overwritten; choose another with --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # asking the file system beats reading permissions: disks are full, mounts read-only, and root may do anything
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"cannot write to {folder} ({error.strerror}); choose another folder with --output") from error


def measure(settings: Settings, console: Console) -> Result:
    """Train, test and time, with a progress bar; where nothing can move, as in a log, with a line now and then."""
    models = make_models(settings)
    with Progress(
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[news]}"),
        console=console,
        disable=not console.is_interactive,
    ) as progress:
        training = progress.add_task("training", total=settings.steps, news="")
        learners: dict[str, Learner] = {}
        for step, learners in enumerate(train(models, settings), start=1):
            news = ", ".join(f"{name} {percent(recent(learner.hits)[-1], 0)}" for name, learner in learners.items())
            report(progress, training, step, news, log=step % max(1, settings.steps // 10) == 0)

        testing = progress.add_task("testing", total=len(models), news="")
        accuracies: dict[str, float] = {}
        for name, model in models.items():
            accuracies[name] = accuracy(model, settings)
            report(progress, testing, len(accuracies), ", ".join(f"{name} {percent(right)}" for name, right in accuracies.items()))

        timing = progress.add_task("timing", total=len(settings.layer_lengths), news="")
        layer_seconds: dict[int, dict[str, float]] = {}
        for length, seconds in time_layers(settings):
            layer_seconds[length] = seconds
            report(progress, timing, len(layer_seconds), f"{length:,} tokens")
    return Result(settings, learners, accuracies, layer_seconds)


def report(progress: Progress, task: TaskID, done: int, news: str, log: bool = True) -> None:
    """Move the bar, or write a line where there is none."""
    progress.update(task, completed=done, news=news)
    if progress.disable and log:
        line = progress.tasks[task]
        progress.console.print(f"{line.description} {done}/{line.total}: {news}", highlight=False)
