"""Input validation: by shape wherever it is known, by value wherever the backend can read it."""

from typing import Any

import keras
from keras import ops

from .tokens import Tensor


def concrete_value(tensor: Tensor) -> Any:
    """The tensor as a NumPy array; None while a graph is traced."""
    try:
        return ops.convert_to_numpy(tensor)
    except Exception:  # each backend raises its own type, some of them private
        return None


def check_features(name: str, shape: tuple[int | None, ...], rank: int | None = None) -> None:
    """Require (batch, …, length, width)."""
    if len(shape) < 3 or (rank is not None and len(shape) != rank):
        expected = "(batch, length, width)" if rank in (None, 3) else f"of rank {rank}, like the query"
        raise ValueError(
            f"{name} has shape {tuple(shape)}; it must be {expected}: add the batch with keras.ops.expand_dims(x, 0), "
            "or embed the tokens first"
        )
    if shape[-1] is None:
        raise ValueError(f"{name} has shape {tuple(shape)}; its width, the last dimension, must be known")
    if 0 in shape[1:]:
        raise ValueError(f"{name} has shape {tuple(shape)}; it must contain at least one token")


def check_length(name: str, length: Any, limit: int | None, remedy: str) -> None:
    """Require at most `limit` tokens, if the length is known."""
    if limit is not None and isinstance(length, int) and length > limit:
        raise ValueError(f"{name} has {length} tokens but the maximum is {limit}; {remedy}")


def check_lengths(shape: tuple[int | None, ...], rank: int) -> None:
    """Require `lengths` of shape (batch,), and inputs of shape (batch, length, width)."""
    if rank != 3:
        raise ValueError(
            f"lengths with inputs of rank {rank}: flatten them to (batch, length, width), or pass value_mask"
        )
    if len(shape) != 1:
        raise ValueError(f"lengths has shape {shape}; it must be (batch,), the number of real tokens of each example")


def check_attention_mask(name: str, shape: tuple[int | None, ...], queries: Any, keys: Any) -> None:
    """Require (batch, queries, keys), (batch, heads, queries, keys) or (queries, keys)."""
    if len(shape) not in (2, 3, 4):
        raise ValueError(f"{name} has shape {shape}; it must be (batch, queries, keys)")
    for axis, size, allowed in (("queries", shape[-2], {1, queries}), ("keys", shape[-1], {keys})):
        if size is not None and None not in allowed and size not in allowed:
            raise ValueError(
                f"{name} has shape {shape} but there are {queries} queries and {keys} keys; it must be "
                f"(batch, queries, keys), and its number of {axis} differs"
            )


def key_padding(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The (1 or B, S) padding mask in a (B, T, S) attention mask, and whether (1 or B) the mask is nothing more.

    Some queries may see nothing, as padding does under the masks of Keras; all others must see the same keys.
    """
    mask = ops.cast(mask, "bool")
    if len(mask.shape) == 2:  # (queries, keys), for every example
        mask = ops.expand_dims(mask, 0)
    inner_axes = tuple(range(1, len(mask.shape) - 1))
    seen_by_any_BS = ops.any(mask, axis=inner_axes)
    sees_all = ops.all(ops.equal(mask, ops.expand_dims(seen_by_any_BS, inner_axes)), axis=-1)
    sees_nothing = ops.logical_not(ops.any(mask, axis=-1))
    return seen_by_any_BS, ops.all(ops.logical_or(sees_all, sees_nothing), axis=inner_axes)


NOT_A_PADDING_MASK = (
    "lets queries see different keys, which is impossible with projected keys: each of the K rows mixes many tokens. "
    "Use a padding mask, (batch, 1, keys) or value_mask, or projection_dim=None"
)


def nan_unless(is_valid_B: Tensor, x: Tensor, message: str) -> Tensor:
    """`x`. Invalid examples raise an error if values can be read; inside a graph they become NaN."""
    value = concrete_value(is_valid_B)
    if value is None:
        expanded = ops.reshape(is_valid_B, (-1, *[1] * (len(x.shape) - 1)))
        return ops.where(expanded, x, ops.full_like(x, float("nan")))
    if not value.all():
        raise ValueError(message)
    return x


def check_ids(name: str, ids: Any, count: int) -> None:
    """Require (batch, length) integers from 0 to `count - 1`. The values are checked if they can be read."""
    shape, dtype = tuple(ids.shape), keras.backend.standardize_dtype(ids.dtype)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"{name} has shape {shape}; it must be (batch, length) with at least one example and one token"
        )
    # Keras itself passes integers on as floats where it converts its inputs
    if "int" not in dtype and "float" not in dtype:
        raise ValueError(f"{name} is {dtype}; it must contain integers, of shape (batch, length)")
    value = concrete_value(ids)
    if value is not None and (value.min() < 0 or value.max() >= count or (value != value.astype("int64")).any()):
        raise ValueError(
            f"{name} contains values from {value.min()} to {value.max()}; only the integers 0 … {count - 1} are "
            "allowed: use the tokenizer of this model, or build the model with a larger vocabulary"
        )
