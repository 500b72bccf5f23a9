"""Figures of learning tables: one metric for several variants of a model, during training and on the test split."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..csv_tables import Row
from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {"perplexity": "test perplexity (lower is better)", "accuracy": "test accuracy in %", "bleu": "test BLEU"}
# a perplexity this many times as high as the others is printed instead of drawn, to keep the others readable
FAR = 1.5


def draw_learning_table(
    rows: Sequence[Row], curves: Sequence[Row], variants: Sequence[str], baseline: str, metric: str, note: str
) -> "Figure":
    """Validation metric during training (left) and test metric of every seed (right).

    `rows` have the columns variant and test_METRIC, `curves` variant, tokens and metric; both are rows of text.
    Variants without rows are left out. `metric` is perplexity, accuracy or bleu, whose curves show the perplexity.
    """
    scale = 100 if metric == "accuracy" else 1
    tests, lines = (
        {name: found for name in variants if (found := [row for row in table if row["variant"] == name])}
        for table in (rows, curves)
    )
    scores = {name: [scale * float(row[f"test_{metric}"]) for row in found] for name, found in tests.items()}
    points = {
        name: sorted((float(row["tokens"]) / 1e6, scale * float(row["metric"])) for row in found)
        for name, found in lines.items()
    }
    figure, (left, right) = style.new_figure(2, width=11, height=max(3.6, 1.8 + 0.28 * len(scores)))
    draw_curves(left, points, variants, baseline, metric)
    draw_scores(right, scores, baseline, metric)
    right.set_xlabel(LABELS[metric])
    handles, names = left.get_legend_handles_labels()
    style.growing_legend(figure, dict(zip(names, handles, strict=True)), fontsize=10)
    style.footnote(figure, note)
    return figure


def draw_curves(
    axes: "Axes", points: Mapping[str, style.Points], variants: Sequence[str], baseline: str, metric: str
) -> None:
    """One line per variant; the baseline is black."""
    if points and metric != "accuracy":
        best = min(line[-1][1] for line in points.values())
        points = {name: line for name, line in points.items() if line[-1][1] < FAR * best}
        # perplexity starts at the size of the vocabulary, which would flatten everything that follows
        later = [value for line in points.values() for tokens, value in line if tokens > 0.3 * line[-1][0]]
        axes.set_ylim(0.97 * min(later), max(later))
    others = [name for name in variants if name != baseline]
    for name, line in points.items():
        is_baseline = name == baseline
        look: Any = {"color": style.BLACK, "linewidth": 2.4} if is_baseline else style.nth_look(others.index(name))
        axes.plot(*zip(*line, strict=True), label=name, **look)
    ylabel = "validation accuracy in %" if metric == "accuracy" else "validation perplexity"
    axes.set(xlabel="million tokens", ylabel=ylabel)
    style.style_axes(axes, "During training, first seed")


def draw_scores(axes: "Axes", scores: Mapping[str, Sequence[float]], baseline: str, metric: str) -> None:
    """One dot per seed and a bar at the mean of each variant; a dashed line at the mean of the baseline."""
    for place, (name, values) in enumerate(scores.items()):
        mean = statistics.fmean(values)
        if metric == "perplexity" and baseline in scores and mean > FAR * max(scores[baseline]):
            right_edge: Any = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
            axes.text(0.99, place, f"{mean:.0f} →", color=style.BLUE, **right_edge)
            continue
        color = style.GRAY if name == baseline else style.BLUE
        axes.plot(values, [place] * len(values), "o", color=color, alpha=0.6, markersize=7)
        axes.plot(mean, place, "|", color=color, markersize=18, markeredgewidth=2)
        if name == baseline:
            axes.axvline(mean, color=style.GRAY, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(scores)), [textwrap.fill(name, 24) for name in scores])
    axes.set_ylim(len(scores) - 0.5, -0.5)
    style.style_axes(axes, "On the test split")


def draw_learning_overview(
    rows: Sequence[Row], scores: Sequence[tuple[Sequence[float], Sequence[float]]], baseline: str, note: str
) -> "Figure":
    """Quality and speed of training, one line per task, with the baseline at 100% and 1.

    `rows` have the columns task, Linformer, metric and speedup; `scores` are the test metrics of the baseline
    and of the Linformer for each row, over the same seeds.
    """
    figure, (left, right) = style.new_figure(2, width=11, height=1.6 + 0.5 * len(rows))
    for place, (row, (full, linformer)) in enumerate(zip(rows, scores, strict=True)):
        mean = statistics.fmean(full)
        for values, color in ((full, style.GRAY), (linformer, style.BLUE)):
            for value in values:
                share = mean / value if row["metric"] == "perplexity" else value / mean
                left.plot(100 * share, place, "o", color=color, alpha=0.6, markersize=7)
        right.barh(place, float(row["speedup"]), color=style.BLUE, height=0.5)
    labels = [f"{row['task']}\n{textwrap.fill('({})'.format(row['Linformer']), 40)}" for row in rows]
    left.set_yticks(range(len(rows)), labels)
    right.set_yticks([])
    left.set_xlabel(f"accuracy, BLEU or 1 / perplexity,\nin % of {baseline} (gray)")
    right.set_xlabel(f"speedup over {baseline}")
    for axes, title, one in ((left, "Quality", 100), (right, "Speed of training", 1)):
        axes.axvline(one, color=style.GRAY, linewidth=1, linestyle="--")
        axes.set_ylim(len(rows) - 0.5, -0.5)
        style.style_axes(axes, title)
    style.footnote(figure, note)
    return figure
