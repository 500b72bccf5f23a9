"""What the demo found: tables to read, numbers to keep, a picture to look at."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ..plots.style import BLUE, VERMILION
from .files import SPLITS, Found

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# the two models of the comparison of times; the one value in which they differ stands in `twins`
NAMES = ("Linformer", "full attention")
# the markers differ too, for print
COLOURS = dict(zip(NAMES, (BLUE, VERMILION), strict=True))
MARKERS = dict(zip(NAMES, ("o", "s"), strict=True))


@dataclass(frozen=True)
class Result:
    """What was measured."""

    found: Found
    accuracy: float
    macro_f1: float
    kinds: list[str]
    confusion: list[list[int]]  # rows: what it is; columns: what it was taken for
    document_seconds: dict[int, dict[str, float]]  # by length, then by model
    step_seconds: dict[str, float]  # of the steps of the demo

    @property
    def tested(self) -> int:
        """How many examples were held out."""
        return sum(map(sum, self.confusion))

    @property
    def packages_tested(self) -> int:
        """How many packages they come from."""
        return len({example.package for example in self.found.splits["test"]})


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


# tables


def found_table(found: Found) -> Table:
    """Examples by kind and split, and how many packages they come from."""
    table = Table(title="Pieces of files (from so many packages)", title_justify="left")
    table.add_column("kind")
    for split in SPLITS:
        table.add_column(split, justify="right")
    for kind in found.kinds:
        table.add_row(kind, *(f"{found.count(kind, split)} ({len(found.packages(kind, split))})" for split in SPLITS))
    table.add_section()
    table.add_row(
        "all", *(f"{len(examples)} ({len({e.package for e in examples})})" for examples in found.splits.values())
    )
    return table


def kinds_table(result: Result) -> Table:
    """What became of each kind of the held-out files."""
    table = Table(title="Held-out files", title_justify="left")
    for heading in ("kind", "right", "taken for"):
        table.add_column(heading, justify="right" if heading == "right" else "left")
    for row, kind in enumerate(result.kinds):
        counts = result.confusion[row]
        wrong = sorted(
            ((count, other) for other, count in zip(result.kinds, counts, strict=True) if other != kind), reverse=True
        )
        table.add_row(
            kind, f"{counts[row]} of {sum(counts)}", ", ".join(f"{other} {count}" for count, other in wrong if count)
        )
    return table


def time_table(result: Result) -> Table:
    """Milliseconds per document, by length."""
    table = Table(title="One document through the model, ms", title_justify="left")
    for heading in ("bytes", *NAMES, "ratio"):
        table.add_column(heading, justify="right")
    for length, by_name in result.document_seconds.items():
        seconds = [by_name[name] for name in NAMES]
        table.add_row(f"{length:,}", *(f"{1e3 * value:.1f}" for value in seconds), ratio(*seconds))
    return table


# numbers


def rows(result: Result) -> Iterator[tuple[str, str, str | int, float]]:
    """Every number as (quantity, of what, of what else, value)."""
    for kind in result.kinds:
        for split in SPLITS:
            yield "examples", kind, split, result.found.count(kind, split)
            yield "packages", kind, split, len(result.found.packages(kind, split))
    yield "accuracy", "test", "", result.accuracy
    yield "macro F1", "test", "", result.macro_f1
    for kind, counts in zip(result.kinds, result.confusion, strict=True):
        for other, count in zip(result.kinds, counts, strict=True):
            yield "taken for", kind, other, count
    for length, seconds in result.document_seconds.items():
        for name in NAMES:
            yield "seconds per document", name, length, seconds[name]
    for step, value in result.step_seconds.items():
        yield "seconds", step, "", value


def write_numbers(result: Result, path: Path) -> None:
    """All of `rows` as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["quantity", "of", "by", "value"])
        writer.writerows(rows(result))


# the picture


def draw(result: Result, path: Path) -> None:
    """Left: what the held-out files were taken for. Right: the time of a document against its length."""
    from matplotlib.figure import Figure  # an optional dependency; and without pyplot no window is ever asked for

    figure = Figure(figsize=(10, 4.6), dpi=160, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    draw_confusion(left, result)
    draw_times(right, result)
    figure.savefig(path, format="png")


def draw_confusion(axes: "Axes", result: Result) -> None:
    """Counts, on a blue that is the deeper the greater their share of the row."""
    from matplotlib.colors import LinearSegmentedColormap

    shares = [[count / max(1, sum(counts)) for count in counts] for counts in result.confusion]
    axes.imshow(shares, cmap=LinearSegmentedColormap.from_list("", ["white", COLOURS["Linformer"]]), vmin=0, vmax=1)
    for row, counts in enumerate(result.confusion):
        for column, count in enumerate(counts):
            if count:
                colour = "white" if shares[row][column] > 0.5 else "black"
                axes.text(column, row, str(count), ha="center", va="center", color=colour, fontsize=9)
    places = range(len(result.kinds))
    axes.set_xticks(places, result.kinds, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(places, result.kinds)
    axes.set_xticks([place - 0.5 for place in places], minor=True)
    axes.set_yticks([place - 0.5 for place in places], minor=True)
    axes.grid(which="minor", color="0.88", linewidth=0.8)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_color("0.7")
    axes.set(xlabel="taken for", ylabel="is")
    axes.set_title(f"{result.tested} pieces of files held out: {percent(result.accuracy)} right", fontsize=12)


def draw_times(axes: "Axes", result: Result) -> None:
    """Milliseconds against bytes, both on logarithmic scales, with the ratio at the greatest length."""
    from matplotlib.ticker import LogLocator, NullLocator

    lengths = list(result.document_seconds)
    for name in NAMES:
        milliseconds = [1e3 * result.document_seconds[length][name] for length in lengths]
        axes.plot(lengths, milliseconds, color=COLOURS[name], marker=MARKERS[name], linewidth=2, label=name)
    low, high = (result.document_seconds[lengths[-1]][name] for name in NAMES)
    # in the corner that lines which rise leave free
    verdict = f"at {lengths[-1]:,} bytes full\nattention takes {ratio(low, high)} as long"
    axes.text(0.98, 0.04, verdict, transform=axes.transAxes, ha="right", color="0.25")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 3)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.08)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="bytes of a document", ylabel="milliseconds per document")
    axes.set_title("The same model, and with full attention", fontsize=12)
    axes.legend(frameon=False, loc="upper left")
