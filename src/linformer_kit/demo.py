"""`linformer demo`: train, test and time a classifier of file types on the files of this Python installation."""

import importlib.util
import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .csv_tables import Row, write_rows
from .errors import Stopped, UserError
from .files import check_writable
from .formatting import say
from .training.file_kinds import KINDS, SPLITS, Dataset, read_examples

PICTURE, NUMBERS, COSTS = "demo.png", "demo.csv", "compare.csv"
RUN, CACHE = "run", "cache"
REQUIRED = ("matplotlib", "accelerate", "datasets", "sacrebleu", "tokenizers", "yaml")


@dataclass(frozen=True)
class Settings:
    """The settings of the demo."""

    overrides: tuple[str, ...] = ()  # of configs/file_kinds.yaml
    lengths: tuple[int, ...] = (1024, 4096, 16384)  # of the documents that are timed


@dataclass(frozen=True)
class Result:
    """What the demo measured."""

    dataset: Dataset
    metrics: dict[str, Any]  # of `linformer evaluate`
    costs: list[Row]  # of `linformer compare`
    step_seconds: dict[str, float]  # of the steps of the demo

    @property
    def kinds(self) -> list[str]:
        """The classes, with similar ones next to each other."""
        return [kind for kind in KINDS if kind in self.metrics["labels"]]

    @property
    def confusion(self) -> list[list[int]]:
        """A row for each true class, in the order of `kinds`."""
        places = [self.metrics["labels"].index(kind) for kind in self.kinds]
        return [[self.metrics["confusion"][row][column] for column in places] for row in places]

    @property
    def document_seconds(self) -> dict[str, list[tuple[float, float]]]:
        """(bytes, seconds) of the documents that both models could read, by model."""
        from .bench.point import FULL, OURS

        times: dict[str, dict[float, float]] = {OURS: {}, FULL: {}}
        for row in self.costs:
            if row["seconds_median"]:
                times[row["implementation"]][float(row["length"])] = float(row["seconds_median"])
        lengths = sorted(times[OURS].keys() & times[FULL].keys())
        return {name: [(length, by_length[length]) for length in lengths] for name, by_length in times.items()}


def run(folder: Path, console: Console | None = None, settings: Settings | None = None) -> Result:
    """Gather files, train, test and time; write the figure and the numbers to `folder`.

    A second call reuses the examples and resumes the training.
    """
    check_ready(folder)
    # slow to import
    from .bench.compare import compare
    from .bench.sweep import read_sweep
    from .training.config import load_config
    from .training.evaluate import evaluate
    from .training.prepare import with_generated_data
    from .training.train import train

    settings, console = settings or Settings(), console or Console()
    seconds: dict[str, float] = {}
    paths = {"data.cache": (folder / CACHE).resolve(), "run": folder / RUN}
    # as JSON, because values are YAML, and a path may contain a bracket or a colon
    overrides = [f"{key}={json.dumps(str(path))}" for key, path in paths.items()]
    config = load_config("file_kinds", [*overrides, *settings.overrides])
    with timed(seconds, "gathering"):
        dataset = read_examples(Path(str(with_generated_data(config, console).data.path)))
    show_dataset(dataset, console)
    with resumed_by_demo(folder):
        train(config, console)  # linformer train file_kinds
    seconds["training"] = json.loads((folder / RUN / "result.json").read_text())["seconds"]
    say(console, "Testing on held-out files …")
    with timed(seconds, "testing"):
        metrics = evaluate(folder / RUN, split="test", console=console)  # linformer evaluate
    say(console, "Timing next to full attention, each model and length in a process of its own …")
    sweep = {"model": str(folder / RUN), "lengths": [*settings.lengths], "batch": 1, "interleave_lengths": True}
    with timed(seconds, "timing"), resumed_by_demo(folder):
        costs = compare(read_sweep(sweep), folder / COSTS, fresh=True, console=console)  # linformer compare
    result = Result(dataset, metrics, list(costs.rows()), seconds)
    write_result(result, folder)  # before printing, which fails if the terminal is closed
    show_result(result, folder, console)
    return result


