"""Near and far: the tokens around a query, exactly, beside the K rows for the rest of the input, in one softmax.

    out_i = softmax([Q_i keys_W(i)ᵀ / √D, Q_i keys_Kᵀ / √D + log mass_i]) [values_W(i); values_K]

The window W(i) holds the tokens of the block of token i and of the blocks on either side, each of `window_length`
tokens, and the first `global_tokens` tokens. `mass_i` says, for each row, how much of it lies outside of W(i): the
number of tokens for `mean`, the share of the row for other projections. A row of which nothing lies outside takes no
part, so an input that fits into the window has ordinary full attention.

With a distance bias, `bias_h(j - i)` is added to the score of query i and token j of its blocks, a learned number for
each head h and distance.

Queries are processed in tiles of one block, or of several if blocks are short: the products need some size to be fast.

Shapes: B batch, N tokens, n blocks, T tiles, Q tokens in a tile, P near tokens (N, filled up to tiles, and a block more
on either side), R far rows (global tokens, then the K rows), S columns of a softmax (Q + 2 blocks + R), M matrices, H
heads, G key-value heads, D head size, F = G·D.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .multihead_linformer import softmax_attention
from .options_linformer import FIRST_BIAS
from .projection_linformer import at_least_float32, is_static, real_tokens_first, split_windows, windows
from .reversible_linformer import AutocastState, RandomState, can_recompute

# tokens per tile, at least, if blocks are shorter
TILE = 64
# size of the intermediate results of a chunk of tiles, which stay in the processor's cache and are computed again in
# the backward pass: numbers in the keys of its columns, and scores, which only a layer with a distance bias stores
KEY_CHUNK, SCORE_CHUNK = 2**20, 2**19


class Tiling(NamedTuple):
    """How the tokens are divided: into blocks of `window` tokens, and `tiles` of `blocks_per_tile` blocks."""

    window: int
    global_tokens: int
    blocks_per_tile: int
    tiles: int

    @classmethod
    def of(cls, length: int, window: int, global_tokens: int, single_blocks: bool = False) -> "Tiling":
        """The tiling of `length` tokens; `single_blocks`: a block is a tile, as in graphs for all lengths."""
        blocks_per_tile = 1
        if is_static(length) and not single_blocks:
            if length <= 2 * window:  # two blocks see each other, and need not be longer than the input
                window = (length + 1) // 2
            blocks_per_tile = min(max(1, TILE // window), windows(length, window))
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


class NearAndFar(NamedTuple):
    """What the queries of a batch attend to."""

    near_keys_BPF: Tensor
    near_values_BPF: Tensor
    far_keys_BRF: Tensor
    far_values_BRF: Tensor
    bias_BMnS: Tensor  # added to the scores, for each block; M is 1, or G if each key-value head has its own E
    distance_bias_HQP: Tensor | None  # added to the scores of the near tokens of each tile, at least float32


class DistanceBias(nn.Module):
    """A learned number for each head and distance between query and token, added to their score: `bias_h(j - i)`.

    A new head attends to one neighbor: at distance -1 for the first head, then 1, -2, 2 and so on. With zeros instead,
    heads learn slowly which of the tokens are adjacent (docs/log.md).

    >>> bias = DistanceBias(window_length=4, num_heads=2)
    >>> bias.weight.shape, bias(Tiling.of(10, 4, 0, single_blocks=True)).shape
    (torch.Size([15, 2]), torch.Size([2, 4, 12]))
    """

    def __init__(self, window_length: int, num_heads: int):
        super().__init__()
        self.window_length = window_length
        self.longest = 2 * window_length - 1  # the longest distance in a block and its neighbors
        self.weight = nn.Parameter(torch.empty(2 * self.longest + 1, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros, and `FIRST_BIAS` at one neighbor for each head."""
        with torch.no_grad():
            self.weight.zero_()
            for head in range(self.weight.shape[1]):
                distance = head // 2 % self.window_length + 1  # which all queries see, but for the ends of the input
                self.weight[self.longest + (distance if head % 2 else -distance), head] = FIRST_BIAS

    def for_this_window(self, other: Tensor | None) -> Tensor:
        """The weight of a distance bias for another window, with zeros for distances that it does not have."""
        if other is None:
            return torch.zeros_like(self.weight)
        longer = self.longest - other.shape[0] // 2
        return nn.functional.pad(other, (0, 0, longer, longer))

    def forward(self, tiling: Tiling) -> Tensor:
        """(H, Q, near tokens of a tile). Entries beyond the window are arbitrary: these tokens are hidden."""
        device = self.weight.device
        near_P = torch.arange(tiling.near, device=device) - tiling.window
        distance_QP = near_P - torch.arange(tiling.size, device=device)[:, None]
        number_QP = distance_QP.clamp(-self.longest, self.longest) + self.longest
        return nn.functional.embedding(number_QP, self.weight).movedim(-1, 0)

    def extra_repr(self) -> str:
        return f"window_length={self.window_length}, num_heads={self.weight.shape[1]}"


