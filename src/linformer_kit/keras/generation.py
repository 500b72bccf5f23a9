"""Generation: a beginning, then token by token, each layer keeping what it needs of the past.

The whole loop is one graph, compiled as `predict` compiles. Numbers to draw tokens by come from outside, so that the same seed
draws alike on every backend.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from ..models.options_linformer import positive_integer
from .attention import KeysValues
from .layers import Stack
from .tokens import Tensor, take_tokens

# prompts and sources are padded to multiples of this: a graph is compiled for each length, and padding never matters
STRIDE = 64


class Start(NamedTuple):
    """What generation begins with: ids, the real ones first, and what the decoder attends to beside them."""

    ids_BN: Tensor
    lengths_B: Tensor
    sources: list[KeysValues | None]


class Decoder:
    """What a model must offer to be generated with."""

    options: Any
    decoder: Stack

    def start(self, inputs: dict[str, Tensor]) -> Start:
        raise NotImplementedError

    def logits(self, states_BC: Tensor) -> Tensor:
        """(B, C) hidden states to (B, V)."""
        raise NotImplementedError


class Kept:
    """The compiled loops of a model, by their settings; an object that Keras does not look into for layers."""

    def __init__(self) -> None:
        self.loops: dict[Any, keras.Model] = {}


class Loop(keras.Model):
    """`max_new_tokens` tokens for every example, as one graph."""

    def __init__(self, model: Any, max_new_tokens: int, temperature: float | None, top_k: int | None):
        super().__init__()
        self.model = model
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_k = top_k
        self.built = True

    def call(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(B, T) new ids, and how many of the T there are before all examples had ended, for each example again."""
        options, decoder = self.model.options, self.model.decoder
        inputs = dict(inputs)
        draws_BT = inputs.pop("draws")
        ids_BN, lengths_B, sources = self.model.start(inputs)
        states_BNC, caches = decoder.start(ids_BN, lengths_B, ids_BN.shape[1] + self.max_new_tokens, sources)
        column_T = ops.arange(self.max_new_tokens, dtype="int32")
        sizes = [len(cache) for cache in caches]

        def choose(states_BC: Tensor, new_BT: Tensor, is_over_B: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
            """The tokens so far and one more, and who has ended."""
            here_T = column_T == number
            draw_B = ops.sum(ops.where(here_T, draws_BT, ops.zeros_like(draws_BT)), axis=1)
            next_B = self._next(self.model.logits(states_BC), draw_B)
            next_B = ops.where(is_over_B, ops.full_like(next_B, options.pad_id or 0), next_B)
            if options.end_id is not None:
                is_over_B = ops.logical_or(is_over_B, next_B == options.end_id)
            return ops.where(here_T, next_B[:, None], new_BT), is_over_B

        def goes_on(number: Tensor, new_BT: Tensor, is_over_B: Tensor, *_: Tensor) -> Tensor:
            return ops.logical_and(number < self.max_new_tokens, ops.logical_not(ops.all(is_over_B)))

        def one_more(number: Tensor, new_BT: Tensor, is_over_B: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
            rows = iter(flat)
            caches = [tuple(next(rows) for _ in range(size)) for size in sizes]
            last_B = ops.sum(ops.where(column_T == number - 1, new_BT, ops.zeros_like(new_BT)), axis=1)
            states_BC, caches = decoder.step(last_B, caches, lengths_B + number - 1, sources)
            return number + 1, *choose(states_BC, new_BT, is_over_B, number), *(row for cache in caches for row in cache)

        first_BC = take_tokens(states_BNC, ops.maximum(lengths_B, 1)[:, None] - 1)[:, 0]
        nothing_BT = ops.full_like(draws_BT, options.pad_id or 0, dtype="int32")
        begun = choose(first_BC, nothing_BT, lengths_B < 0, ops.convert_to_tensor(0, "int32"))
        flat = [row for cache in caches for row in cache]
        count, new_BT, *_ = ops.while_loop(goes_on, one_more, (ops.convert_to_tensor(1, "int32"), *begun, *flat))
        return new_BT, ops.full_like(lengths_B, 1) * count

    def _next(self, logits_BV: Tensor, draw_B: Tensor) -> Tensor:
        """The likeliest token; or the one that a number between 0 and 1 points at, when all share that line by probability."""
        logits_BV = ops.cast(logits_BV, "float32")
        if self.temperature is None:
            return ops.cast(ops.argmax(logits_BV, axis=-1), "int32")
        if self.top_k is not None:
            lowest_B1 = ops.min(ops.top_k(logits_BV, self.top_k)[0], axis=-1, keepdims=True)
            logits_BV = ops.where(logits_BV >= lowest_B1, logits_BV, -float("inf"))
        up_to_BV = ops.cumsum(ops.softmax(logits_BV / self.temperature, axis=-1), axis=-1)
        below_BV = ops.cast(up_to_BV <= draw_B[:, None] * up_to_BV[:, -1:], "int32")
        return ops.minimum(ops.sum(below_BV, axis=-1), logits_BV.shape[-1] - 1)


def prompts(model: Any, inputs: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The ids as they were given; and the real tokens of each, first, padded to a length that many prompts share."""
    named = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    model.check_fed({name: np.asarray(value) for name, value in named.items()})
    ids = np.asarray(named["input_ids"])
    mask = named.get("attention_mask")
    if mask is None:
        mask = np.ones(ids.shape, bool) if model.options.pad_id is None else ids != model.options.pad_id
    mask = np.asarray(mask).astype(bool)
    if not mask.any(axis=1).all():
        empty = np.flatnonzero(~mask.any(axis=1)).tolist()
        raise ValueError(f"examples {empty} have no real token; give each at least one, or drop them")
    longest = int(mask.sum(axis=1).max())
    limit = model.options.max_len
    length = longest if longest > limit else min(-(-longest // STRIDE) * STRIDE, limit)
    packed = {"attention_mask": np.arange(length) < mask.sum(axis=1, keepdims=True)}
    for name in ("input_ids", "token_type_ids"):
        if name in named:
            packed[name] = np.zeros((len(ids), length), "int32")
            packed[name][packed["attention_mask"]] = np.asarray(named[name])[mask]
    packed["attention_mask"] = packed["attention_mask"].astype("int32")
    return ids, packed


def generate(
    model: Any,
    inputs: dict[str, np.ndarray],
    beginning: int,
    max_new_tokens: int,
    temperature: float | None,
    top_k: int | None,
    seed: int | None,
) -> np.ndarray:
    """(B, T) new ids after inputs whose decoder begins with so many."""
    positive_integer("max_new_tokens", max_new_tokens)
    if temperature is not None and not temperature > 0:
        raise ValueError(f"temperature is {temperature!r}; it must be larger than 0, or None for the likeliest token each time")
    if top_k is not None and not 1 <= positive_integer("top_k", top_k) <= model.options.vocab_size:
        raise ValueError(f"top_k is {top_k} but vocab_size is {model.options.vocab_size}; choose fewer")
    if top_k is not None and temperature is None:
        raise ValueError(f"top_k is {top_k} but temperature is None: nothing is drawn; give a temperature, such as 1.0")
    longest = beginning if "attention_mask" not in inputs or beginning == 1 else int(inputs["attention_mask"].sum(axis=1).max())
    model.decoder.check_length(longest + max_new_tokens)
    kept = model.__dict__.setdefault("_kept", Kept())
    settings = (max_new_tokens, temperature, top_k)
    if settings not in kept.loops:
        kept.loops[settings] = Loop(model, *settings)
    draws = np.random.default_rng(seed).random((len(inputs["input_ids"]), max_new_tokens), "float32")
    new, count = kept.loops[settings].predict_on_batch({**inputs, "draws": draws})
    return np.asarray(new)[:, : int(np.asarray(count)[0])]
