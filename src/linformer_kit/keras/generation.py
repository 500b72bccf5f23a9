"""Generation: process the prompt, then one token at a time from the caches of the layers.

The whole loop is one graph, compiled like that of `predict`. The random numbers for sampling are an input: one seed
gives the same tokens on every backend.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from ..models.options_linformer import is_finite_number, positive_integer
from .layers import Prompt, Stack
from .tokens import Tensor, take_tokens

# inputs are padded to a multiple of this length, because each length compiles a graph
STRIDE = 64


class GenerationMixin:
    """Adds `generate` to a model with a decoder."""

    options: Any
    decoder: Stack
    loops: "LoopCache"

    def make_prompt(self, inputs: dict[str, Tensor]) -> Prompt:
        """The prompt of the decoder, from packed inputs."""
        raise NotImplementedError

    def logits(self, states_BC: Tensor) -> Tensor:
        """(B, C) hidden states to (B, V)."""
        raise NotImplementedError

    def output_prefix(self, ids_BN: np.ndarray, longest: int) -> tuple[np.ndarray, int]:
        """The ids before the generated ones, and the prompt length for inputs of at most `longest` real tokens."""
        raise NotImplementedError

    def generate(
        self,
        inputs: Any,
        max_new_tokens: int = 64,
        temperature: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
    ) -> np.ndarray:
        """Generate up to `max_new_tokens` ids after each prompt, or for each source.

        A causal LM returns (B, N + T) ids that start with the (B, N) prompts; an encoder-decoder returns (B, 1 + T) ids
        that start with `start_id`. T is less than `max_new_tokens` if all examples end earlier; padding follows
        `end_id`. Decoding is greedy by default. With a `temperature` tokens are sampled, with `top_k` from the k most
        likely ones.
        """
        positive_integer("max_new_tokens", max_new_tokens)
        if temperature is not None and not (is_finite_number(temperature) and temperature > 0):
            raise ValueError(f"temperature is {temperature!r}; it must be larger than 0, or None for greedy decoding")
        if top_k is not None and positive_integer("top_k", top_k) > self.options.vocab_size:
            raise ValueError(f"top_k is {top_k} but vocab_size is {self.options.vocab_size}; use a smaller value")
        if top_k is not None and temperature is None:
            raise ValueError(
                f"top_k is {top_k} but temperature is None, so decoding is greedy; set a temperature, such as 1.0"
            )
        ids_BN, packed = pack_inputs(self, inputs)
        prefix, prompt_length = self.output_prefix(ids_BN, int(packed["attention_mask"].sum(axis=1).max()))
        self.decoder.check_length(prompt_length + max_new_tokens)
        batch, length = packed["input_ids"].shape
        packed["uniform"] = np.random.default_rng(seed).random((batch, max_new_tokens), "float32")
        packed["temperature"] = np.full((batch, 1), temperature or 1.0, "float32")
        loop = self.loops.get(self, length, max_new_tokens, temperature is not None, top_k)
        new_BT, count_B = map(np.asarray, loop.predict_on_batch(packed))
        return np.concatenate([prefix, new_BT[:, : int(count_B[0])]], axis=1)


class LoopCache:
    """The most recent compiled loops of a model. A plain class, so that Keras does not track them as layers."""

    capacity = 8

    def __init__(self) -> None:
        self.by_settings: dict[Any, GenerationLoop] = {}

    def get(self, model: Any, *settings: Any) -> "GenerationLoop":
        # adapters and quantization replace variables; a compiled graph would keep the old ones
        key = (*settings, *(id(variable) for variable in model.variables))
        loop = self.by_settings.pop(key, None) or GenerationLoop(model, *settings)
        self.by_settings = {**dict(list(self.by_settings.items())[1 - self.capacity :]), key: loop}
        return loop


class GenerationLoop(keras.Model):
    """One graph that generates `max_new_tokens` tokens for inputs of one length, greedily or by sampling."""

    def __init__(self, model: Any, length: int, max_new_tokens: int, samples: bool, top_k: int | None):
        super().__init__()
        self.model = model
        self.length = length
        self.max_new_tokens = max_new_tokens
        self.samples = samples
        self.top_k = top_k
        self.autocast = False
        self.built = True

    def call(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(B, T) new ids, and (B,) the number of steps until all examples ended, the same for each."""
        options, decoder, inputs = self.model.options, self.model.decoder, dict(inputs)
        uniform_BT, temperature_B1 = inputs.pop("uniform"), inputs.pop("temperature")
        # a graph for several batch sizes may lose the static length
        prompt = self.model.make_prompt({name: ops.reshape(x, (-1, self.length)) for name, x in inputs.items()})
        lengths_B, last_B1 = prompt.lengths_B, ops.maximum(prompt.lengths_B, 1)[:, None] - 1
        # new tokens have the type of the last token
        types_B1 = None if prompt.types_BN is None else take_tokens(prompt.types_BN, last_B1)
        states_BNC, caches = decoder.prefill(prompt, prompt.ids_BN.shape[1] + self.max_new_tokens)
        sizes = [len(cache) for cache in caches]
        column_T = ops.arange(self.max_new_tokens, dtype="int32")
        padding = options.pad_id or 0

        def column(x_BT: Tensor, number: Tensor) -> Tensor:
            """(B, 1): the column with this number."""
            return ops.sum(ops.where(column_T == number, x_BT, ops.zeros_like(x_BT)), axis=1, keepdims=True)

        def append_next(states_BC: Tensor, new_BT: Tensor, is_over_B1: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
            """Append the next token, and update which examples have ended."""
            next_B1 = self._next(self.model.logits(states_BC), column(uniform_BT, number), temperature_B1)
            next_B1 = ops.where(is_over_B1, ops.full_like(next_B1, padding), next_B1)
            if options.end_id is not None:
                is_over_B1 = ops.logical_or(is_over_B1, next_B1 == options.end_id)
            return ops.where(column_T == number, next_B1, new_BT), is_over_B1

        def is_running(number: Tensor, new_BT: Tensor, is_over_B1: Tensor, *_: Tensor) -> Tensor:
            return ops.logical_and(number < self.max_new_tokens, ops.logical_not(ops.all(is_over_B1)))

        def advance(number: Tensor, new_BT: Tensor, is_over_B1: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
            rows = iter(flat)
            caches = [tuple(next(rows) for _ in range(size)) for size in sizes]
            last_id_B1, seen_B = column(new_BT, number - 1), lengths_B + number - 1
            states_BC, caches = decoder.step(last_id_B1, types_B1, caches, seen_B, prompt.sources)
            return (
                number + 1,
                *append_next(states_BC, new_BT, is_over_B1, number),
                *(row for cache in caches for row in cache),
            )

        nothing_BT = ops.full_like(uniform_BT, padding, dtype="int32")
        first = append_next(
            take_tokens(states_BNC, last_B1)[:, 0], nothing_BT, last_B1 < 0, ops.convert_to_tensor(0, "int32")
        )
        flat = [row for cache in caches for row in cache]
        count, new_BT, *_ = ops.while_loop(is_running, advance, (ops.convert_to_tensor(1, "int32"), *first, *flat))
        return new_BT, ops.ones_like(lengths_B) * count

    def _next(self, logits_BV: Tensor, uniform_B1: Tensor, temperature_B1: Tensor) -> Tensor:
        """(B, 1): the most likely token or, when sampling, the quantile `uniform_B1` of the distribution."""
        logits_BV = ops.cast(logits_BV, "float32")
        if not self.samples:
            return ops.cast(ops.argmax(logits_BV, axis=-1, keepdims=True), "int32")
        if self.top_k is not None:
            lowest_B1 = ops.min(ops.top_k(logits_BV, self.top_k)[0], axis=-1, keepdims=True)
            logits_BV = ops.where(logits_BV >= lowest_B1, logits_BV, -float("inf"))
        up_to_BV = ops.cumsum(ops.softmax(logits_BV / temperature_B1, axis=-1), axis=-1)
        below_BV = ops.cast(up_to_BV <= uniform_B1 * up_to_BV[:, -1:], "int32")
        return ops.minimum(ops.sum(below_BV, axis=-1, keepdims=True), logits_BV.shape[-1] - 1)


def pack_inputs(model: Any, inputs: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The original ids, and the inputs with the real tokens first, padded to a multiple of `STRIDE`."""
    named = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    named = model.named_inputs({name: np.asarray(x) for name, x in named.items()})
    ids, mask = named["input_ids"].astype("int32"), named.get("attention_mask")
    if mask is None:
        mask = np.ones(ids.shape, bool) if model.options.pad_id is None else ids != model.options.pad_id
    mask = mask.astype(bool)
    if not mask.any(axis=1).all():
        empty = np.flatnonzero(~mask.any(axis=1)).tolist()
        raise ValueError(f"examples {empty} have no real tokens; add at least one to each, or drop them")
    longest = int(mask.sum(axis=1).max())
    # inputs beyond max_len, which only some models accept, are not padded
    length = max(longest, min(-(-longest // STRIDE) * STRIDE, model.options.max_len))
    is_real = np.arange(length) < mask.sum(axis=1, keepdims=True)
    result = {"attention_mask": is_real.astype("int32")}
    for name in ("input_ids", "token_type_ids"):
        if name in named:
            result[name] = np.zeros((len(ids), length), "int32")
            result[name][is_real] = named[name][mask]
    return ids, result
