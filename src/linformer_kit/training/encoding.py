"""Encodes texts as rows of tokens, and pads rows to tensors; imports nothing that only training needs."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .tokenizer import end_token


def classified_texts(
    tokenizer: PreTrainedTokenizerFast, first: list[str], pairs: list[str] | None, longest: int
) -> dict[str, list]:
    """Tokenize texts or pairs with the special tokens of the tokenizer, truncated to `longest` tokens."""
    parts = [
        classified_batch(tokenizer, first[rows], None if pairs is None else pairs[rows], longest)
        for rows in text_batches(first)
    ]
    return {name: [row for part in parts for row in part[name]] for name in parts[0]}


def classified_batch(
    tokenizer: PreTrainedTokenizerFast, first: list[str], pairs: list[str] | None, longest: int
) -> dict[str, list]:
    """`classified_texts` for one batch."""
    options = {"return_attention_mask": False, "return_token_type_ids": pairs is not None, "verbose": False}
    encoded = dict(tokenizer(first, pairs, **options))
    encoded["length"] = [len(ids) for ids in encoded["input_ids"]]
    for row in (row for row, length in enumerate(encoded["length"]) if length > longest):
        # truncates the longer text of a pair first; as lists, because a single empty second text would be ignored
        truncated = tokenizer(
            [first[row]], None if pairs is None else [pairs[row]], truncation=True, max_length=longest, **options
        )
        for name, values in truncated.items():
            encoded[name][row] = values[0]
    return encoded


def tokenize_with_end(
    tokenizer: PreTrainedTokenizerFast, lines: list[str], longest: int | None
) -> tuple[list[list[int]], list[int]]:
    """(ids, lengths before truncation) of texts with an end token each, truncated to `longest` tokens."""
    end = end_token(tokenizer)
    tokens, lengths = [], []
    for rows in text_batches(lines):
        for ids in tokenizer(lines[rows], add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]:
            tokens.append([*(ids if longest is None else ids[: longest - 1]), end])
            lengths.append(len(ids) + 1)
    return tokens, lengths


def text_batches(lines: list[str], characters: int = 1_000_000) -> Iterator[slice]:
    """Slices of at most about so many characters: a tokenizer needs a hundred times the memory of its texts.

    >>> list(text_batches(["aaa", "a", "a", "aaaaa"], characters=3))
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


def pad_rows(rows: Sequence[Any], fill: int) -> Tensor:
    """Rows of different lengths as one tensor, padded with `fill`."""
    result = np.full((len(rows), max(map(len, rows))), fill, np.int64)
    for place, row in enumerate(rows):
        result[place, : len(row)] = row
    return torch.from_numpy(result)
