"""Figures of training: metrics over steps, and the lengths of the texts."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .style import GRAY, PALETTE, calm, growing_legend, legend, new_figure, plain_label, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# drawn next to the loss: the first that was measured
METRICS = ("validation_accuracy", "validation_perplexity")
# with more runs than colors, colors repeat in another line style
STYLES = ("-", "--", ":", "-.")

Metrics = list[dict[str, Any]]


def draw_curves(runs: dict[str, Metrics], path: Path) -> None:
    """Write the figure of `learning_curves`, with the first of `METRICS` that was measured."""
    names = [name for name in METRICS if any(name in line for lines in runs.values() for line in lines)]
    save(learning_curves(runs, names[0] if names else None), path)


def learning_curves(runs: Mapping[str, Metrics], metric: str | None) -> "Figure":
    """Left: training and validation loss. Right: the metric, if it was measured. One color and style per run."""
    has_metric = any(metric in line for lines in runs.values() for line in lines)
    figure, panels = new_figure(1, 2 if has_metric else 1, width=9.5 if has_metric else 6.0)
    for axes in panels:
        calm(axes)
        axes.set_xlabel("step")
    panels[0].set_ylabel("loss")
    for place, (name, lines) in enumerate(runs.items()):
        color, style = PALETTE[place % len(PALETTE)], STYLES[place // len(PALETTE) % len(STYLES)]
        prefix = f"{plain_label(name)}, " if len(runs) > 1 else ""
        draw_line(panels[0], lines, "loss", color, ls=style, alpha=0.4, label=f"{prefix}training")
        draw_line(panels[0], lines, "validation_loss", color, ls=style, marker="o", label=f"{prefix}validation")
        for axes in panels[1:]:
            draw_line(axes, lines, str(metric), color, ls=style, marker="o", label=plain_label(name))
            axes.set_ylabel(str(metric).replace("_", " "))
    if len(runs) == 1:
        legend(panels[0])
    else:
        add_legends(figure, panels)
    return figure


def draw_learning(runs: Mapping[str, Metrics], metric: str) -> "Figure":
    """`learning_curves`, with a logarithmic axis where the perplexity falls from the size of the vocabulary."""
    figure = learning_curves(runs, metric)
    for axes in figure.axes[1:]:
        low, high = axes.dataLim.intervaly
        if "perplexity" in metric and high > 30 * low > 0:
            axes.set_yscale("log")
    return figure


def add_legends(figure: "Figure", panels: "list[Axes]") -> None:
    """One legend of all runs above the panels, and one for training and validation loss."""
    handles, labels = panels[-1].get_legend_handles_labels()
    ending = re.compile(", (training|validation)$")
    of_runs = {ending.sub("", label): line for label, line in zip(labels, handles, strict=True)}
    growing_legend(figure, of_runs, fontsize=10)
    panels[0].plot([], [], color=GRAY, alpha=0.4, linewidth=1.8, label="training")
    panels[0].plot([], [], color=GRAY, marker="o", markersize=4, linewidth=1.8, label="validation")
    handles, labels = panels[0].get_legend_handles_labels()
    panels[0].legend(handles[-2:], labels[-2:], frameon=False, fontsize=10)


def draw_line(axes: "Axes", lines: Metrics, metric: str, color: str, **options: Any) -> None:
    points = [(line["step"], line[metric]) for line in lines if metric in line and math.isfinite(line[metric])]
    if points:
        axes.plot(*zip(*points, strict=True), color=color, linewidth=1.8, markersize=4, **options)


def draw_lengths(summary: dict[str, Any], path: Path) -> None:
    """Histograms of the text lengths of each split, in tokens, with the length at which texts are truncated."""
    figure, (axes,) = new_figure(1, 1, width=5.0)
    calm(axes)
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
