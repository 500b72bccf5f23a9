"""Window attention: exact for the tokens around a query, in one softmax with the K rows for the rest of the input.

    out_i = softmax([Q_i keys_W(i)ᵀ / √D, Q_i keys_Kᵀ / √D + log mass_i]) [values_W(i); values_K]

The window W(i) holds the tokens of the block of token i and of the blocks on either side, each of `window_length`
tokens, and the first `global_tokens` tokens. `mass_i` says, for each row, how much of it lies outside of W(i): the
number of tokens for `mean`, the share of the row for other projections. A row of which nothing lies outside takes no
part, so an input that fits into the window has ordinary full attention.

With a distance bias, `bias_h(j - i)` is added to the score of query i and token j of its blocks, a learned number for
each head h and distance.

Queries are processed in tiles: see `tiling_linformer.py`, also for the shapes. G key-value heads, D head size, F = G·D.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .multihead_linformer import softmax_attention
from .options_linformer import FIRST_BIAS
from .projection_linformer import at_least_float32, real_tokens_first, split_windows
from .reversible_linformer import AutocastState, RandomState, can_recompute
from .tiling_linformer import Tiling, add_near, all_tiles, near_slices, near_tokens, tile_columns

# on CPUs, elements in the keys of a chunk of tiles, and scores in a chunk where scores are stored: intermediate results
# stay in the processor's cache. Other devices process all tiles at once; the keys of all tiles take the memory of a few
# times the input, like the inner features of a feed-forward. Both compute them again in the backward pass.
KEY_CHUNK, SCORE_CHUNK = 2**20, 2**19


class NearAndFar(NamedTuple):
    """What the queries of a batch attend to, or those of some tiles: then P tokens are near instead of all N."""

    near_keys_BPF: Tensor
    near_values_BPF: Tensor
    far_keys_BRF: Tensor
    far_values_BRF: Tensor
    bias_BMnS: Tensor  # added to the scores, for each block; M is 1, or G if each key-value head has its own E
    distance_bias_HQP: Tensor | None  # added to the scores of the near tokens of each tile, at least float32

    def filled_up(self, rows: int) -> "NearAndFar":
        """With hidden rows after the far rows, up to `rows` in all, or as they are if there are more."""
        missing = rows - self.far_keys_BRF.shape[1]
        if missing < 0:
            return self
        hidden = torch.finfo(self.bias_BMnS.dtype).min / 2
        return self._replace(
            far_keys_BRF=nn.functional.pad(self.far_keys_BRF, (0, 0, 0, missing)),
            far_values_BRF=nn.functional.pad(self.far_values_BRF, (0, 0, 0, missing)),
            bias_BMnS=nn.functional.pad(self.bias_BMnS, (0, missing), value=hidden),
        )


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
                distance = head // 2 % self.window_length + 1  # which all queries see, except at the ends of the input
                self.weight[self.longest + (distance if head % 2 else -distance), head] = FIRST_BIAS

    def resized_weight(self, other: Tensor | None) -> Tensor:
        """The weight of a distance bias for another window, with zeros for distances that it does not have."""
        if other is None:
            return torch.zeros_like(self.weight)
        longer = self.longest - other.shape[0] // 2
        return nn.functional.pad(other, (0, 0, longer, longer))

    def forward(self, tiling: Tiling) -> Tensor:
        """(H, Q, near tokens of a tile), at least float32. Those beyond the window are hidden later, and arbitrary."""
        device = self.weight.device
        near_P = torch.arange(tiling.near, device=device) - tiling.window
        distance_QP = near_P - torch.arange(tiling.size, device=device)[:, None]
        number_QP = distance_QP.clamp(-self.longest, self.longest) + self.longest
        # its gradient is a long sum
        return nn.functional.embedding(number_QP, at_least_float32(self.weight)).movedim(-1, 0)

    def extra_repr(self) -> str:
        return f"window_length={self.window_length}, num_heads={self.weight.shape[1]}"


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
    # position of the token with each rank
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
        # torch.func cannot transform a Function that recomputes
        if can_recompute() and self.fused and not torch._C._are_functorch_transforms_active():
            return _InChunks.apply(self, query_BNF, *context)
        return self.whole(query_BNF, context)[0]

    def whole(self, query_BNF: Tensor, context: NearAndFar, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """All tiles at once: heads, and on request the (B, H, N, S) weights."""
        near_keys_BPF, near_values_BPF = (near_tokens(tokens, self.tiling) for tokens in context[:2])
        return self.attend(query_BNF, NearAndFar(near_keys_BPF, near_values_BPF, *context[2:]), need_weights)

    def attend(self, query_BNF: Tensor, piece: NearAndFar, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """The queries of some tiles attend to what is near and far."""
        keys_BTSF = tile_columns(piece.near_keys_BPF, piece.far_keys_BRF, self.tiling)
        values_BTSF = tile_columns(piece.near_values_BPF, piece.far_values_BRF, self.tiling)
        query_BTQF = split_windows(query_BNF, self.tiling.size)
        heads_XHQD, weights_XHQS = softmax_attention(
            self._heads(query_BTQF, self.num_heads),
            self._heads(keys_BTSF, self.num_kv_heads),
            self._heads(values_BTSF, self.num_kv_heads),
            self._bias(piece),
            self.dropout,
            need_weights,
            self._is_fused(piece.distance_bias_HQP),
        )
        tiles = query_BTQF.shape[:2]
        heads_BNF = heads_XHQD.transpose(1, 2).flatten(2).unflatten(0, tiles).flatten(1, 2)
        if weights_XHQS is None:
            return heads_BNF, None
        return heads_BNF, weights_XHQS.unflatten(0, tiles).transpose(1, 2).flatten(2, 3)

    def has_gradients_by_products(self, query_BNF: Tensor, context: NearAndFar) -> bool:
        """Whether the backward pass uses `gradients`, which stores the scores of a tile: on CPUs, up to 4 MiB of them.

        In half precision, stored scores have large errors; the fused kernel keeps them in float32. With a distance
        bias, scores are stored anyway.
        """
        if self.dropout or query_BNF.device.type != "cpu" or query_BNF.dtype not in (torch.float32, torch.float64):
            return False
        return context.distance_bias_HQP is not None or self._scores_of_tile(context) <= 2 * SCORE_CHUNK

    def _is_fused(self, distance_bias_HQP: Tensor | None) -> bool:
        """Whether to use the fused kernel, which has no gradient for the bias.

        With dropout, the backward pass must draw its numbers in the same way as the forward pass.
        """
        if not self.fused or distance_bias_HQP is None:
            return self.fused
        # `requires_grad` is not reliable under torch.compile and torch.func
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return False
        return not (distance_bias_HQP.requires_grad and (torch.is_grad_enabled() or self.dropout > 0))

    def _heads(self, features_BTSF: Tensor, heads: int) -> Tensor:
        """(B, T, S, F) to (B·T, H, S, D)."""
        return self._every_head(all_tiles(features_BTSF).unflatten(-1, (heads, -1)).transpose(1, 2), heads)

    def _block_bias(self, piece: NearAndFar) -> Tensor:
        """What is added to the scores of all queries of a block, (B, 1 or H, T, 1 or Q, S)."""
        blocks, bias_BMnS = self.tiling.blocks_per_tile, piece.bias_BMnS
        if bias_BMnS.shape[1] > 1:
            bias_BMnS = bias_BMnS.repeat_interleave(self._group, dim=1)
        if blocks == 1:
            return bias_BMnS.unsqueeze(3)
        return split_windows(bias_BMnS, blocks).repeat_interleave(self.tiling.window, dim=3)

    def _bias(self, piece: NearAndFar) -> Tensor:
        """What is added to the scores, (B·T, 1 or H, 1 or Q, S)."""
        bias_XMQS = all_tiles(self._block_bias(piece).transpose(1, 2))
        if piece.distance_bias_HQP is None:
            return bias_XMQS
        far = bias_XMQS.shape[-1] - self.tiling.near
        return bias_XMQS + nn.functional.pad(piece.distance_bias_HQP.to(bias_XMQS.dtype), (0, far))

    @property
    def _group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def _scores_of_tile(self, context: NearAndFar) -> int:
        return self.num_heads * self.tiling.size * context.bias_BMnS.shape[-1]

    def tiles_per_chunk(self, context: NearAndFar, gradients_by_products: bool = False) -> int:
        """The number of tiles, of all examples, that are processed at once."""
        if context.near_keys_BPF.device.type != "cpu":
            return context.bias_BMnS.shape[0] * self.tiling.tiles
        tiles = SCORE_CHUNK // self._scores_of_tile(context)
        if not gradients_by_products:
            keys = KEY_CHUNK // (context.bias_BMnS.shape[-1] * context.near_keys_BPF.shape[-1])
            tiles = keys if context.distance_bias_HQP is None else min(keys, tiles)
        return max(1, tiles)

    def chunks(self, context: NearAndFar, gradients_by_products: bool = False) -> Iterator[tuple[slice, slice]]:
        """Examples and tiles that are processed at once."""
        batch, tiles = context.bias_BMnS.shape[0], self.tiling.tiles
        some = self.tiles_per_chunk(context, gradients_by_products)
        examples, some = max(1, some // tiles), min(some, tiles)
        for example in range(0, batch, examples):
            for tile in range(0, tiles, some):
                yield slice(example, min(example + examples, batch)), slice(tile, min(tile + some, tiles))

    def is_one_chunk(self, context: NearAndFar) -> bool:
        """Whether all queries of the batch are processed at once."""
        return context.bias_BMnS.shape[0] * self.tiling.tiles <= self.tiles_per_chunk(context)

    def piece(self, context: NearAndFar, examples: slice, tiles: slice) -> NearAndFar:
        """What the queries of these tiles attend to."""
        blocks = self.tiling.blocks_per_tile
        return NearAndFar(
            near_tokens(context.near_keys_BPF[examples], self.tiling, tiles),
            near_tokens(context.near_values_BPF[examples], self.tiling, tiles),
            context.far_keys_BRF[examples],
            context.far_values_BRF[examples],
            context.bias_BMnS[examples, :, tiles.start * blocks : tiles.stop * blocks],
            context.distance_bias_HQP,
        )

    def queries(self, tiles: slice) -> slice:
        """The queries of these tiles."""
        return slice(tiles.start * self.tiling.size, tiles.stop * self.tiling.size)

    def gradients(self, query_BNF: Tensor, piece: NearAndFar, grad_BNF: Tensor) -> tuple[Tensor, NearAndFar]:
        """The gradients of `attend` without dropout, for the queries and for the piece, as matrix products.

        Faster than autograd, because only two tensors hold scores (docs/log.md). X = B·H·T, Y = B·H, L = T·Q.
        """
        batch, length = query_BNF.shape[:2]
        scale = (query_BNF.shape[-1] // self.num_heads) ** -0.5
        query_YLD, grad_YLD = self._by_head(query_BNF * scale, self.num_heads), self._by_head(grad_BNF, self.num_heads)
        query_XQD, grad_XQD = (split_windows(each, self.tiling.size).flatten(0, 1) for each in (query_YLD, grad_YLD))
        far_keys_YRD, far_values_YRD = (self._by_head(each, self.num_kv_heads) for each in piece[2:4])
        near_keys_XPD, near_values_XPD = (self._near_by_head(each) for each in piece[:2])

        # weights = softmax(Q Kᵀ / √D + bias)
        tiles, columns = length // self.tiling.size, piece.bias_BMnS.shape[-1]
        scores_BHTQS = query_BNF.new_empty(batch, self.num_heads, tiles, self.tiling.size, columns)
        scores_BHTQS.copy_(self._block_bias(piece))
        if piece.distance_bias_HQP is not None:
            scores_BHTQS[..., : self.tiling.near] += piece.distance_bias_HQP[:, None]
        near_scores_XQP, far_scores_YLR = self._near_and_far(scores_BHTQS)
        near_scores_XQP.baddbmm_(query_XQD, near_keys_XPD.mT)
        far_scores_YLR.baddbmm_(query_YLD, far_keys_YRD.mT)
        weights_BHTQS = scores_BHTQS.softmax(dim=-1)
        near_weights_XQP, far_weights_YLR = self._near_and_far(weights_BHTQS)
        grad_near_values_XPD, grad_far_values_YRD = near_weights_XQP.mT @ grad_XQD, far_weights_YLR.mT @ grad_YLD

        # the scores become grad_weights, then grad_scores = weights · (grad_weights - Σ weights · grad_weights)
        torch.bmm(grad_XQD, near_values_XPD.mT, out=near_scores_XQP)
        torch.bmm(grad_YLD, far_values_YRD.mT, out=far_scores_YLR)
        scores_BHTQS.mul_(weights_BHTQS)
        scores_BHTQS.addcmul_(weights_BHTQS, scores_BHTQS.sum(dim=-1, keepdim=True), value=-1)
        del weights_BHTQS, near_weights_XQP, far_weights_YLR  # the largest tensors
        grad_query_YLD = (near_scores_XQP @ near_keys_XPD).view(query_YLD.shape)
        grad_query_YLD.baddbmm_(far_scores_YLR, far_keys_YRD).mul_(scale)
        grad_distance_bias_HQP = None
        if piece.distance_bias_HQP is not None:
            grad_distance_bias_HQP = scores_BHTQS[..., : self.tiling.near].sum(dim=(0, 2))
        return self._features(grad_query_YLD, batch, self.num_heads), NearAndFar(
            self._near_features(near_scores_XQP.mT @ query_XQD, batch),
            self._near_features(grad_near_values_XPD, batch),
            self._features(far_scores_YLR.mT @ query_YLD, batch, self.num_kv_heads),
            self._features(grad_far_values_YRD, batch, self.num_kv_heads),
            piece.bias_BMnS,  # has no gradient
            grad_distance_bias_HQP,
        )

    def gradients_by_autograd(
        self, query_BNF: Tensor, piece: NearAndFar, grad_BNF: Tensor
    ) -> tuple[Tensor, NearAndFar]:
        """The same by autograd, for fused kernels of GPUs and of half precision, and with dropout."""
        names = [name for name in piece._fields if name != "bias_BMnS" and getattr(piece, name) is not None]
        if piece.distance_bias_HQP is not None and not piece.distance_bias_HQP.requires_grad:
            names.remove("distance_bias_HQP")
        leaves = [each.detach().requires_grad_() for each in (query_BNF, *(getattr(piece, name) for name in names))]
        with torch.enable_grad():
            heads_BNF, _ = self.attend(leaves[0], piece._replace(**dict(zip(names, leaves[1:], strict=True))))
        grad_query_BNF, *others = torch.autograd.grad(heads_BNF, leaves, grad_BNF)
        return grad_query_BNF, piece._replace(**dict(zip(names, others, strict=True)))

    def _by_head(self, features_BLF: Tensor, heads: int) -> Tensor:
        """(B, L, heads·D) to (B·H, L, D)."""
        return self._every_head(features_BLF.unflatten(-1, (heads, -1)).transpose(1, 2), heads).flatten(0, 1)

    def _features(self, features_YLD: Tensor, batch: int, heads: int) -> Tensor:
        """The backward pass of `_by_head`."""
        return self._sum_of_groups(features_YLD.unflatten(0, (batch, -1)), heads).transpose(1, 2).flatten(2)

    def _near_by_head(self, near_BPF: Tensor) -> Tensor:
        """The near tokens of each tile, (B·H·T, near, D): a view for one tile of one example."""
        tiles_BTGDP = near_BPF.unfold(1, self.tiling.near, self.tiling.size).unflatten(2, (self.num_kv_heads, -1))
        return self._every_head(tiles_BTGDP.permute(0, 2, 1, 4, 3), self.num_kv_heads).flatten(0, 2)

    def _near_features(self, tiles_XPD: Tensor, batch: int) -> Tensor:
        """The backward pass of `_near_by_head`, (B, P, F)."""
        tiles_BHTPD = tiles_XPD.unflatten(0, (batch, self.num_heads, -1))
        tiles_BTPF = self._sum_of_groups(tiles_BHTPD, self.num_kv_heads).permute(0, 2, 3, 1, 4).flatten(3)
        if tiles_BTPF.shape[1] == 1:
            return tiles_BTPF[:, 0]
        tokens = tiles_BTPF.shape[1] * self.tiling.size + 2 * self.tiling.window
        near_BPF = tiles_BTPF.new_zeros(batch, tokens, tiles_BTPF.shape[-1])
        add_near(near_BPF, tiles_BTPF, self.tiling)
        return near_BPF

    def _every_head(self, x_BG: Tensor, heads: int) -> Tensor:
        """Repeat key-value heads for their group of heads."""
        return x_BG if heads == self.num_heads else x_BG.repeat_interleave(self._group, dim=1)

    def _sum_of_groups(self, x_BH: Tensor, heads: int) -> Tensor:
        """The backward pass of `_every_head`."""
        return x_BH if heads == self.num_heads else x_BH.unflatten(1, (heads, -1)).sum(dim=2)

    def _near_and_far(self, scores_BHTQS: Tensor) -> tuple[Tensor, Tensor]:
        """Views: (B·H·T, Q, near) for each tile, (B·H, T·Q, R) for all, because they have the same far rows."""
        near = self.tiling.near
        return scores_BHTQS.flatten(0, 2)[..., :near], scores_BHTQS.flatten(0, 1).flatten(1, 2)[..., near:]


class _InChunks(torch.autograd.Function):
    """`WindowAttention.whole` in chunks: the backward pass computes the weights again."""

    @staticmethod
    def forward(ctx: Any, attention: WindowAttention, query_BNF: Tensor, *context: Any) -> Tensor:
        ctx.attention, ctx.autocast = attention, AutocastState(query_BNF.device)
        ctx.random = RandomState(query_BNF.device) if attention.dropout else None
        ctx.save_for_backward(query_BNF, *context)
        heads_BNF, whole = torch.empty_like(query_BNF), NearAndFar(*context)
        for examples, tiles in attention.chunks(whole):
            queries, piece = attention.queries(tiles), attention.piece(whole, examples, tiles)
            heads_BNF[examples, queries] = attention.attend(query_BNF[examples, queries], piece)[0]
        return heads_BNF

    @staticmethod
    def backward(ctx: Any, grad_BNF: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return None, *_InChunks._gradients_with_graph(ctx, grad_BNF)
        attention, (query_BNF, *tensors) = ctx.attention, ctx.saved_tensors
        context = NearAndFar(*tensors)
        by_products = attention.has_gradients_by_products(query_BNF, context)
        gradients = attention.gradients if by_products else attention.gradients_by_autograd
        grad_query_BNF = torch.empty_like(query_BNF)
        grad_near = [torch.zeros_like(tensor) for tensor in context[:2]]
        # many tiles add to these
        grad_far = [torch.zeros_like(at_least_float32(tensor)) for tensor in context[2:4]]
        grad_bias_HQP = None
        if context.distance_bias_HQP is not None and ctx.needs_input_grad[-1]:
            grad_bias_HQP = torch.zeros_like(context.distance_bias_HQP)
        precision = torch.autocast("cpu", enabled=False) if by_products else _InChunks._as_in_the_forward_pass(ctx)
        with precision:
            for examples, tiles in attention.chunks(context, by_products):
                queries, piece = attention.queries(tiles), attention.piece(context, examples, tiles)
                grad_query_piece, grad_piece = gradients(
                    query_BNF[examples, queries], piece, grad_BNF[examples, queries]
                )
                grad_query_BNF[examples, queries] = grad_query_piece
                tokens, of_piece = near_slices(attention.tiling, tiles, grad_near[0].shape[1])
                for whole, part in zip(grad_near, grad_piece[:2], strict=True):
                    whole[examples, tokens] += part[:, of_piece]
                for whole, part in zip(grad_far, grad_piece[2:4], strict=True):
                    whole[examples] += part
                if grad_bias_HQP is not None and grad_piece.distance_bias_HQP is not None:
                    grad_bias_HQP += grad_piece.distance_bias_HQP
                del piece, grad_query_piece, grad_piece, part  # before the next chunk has its own
        grad_far = [whole.to(query_BNF.dtype) for whole in grad_far]
        return None, grad_query_BNF, *grad_near, *grad_far, None, grad_bias_HQP

    @staticmethod
    def _gradients_with_graph(ctx: Any, grad_BNF: Tensor) -> Iterator[Tensor | None]:
        """For second derivatives: all tiles at once, by autograd."""
        if ctx.attention.dropout:
            raise RuntimeError(
                f"second derivatives of attention with a window and dropout={ctx.attention.dropout} need fused=False, "
                "because the weights are dropped in chunks otherwise; or call eval()"
            )
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        leaves = [each for each, is_needed in zip(inputs, needed, strict=True) if is_needed]
        with ctx.autocast.restored():
            heads_BNF, _ = ctx.attention._replace(fused=False).whole(inputs[0], NearAndFar(*inputs[1:]))
            gradients = iter(torch.autograd.grad(heads_BNF, leaves, grad_BNF, create_graph=True))
        return (next(gradients) if is_needed else None for is_needed in needed)

    @staticmethod
    @contextmanager
    def _as_in_the_forward_pass(ctx: Any) -> Iterator[None]:
        with nullcontext() if ctx.random is None else ctx.random.restored(), ctx.autocast.restored():
            yield
