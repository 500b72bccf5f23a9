"""What models have learnt: for each table a summary, mean and spread over seeds, and a picture."""

import statistics
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from learning_tables import FULL, LearningTable
from matplotlib.axes import Axes
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from linformer_kit.csv_tables import Row, Table, write_rows
from linformer_kit.plots import style

OVERVIEW = "overview"
FORMATS = {"perplexity": "{:.2f}", "accuracy": "{:.2%}", "bleu": "{:.2f}", "chrf": "{:.2f}"}
# a perplexity so many times as high as others is told in figures: drawn, it would push them together
FAR = 1.5
IN_WORDS = {"perplexity": "test perplexity (lower is better)", "accuracy": "test accuracy", "bleu": "test BLEU"}


def numbers(rows: Iterable[Row], column: str) -> list[float]:
    return [float(row[column]) for row in rows if row[column]]


def in_words(values: list[float], form: str) -> str:
    """Mean, and half the range in which all lie: `20.10 ± 0.25`; nothing where nothing was measured."""
    if not values:
        return ""
    spread = f" ± {form.format((max(values) - min(values)) / 2)}" if len(values) > 1 else ""
    return form.format(statistics.fmean(values)) + spread


def columns_of(table: LearningTable) -> dict[str, tuple[str, str]]:
    """The columns of the summary: heading, and where its numbers come from in which form."""
    metrics = {"bleu": ("bleu", "chrf", "bleu_beam4", "chrf_beam4")}.get(table.metric, (table.metric,))
    found = {}
    for metric in metrics:
        name, _, beam = metric.partition("_")
        words = {"bleu": "BLEU", "chrf": "chrF"}.get(name, name) + (" with 4 beams" if beam else "")
        found[f"measured {words}"] = (f"test_{metric}", FORMATS[name])
    return found


def summary_of(table: LearningTable, rows: Table) -> list[Row]:
    """A row per variant that was run."""
    found = []
    for variant in table.variants:
        runs = list(rows.rows(variant=variant))
        if not runs:
            continue
        values = numbers(runs, f"test_{table.metric}")
        row = {"variant": variant, "seeds": str(len(runs))}
        row |= {heading: in_words(numbers(runs, column), form) for heading, (column, form) in columns_of(table).items()}
        twins = with_same_seeds(rows.rows(variant=table.baseline_of(variant)), runs)
        baseline = numbers(twins, f"test_{table.metric}")
        row["beside full attention"] = difference(table.metric, values, baseline) if baseline else ""
        row["parameters"] = f"{int(runs[0]['parameters']):,}"
        for heading, column in (("seconds per epoch", "seconds_per_epoch"), ("peak MiB", "peak_mib")):
            costs = numbers(runs, column)
            row[heading] = f"{statistics.median(costs):.0f}" if costs else "–"
        found.append(row)
    return found


def with_same_seeds(rows: Iterable[Row], runs: Iterable[Row]) -> list[Row]:
    """Rows whose seeds these runs have too: one seed can be further from another than variants are."""
    seeds = {run["seed"] for run in runs}
    return [row for row in rows if row["seed"] in seeds]


def difference(metric: str, values: list[float], baseline: list[float]) -> str:
    """How far the mean is from that of full attention: perplexity in percent, accuracy and BLEU in points."""
    mean, other = statistics.fmean(values), statistics.fmean(baseline)
    if metric == "perplexity":
        return f"{mean / other - 1:+.1%}"
    return f"{(mean - other) * (100 if metric == 'accuracy' else 1):+.2f}"


def draw_values(axes: Axes, table: LearningTable, rows: Table) -> None:
    """Each variant's metric, every seed a dot, full attention as a line across."""
    variants = [variant for variant in table.variants if list(rows.rows(variant=variant))]
    scale = 100 if table.metric == "accuracy" else 1
    full = [scale * value for value in numbers(rows.rows(variant=FULL), f"test_{table.metric}")]
    for place, variant in enumerate(variants):
        values = [scale * value for value in numbers(rows.rows(variant=variant), f"test_{table.metric}")]
        if full and statistics.fmean(values) > FAR * max(full):
            at_the_edge = {
                "transform": axes.get_yaxis_transform(),
                "ha": "right",
                "va": "center",
                "color": style.BLUE,
            }
            axes.text(0.99, place, f"{statistics.fmean(values):.0f} →", **at_the_edge)
            continue
        colour = style.GREY if variant == FULL else style.BLUE
        axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.6, markersize=7)
        axes.plot(statistics.fmean(values), place, "|", color=colour, markersize=18, markeredgewidth=2)
        if variant == FULL:
            axes.axvline(statistics.fmean(values), color=style.GREY, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(variants)), [textwrap.fill(variant, 24) for variant in variants])
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.set_xlabel(IN_WORDS[table.metric] + (" in %" if table.metric == "accuracy" else ""))
    axes.set_title("At the end", loc="left", fontsize=11, fontweight="bold")
    style.calm(axes)