def near_tokens(features_BNF: Tensor, tiling: Tiling) -> Tensor:
    """(B, N, F) to (B, P, F): zeros fill the last tile, and there is a block of zeros on either side."""
    batch, length, features = features_BNF.shape
    before, after = tiling.window, tiling.tiles * tiling.size - length + tiling.window
    if not is_static(length):
        return nn.functional.pad(features_BNF, (0, 0, before, after))
    # `pad` would fill everything with zeros first
    first_BWF, last_BWF = (features_BNF.new_zeros(batch, tokens, features) for tokens in (before, after))
    return torch.cat([first_BWF, features_BNF, last_BWF], dim=1)


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


def add_columns(near_BPF: Tensor, far_BRF: Tensor, columns_BTSF: Tensor, tiling: Tiling) -> None:
    """The gradient of `tile_columns`, added in place."""
    size, window = tiling.size, tiling.window
    tokens = near_BPF.shape[1] - 2 * window
    left, own, right, far = columns_BTSF.split([window, size, window, far_BRF.shape[1]], dim=2)
    split_windows(near_BPF[:, :tokens], size)[:, :, :window] += left
    split_windows(near_BPF[:, window : window + tokens], size)[:] += own
    split_windows(near_BPF[:, 2 * window :], size)[:, :, size - window :] += right
    far_BRF += far.sum(dim=1, dtype=far_BRF.dtype)


