"""A stack of attention and feed-forward layers over features: (B, N, C) to (B, N, C)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention_linformer import LinformerAttention
from .int8_linformer import Int8Linear
from .multihead_linformer import is_plain_linear, linear_into, make_shared_projection
from .options_linformer import (
    CHECKPOINTING_OF_REVERSIBLE,
    POST_NORM_IS_NOT_REVERSIBLE,
    boolean,
    checked_options,
    choice,
    positive_integer,
    probability,
)
from .packing_linformer import Packing
from .projection_linformer import Projection
from .reversible_linformer import Sublayer, can_recompute, reversible
from .validation_linformer import boolean_mask, check_features, compute_dtype, computes_in_chunks

Attended = tuple[Tensor, Tensor | None]  # the output of a sublayer, and its attention weights on request
FEED_FORWARDS = ("gelu", "relu", "gated", "none")

# rows per chunk on CPUs when no gradient is needed: their inner features, the widest of a model, stay in the cache
ROW_CHUNK = 512


def feed_forward(x_BNC: Tensor, inner: nn.Linear, activation: Callable[[Tensor], Tensor], outer: nn.Linear) -> Tensor:
    """`activation(X W_1 + b_1) W_2 + b_2`."""
    rows_XC = x_BNC.flatten(0, -2)
    is_whole = not computes_in_chunks(x_BNC) or rows_XC.shape[0] <= ROW_CHUNK
    if is_whole or not all(is_plain_linear(each) or isinstance(each, Int8Linear) for each in (inner, outer)):
        return outer(activation(inner(x_BNC)))
    output_XC = x_BNC.new_empty(rows_XC.shape[0], outer.out_features, dtype=compute_dtype(x_BNC))
    for first in range(0, rows_XC.shape[0], ROW_CHUNK):
        rows = slice(first, first + ROW_CHUNK)
        linear_into(output_XC[rows], outer, activation(inner(rows_XC[rows])))
    return output_XC.unflatten(0, x_BNC.shape[:-1])


class FeedForward(nn.Module):
    """`activation(X W_1 + b_1) W_2 + b_2`; "gated" multiplies the GELU of half the inner features by the other half."""

    def __init__(self, embed_dim: int, inner_dim: int, kind: str, dropout: float):
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(embed_dim, 2 * inner_dim if kind == "gated" else inner_dim)
        self.outer = nn.Linear(inner_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BNC: Tensor) -> Tensor:
        return self.dropout(feed_forward(x_BNC, self.inner, self._activation, self.outer))

    def _activation(self, inner: Tensor) -> Tensor:
        match self.kind:
            case "gelu":
                inner = F.gelu(inner)
            case "relu":
                inner = F.relu(inner)
            case _:
                gate, inner = inner.chunk(2, dim=-1)
                inner = F.gelu(gate) * inner
        return self.dropout(inner)


class LinformerEncoderLayer(nn.Module):
    """Attention and feed-forward, each with residual and layer norm."""

    def __init__(self, attention: LinformerAttention, feed_forward: FeedForward | None, norm_first: bool):
        super().__init__()
        self.norm_first = norm_first
        self.attention = attention
        self.attention_norm = nn.LayerNorm(attention.embed_dim)
        self.feed_forward = feed_forward
        self.feed_forward_norm = nn.LayerNorm(attention.embed_dim) if feed_forward is not None else None

    def forward(
        self,
        x_BNC: Tensor,
        mask_BN: Tensor | Packing | None = None,
        projection: Projection | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        all_weights = []
        for norm, function in self.sublayers(mask_BN, projection, need_weights):
            output_BNC, weights = function(norm(x_BNC) if self.norm_first else x_BNC)
            x_BNC = x_BNC + output_BNC if self.norm_first else norm(x_BNC + output_BNC)
            all_weights.append(weights)
        return x_BNC, all_weights[0]

    def sublayers(
        self, mask_BN: Tensor | Packing | None, projection: Projection | None, need_weights: bool
    ) -> list[tuple[nn.LayerNorm, Callable[[Tensor], Attended]]]:
        """The functions of this layer, from first to last, and their layer norms."""

        def attend(x_BNC: Tensor) -> Attended:
            output = self.attention(x_BNC, mask=mask_BN, projection=projection, need_weights=need_weights)
            return output if need_weights else (output, None)

        if (feed_forward := self.feed_forward) is None or self.feed_forward_norm is None:
            return [(self.attention_norm, attend)]
        return [(self.attention_norm, attend), (self.feed_forward_norm, lambda x_BNC: (feed_forward(x_BNC), None))]


class LinformerEncoder(nn.Module):
    """A stack of Linformer layers over features.

    >>> encoder = LinformerEncoder(embed_dim=64, num_heads=4, depth=2, max_length=1024, projected_length=32)
    >>> encoder(torch.randn(2, 1000, 64)).shape
    torch.Size([2, 1000, 64])

    - `projected_length`: one number, or one per layer (higher layers need less).
    - `window_length`, `global_tokens`, `distance_bias`: exact attention to the tokens around each token and to the
      first tokens, in one softmax with the K rows; see `LinformerAttention`.
    - `sharing="layerwise"`: all layers share one matrix, which the encoder owns; layers with a smaller
      `projected_length` use a part of it (`Projection.cut`).
    - `feed_forward`: "gelu", "relu", "gated" or "none".
    - `dropout`: on the attention weights. `feed_forward_dropout`: on the inner features and the output of the
      feed-forward.
    - `norm_first`: pre-norm layers; otherwise post-norm.
    - `reversible`: pre-norm layers over two streams, whose activations are recomputed in the backward pass.
    - `final_norm`: layer norm after the last pre-norm layer (default); False leaves it out.
    """

    @checked_options
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        depth: int,
        max_length: int = 512,
        projected_length: int | Sequence[int] = 128,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        projection: str = "linear",
        sharing: str = "headwise",
        rescale: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        window_length: int = 0,
        global_tokens: int = 0,
        distance_bias: bool = False,
        norm_first: bool = True,
        final_norm: bool | None = None,
        feed_forward: str = "gelu",
        feed_forward_dim: int | None = None,
        feed_forward_dropout: float = 0.0,
        gradient_checkpointing: bool = False,
        reversible: bool = False,
    ):
        super().__init__()
        positive_integer("embed_dim", embed_dim)
        lengths = self._projected_lengths(projected_length, positive_integer("depth", depth))
        choice("feed_forward", feed_forward, FEED_FORWARDS)
        if feed_forward == "none" and feed_forward_dim is not None:
            raise ValueError(
                f"feed_forward_dim is {feed_forward_dim} but feed_forward='none' has no inner features; drop one of "
                "them"
            )
        inner_dim = (
            4 * embed_dim if feed_forward_dim is None else positive_integer("feed_forward_dim", feed_forward_dim)
        )
        probability("feed_forward_dropout", feed_forward_dropout)
        boolean("norm_first", norm_first)
        has_norm = norm_first if final_norm is None else boolean("final_norm", final_norm)
        if has_norm and not norm_first:
            raise ValueError(
                "final_norm=True with norm_first=False, but a post-norm layer ends with its own layer norm; drop one "
                "of them"
            )
        if boolean("reversible", reversible) and not norm_first:
            raise ValueError(POST_NORM_IS_NOT_REVERSIBLE)
        if reversible and gradient_checkpointing:
            raise ValueError(CHECKPOINTING_OF_REVERSIBLE)
        self.reversible = reversible
        self.embed_dim = embed_dim
        self.gradient_checkpointing = boolean("gradient_checkpointing", gradient_checkpointing)
        layers = [
            LinformerEncoderLayer(
                LinformerAttention(
                    embed_dim,
                    num_heads,
                    max_length=max_length,
                    projected_length=length,
                    head_dim=head_dim,
                    num_kv_heads=num_kv_heads,
                    projection=projection,
                    sharing=sharing,
                    rescale=rescale,
                    dropout=dropout,
                    bias=bias,
                    window_length=window_length,
                    global_tokens=global_tokens,
                    distance_bias=distance_bias,
                ),
                None
                if feed_forward == "none"
                else FeedForward(embed_dim, inner_dim, feed_forward, feed_forward_dropout),
                norm_first,
            )
            for length in lengths
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(embed_dim) if has_norm else None
        Projection.check_lengths(projection, lengths, sharing)
        self.projection = make_shared_projection(layer.attention for layer in layers)

    @staticmethod
    def _projected_lengths(projected_length: int | Sequence[int], depth: int) -> list[int]:
        if hasattr(projected_length, "tolist"):  # arrays and tensors
            projected_length = projected_length.tolist()
        if not isinstance(projected_length, list | tuple):
            return [cast(int, projected_length)] * depth
        if len(projected_length) != depth:
            raise ValueError(
                f"projected_length has {len(projected_length)} numbers but depth is {depth}; "
                "pass one number, or one per layer"
            )
        return list(projected_length)

    def forward(self, x: Tensor, mask: Tensor | None = None, need_weights: bool = False):
        """(B, N, C) to (B, N, C). `mask` (B, N) is True at real tokens; the output at the others is zero.

        `need_weights` also returns the attention weights, one tensor per layer, as `LinformerAttention` does.
        """
        check_features("x", x, self.embed_dim, next(self.parameters()))
        packing = None
        if mask is not None:
            mask = boolean_mask("mask", mask, x)
            packing = None if need_weights else Packing.of(mask, self.embed_dim)
            # padding may hold anything, and as queries it would reach the gradients of the weights
            x = x.masked_fill(~mask[..., None], 0) if packing is None else packing.pack(x)
        run = self._run_reversible if self.reversible else self._run
        x, all_weights = run(x, packing or mask, need_weights)
        x = x if self.norm is None else self.norm(x)
        if packing is not None:
            x = packing.unpack(x)
        elif mask is not None:
            x = x.masked_fill(~mask[..., None], 0)  # as if packed
        return (x, all_weights) if need_weights else x

    def _run(self, x_BNC: Tensor, mask_BN: Tensor | Packing | None, need_weights: bool) -> tuple[Tensor, list[Any]]:
        all_weights = []
        for layer in self.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x_BNC, weights = checkpoint(layer, x_BNC, mask_BN, self.projection, need_weights, use_reentrant=False)
            else:
                x_BNC, weights = layer(x_BNC, mask_BN, self.projection, need_weights)
            all_weights.append(weights)
        return x_BNC, all_weights

    def _run_reversible(
        self, x_BNC: Tensor, mask_BN: Tensor | Packing | None, need_weights: bool
    ) -> tuple[Tensor, list[Any]]:
        """The equations of `reversible_linformer.py`."""
        parts = [
            (layer, norm, function)
            for layer in self.layers
            for norm, function in cast(LinformerEncoderLayer, layer).sublayers(mask_BN, self.projection, need_weights)
        ]
        if can_recompute() and not need_weights:
            shared = [] if self.projection is None else list(self.projection.parameters())
            sublayers = [
                Sublayer(partial(branch, norm, function), [*layer.parameters(), *shared])
                for layer, norm, function in parts
            ]
            return reversible(x_BNC, sublayers), []
        first_BNC, second_BNC, all_weights = x_BNC, x_BNC, []
        for _, norm, function in parts:
            output_BNC, weights = function(norm(second_BNC))
            first_BNC, second_BNC = second_BNC, first_BNC + output_BNC
            if weights is not None:
                all_weights.append(weights)
        return first_BNC + second_BNC, all_weights


def branch(norm: nn.LayerNorm, function: Callable[[Tensor], Attended], x_BNC: Tensor) -> Tensor:
    """What a pre-norm sublayer adds to its input."""
    return function(norm(x_BNC))[0]
