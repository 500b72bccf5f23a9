"""Batches: what is masked, how examples are padded and in which order they come.

Everything drawn here follows from (seed, epoch, number of the example) alone, never from how many examples were drawn
before or by which process: a run that died goes on with the same batches, and two processes see what one would.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .config import RunConfig
from .data import readable

# labels that are not to be learnt
IGNORED = -100
Example = dict[str, Any]
Change = Callable[[Example, np.random.Generator], Example]


class Examples(torch.utils.data.Dataset):
    """Rows of prepared data, changed afresh in every epoch where the task wants it."""

    def __init__(self, rows: datasets.Dataset, change: Change, seed: int):
        self.rows, self.change, self.seed, self.epoch = rows.with_format("numpy"), change, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each, as far as they matter for sharing a batch."""
        return lengths_of(self.rows)

    def __getitem__(self, index: int) -> Example:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Example]:
        """Many at once, as the loader asks for them."""
        rows = self.rows[indices]
        examples = [{name: rows[name][place] for name in rows} for place in range(len(indices))]
        return [
            self.change(example, np.random.default_rng((self.seed, self.epoch, index)))
            for example, index in zip(examples, indices, strict=True)
        ]


def lengths_of(rows: datasets.Dataset) -> np.ndarray:
    """Tokens per row, of source and target together; packed rows count alike."""
    names = [name for name in ("length", "target_length") if name in rows.column_names]
    return sum((np.asarray(rows[name][:]) for name in names), np.zeros(len(rows), np.int64))


class Stream(torch.utils.data.IterableDataset):
    """The same of rows that are read while training, over and over: how long a pass is, nobody needs to know."""

    def __init__(self, rows: datasets.IterableDataset, change: Change, seed: int):
        self.rows, self.change, self.seed = rows, change, seed

    def set_epoch(self, epoch: int) -> None:
        """It counts its own passes."""

    def __iter__(self) -> Iterator[Example]:
        for epoch in itertools.count():
            self.rows.set_epoch(epoch)  # another order
            for index, row in enumerate(readable(self.rows)):
                example = {name: np.asarray(value) for name, value in row.items()}
                yield self.change(example, np.random.default_rng((self.seed, epoch, index)))


class InBuckets(torch.utils.data.Sampler):
    """An order in which examples of about the same length share a batch, new in every epoch.

    Whole batches only: what does not fill one waits for the next epoch, whose order is another.
    """

    def __init__(self, examples: Examples, batch_size: int):
        self.examples, self.lengths, self.batch_size = examples, examples.lengths, batch_size

    def __len__(self) -> int:
        return len(self.lengths) // self.batch_size * self.batch_size

    def __iter__(self) -> Iterator[int]:
        generator = np.random.default_rng((self.examples.seed, self.examples.epoch))
        order = generator.permutation(len(self.lengths))[: len(self)]
        # sorting a few batches at a time keeps the order random all the same
        for start in range(0, len(order), 50 * self.batch_size):
            piece = order[start : start + 50 * self.batch_size]
            order[start : start + len(piece)] = piece[np.argsort(-self.lengths[piece], kind="stable")]
        for batch in generator.permutation(order.reshape(-1, self.batch_size)):
            yield from batch.tolist()


# what a task does to an example


def change_of(config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> Change:
    """How the task makes inputs and labels of a row."""
    data = config.data
    special = np.array(sorted(tokenizer.all_special_ids))
    if config.task == "masked-lm":
        return lambda example, generator: masked(
            example["input_ids"], generator, data.mask_share, tokenizer.mask_token_id, len(tokenizer), special
        )
    if config.task == "denoising":
        return lambda example, generator: {
            "input_ids": with_masked_spans(
                example["input_ids"], generator, data.mask_share, data.span_length, tokenizer.mask_token_id, special
            ),
            "labels": example["input_ids"],
        }
    if config.task == "causal-lm":
        return lambda example, _: {"input_ids": example["input_ids"], "labels": example["input_ids"]}
    inputs = ("input_ids", "token_type_ids", "labels")
    return lambda example, _: {name: value for name, value in example.items() if name in inputs}


def masked(
    ids: np.ndarray, generator: np.random.Generator, share: float, mask: int, vocabulary: int, special: np.ndarray
) -> Example:
    """BERT's rule: of the tokens to guess, 80 % become the mask, 10 % another token, 10 % stay. Never special tokens."""
    chosen = (generator.random(len(ids)) < share) & ~np.isin(ids, special)
    if not chosen.any() and (candidates := np.flatnonzero(~np.isin(ids, special))).size:
        chosen[generator.choice(candidates)] = True  # a short text has something to guess too
    fate = generator.random(len(ids))
    inputs = np.where(chosen & (fate < 0.8), mask, ids)
    inputs = np.where(chosen & (fate >= 0.8) & (fate < 0.9), generator.integers(0, vocabulary, len(ids)), inputs)
    return {"input_ids": inputs, "labels": np.where(chosen, ids, IGNORED)}


def with_masked_spans(
    ids: np.ndarray, generator: np.random.Generator, share: float, mean_length: float, mask: int, special: np.ndarray
) -> np.ndarray:
    """BART's rule: spans of random length, `share` of the tokens in all, become one mask each. Never special tokens."""
    hidden = np.zeros(len(ids), bool)
    wanted = max(1, round(share * len(ids)))
    for _ in range(10 * wanted):  # spans may fall on each other or on special tokens; then another is drawn
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


class Padding:
    """Examples of different lengths as tensors, padded to the longest of them.

    A batch without padding goes without a mask: attention is quicker then, and the same.
    """

    def __init__(self, pad: int):
        self.pad = pad

    def __call__(self, examples: list[Example]) -> dict[str, Tensor]:
        batch = {"input_ids": stacked([example["input_ids"] for example in examples], self.pad)}
        lengths = torch.tensor([len(example["input_ids"]) for example in examples])
        if (lengths < lengths.max()).any():
            batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        if "token_type_ids" in examples[0]:
            batch["token_type_ids"] = stacked([example["token_type_ids"] for example in examples], 0)
        if "labels" in examples[0]:
            labels = [example["labels"] for example in examples]
            batch["labels"] = stacked(labels, IGNORED) if np.ndim(labels[0]) else torch.tensor(np.asarray(labels))
        return batch


def stacked(rows: Sequence[Any], fill: int) -> Tensor:
    """Rows of different lengths as one tensor."""
    result = np.full((len(rows), max(map(len, rows))), fill, np.int64)
    for place, row in enumerate(rows):
        result[place, : len(row)] = row
    return torch.from_numpy(result)
