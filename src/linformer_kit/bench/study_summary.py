"""Summaries of a study: mean and spread over seeds, and the difference from the baseline, paired by seed."""

import statistics
from collections.abc import Collection, Iterable, Sequence
from math import isnan, nan
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from ..csv_tables import Row, Table, write_rows
from ..plots.learning_table import draw_learning_overview, draw_learning_table
from ..plots.style import save
from .study_tables import OVERVIEW, Study, StudyTable

# the scores of a metric: column and heading
SCORES = {
    "perplexity": {"test_perplexity": "perplexity"},
    "accuracy": {"test_accuracy": "accuracy"},
    "bleu": {
        **{"test_bleu": "BLEU", "test_chrf": "chrF"},
        **{"test_bleu_beam4": "BLEU with 4 beams", "test_chrf_beam4": "chrF with 4 beams"},
    },
}


def by_seed(rows: Iterable[Row], column: str) -> dict[str, float]:
    return {row["seed"]: float(row[column]) for row in rows if row[column]}


def same_seeds(values: dict[str, float], baseline: dict[str, float]) -> tuple[list[float], list[float]]:
    """The values of the seeds that both have: one seed can differ more from another than variants do."""
    seeds = [seed for seed in values if seed in baseline]
    return [values[seed] for seed in seeds], [baseline[seed] for seed in seeds]


def format_mean(metric: str, values: Collection[float]) -> str:
    """Mean ± half the range, such as `20.10 ± 0.25`; empty if there are no values."""
    if not values:
        return ""
    form = "{:.2%}" if metric == "accuracy" else "{:.2f}"
    spread = f" ± {form.format((max(values) - min(values)) / 2)}" if len(values) > 1 else ""
    return form.format(statistics.fmean(values)) + spread


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


def summarize(table: StudyTable, rows: Table) -> list[Row]:
    """One row per variant that was run."""
    summary = []
    for name, variant in table.variants.items():
        if not (runs := list(rows.rows(variant=name))):
            continue
        row = {"variant": name, "seeds": str(len(runs))}
        for column, heading in SCORES[table.metric].items():
            row[f"measured {heading}"] = format_mean(table.metric, by_seed(runs, column).values())
        scores = (by_seed(each, f"test_{table.metric}") for each in (runs, rows.rows(variant=variant.baseline)))
        row[f"vs {table.baseline}, same seeds"] = format_difference(table.metric, *scores)
        row["parameters"] = f"{int(runs[0]['parameters']):,}"
        for heading, column in (("seconds per epoch", "seconds_per_epoch"), ("peak MiB", "peak_mib")):
            cost = statistics.median(by_seed(runs, column).values() or [nan])
            row[heading] = "–" if isnan(cost) else f"{cost:.0f}" if cost >= 10 else f"{cost:.2g}"
        summary.append(row)
    return summary


def write_summary(study: Study, name: str, rows: Table, command: str, console: Console) -> None:
    """Write NAME_summary.csv and NAME.png, and print the summary; the figure names the command."""
    table, summary = study.tables[name], summarize(study.tables[name], rows)
    write_rows(study.output / f"{name}_summary.csv", summary)
    shown = RichTable(*summary[0], title=table.title, box=SIMPLE_HEAD)
    for row in summary:
        shown.add_row(*row.values())
    console.print(shown)
    first_seed = [row for row in study.curves(name).rows(seed=0) if rows.get(variant=row["variant"], seed=0)]
    note, variants = f"{table.title}; `{command}`", list(table.variants)
    figure = draw_learning_table(list(rows.rows()), first_seed, variants, table.baseline, table.metric, note)
    save(figure, study.output / f"{name}.png")


def write_overview(tables: Sequence[tuple[StudyTable, Table]], command: str, output: Path) -> None:
    """Write overview.csv and overview.png: the baseline and the recommended variant of each table, same seeds."""
    tables = [(table, rows) for table, rows in tables if table.recommended]
    baselines = {table.baseline for table, _ in tables}
    name = baselines.pop() if len(baselines) == 1 else "the baseline"
    overview, scores = [], []
    for table, rows in tables:
        runs = [list(rows.rows(variant=variant)) for variant in (table.recommended, table.baseline)]
        by_variant = [by_seed(each, f"test_{table.metric}") for each in runs]
        values, baseline = same_seeds(*by_variant)
        if not values:
            continue
        seconds = same_seeds(*(by_seed(each, "seconds_per_epoch") for each in runs))
        row = {"task": table.title, "Linformer": str(table.recommended)}
        row["metric"] = "BLEU" if table.metric == "bleu" else table.metric
        row[f"measured with {name}"] = format_mean(table.metric, baseline)
        row["measured with Linformer"] = format_mean(table.metric, values)
        row["difference"] = format_difference(table.metric, *by_variant)
        row["speedup"] = f"{statistics.median(seconds[1]) / statistics.median(seconds[0]):.2f}"
        overview.append(row)
        scores.append((baseline, values))
    if overview:
        write_rows(output / f"{OVERVIEW}.csv", overview)
        figure = draw_learning_overview(overview, scores, name, f"one dot per seed; `{command}`")
        save(figure, output / f"{OVERVIEW}.png")
