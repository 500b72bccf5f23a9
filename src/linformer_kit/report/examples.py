"""Examples with the predictions of a run, for the report page."""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .inputs import Run
from .tables import Table, make_cell

if TYPE_CHECKING:
    from ..training.config import RunConfig
    from ..training.predict import Predictor

EXAMPLES = 6
MAX_TOKENS = 48  # of a running text
MAX_CHARACTERS = 400  # of a cell


def read_examples(run: Run) -> tuple[str, Table | None]:
    """The translations that `linformer evaluate` wrote, or predictions for a few examples of the validation split.

    A note about them comes first; without a table, it says why there is none.
    """
    written = run.folder / "translations.jsonl"
    try:
        if written.is_file():
            return f"The first lines of {written.name}, written by `linformer evaluate`.", read_translations(written)
        if run.is_finished:
            return "Examples spread over the validation split, predicted for this report.", predict_examples(run)
        return "The run is not finished, so it has no model yet.", None
    except (OSError, UserError) as error:
        return f"There are no examples to show: {' '.join(str(error).split())}", None


def read_translations(path: Path) -> Table:
    try:
        with path.open(encoding="utf-8") as file:
            found = [json.loads(line) for line in islice(file, EXAMPLES)]
        return example_table([(each["source"], None, each["reference"], each["hypothesis"]) for each in found])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path.name} is damaged; run `linformer evaluate` again") from None


def example_table(rows: Iterable[tuple[str, str | None, str, str]]) -> Table:
    """Rows of text, pair, reference and prediction; the two texts of a pair share a cell."""
    cells = [
        [
            make_cell(readable(text) if pair is None else f"{readable(text)}\n{readable(pair)}"),
            make_cell(readable(reference)),
            make_cell(readable(prediction) or "(empty text)"),
        ]
        for text, pair, reference, prediction in rows
    ]
    return Table("", ["source", "reference", "prediction"], cells)


def readable(text: str) -> str:
    """A text with unprintable characters replaced, white space collapsed, and truncated if it is long."""
    shown = " ".join("".join(each if each.isprintable() or each.isspace() else "\ufffd" for each in text).split())
    return shown if len(shown) <= MAX_CHARACTERS else f"{shown[:MAX_CHARACTERS]} … ({len(text):,} characters)"


def predict_examples(run: Run) -> Table:
    """Examples of the validation split with the model's predictions."""
    from ..training.predict import Input, Predictor

    predictor = Predictor(run.folder, warn=lambda line: None)
    examples = validation_examples(run.config, predictor)
    answers = predictor(Input(text, pair) for text, pair, _ in examples)
    return example_table(
        (text, pair, reference, format_answer(answer))
        for (text, pair, reference), answer in zip(examples, answers, strict=True)
    )


def format_answer(answer: dict[str, Any]) -> str:
    """The prediction, with its probability if there is one."""
    if "label" in answer:
        return f"{answer['label']} ({answer['probabilities'][answer['label']]:.1%})"
    if "masks" in answer:
        guesses = [guess for mask in answer["masks"] for guess in mask[:3]]
        return ", ".join(f"{guess['token'].strip()} ({guess['probability']:.1%})" for guess in guesses)
    return next(answer[key] for key in ("continuation", "translation", "restored") if key in answer)


def validation_examples(config: "RunConfig", predictor: "Predictor") -> list[tuple[str, str | None, str]]:
    """(text, pair, reference) of a few rows of the validation split."""
    from rich.console import Console

    from ..training.data import read_splits, texts
    from ..training.labels import class_names, labels_of
    from ..training.prepare import with_generated_data

    if config.data.generated:
        config = with_generated_data(config, Console(stderr=True))
    rows, columns = read_splits(config)["validation"], config.data.columns
    # of running text, only some rows are used
    count = EXAMPLES if config.task in ("classification", "translation") else 20 * EXAMPLES
    if not config.data.streaming:
        rows = rows.select(range(0, len(rows), max(1, len(rows) // count)))
    batch = next(iter(rows.iter(count)))
    if config.task == "classification":
        pairs = texts(batch, columns.pair) if columns.pair else [None] * EXAMPLES
        labels = labels_of(batch, columns.label, class_names(rows, config))
        return list(zip(texts(batch, columns.text), pairs, labels, strict=False))
    if config.task == "translation":
        sources, targets = texts(batch, columns.source), texts(batch, columns.target)
        return [(source, None, target) for source, target in zip(sources, targets, strict=True)]
    running = [text for text in texts(batch, columns.text) if text.strip()]
    running = [text for text in running if len(text) >= 20] or running  # without headings
    chosen = running[:: max(1, len(running) // EXAMPLES)][:EXAMPLES]
    return [make_question(text, config.task, predictor) for text in chosen]


def make_question(text: str, task: str, predictor: "Predictor") -> tuple[str, None, str]:
    """A running text as an input of the task: its first half, or with a mask in the middle; and the reference."""
    tokenizer = predictor.tokenizer
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ids = ids[: min(predictor.max_length - 1, MAX_TOKENS)]
    middle, mask = len(ids) // 2, [tokenizer.mask_token_id]
    if task == "causal-lm":
        question, reference = ids[:middle], ids[middle:]
    elif task == "masked-lm":
        question, reference = [*ids[:middle], *mask, *ids[middle + 1 :]], ids[middle : middle + 1]
    else:
        question, reference = [*ids[:middle], *mask, *ids[middle + 3 :]], ids
    return tokenizer.decode(question), None, tokenizer.decode(reference)
