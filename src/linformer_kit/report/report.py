"""`linformer report`: one self-contained HTML page about runs, measurements and spectra."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import UserError
from ..files import atomic_file, check_writable, read_json
from ..formatting import format_duration, format_size
from ..plots import style
from .examples import read_examples
from .inputs import Inputs, Run, Spectrum, read_inputs
from .measurements import common_sizes, machine_table, measurement_table
from .plot import CHOOSE_OUTPUT, make_figure
from .tables import EMPTY, Cell, Table, heading, make_cell, make_table, parse_cell

if TYPE_CHECKING:  # runs and tables each require packages that the other does not
    from matplotlib.figure import Figure

# keys of a result or of a line of metrics.jsonl that are not metrics
NOT_METRICS = ("step", "best_step", "epoch", "steps", "parameters", "tokens", "seconds", "peak_mib")


def report(paths: list[Path], output: Path) -> None:
    """Write the page about runs, tables of `linformer compare` and spectra."""
    if output.is_dir():
        raise UserError(f"--output is {output}, a directory; pass a file such as {output / 'report.html'}")
    check_writable(output.parent, CHOOSE_OUTPUT)
    inputs = read_inputs(paths)
    if inputs.models:
        raise UserError(
            f"{inputs.models[0]} is a saved model without a run; pass runs, spectra, or tables of `linformer compare`"
        )
    page = render_page(inputs)
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(output) as unfinished:
        unfinished.write_text(page, encoding="utf-8", errors="replace")  # a file name may not be valid text


def render_page(inputs: Inputs) -> str:
    """The whole page as HTML."""
    import jinja2

    runs = inputs.runs
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=page_title(inputs),
        created=datetime.now().astimezone(),
        version=__version__,
        runs=[make_table("Configuration", map(configuration, runs)), result_table(runs)] if runs else [],
        signatures=metric_signatures(runs),
        differences=difference_table(runs) if len(runs) > 1 else None,
        figures=draw_figures(inputs),
        measurements=[
            (name, common_sizes(rows), measurement_table(name, rows)) for name, rows in inputs.tables.items()
        ],
        spectra=[(name, *show_spectrum(name, spectrum)) for name, spectrum in inputs.spectra.items()],
        examples=[(run.name, *read_examples(run)) for run in runs],
        environments=[
            *([environment_table(runs)] if runs else []),
            *(machine_table(name, rows) for name, rows in inputs.tables.items()),
        ],
    )


def page_title(inputs: Inputs) -> str:
    kinds = (
        (len(inputs.runs), "run", "runs"),
        (len(inputs.tables), "table of measurements", "tables of measurements"),
        (len(inputs.spectra), "spectrum", "spectra"),
    )
    parts = [f"{count} {one if count == 1 else several}" for count, one, several in kinds if count]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


# runs


def state_cells(run: Run) -> dict[str, Cell]:
    state = Cell("finished") if run.is_finished else Cell("not finished", bad=True)
    return {"run": Cell(run.name), "state": state}


def configuration(run: Run) -> dict[str, Cell]:
    """Task, sizes, attention, data and length of training."""
    from .run_settings import attention_kind, effective_config

    model, training, data = effective_config(run), run.config.training, run.config.data
    attention = attention_kind(model)
    return {
        **state_cells(run),
        "task": Cell(run.config.task),
        "attention": Cell(attention),
        "K": make_cell(model.get("projected_length")),
        "block → slots": Cell(f"{model['block_length']} → {model['slots']}") if model.get("slots") else EMPTY,
        "projection": EMPTY if attention == "full" else make_cell(model["projection"]),
        "sharing": make_cell(model.get("sharing")),
        "layers": make_cell(model["num_hidden_layers"]),
        "hidden size": make_cell(model["hidden_size"]),
        "heads": make_cell(model["num_attention_heads"]),
        "length": make_cell(model["max_position_embeddings"]),
        "vocabulary": make_cell(model["vocab_size"]) if run.is_finished else EMPTY,  # known with the tokenizer
        "data": Cell(data.generated or Path(str(data.path)).name),
        "steps": make_cell(run.result.get("steps") or max((line["step"] for line in run.metrics), default=0)),
        "planned": Cell(f"{training.steps:,} steps" if training.steps else f"{training.epochs or 3:g} epochs"),
        "batch": make_cell(training.batch_size),
        "learning rate": make_cell(training.learning_rate),
        "seed": make_cell(run.config.seed),
    }


def result_table(runs: Sequence[Run]) -> Table:
    """Metrics of the best checkpoint and of `linformer evaluate`, and the cost of training."""
    metrics = [metric_cells(run) for run in runs]
    # the costs come after all metrics, including those that only other runs have
    empty = {name: EMPTY for each in metrics for name in each}
    rows = [{**state_cells(run), **empty, **each, **cost_cells(run)} for run, each in zip(runs, metrics, strict=True)]
    note = (
        "Validation metrics are those of the best checkpoint, or of the last evaluation if a run is not finished. "
        "Training time counts from the last start or resume."
    )
    return make_table("Results", rows, note)


def metric_cells(run: Run) -> dict[str, Cell]:
    """Metrics on the validation split, then those of `linformer evaluate`."""
    # of a run that is not finished, those of its last evaluation
    last = run.result or next((line for line in reversed(run.metrics) if "validation_loss" in line), {})
    data = run.evaluation.get("split") or Path(str(run.evaluation.get("data"))).name
    return {
        "at step": make_cell(last.get("best_step" if run.is_finished else "step")),
        **number_cells(last, NOT_METRICS),
        **number_cells(run.evaluation, ("rows",), f"evaluated on {data}: "),
    }


def number_cells(metrics: dict[str, Any], others: Sequence[str], prefix: str = "") -> dict[str, Cell]:
    """The metrics that are numbers, except for `others`."""
    return {
        prefix + heading(name): make_cell(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and name not in others
    }


def cost_cells(run: Run) -> dict[str, Cell]:
    tokens = run.result.get("tokens") or max((line.get("tokens", 0) for line in run.metrics), default=None)
    return {
        "tokens": make_cell(tokens),
        "training time": make_cell(run.result.get("seconds"), format_duration),
        "peak memory": make_cell(run.result.get("peak_mib"), format_size),
    }


def metric_signatures(runs: Sequence[Run]) -> list[str]:
    """How metrics such as BLEU were computed; duplicates once."""
    found = (
        f"{heading(name.removeprefix('validation_'))}: {value}"
        for run in runs
        for metrics in (run.result, run.evaluation)
        for name, value in metrics.items()
        if name.endswith("_signature")
    )
    return list(dict.fromkeys(found))


def difference_table(runs: Sequence[Run]) -> Table:
    """The settings in which the runs differ, with defaults filled in."""
    from .run_settings import model_config, run_settings

    settings = {run.name: run_settings(run, model_config(run)) for run in runs}
    first, keys = settings[runs[0].name], dict.fromkeys(key for each in settings.values() for key in each)
    different = [key for key in keys if any(each.get(key) != first.get(key) for each in settings.values())]
    rows = [[Cell(name), *(make_cell(each.get(key)) for key in different)] for name, each in settings.items()]
    return Table("Differing settings", ["run", *different], rows)


def environment_table(runs: Sequence[Run]) -> Table:
    """The environment of each run."""
    rows = []
    for run in runs:
        facts = read_json(run.folder / "environment.json")
        packages, command, _ = facts.pop("packages", {}), facts.pop("command", None), facts.pop("run_format", None)
        cells = {heading(name): make_cell(value) for name, value in {**facts, **packages}.items()}
        rows.append({"run": Cell(run.name), **cells, "command": make_cell(command)})
    return make_table("Runs", rows)


# figures


@dataclass(frozen=True)
class Picture:
    """A figure as a data URL with a description; without a URL, the description says why it was not drawn."""

    name: str
    description: str
    url: str = ""


def draw_figures(inputs: Inputs) -> list[Picture]:
    """The costs of all tables, and the figures of the runs of each task: metrics of tasks are not comparable."""
    found = [draw_or_explain("costs", Inputs(tables=inputs.tables), "")] if inputs.tables else []
    tasks = list(dict.fromkeys(run.config.task for run in inputs.runs))
    for task in tasks:
        ending = f" of {task}" if len(tasks) > 1 else ""
        found += draw_task(task, [run for run in inputs.runs if run.config.task == task], ending)
    return found


def draw_task(task: str, runs: list[Run], ending: str) -> list[Picture]:
    """Learning curves of runs of one task; quality and sharing if the finished ones differ in these."""
    from .run_settings import model_config

    started, finished = [run for run in runs if run.metrics], [run for run in runs if run.is_finished]
    found = [draw_or_explain("learning", Inputs(runs=started), ending)] if started else []
    models = [model_config(run) for run in finished]
    for what, setting in (("quality", "slots" if task == "causal-lm" else "projected_length"), ("sharing", "sharing")):
        if len({str(model[setting]) for model in models}) > 1:
            found.append(draw_or_explain(what, Inputs(runs=finished), ending))
    return found


def draw_or_explain(what: str, inputs: Inputs, ending: str) -> Picture:
    try:
        return make_picture(what + ending, make_figure(what, inputs, None))
    except UserError as error:
        return Picture(what + ending, f"Not drawn: {error}.")


def make_picture(name: str, figure: "Figure") -> Picture:
    url = f"data:image/svg+xml;base64,{base64.b64encode(style.render(figure, 'svg', name)).decode()}"
    return Picture(name, alternative_text(figure), url)


def alternative_text(figure: "Figure") -> str:
    """A description for readers who do not see the figure."""
    panels = []
    for axes in figure.axes:
        texts = (axes.get_title(loc="left") or axes.get_title(), axes.get_ylabel(), axes.get_xlabel())
        if panel := ", ".join(text for text in texts if text):
            panels.append(panel)
    labels = dict.fromkeys(label for axes in figure.axes for label in axes.get_legend_handles_labels()[1])
    lines = f". Lines: {', '.join(labels)}" if labels else ""
    return f"Panels: {'; '.join(panels)}{lines}. The tables have the numbers.".replace(r"\$", "$")


# spectra


def show_spectrum(name: str, spectrum: Spectrum) -> tuple[str, list[Picture], Table]:
    """The source, pictures and table of a spectrum."""
    from ..plots.spectrum import draw_spectrum

    layers, rows, source = spectrum
    pictures = [make_picture(what, figure) for what, figure in draw_spectrum(layers, source).items()]
    cells = [{heading(column): parse_cell(value) for column, value in row.items()} for row in rows]
    note = "k90, k95, k99: number of singular values that hold 90, 95 and 99% of their sum, mean over heads."
    return source, pictures, make_table(name, cells, note)