def check_ready(folder: Path) -> None:
    """Raise before any work if a package is missing or the results cannot be written."""
    if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
        raise UserError(f'the demo requires {missing[0]}: pip install "linformer-kit[train]"')
    remedy = f"choose another directory than {folder} with --output"
    check_writable(folder, remedy)
    for path in (folder / name for name in (PICTURE, NUMBERS, COSTS, RUN, CACHE)):
        if path.exists() and path.is_dir() == (path.name in (PICTURE, NUMBERS, COSTS)):
            raise UserError(f"{path} already exists and is a {'directory' if path.is_dir() else 'file'}; {remedy}")
    folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Record the duration of a step."""
    start = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - start


@contextmanager
def resumed_by_demo(folder: Path) -> Iterator[None]:
    """Make a stopped step say how to resume the demo."""
    try:
        yield
    except Stopped as stop:
        command = shlex.join(["linformer", "demo", "--output", str(folder)])
        raise Stopped(f"Stopped and saved. To resume: {command}", stop.code) from None


# results


def result_rows(result: Result) -> Iterator[tuple[str, str, str | int, float]]:
    """Every number but the costs as (quantity, of, by, value); "confusion" is of a true and by a predicted class."""
    for kind in result.kinds:
        for split in SPLITS:
            yield "examples", kind, split, len(result.dataset.select(split, kind))
            yield "packages", kind, split, len(result.dataset.packages(split, kind))
    yield "accuracy", "test", "", result.metrics["accuracy"]
    yield "macro F1", "test", "", result.metrics["macro_f1"]
    for kind, counts in zip(result.kinds, result.confusion, strict=True):
        for other, count in zip(result.kinds, counts, strict=True):
            yield "confusion", kind, other, count
    for step, value in result.step_seconds.items():
        yield "seconds", step, "", value


def write_result(result: Result, folder: Path) -> None:
    """The numbers as CSV, and the figure."""
    from .plots.demo import draw_demo
    from .plots.style import save

    columns = ("quantity", "of", "by", "value")
    write_rows(folder / NUMBERS, [dict(zip(columns, map(str, row), strict=True)) for row in result_rows(result)])
    save(draw_demo(result.kinds, result.confusion, result.document_seconds), folder / PICTURE)


def show_dataset(dataset: Dataset, console: Console) -> None:
    """Examples by kind and split, and the kinds that are left out."""
    table = Table("kind", title="Pieces of files (packages)", title_justify="left")
    for split in SPLITS:
        table.add_column(split, justify="right")
    for kind in (*dataset.kinds, None):
        counts = ((len(dataset.select(split, kind)), len(dataset.packages(split, kind))) for split in SPLITS)
        table.add_row(kind or "all", *(f"{pieces} ({packages})" for pieces, packages in counts))
    console.print(table)
    for kind, reason in dataset.left_out.items():
        say(console, f"Left out: {kind}, {reason}.")


def show_result(result: Result, folder: Path, console: Console) -> None:
    """Metrics, times, where the files are, and a prediction with the command for it."""
    from .bench.compare import show
    from .training.evaluate import table_of
    from .training.predict import Predictor, as_text, read_inputs

    console.print(table_of(result.metrics))
    show(result.costs, console)
    tested = f"{result.metrics['rows']} pieces of files from {len(result.dataset.packages('test'))} unseen packages"
    say(console, f"Correct: {result.metrics['accuracy']:.1%} of {tested}.")
    say(console, f"Figure: {folder / PICTURE}. All numbers: {folder / NUMBERS}, {folder / COSTS}.")
    predictor = Predictor(folder / RUN, warn=lambda _: None)  # it warns that it reads only the start of a long file
    command = ["linformer", "predict", str(folder / RUN), "--per", "file"]
    say(console, f"\nThe model detects the kind of any file:\n$ {shlex.join([*command, __file__])}")
    for answer in predictor(read_inputs([__file__], "file", predictor.config)):
        say(console, as_text(answer))
    say(console, f"\nTry your own: {shlex.join(command)} FILE")
