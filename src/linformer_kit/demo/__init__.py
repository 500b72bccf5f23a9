"""What `linformer demo` runs: a detector of file kinds, trained on the bytes of what is installed with this Python, and timed."""

import importlib.util
import json
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..files import write_atomically
from .files import KINDS, SPLITS, Found, Source, Wanted, gather, installation, read_examples, write_examples
from .show import NAMES, Result, draw, found_table, kinds_table, percent, time_table, write_numbers

PICTURE, NUMBERS = "demo.png", "demo.csv"
DATA, RUN, CACHE = "data", "run", "cache"
# what it is made of, beside what the package itself needs
NEEDED = ("matplotlib", "accelerate", "datasets", "filelock", "sacrebleu", "tokenizers", "yaml")


@dataclass(frozen=True)
class Settings:
    """Everything the demo can be told."""

    wanted: Wanted = field(default_factory=Wanted)
    overrides: tuple[str, ...] = ()  # of configs/file_kinds.yaml
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    rounds: int = 7


def run(
    folder: Path,
    console: Console | None = None,
    settings: Settings | None = None,
    sources: Iterable[Source] | None = None,
) -> Result:
    """The demo: gather, train, test, time, and leave the picture and the numbers in `folder`.

    What an earlier call has done is not done again: examples are kept, and the training goes on where it was.
    """
    check_ready(folder)
    settings, console = settings or Settings(), console or Console()
    seconds: dict[str, float] = {}
    with timed(seconds, "gathering"):
        found = find_examples(folder / DATA, settings.wanted, console, installation() if sources is None else sources)
    show_found(found, console)
    train_model(folder, settings, console)
    seconds["training"] = json.loads((folder / RUN / "result.json").read_text())["seconds"]
    with timed(seconds, "testing"):
        metrics = measured_on_test(folder / RUN, console)
    with timed(seconds, "timing"):
        document_seconds = time_twins(folder / RUN / "model", settings, console)
    result = Result(found, **in_our_order(metrics), document_seconds=document_seconds, step_seconds=seconds)
    # written before anything is printed: a terminal that goes away takes nothing with it
    write_atomically(folder / NUMBERS, lambda path: write_numbers(result, path))
    write_atomically(folder / PICTURE, lambda path: draw(result, path))
    show_result(result, folder, console)
    return result


def check_ready(folder: Path) -> None:
    """Find out before the work, not after it, that something is missing or that its results could not be written."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ModuleNotFoundError(f'the demo needs {missing[0]}: pip install "linformer-kit[train]"')
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; choose a folder with --output")
    for name in (PICTURE, NUMBERS):
        if (folder / name).is_dir():
            raise IsADirectoryError(
                f"{folder / name} is a folder and would be overwritten; choose another with --output"
            )
    for name in (DATA, RUN, CACHE):
        if (folder / name).is_file():
            raise NotADirectoryError(
                f"{folder / name} is a file, where a folder is needed; choose another with --output"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # asking the file system beats reading permissions: disks are full, mounts read-only, and root may do anything
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"cannot write to {folder} ({error.strerror}); choose another folder with --output") from error


@contextmanager
def timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Note how long a step took."""
    start = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - start


