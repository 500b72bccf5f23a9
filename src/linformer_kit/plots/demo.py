"""The figure of `linformer demo`: a confusion matrix, and the time of a document over its length."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..formatting import format_ratio
from . import style
from .style import BLUE, GRAY, VERMILION, Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = ({"color": VERMILION, "marker": "o"}, {"color": GRAY, "marker": "s"})  # as in `linformer plot`


def draw_demo(classes: Sequence[str], confusion: Sequence[Sequence[int]], seconds: Mapping[str, Points]) -> "Figure":
    """`confusion` has a row for each true class; `seconds` are (length, seconds) by model, Linformer first."""
    figure, (left, right) = style.new_figure(2, width=10, height=4.6)
    draw_confusion(left, classes, confusion)
    draw_times(right, seconds)
    return figure


def draw_confusion(axes: "Axes", classes: Sequence[str], confusion: Sequence[Sequence[int]]) -> None:
    """Counts, on a blue that deepens with their share of the row."""
    from matplotlib.colors import LinearSegmentedColormap

    shares = [[count / max(1, sum(counts)) for count in counts] for counts in confusion]
    axes.imshow(shares, cmap=LinearSegmentedColormap.from_list("", ["white", BLUE]), vmin=0, vmax=1)
    for row, counts in enumerate(confusion):
        for column, count in enumerate(counts):
            if count:
                style.write_in_cell(axes, row, column, str(count), is_dark=shares[row][column] > 0.5)
    places = range(len(classes))
    axes.set_xticks(places, classes, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(places, classes)
    axes.set_xticks([place - 0.5 for place in places], minor=True)
    axes.set_yticks([place - 0.5 for place in places], minor=True)
    axes.grid(which="minor", color="0.88", linewidth=0.8)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_color("0.7")
    axes.set(xlabel="predicted class", ylabel="true class")
    tested, correct = sum(map(sum, confusion)), sum(counts[row] for row, counts in enumerate(confusion))
    axes.set_title(f"{tested} held-out pieces of files: {correct / max(1, tested):.1%} correct", fontsize=12)


def draw_times(axes: "Axes", seconds: Mapping[str, Points]) -> None:
    """Time over length, with the ratio at the greatest length."""
    style.cost_lines(axes, "", seconds, LOOKS, "time")
    (length, ours), (_, other) = (points[-1] for points in seconds.values())
    # in the corner that rising lines leave free
    verdict = f"at {length:,.0f} bytes, full attention\ntakes {format_ratio(other / ours)} as long"
    axes.text(0.98, 0.04, verdict, transform=axes.transAxes, ha="right", color="0.25")
    axes.margins(x=0.08)
    axes.set_xlabel("bytes of a document")
    axes.set_title("Time per document", fontsize=12)
    style.legend(axes, loc="upper left")
