"""Tiles of queries, and the tokens and rows that each tile is compared with.

A tile is one block of the window, or several if blocks are short: the products need some size to be fast.

Shapes: B batch, N tokens, n blocks, T tiles, Q tokens in a tile, P near tokens (those of some tiles, and a block on
either side), R far rows (global tokens, then the K rows), S columns of a softmax (Q + 2 blocks + R), M matrices, H
heads, F features.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .projection_linformer import is_static, split_windows, windows

# the largest number of tokens per tile with several blocks
TILE = 64


class Tiling(NamedTuple):
    """How the tokens are divided: into blocks of `window` tokens, and `tiles` of `blocks_per_tile` blocks."""

    window: int
    global_tokens: int
    blocks_per_tile: int
    tiles: int

    @classmethod
    def of(cls, length: int, window: int, global_tokens: int, single_blocks: bool = False) -> "Tiling":
        """The tiling of `length` tokens; `single_blocks`: a block is a tile, as in graphs for all lengths."""
        if not is_static(length) or single_blocks:
            return cls(window, global_tokens, 1, windows(length, window))
        # Inductor fails if the size of a tile depends on the length, so there short inputs are filled up to whole tiles
        can_depend_on_length = not torch.compiler.is_dynamo_compiling()
        if can_depend_on_length and length <= 2 * window:  # two blocks see each other
            window = (length + 1) // 2
        blocks_per_tile = max(1, TILE // window)
        if can_depend_on_length:
            blocks_per_tile = min(blocks_per_tile, windows(length, window))
        return cls(window, global_tokens, blocks_per_tile, windows(length, blocks_per_tile * window))

    @property
    def size(self) -> int:
        """Q, the number of tokens in a tile."""
        return self.blocks_per_tile * self.window

    @property
    def near(self) -> int:
        """The number of near tokens that a tile is compared with."""
        return self.size + 2 * self.window

    @property
    def blocks(self) -> int:
        """n, counted in whole tiles."""
        return self.tiles * self.blocks_per_tile

    def scores(self, rows: int) -> int:
        """The number of scores that are computed for each head of one example."""
        return self.tiles * self.size * (self.near + self.global_tokens + rows)


def near_slices(tiling: Tiling, tiles: slice, length: int) -> tuple[slice, slice]:
    """Which of `length` tokens are near to `tiles`, and which of the P near tokens they are."""
    first, end = tiles.start * tiling.size - tiling.window, tiles.stop * tiling.size + tiling.window
    tokens = slice(max(0, first), min(end, length))
    return tokens, slice(tokens.start - first, tokens.stop - first)


def near_tokens(features_BNF: Tensor, tiling: Tiling, tiles: slice | None = None) -> Tensor:
    """(B, N, F) to (B, P, F): the tokens of `tiles`, by default all, and a block on either side, with zeros."""
    batch, length, features = features_BNF.shape
    if not is_static(length):
        before, after = tiling.window, tiling.tiles * tiling.size - length + tiling.window
        return nn.functional.pad(features_BNF, (0, 0, before, after))
    tiles = tiles or slice(0, tiling.tiles)
    tokens, there = near_slices(tiling, tiles, length)
    count = (tiles.stop - tiles.start) * tiling.size + 2 * tiling.window
    if there == slice(0, count):
        return features_BNF[:, tokens]
    # faster than `pad`, which fills everything with zeros first
    zeros = [features_BNF.new_zeros(batch, missing, features) for missing in (there.start, count - there.stop)]
    return torch.cat([zeros[0], features_BNF[:, tokens], zeros[1]], dim=1)


def far_rows(features_BNF: Tensor, rows_BGKD: Tensor | None, global_tokens: int) -> Tensor:
    """(B, R, F): the first `global_tokens` tokens, filled up with zeros, then the rows."""
    if not is_static(features_BNF.shape[1]) or features_BNF.shape[1] < global_tokens:
        features_BNF = nn.functional.pad(features_BNF, (0, 0, 0, global_tokens))
    first_BNF = features_BNF[:, :global_tokens]
    return first_BNF if rows_BGKD is None else torch.cat([first_BNF, rows_BGKD.transpose(1, 2).flatten(2)], dim=1)


def first_tokens(x: Tensor, length: int) -> Tensor:
    """(..., N, F) without what fills up the last tile."""
    # the exporter cannot prove that a slice has as many rows
    return x[..., :length, :] if is_static(length) else x[..., torch.arange(length, device=x.device), :]


def all_tiles(x_BT: Tensor) -> Tensor:
    """(B, T, ...) to (B·T, ...)."""
    if all(is_static(size) for size in x_BT.shape[2:]):
        return x_BT.flatten(0, 1)
    # a copy; the exporter cannot prove the strides of the view
    batch, tiles = x_BT.shape[:2]
    number_X = torch.arange(batch * tiles, device=x_BT.device)
    example_X = number_X // tiles
    return x_BT[example_X, number_X - example_X * tiles]


def mass_outside(mass_BMnK: Tensor) -> Tensor:
    """From the mass of each row in each block, that in all blocks but the block itself and its neighbors.

    Sums of what is outside, not differences, so that they are exactly zero if there is nothing.
    """
    blocks, padded = mass_BMnK.shape[2], nn.functional.pad(mass_BMnK, (0, 0, 2, 2))
    before, after = padded.cumsum(dim=2)[:, :, :blocks], padded.flip(2).cumsum(dim=2).flip(2)[:, :, 4:]
    return before + after


def column_bias(tiling: Tiling, lengths_B: Tensor, mass_BMnK: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(B, M, n, S): 0 for a token that the block sees, the log of the mass outside for a row, hidden otherwise.

    Hidden columns have the lowest score and not minus infinity: padding may see nothing, and an empty softmax is nan.
    """
    window, device, hidden = tiling.window, lengths_B.device, torch.finfo(dtype).min / 2
    block_n1 = torch.arange(tiling.blocks, device=device)[:, None]
    first_n1 = (block_n1 // tiling.blocks_per_tile * tiling.blocks_per_tile - 1) * window
    near_nS = first_n1 + torch.arange(tiling.near, device=device)
    global_nS = torch.arange(tiling.global_tokens, device=device).expand(tiling.blocks, -1)
    is_close_nS = torch.cat(
        [(near_nS // window - block_n1).abs() <= 1, (global_nS // window - block_n1).abs() > 1], dim=1
    )
    position_nS = torch.cat([near_nS, global_nS], dim=1)
    is_seen_BnS = is_close_nS & (position_nS >= 0) & (position_nS < lengths_B[:, None, None])
    bias_B1nS = torch.zeros_like(is_seen_BnS, dtype=dtype).masked_fill(~is_seen_BnS, hidden)[:, None]
    if mass_BMnK is None:
        return bias_B1nS
    mass_BMnK = mass_BMnK.to(torch.promote_types(dtype, torch.float32))
    of_rows_BMnK = mass_outside(mass_BMnK).log().to(dtype).clamp(min=hidden)
    batch, matrices = max(bias_B1nS.shape[0], of_rows_BMnK.shape[0]), of_rows_BMnK.shape[1]
    return torch.cat([part.expand(batch, matrices, -1, -1) for part in (bias_B1nS, of_rows_BMnK)], dim=-1)


def tile_columns(near_BPF: Tensor, far_BRF: Tensor, tiling: Tiling) -> Tensor:
    """(B, T, S, F): the near tokens of each tile, then the far rows."""
    size, window = tiling.size, tiling.window
    tokens = near_BPF.shape[1] - 2 * window
    left_BTQF, own_BTQF, right_BTQF = (
        split_windows(near_BPF[:, first : first + tokens], size) for first in (0, window, 2 * window)
    )
    far_BTRF = far_BRF[:, None].expand(-1, own_BTQF.shape[1], -1, -1)
    return torch.cat([left_BTQF[:, :, :window], own_BTQF, right_BTQF[:, :, size - window :], far_BTRF], dim=2)


def add_near(near_BPF: Tensor, tiles_BTPF: Tensor, tiling: Tiling) -> None:
    """Add the near tokens of each tile to those of all tiles, in place."""
    size, window = tiling.size, tiling.window
    tokens = near_BPF.shape[1] - 2 * window
    left, own, right = tiles_BTPF.split([window, size, window], dim=2)
    split_windows(near_BPF[:, :tokens], size)[:, :, :window] += left
    split_windows(near_BPF[:, window : window + tokens], size)[:] += own
    split_windows(near_BPF[:, 2 * window :], size)[:, :, size - window :] += right
