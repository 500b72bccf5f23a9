"""Pictures of runs: what their metrics did, how long their texts are."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .style import GREY, PALETTE, calm, growing_legend, legend, new_figure, plain_label, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# what stands beside the loss, the first that was measured
BESIDE = ("validation_accuracy", "validation_perplexity")
# of more runs than there are colours, some share one
STYLES = ("-", "--", ":", "-.")


def draw_curves(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Write the picture of `curves`."""
    names = [name for name in BESIDE if any(name in line for lines in runs.values() for line in lines)]
    save(curves(runs, names[0] if names else None), path)


def curves(runs: dict[str, list[dict[str, Any]]], metric: str | None) -> "Figure":
    """Left: the loss in training and on the validation split. Right: the metric, if it was measured. One look per run."""
    has_metric = any(metric in line for lines in runs.values() for line in lines)
    figure, panels = new_figure(1, 2 if has_metric else 1, width=9.5 if has_metric else 6.0)
    for axes in panels:
        calm(axes)
        axes.set_xlabel("step")
    panels[0].set_ylabel("loss")
    for place, (name, lines) in enumerate(runs.items()):
        colour, style = PALETTE[place % len(PALETTE)], STYLES[place // len(PALETTE) % len(STYLES)]
        of_run = f"{plain_label(name)}, " if len(runs) > 1 else ""
        draw_line(panels[0], lines, "loss", colour, ls=style, alpha=0.4, label=f"{of_run}training")
        draw_line(panels[0], lines, "validation_loss", colour, ls=style, marker="o", label=f"{of_run}validation")
        for axes in panels[1:]:
            draw_line(axes, lines, str(metric), colour, ls=style, marker="o", label=plain_label(name))
            axes.set_ylabel(str(metric).replace("_", " "))
    if len(runs) == 1:
        legend(panels[0])
    else:
        name_runs(figure, panels)
    return figure


def name_runs(figure: "Figure", panels: "list[Axes]") -> None:
    """One legend of all runs above the panels, and which of the losses is which."""
    handles, labels = panels[-1].get_legend_handles_labels()
    ending = re.compile(", (training|validation)$")
    of_runs = {ending.sub("", label): line for label, line in zip(labels, handles, strict=True)}
    growing_legend(figure, of_runs, fontsize=10)
    panels[0].plot([], [], color=GREY, alpha=0.4, linewidth=1.8, label="training")
    panels[0].plot([], [], color=GREY, marker="o", markersize=4, linewidth=1.8, label="validation")
    handles, labels = panels[0].get_legend_handles_labels()
    panels[0].legend(handles[-2:], labels[-2:], frameon=False, fontsize=10)


def draw_line(axes: "Axes", lines: list[dict[str, Any]], metric: str, colour: str, **options: Any) -> None:
    points = [(line["step"], line[metric]) for line in lines if metric in line and math.isfinite(line[metric])]
    if points:
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.8, markersize=4, **options)


def draw_lengths(summary: dict[str, Any], path: Path) -> None:
    """How long the texts of each split are, in tokens, with the length at which they are cut."""
    figure, (axes,) = new_figure(1, 1, width=5.0)
    calm(axes)
    for (role, split), colour in zip(summary["splits"].items(), PALETTE, strict=False):
        histogram, texts = split["length"]["histogram"], max(1, split["length"]["texts"])
        axes.stairs(
            [100 * count / texts for count in histogram["counts"]],
            histogram["edges"],
            color=colour,
            linewidth=1.8,
            label=role,
        )
    axes.axvline(summary["length"], color="0.4", linestyle=":", linewidth=1.2)
    axes.text(
        summary["length"], 0.97, f" {summary['length']:,} ", transform=axes.get_xaxis_transform(), va="top", color="0.3"
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="tokens per text", ylabel="texts, %")
    axes.legend(frameon=False)
    save(figure, path)
