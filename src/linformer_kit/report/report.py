"""One page about runs and measurements that needs nothing else: tables, pictures and styles all lie within it."""

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import UserError
from ..files import write_atomically
from ..formatting import format_duration, format_size
from ..plots import style
from .inputs import Given, Row, Run, number, read_inputs, read_json
from .output import check_output

if TYPE_CHECKING:  # runs and tables each need packages that the other does without
    from matplotlib.figure import Figure

    from ..training.config import RunConfig
    from ..training.predict import Predictor

FULL_ATTENTION = "linformer-kit-none"
SIZES = ("hidden_size", "num_heads", "num_layers", "sharing", "target_length", "device")
# how much there is to read of each run: examples, tokens of a running text, characters of a cell
EXAMPLES = 6
READABLE_TOKENS = 48
READABLE_CHARACTERS = 400
# what a result holds beside metrics
OF_TRAINING = ("best_step", "steps", "tokens", "seconds", "peak_mib")
WITH_DECODER = ("causal-lm", "translation", "denoising")


def report(given: list[Path], output: Path) -> None:
    """Write the page about folders of runs, tables of `linformer compare` and folders of spectra."""
    if output.is_dir():
        raise UserError(
            f"--output is {output}, a folder; give the name of a file in it, such as {output / 'report.html'}"
        )
    check_output(output, output.parent)
    found = read_inputs(given)
    if found.models:
        names = ", ".join(map(str, found.models))
        one = "is a saved model" if len(found.models) == 1 else "are saved models"
        raise UserError(
            f"{names} {one} alone, without a run; give folders of runs or spectra, or tables of `linformer compare`"
        )
    page = page_about(found)
    output.parent.mkdir(parents=True, exist_ok=True)
    # the name of a file may hold what is no text
    write_atomically(output, lambda part: part.write_text(page, encoding="utf-8", errors="replace"))


def page_about(found: Given) -> str:
    """The whole page as text."""
    import jinja2

    runs = found.runs
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title_of(found),
        made=datetime.now().astimezone(),
        version=__version__,
        runs=[what_was_run(runs), what_came_of_it(runs)] if runs else [],
        remarks=signatures(runs),
        differences=differences(runs) if len(runs) > 1 else None,
        pictures=pictures(found),
        measured=[(name, sizes_in_words(rows), measurements(name, rows)) for name, rows in found.tables.items()],
        spectra=[spectrum_of(name, folder) for name, folder in found.spectra.items()],
        readings=[reading(run) for run in runs],
        environments=[
            *([environments_of_runs(runs)] if runs else []),
            *(machines(name, rows) for name, rows in found.tables.items()),
        ],
    )


def title_of(found: Given) -> str:
    runs, tables, spectra = len(found.runs), len(found.tables), len(found.spectra)
    parts = [
        *([f"{runs} run{'s' * (runs > 1)}"] if runs else []),
        *([f"{tables} table{'s' * (tables > 1)} of measurements"] if tables else []),
        *([f"{spectra} {'spectra' if spectra > 1 else 'spectrum'}"] if spectra else []),
    ]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


# tables


@dataclass(frozen=True)
class Cell:
    """What is shown, and the number to sort by if it is one. `missing` sorts last, whichever way."""

    text: str
    value: float | None = None
    missing: bool = False
    bad: bool = False