def weights_on_tokens(weights_BHNS: Tensor, window: int, global_tokens: int, mask_BN: Tensor | None = None) -> Tensor:
    """(B, H, N, S) weights of a layer with a window to (B, H, N, K + N): on the rows, then on the tokens.

    N × N, for plots and comparisons.

    >>> from linformer_kit import LinformerAttention
    >>> layer = LinformerAttention(16, 2, max_length=40, projected_length=4, window_length=5)
    >>> _, weights = layer(torch.randn(1, 40, 16), need_weights=True)
    >>> weights.shape, weights_on_tokens(weights, 5, 0).shape
    (torch.Size([1, 2, 40, 19]), torch.Size([1, 2, 40, 44]))
    """
    batch, heads, length, columns = weights_BHNS.shape
    if mask_BN is None:
        mask_BN = torch.ones(batch, length, dtype=torch.bool, device=weights_BHNS.device)
    rank_BN = real_tokens_first(mask_BN[..., None].float(), mask_BN)[2]
    near_BNS = (rank_BN[..., None] // window - 1) * window + torch.arange(3 * window, device=mask_BN.device)
    global_BNS = torch.arange(global_tokens, device=mask_BN.device).expand(batch, length, -1)
    token_BNS = torch.cat([near_BNS, global_BNS], dim=-1)
    is_token_BNS = (token_BNS >= 0) & (token_BNS < mask_BN.sum(dim=1)[:, None, None])
    seen = token_BNS.shape[-1]
    on_seen, on_rows = weights_BHNS.split([seen, columns - seen], dim=-1)
    # where the token of each rank stands
    place_BNS = rank_BN.argsort(dim=1)[:, None].expand(-1, length, -1).gather(-1, token_BNS.clamp(0, length - 1))
    on_tokens = weights_BHNS.new_zeros(batch, heads, length, length).scatter_add(
        -1, place_BNS[:, None].expand(-1, heads, -1, -1), on_seen * is_token_BNS[:, None]
    )
    return torch.cat([on_rows, on_tokens], dim=-1)


class WindowAttention(NamedTuple):
    """The softmax over window and rows, for a tiling and a number of heads."""

    tiling: Tiling
    num_heads: int
    num_kv_heads: int
    dropout: float
    fused: bool = True

    def __call__(self, query_BNF: Tensor, context: NearAndFar) -> Tensor:
        """(B, N, H·D) queries, filled up to whole tiles, to (B, N, H·D) heads."""
        # transformations of torch.func cannot see into the recomputation
        if can_recompute() and self.fused and not torch._C._are_functorch_transforms_active():
            return _InChunks.apply(self, query_BNF, *context)
        return self.whole(query_BNF, context)[0]

    def whole(self, query_BNF: Tensor, context: NearAndFar, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """All tiles at once: heads, and on request the (B, H, N, S) weights."""
        keys_BTSF = tile_columns(context.near_keys_BPF, context.far_keys_BRF, self.tiling)
        values_BTSF = tile_columns(context.near_values_BPF, context.far_values_BRF, self.tiling)
        biases = (context.bias_BMnS, context.distance_bias_HQP)
        return self.attend(query_BNF, keys_BTSF, values_BTSF, *biases, need_weights)

    def attend(
        self,
        query_BNF: Tensor,
        keys_BTSF: Tensor,
        values_BTSF: Tensor,
        bias_BMnS: Tensor,
        distance_bias_HQP: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Each tile of queries attends to its columns."""
        query_BTQF = split_windows(query_BNF, self.tiling.size)
        heads_XHQD, weights_XHQS = softmax_attention(
            self._heads(query_BTQF, self.num_heads),
            self._heads(keys_BTSF, self.num_kv_heads),
            self._heads(values_BTSF, self.num_kv_heads),
            self._bias(bias_BMnS, distance_bias_HQP),
            self.dropout,
            need_weights,
            self._is_fused(distance_bias_HQP),
        )
        tiles = query_BTQF.shape[:2]
        heads_BNF = heads_XHQD.transpose(1, 2).flatten(2).unflatten(0, tiles).flatten(1, 2)
        if weights_XHQS is None:
            return heads_BNF, None
        return heads_BNF, weights_XHQS.unflatten(0, tiles).transpose(1, 2).flatten(2, 3)

    def _is_fused(self, distance_bias_HQP: Tensor | None) -> bool:
        """Whether a fused kernel is used: it has no gradient for what is added to the scores.

        With dropout, the backward pass must draw its numbers in the same way as the forward pass.
        """
        if not self.fused or distance_bias_HQP is None:
            return self.fused
        # graphs and transformations of torch.func do not tell what needs a gradient
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return False
        return not (distance_bias_HQP.requires_grad and (torch.is_grad_enabled() or self.dropout > 0))

    def _heads(self, features_BTSF: Tensor, heads: int) -> Tensor:
        """(B, T, S, F) to (B·T, H, S, D)."""
        features_XGSD = all_tiles(features_BTSF).unflatten(-1, (heads, -1)).transpose(1, 2)
        return features_XGSD if heads == self.num_heads else features_XGSD.repeat_interleave(self._group, dim=1)

    def _bias(self, bias_BMnS: Tensor, distance_bias_HQP: Tensor | None) -> Tensor:
        """What is added to the scores, (B·T, 1 or H, 1 or Q, S)."""
        blocks = self.tiling.blocks_per_tile
        bias_BMTnS = bias_BMnS.unsqueeze(3) if blocks == 1 else split_windows(bias_BMnS, blocks)
        bias_XMnS = all_tiles(bias_BMTnS.transpose(1, 2))
        if bias_BMnS.shape[1] > 1:
            bias_XMnS = bias_XMnS.repeat_interleave(self._group, dim=1)
        bias_XMQS = bias_XMnS if blocks == 1 else bias_XMnS.repeat_interleave(self.tiling.window, dim=2)
        if distance_bias_HQP is None:
            return bias_XMQS
        far = bias_BMnS.shape[-1] - self.tiling.near
        return bias_XMQS + nn.functional.pad(distance_bias_HQP.to(bias_XMQS.dtype), (0, far))

    @property
    def _group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def tiles_per_chunk(self, context: NearAndFar) -> int:
        """The number of tiles that are processed at once."""
        columns, features = context.bias_BMnS.shape[-1], context.near_keys_BPF.shape[-1]
        tiles = KEY_CHUNK // (columns * features)
        if context.distance_bias_HQP is not None:
            tiles = min(tiles, SCORE_CHUNK // (self.num_heads * self.tiling.size * columns))
        return max(1, tiles)

    def chunks(self, context: NearAndFar) -> Iterator[tuple[slice, slice]]:
        """Examples and tiles that are processed at once."""
        batch, tiles, some = context.bias_BMnS.shape[0], self.tiling.tiles, self.tiles_per_chunk(context)
        examples, some = max(1, some // tiles), min(some, tiles)
        for example in range(0, batch, examples):
            for tile in range(0, tiles, some):
                yield slice(example, min(example + examples, batch)), slice(tile, min(tile + some, tiles))

    def is_one_chunk(self, context: NearAndFar) -> bool:
        """Whether all queries of the batch are processed at once."""
        return context.bias_BMnS.shape[0] * self.tiling.tiles <= self.tiles_per_chunk(context)

    def piece(self, context: NearAndFar, examples: slice, tiles: slice) -> NearAndFar:
        """What the queries of these tiles attend to."""
        size, blocks = self.tiling.size, self.tiling.blocks_per_tile
        near = slice(tiles.start * size, tiles.stop * size + 2 * self.tiling.window)
        return NearAndFar(
            context.near_keys_BPF[examples, near],
            context.near_values_BPF[examples, near],
            context.far_keys_BRF[examples],
            context.far_values_BRF[examples],
            context.bias_BMnS[examples, :, tiles.start * blocks : tiles.stop * blocks],
            context.distance_bias_HQP,
        )

    def rows(self, tiles: slice) -> slice:
        """The queries of these tiles."""
        return slice(tiles.start * self.tiling.size, tiles.stop * self.tiling.size)


class _InChunks(torch.autograd.Function):
    """`WindowAttention.whole` in chunks: the backward pass computes columns and weights again."""

    @staticmethod
    def forward(ctx: Any, attention: WindowAttention, query_BNF: Tensor, *context: Any) -> Tensor:
        ctx.attention, ctx.autocast = attention, AutocastState(query_BNF.device)
        ctx.random = RandomState(query_BNF.device) if attention.dropout else None
        ctx.save_for_backward(query_BNF, *context)
        heads_BNF, whole = torch.empty_like(query_BNF), NearAndFar(*context)
        for examples, tiles in attention.chunks(whole):
            rows, piece = attention.rows(tiles), attention.piece(whole, examples, tiles)
            heads_BNF[examples, rows] = attention.whole(query_BNF[examples, rows], piece)[0]
        return heads_BNF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNF: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.random is None:
            return _InChunks._gradients(ctx, grad_BNF)
        with ctx.random.restored():
            return _InChunks._gradients(ctx, grad_BNF)

    @staticmethod
    def _gradients(ctx: Any, grad_BNF: Tensor) -> tuple[Tensor | None, ...]:
        attention, (query_BNF, *tensors) = ctx.attention, ctx.saved_tensors
        tiling, context = attention.tiling, NearAndFar(*tensors)
        grad_query_BNF = torch.empty_like(query_BNF)
        near = [torch.zeros_like(tensor) for tensor in context[:2]]
        # many tiles add to these
        far = [torch.zeros_like(at_least_float32(tensor)) for tensor in context[2:4]]
        gradients = NearAndFar(near[0], near[1], far[0], far[1], context.bias_BMnS, None)
        bias_HQP = None if context.distance_bias_HQP is None else context.distance_bias_HQP.detach()
        grad_bias_HQP = None
        if bias_HQP is not None and ctx.needs_input_grad[-1]:
            grad_bias_HQP = torch.zeros_like(bias_HQP.requires_grad_())
        for examples, tiles in attention.chunks(context):
            rows, piece = attention.rows(tiles), attention.piece(context, examples, tiles)
            leaves = [
                query_BNF[examples, rows],
                tile_columns(piece.near_keys_BPF, piece.far_keys_BRF, tiling),
                tile_columns(piece.near_values_BPF, piece.far_values_BRF, tiling),
            ]
            leaves = [leaf.detach().requires_grad_() for leaf in leaves]
            with torch.enable_grad(), ctx.autocast.restored():
                heads_BNF, _ = attention.attend(*leaves, piece.bias_BMnS, bias_HQP)
            leaves += [] if grad_bias_HQP is None else [bias_HQP]
            grad_query_BNF[examples, rows], key_columns, value_columns, *of_bias = torch.autograd.grad(
                heads_BNF, leaves, grad_BNF[examples, rows]
            )
            if grad_bias_HQP is not None:
                grad_bias_HQP += of_bias[0]
            total = attention.piece(gradients, examples, tiles)
            add_columns(total.near_keys_BPF, total.far_keys_BRF, key_columns, tiling)
            add_columns(total.near_values_BPF, total.far_values_BRF, value_columns, tiling)
            del leaves, heads_BNF, key_columns, value_columns, of_bias  # before the next chunk has its own
        return None, grad_query_BNF, *near, *(total.to(query_BNF.dtype) for total in far), None, grad_bias_HQP
