"""Pictures of a run: what its metrics did, how long its texts are."""

import os
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, apart for every kind of eye
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# what stands beside the loss, the first that was measured
BESIDE = ("validation_accuracy", "validation_perplexity")


def draw_curves(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Left: the loss in training and on the validation split. Right: the task's metric. One colour per run."""
    figure, (left, right) = new_figure(2)
    names = [name for name in BESIDE if any(name in line for lines in runs.values() for line in lines)]
    for (name, lines), colour in zip(runs.items(), COLOURS, strict=False):
        draw_line(left, lines, "loss", colour, alpha=0.45, label=f"{name}, training" if len(runs) > 1 else "training")
        draw_line(
            left, lines, "validation_loss", colour, marker="o", label=f"{name}, validation" if len(runs) > 1 else "validation"
        )
        for metric in names[:1]:
            draw_line(right, lines, metric, colour, marker="o", label=name)
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel=names[0].replace("_", " ") if names else "")
    left.legend(frameon=False)
    save(figure, path)


def draw_line(axes: Any, lines: list[dict[str, Any]], metric: str, colour: str, **options: Any) -> None:
    points = [(line["step"], line[metric]) for line in lines if metric in line]
    if points:
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.8, markersize=4, **options)


def draw_lengths(summary: dict[str, Any], path: Path) -> None:
    """How long the texts of each split are, in tokens, with the length at which they are cut."""
    figure, (axes,) = new_figure(1)
    for (role, split), colour in zip(summary["splits"].items(), COLOURS, strict=False):
        histogram, texts = split["length"]["histogram"], max(1, split["length"]["texts"])
        axes.stairs(
            [100 * count / texts for count in histogram["counts"]], histogram["edges"], color=colour, linewidth=1.8, label=role
        )
    axes.axvline(summary["length"], color="0.4", linestyle=":", linewidth=1.2)
    axes.text(summary["length"], 0.97, f" {summary['length']:,} ", transform=axes.get_xaxis_transform(), va="top", color="0.3")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="tokens per text", ylabel="texts, %")
    axes.legend(frameon=False)
    save(figure, path)


def new_figure(columns: int) -> tuple[Any, Any]:
    """A picture of one or two plots, in the style of the house."""
    from matplotlib.figure import Figure  # slow to import; and without pyplot no window is ever asked for

    figure = Figure(figsize=(4.5 * columns + 0.5, 3.6), dpi=160, layout="constrained")
    plots = figure.subplots(1, columns, squeeze=False)[0]
    for axes in plots:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, plots


def save(figure: Any, path: Path) -> None:
    """Under another name first: whoever looks at the picture meanwhile sees a whole one."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    figure.savefig(unfinished, format="png")
    os.replace(unfinished, path)