@dataclass(frozen=True)
class Table:
    """A table to sort; the first cell of a row names it."""

    caption: str
    headings: list[str]
    rows: list[list[Cell]]
    note: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers."""
        return [any(row[place].value is not None for row in self.rows) for place in range(len(self.headings))]


NOTHING = Cell("–", missing=True)


def cell(value: Any, show: Callable[[float], str] | None = None) -> Cell:
    """A value of any kind; numbers as `show` writes them.

    >>> cell(0.98214).text, cell(10044.6).text, cell(4096).text, cell(None).text, cell(True).text, cell([8, 4]).text
    ('0.9821', '10,045', '4,096', '–', 'yes', '8, 4')
    """
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if isinstance(value, list):
        return Cell(", ".join(map(str, value)))
    if not isinstance(value, int | float):
        return Cell(str(value))
    if math.isnan(value):
        return Cell("not a number", missing=True, bad=True)
    return Cell((show or plain_number)(value), value)


def plain_number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table_of(caption: str, rows: Iterable[Mapping[str, Cell]], note: str = "") -> Table:
    """Rows by their headings; columns in the order in which they first occur, left out where nothing stands in them."""
    rows = list(rows)
    headings = [
        heading
        for heading in dict.fromkeys(heading for row in rows for heading in row)
        if any(row.get(heading, NOTHING) != NOTHING for row in rows)
    ]
    return Table(caption, headings, [[row.get(heading, NOTHING) for heading in headings] for row in rows], note)


def wall_clock(seconds: float) -> str:
    """
    >>> wall_clock(17.69), wall_clock(286.7), wall_clock(7325)
    ('17.7 s', '4 min 47 s', '2 h 2 min')
    """
    if seconds < 60:
        return format_duration(seconds)
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# runs


def is_finished(run: Run) -> bool:
    return bool(run.result)


def state_of(run: Run) -> Cell:
    return Cell("finished") if is_finished(run) else Cell("not finished", bad=True)


def last_evaluation(run: Run) -> dict[str, Any]:
    """The metrics of the best checkpoint; of a run that is not finished, those of its last evaluation so far."""
    if is_finished(run):
        return {
            "step": run.result.get("best_step"),
            **{name: run.result[name] for name in run.result if name not in OF_TRAINING},
        }
    lines = [line for line in run.metrics if "validation_loss" in line]
    return {name: value for name, value in lines[-1].items() if name != "epoch"} if lines else {}


def what_was_run(runs: Sequence[Run]) -> Table:
    return table_of(
        "What was run", ({"run": Cell(run.name), "state": state_of(run), **description(run)} for run in runs)
    )


def description(run: Run) -> dict[str, Cell]:
    """Task, sizes, attention, data, length of the training."""
    from .run_settings import model_of

    model, task, training, data = model_of(run), run.config.task, run.config.training, run.config.data
    attention = attention_of(model, task)
    in_blocks = task in WITH_DECODER and attention == "linformer" and model["slots"] is not None
    return {
        "task": Cell(task),
        "attention": Cell(attention),
        # a causal model shortens blocks to slots, and has no K
        "K": NOTHING if attention == "full" or task == "causal-lm" else cell(model["projected_length"]),
        "block → slots": Cell(f"{model['block_length']} → {model['slots']}") if in_blocks else NOTHING,
        "projection": NOTHING if attention == "full" else cell(model["projection"]),
        "sharing": NOTHING if attention == "full" else cell(model["sharing"]),
        "layers": cell(model["num_hidden_layers"]),
        "width": cell(model["hidden_size"]),
        "heads": cell(model["num_attention_heads"]),
        "length": cell(model["max_position_embeddings"]),
        "vocabulary": cell(model["vocab_size"]) if is_finished(run) else NOTHING,  # which follows from the tokenizer
        "data": Cell(data.generated or Path(str(data.path)).name),
        "steps": cell(run.result.get("steps") or max((line["step"] for line in run.metrics), default=0)),
        "planned": Cell(f"{training.steps:,} steps" if training.steps else f"{training.epochs or 3:g} epochs"),
        "batch": cell(training.batch_size),
        "learning rate": cell(training.learning_rate),
        "seed": cell(run.config.seed),
    }


def attention_of(model: dict[str, Any], task: str) -> str:
    """Whether anything is shortened."""
    if model["projection"] is None:
        return "unknown"
    is_decoder_full = task in WITH_DECODER and model["decoder_attention"] == "full"
    if model["projection"] == "none" or (task == "causal-lm" and is_decoder_full):
        return "full"
    return "linformer, decoder full" if is_decoder_full else "linformer"


def what_came_of_it(runs: Sequence[Run]) -> Table:
    """The metrics of the best checkpoint and of the last evaluation, and what it took."""
    rows = [{"run": Cell(run.name), "state": state_of(run), **metrics_of(run)} for run in runs]
    for row, run in zip(rows, runs, strict=True):  # after the metrics, of which other runs may have more
        row |= {heading: NOTHING for other in rows for heading in other if heading not in row}
        seen = run.result.get("tokens") or max((line.get("tokens", 0) for line in run.metrics), default=None)
        row |= {"tokens": cell(seen), "wall-clock": cell(run.result.get("seconds"), wall_clock)}
        row["peak memory"] = cell(run.result.get("peak_mib"), format_size)
    note = (
        "Validation metrics are those of the best checkpoint, or of the last evaluation where a run is not finished. "
    )
    return table_of("What came of it", rows, note + "Wall-clock: of the training since it was last started or resumed.")


def metrics_of(run: Run) -> dict[str, Cell]:
    """Numbers of the validation split, then those that `linformer evaluate` found."""
    validation, evaluation = last_evaluation(run), run.evaluation
    on = evaluation.get("split") or Path(str(evaluation.get("data"))).name
    return {
        "at step": cell(validation.get("step")),
        **{in_words(name): cell(value) for name, value in validation.items() if is_number(value) and name != "step"},
        **{
            f"evaluated on {on}: {in_words(name)}": cell(value)
            for name, value in evaluation.items()
            if is_number(value) and name != "rows"
        },
    }


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def in_words(name: str) -> str:
    return name.replace("_", " ")


def signatures(runs: Sequence[Run]) -> list[str]:
    """What metrics say of themselves in words, such as how BLEU was counted; each once."""
    said = [metrics for run in runs for metrics in (run.result, run.evaluation)]
    found = (
        f"{in_words(name.removeprefix('validation_'))}: {value}"
        for metrics in said
        for name, value in metrics.items()
        if name.endswith("_signature")
    )
    return list(dict.fromkeys(found))


def differences(runs: Sequence[Run]) -> Table:
    """The settings in which the runs differ, one column for each, defaults filled in."""
    from .run_settings import settings_of

    settings = [settings_of(run) for run in runs]
    keys = dict.fromkeys(key for each in settings for key in each)
    different = [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]
    rows = [
        [Cell(run.name), *(cell(each.get(key)) for key in different)] for run, each in zip(runs, settings, strict=True)
    ]
    return Table("Settings that differ", ["run", *different], rows)


# pictures


@dataclass(frozen=True)
class Picture:
    """A picture as a data URL, with what it shows in words; or, without one, why it could not be drawn."""

    name: str
    said: str
    url: str = ""


def pictures(given: Given) -> list[Picture]:
    """Costs of all tables, and for each task what can be drawn of its runs: metrics of different tasks are not comparable."""
    found = [drawn("costs", Given(tables=given.tables), "")] if given.tables else []
    tasks = list(dict.fromkeys(run.config.task for run in given.runs))
    for task in tasks:
        of = f" of {task}" if len(tasks) > 1 else ""
        found += pictures_of_task(task, [run for run in given.runs if run.config.task == task], of)
    return found


def pictures_of_task(task: str, runs: list[Run], of: str) -> list[Picture]:
    """The curves of runs of one task, and quality and sharings if the finished ones differ in these."""
    from .run_settings import model_of

    begun, finished = [run for run in runs if run.metrics], [run for run in runs if is_finished(run)]
    found = [drawn("learning", Given(runs=begun), of)] if begun else []
    models = [model_of(run) for run in finished]
    for what, setting in (("quality", "slots" if task == "causal-lm" else "projected_length"), ("sharing", "sharing")):
        if len({str(model[setting]) for model in models}) > 1:
            found.append(drawn(what, Given(runs=finished), of))
    return found


def drawn(what: str, given: Given, of: str) -> Picture:
    from .plot import figure_of

    try:
        return picture(what + of, figure_of(what, given, None))
    except UserError as error:
        return Picture(what + of, f"Not drawn: {error}.")


def picture(name: str, figure: "Figure") -> Picture:
    url = f"data:image/svg+xml;base64,{base64.b64encode(style.as_svg(figure)).decode()}"
    return Picture(name, alternative(figure), url)


def alternative(figure: "Figure") -> str:
    """What a picture shows, for those who do not see it."""
    panels = []
    for axes in figure.axes:
        said = (axes.get_title(loc="left") or axes.get_title(), axes.get_ylabel(), axes.get_xlabel())
        if panel := ", ".join(part for part in said if part):
            panels.append(panel)
    labels = dict.fromkeys(label for axes in figure.axes for label in axes.get_legend_handles_labels()[1])
    lines = f". Lines: {', '.join(labels)}" if labels else ""
    return f"Panels: {'; '.join(panels)}{lines}. The tables hold the numbers.".replace(r"\$", "$")


# spectra


@dataclass(frozen=True)
class SpectrumOfModel:
    """What `linformer spectrum` has written of a model."""

    name: str
    said: str
    pictures: list[Picture]
    table: Table


def spectrum_of(name: str, folder: Path) -> SpectrumOfModel:
    from ..plots.spectrum import draw_spectrum, read_layers

    layers, said = read_layers(folder)
    figures = [picture(what, figure) for what, figure in draw_spectrum(folder).items()]
    rows = [{in_words(column): cell(number_or_text(value)) for column, value in layer.mean.items()} for layer in layers]
    note = "k90, k95, k99: how many of the largest singular values hold 90, 95 and 99 % of their sum, on average over heads."
    return SpectrumOfModel(name, said, figures, table_of(name, rows, note))


# measurements


def sizes_in_words(rows: list[Row]) -> str:
    """The sizes that all rows have in common."""
    words = {name: constant for name in SIZES if len(constant := {row[name] for row in rows}) == 1}
    return ", ".join(f"{in_words(name)} {value}" for name, (value,) in words.items() if value)


def measurements(name: str, rows: list[Row]) -> Table:
    """Every point, with how many times its time and memory full attention takes."""
    full = {point(row): row for row in rows if row["implementation"] == FULL_ATTENTION}
    varying = [size for size in SIZES if len({row[size] for row in rows}) > 1]
    note = f"full ÷ this: how many times as much {FULL_ATTENTION} takes for the same subject, step, length, batch and sizes."
    return table_of(name, (numbers_of(row, full.get(point(row)), varying) for row in rows), note)


def machines(name: str, rows: list[Row]) -> Table:
    """Machine, versions and dates, each combination once, with what was measured there."""
    from ..bench.result_table import FACTS

    facts = [fact for fact in FACTS if fact not in SIZES or fact == "device"]
    combinations: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        combinations.setdefault(tuple(row[fact] for fact in facts), []).append(row["implementation"])
    shown = (
        {
            "implementations": Cell(", ".join(dict.fromkeys(implementations))),
            "points": cell(len(implementations)),
            **{in_words(fact): cell(number_or_text(value)) for fact, value in zip(facts, values, strict=True)},
        }
        for values, implementations in combinations.items()
    )
    return table_of(name, shown)


def point(row: Row) -> tuple[str, ...]:
    """What full attention is compared at; K and sharing, which it does not have, are none of it."""
    return tuple(row[key] for key in ("subject", "step", "length", "batch", *SIZES) if key != "sharing")


def numbers_of(row: Row, full: Row | None, varying: list[str]) -> dict[str, Cell]:
    is_ok = row["status"] == "ok"
    return {
        "implementation": cell(row["implementation"]),
        "subject": cell(row["subject"]),
        "step": cell(row["step"]),
        "N": cell(number_or_text(row["length"])),
        "K": cell(number_or_text(row["projected_length"])),
        "batch": cell(number_or_text(row["batch"])),
        **{in_words(fact): cell(number_or_text(row[fact])) for fact in varying},
        "status": Cell(row["status"] or "–", missing=not row["status"], bad=not is_ok),
        "time": cell(measured(row, "seconds_median"), format_duration),
        "full ÷ this (time)": cell(ratio(full, row, "seconds_median"), as_ratio),
        "fastest": cell(measured(row, "seconds_fastest"), format_duration),
        "slowest": cell(measured(row, "seconds_slowest"), format_duration),
        "rounds": cell(number_or_text(row["rounds"])),
        "peak memory": peak_memory(row),
        "full ÷ this (memory)": cell(ratio(full, row, "peak_mib"), as_ratio),
        "note": cell(row["note"]),
    }


def peak_memory(row: Row) -> Cell:
    """The number, or why there is none."""
    peak = measured(row, "peak_mib")
    if peak is None and row["memory_status"] not in ("", "ok"):
        return Cell(row["memory_status"], missing=True, bad=True)
    return cell(peak, format_size)


def measured(row: Row, column: str) -> float | None:
    return number(row, column) if row[column] else None


def ratio(full: Row | None, row: Row, column: str) -> float | None:
    """The cost of full attention as a multiple of this one; None where one of the two was not measured."""
    own, of_full = measured(row, column), measured(full, column) if full else None
    return of_full / own if own and of_full is not None else None


def as_ratio(value: float) -> str:
    """
    >>> as_ratio(0.0123), as_ratio(1), as_ratio(31.4)
    ('0.012×', '1.00×', '31.4×')
    """
    return f"{value:.2g}×" if value < 0.1 else f"{value:.2f}×" if value < 10 else f"{value:,.1f}×"


def number_or_text(text: str) -> int | float | str:
    """
    >>> number_or_text("4096"), number_or_text("15.6"), number_or_text("2.13.0+cpu"), number_or_text("")
    (4096, 15.6, '2.13.0+cpu', '')
    """
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):  # nothing stands where a line was cut
            continue
    return text


# something to read


@dataclass(frozen=True)
class Reading:
    """Some examples of what a run answers; or, in `said`, why there are none."""

    name: str
    said: str
    table: Table | None = None


def reading(run: Run) -> Reading:
    """What `linformer evaluate` has written down, else answers to a few examples of the validation split."""
    try:
        written = run.folder / "translations.jsonl"
        if written.is_file():
            return Reading(
                run.name, f"The first of {written.name}, as `linformer evaluate` wrote them.", translations_in(written)
            )
        if not is_finished(run):
            return Reading(run.name, "The run is not finished, so there is no model to ask yet.")
        return Reading(run.name, "Examples spread over the validation split, answered now.", answers(run))
    except (OSError, UserError) as error:
        return Reading(run.name, f"There are no examples to show: {' '.join(str(error).split())}")


def translations_in(path: Path) -> Table:
    try:
        with path.open(encoding="utf-8") as file:
            found = [json.loads(line) for line in islice(file, EXAMPLES)]
        return texts_table([(each["source"], None, each["reference"], each["hypothesis"]) for each in found])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path.name} is damaged; `linformer evaluate` writes it again") from None


def texts_table(rows: Iterable[tuple[str, str | None, str, str]]) -> Table:
    """Rows of text, its pair, reference and prediction; the two texts of a pair stand above each other."""
    cells = [
        [
            cell(readable(text) if pair is None else f"{readable(text)}\n{readable(pair)}"),
            cell(readable(wanted)),
            cell(readable(found) or "(an empty text)"),
        ]
        for text, pair, wanted, found in rows
    ]
    return Table("", ["source", "reference", "prediction"], cells)


def readable(text: str) -> str:
    """A text without what cannot be printed, its spaces and lines run together, cut if it is long."""
    shown = " ".join("".join(each if each.isprintable() or each.isspace() else "\ufffd" for each in text).split())
    return shown if len(shown) <= READABLE_CHARACTERS else f"{shown[:READABLE_CHARACTERS]} … ({len(text):,} characters)"


def answers(run: Run) -> Table:
    """Examples of the validation split with what the model makes of them."""
    from ..training.predict import Input, Predictor

    predictor = Predictor(run.folder, warn=lambda line: None)
    examples = questions(run.config, predictor)
    found = predictor(Input(text, pair) for text, pair, _ in examples)
    return texts_table(
        (text, pair, reference, in_short(answer))
        for (text, pair, reference), answer in zip(examples, found, strict=True)
    )


def in_short(answer: dict[str, Any]) -> str:
    """What was predicted, with how sure the model is where it says so."""
    if "label" in answer:
        return f"{answer['label']} ({answer['probabilities'][answer['label']]:.1%})"
    if "masks" in answer:
        return ", ".join(
            f"{guess['token'].strip()} ({guess['probability']:.1%})" for mask in answer["masks"] for guess in mask[:3]
        )
    return next(answer[key] for key in ("continuation", "translation", "restored") if key in answer)


def questions(config: "RunConfig", predictor: "Predictor") -> list[tuple[str, str | None, str]]:
    """(text, its pair, the answer that is wanted) of a few rows of the validation split."""
    from rich.console import Console

    from ..training.data import read_splits, texts
    from ..training.labels import class_names, labels_of
    from ..training.prepare import with_generated_data

    if config.data.generated:
        config = with_generated_data(config, Console(stderr=True))
    rows, columns = read_splits(config)["validation"], config.data.columns
    count = (
        EXAMPLES if config.task in ("classification", "translation") else 20 * EXAMPLES
    )  # of running text, not all are taken
    if not config.data.streaming:
        rows = rows.select(range(0, len(rows), max(1, len(rows) // count)))
    batch = next(iter(rows.iter(count)))
    if config.task == "classification":
        pairs = texts(batch, columns.pair) if columns.pair else [None] * EXAMPLES
        return list(
            zip(
                texts(batch, columns.text),
                pairs,
                labels_of(batch, columns.label, class_names(rows, config)),
                strict=False,
            )
        )
    if config.task == "translation":
        return [
            (source, None, target)
            for source, target in zip(texts(batch, columns.source), texts(batch, columns.target), strict=True)
        ]
    running = [text for text in texts(batch, columns.text) if text.strip()]
    running = [text for text in running if len(text) >= 20] or running  # headings say little
    return [question(text, config.task, predictor) for text in running[:: max(1, len(running) // EXAMPLES)][:EXAMPLES]]


def question(text: str, task: str, predictor: "Predictor") -> tuple[str, None, str]:
    """A running text as the task asks about it: to be gone on with, or with something in its middle behind a mask."""
    tokenizer = predictor.tokenizer
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][
        : min(predictor.longest - 1, READABLE_TOKENS)
    ]
    middle, mask = len(ids) // 2, [tokenizer.mask_token_id]
    if task == "causal-lm":
        return tokenizer.decode(ids[:middle]), None, tokenizer.decode(ids[middle:])
    if task == "masked-lm":
        return (
            tokenizer.decode([*ids[:middle], *mask, *ids[middle + 1 :]]),
            None,
            tokenizer.decode(ids[middle : middle + 1]),
        )
    return tokenizer.decode([*ids[:middle], *mask, *ids[middle + 3 :]]), None, tokenizer.decode(ids)


# environment


def environments_of_runs(runs: Sequence[Run]) -> Table:
    """What each run was made with."""
    rows = []
    for run in runs:
        found = read_json(run.folder / "environment.json")
        packages, command, _ = found.pop("packages", {}), found.pop("command", None), found.pop("run_format", None)
        facts = {in_words(name): cell(value) for name, value in {**found, **packages}.items()}
        rows.append({"run": Cell(run.name), **facts, "command": cell(command)})
    return table_of("Runs", rows)
