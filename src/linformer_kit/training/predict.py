"""Predicting with a finished run: a label, filled masks, a continuation, a translation."""

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
from .batches import stacked
from .config import RunConfig
from .data import all_texts, check_files, open_plain, read_sources, top_column, without_mark
from .evaluate import labels_of_model, load_run
from .run import open_run
from .sources import FORMATS, Source, format_of, suffix_of
from .tokens import classified_texts, ended
from .train import quiet_libraries
from .translate import generate

BATCH = 16


@dataclass(frozen=True)
class Options:
    """How to predict; each is for some of the tasks."""

    top: int = 5  # of the tokens for a mask
    tokens: int | None = None  # of a continuation; else 50, or half of what the model takes if that is less
    temperature: float = 0.0  # of a continuation; 0: the likeliest token each time
    beams: int = 1  # of a translation
    seed: int = 0


@dataclass(frozen=True)
class Input:
    """A text, or a pair of them."""

    text: str
    pair: str | None = None


class Predictor:
    """A run that answers. `warn` is told what was cut.

    Answers are dictionaries whose first key is the input.
    """

    def __init__(self, folder: Path, options: Options | None = None, warn: Any = print):
        quiet_libraries()
        self.run, self.config = open_run(folder)
        self.model, self.tokenizer = load_run(self.run.model, self.config)
        self.options, self.warn = options or Options(), warn
        self.count = 0

    def __call__(self, inputs: Iterable[Input]) -> Iterator[dict[str, Any]]:
        torch.manual_seed(self.options.seed)
        answer = {
            "classification": self.classify,
            "masked-lm": self.fill,
            "causal-lm": self.go_on,
            "translation": self.translate,
            "denoising": self.translate,
        }[self.config.task]
        inputs = iter(inputs)
        while batch := list(islice(inputs, BATCH)):
            with torch.no_grad():
                yield from answer(batch)
            self.count += len(batch)

    @property
    def longest(self) -> int:
        return self.model.config.max_position_embeddings

    def tell_cut(self, lengths: list[int], longest: int) -> None:
        for place, length in enumerate(lengths, start=self.count + 1):
            if length > longest:
                self.warn(
                    f"Warning: input {place} has {length:,} tokens, of which the model takes {longest:,}; the rest was not used"
                )

    def classify(self, batch: list[Input]) -> Iterator[dict[str, Any]]:
        pairs = [needed_pair(each) for each in batch] if self.config.data.columns.pair else None
        encoded = classified_texts(self.tokenizer, [each.text for each in batch], pairs, self.longest)
        self.tell_cut(encoded["length"], self.longest)
        types = {"token_type_ids": self.tensor(encoded["token_type_ids"], 0)} if pairs is not None else {}
        logits = self.model(
            self.tensor(encoded["input_ids"]), attention_mask=self.mask(encoded["input_ids"]), **types
        ).logits
        for each, shares in zip(batch, logits.float().softmax(dim=-1).tolist(), strict=True):
            probabilities = dict(zip(labels_of_model(self.model), shares, strict=True))
            yield {
                **shown(each),
                "label": max(probabilities, key=probabilities.__getitem__),
                "probabilities": probabilities,
            }

    def fill(self, batch: list[Input]) -> Iterator[dict[str, Any]]:
        mask_token = self.tokenizer.mask_token
        ids, lengths = ended(self.tokenizer, [each.text for each in batch], self.longest)
        self.tell_cut(lengths, self.longest)
        for place, (each, row) in enumerate(zip(batch, ids, strict=True), start=self.count + 1):
            if self.tokenizer.mask_token_id not in row:
                hint = "it was cut" if mask_token in each.text else f"write {mask_token} where a token is to be guessed"
                self.warn(f"Warning: input {place} has nothing to fill in; {hint}")
        logits = self.model(self.tensor(ids), attention_mask=self.mask(ids)).logits.float()
        for each, row, scores in zip(batch, ids, logits, strict=True):
            masks, filled = [], list(row)
            for place in (place for place, token in enumerate(row) if token == self.tokenizer.mask_token_id):
                shares, tokens = scores[place].softmax(dim=-1).topk(min(self.options.top, scores.shape[-1]))
                guesses = [self.tokenizer.decode([token]) for token in tokens.tolist()]
                masks.append(
                    [
                        {"token": guess, "probability": share}
                        for guess, share in zip(guesses, shares.tolist(), strict=True)
                    ]
                )
                filled[place] = int(tokens[0])
            yield {**shown(each), "filled": self.tokenizer.decode(filled, skip_special_tokens=True), "masks": masks}

    def go_on(self, batch: list[Input]) -> Iterator[dict[str, Any]]:
        is_bounded = self.model.config.position_embedding == "learned"
        count = self.options.tokens or (min(50, self.longest // 2) if is_bounded else 50)
        if is_bounded and count >= self.longest:
            raise UserError(
                f"--tokens is {count}, but the model takes {self.longest} tokens, those of the text it goes on from included; "
                f"allowed: 1 to {self.longest - 1}"
            )
        for place, each in enumerate(batch, start=self.count + 1):
            ids = self.tokenizer(each.text, add_special_tokens=False, verbose=False)["input_ids"] or [
                self.model.config.eos_token_id
            ]
            room = self.longest - count if is_bounded else len(ids)
            if len(ids) > room:
                self.warn(
                    f"Warning: input {place} has {len(ids):,} tokens; with {count} to come the model takes "
                    f"{room:,}: only the last ones were used"
                )
            sampling = (
                {"do_sample": True, "temperature": self.options.temperature}
                if self.options.temperature > 0
                else {"do_sample": False}
            )
            start = self.tensor([ids[-room:]])
            output = self.model.generate(start, max_new_tokens=count, **sampling)
            yield {
                **shown(each),
                "continuation": self.tokenizer.decode(output[0, start.shape[1] :], skip_special_tokens=True),
            }

    def translate(self, batch: list[Input]) -> Iterator[dict[str, Any]]:
        ids, lengths = ended(self.tokenizer, [each.text for each in batch], self.longest)
        self.tell_cut(lengths, self.longest)
        key = "translation" if self.config.task == "translation" else "restored"
        for each, text in zip(batch, generate(self.model, self.tokenizer, ids, self.options.beams), strict=True):
            yield {**shown(each), key: text}

    def tensor(self, rows: list[list[int]], fill: int | None = None) -> torch.Tensor:
        return stacked(rows, self.tokenizer.pad_token_id if fill is None else fill).to(self.model.device)

    def mask(self, rows: list[list[int]]) -> torch.Tensor:
        return stacked([[1] * len(row) for row in rows], 0).to(self.model.device)


def needed_pair(each: Input) -> str:
    if each.pair is None:
        raise UserError(
            f"the run classifies pairs, but {each.text[:60]!r} is alone; write both texts with a tab between them"
        )
    return each.pair


def shown(each: Input) -> dict[str, str]:
    return {"text": each.text} | ({"pair": each.pair} if each.pair is not None else {})


def as_text(answer: dict[str, Any]) -> str:
    """An answer in one line; what it holds of line breaks, only JSON shows."""
    return re.sub(r"[\r\n]+", " ", line_of(answer))


def line_of(answer: dict[str, Any]) -> str:
    if "label" in answer:
        shares = sorted(answer["probabilities"].items(), key=lambda item: -item[1])
        return f"{answer['label']}\t" + " ".join(f"{label}={share:.4f}" for label, share in shares[:5])
    if "masks" in answer:
        guesses = " | ".join(
            ", ".join(f"{guess['token'].strip()} {guess['probability']:.3f}" for guess in mask)
            for mask in answer["masks"]
        )
        return f"{answer['filled']}\t{guesses}"
    return next(answer[key] for key in ("continuation", "translation", "restored") if key in answer)


# inputs


def read_inputs(given: list[str], per: str | None, config: RunConfig) -> Iterator[Input]:
    """Texts given as such, the lines of files, or standard input, in this order of preference."""
    per = per or ("file" if config.data.sample == "document" else "line")
    if not given or given == ["-"]:
        if sys.stdin.isatty():
            raise UserError("nothing to predict from; give a text, a file, or something on standard input")
        yield from inputs_of_stream(sys.stdin.buffer, "standard input", per, config)
        return
    for each in given:
        path = Path(each)
        if each == "-":
            raise UserError("- is standard input, which cannot be given beside other inputs")
        if not is_unicode(each):
            raise UserError(f"{each!r} is not text in the encoding of this terminal; give it as a file")
        if len(path.parts) > 1 and is_there(path.is_dir):  # without a separator it may be a text
            raise UserError(f"{path} is a folder; give its files")
        if is_there(path.is_file):
            yield from inputs_of_file(path, per, config)
        elif suffix_of(path) in FORMATS and not re.search(r"\s", each):  # hardly a text
            raise UserError(f"there is no file {each!r}; give a text, a file, or something on standard input")
        else:
            yield split_pair(each, config)


def is_unicode(text: str) -> bool:
    """Whether a text is one: bytes that are none come from the command line as halves of surrogate pairs."""
    return not re.search("[\ud800-\udfff]", text)


def is_there(question: Callable[[], bool]) -> bool:
    """What a path answers; no, if it cannot be one."""
    try:
        return question()
    except (OSError, ValueError):  # a text may be too long for a name, or hold a zero byte
        return False


def inputs_of_file(path: Path, per: str, config: RunConfig) -> Iterator[Input]:
    """One input per line, per row of a table, or one for the whole file."""
    check_files(Source((path,), ""))
    kind = FORMATS.get(suffix_of(path), "text" if config.data.format == "auto" else config.data.format)
    if per == "line" and kind in ("jsonl", "csv", "tsv", "parquet"):
        columns = config.data.columns
        name = columns.source if config.task == "translation" else columns.text
        data = replace(config.data, streaming=False)
        rows: Any = read_sources([Source((path,), format_of(path, data))], data, "file")
        for wanted in (name, columns.pair or name):
            if top_column(wanted, rows.column_names) not in rows.column_names:
                raise UserError(f"{path} has no column {wanted!r}; it has {', '.join(rows.column_names)}")
        pairs = iter(all_texts(rows, [columns.pair])) if columns.pair else None
        yield from (Input(text, next(pairs) if pairs else None) for text in all_texts(rows, [name]))
        return
    with open_plain(path) as file:
        yield from inputs_of_stream(file, str(path), per, config)


def inputs_of_stream(stream: IO[bytes], name: str, per: str, config: RunConfig) -> Iterator[Input]:
    """One input per line as it comes, or one for everything, in the encoding of the run's data."""
    # the ends of lines are those of training, not also the other ones that str.splitlines knows
    file = io.TextIOWrapper(stream, encoding=without_mark(config.data.encoding))
    try:
        if per == "file":
            yield split_pair(file.read(), config)
        else:
            yield from (split_pair(line.rstrip("\n"), config) for line in file)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(f"{name}: the byte 0x{byte:02x} is not {config.data.encoding}; convert it with iconv") from None
    finally:
        file.detach()  # whoever has opened the stream closes it


def split_pair(text: str, config: RunConfig) -> Input:
    """For a run of pairs, the two texts stand with a tab between them."""
    if config.data.columns.pair and "\t" in text:
        first, second = text.split("\t", 1)
        return Input(first, second)
    return Input(text)
