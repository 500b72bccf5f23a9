"""Predicts with a finished run or a checkpoint: labels, filled masks, continuations or translations."""

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import UserError
from .arguments import inference_precision
from .config import RunConfig
from .encoding import classified_texts, pad_rows, tokenize_with_end
from .load import labels_of_model, load_model, quiet_libraries
from .run import TrainedModel, open_model
from .sources import FORMATS, Source, check_files, encoding_without_bom, format_of, open_decompressed, suffix_of

BATCH_SIZE = 16


@dataclass(frozen=True)
class Options:
    """Options of `linformer predict`; each applies to some of the tasks."""

    top: int = 5  # tokens listed per mask
    tokens: int | None = None  # maximum number of new tokens; default 50, or half the maximum length if that is less
    temperature: float = 0.0  # of sampling; 0: greedy decoding
    beams: int = 1  # of a translation
    seed: int = 0


@dataclass(frozen=True)
class Input:
    """A text, or a pair of them."""

    text: str
    pair: str | None = None


class Predictor:
    """Predicts with the model of a run or with a checkpoint (`open_model`).

    `warn` is called with warnings, such as about truncated inputs. A prediction is a dictionary whose first key is the
    input.
    """

    def __init__(
        self,
        source: TrainedModel | Path | str,
        options: Options | None = None,
        warn: Any = print,
        precision: str = "auto",
        compile: bool = False,
    ):
        quiet_libraries()
        trained = source if isinstance(source, TrainedModel) else open_model(source)
        self.config = trained.config
        self.model, self.tokenizer = load_model(trained, inference_precision(precision, trained), compile)
        self.options, self.warn = options or Options(), warn
        self.count = 0

    def __call__(self, inputs: Iterable[Input]) -> Iterator[dict[str, Any]]:
        torch.manual_seed(self.options.seed)
        predict = {
            "classification": self.classify,
            "masked-lm": self.fill_masks,
            "causal-lm": self.continue_text,
            "translation": self.translate,
            "denoising": self.translate,
        }[self.config.task]
        inputs = iter(inputs)
        while batch := list(islice(inputs, BATCH_SIZE)):
            with torch.no_grad():
                yield from predict(batch)
            self.count += len(batch)

    @property
    def max_length(self) -> int:
        return self.model.config.max_position_embeddings

    def warn_truncated(self, lengths: list[int]) -> None:
        for number, length in enumerate(lengths, start=self.count + 1):
            if length > self.max_length:
                self.warn(
                    f"Warning: input {number} has {length:,} tokens and was truncated to {self.max_length:,}, "
                    "the maximum length of the model"
                )

    def classify(self, batch: list[Input]) -> Iterator[dict[str, Any]]:
        pairs = [require_pair(each) for each in batch] if self.config.data.columns.pair else None
        encoded = classified_texts(self.tokenizer, [each.text for each in batch], pairs, self.max_length)
        self.warn_truncated(encoded["length"])
        types = {"token_type_ids": self.tensor(encoded["token_type_ids"], 0)} if pairs is not None else {}
        logits = self.model(
            self.tensor(encoded["input_ids"]), attention_mask=self.mask(encoded["input_ids"]), **types
        ).logits
        for each, scores in zip(batch, logits.float().softmax(dim=-1).tolist(), strict=True):
            probabilities = dict(zip(labels_of_model(self.model), scores, strict=True))
            yield {
                **input_fields(each),
                "label": max(probabilities, key=probabilities.__getitem__),
                "probabilities": probabilities,
            }

    def fill_masks(self, batch: list[Input]) -> Iterator[dict[str, Any]]:
        mask_token = self.tokenizer.mask_token
        ids, lengths = tokenize_with_end(self.tokenizer, [each.text for each in batch], self.max_length)
        self.warn_truncated(lengths)
        for number, (each, row) in enumerate(zip(batch, ids, strict=True), start=self.count + 1):
            if self.tokenizer.mask_token_id not in row:
                hint = f"write {mask_token} for each token to predict"
                if mask_token in each.text:
                    hint = "it was truncated"
                self.warn(f"Warning: input {number} has no mask; {hint}")
        logits = self.model(self.tensor(ids), attention_mask=self.mask(ids)).logits.float()
        for each, row, scores in zip(batch, ids, logits, strict=True):
            masks, filled = [], list(row)
            for position in (index for index, token in enumerate(row) if token == self.tokenizer.mask_token_id):
                best = scores[position].softmax(dim=-1).topk(min(self.options.top, scores.shape[-1]))
                masks.append(
                    [
                        {"token": self.tokenizer.decode([token]), "probability": probability}
                        for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
                    ]
                )
                filled[position] = int(best.indices[0])
            text = self.tokenizer.decode(filled, skip_special_tokens=True)
            yield {**input_fields(each), "filled": text, "masks": masks}

    def continue_text(self, batch: list[Input]) -> Iterator[dict[str, Any]]:
        is_bounded = self.model.config.position_embedding == "learned"
        count = self.options.tokens or (min(50, self.max_length // 2) if is_bounded else 50)
        if is_bounded and count >= self.max_length:
            raise UserError(
                f"--tokens is {count}, but the maximum length of the model, including the input, is {self.max_length}; "
                f"allowed: 1 to {self.max_length - 1}"
            )
        for number, each in enumerate(batch, start=self.count + 1):
            ids = self.tokenizer(each.text, add_special_tokens=False, verbose=False)["input_ids"] or [
                self.model.config.eos_token_id
            ]
            room = self.max_length - count if is_bounded else len(ids)
            if len(ids) > room:
                self.warn(
                    f"Warning: input {number} has {len(ids):,} tokens and was truncated to the last {room:,}, "
                    f"which leaves room for {count} new tokens"
                )
            sampling = (
                {"do_sample": True, "temperature": self.options.temperature}
                if self.options.temperature > 0
                else {"do_sample": False}
            )
            start = self.tensor([ids[-room:]])
            output = self.model.generate(start, max_new_tokens=count, **sampling)
            yield {
                **input_fields(each),
                "continuation": self.tokenizer.decode(output[0, start.shape[1] :], skip_special_tokens=True),
            }

    def translate(self, batch: list[Input]) -> Iterator[dict[str, Any]]:
        from .translate import generate

        ids, lengths = tokenize_with_end(self.tokenizer, [each.text for each in batch], self.max_length)
        self.warn_truncated(lengths)
        key = "translation" if self.config.task == "translation" else "restored"
        for each, text in zip(batch, generate(self.model, self.tokenizer, ids, self.options.beams), strict=True):
            yield {**input_fields(each), key: text}

    def tensor(self, rows: list[list[int]], fill: int | None = None) -> torch.Tensor:
        return pad_rows(rows, self.tokenizer.pad_token_id if fill is None else fill).to(self.model.device)

    def mask(self, rows: list[list[int]]) -> torch.Tensor:
        return pad_rows([[1] * len(row) for row in rows], 0).to(self.model.device)


def require_pair(each: Input) -> str:
    if each.pair is None:
        raise UserError(
            f"the run classifies pairs, but {each.text[:60]!r} is a single text; separate the two texts with a tab"
        )
    return each.pair


def input_fields(each: Input) -> dict[str, str]:
    return {"text": each.text} | ({"pair": each.pair} if each.pair is not None else {})


def as_text(answer: dict[str, Any]) -> str:
    """A prediction as one line; line breaks become spaces."""
    return re.sub(r"[\r\n]+", " ", format_line(answer))


def format_line(answer: dict[str, Any]) -> str:
    if "label" in answer:
        best = sorted(answer["probabilities"].items(), key=lambda item: -item[1])[:5]
        return f"{answer['label']}\t" + " ".join(f"{label}={probability:.4f}" for label, probability in best)
    if "masks" in answer:
        guesses = " | ".join(
            ", ".join(f"{guess['token'].strip()} {guess['probability']:.3f}" for guess in mask)
            for mask in answer["masks"]
        )
        return f"{answer['filled']}\t{guesses}"
    return next(answer[key] for key in ("continuation", "translation", "restored") if key in answer)


# inputs


def read_inputs(arguments: list[str], per: str | None, config: RunConfig) -> Iterator[Input]:
    """Inputs from arguments, which are file names or texts; without arguments, from standard input."""
    per = per or ("file" if config.data.sample == "document" else "line")
    if not arguments or arguments == ["-"]:
        if sys.stdin.isatty():
            raise UserError("there is no input; pass a text, a file or standard input")
        yield from inputs_of_stream(sys.stdin.buffer, "standard input", per, config)
        return
    for each in arguments:
        path = Path(each)
        if each == "-":
            raise UserError("`-` (standard input) cannot be combined with other inputs")
        if not is_unicode(each):
            raise UserError(f"{each!r} is not in the encoding of this terminal; use a file")
        if len(path.parts) > 1 and path_exists(path.is_dir):  # without a separator it may be a text
            raise UserError(f"{path} is a directory; pass its files")
        if path_exists(path.is_file):
            yield from inputs_of_file(path, per, config)
        elif suffix_of(path) in FORMATS and not re.search(r"\s", each):  # looks like a file name
            raise UserError(f"there is no file {each!r}; pass a text, a file or standard input")
        else:
            yield split_pair(each, config)


def is_unicode(text: str) -> bool:
    """Whether a command line argument was decoded; undecodable bytes become lone surrogates."""
    return not re.search("[\ud800-\udfff]", text)


def path_exists(question: Callable[[], bool]) -> bool:
    """The result of `path.exists` and the like; False if the text cannot be a path."""
    try:
        return question()
    except (OSError, ValueError):  # too long for a file name, or with a null byte
        return False


def inputs_of_file(path: Path, per: str, config: RunConfig) -> Iterator[Input]:
    """One input per line or table row, or one for the whole file."""
    check_files(Source((path,), ""))
    kind = FORMATS.get(suffix_of(path), "text" if config.data.format == "auto" else config.data.format)
    if per == "line" and kind in ("jsonl", "csv", "tsv", "parquet"):
        import datasets

        from .data import iterate_texts, read_sources, top_column

        datasets.disable_progress_bars()
        columns = config.data.columns
        name = columns.source if config.task == "translation" else columns.text
        data = replace(config.data, streaming=False)
        rows: Any = read_sources([Source((path,), format_of(path, data))], data, "file")
        for wanted in (name, columns.pair or name):
            if top_column(wanted, rows.column_names) not in rows.column_names:
                raise UserError(f"{path} has no column {wanted!r}; it has {', '.join(rows.column_names)}")
        pairs = iter(iterate_texts(rows, [columns.pair])) if columns.pair else None
        yield from (Input(text, next(pairs) if pairs else None) for text in iterate_texts(rows, [name]))
        return
    with open_decompressed(path) as file:
        yield from inputs_of_stream(file, str(path), per, config)


def inputs_of_stream(stream: IO[bytes], name: str, per: str, config: RunConfig) -> Iterator[Input]:
    """One input per line, or one for the whole stream, in the encoding of the data of the run."""
    # line breaks as in training; str.splitlines has more of them
    file = io.TextIOWrapper(stream, encoding=encoding_without_bom(config.data.encoding))
    try:
        is_empty = True
        for text in [file.read()] if per == "file" else file:
            is_empty = is_empty and not text
            yield split_pair(text if per == "file" else text.rstrip("\n"), config)
        if is_empty:
            raise UserError(f"{name} is empty; pass a text, a file or standard input")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(f"{name}: the byte 0x{byte:02x} is not {config.data.encoding}; convert it with iconv") from None
    finally:
        file.detach()  # the caller closes the stream


def split_pair(text: str, config: RunConfig) -> Input:
    """An input from a text; for a run on pairs, a tab separates the two texts."""
    if config.data.columns.pair and "\t" in text:
        first, second = text.split("\t", 1)
        return Input(first, second)
    return Input(text)
