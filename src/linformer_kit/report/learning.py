"""What came of runs: their curves, quality against K, the sharings side by side."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..models.options_linformer import SHARINGS
from ..plots import style
from ..plots.curves import curves
from ..plots.style import GREY, PALETTE, plain_label
from ..training.run import RunFolder
from .inputs import Run
from .run_settings import settings_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# by what a task is judged; BLEU is measured when a run ends, so its curves show the perplexity
QUALITY = {
    "classification": "accuracy",
    "masked-lm": "perplexity",
    "causal-lm": "perplexity",
    "translation": "bleu",
    "denoising": "perplexity",
}
IN_WORDS = {"accuracy": "accuracy", "perplexity": "perplexity (lower is better)", "bleu": "BLEU"}
WITHOUT_MATRICES = ("mean", "max", "none")
# fields of a model that change nothing for a task
OF_DECODERS = ("decoder_attention", "block_length", "slots", "num_decoder_layers")
MARKERS = ("o", "s", "^", "D", "v", "P")
PER_LAYER = "K_per_layer"

Settings = dict[str, Any]


@dataclass(frozen=True)
class Seeds:
    """The metric of runs that differ in their seeds only."""

    values: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def below_and_above(self) -> list[list[float]]:
        """How far the range reaches from the mean, as matplotlib wants it."""
        return [[self.mean - min(self.values)], [max(self.values) - self.mean]]


# curves


def draw_learning(runs: Sequence[Run]) -> "Figure":
    """The metric of the task and the loss against steps, one look per run."""
    task = task_of(runs)
    if without := [run.name for run in runs if not run.metrics]:
        raise UserError(
            f"{without[0]} has no metrics yet: metrics.jsonl is missing or empty; `linformer train` goes on with it"
        )
    metric = "accuracy" if task == "classification" else "perplexity"
    figure = curves({run.name: run.metrics for run in runs}, f"validation_{metric}")
    for axes in figure.axes[1:]:
        low, high = axes.dataLim.intervaly
        if metric == "perplexity" and high > 30 * low > 0:  # it falls from the size of the vocabulary
            axes.set_yscale("log")
    return figure


def task_of(runs: Sequence[Run]) -> str:
    """The task of all of them."""
    first = {run.config.task: run.name for run in reversed(runs)}
    if len(first) > 1:
        found = ", ".join(f"{name} is {task}" for task, name in first.items())
        raise UserError(f"runs of different tasks cannot be compared: {found}; give runs of one task")
    return next(iter(first))


# quality


def draw_quality(runs: Sequence[Run]) -> "Figure":
    """The final metric against K, one line per projection; full attention as a horizontal line."""
    words, values = final_metric(runs)
    series = in_series(runs, values, lambda settings: settings.pop("K"))
    if not any(length is not None for points in series.values() for length in points):
        raise UserError(
            "none of the runs shortens anything, so there is no K to compare; give runs with a projection, too"
        )
    figure, (axes,) = style.new_figure(1, 1, width=6.5, height=4.2)
    for place, (name, points) in enumerate(series.items()):
        colour, marker = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
        if None in points:
            draw_reference(axes, name, points[None])
        else:
            draw_series(axes, name, points, colour, marker)
    lengths = sorted({length for points in series.values() for length in points if length is not None})
    style.over_length(axes, "", lengths)
    axes.set(xlabel="slots per block" if task_of(runs) == "causal-lm" else "projected length K", ylabel=words)
    name_series(figure, axes)
    tell_seeds(figure, series)
    return figure


def draw_series(axes: "Axes", name: str, points: Mapping[Any, Seeds], colour: str, marker: str) -> None:
    lengths = sorted(points)
    errors = [[points[length].below_and_above[side][0] for length in lengths] for side in (0, 1)]
    means = [points[length].mean for length in lengths]
    axes.errorbar(
        lengths,
        means,
        yerr=errors,
        label=name,
        color=colour,
        marker=marker,
        markersize=6,
        linewidth=1.8,
        capsize=4,
        elinewidth=1.2,
    )


def draw_reference(axes: "Axes", name: str, seeds: Seeds) -> None:
    """A line from side to side, with a band as wide as the seeds differ."""
    axes.axhline(seeds.mean, color=GREY, linestyle="--", linewidth=1.6, label=name)
    if len(seeds.values) > 1:
        axes.axhspan(min(seeds.values), max(seeds.values), color=GREY, alpha=0.15, linewidth=0)


def draw_sharing(runs: Sequence[Run]) -> "Figure":
    """Bars of the final metric, one group per sharing; what shares nothing, as full attention, as a horizontal line."""
    words, values = final_metric(runs)
    series = in_series(runs, values, lambda settings: settings.pop("sharing"))
    with_bars = {name: points for name, points in series.items() if None not in points}
    modes = [mode for mode in SHARINGS if any(mode in points for points in with_bars.values())]
    if not modes:
        raise UserError(
            "none of the runs has matrices to share; give runs with projection linear, dynamic, conv or random"
        )
    figure, (axes,) = style.new_figure(1, 1, width=6.5, height=4.2)
    width = 0.8 / len(with_bars)
    for index, (name, points) in enumerate(with_bars.items()):
        shift = (index - (len(with_bars) - 1) / 2) * width
        draw_bars(axes, name, [(modes.index(mode) + shift, seeds) for mode, seeds in points.items()], width, index)
    for name, points in series.items():
        if None in points:
            draw_reference(axes, name, points[None])
    axes.set_xticks(range(len(modes)), modes)
    axes.set(xlabel="sharing of E and F", ylabel=words)
    style.calm(axes)
    axes.grid(False, axis="x")
    axes.margins(y=0.1)
    name_series(figure, axes)
    tell_seeds(figure, series)
    return figure


def draw_bars(axes: "Axes", name: str, bars: list[tuple[float, Seeds]], width: float, index: int) -> None:
    for place, seeds in bars:
        axes.bar(
            place,
            seeds.mean,
            width * 0.92,
            color=PALETTE[index % len(PALETTE)],
            hatch="//" if index >= len(PALETTE) else None,
            label=name if place == bars[0][0] else None,
        )
        if len(seeds.values) > 1:
            axes.errorbar(place, seeds.mean, yerr=seeds.below_and_above, color="black", capsize=4, elinewidth=1.2)
        shown = f"{seeds.mean:.3f}" if seeds.mean < 10 else f"{seeds.mean:.1f}"
        axes.annotate(shown, (place, max(seeds.values)), (0, 5), textcoords="offset points", ha="center", fontsize=9)


def name_series(figure: "Figure", axes: "Axes") -> None:
    """A legend above the panel, which lines or bars fill."""
    handles, labels = axes.get_legend_handles_labels()
    style.growing_legend(figure, dict(zip(labels, handles, strict=True)), fontsize=11)


def tell_seeds(figure: "Figure", series: Mapping[str, Mapping[Any, Seeds]]) -> None:
    counts = sorted({len(seeds.values) for points in series.values() for seeds in points.values()})
    if counts[-1] > 1:
        how_many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        style.footnote(figure, f"Mean of {how_many} seeds each; the whiskers reach from the lowest to the highest.")


# the metric of each run


def final_metric(runs: Sequence[Run]) -> tuple[str, list[float]]:
    """The words for it and its value in each run: on the test split if all were evaluated there, else on the validation split."""
    metric = QUALITY[task_of(runs)]
    on_test = [run.evaluation.get(metric) if run.evaluation.get("split") == "test" else None for run in runs]
    searches = {run.evaluation.get("beams") for run in runs}  # translations found with more beams are another thing
    if len(searches) == 1 and (values := numbers(on_test)):
        return f"test {IN_WORDS[metric]}", values
    on_validation = [run.result.get(f"validation_{metric}") for run in runs]
    if values := numbers(on_validation):
        return f"validation {IN_WORDS[metric]}", values
    run = next(run for run, value in zip(runs, on_validation, strict=True) if value is None)
    if not run.result:
        raise UserError(
            f"the run {run.name} is not finished; `linformer train {run.folder / 'config.yaml'}` goes on with it"
        )
    without = [run.folder for run, value in zip(runs, on_test, strict=True) if value is None]
    raise UserError(
        f"the run {run.name} has no validation {metric}, and not all runs have a test {metric}; "
        + (
            "; ".join(f"run `linformer evaluate {folder}`" for folder in without)
            or "run `linformer evaluate` with the same --beams"
        )
    )


def numbers(values: Sequence[Any]) -> list[float] | None:
    """The values, if none is missing."""
    return [float(value) for value in values] if all(isinstance(value, int | float) for value in values) else None


# runs that belong together


def in_series(runs: Sequence[Run], values: Sequence[float], take: Any) -> dict[str, dict[Any, Seeds]]:
    """Runs by what sets them apart: for each series its name, and for each value that `take` takes out of its settings the seeds.

    Only runs that are the same but for the seed are averaged. Whatever else differs is in the name of the series.
    """
    found: dict[tuple, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, value in zip(runs, values, strict=True):
        settings = comparable_settings(run)
        place = take(settings)
        found[tuple((key, repr(each)) for key, each in settings.items())][place].append(value)
    all_settings = [dict(key) for key in found]
    # what has no effect on some of them does not tell the others apart; but lists of K are apart from one K for all layers
    without = {key: {"None"} if key != PER_LAYER else set() for key in all_settings[0]}
    keys = [key for key in all_settings[0] if len({settings[key] for settings in all_settings} - without[key]) > 1]
    series: dict[str, dict[Any, Seeds]] = {}
    for settings, points in zip(all_settings, found.values(), strict=True):
        name = series_name(settings, keys)
        if name in series:  # what differs is left out of the name, as the beginning of a path is
            name += f" ({len(series) + 1})"
        series[name] = {place: Seeds(each) for place, each in points.items()}
    return series


def series_name(settings: dict[str, str], varying: Sequence[str]) -> str:
    """The projection, and what else differs between the series: `linear, learning_rate=0.001`."""
    projection = settings["projection"].strip("'")
    words = ["full attention" if projection == "none" else projection]
    for key in varying:
        if key != "projection" and settings[key] != "None":
            value = settings[key].strip("'")
            words.append(f"{key.split('.')[-1]}={Path(value).name if '/' in value else value}")
    return plain_label(", ".join(words))


def comparable_settings(run: Run) -> Settings:
    """What may make a run's quality another one: all settings but the seed.

    `K`, `projection` and `sharing` are always there; what has no effect is None.
    """
    if not (saved := RunFolder(run.folder).model / "config.json").is_file():
        raise UserError(f"{saved} is missing, so what {run.name} was is not known; copy the whole run, or leave it out")
    settings = settings_of(run)
    of_model = [key for key in settings if key.startswith("model.") and key not in ("model.from", "model.attention")]
    fields = {key.removeprefix("model."): settings.pop(key) for key in of_model}
    del settings["seed"], settings["model.attention"]  # which the projection says, too
    length = fields.pop("projected_length")
    slots = statistics.fmean(length) if isinstance(length, list) else length
    if run.config.task == "causal-lm":  # blocks are shortened instead of the whole
        length = slots = fields.pop("slots")
        if fields.pop("decoder_attention") == "full":
            fields["projection"] = "none"
    elif run.config.task in ("classification", "masked-lm"):
        fields = {name: value for name, value in fields.items() if name not in OF_DECODERS}
    if fields["projection"] == "none":
        length = slots = None
        fields |= {name: None for name in ("rescale", "slots", "block_length", "decoder_attention") if name in fields}
    if fields["projection"] in WITHOUT_MATRICES:
        fields["sharing"] = None
    # lists of the same mean are not the same
    fields[PER_LAYER] = length if isinstance(length, list) and len(set(length)) > 1 else None
    return {"projection": fields.pop("projection"), "sharing": fields.pop("sharing"), "K": slots, **settings, **fields}
