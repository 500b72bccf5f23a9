"""What `linformer demo` runs: two small classifiers that differ in one value, trained, timed and drawn, on the CPU.

The task needs attention and little else. Among random digits some are marked, all of them the same digit, and the label is
that digit. The answer is read off the first token, which knows nothing by itself: attention has to bring it there.
It shows that the layer learns and what it costs. It is a toy, and says nothing about quality on real text.

Shapes: B batch, N length, M marked tokens, C model size, D digits.
"""

import csv
import importlib.util
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from .models.attention_linformer import LinformerAttention
from .models.encoder_linformer import LinformerEncoder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# tokens 0-9 are plain digits, 10-19 marked ones
DIGITS, START, PADDING, VOCABULARY = 10, 20, 21, 22

# the one value in which the two models differ, and what we call them
PROJECTIONS = {"Linformer": "linear", "full attention": "none"}

# Okabe and Ito's colours, apart for every kind of eye; the markers differ too, for print
COLOURS = {"Linformer": "#0072B2", "full attention": "#D55E00"}
MARKERS = {"Linformer": "o", "full attention": "s"}

# the share of right answers that we call learnt
LEARNT = 0.95

PICTURE, NUMBERS = "demo.png", "demo.csv"


@dataclass(frozen=True)
class Settings:
    """Everything the demo can be told; the defaults take about a minute and a half on two cores."""

    length: int = 2048  # N; examples are from half as long up to this
    marked: int = 64  # M
    projected_length: int = 64  # K
    width: int = 64
    heads: int = 4
    depth: int = 1
    batch: int = 8
    steps: int = 100
    learning_rate: float = 5e-3
    held_out: int = 512  # fresh examples for the final accuracy
    layer_lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    layer_width: int = 256
    layer_repeats: int = 7
    seed: int = 0


class Batch(NamedTuple):
    """Examples of the task."""

    tokens_BN: Tensor
    mask_BN: Tensor  # True at real tokens
    labels_B: Tensor


def make_batch(settings: Settings, size: int, generator: torch.Generator) -> Batch:
    """`size` new examples: random digits, M of them marked and equal to the label, the first token `START`, padding last."""
    shape = (size, settings.length)
    tokens_BN = torch.randint(DIGITS, shape, generator=generator)
    labels_B = torch.randint(DIGITS, (size,), generator=generator)
    lengths_B = torch.randint(settings.length // 2, settings.length + 1, (size,), generator=generator)
    mask_BN = torch.arange(settings.length) < lengths_B[:, None]
    # the M largest of one random number per real token: M different places, each as likely as any other
    lottery_BN = torch.rand(shape, generator=generator).masked_fill(~mask_BN, -1)
    lottery_BN[:, 0] = -1
    places_BM = lottery_BN.topk(settings.marked, dim=1).indices
    tokens_BN.scatter_(1, places_BM, (DIGITS + labels_B)[:, None].expand_as(places_BM))
    tokens_BN[:, 0] = START
    return Batch(tokens_BN.masked_fill(~mask_BN, PADDING), mask_BN, labels_B)


class Classifier(nn.Module):
    """Embedding, encoder, and a linear layer on the first token."""

    def __init__(self, settings: Settings, projection: str):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, settings.width)
        self.position = nn.Parameter(0.02 * torch.randn(settings.length, settings.width))
        self.encoder = LinformerEncoder(
            settings.width,
            settings.heads,
            depth=settings.depth,
            max_length=settings.length,
            projected_length=settings.projected_length,
            projection=projection,
        )
        self.head = nn.Linear(settings.width, DIGITS)

    def forward(self, tokens_BN: Tensor, mask_BN: Tensor) -> Tensor:
        """(B, N) tokens and their mask to (B, 10) logits."""
        x_BNC = self.embedding(tokens_BN) + self.position[: tokens_BN.shape[1]]
        return self.head(self.encoder(x_BNC, mask_BN)[:, 0])


