"""Padding: the real tokens of every example first, and where they came from.

Everything behind this room may rely on it: padding stands at the end, and `lengths_B` says how many tokens are real. So
padding on the left, on the right or in between all give what the example gives alone.

Shapes: B batch, N length, X some of the tokens, C width.
"""

from typing import Any, NamedTuple

import keras
from keras import ops

Tensor = Any  # of whichever backend


class Order(NamedTuple):
    """Where the tokens of every example went."""

    lengths_B: Tensor  # how many are real
    origin_BN: Tensor  # which token now stands here
    place_BN: Tensor  # where a token stands now


def real_tokens_first(mask_BN: Tensor) -> Order:
    """The order that moves the real tokens, where the mask is True, to the front, and keeps theirs."""
    rank_BN = ops.cumsum(ops.cast(mask_BN, "int32"), axis=1)
    lengths_B = rank_BN[:, -1]
    position_N = ops.arange(ops.shape(mask_BN)[1], dtype="int32")
    place_BN = ops.where(mask_BN, rank_BN - 1, lengths_B[:, None] + position_N - rank_BN)
    return Order(lengths_B, inverse(place_BN), place_BN)


def inverse(place_BN: Tensor) -> Tensor:
    """Of every example the permutation that undoes this one."""
    batch, length = ops.shape(place_BN)
    flat_X1 = ops.reshape(place_BN + first_tokens(batch, length), (-1, 1))
    position_BN = ops.zeros_like(place_BN) + ops.arange(length, dtype="int32")
    origin_X = ops.scatter_update(
        ops.reshape(ops.zeros_like(place_BN), (-1,)), flat_X1, ops.reshape(position_BN, (-1,))
    )
    return ops.reshape(origin_X, (-1, length))


def first_tokens(batch: Any, length: Any) -> Tensor:
    """(B, 1): the number of every example's first token, when those of all are counted through."""
    return ops.expand_dims(ops.arange(batch, dtype="int32") * ops.cast(length, "int32"), 1)


def take_tokens(x: Tensor, index_BX: Tensor) -> Tensor:
    """(B, N, …) to (B, X, …): of every example the tokens with these numbers."""
    batch, length = ops.shape(x)[:2]
    return ops.take(ops.reshape(x, (-1, *ops.shape(x)[2:])), index_BX + first_tokens(batch, length), axis=0)


def real_positions(length: Any, lengths_B: Tensor) -> Tensor:
    """(B, N), True at the first `lengths_B` positions."""
    return ops.arange(length, dtype="int32") < ops.expand_dims(ops.cast(lengths_B, "int32"), 1)


def without_padding(x_BNC: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Zeros behind the real tokens; filled, not multiplied: padding may hold anything, and 0 * nan is nan."""
    if lengths_B is None:
        return x_BNC
    real_BN1 = ops.expand_dims(real_positions(ops.shape(x_BNC)[1], lengths_B), -1)
    return ops.where(real_BN1, x_BNC, ops.zeros_like(x_BNC))


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in a precision in which squares and long sums neither vanish nor overflow."""
    return ops.cast(x, keras.backend.result_type(x.dtype, "float32"))
