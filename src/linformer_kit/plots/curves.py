"""Figures of training: metrics over steps, and the lengths of the texts."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .style import GRAY, PALETTE, Look, growing_legend, legend, new_figure, nth_look, plain_label, save, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# drawn next to the loss: the first that was measured
METRICS = ("validation_accuracy", "validation_perplexity")
LINE: dict[str, Any] = {"linewidth": 1.8, "markersize": 4}

Metrics = list[dict[str, Any]]


def draw_curves(runs: dict[str, Metrics], path: Path) -> None:
    """Write the figure of `learning_curves`, with the first of `METRICS` that was measured."""
    names = [name for name in METRICS if any(name in line for lines in runs.values() for line in lines)]
    save(learning_curves(runs, names[0] if names else ""), path)


def learning_curves(runs: Mapping[str, Metrics], metric: str) -> "Figure":
    """Left: training and validation loss. Right: the metric, if it was measured. One color and style per run."""
    has_metric = any(metric in line for lines in runs.values() for line in lines)
    figure, panels = new_figure(2 if has_metric else 1)
    looks = {plain_label(name): nth_look(place) for place, name in enumerate(runs)}
    for (name, look), lines in zip(looks.items(), runs.values(), strict=True):
        prefix = f"{name}, " if len(runs) > 1 else ""
        draw_line(panels[0], lines, "loss", f"{prefix}training", look, alpha=0.4)
        draw_line(panels[0], lines, "validation_loss", f"{prefix}validation", look, marker="o")
        for axes in panels[1:]:
            draw_line(axes, lines, metric, name, look, marker="o")
    for axes, what in zip(panels, ("loss", metric.replace("_", " ")), strict=False):
        style_axes(axes)
        axes.set(xlabel="step", ylabel=what)
        # perplexity falls from the size of the vocabulary
        low, high = axes.dataLim.intervaly
        if "perplexity" in what and high > 30 * low > 0:
            axes.set_yscale("log")
    if len(runs) == 1:
        legend(panels[0])
    else:
        add_legends(figure, panels[0], looks)
    return figure


def draw_line(axes: "Axes", lines: Metrics, metric: str, label: str, look: Look, **options: Any) -> None:
    points = [(line["step"], line[metric]) for line in lines if metric in line and math.isfinite(line[metric])]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **LINE, **look, **options)


def add_legends(figure: "Figure", axes: "Axes", looks: Mapping[str, Look]) -> None:
    """One legend of all runs above the panels, and one for training and validation loss."""
    from matplotlib.lines import Line2D

    growing_legend(figure, {name: Line2D([], [], marker="o", **LINE, **look) for name, look in looks.items()}, 10)
    training = Line2D([], [], color=GRAY, alpha=0.4, label="training", **LINE)
    validation = Line2D([], [], color=GRAY, marker="o", label="validation", **LINE)
    axes.legend(handles=[training, validation], frameon=False, fontsize=10)


def draw_lengths(summary: dict[str, Any], path: Path) -> None:
    """Histograms of the text lengths of each split, in tokens, with the length at which texts are truncated."""
    figure, (axes,) = new_figure(1, width=5.0)
    style_axes(axes)
    for (role, split), color in zip(summary["splits"].items(), PALETTE, strict=False):
        histogram, texts = split["length"]["histogram"], max(1, split["length"]["texts"])
        shares = [100 * count / texts for count in histogram["counts"]]
        axes.stairs(shares, histogram["edges"], color=color, linewidth=1.8, label=role)
    longest = summary["length"]
    axes.axvline(longest, color="0.4", linestyle=":", linewidth=1.2)
    axes.text(longest, 0.97, f" {longest:,} ", transform=axes.get_xaxis_transform(), va="top", color="0.3")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="tokens per text", ylabel="texts, %")
    axes.legend(frameon=False)
    save(figure, path)
