"""Tokenizes rows of text: texts truncated to the maximum length, or running text packed into blocks."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedTokenizerFast

from ..errors import UserError
from .config import RunConfig
from .data import is_language_model, read_stream, texts
from .encoding import classified_texts, tokenize_with_end
from .labels import class_names, labels_of
from .model import max_length

TOKENS = datasets.List(datasets.Value("int32"))


def tokenize(
    rows: datasets.Dataset, config: RunConfig, tokenizer: PreTrainedTokenizerFast, labels: list[str], role: str
) -> Any:
    """Tokenize a split: `input_ids`, `length` before truncation, and the columns that the task needs."""
    numbers = {name: number for number, name in enumerate(labels)}
    columns: dict[str, Any] = {"input_ids": TOKENS, "length": datasets.Value("int64")}
    if config.task == "classification":
        columns |= {
            "labels": datasets.Value("int64"),
            **({"token_type_ids": TOKENS} if config.data.columns.pair else {}),
        }
    if config.task == "translation":
        columns |= {"labels": TOKENS, "target_length": datasets.Value("int64")}
        if role != "train":  # texts, for BLEU
            columns |= {"source": datasets.Value("string"), "target": datasets.Value("string")}
    return rows.map(
        lambda batch: tokenized_batch(batch, config, tokenizer, numbers, role, class_names(rows, config)),
        batched=True,
        batch_size=200,
        remove_columns=rows.column_names,
        features=datasets.Features(columns),
        num_proc=config.data.workers if config.data.workers > 1 else None,
        # the result is cached by `prepare`; hashing a tokenizer is slow
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
    """Tokenize a batch; `numbers` maps labels to indices, `names` are the class names in the data."""
    columns, longest = config.data.columns, max_length(config)
    if config.task == "classification":
        found = labels_of(batch, columns.label, names)
        for name in found:
            if name not in numbers:
                raise UserError(
                    f"the {role} split has the label {name!r}, which the training split does not have; "
                    f"known labels: {format_names(numbers)}"
                )
        pairs = texts(batch, columns.pair) if columns.pair else None
        encoded = classified_texts(tokenizer, texts(batch, columns.text), pairs, longest)
        return {**encoded, "labels": [numbers[name] for name in found]}
    if config.task == "translation":
        translated = list(zip(texts(batch, columns.source), texts(batch, columns.target), strict=True))
        if role == "train":  # skip pairs with an empty text
            translated = [both for both in translated if all(text.strip() for text in both)]
        sources, targets = [source for source, _ in translated], [target for _, target in translated]
        input_ids, lengths = tokenize_with_end(tokenizer, sources, longest)
        labels, target_lengths = tokenize_with_end(tokenizer, targets, longest)
        rows: dict[str, list] = {
            "input_ids": input_ids,
            "length": lengths,
            "labels": labels,
            "target_length": target_lengths,
        }
        return rows if role == "train" else {**rows, "source": sources, "target": targets}
    lines = [text for text in texts(batch, columns.text) if text.strip()]
    ids, lengths = tokenize_with_end(tokenizer, lines, None)
    return {"input_ids": ids, "length": lengths}


def format_names(names: Iterable[str], limit: int = 10) -> str:
    """The first names and the number of the others.

    >>> format_names("abc"), format_names("abc", limit=2)
    ('a, b, c', 'a, b and 1 more')
    """
    first, more = list(names)[:limit], len(list(names)) - limit
    return ", ".join(first) + (f" and {more:,} more" if more > 0 else "")


def length_statistics(tokens: datasets.Dataset, longest: int) -> dict[str, Any]:
    """Lengths of the texts of a split, and how much of them was truncated."""
    result: dict[str, Any] = {}
    for name in ("length", "target_length"):
        if name not in tokens.column_names:
            continue
        lengths = np.asarray(tokens[name][:])
        over = lengths[lengths > longest]
        counts, edges = np.histogram(
            lengths, bins=np.unique(np.geomspace(1, max(2, lengths.max(initial=1) + 1), 24).round())
        )
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


def digest(tokens: datasets.Dataset) -> str:
    """A hash of tokens and labels in their order."""
    found = hashlib.sha256()
    names = [name for name in ("input_ids", "token_type_ids", "labels") if name in tokens.column_names]
    for batch in tokens.select_columns(names).with_format("arrow").iter(10_000):
        for values in (batch.column(name).combine_chunks() for name in names):
            if isinstance(values, pa.ListArray):
                found.update(values.value_lengths().to_numpy().tobytes())
                values = values.flatten()
            found.update(values.to_numpy(zero_copy_only=False).tobytes())
    return found.hexdigest()


# running text


def pack(tokens: datasets.Dataset, length: int, path: Path) -> datasets.Dataset:
    """Divide running text into blocks of `length` tokens without gaps; the last block may be shorter."""
    with ArrowWriter(path=str(path), features=datasets.Features({"input_ids": TOKENS})) as writer:
        for block in blocks((array_of(batch) for batch in tokens.with_format("arrow").iter(1000)), length):
            writer.write_table(block)
        writer.finalize()
    return datasets.Dataset.from_file(str(path))


def stream(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast, rows: datasets.IterableDataset
) -> datasets.IterableDataset:
    """Rows that are read, tokenized and, for running text, packed during training."""
    names, longest = rows.column_names, max_length(config)
    rows = rows.map(
        lambda batch: tokenized_batch(batch, config, tokenizer, {}, "train"),
        batched=True,
        batch_size=1000,
        remove_columns=names,
    )
    if is_language_model(config.task):
        rows = rows.map(
            lambda batch: pack_batch(batch, longest), batched=True, batch_size=1000, remove_columns=["length"]
        )
    if next(read_stream(rows), None) is None:
        raise UserError(
            "the stream ends before the first training example; provide more text, or decrease "
            f"data.streaming_validation, now {config.data.streaming_validation}"
        )
    return rows.shuffle(seed=config.seed, buffer_size=config.data.shuffle_buffer)


def pack_batch(batch: dict[str, list], length: int) -> dict[str, list]:
    """Divide a batch of texts into blocks of `length` tokens; the last block may be shorter."""
    tables = blocks((np.asarray(ids, np.int32) for ids in batch["input_ids"]), length)
    return {"input_ids": [row for table in tables for row in table.column("input_ids").to_pylist()]}


def blocks(arrays: Iterator[np.ndarray], length: int) -> Iterator[pa.Table]:
    """Tables with rows of `length` tokens."""
    rest = np.zeros(0, np.int32)
    for array in arrays:
        rest = np.concatenate([rest, array])
        full = len(rest) // length * length
        if full:
            yield table_of_rows(rest[:full], np.arange(0, full + 1, length))
            rest = rest[full:]
    if len(rest) > 1:  # a single token has no context
        yield table_of_rows(rest, np.array([0, len(rest)]))


def array_of(batch: pa.Table) -> np.ndarray:
    """The concatenated tokens of all rows."""
    return batch.column("input_ids").combine_chunks().flatten().to_numpy(zero_copy_only=False)


def table_of_rows(tokens: np.ndarray, bounds: np.ndarray) -> pa.Table:
    return pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), pa.array(tokens, pa.int32()))})
