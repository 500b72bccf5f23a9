"""Checks of the tensors people pass in: by shape wherever it is known, by value wherever a backend lets us read it."""

from typing import Any

import keras
from keras import ops

from .tokens import Tensor


def value_of(tensor: Tensor) -> Any:
    """What a tensor holds, as NumPy; None while a graph is traced, when it holds nothing yet."""
    try:
        return ops.convert_to_numpy(tensor)
    except Exception:  # each backend has its own, and some of them are private
        return None


def check_features(name: str, shape: tuple[int | None, ...], rank: int | None = None) -> None:
    """Refuse anything but (batch, …, length, width)."""
    if len(shape) < 3 or (rank is not None and len(shape) != rank):
        wanted = "(batch, length, width)" if rank in (None, 3) else f"of rank {rank}, as the query"
        raise ValueError(
            f"{name} has shape {tuple(shape)}; it must be {wanted}: add the batch with keras.ops.expand_dims(x, 0), "
            "or embed the tokens first"
        )
    if shape[-1] is None:
        raise ValueError(f"{name} has shape {tuple(shape)}; its width, the last dimension, must be known")
    if 0 in shape[1:]:
        raise ValueError(f"{name} has shape {tuple(shape)}: it must hold at least one token")


def check_length(name: str, length: Any, limit: int | None, remedy: str) -> None:
    """Refuse more tokens than there are rows in E; a length that is not known yet fails when it is."""
    if limit is not None and isinstance(length, int) and length > limit:
        raise ValueError(f"{name} has {length} tokens but this was built for {limit}; {remedy}")


def check_lengths(shape: tuple[int | None, ...], rank: int) -> None:
    """Refuse anything but (batch,) beside (batch, length, width)."""
    if rank != 3:
        raise ValueError(
            f"lengths with inputs of rank {rank}: flatten them to (batch, length, width), or pass value_mask"
        )
    if len(shape) != 1:
        raise ValueError(f"lengths has shape {shape}; it must be (batch,), the number of real tokens of each")


def check_attention_mask(name: str, shape: tuple[int | None, ...], queries: Any, keys: Any) -> None:
    """Refuse anything but (batch, queries, keys), also with heads before the queries, or without batch."""
    if len(shape) not in (2, 3, 4):
        raise ValueError(f"{name} has shape {shape}; it must be (batch, queries, keys)")
    for what, size, allowed in (("queries", shape[-2], {1, queries}), ("keys", shape[-1], {keys})):
        if size is not None and None not in allowed and size not in allowed:
            raise ValueError(
                f"{name} has shape {shape} but there are {queries} queries and {keys} keys; it must be (batch, queries, keys): "
                f"{what} do not fit"
            )


def key_padding(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(1 or B, S) of a (B, T, S) attention mask, and whether (1 or B) it says no more than which keys are padding.

    Queries that see nothing at all, as padding does under Keras's own masks, may stand beside others that see the same keys.
    """
    mask = ops.cast(mask, "bool")
    if len(mask.shape) == 2:  # (queries, keys), for every example
        mask = ops.expand_dims(mask, 0)
    between = tuple(range(1, len(mask.shape) - 1))
    seen_by_any_BS = ops.any(mask, axis=between)
    sees_all = ops.all(ops.equal(mask, ops.expand_dims(seen_by_any_BS, between)), axis=-1)
    sees_nothing = ops.logical_not(ops.any(mask, axis=-1))
    return seen_by_any_BS, ops.all(ops.logical_or(sees_all, sees_nothing), axis=between)


NOT_A_PADDING_MASK = (
    "lets some queries see other keys than others do, which attention over shortened keys cannot honour: a row stands for many "
    "tokens. Use the mask of padding, (batch, 1, keys) or value_mask, or projection_dim=None"
)


def poison_unless(is_right_B: Tensor, x: Tensor, complaint: str) -> Tensor:
    """`x`; but where the condition is known to fail an error, and where it fails inside a graph, NaN: never a wrong answer."""
    value = value_of(is_right_B)
    if value is None:
        expanded = ops.reshape(is_right_B, (-1, *[1] * (len(x.shape) - 1)))
        return ops.where(expanded, x, ops.full_like(x, float("nan")))
    if not value.all():
        raise ValueError(complaint)
    return x


def check_ids(name: str, ids: Any, count: int) -> None:
    """Refuse anything but (batch, length) integers from 0 to count - 1; what a graph will be fed is seen when it is fed."""
    shape, dtype = tuple(ids.shape), keras.backend.standardize_dtype(ids.dtype)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"{name} has shape {shape}; it must be (batch, length) with at least one example and one token"
        )
    # Keras itself hands on integers as floats where it converts what it is given
    if "int" not in dtype and "float" not in dtype:
        raise ValueError(f"{name} is {dtype}; it must hold integers, of shape (batch, length)")
    held = value_of(ids)
    if held is not None and (held.min() < 0 or held.max() >= count or (held != held.astype("int64")).any()):
        raise ValueError(
            f"{name} holds values from {held.min()} to {held.max()}; only the integers 0 … {count - 1} are allowed: "
            "use the tokenizer the model was made for, or build the model for more"
        )
