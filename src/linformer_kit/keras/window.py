"""Window attention: exact for the tokens around a query, in one softmax with the K rows for the rest of the input.

As in PyTorch, `models/window_linformer.py`: a query sees the tokens of its block and of the blocks on either side, each
of `window_length` tokens, the first `global_tokens` tokens, and the K rows. The log of the mass of a row outside of
what the query sees is added to its score: the number of tokens for `mean`, the share of the row for other projections.
With a distance bias, a learned number for each head and distance is added to the score of a token in these blocks.

Shapes: B batch, N tokens, n blocks, W window length, R far rows (global tokens, then the K rows), S columns of a
softmax (P = 3·W near tokens, then the far rows), M matrices (1 or H), K projected length, H heads, D head size, Z
distances (4·W - 1).
"""

from typing import Any

from keras import ops

from ..models.options_linformer import FIRST_BIAS
from .projection import real_lengths
from .tokens import Tensor, at_least_float32, ceil_div, pad_to

# added to scores that do not count; not minus infinity: padding may see nothing, and an empty softmax is nan
HIDDEN = -1e30


def with_neighbors(x_BnW: Tensor) -> Tensor:
    """(B, n, W, …) to (B, n, 3·W, …): each block between the blocks on either side; zeros past the ends."""
    zeros_B1W = ops.zeros_like(x_BnW[:, :1])
    padded = ops.concatenate([zeros_B1W, x_BnW, zeros_B1W], axis=1)
    return ops.concatenate([padded[:, :-2], x_BnW, padded[:, 2:]], axis=2)


def far_rows(features_BNHD: Tensor, rows_BKHD: Tensor | None, global_tokens: int) -> Tensor:
    """(B, R, H, D): the first `global_tokens` tokens, filled up with zeros, then the rows."""
    first_BNHD = pad_to(features_BNHD[:, :global_tokens], global_tokens)
    return first_BNHD if rows_BKHD is None else ops.concatenate([first_BNHD, rows_BKHD], axis=1)


def mass_outside(mass_BMnK: Tensor) -> Tensor:
    """From the mass of each row in each block, that in all blocks but the block itself and its neighbors.

    Sums of what is outside, not differences, so that they are exactly zero if there is nothing.
    """

    def before(mass_BMnK: Tensor) -> Tensor:
        nothing_BM1K = ops.zeros_like(mass_BMnK[:, :, :1])
        sums_BMnK = ops.cumsum(mass_BMnK, axis=2)
        return ops.concatenate([nothing_BM1K, nothing_BM1K, sums_BMnK], axis=2)[:, :, :-2]

    return before(mass_BMnK) + ops.flip(before(ops.flip(mass_BMnK, axis=2)), axis=2)


def token_bias(length: Any, lengths_B: Tensor | None, window: int, global_tokens: int) -> Tensor:
    """(B or 1, 1, n, S without rows): 0 for a token that the block sees, `HIDDEN` for others and for padding."""
    block_n1 = ops.arange(ceil_div(length, window), dtype="int32")[:, None]
    near_nS = (block_n1 - 1) * window + ops.arange(3 * window, dtype="int32")
    # a global token counts once: here, if it is not near
    global_nS = ops.zeros_like(block_n1) + ops.arange(global_tokens, dtype="int32")
    is_far_nS = ops.abs(global_nS // window - block_n1) > 1
    position_nS = ops.concatenate([near_nS, global_nS], axis=1)
    is_column_nS = ops.concatenate([near_nS >= 0, is_far_nS], axis=1)
    is_seen_BnS = ops.logical_and(is_column_nS, position_nS < real_lengths(length, lengths_B)[..., None])
    return ops.where(is_seen_BnS, 0.0, HIDDEN)[:, None]


def row_bias(mass_BMnK: Tensor) -> Tensor:
    """(B or 1, M, n, K): the log of the mass of a row outside of what the block sees."""
    return ops.maximum(ops.log(mass_outside(ops.stop_gradient(mass_BMnK))), HIDDEN)


def first_distance_bias(shape: tuple[int, int], dtype: str | None = None) -> Tensor:
    """Initializer of a distance bias: zeros, and `FIRST_BIAS` at distance -1, 1, -2, 2 … for successive heads."""
    distances, heads = shape
    window, head_H = (distances + 1) // 4, ops.arange(heads, dtype="int32")
    neighbor_H = (head_H // 2 % window + 1) * (2 * (head_H % 2) - 1)
    distance_Z1 = ops.arange(distances, dtype="int32")[:, None] - distances // 2
    return FIRST_BIAS * ops.cast(distance_Z1 == neighbor_H, dtype)


def distance_bias_of_block(weight_ZH: Tensor, window: int) -> Tensor:
    """(H, W, P): the distance bias of each query of a block and each near token, the same in all blocks."""
    near_P = ops.arange(3 * window, dtype="int32") - window
    distance_WP = near_P - ops.arange(window, dtype="int32")[:, None]
    return ops.moveaxis(ops.take(at_least_float32(weight_ZH), distance_WP + 2 * window - 1, axis=0), -1, 0)
