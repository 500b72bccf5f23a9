"""Summaries of learning tables: mean and spread over seeds, and the difference from full attention, paired by seed."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from linformer_kit.csv_tables import Row, Table, write_rows
from linformer_kit.plots.learning_table import draw_learning_overview, draw_learning_table
from linformer_kit.plots.style import save

if TYPE_CHECKING:
    from learning import LearningTable

FULL = "full attention"
# metric → (column, heading, format)
SCORES = {
    "perplexity": [("test_perplexity", "measured perplexity", "{:.2f}")],
    "accuracy": [("test_accuracy", "measured accuracy", "{:.2%}")],
    "bleu": [
        ("test_bleu", "measured BLEU", "{:.2f}"),
        ("test_chrf", "measured chrF", "{:.2f}"),
        ("test_bleu_beam4", "measured BLEU with 4 beams", "{:.2f}"),
        ("test_chrf_beam4", "measured chrF with 4 beams", "{:.2f}"),
    ],
}
DIFFERENCE = "vs full attention, same seeds"


def by_seed(rows: Iterable[Row], column: str) -> dict[str, float]:
    return {row["seed"]: float(row[column]) for row in rows if row[column]}


def format_mean(values: Iterable[float], form: str) -> str:
    """Mean ± half the range, such as `20.10 ± 0.25`; empty if there are no values."""
    values = list(values)
    if not values:
        return ""
    spread = f" ± {form.format((max(values) - min(values)) / 2)}" if len(values) > 1 else ""
    return form.format(statistics.fmean(values)) + spread


def same_seeds(values: dict[str, float], baseline: dict[str, float]) -> tuple[list[float], list[float]]:
    """The values of the seeds that both have: one seed can differ more from another than variants do."""
    seeds = [seed for seed in values if seed in baseline]
    return [values[seed] for seed in seeds], [baseline[seed] for seed in seeds]


def format_difference(metric: str, values: dict[str, float], baseline: dict[str, float]) -> str:
    """Mean minus the baseline's mean, over the seeds both have: perplexity in percent, accuracy and BLEU in points.

    If a seed of the variant has no counterpart, the number of seeds compared is added.
    """
    paired, paired_baseline = same_seeds(values, baseline)
    if not paired:
        return ""
    mean, other = statistics.fmean(paired), statistics.fmean(paired_baseline)
    points = 100 if metric == "accuracy" else 1
    text = f"{mean / other - 1:+.1%}" if metric == "perplexity" else f"{points * (mean - other):+.2f}"
    return text if len(paired) == len(values) else f"{text} ({len(paired)} of {len(values)} seeds)"


def summarize(table: "LearningTable", rows: Table) -> list[Row]:
    """One row per variant that was run."""
    summary = []
    for name, variant in table.variants.items():
        if not (runs := list(rows.rows(variant=name))):
            continue
        row = {"variant": name, "seeds": str(len(runs))}
        for column, heading, form in SCORES[table.metric]:
            row[heading] = format_mean(by_seed(runs, column).values(), form)
        values, baseline = (
            by_seed(each, f"test_{table.metric}") for each in (runs, rows.rows(variant=variant.baseline))
        )
        row[DIFFERENCE] = format_difference(table.metric, values, baseline)
        row["parameters"] = f"{int(runs[0]['parameters']):,}"
        for heading, column in (("seconds per epoch", "seconds_per_epoch"), ("peak MiB", "peak_mib")):
            costs = by_seed(runs, column).values()
            row[heading] = f"{statistics.median(costs):.0f}" if costs else "–"
        summary.append(row)
    return summary


def write_summary(table: "LearningTable", rows: Table, curves: Table, output: Path, console: Console) -> None:
    """Write NAME_summary.csv and NAME.png, and print the summary."""
    summary = summarize(table, rows)
    write_rows(output / f"{table.name}_summary.csv", summary)
    shown = RichTable(*summary[0], title=table.title, box=SIMPLE_HEAD)
    for row in summary:
        shown.add_row(*row.values())
    console.print(shown)
    names, note = list(table.variants), f"{table.title}; `python benchmarks/learning.py {table.name}`"
    figure = draw_learning_table(list(rows.rows()), list(curves.rows(seed=0)), names, FULL, table.metric, note)
    save(figure, output / f"{table.name}.png")


def write_overview(tables: "list[tuple[LearningTable, Table]]", output: Path) -> None:
    """Write overview.csv and overview.png: full attention and the recommended variant of each table, same seeds."""
    overview, scores = [], []
    for table, rows in tables:
        column, _, form = SCORES[table.metric][0]
        full, linformer = (list(rows.rows(variant=variant)) for variant in (FULL, table.recommended))
        values, baseline = same_seeds(by_seed(linformer, column), by_seed(full, column))
        if not values:
            continue
        seconds, full_seconds = same_seeds(*(by_seed(each, "seconds_per_epoch") for each in (linformer, full)))
        speed = statistics.median(full_seconds) / statistics.median(seconds)
        row = {"job": table.title, "Linformer": table.recommended}
        row["metric"] = "BLEU" if table.metric == "bleu" else table.metric
        row["measured with full attention"] = format_mean(baseline, form)
        row["measured with Linformer"] = format_mean(values, form)
        row["difference"] = format_difference(table.metric, by_seed(linformer, column), by_seed(full, column))
        row["times as fast"] = f"{speed:.2f}"
        overview.append(row)
        scores.append((baseline, values))
    if overview:
        write_rows(output / "overview.csv", overview)
        save(draw_learning_overview(overview, scores), output / "overview.png")
