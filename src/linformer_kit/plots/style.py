"""The style of all figures: readable at the width of a README, in the color-blind-safe palette of Okabe and Ito."""

import io
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
LINE_STYLES = ("-", "--", ":", "-.")

Points = list[tuple[float, float]]
Look = dict[str, Any]  # color, marker and line style of a line, as options of matplotlib


def nth_look(place: int) -> Look:
    """The look of one of many lines: with more lines than colors, colors repeat in another line style."""
    styles, color = divmod(place, len(PALETTE))
    return {"color": PALETTE[color], "linestyle": LINE_STYLES[styles % len(LINE_STYLES)]}


def new_figure(
    panels: int, columns: int = 2, width: float | None = None, height: float = 3.6
) -> tuple["Figure", list["Axes"]]:
    """A figure with rows of this height, and its panels in reading order; the width follows from the columns.

    Without pyplot, which would keep the figure and look for a display.
    """
    from matplotlib.figure import Figure

    columns = min(columns, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(width or (6.0 if columns == 1 else 9.5), height * rows), layout="constrained")
    all_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in all_axes[panels:]:
        axes.remove()
    return figure, all_axes[:panels]


def set_title(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")


def style_axes(axes: "Axes", title: str = "") -> None:
    """A title, and a light grid behind the data; no frame at the top and right."""
    set_title(axes, title)
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plain_label(name: str) -> str:
    """A name as it is: matplotlib reads $…$ as a formula, and omits from legends what begins with _."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def over_length(axes: "Axes", title: str, lengths: Sequence[float]) -> None:
    """Title, grid and a logarithmic axis of lengths."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    style_axes(axes, plain_label(title))
    axes.set_xscale("log", base=2)
    step = max(1, -(-len(lengths) // 8))  # more labels would overlap
    axes.xaxis.set_major_locator(FixedLocator(list(lengths[::-step])))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    axes.set_xlabel("length N")


def cost_lines(axes: "Axes", title: str, lines: Mapping[str, Points], looks: Sequence[Look], unit: str) -> None:
    """Cost over length, both logarithmic. `unit` is "time" (seconds) or "memory" (MiB)."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for (name, points), look in zip(lines.items(), looks, strict=True):
        axes.plot(*zip(*points, strict=True), label=plain_label(name), markersize=5, linewidth=1.8, **look)
    over_length(axes, title, sorted({x for points in lines.values() for x, _ in points}))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(4) if unit == "memory" else LogLocator(10, subs=(1, 3)))
    axes.yaxis.set_minor_locator(NullLocator())
    formats = {"time": format_duration, "memory": format_size}
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formats[unit](value)))


def write_in_cell(axes: "Axes", row: float, column: float, text: str, is_dark: bool, fontsize: float = 9) -> None:
    """A text in a cell of a heat map."""
    color = "white" if is_dark else "black"
    axes.text(column, row, text, ha="center", va="center", fontsize=fontsize, color=color)


def legend(axes: "Axes", fontsize: float = 10, **options: Any) -> None:
    """A legend, unless the panel is empty, as after a run that was stopped early."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=fontsize, **options)


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
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(render(figure, path.suffix[1:].lower(), path.stem))


def render(figure: "Figure", kind: str, name: str) -> bytes:
    """The figure as "png" or "svg"; raises if its labels leave no room for the panels, where matplotlib only warns."""
    import matplotlib

    file = io.BytesIO()
    # equal figures give equal files: no date, and stable ids
    options: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("error", "constrained_layout not applied", UserWarning)
        try:
            figure.savefig(file, format=kind, dpi=DOTS_PER_INCH, **options)
        except UserWarning:
            raise UserError(
                "too many runs or too long names for one picture; pass fewer runs, or rename their directories"
            ) from None
    return file.getvalue()
