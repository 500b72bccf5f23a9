"""Preparing: raw rows become tokens on disk, once for all runs that share data, tokenizer and length.

A prepared folder holds `tokenizer/`, one folder per split (Arrow, memory-mapped when read) and `summary.json`. It is built
under a temporary name and renamed when it is whole.
"""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter
from rich.console import Console
from rich.table import Column, Table
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from . import listops
from .config import RunConfig
from .curves import draw_lengths
from .data import Rows, all_texts, column, find_sources, is_language_model, read_splits, texts, wanted_columns
from .errors import UserError
from .tokenizer import load_tokenizer, train_tokenizer

# raise it when what is written changes, so that nobody reads what an older version has prepared
FORMAT = 1
TOKENS = datasets.List(datasets.Value("int32"))
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
        """What must not change while a run is trained: how many texts of which lengths, the tokens, the labels."""
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
        role: datasets.load_from_disk(str(folder / role)) for role in ("train", "validation", "test") if (folder / role).is_dir()
    }
    if config.data.streaming:
        splits["train"] = stream(config, tokenizer, read_splits(config)["train"])
    return Prepared(folder, tokenizer, splits, summary)


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name once everything in it is written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise UserError(f"{folder.parent} cannot be written ({error.strerror}); set data.cache to a folder that can") from None
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
    for name in ("workers", "cache", "mask_share", "span_length", "shuffle_buffer"):  # of no consequence for what is written
        del data[name]
    sources = find_sources(config.data, config.task)
    if sources is not None:
        del data["path"]  # its files count
    files = [(split, *identity(path)) for split, found in (sources or {}).items() for each in found for path in each.files]
    loaded = config.tokenizer.from_ or config.model.get("from")
    if loaded is not None:
        files += [
            ("tokenizer", *identity(path)) for end in ("json", "txt", "model") for path in sorted(Path(loaded).glob(f"*.{end}"))
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


def identity(path: Path) -> tuple[str, int, int]:
    """What changes when a file does."""
    return str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns


def max_length(config: RunConfig) -> int:
    """The longest input, in tokens."""
    from ..models.configuration_linformer import LinformerConfig

    if "from" in config.model:
        return LinformerConfig.from_pretrained(checked_start(config)).max_position_embeddings
    return config.model.get("max_position_embeddings", LinformerConfig.max_position_embeddings)


def checked_start(config: RunConfig) -> str:
    """The folder of the model a run starts from."""
    source = config.model["from"]
    try:
        kind = json.loads(Path(source, "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        raise UserError(
            f"model.from is {source!r}: there is no config.json; give the folder model/ of a run, or another saved model"
        ) from None
    if kind != "linformer":
        raise UserError(f"model.from is {source!r}, a model of the type {kind!r}; give the folder model/ of a run of linformer-kit")
    return source


# building


def build(config: RunConfig, folder: Path, console: Console) -> None:
    """Write tokenizer, splits and summary."""
    console.print("Reading the data …", markup=False)
    splits = read_splits(config)
    labels = label_names(splits["train"], config) if config.task == "classification" else []
    tokenizer = make_tokenizer(config, splits["train"], console)
    if config.data.columns.pair:  # whoever loads it later shall tell the two texts apart without asking
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names  # what is saved
    tokenizer.save_pretrained(folder / "tokenizer")
    summary: dict[str, Any] = {"labels": labels, "tokenizer_size": len(tokenizer), "length": max_length(config), "splits": {}}
    for role, rows in splits.items():
        if isinstance(rows, datasets.IterableDataset):
            if role == "train":
                continue  # is read while training
            rows = datasets.Dataset.from_list(list(rows))
        if role == "test" and config.task == "classification" and has_no_labels(rows, config):
            console.print("The test split has no labels; it is left out.", markup=False)
            continue
        console.print(f"Tokenizing {role}: {len(rows):,} rows …", markup=False)
        tokens = tokenize(rows, config, tokenizer, labels, role)
        summary["splits"][role] = counted(tokens, max_length(config))
        if is_language_model(config.task):
            tokens = packed(tokens, max_length(config), folder / f"{role}.arrow")
        if len(tokens) == 0:
            raise UserError(f"the {role} split has no text at all")
        tokens.save_to_disk(str(folder / role))
        (folder / f"{role}.arrow").unlink(missing_ok=True)
        summary["splits"][role]["examples"] = len(tokens)
    (folder / "summary.json").write_text(json.dumps(summary))


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


def tokenize(rows: datasets.Dataset, config: RunConfig, tokenizer: PreTrainedTokenizerFast, labels: list[str], role: str) -> Any:
    """Rows of tokens: `input_ids`, `length` before anything was cut, and what the task needs beside."""
    numbers = {name: number for number, name in enumerate(labels)}
    columns: dict[str, Any] = {"input_ids": TOKENS, "length": datasets.Value("int64")}
    if config.task == "classification":
        columns |= {"labels": datasets.Value("int64"), **({"token_type_ids": TOKENS} if config.data.columns.pair else {})}
    if config.task == "translation":
        columns |= {"labels": TOKENS, "target_length": datasets.Value("int64")}
        if role != "train":  # for BLEU, which is of texts
            columns |= {"source": datasets.Value("string"), "target": datasets.Value("string")}
    return rows.map(
        lambda batch: tokenized_batch(batch, config, tokenizer, numbers, role, class_names(rows, config)),
        batched=True,
        batch_size=200,
        remove_columns=rows.column_names,
        features=datasets.Features(columns),
        num_proc=config.data.workers if config.data.workers > 1 else None,
        # our own folder is the cache; hashing a tokenizer is slow and says little
        new_fingerprint=os.urandom(8).hex(),
        desc=f"tokenizing {role}",
    )


def tokenized_batch(
    batch: dict[str, list],
    config: RunConfig,
    tokenizer: PreTrainedTokenizerFast,
    numbers: dict[str, int],
    role: str,
    names: list[str] | None = None,
) -> dict[str, list]:
    """A batch of rows as tokens; `numbers` are those of the labels, `names` what the data calls its numbers."""
    columns, longest = config.data.columns, max_length(config)
    if config.task == "classification":
        found = labels_of(batch, columns.label, names)
        for name in found:
            if name not in numbers:
                raise UserError(
                    f"the {role} split has the label {name!r}, which the training split does not have; it has {', '.join(numbers)}"
                )
        pairs = texts(batch, columns.pair) if columns.pair else None
        encoded = classified_texts(tokenizer, texts(batch, columns.text), pairs, longest)
        return {**encoded, "labels": [numbers[name] for name in found]}
    if config.task == "translation":
        source, lengths = ended(tokenizer, texts(batch, columns.source), longest)
        target, target_lengths = ended(tokenizer, texts(batch, columns.target), longest)
        rows: dict[str, list] = {"input_ids": source, "length": lengths, "labels": target, "target_length": target_lengths}
        kept = {"source": texts(batch, columns.source), "target": texts(batch, columns.target)}
        return rows if role == "train" else {**rows, **kept}
    ids, lengths = ended(tokenizer, [text for text in texts(batch, columns.text) if text.strip()], None)
    return {"input_ids": ids, "length": lengths}


def classified_texts(
    tokenizer: PreTrainedTokenizerFast, first: list[str], pairs: list[str] | None, longest: int
) -> dict[str, list]:
    """Texts, or pairs of them, between the tokenizer's special tokens, cut to `longest`."""
    parts = [
        classified_few(tokenizer, first[rows], None if pairs is None else pairs[rows], longest) for rows in few_at_a_time(first)
    ]
    return {name: [row for part in parts for row in part[name]] for name in parts[0]}


def classified_few(tokenizer: PreTrainedTokenizerFast, first: list[str], pairs: list[str] | None, longest: int) -> dict[str, list]:
    """The same of texts that are not too many."""
    wanted = {"return_attention_mask": False, "return_token_type_ids": pairs is not None, "verbose": False}
    encoded = dict(tokenizer(first, pairs, **wanted))
    encoded["length"] = [len(ids) for ids in encoded["input_ids"]]
    for row in (row for row, length in enumerate(encoded["length"]) if length > longest):
        # of a pair, the longer text gives way first; in lists, since an empty second text alone would count as none
        cut = tokenizer([first[row]], None if pairs is None else [pairs[row]], truncation=True, max_length=longest, **wanted)
        for name, values in cut.items():
            encoded[name][row] = values[0]
    return encoded


def ended(tokenizer: PreTrainedTokenizerFast, lines: list[str], longest: int | None) -> tuple[list[list[int]], list[int]]:
    """Texts as tokens with an end behind each, cut to `longest`; and their lengths before that."""
    end = end_token(tokenizer)
    tokens, lengths = [], []
    for rows in few_at_a_time(lines):
        for ids in tokenizer(lines[rows], add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]:
            tokens.append([*(ids if longest is None else ids[: longest - 1]), end])
            lengths.append(len(ids) + 1)
    return tokens, lengths


def few_at_a_time(lines: list[str], characters: int = 1_000_000) -> Iterator[slice]:
    """Rows of together about so many characters: a tokenizer needs a hundred times the memory of its texts.

    >>> list(few_at_a_time(["aaa", "a", "a", "aaaaa"], characters=3))
    [slice(0, 1, None), slice(1, 3, None), slice(3, 4, None)]
    """
    start, taken = 0, 0
    for row, line in enumerate(lines):
        if row > start and taken + len(line) > characters:
            yield slice(start, row)
            start, taken = row, 0
        taken += len(line)
    if lines:
        yield slice(start, len(lines))


def end_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token that ends a text."""
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id


def packed(tokens: datasets.Dataset, length: int, path: Path) -> datasets.Dataset:
    """Running text, cut into pieces of `length` tokens with nothing lost between them; the last piece may be shorter."""
    with ArrowWriter(path=str(path), features=datasets.Features({"input_ids": TOKENS})) as writer:
        for block in blocks((array_of(batch) for batch in tokens.with_format("arrow").iter(1000)), length):
            writer.write_table(block)
        writer.finalize()
    return datasets.Dataset.from_file(str(path))


def array_of(batch: pa.Table) -> np.ndarray:
    """The tokens of many rows, one after the other."""
    return batch.column("input_ids").combine_chunks().flatten().to_numpy(zero_copy_only=False)


def blocks(arrays: Iterator[np.ndarray], length: int) -> Iterator[pa.Table]:
    """Tables of rows of `length` tokens."""
    rest = np.zeros(0, np.int32)
    for array in arrays:
        rest = np.concatenate([rest, array])
        whole = len(rest) // length * length
        if whole:
            yield table_of_rows(rest[:whole], np.arange(0, whole + 1, length))
            rest = rest[whole:]
    if len(rest) > 1:  # a single token has nothing to be guessed from
        yield table_of_rows(rest, np.array([0, len(rest)]))


def table_of_rows(tokens: np.ndarray, bounds: np.ndarray) -> pa.Table:
    return pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), pa.array(tokens, pa.int32()))})


def stream(config: RunConfig, tokenizer: PreTrainedTokenizerFast, rows: datasets.IterableDataset) -> datasets.IterableDataset:
    """Rows that are read, tokenized and, for running text, packed as training asks for them."""
    names, longest = rows.column_names, max_length(config)
    rows = rows.map(
        lambda batch: tokenized_batch(batch, config, tokenizer, {}, "train"), batched=True, batch_size=1000, remove_columns=names
    )
    if is_language_model(config.task):
        rows = rows.map(lambda batch: packed_batch(batch, longest), batched=True, batch_size=1000, remove_columns=["length"])
    if next(iter(rows), None) is None:
        raise UserError(
            "the stream ends before the first training example; give more text, or hold out less with data.streaming_validation, "
            f"now {config.data.streaming_validation}"
        )
    return rows.shuffle(seed=config.seed, buffer_size=config.data.shuffle_buffer)


def packed_batch(batch: dict[str, list], length: int) -> dict[str, list]:
    """A thousand texts as pieces of `length` tokens; their last, shorter piece is left out, as the stream has more."""
    tables = blocks((np.asarray(ids, np.int32) for ids in batch["input_ids"]), length)
    return {"input_ids": [row for table in tables for row in table.column("input_ids").to_pylist() if len(row) == length]}


# labels and counts


def class_names(rows: Rows, config: RunConfig) -> list[str] | None:
    """What the data set itself calls its classes, if they are stored as numbers."""
    feature = (rows.features or {}).get(config.data.columns.label)
    return feature.names if isinstance(feature, datasets.ClassLabel) else None


def labels_of(batch: dict[str, list], name: str, names: list[str] | None) -> list[str]:
    """Labels as texts."""
    if names is None:
        if "" in (labels := texts(batch, name)):
            raise UserError(f"the column {name!r} has rows without a label ({labels.count('')} among {len(labels)}); remove them")
        return labels
    numbers = column(batch, name)
    if missing := sum(number is None or number < 0 for number in numbers):
        raise UserError(
            f"the column {name!r} has rows without a label ({missing} among {len(numbers)}, -1 or nothing); remove them"
        )
    return [names[number] for number in numbers]


def label_names(rows: Rows, config: RunConfig) -> list[str]:
    """The classes of the training split, numbers in the order of numbers."""
    name, names = config.data.columns.label, class_names(rows, config)
    found = {label for batch in rows.select_columns(name.split(".")[0]).iter(10_000) for label in labels_of(batch, name, names)}
    if len(found) < 2:
        raise UserError(
            f"the training split has only one label, {', '.join(map(repr, found))}, in the column {name!r}: "
            "there is nothing to tell apart"
        )
    if len(found) > 1000:
        raise UserError(f"the column {name!r} has {len(found):,} different values; is it the label? Set data.columns.label")
    return sorted(found, key=lambda label: (0, int(label), label) if re.fullmatch(r"-?\d+", label) else (1, 0, label))


def has_no_labels(rows: datasets.Dataset, config: RunConfig) -> bool:
    """Whether all labels are -1, as in test splits whose answers are kept secret."""
    return set(rows.unique(config.data.columns.label)) == {-1} if config.data.columns.label in rows.column_names else False


def counted(tokens: datasets.Dataset, longest: int) -> dict[str, Any]:
    """How long the texts of a split are, and how much of them had to be cut."""
    result: dict[str, Any] = {}
    for name in ("length", "target_length"):
        if name not in tokens.column_names:
            continue
        lengths = np.asarray(tokens[name][:])
        over = lengths[lengths > longest]
        counts, edges = np.histogram(lengths, bins=np.unique(np.geomspace(1, max(2, lengths.max(initial=1) + 1), 24).round()))
        result[name] = {
            "texts": len(lengths),
            "tokens": int(lengths.sum()),
            "mean": float(lengths.mean()) if len(lengths) else 0.0,
            "longest": int(lengths.max(initial=0)),
            "cut_texts": len(over),
            "cut_tokens": int((over - longest).sum()),
            "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
        }
    return result


# showing


def show(config: RunConfig, console: Console | None = None) -> None:
    """Prepare, and tell what there is: examples, tokens, lengths, what was cut; a picture of the lengths beside."""
    console = console or Console()
    prepared = prepare(config, console)
    table = Table("split", *(Column(name, justify="right") for name in ("texts", "examples", "tokens", "mean", "longest", "cut")))
    for role, split in prepared.summary["splits"].items():
        for name in ("length", "target_length"):
            if name in split:
                counts = split[name]
                numbers = (counts["texts"], split["examples"], counts["tokens"], round(counts["mean"]), counts["longest"])
                cut = "packed" if is_language_model(config.task) else f"{counts['cut_texts']:,}"
                table.add_row(role if name == "length" else "  target", *(f"{number:,}" for number in numbers), cut)
    console.print(table)
    first = prepared.summary["splits"].get("train") or prepared.summary["splits"]["validation"]
    console.print("Tokens per text", highlight=False)
    for line in bars(first["length"]["histogram"]):
        console.print(line, highlight=False, markup=False)
    picture = prepared.folder / "lengths.png"
    draw_lengths(prepared.summary, picture)
    console.print(f"Prepared data in {prepared.folder}, lengths in {picture}", highlight=False, markup=False, soft_wrap=True)


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
