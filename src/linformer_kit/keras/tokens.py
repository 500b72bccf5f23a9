"""Padding: move the real tokens of every example to the front, and back.

The rest of the package relies on this order: padding comes last, and `lengths_B` counts the real tokens. So padding
on the left, on the right or in between never changes the output.

Shapes: B batch, N length, X selected tokens, n blocks, W tokens in a block, C width.
"""

from typing import Any, NamedTuple

import keras
from keras import ops

Tensor = Any  # a tensor of the active backend


class TokenOrder(NamedTuple):
    """A permutation of the tokens of every example that puts the real ones first."""

    lengths_B: Tensor  # number of real tokens
    origin_BN: Tensor  # for each new position, the old one
    place_BN: Tensor  # for each old position, the new one


def real_tokens_first(mask_BN: Tensor) -> TokenOrder:
    """The order that moves the real tokens, where the mask is True, to the front and keeps their sequence."""
    rank_BN = ops.cumsum(ops.cast(mask_BN, "int32"), axis=1)
    lengths_B = rank_BN[:, -1]
    position_N = ops.arange(ops.shape(mask_BN)[1], dtype="int32")
    place_BN = ops.where(mask_BN, rank_BN - 1, lengths_B[:, None] + position_N - rank_BN)
    return TokenOrder(lengths_B, invert_permutation(place_BN), place_BN)


def invert_permutation(place_BN: Tensor) -> Tensor:
    """The inverse permutation of every example."""
    batch, length = ops.shape(place_BN)
    flat_X1 = ops.reshape(place_BN + example_offsets(batch, length), (-1, 1))
    position_BN = ops.zeros_like(place_BN) + ops.arange(length, dtype="int32")
    zeros_X, position_X = (ops.reshape(x, (-1,)) for x in (ops.zeros_like(place_BN), position_BN))
    return ops.reshape(ops.scatter_update(zeros_X, flat_X1, position_X), (-1, length))


def example_offsets(batch: Any, length: Any) -> Tensor:
    """(B, 1): the index of every example's first token in the flattened batch."""
    return ops.expand_dims(ops.arange(batch, dtype="int32") * ops.cast(length, "int32"), 1)


def take_tokens(x: Tensor, index_BX: Tensor) -> Tensor:
    """(B, N, …) to (B, X, …): the tokens at these positions of every example."""
    batch, length = ops.shape(x)[:2]
    return ops.take(ops.reshape(x, (-1, *ops.shape(x)[2:])), index_BX + example_offsets(batch, length), axis=0)


def real_positions(length: Any, lengths_B: Tensor) -> Tensor:
    """(B, N), True at the first `lengths_B` positions."""
    return ops.arange(length, dtype="int32") < ops.expand_dims(ops.cast(lengths_B, "int32"), 1)


def zero_padding(x_BNC: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Set padding to zero. Selects rather than multiplies: padding may hold NaN, and 0 * NaN is NaN."""
    if lengths_B is None:
        return x_BNC
    real_BN1 = ops.expand_dims(real_positions(ops.shape(x_BNC)[1], lengths_B), -1)
    return ops.where(real_BN1, x_BNC, ops.zeros_like(x_BNC))


def at_least_float32(x: Tensor) -> Tensor:
    """Cast half precision to float32, where squares and long sums neither underflow nor overflow."""
    return ops.cast(x, keras.backend.result_type(x.dtype, "float32"))


def ceil_div(length: Any, window: Any) -> Any:
    """`length / window`, rounded up; also for symbolic lengths."""
    return (length + window - 1) // window


def pad_to(x: Tensor, length: Any) -> Tensor:
    """(B, N, …) padded with zeros, or truncated, to (B, `length`, …)."""
    batch, current = ops.shape(x)[:2]
    if isinstance(current, int) and isinstance(length, int) and current >= length:
        return x[:, :length]
    return ops.concatenate([x, ops.zeros((batch, length - current, *x.shape[2:]), x.dtype)], axis=1)


def split_blocks(x: Tensor, block: int) -> Tensor:
    """(B, N, …) to (B, n, W, …); zeros fill the last block."""
    blocks = ceil_div(ops.shape(x)[1], block)
    return ops.reshape(pad_to(x, blocks * block), (-1, blocks, block, *x.shape[2:]))
