"""Generation: a beginning, then token by token, each layer keeping what it needs of the past.

The whole loop is one graph, compiled as `predict` compiles. Numbers to draw tokens by come from outside, so that the same seed
draws alike on every backend.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from ..models.options_linformer import is_number, positive_integer
from .layers import Beginning, Stack
from .tokens import Tensor, take_tokens

# prompts and sources are padded to multiples of this: a graph is compiled for each length, and padding never matters
STRIDE = 64


class Decoder:
    """A model that generates: what it must offer, and `generate`."""

    options: Any
    decoder: Stack
    loops: "Loops"

    def begin(self, inputs: dict[str, Tensor]) -> Beginning:
        """From inputs, packed, to what the decoder begins with."""
        raise NotImplementedError

    def logits(self, states_BC: Tensor) -> Tensor:
        """(B, C) hidden states to (B, V)."""
        raise NotImplementedError

    def first_ids(self, given_BN: np.ndarray, longest: int) -> tuple[np.ndarray, int]:
        """The ids that the result begins with, of inputs with at most `longest` real tokens; and how many the decoder has read."""
        raise NotImplementedError

    def generate(
        self,
        inputs: Any,
        max_new_tokens: int = 64,
        temperature: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
    ) -> np.ndarray:
        """Ids of prompts or sources, 0 where there is none, to those that come next.

        After prompts (B, N) a causal LM gives (B, N + T), the prompts themselves first; for sources an encoder-decoder gives
        (B, 1 + T), `start_id` first. T is `max_new_tokens`, or less if all examples end before; behind `end_id` stands padding.
        The likeliest token is taken each time; or, with a `temperature`, one is drawn from all, or from the `top_k` likeliest.
        """
        positive_integer("max_new_tokens", max_new_tokens)
        if temperature is not None and not (is_number(temperature) and temperature > 0):
            raise ValueError(
                f"temperature is {temperature!r}; it must be larger than 0, or None for the likeliest token each time"
            )
        if top_k is not None and positive_integer("top_k", top_k) > self.options.vocab_size:
            raise ValueError(f"top_k is {top_k} but vocab_size is {self.options.vocab_size}; choose fewer")
        if top_k is not None and temperature is None:
            raise ValueError(
                f"top_k is {top_k} but temperature is None: nothing is drawn; give a temperature, such as 1.0"
            )
        given_BN, fed = packed(self, inputs)
        first, count = self.first_ids(given_BN, int(fed["attention_mask"].sum(axis=1).max()))
        self.decoder.check_length(count + max_new_tokens)
        batch, length = fed["input_ids"].shape
        fed["draws"] = np.random.default_rng(seed).random((batch, max_new_tokens), "float32")
        fed["temperature"] = np.full((batch, 1), temperature or 1.0, "float32")
        loop = self.loops.get(self, length, max_new_tokens, temperature is not None, top_k)
        new_BT, needed_B = map(np.asarray, loop.predict_on_batch(fed))
        return np.concatenate([first, new_BT[:, : int(needed_B[0])]], axis=1)


class Loops:
    """The compiled loops of a model, by what they were compiled for; an object that Keras does not look into for layers."""

    most = 8  # as many graphs are kept

    def __init__(self) -> None:
        self.by_settings: dict[Any, Loop] = {}

    def get(self, model: Any, *settings: Any) -> "Loop":
        # adapters and quantisation replace variables, which a graph would not notice
        key = (*settings, *(id(variable) for variable in model.variables))
        loop = self.by_settings.pop(key, None) or Loop(model, *settings)
        self.by_settings = {**dict(list(self.by_settings.items())[1 - self.most :]), key: loop}
        return loop


class Loop(keras.Model):
    """`max_new_tokens` tokens after inputs of this length, as one graph: the likeliest each time, or `drawn`."""

    def __init__(self, model: Any, length: int, max_new_tokens: int, drawn: bool, top_k: int | None):
        super().__init__()
        self.model = model
        self.length = length
        self.max_new_tokens = max_new_tokens
        self.drawn = drawn
        self.top_k = top_k
        self.autocast = False
        self.built = True

    def call(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(B, T) new ids; and (B,) how many of the T there are until all examples had ended, the same for each."""
        options, decoder, inputs = self.model.options, self.model.decoder, dict(inputs)
        draws_BT, temperature_B1 = inputs.pop("draws"), inputs.pop("temperature")
        # a graph that serves several batches may forget their length
        beginning = self.model.begin({name: ops.reshape(given, (-1, self.length)) for name, given in inputs.items()})
        lengths_B, last_B1 = beginning.lengths_B, ops.maximum(beginning.lengths_B, 1)[:, None] - 1
        # new tokens are of the kind of the last
        types_B1 = None if beginning.types_BN is None else take_tokens(beginning.types_BN, last_B1)
        states_BNC, caches = decoder.start(beginning, beginning.ids_BN.shape[1] + self.max_new_tokens)
        sizes = [len(cache) for cache in caches]
        column_T = ops.arange(self.max_new_tokens, dtype="int32")
        padding = options.pad_id or 0

        def column(x_BT: Tensor, number: Tensor) -> Tensor:
            """(B, 1): one of the columns."""
            return ops.sum(ops.where(column_T == number, x_BT, ops.zeros_like(x_BT)), axis=1, keepdims=True)

        def with_next(states_BC: Tensor, new_BT: Tensor, is_over_B1: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
            """The tokens so far and one more, and who has ended."""
            next_B1 = self._next(self.model.logits(states_BC), column(draws_BT, number), temperature_B1)
            next_B1 = ops.where(is_over_B1, ops.full_like(next_B1, padding), next_B1)
            if options.end_id is not None:
                is_over_B1 = ops.logical_or(is_over_B1, next_B1 == options.end_id)
            return ops.where(column_T == number, next_B1, new_BT), is_over_B1

        def goes_on(number: Tensor, new_BT: Tensor, is_over_B1: Tensor, *_: Tensor) -> Tensor:
            return ops.logical_and(number < self.max_new_tokens, ops.logical_not(ops.all(is_over_B1)))

        def one_more(number: Tensor, new_BT: Tensor, is_over_B1: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
            rows = iter(flat)
            caches = [tuple(next(rows) for _ in range(size)) for size in sizes]
            last_id_B1, seen_B = column(new_BT, number - 1), lengths_B + number - 1
            states_BC, caches = decoder.step(last_id_B1, types_B1, caches, seen_B, beginning.sources)
            return (
                number + 1,
                *with_next(states_BC, new_BT, is_over_B1, number),
                *(row for cache in caches for row in cache),
            )

        nothing_BT = ops.full_like(draws_BT, padding, dtype="int32")
        begun = with_next(
            take_tokens(states_BNC, last_B1)[:, 0], nothing_BT, last_B1 < 0, ops.convert_to_tensor(0, "int32")
        )
        flat = [row for cache in caches for row in cache]
        count, new_BT, *_ = ops.while_loop(goes_on, one_more, (ops.convert_to_tensor(1, "int32"), *begun, *flat))
        return new_BT, ops.ones_like(lengths_B) * count

    def _next(self, logits_BV: Tensor, draw_B1: Tensor, temperature_B1: Tensor) -> Tensor:
        """(B, 1): the likeliest token; or the one that a number from 0 to 1 points at, when all share that line by probability."""
        logits_BV = ops.cast(logits_BV, "float32")
        if not self.drawn:
            return ops.cast(ops.argmax(logits_BV, axis=-1, keepdims=True), "int32")
        if self.top_k is not None:
            lowest_B1 = ops.min(ops.top_k(logits_BV, self.top_k)[0], axis=-1, keepdims=True)
            logits_BV = ops.where(logits_BV >= lowest_B1, logits_BV, -float("inf"))
        up_to_BV = ops.cumsum(ops.softmax(logits_BV / temperature_B1, axis=-1), axis=-1)
        below_BV = ops.cast(up_to_BV <= draw_B1 * up_to_BV[:, -1:], "int32")
        return ops.minimum(ops.sum(below_BV, axis=-1, keepdims=True), logits_BV.shape[-1] - 1)


def packed(model: Any, inputs: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The ids as they were given; and the real tokens of each, first, padded to a length that many inputs share."""
    named = {
        name: np.asarray(given)
        for name, given in (inputs if isinstance(inputs, dict) else {"input_ids": inputs}).items()
    }
    named = model.named(named)
    ids, mask = named["input_ids"].astype("int32"), named.get("attention_mask")
    if mask is None:
        mask = np.ones(ids.shape, bool) if model.options.pad_id is None else ids != model.options.pad_id
    mask = mask.astype(bool)
    if not mask.any(axis=1).all():
        empty = np.flatnonzero(~mask.any(axis=1)).tolist()
        raise ValueError(f"examples {empty} have no real token; give each at least one, or drop them")
    longest = int(mask.sum(axis=1).max())
    # beyond max_len only models go that can, and these need no common length
    length = max(longest, min(-(-longest // STRIDE) * STRIDE, model.options.max_len))
    is_real = np.arange(length) < mask.sum(axis=1, keepdims=True)
    result = {"attention_mask": is_real.astype("int32")}
    for name in ("input_ids", "token_type_ids"):
        if name in named:
            result[name] = np.zeros((len(ids), length), "int32")
            result[name][is_real] = named[name][mask]
    return ids, result
