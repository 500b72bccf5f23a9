"""Runs as series of points: the final metric of each run, and the runs that differ in their seeds only."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..models.options_linformer import SHARINGS
from ..models.projection_linformer import Projection
from ..plots import curves, quality
from ..plots.style import plain_label
from ..training.run import RunFolder
from .inputs import Run
from .run_settings import effective_config, run_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# the metric of a task, if it is not perplexity; BLEU is measured only at the end of a run, so curves show perplexity
METRICS = {"classification": "accuracy", "translation": "bleu"}
LABELS = {"accuracy": "accuracy", "perplexity": "perplexity (lower is better)", "bleu": "BLEU"}


# figures


def draw_learning(runs: Sequence[Run]) -> "Figure":
    """The loss and the metric of the task over steps."""
    metric = "accuracy" if common_task(runs) == "classification" else "perplexity"
    if without := [run.name for run in runs if not run.metrics]:
        raise UserError(
            f"{without[0]} has no metrics yet: metrics.jsonl is missing or empty; `linformer train` resumes it"
        )
    return curves.learning_curves({run.name: run.metrics for run in runs}, f"validation_{metric}")


def draw_quality(runs: Sequence[Run]) -> "Figure":
    """The final metric over K, one line per projection; full attention as a horizontal line."""
    label, values = final_metrics(runs)
    series = group_runs(runs, values, "K")
    if all(None in points for points in series.values()):
        raise UserError("none of the runs has a projected length K; add runs with a projection")
    xlabel = "slots per block" if common_task(runs) == "causal-lm" else "projected length K"
    return quality.draw_quality(series, label, xlabel)


def draw_sharing(runs: Sequence[Run]) -> "Figure":
    """The final metric by sharing; runs without matrices to share as horizontal lines."""
    label, values = final_metrics(runs)
    series = group_runs(runs, values, "model.sharing")
    modes = [mode for mode in SHARINGS if any(mode in points for points in series.values())]
    if not modes:
        names = ", ".join(Projection.kind_names("has_matrices"))
        raise UserError(f"none of the runs has matrices to share; pass runs with one of the projections {names}")
    return quality.draw_sharing(series, label, modes)


# the metric of each run


def common_task(runs: Sequence[Run]) -> str:
    """The task of all runs; raises if they differ."""
    names = {run.config.task: run.name for run in reversed(runs)}
    if len(names) > 1:
        found = ", ".join(f"{name} is {task}" for task, name in names.items())
        raise UserError(f"runs of different tasks cannot be compared: {found}; pass runs of one task")
    return next(iter(names))


def final_metrics(runs: Sequence[Run]) -> tuple[str, list[float]]:
    """A label and a value per run: on the test split if all runs were evaluated there, else on the validation split."""
    metric = METRICS.get(common_task(runs), "perplexity")
    on_test = [run.evaluation.get(metric) if run.evaluation.get("split") == "test" else None for run in runs]
    beams = {run.evaluation.get("beams") for run in runs}  # beam searches of different width are not comparable
    if len(beams) == 1 and (values := complete_numbers(on_test)):
        return f"test {LABELS[metric]}", values
    on_validation = [run.result.get(f"validation_{metric}") for run in runs]
    if values := complete_numbers(on_validation):
        return f"validation {LABELS[metric]}", values
    run = next(run for run, value in zip(runs, on_validation, strict=True) if value is None)
    if not run.is_finished:
        raise UserError(
            f"the run {run.name} is not finished; resume it: `linformer train {run.folder / 'config.yaml'}`"
        )
    commands = [f"`linformer evaluate {run.folder}`" for run, value in zip(runs, on_test, strict=True) if value is None]
    remedy = "; ".join(f"run {each}" for each in commands) or "run `linformer evaluate` with the same --beams"
    raise UserError(f"the run {run.name} has no validation {metric}, and not all runs have a test {metric}; {remedy}")


def complete_numbers(values: Sequence[Any]) -> list[float] | None:
    """The values, if none is missing."""
    return [float(value) for value in values] if all(isinstance(value, int | float) for value in values) else None


# grouping


def group_runs(runs: Sequence[Run], values: Sequence[float], axis: str) -> dict[str, dict[Any, list[float]]]:
    """For each series its name, and for each value of the setting `axis` the metrics of its seeds.

    Only runs that are equal except for the seed are averaged. All other differences are part of the name.
    """
    found: dict[tuple, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, value in zip(runs, values, strict=True):
        settings = comparable_settings(run)
        place = settings.pop(axis, None)
        found[tuple((key, str(each)) for key, each in settings.items())][place].append(value)
    all_settings = [dict(key) for key in found]
    keys = dict.fromkeys(key for settings in all_settings for key in settings)
    # a setting without effect on some series is not among theirs, and does not distinguish the others
    varying = [key for key in keys if len({settings[key] for settings in all_settings if key in settings}) > 1]
    series: dict[str, dict[Any, list[float]]] = {}
    for settings, points in zip(all_settings, found.values(), strict=True):
        name = series_name(settings, varying)
        if name in series:  # the difference is not part of the name, such as the beginning of a path
            name += f" ({len(series) + 1})"
        series[name] = points
    return series


def series_name(settings: dict[str, str], varying: Sequence[str]) -> str:
    """The projection, and what else differs between the series: `linear, learning_rate=0.001`."""
    projection = settings["model.projection"]
    parts = ["full attention" if projection == "none" else projection]
    for key in varying:
        if key != "model.projection" and (value := settings.get(key, "None")) != "None":
            parts.append(f"{key.split('.')[-1]}={Path(value).name if '/' in value else value}")
    return plain_label(", ".join(parts))


def comparable_settings(run: Run) -> dict[str, Any]:
    """All settings that affect the quality, except the seed; `K` is missing without a projection."""
    if not (saved := RunFolder(run.folder).model / "config.json").is_file():
        raise UserError(f"{saved} is missing, so the model of {run.name} is unknown; copy the whole run, or omit it")
    settings = run_settings(run, effective_config(run))
    del settings["seed"], settings["model.attention"]  # the projection implies the attention
    length = settings.pop("model.slots" if run.config.task == "causal-lm" else "model.projected_length", None)
    is_list = isinstance(length, list)
    if length is not None:
        settings["K"] = statistics.fmean(length) if is_list else length
    # different lists may have the same mean
    settings["K_per_layer"] = length if is_list and len(set(length)) > 1 else None
    return settings
