"""The final metric of runs: over K, and by sharing; seeds are averaged."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import style
from .style import GRAY, MARKERS, PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Seeds:
    """The metric of runs that differ in their seeds only."""

    values: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def errors(self) -> list[list[float]]:
        """Distances from the mean to the lowest and highest value, in the form matplotlib expects."""
        return [[self.mean - min(self.values)], [max(self.values) - self.mean]]


# for each name, the seeds at each K or sharing; the key None is a reference such as full attention
Series = Mapping[str, Mapping[Any, Seeds]]


def draw_quality(series: Series, metric: str, xlabel: str) -> "Figure":
    """The metric over K, one line per series; references as horizontal lines."""
    figure, (axes,) = style.new_figure(1, 1, width=6.5, height=4.2)
    for place, (name, points) in enumerate(series.items()):
        if None in points:
            draw_reference(axes, name, points[None])
        else:
            draw_line(axes, name, points, PALETTE[place % len(PALETTE)], MARKERS[place % 6])
    style.over_length(axes, "", sorted({K for points in series.values() for K in points if K is not None}))
    axes.set(xlabel=xlabel, ylabel=metric)
    add_notes(figure, axes, series)
    return figure


def draw_line(axes: "Axes", name: str, points: Mapping[Any, Seeds], color: str, marker: str) -> None:
    lengths = sorted(points)
    errors = [[points[length].errors[side][0] for length in lengths] for side in (0, 1)]
    means = [points[length].mean for length in lengths]
    look: dict[str, Any] = {"color": color, "marker": marker, "markersize": 6, "linewidth": 1.8}
    axes.errorbar(lengths, means, yerr=errors, label=name, capsize=4, elinewidth=1.2, **look)


def draw_reference(axes: "Axes", name: str, seeds: Seeds) -> None:
    """A horizontal line, with a band from the lowest to the highest seed."""
    axes.axhline(seeds.mean, color=GRAY, linestyle="--", linewidth=1.6, label=name)
    if len(seeds.values) > 1:
        axes.axhspan(min(seeds.values), max(seeds.values), color=GRAY, alpha=0.15, linewidth=0)


def draw_sharing(series: Series, metric: str, modes: Sequence[str]) -> "Figure":
    """Bars of the metric, one group per sharing mode; references as horizontal lines."""
    figure, (axes,) = style.new_figure(1, 1, width=6.5, height=4.2)
    with_bars = {name: points for name, points in series.items() if None not in points}
    width = 0.8 / len(with_bars)
    for index, (name, points) in enumerate(with_bars.items()):
        shift = (index - (len(with_bars) - 1) / 2) * width
        draw_bars(axes, name, [(modes.index(mode) + shift, seeds) for mode, seeds in points.items()], width, index)
    for name, points in series.items():
        if None in points:
            draw_reference(axes, name, points[None])
    axes.set_xticks(range(len(modes)), modes)
    axes.set(xlabel="sharing of E and F", ylabel=metric)
    style.calm(axes)
    axes.grid(False, axis="x")
    axes.margins(y=0.1)
    add_notes(figure, axes, series)
    return figure


def draw_bars(axes: "Axes", name: str, bars: list[tuple[float, Seeds]], width: float, index: int) -> None:
    color, hatch = PALETTE[index % len(PALETTE)], "//" if index >= len(PALETTE) else None
    for place, seeds in bars:
        label = name if place == bars[0][0] else None
        axes.bar(place, seeds.mean, width * 0.92, color=color, hatch=hatch, label=label)
        if len(seeds.values) > 1:
            axes.errorbar(place, seeds.mean, yerr=seeds.errors, color="black", capsize=4, elinewidth=1.2)
        shown = f"{seeds.mean:.3f}" if seeds.mean < 10 else f"{seeds.mean:.1f}"
        axes.annotate(shown, (place, max(seeds.values)), (0, 5), textcoords="offset points", ha="center", fontsize=9)


def add_notes(figure: "Figure", axes: "Axes", series: Series) -> None:
    """A legend above the panel, and a footnote on the number of seeds."""
    handles, labels = axes.get_legend_handles_labels()
    style.growing_legend(figure, dict(zip(labels, handles, strict=True)), fontsize=11)
    counts = sorted({len(seeds.values) for points in series.values() for seeds in points.values()})
    if counts[-1] > 1:
        how_many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        style.footnote(figure, f"Mean of {how_many} seeds each; whiskers from the lowest to the highest.")
