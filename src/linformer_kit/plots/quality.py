"""The final metric of runs: over K, and by sharing; seeds are averaged."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from . import style
from .style import GRAY, MARKERS, PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WHISKERS: dict[str, Any] = {"capsize": 4, "elinewidth": 1.2}

Seeds = Sequence[float]  # the metric of runs that differ in their seeds only
# for each name, the seeds at each K or sharing; the key None is a reference such as full attention
Series = Mapping[str, Mapping[Any, Seeds]]


def draw_quality(series: Series, metric: str, xlabel: str) -> "Figure":
    """The metric over K, one line per series; references as horizontal lines."""
    figure, (axes,) = style.new_figure(1, width=6.5, height=4.2)
    lines = without_references(series)
    for place, (name, points) in enumerate(lines.items()):
        lengths, seeds = zip(*sorted(points.items()), strict=True)
        look: dict[str, Any] = {**style.nth_look(place), "marker": MARKERS[place % len(MARKERS)], **WHISKERS}
        means = [fmean(values) for values in seeds]
        axes.errorbar(lengths, means, error_bars(seeds), label=name, markersize=6, linewidth=1.8, **look)
    style.over_length(axes, "", sorted({K for points in lines.values() for K in points}))
    finish(figure, axes, series)
    axes.set(xlabel=xlabel, ylabel=metric)
    return figure


def draw_sharing(series: Series, metric: str, modes: Sequence[str]) -> "Figure":
    """Bars of the metric, one group per sharing mode; references as horizontal lines."""
    figure, (axes,) = style.new_figure(1, width=6.5, height=4.2)
    bars = without_references(series)
    width = 0.8 / len(bars)
    for index, (name, points) in enumerate(bars.items()):
        places = [modes.index(mode) + (index - (len(bars) - 1) / 2) * width for mode in points]
        means = [fmean(values) for values in points.values()]
        errors = error_bars(points.values()) if any(len(values) > 1 for values in points.values()) else None
        color, hatch = PALETTE[index % len(PALETTE)], "//" if index >= len(PALETTE) else None
        look: dict[str, Any] = {"color": color, "hatch": hatch, "error_kw": WHISKERS}
        drawn = axes.bar(places, means, width * 0.92, yerr=errors, label=name, **look)
        axes.bar_label(drawn, [f"{mean:.3f}" if mean < 10 else f"{mean:.1f}" for mean in means], padding=3, fontsize=9)
    style.style_axes(axes)
    finish(figure, axes, series)
    axes.set_xticks(range(len(modes)), modes)
    axes.set(xlabel="sharing of E and F", ylabel=metric)
    axes.grid(False, axis="x")
    axes.margins(y=0.1)
    return figure


def without_references(series: Series) -> Series:
    return {name: points for name, points in series.items() if None not in points}


def error_bars(points: Iterable[Seeds]) -> list[tuple[float, ...]]:
    """Distances from the means to the lowest and to the highest values."""
    return list(zip(*((fmean(values) - min(values), max(values) - fmean(values)) for values in points), strict=True))


def finish(figure: "Figure", axes: "Axes", series: Series) -> None:
    """References, with a band from the lowest to the highest seed; a legend, and a footnote on the number of seeds."""
    for name, points in series.items():
        if values := points.get(None):
            axes.axhline(fmean(values), color=GRAY, linestyle="--", linewidth=1.6, label=name)
            if len(values) > 1:
                axes.axhspan(min(values), max(values), color=GRAY, alpha=0.15, linewidth=0)
    handles, labels = axes.get_legend_handles_labels()
    style.growing_legend(figure, dict(zip(labels, handles, strict=True)), fontsize=11)
    counts = sorted({len(values) for points in series.values() for values in points.values()})
    if counts[-1] > 1:
        how_many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        style.footnote(figure, f"Mean of {how_many} seeds each; whiskers from the lowest to the highest.")
