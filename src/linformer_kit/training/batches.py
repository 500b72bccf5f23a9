"""Batches: masking, padding and the order of the examples.

Random choices depend on (seed, epoch, index of the example) alone, not on earlier examples or on the process.
A resumed run therefore sees the same batches, and two processes see the batches of one.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .config import RunConfig
from .data import read_stream
from .encoding import pad_rows

# label of tokens without a loss
IGNORE_INDEX = -100
Example = dict[str, Any]
Transform = Callable[[Example, np.random.Generator], Example]


class Examples(torch.utils.data.Dataset):
    """Rows of prepared data; the transform of the task is applied anew in each epoch."""

    def __init__(self, rows: datasets.Dataset, transform: Transform, seed: int):
        self.rows, self.transform, self.seed, self.epoch = rows.with_format("numpy"), transform, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per example, by which examples are grouped into batches."""
        return row_lengths(self.rows)

    def __getitem__(self, index: int) -> Example:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Example]:
        """A batch of examples; `DataLoader` calls this if it exists."""
        rows = self.rows[indices]
        examples = [{name: rows[name][place] for name in rows} for place in range(len(indices))]
        return [
            self.transform(example, np.random.default_rng((self.seed, self.epoch, index)))
            for example, index in zip(examples, indices, strict=True)
        ]


def row_lengths(rows: datasets.Dataset) -> np.ndarray:
    """Tokens per row, source and target together; 0 for packed rows, which have no length column."""
    names = [name for name in ("length", "target_length") if name in rows.column_names]
    return sum((np.asarray(rows[name][:]) for name in names), np.zeros(len(rows), np.int64))


class Stream(torch.utils.data.IterableDataset):
    """Examples read during training, in endless passes of unknown length."""

    def __init__(self, rows: datasets.IterableDataset, transform: Transform, seed: int):
        self.rows, self.transform, self.seed = rows, transform, seed

    def set_epoch(self, epoch: int) -> None:
        """Ignored: the stream counts its own passes."""

    def __iter__(self) -> Iterator[Example]:
        for epoch in itertools.count():
            self.rows.set_epoch(epoch)  # changes the order
            for index, row in enumerate(read_stream(self.rows)):
                example = {name: np.asarray(value) for name, value in row.items()}
                yield self.transform(example, np.random.default_rng((self.seed, epoch, index)))


class LengthGroupedSampler(torch.utils.data.Sampler):
    """A random order, new in each epoch, in which a batch has examples of similar length.

    There are full batches only. Examples left over in one epoch can occur in the next.
    """

    def __init__(self, examples: Examples, batch_size: int):
        self.examples, self.lengths, self.batch_size = examples, examples.lengths, batch_size

    def __len__(self) -> int:
        return len(self.lengths) // self.batch_size * self.batch_size

    def __iter__(self) -> Iterator[int]:
        generator = np.random.default_rng((self.examples.seed, self.examples.epoch))
        order = generator.permutation(len(self.lengths))[: len(self)]
        # sorting only 50 batches at a time keeps the order random
        for start in range(0, len(order), 50 * self.batch_size):
            piece = order[start : start + 50 * self.batch_size]
            order[start : start + len(piece)] = piece[np.argsort(-self.lengths[piece], kind="stable")]
        for batch in generator.permutation(order.reshape(-1, self.batch_size)):
            yield from batch.tolist()


# transforms of the tasks


def task_transform(config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> Transform:
    """The function that turns a row into inputs and labels."""
    data = config.data
    special = np.array(sorted(tokenizer.all_special_ids))
    if config.task == "masked-lm":
        return lambda example, generator: mask_tokens(
            example["input_ids"], generator, data.mask_share, tokenizer.mask_token_id, len(tokenizer), special
        )
    if config.task == "denoising":
        return lambda example, generator: {
            "input_ids": mask_spans(
                example["input_ids"], generator, data.mask_share, data.span_length, tokenizer.mask_token_id, special
            ),
            "labels": example["input_ids"],
        }
    if config.task == "causal-lm":
        return lambda example, _: {"input_ids": example["input_ids"], "labels": example["input_ids"]}
    inputs = ("input_ids", "token_type_ids", "labels")
    return lambda example, _: {name: value for name, value in example.items() if name in inputs}


def mask_tokens(
    ids: np.ndarray, generator: np.random.Generator, share: float, mask: int, vocabulary: int, special: np.ndarray
) -> Example:
    """BERT's rule: of the chosen tokens, 80% become the mask, 10% a random token, 10% stay. Never special tokens."""
    chosen = (generator.random(len(ids)) < share) & ~np.isin(ids, special)
    if not chosen.any() and (candidates := np.flatnonzero(~np.isin(ids, special))).size:
        chosen[generator.choice(candidates)] = True  # every text has at least one
    fate = generator.random(len(ids))
    inputs = np.where(chosen & (fate < 0.8), mask, ids)
    inputs = np.where(chosen & (fate >= 0.8) & (fate < 0.9), generator.integers(0, vocabulary, len(ids)), inputs)
    return {"input_ids": inputs, "labels": np.where(chosen, ids, IGNORE_INDEX)}


def mask_spans(
    ids: np.ndarray, generator: np.random.Generator, share: float, mean_length: float, mask: int, special: np.ndarray
) -> np.ndarray:
    """BART's rule: each span becomes one mask; spans cover `share` of the tokens. Never special tokens."""
    hidden = np.zeros(len(ids), bool)
    wanted = max(1, round(share * len(ids)))
    for _ in range(10 * wanted):  # spans that overlap others or special tokens are rejected
        if hidden.sum() >= wanted:
            break
        length = min(max(1, generator.poisson(mean_length)), wanted - int(hidden.sum()))
        start = generator.integers(0, max(1, len(ids) - length + 1))
        span = slice(start, start + length)
        if not hidden[span].any() and not np.isin(ids[span], special).any():
            hidden[span] = True
    begins = hidden & ~np.concatenate([[False], hidden[:-1]])
    return np.where(begins, mask, ids)[begins | ~hidden]


# padding


class PaddingCollator:
    """Collates examples into tensors, padded to the longest example.

    A batch without padding has no mask: attention is faster without it.
    """

    def __init__(self, pad: int):
        self.pad = pad

    def __call__(self, examples: list[Example]) -> dict[str, Tensor]:
        batch = {"input_ids": pad_rows([example["input_ids"] for example in examples], self.pad)}
        lengths = torch.tensor([len(example["input_ids"]) for example in examples])
        if (lengths < lengths.max()).any():
            batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        if "token_type_ids" in examples[0]:
            batch["token_type_ids"] = pad_rows([example["token_type_ids"] for example in examples], 0)
        if "labels" in examples[0]:
            labels = [example["labels"] for example in examples]
            batch["labels"] = pad_rows(labels, IGNORE_INDEX) if np.ndim(labels[0]) else torch.tensor(np.asarray(labels))
        return batch