def draw_curves(axes: Axes, table: LearningTable, curves: Table) -> None:
    """The validation metric of the first seed over the tokens read."""
    scale = 100 if table.metric == "accuracy" else 1
    others = [variant for variant in table.variants if variant != FULL]
    found = {
        variant: sorted(
            (float(row["tokens"]) / 1e6, scale * float(row["metric"])) for row in curves.rows(variant=variant, seed=0)
        )
        for variant in table.variants
    }
    found = {variant: points for variant, points in found.items() if points}
    if table.metric != "accuracy":
        nearest = min(points[-1][1] for points in found.values())
        found = {variant: points for variant, points in found.items() if points[-1][1] < FAR * nearest}
        # perplexity falls from the size of the vocabulary: the beginning would flatten all that follows
        later = [metric for points in found.values() for tokens, metric in points if tokens > 0.3 * points[-1][0]]
        axes.set_ylim(0.97 * min(later), max(later))
    for variant, points in found.items():
        look: dict[str, Any] = {"color": style.BLACK, "linewidth": 2.4}
        if variant != FULL:
            round_, place = divmod(others.index(variant), len(style.PALETTE))
            look = {"color": style.PALETTE[place], "linestyle": ("-", "--", ":")[round_ % 3]}
        axes.plot(*zip(*points, strict=True), label=variant, **look)
    axes.set_xlabel("million tokens")
    metric = "accuracy in %" if table.metric == "accuracy" else "perplexity"
    axes.set_ylabel(f"validation {metric}")
    axes.set_title("While training, first seed", loc="left", fontsize=11, fontweight="bold")
    style.calm(axes)


def draw(table: LearningTable, rows: Table, curves: Table, path: Path) -> None:
    """The curves on the left, the end values on the right."""
    variants = sum(1 for variant in table.variants if list(rows.rows(variant=variant)))
    figure, (left, right) = style.new_figure(1, 2, width=11, height=max(3.6, 1.8 + 0.28 * variants))
    draw_curves(left, table, curves)
    draw_values(right, table, rows)
    lines, names = left.get_legend_handles_labels()
    style.growing_legend(figure, dict(zip(names, lines, strict=True)), fontsize=10)
    style.footnote(figure, f"{table.title}; `python benchmarks/learning.py {table.name}`")
    style.save(figure, path)


def summarise(table: LearningTable, rows: Table, curves: Table, output: Path, console: Console) -> None:
    """The summary as CSV and on the screen, and the picture."""
    found = summary_of(table, rows)
    write_rows(output / f"{table.name}_summary.csv", found)
    shown = RichTable(*found[0], title=table.title, box=SIMPLE_HEAD)
    for row in found:
        shown.add_row(*row.values())
    console.print(shown)
    draw(table, rows, curves, output / f"{table.name}.png")


# all tables side by side

Found = list[tuple[LearningTable, Table]]


def overview_of(tables: Found) -> list[Row]:
    """A row per table: full attention, the recommended Linformer, and how much faster its epochs are."""
    rows = []
    for table, runs in tables:
        linformer = list(runs.rows(variant=table.recommended))
        full = with_same_seeds(runs.rows(variant=FULL), linformer)
        column, form = f"test_{table.metric}", FORMATS[table.metric]
        values, baseline = numbers(linformer, column), numbers(full, column)
        seconds = [statistics.median(numbers(each, "seconds_per_epoch")) for each in (full, linformer)]
        rows.append(
            {
                "job": table.title,
                "Linformer": table.recommended,
                "metric": {"bleu": "BLEU"}.get(table.metric, table.metric),
                "measured with full attention": in_words(baseline, form),
                "measured with Linformer": in_words(values, form),
                "difference": difference(table.metric, values, baseline),
                "times as fast": f"{seconds[0] / seconds[1]:.2f}",
            }
        )
    return rows


def draw_overview(tables: Found, rows: list[Row], path: Path) -> None:
    """How good and how fast the recommended Linformer of each table is, full attention being 100 % and 1."""
    figure, (left, right) = style.new_figure(1, 2, width=11, height=1.6 + 0.5 * len(rows))
    for place, ((table, runs), row) in enumerate(zip(tables, rows, strict=True)):
        column, linformer = f"test_{table.metric}", list(runs.rows(variant=table.recommended))
        twins = with_same_seeds(runs.rows(variant=FULL), linformer)
        full = statistics.fmean(numbers(twins, column))
        for found, colour in ((twins, style.GREY), (linformer, style.BLUE)):
            for value in numbers(found, column):
                share = full / value if table.metric == "perplexity" else value / full
                left.plot(100 * share, place, "o", color=colour, alpha=0.6, markersize=7)
        right.barh(place, float(row["times as fast"]), color=style.BLUE, height=0.5)
    for axes, one in ((left, 100), (right, 1)):
        axes.axvline(one, color=style.GREY, linewidth=1, linestyle="--")
        axes.set_ylim(len(rows) - 0.5, -0.5)
        style.calm(axes)
    left.set_yticks(
        range(len(rows)), [f"{table.title}\n{textwrap.fill(f'({table.recommended})', 40)}" for table, _ in tables]
    )
    right.set_yticks([])
    left.set_xlabel("accuracy, BLEU or 1 / perplexity,\nin % of full attention's (grey)")
    left.set_title("How good", loc="left", fontsize=11, fontweight="bold")
    right.set_xlabel("epochs in the time of one with full attention")
    right.set_title("How fast it trains", loc="left", fontsize=11, fontweight="bold")
    style.footnote(figure, "every seed a dot; `python benchmarks/learning.py`")
    style.save(figure, path)


def overview(tables: Found, output: Path) -> None:
    """All tables that have both, as CSV and picture."""
    complete = [
        (table, runs)
        for table, runs in tables
        if all(list(runs.rows(variant=each)) for each in (FULL, table.recommended))
    ]
    if complete:
        rows = overview_of(complete)
        write_rows(output / f"{OVERVIEW}.csv", rows)
        draw_overview(complete, rows, output / f"{OVERVIEW}.png")
