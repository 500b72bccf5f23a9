"""Preparing: raw rows become tokens on disk, once for all runs that share data, tokenizer and length.

A prepared folder holds `tokenizer/`, one folder per split (Arrow, memory-mapped when read) and `summary.json`. It is built
under a temporary name and renamed when it is whole.
"""

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import datasets
from rich.console import Console
from rich.table import Column, Table
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..errors import UserError
from ..plots.curves import draw_lengths
from . import listops
from .batches import lengths_of
from .config import RunConfig
from .data import Rows, all_texts, is_language_model, read_splits, readable, wanted_columns
from .labels import has_no_labels, label_names
from .model import max_length
from .sources import describe_sources, find_sources
from .tokenizer import load_tokenizer, train_tokenizer
from .tokens import counted, digest, few_of, packed, stream, tokenize

# raise it when what is written changes, so that nobody reads what an older version has prepared
FORMAT = 3
# of a stream, a tokenizer learns from the first texts only
TOKENIZER_EXAMPLES = 200_000


@dataclass(frozen=True)
class Prepared:
    """Tokens, ready to train on. When streaming, the training split is read while training."""

    folder: Path
    tokenizer: PreTrainedTokenizerFast
    splits: dict[str, Rows]
    summary: dict[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        """What must not change while a run is trained: the tokens and labels of every split, and what they stand for."""
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return {**self.summary, "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest()}

    @property
    def labels(self) -> list[str]:
        """The names of the classes; empty where there are none."""
        return self.summary["labels"]


def prepare(config: RunConfig, console: Console) -> Prepared:
    """Train or load the tokenizer, tokenize every split; or find that it was done before."""
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar

    if config.data.generated:
        config = with_generated_data(config, console)
    folder = Path(config.data.cache).expanduser() / "prepared" / fingerprint(config)
    (enable_progress_bar if console.is_terminal else disable_progress_bar)()
    if (folder / "summary.json").is_file():
        console.print(f"Prepared data found in {folder}", markup=False, highlight=False, soft_wrap=True)
    else:
        with made_whole(folder) as unfinished:
            build(config, unfinished, console)
    return open_prepared(config, folder)


def open_prepared(config: RunConfig, folder: Path) -> Prepared:
    """What `build` has written."""
    summary = json.loads((folder / "summary.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    splits: dict[str, Rows] = {
        role: datasets.load_from_disk(str(folder / role))
        for role in ("train", "validation", "test")
        if (folder / role).is_dir()
    }
    if config.data.streaming:
        splits["train"] = stream(config, tokenizer, read_splits(config)["train"])
    return Prepared(folder, tokenizer, splits, summary)


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name once everything in it is written."""
    try:
        unfinished = folder.with_name(f".{folder.name}-{secrets.token_hex(8)}")
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"{folder.parent} cannot be written ({error.strerror}); set data.cache to a folder that can"
        ) from None
    try:
        yield unfinished
        try:
            os.rename(unfinished, folder)
        except OSError:
            if not folder.exists():
                raise  # else another process was quicker; what it made is the same
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def with_generated_data(config: RunConfig, console: Console) -> RunConfig:
    """The configuration with the path of data that our own code makes, and makes once."""
    folder = Path(config.data.cache).expanduser() / f"{config.data.generated}-{listops.VERSION}"
    if not folder.exists():
        console.print(f"Generating {config.data.generated} …", markup=False)
        with made_whole(folder) as unfinished:
            listops.write(unfinished)
    return replace(config, data=replace(config.data, path=str(folder), generated=None))


def fingerprint(config: RunConfig) -> str:
    """The same for the same data, tokenizer, task and length; files count by name, size and time."""
    data = asdict(config.data)
    for name in (
        "workers",
        "cache",
        "mask_share",
        "span_length",
        "shuffle_buffer",
    ):  # of no consequence for what is written
        del data[name]
    sources = find_sources(config.data, config.task)
    if sources is not None:
        del data["path"]  # its files count
    files = [
        (split, *identity(path)) for split, found in (sources or {}).items() for each in found for path in each.files
    ]
    loaded = config.tokenizer.from_ or config.model.get("from")
    if loaded is not None:
        files += [
            ("tokenizer", *identity(path))
            for end in ("json", "txt", "model")
            for path in sorted(Path(loaded).glob(f"*.{end}"))
        ]
    parts = {
        "format": FORMAT,
        "task": "running text" if is_language_model(config.task) else config.task,
        "data": data,
        "files": files,
        "tokenizer": loaded or asdict(config.tokenizer),
        "length": max_length(config),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def files_of(config: RunConfig) -> list[Path]:
    """The local files of all splits."""
    sources = find_sources(config.data, config.task) or {}
    return [path for found in sources.values() for source in found for path in source.files]


def identity(path: Path) -> tuple[str, int, int]:
    """What changes when a file does."""
    return str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns


# building


def build(config: RunConfig, folder: Path, console: Console) -> None:
    """Write tokenizer, splits and summary."""
    console.print(f"Reading the data … {describe_sources(config)}", markup=False, highlight=False, soft_wrap=True)
    splits = read_splits(config)
    labels = label_names(splits["train"], config) if config.task == "classification" else []
    tokenizer = make_tokenizer(config, splits["train"], console)
    if config.data.columns.pair:  # whoever loads it later shall tell the two texts apart without asking
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names  # what is saved
    tokenizer.save_pretrained(folder / "tokenizer")
    summary: dict[str, Any] = {
        "labels": labels,
        "tokenizer_size": len(tokenizer),
        "length": max_length(config),
        "splits": {},
    }
    if config.data.streaming:  # which cannot be counted ahead
        summary["streamed"] = [(path.name, path.stat().st_size) for path in files_of(config)]
    for role, rows in splits.items():
        if isinstance(rows, datasets.IterableDataset):
            if role == "train":
                continue  # is read while training
            rows = datasets.Dataset.from_list(list(readable(rows)))
        if role == "test" and config.task == "classification" and has_no_labels(rows, config):
            console.print("The test split has no labels; it is left out.", markup=False)
            continue
        console.print(f"Tokenizing {role}: {len(rows):,} rows …", markup=False)
        tokens = tokenize(rows, config, tokenizer, labels, role)
        for remark in remarks(config, rows, tokens, tokenizer):
            console.print(remark, style="yellow", markup=False)
        summary["splits"][role] = counted(tokens, max_length(config))
        if is_language_model(config.task):
            tokens = packed(tokens, max_length(config), folder / f"{role}.arrow")
        if len(tokens) == 0:
            raise UserError(f"the {role} split has no text at all")
        tokens.save_to_disk(str(folder / role))
        (folder / f"{role}.arrow").unlink(missing_ok=True)
        summary["splits"][role] |= {"examples": len(tokens), "digest": digest(tokens)}
    (folder / "summary.json").write_text(json.dumps(summary))


def remarks(config: RunConfig, rows: Any, tokens: Any, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """What a person may not have known of the rows of a split."""
    if config.task == "translation" and len(tokens) < len(rows):
        yield f"{len(rows) - len(tokens):,} pairs with nothing on one side are left out."
    if config.task == "classification":
        empty = int((lengths_of(tokens) <= tokenizer.num_special_tokens_to_add()).sum())
        if empty:
            yield f"{empty:,} of the texts are empty."


def make_tokenizer(config: RunConfig, rows: Rows, console: Console) -> PreTrainedTokenizerFast:
    """Trained on the training split, or loaded."""
    settings = config.tokenizer
    if settings.from_ is not None:
        return load_tokenizer(settings.from_)
    if "from" in config.model:  # a model knows only its own tokens
        return load_tokenizer(config.model["from"], "model.from")
    if settings.kind != "bytes":
        console.print(f"Training a tokenizer ({settings.kind}, {settings.vocab_size:,} tokens) …", markup=False)
    if isinstance(rows, datasets.IterableDataset):
        rows = rows.take(TOKENIZER_EXAMPLES)
    names = [name for key, name in wanted_columns(config).items() if key != "data.columns.label"]
    return train_tokenizer(settings, all_texts(rows, names))


# showing


def show(config: RunConfig, console: Console | None = None) -> None:
    """Prepare, and tell what there is: examples, tokens, lengths, what was cut; a picture of the lengths beside."""
    console = console or Console()
    prepared = prepare(config, console)
    table = Table(
        "split", *(Column(name, justify="right") for name in ("texts", "examples", "tokens", "mean", "longest", "cut"))
    )
    for role, split in prepared.summary["splits"].items():
        for name in ("length", "target_length"):
            if name in split:
                counts = split[name]
                numbers = (
                    counts["texts"],
                    split["examples"],
                    counts["tokens"],
                    round(counts["mean"]),
                    counts["longest"],
                )
                cut = "packed" if is_language_model(config.task) else f"{counts['cut_texts']:,}"
                table.add_row(role if name == "length" else "  target", *(f"{number:,}" for number in numbers), cut)
    console.print(table)
    if prepared.labels:
        console.print(f"Labels: {few_of(prepared.labels)}", highlight=False, markup=False, soft_wrap=True)
    first = prepared.summary["splits"].get("train") or prepared.summary["splits"]["validation"]
    console.print("Tokens per text", highlight=False)
    for line in bars(first["length"]["histogram"]):
        console.print(line, highlight=False, markup=False)
    picture = prepared.folder / "lengths.png"
    draw_lengths(prepared.summary, picture)
    console.print(
        f"Prepared data in {prepared.folder}, lengths in {picture}", highlight=False, markup=False, soft_wrap=True
    )


def bars(histogram: dict[str, list], width: int = 50) -> Iterator[str]:
    """A histogram in text.

    >>> list(bars({"counts": [1, 2], "edges": [1, 10, 100]}, width=4))
    ['     1 –      9  ██ 1', '    10 –     99  ████ 2']
    """
    highest, begun = max(1, *histogram["counts"]), False
    for count, low, high in zip(histogram["counts"], histogram["edges"], histogram["edges"][1:], strict=False):
        begun = begun or count > 0
        if begun:
            yield f"{low:6,.0f} – {high - 1:6,.0f}  {'█' * math.ceil(width * count / highest)} {count:,}"
