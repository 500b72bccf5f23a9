"""Pictures of a run: what its metrics did, how long its texts are."""

from pathlib import Path
from typing import Any

from ..drawing import PALETTE, calm, new_figure, save

# what stands beside the loss, the first that was measured
BESIDE = ("validation_accuracy", "validation_perplexity")


def draw_curves(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Left: the loss in training and on the validation split. Right: the task's metric. One colour per run."""
    figure, (left, right) = new_figure(1, 2)
    for axes in (left, right):
        calm(axes)
    names = [name for name in BESIDE if any(name in line for lines in runs.values() for line in lines)]
    for (name, lines), colour in zip(runs.items(), PALETTE, strict=False):
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
    figure, (axes,) = new_figure(1, 1, width=5.0)
    calm(axes)
    for (role, split), colour in zip(summary["splits"].items(), PALETTE, strict=False):
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