@contextmanager
def progress_of(console: Console, step: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar that moves on at each call; where nothing can move, as in a log, a line at the beginning."""
    if not console.is_terminal:
        console.print(f"{step} …", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.fields[news]}"), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(step, total=total, news="")
        yield lambda news: progress.update(task, advance=1, news=news)


# the steps


def find_examples(folder: Path, wanted: Wanted, console: Console, sources: Iterable[Source]) -> Found:
    """The examples of an earlier run, or new ones.

    Gathered again, a package that came or went in between could turn up in another split than the one it was trained in.
    """
    if folder.is_dir():
        say(console, f"The examples are those of an earlier run, in {folder}; remove {folder.parent} to begin afresh.")
        return read_examples(folder)
    with progress_of(console, "Gathering files of this Python", len(KINDS) * (len(SPLITS) + 1)) as advance:
        found = gather(sources, wanted, advance)
    if len(found.kinds) < 2:
        raise OSError(
            f"this Python has too few files to learn from: {'; '.join(map(': '.join, found.left_out.items()))}"
        )
    write_examples(found, folder)
    return found


def show_found(found: Found, console: Console) -> None:
    """What there is, and what is missing."""
    console.print(found_table(found))
    for kind, reason in found.left_out.items():
        say(console, f"Left out: {kind}, {reason}.")


def train_model(folder: Path, settings: Settings, console: Console) -> None:
    """What `linformer train file_kinds data.path=… run=…` does."""
    from ..errors import Stopped
    from ..training.config import load_config
    from ..training.train import train

    paths = {"data.path": (folder / DATA).resolve(), "data.cache": (folder / CACHE).resolve(), "run": folder / RUN}
    # as JSON, since the values are YAML: a path may hold a bracket or a colon
    overrides = [f"{key}={json.dumps(str(path))}" for key, path in paths.items()]
    try:
        train(load_config("file_kinds", [*overrides, *settings.overrides]), console)
    except Stopped as stop:
        again = shlex.join(["linformer", "demo", "--output", str(folder)])
        raise Stopped(f"Stopped and saved. To go on: {again}", stop.code) from None


def measured_on_test(run_folder: Path, console: Console) -> dict[str, Any]:
    """What `linformer evaluate` does, on the held-out files."""
    from ..training.evaluate import evaluate

    with console.status("Testing on the files held out") if console.is_terminal else progress_of(console, "Testing", 1):
        return evaluate(run_folder, split="test", console=console)


def in_our_order(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics with similar kinds side by side."""
    labels = metrics["labels"]
    order = [labels.index(kind) for kind in KINDS if kind in labels]
    confusion = [[metrics["confusion"][row][column] for column in order] for row in order]
    kinds = [labels[place] for place in order]
    return {"accuracy": metrics["accuracy"], "macro_f1": metrics["macro_f1"], "kinds": kinds, "confusion": confusion}


def time_twins(model_folder: Path, settings: Settings, console: Console) -> dict[int, dict[str, float]]:
    """For each length the median seconds of a document, of the model and of its twin with full attention; they take turns."""
    import torch

    from ..bench.measure import time_interleaved

    result = {}
    with progress_of(console, "Timing it beside full attention", len(settings.lengths)) as advance:
        for length in settings.lengths:
            ids = torch.randint(5, 261, (1, length))  # bytes; the first five tokens are special
            calls = {name: call_of(model, ids) for name, model in twins(model_folder, length).items()}
            rounds = {"least_rounds": min(3, settings.rounds), "most_rounds": settings.rounds}
            timings = time_interleaved(calls, budget_seconds=5, **rounds)
            result[length] = {name: timing.median for name, timing in timings.items() if timing.median}
            advance(f"{length:,} bytes")
    return result


def twins(model_folder: Path, length: int) -> dict[str, Any]:
    """The model, made for documents of that length, and the same with ordinary attention; weights do not matter for the time."""
    from ..models.configuration_linformer import LinformerConfig
    from ..models.modeling_linformer import LinformerForSequenceClassification

    configs = [
        LinformerConfig.from_pretrained(model_folder, max_position_embeddings=length, **change)
        for change in ({}, {"projection": "none"})
    ]
    return {
        name: LinformerForSequenceClassification(config).eval() for name, config in zip(NAMES, configs, strict=True)
    }


def call_of(model: Any, ids: Any) -> Callable[[], object]:
    """What is timed."""
    import torch

    def forward() -> object:
        with torch.no_grad():
            return model(ids).logits

    return forward


# what is said


def say(console: Console, text: str) -> None:
    """A line that is not wrapped, so that paths and commands can be copied."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def show_result(result: Result, folder: Path, console: Console) -> None:
    """Tables, where the files are, and what to do with the model."""
    console.print()
    console.print(kinds_table(result))
    console.print(time_table(result))
    packages = f"{result.tested} pieces of files from {result.packages_tested} packages that it has never seen"
    say(console, f"Right: {percent(result.accuracy)} of {packages} (mean F1 of the kinds: {percent(result.macro_f1)}).")
    say(console, f"The picture is {folder / PICTURE}, every number in {folder / NUMBERS}.")
    say(console, "\nIt tells the kind of any file. This one, for instance:")
    show_prediction(folder / RUN, Path(__file__), console)


def show_prediction(run_folder: Path, file: Path, console: Console) -> None:
    """What `linformer predict` says of a file."""
    from ..training.predict import Predictor, as_text, read_inputs

    predictor = Predictor(run_folder, warn=lambda _: None)  # that it reads the beginning of a long file
    command = ["linformer", "predict", str(run_folder), "--per", "file"]
    say(console, f"$ {shlex.join([*command, str(file)])}")
    for answer in predictor(read_inputs([str(file)], "file", predictor.config)):
        say(console, as_text(answer))
    say(console, f"\nNow yours: {shlex.join(command)} FILE")
