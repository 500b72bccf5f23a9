"""Tokenizes data and stores it on disk, once for all runs with the same data, tokenizer and length.

A prepared directory contains `tokenizer/`, one directory per split (memory-mapped Arrow) and `summary.json`.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import datasets
from rich.console import Console
from rich.table import Column, Table
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..errors import UserError
from ..files import atomic_directory, check_writable
from ..plots.curves import draw_lengths
from . import file_kinds, listops
from .batches import row_lengths
from .config import RunConfig
from .data import Rows, is_language_model, iterate_texts, read_splits, read_stream, required_columns
from .labels import has_no_labels, label_names
from .model import max_length
from .sources import describe_sources, find_sources
from .tokenizer import load_tokenizer, train_tokenizer
from .tokens import digest, format_names, length_statistics, pack, stream, tokenize

# increase when the prepared data changes
FORMAT = 3
# number of texts of a stream that a tokenizer is trained on
TOKENIZER_EXAMPLES = 200_000
# values of `data.generated`: modules with a VERSION and a function `write`
GENERATORS: dict[str, Any] = {"file_kinds": file_kinds, "listops": listops}


@dataclass(frozen=True)
class Prepared:
    """Tokenized splits; when streaming, the training split is read during training."""

    folder: Path
    tokenizer: PreTrainedTokenizerFast
    splits: dict[str, Rows]
    summary: dict[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        """What must not change during a run: tokens, labels and vocabulary."""
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return {**self.summary, "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest()}

    @property
    def labels(self) -> list[str]:
        """The labels; empty unless the task is classification."""
        return self.summary["labels"]


def prepare(config: RunConfig, console: Console) -> Prepared:
    """Train or load the tokenizer and tokenize every split, or open the data prepared before."""
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar

    if config.data.generated:
        config = with_generated_data(config, console)
    folder = Path(config.data.cache).expanduser() / "prepared" / fingerprint(config)
    (enable_progress_bar if console.is_terminal else disable_progress_bar)()
    if (folder / "summary.json").is_file():
        console.print(f"Prepared data found in {folder}", markup=False, highlight=False, soft_wrap=True)
    else:
        with cache_directory(folder) as unfinished:
            build(config, unfinished, console)
    return open_prepared(config, folder)


def open_prepared(config: RunConfig, folder: Path) -> Prepared:
    """Open what `build` has written."""
    summary = json.loads((folder / "summary.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
    splits: dict[str, Rows] = {
        role: datasets.load_from_disk(str(folder / role))
        for role in ("train", "validation", "test")
        if (folder / role).is_dir()
    }
    if config.data.streaming:
        splits["train"] = stream(config, tokenizer, read_splits(config)["train"])
    return Prepared(folder, tokenizer, splits, summary)


def cache_directory(folder: Path) -> AbstractContextManager[Path]:
    """A new directory in the cache; several processes may build the same one."""
    check_writable(folder.parent, "set data.cache to another directory")
    return atomic_directory(folder, keep_existing=True)


def with_generated_data(config: RunConfig, console: Console) -> RunConfig:
    """The configuration with the path of generated data, which is generated once."""
    name = config.data.generated
    assert name is not None
    folder = Path(config.data.cache).expanduser() / f"{name}-{GENERATORS[name].VERSION}"
    if not folder.exists():
        console.print(f"Generating {name} …", markup=False)
        with cache_directory(folder) as unfinished:
            GENERATORS[name].write(unfinished)
    return replace(config, data=replace(config.data, path=str(folder), generated=None))


def fingerprint(config: RunConfig) -> str:
    """A hash of data, tokenizer, kind of task and length; files are identified by name, size and time."""
    data = asdict(config.data)
    for name in ("workers", "cache", "mask_share", "span_length", "shuffle_buffer"):  # do not affect the result
        del data[name]
    sources = find_sources(config.data, config.task)
    if sources is not None:
        del data["path"]  # the files are hashed instead
    files = [
        (split, *file_identity(path))
        for split, found in (sources or {}).items()
        for each in found
        for path in each.files
    ]
    loaded = config.tokenizer.from_ or config.model.get("from")
    if loaded is not None:
        files += [
            ("tokenizer", *file_identity(path))
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


def file_identity(path: Path) -> tuple[str, int, int]:
    """Path, size and time of modification."""
    return str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns


# building


def build(config: RunConfig, folder: Path, console: Console) -> None:
    """Write the tokenizer, the splits and the summary."""
    console.print(f"Reading the data … {describe_sources(config)}", markup=False, highlight=False, soft_wrap=True)
    splits = read_splits(config)
    labels = label_names(splits["train"], config) if config.task == "classification" else []
    tokenizer = make_tokenizer(config, splits["train"], console)
    if config.data.columns.pair:  # the saved tokenizer returns token types by default
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names  # saved with the tokenizer
    tokenizer.save_pretrained(folder / "tokenizer")
    summary: dict[str, Any] = {
        "labels": labels,
        "tokenizer_size": len(tokenizer),
        "length": max_length(config),
        "splits": {},
    }
    if config.data.streaming:  # streamed data is identified by its files
        summary["streamed"] = [(path.name, path.stat().st_size) for path in files_of(config)]
    for role, rows in splits.items():
        if isinstance(rows, datasets.IterableDataset):
            if role == "train":
                continue  # read during training
            rows = datasets.Dataset.from_list(list(read_stream(rows)))
        if role == "test" and config.task == "classification" and has_no_labels(rows, config):
            console.print("The test split has no labels and is skipped.", markup=False)
            continue
        console.print(f"Tokenizing {role}: {len(rows):,} rows …", markup=False)
        tokens = tokenize(rows, config, tokenizer, labels, role)
        for warning in split_warnings(config, rows, tokens, tokenizer):
            console.print(warning, style="yellow", markup=False)
        summary["splits"][role] = length_statistics(tokens, max_length(config))
        if is_language_model(config.task):
            tokens = pack(tokens, max_length(config), folder / f"{role}.arrow")
        if len(tokens) == 0:
            raise UserError(f"the {role} split contains no text")
        tokens.save_to_disk(str(folder / role))
        (folder / f"{role}.arrow").unlink(missing_ok=True)
        summary["splits"][role] |= {"examples": len(tokens), "digest": digest(tokens)}
    (folder / "summary.json").write_text(json.dumps(summary))


def split_warnings(config: RunConfig, rows: Any, tokens: Any, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """Warnings about empty rows of a split."""
    if config.task == "translation" and len(tokens) < len(rows):
        yield f"{len(rows) - len(tokens):,} pairs with an empty text are skipped."
    if config.task == "classification":
        empty = int((row_lengths(tokens) <= tokenizer.num_special_tokens_to_add()).sum())
        if empty:
            yield f"{empty:,} of the texts are empty."


def make_tokenizer(config: RunConfig, rows: Rows, console: Console) -> PreTrainedTokenizerFast:
    """Train a tokenizer on the training split, or load one."""
    settings = config.tokenizer
    if settings.from_ is not None:
        return load_tokenizer(settings.from_)
    if "from" in config.model:  # a saved model needs its own tokenizer
        return load_tokenizer(config.model["from"], "model.from")
    if settings.kind != "bytes":
        console.print(f"Training a tokenizer ({settings.kind}, {settings.vocab_size:,} tokens) …", markup=False)
    if isinstance(rows, datasets.IterableDataset):
        rows = rows.take(TOKENIZER_EXAMPLES)
    names = [name for key, name in required_columns(config).items() if key != "data.columns.label"]
    return train_tokenizer(settings, iterate_texts(rows, names))


# summary


def show(config: RunConfig, console: Console | None = None) -> None:
    """Prepare the data; print examples, tokens, lengths and truncated texts; plot the lengths."""
    console = console or Console()
    prepared = prepare(config, console)
    columns = ("texts", "examples", "tokens", "mean", "longest", "truncated")
    table = Table("split", *(Column(name, justify="right") for name in columns))
    for role, split in prepared.summary["splits"].items():
        for name in ("length", "target_length"):
            if name in split:
                counts = split[name]
                mean = round(counts["mean"])
                numbers = (counts["texts"], split["examples"], counts["tokens"], mean, counts["longest"])
                truncated = "packed" if is_language_model(config.task) else f"{counts['cut_texts']:,}"
                table.add_row(
                    role if name == "length" else "  target", *(f"{number:,}" for number in numbers), truncated
                )
    console.print(table)
    if prepared.labels:
        console.print(f"Labels: {format_names(prepared.labels)}", highlight=False, markup=False, soft_wrap=True)
    first = prepared.summary["splits"].get("train") or prepared.summary["splits"]["validation"]
    console.print("Tokens per text", highlight=False)
    for line in histogram_lines(first["length"]["histogram"]):
        console.print(line, highlight=False, markup=False)
    picture = prepared.folder / "lengths.png"
    draw_lengths(prepared.summary, picture)
    console.print(
        f"Prepared data in {prepared.folder}, lengths in {picture}", highlight=False, markup=False, soft_wrap=True
    )


def histogram_lines(histogram: dict[str, list], width: int = 50) -> Iterator[str]:
    """A histogram as lines of text.

    >>> list(histogram_lines({"counts": [1, 2], "edges": [1, 10, 100]}, width=4))
    ['     1 –      9  ██ 1', '    10 –     99  ████ 2']
    """
    highest, started = max(1, *histogram["counts"]), False
    for count, low, high in zip(histogram["counts"], histogram["edges"], histogram["edges"][1:], strict=False):
        started = started or count > 0
        if started:
            yield f"{low:6,.0f} – {high - 1:6,.0f}  {'█' * math.ceil(width * count / highest)} {count:,}"
