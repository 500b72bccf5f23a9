"""What the demo found: tables to read, numbers to keep, a picture to look at."""

import csv
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from .learn import DIGITS, PROJECTIONS, Learner, Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, apart for every kind of eye; the markers differ too, for print
COLOURS = {"Linformer": "#0072B2", "full attention": "#D55E00"}
MARKERS = {"Linformer": "o", "full attention": "s"}

# the share of right answers that we call learnt
LEARNT = 0.95


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


def ratio(linformer: float, full: float) -> str:
    """How many times as long full attention takes.

    >>> ratio(0.5, 2.0)
    '4.0 ×'
    """
    return f"{full / linformer:.1f} ×"


def comparison(title: str, first: str) -> Table:
    """An empty table with a column per model and one for their ratio."""
    table = Table(title=title, title_justify="left")
    for heading in (first, *PROJECTIONS, "ratio"):
        table.add_column(heading, justify="right" if heading != "" else "left")
    return table


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


def write_numbers(result: Result, path: Path) -> None:
    """All of `rows` as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["quantity", "model", "length", "step", "value"])
        writer.writerows(rows(result))


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