def make_models(settings: Settings) -> dict[str, Classifier]:
    """The two models, with the same initial weights wherever both have them: all but E and F."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        models = {name: Classifier(settings, projection) for name, projection in PROJECTIONS.items()}
    models["Linformer"].load_state_dict(models["full attention"].state_dict(), strict=False)
    return models


@dataclass
class Learner:
    """A model in training, and the record of each of its steps."""

    model: Classifier
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    losses: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)  # share of the batch answered correctly before learning from it
    seconds: list[float] = field(default_factory=list)

    def learn(self, batch: Batch) -> None:
        """One step of training."""
        start = time.perf_counter()
        logits_BD = self.model(batch.tokens_BN, batch.mask_BN)
        loss = F.cross_entropy(logits_BD, batch.labels_B)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.hits.append((logits_BD.argmax(dim=1) == batch.labels_B).float().mean().item())


def make_learner(model: Classifier, settings: Settings) -> Learner:
    """Adam, its rate rising over a tenth of the steps and falling over the last third."""
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / (0.1 * settings.steps), (settings.steps - step) / (0.3 * settings.steps))

    return Learner(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate))


def train(models: dict[str, Classifier], settings: Settings) -> Iterator[dict[str, Learner]]:
    """Train the models side by side on the same batches; yields their records after every step.

    They take turns, so that whatever else the computer does slows all of them alike.
    """
    learners = {name: make_learner(model, settings) for name, model in models.items()}
    generator = torch.Generator().manual_seed(settings.seed + 1)
    for _ in range(settings.steps):
        batch = make_batch(settings, settings.batch, generator)
        for learner in learners.values():
            learner.learn(batch)
        yield learners


@torch.no_grad()
def accuracy(model: Classifier, settings: Settings) -> float:
    """The share of `settings.held_out` examples, none of them seen in training, that `model` gets right."""
    # a stream of its own, the same for every model
    generator = torch.Generator().manual_seed(settings.seed + 2)
    right = 0
    for start in range(0, settings.held_out, settings.batch):
        batch = make_batch(settings, min(settings.batch, settings.held_out - start), generator)
        right += int((model(batch.tokens_BN, batch.mask_BN).argmax(dim=1) == batch.labels_B).sum())
    return right / settings.held_out


@torch.no_grad()
def time_layers(settings: Settings) -> Iterator[tuple[int, dict[str, float]]]:
    """For each length the median seconds of one attention layer, forward, one example; the layers take turns."""
    for length in settings.layer_lengths:
        layers = {
            name: LinformerAttention(
                settings.layer_width,
                settings.heads,
                max_length=length,
                projected_length=settings.projected_length,
                projection=projection,
            )
            for name, projection in PROJECTIONS.items()
        }
        x_BNC = torch.randn(1, length, settings.layer_width)
        seconds: dict[str, list[float]] = {name: [] for name in layers}
        for repeat in range(settings.layer_repeats + 1):
            for name, layer in layers.items():
                start = time.perf_counter()
                layer(x_BNC)
                if repeat:  # the first of each is for warming up
                    seconds[name].append(time.perf_counter() - start)
        yield length, {name: statistics.median(times) for name, times in seconds.items()}


@dataclass(frozen=True)
class Result:
    """What was measured, by model."""

    settings: Settings
    learners: dict[str, Learner]
    accuracies: dict[str, float]
    layer_seconds: dict[int, dict[str, float]]

    def step_seconds(self, name: str) -> float:
        """The median step: the first ones are slower, and a computer has other things to do."""
        return statistics.median(self.learners[name].seconds)

    def steps_to_learn(self, name: str) -> int | None:
        """The first step at which `LEARNT` of the recent new examples were answered correctly; None if that never came."""
        curve = recent(self.learners[name].hits)
        return next((step for step, share in enumerate(curve, start=1) if share >= LEARNT), None)

    def seconds_to_learn(self, name: str) -> float | None:
        """The seconds of training up to and including that step."""
        steps = self.steps_to_learn(name)
        return None if steps is None else sum(self.learners[name].seconds[:steps])

    def parameters(self, name: str) -> int:
        """How many numbers the model learns."""
        return sum(parameter.numel() for parameter in self.learners[name].model.parameters())


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


def recent(values: list[float], window: int = 10) -> list[float]:
    """The mean of each value and those just before it, `window` at most.

    >>> recent([0.0, 1.0, 1.0, 1.0], window=2)
    [0.0, 0.5, 1.0, 1.0]
    """
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def percent(share: float, digits: int = 1) -> str:
    """A share as people read it.

    >>> percent(0.25)
    '25.0 %'
    """
    return f"{100 * share:.{digits}f} %"


def comparison(title: str, first: str) -> Table:
    """An empty table with a column per model and one for their ratio."""
    table = Table(title=title, title_justify="left")
    for heading in (first, *PROJECTIONS, "ratio"):
        table.add_column(heading, justify="right" if heading != "" else "left")
    return table


def ratio(linformer: float, full: float) -> str:
    """How many times as long full attention takes.

    >>> ratio(0.5, 2.0)
    '4.0 ×'
    """
    return f"{full / linformer:.1f} ×"


def training_table(result: Result) -> Table:
    """Accuracy, cost and size of the two models."""
    settings, names = result.settings, list(PROJECTIONS)
    table = comparison(f"Two classifiers, up to {settings.length:,} tokens, {settings.steps} steps", "")
    steps = [result.steps_to_learn(name) for name in names]
    step_seconds = [result.step_seconds(name) for name in names]
    seconds = [result.seconds_to_learn(name) for name in names]
    table.add_row(f"accuracy on {settings.held_out} new examples", *(percent(result.accuracies[name]) for name in names), "")
    table.add_row("seconds per training step", *(f"{value:.3f}" for value in step_seconds), ratio(*step_seconds))
    table.add_row(f"steps until {percent(LEARNT, 0)} right", *("never" if value is None else str(value) for value in steps), "")
    table.add_row(
        f"seconds until {percent(LEARNT, 0)} right",
        *("never" if value is None else f"{value:.1f}" for value in seconds),
        "" if seconds[0] is None or seconds[1] is None else ratio(seconds[0], seconds[1]),
    )
    table.add_row("parameters", *(f"{result.parameters(name):,}" for name in names), "")
    return table


def layer_table(result: Result) -> Table:
    """Milliseconds of one attention layer, by length."""
    table = comparison(f"One attention layer, {result.settings.layer_width} wide, forward, ms", "tokens")
    for length, by_name in result.layer_seconds.items():
        seconds = [by_name[name] for name in PROJECTIONS]
        table.add_row(f"{length:,}", *(f"{1e3 * value:.2f}" for value in seconds), ratio(*seconds))
    return table


def rows(result: Result) -> Iterator[tuple[str, str, int, int | None, float]]:
    """Every number as (quantity, model, length, step, value); the curves step by step."""
    length, steps = result.settings.length, result.settings.steps
    for name, learner in result.learners.items():
        yield "parameters", name, length, None, result.parameters(name)
        yield "held-out accuracy", name, length, steps, result.accuracies[name]
        yield "median step seconds", name, length, None, result.step_seconds(name)
        learnt = result.seconds_to_learn(name)
        if learnt is not None:
            yield "seconds until learnt", name, length, result.steps_to_learn(name), learnt
        for step in range(steps):
            yield "step seconds", name, length, step + 1, learner.seconds[step]
            yield "batch loss", name, length, step + 1, learner.losses[step]
            yield "batch accuracy", name, length, step + 1, learner.hits[step]
    for length, seconds in result.layer_seconds.items():
        for name, value in seconds.items():
            yield "layer seconds", name, length, None, value


def draw(result: Result, path: Path) -> None:
    """Left: accuracy against seconds of training. Right: the time of one layer against the length."""
    from matplotlib.figure import Figure  # an optional dependency; and without pyplot no window is ever asked for

    figure = Figure(figsize=(9, 3.9), dpi=160, layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_training(left, result)
    draw_layers(right, result)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.title.set_fontsize(12)
    figure.savefig(path, format="png")


def draw_training(axes: "Axes", result: Result) -> None:
    """The share of recent new examples answered correctly before learning from them; the last marker is the final test."""
    steps = result.settings.steps
    for name, learner in result.learners.items():
        elapsed = list(itertools.accumulate(learner.seconds))
        axes.plot(elapsed, [100 * share for share in recent(learner.hits)], color=COLOURS[name], linewidth=2)
        label = f"{name}: {steps} steps in {elapsed[-1]:.0f} s, {percent(result.accuracies[name])}"
        end = (elapsed[-1], 100 * result.accuracies[name])
        axes.plot(*end, color=COLOURS[name], marker=MARKERS[name], linestyle="none", clip_on=False, label=label)
    chance = 100 / DIGITS
    axes.axhline(chance, color="0.5", linewidth=1, linestyle=":")
    axes.text(0.99, chance + 1, "chance", transform=axes.get_yaxis_transform(), ha="right", color="0.4", fontsize=9)
    axes.set(xlabel="seconds of training", ylabel="accuracy on new examples, %", xlim=(0, None), ylim=(0, 103))
    axes.set_title(f"The same batches of up to {result.settings.length:,} tokens")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.17), fontsize=9, handletextpad=0.2)


def draw_layers(axes: "Axes", result: Result) -> None:
    """Milliseconds against tokens, both on logarithmic scales, with the ratio at the greatest length."""
    lengths = list(result.layer_seconds)
    for name in PROJECTIONS:
        milliseconds = [1e3 * result.layer_seconds[length][name] for length in lengths]
        axes.plot(lengths, milliseconds, color=COLOURS[name], marker=MARKERS[name], linewidth=2, label=name)
    low, high = (1e3 * result.layer_seconds[lengths[-1]][name] for name in PROJECTIONS)
    axes.annotate(
        "", (lengths[-1], low), (lengths[-1], high), arrowprops={"arrowstyle": "<->", "color": "0.4", "shrinkA": 6, "shrinkB": 6}
    )
    # on white, so that no grid line runs through the number
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(0.95 * lengths[-1], (low * high) ** 0.5, ratio(low, high), ha="right", va="center", color="0.25", bbox=white)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.08)
    axes.set(xlabel="tokens", ylabel="milliseconds")
    axes.set_title(f"One attention layer, {result.settings.layer_width} wide, forward")
    axes.legend(frameon=False, loc="upper left")


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file next to `path`, then rename it: nobody ever sees half a file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_numbers(result: Result, path: Path) -> None:
    """All of `rows` as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["quantity", "model", "length", "step", "value"])
        writer.writerows(rows(result))


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
    write_whole(folder / NUMBERS, lambda path: write_numbers(result, path))
    write_whole(folder / PICTURE, lambda path: draw(result, path))
    console.print()
    console.print(training_table(result))
    console.print(layer_table(result))
    # not wrapped, so that the path can be copied
    console.print(
        f"The picture is {folder / PICTURE}, every number in {folder / NUMBERS}.", highlight=False, markup=False, soft_wrap=True
    )
    return result
