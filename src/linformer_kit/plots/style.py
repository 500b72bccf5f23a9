"""The style of all figures: readable at the width of a README, in the color-blind-safe palette of Okabe and Ito."""

import io
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..errors import UserError
from ..files import atomic_file
from ..formatting import format_duration, format_number, format_size

if TYPE_CHECKING:  # matplotlib is slow to import, and most commands draw nothing
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 150
MAX_HEIGHT = 40.0  # inches
ORANGE, SKY, GREEN, BLUE = "#E69F00", "#56B4E9", "#009E73", "#0072B2"
VERMILION, PURPLE, GRAY, BLACK = "#D55E00", "#CC79A7", "#666666", "#000000"
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Look:
    """Color, marker and line style of a line."""

    color: str
    marker: str
    style: str = "-"


def new_figure(rows: int, columns: int, width: float = 9.5, height: float = 3.6) -> tuple["Figure", list["Axes"]]:
    """A figure and its axes in reading order. Without pyplot, which would keep the figure and look for a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def set_title(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")


def calm(axes: "Axes") -> None:
    """A light grid behind the data; no frame at the top and right."""
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plain_label(name: str) -> str:
    """A name as it is: matplotlib reads $…$ as a formula, and omits from legends what begins with _."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def over_length(axes: "Axes", title: str, lengths: Sequence[float]) -> None:
    """Title, grid and a logarithmic axis of lengths."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    set_title(axes, plain_label(title))
    axes.set_xscale("log", base=2)
    step = max(1, -(-len(lengths) // 8))  # more labels would overlap
    axes.xaxis.set_major_locator(FixedLocator(list(lengths[::-step])))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    axes.set_xlabel("length N")
    calm(axes)


def cost_lines(axes: "Axes", title: str, lines: Mapping[str, Points], looks: Mapping[str, Look], unit: str) -> None:
    """Cost over length, both logarithmic. `unit` is "time" (seconds) or "memory" (MiB)."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for name, points in lines.items():
        if points:
            look, label = looks[name], plain_label(name)
            xs, ys = zip(*points, strict=True)
            axes.plot(
                xs, ys, color=look.color, marker=look.marker, ls=look.style, markersize=5, linewidth=1.8, label=label
            )
    over_length(axes, title, sorted({x for points in lines.values() for x, _ in points}))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(4) if unit == "memory" else LogLocator(10, subs=(1, 3)))
    axes.yaxis.set_minor_locator(NullLocator())
    formats = {"time": format_duration, "memory": format_size}
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formats[unit](value)))


def legend(axes: "Axes", **options) -> None:
    """A legend, unless the panel is empty, as after a run that was stopped early."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=10, **options)


def growing_legend(figure: "Figure", named: "Mapping[str, Artist]", fontsize: float) -> None:
    """A legend above all panels for any number of names; the figure grows with it, so that panels keep their size."""
    width, height = figure.get_size_inches()
    characters = int(width * 115 / fontsize)
    columns = max(1, min(len(named), characters // (max(map(len, named), default=0) + 6)))
    labels = [textwrap.fill(label, characters - 8) for label in named]
    lines = -(-sum(label.count("\n") + 1 for label in labels) // columns)
    figure.set_size_inches(width, min(height + max(0, lines - 2) * 1.7 * fontsize / 72, MAX_HEIGHT))
    figure.legend(named.values(), labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=fontsize)


def footnote(figure: "Figure", text: str) -> None:
    """A small note below all panels."""
    figure.supxlabel(plain_label(text), fontsize=9, color=GRAY)


def save(figure: "Figure", path: Path) -> None:
    """Write the figure atomically; the format follows from the suffix."""
    import matplotlib

    # equal figures give equal files: no date, and stable ids
    options: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": path.stem}), atomic_file(path) as unfinished:
        render(figure, unfinished, dpi=DOTS_PER_INCH, **options)


def as_svg(figure: "Figure") -> bytes:
    """The figure as SVG."""
    file = io.BytesIO()
    render(figure, file, format="svg", metadata={"Date": None})
    return file.getvalue()


def render(figure: "Figure", file: Path | IO[bytes], **options: Any) -> None:
    """Write the figure; raises if its labels leave no room for the panels, where matplotlib only warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "constrained_layout not applied", UserWarning)
        try:
            figure.savefig(file, **options)
        except UserWarning:
            raise UserError(
                "too many runs or too long names for one picture; give fewer runs, or rename their directories"
            ) from None
