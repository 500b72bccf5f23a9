"""What all our attentions share: the softmax, the four linear layers, the sizes of heads, and the projection.

Shapes: B batch, L queries, K rows, M matrices, H heads, G key-value heads, D head size, C model size.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .options_linformer import boolean, check_projection_options, positive_integer, probability
from .projection_linformer import Projection, make_projection


def softmax_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    present: Tensor | None,
    dropout: float,
    need_weights: bool,
    fused: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`softmax(query keysᵀ / √D) values` over (..., L, D) and (..., K, D); the weights, before dropout, on request."""
    if fused and not need_weights:  # the same lines as below, but the L × K weights are never stored
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=present, dropout_p=dropout), None
    scores = query @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if present is not None:
        scores = scores.masked_fill(~present, -torch.inf)
    weights = scores.softmax(dim=-1).to(values.dtype)
    return F.dropout(weights, dropout) @ values, weights if need_weights else None


def is_plain_linear(linear: nn.Module) -> bool:
    """Whether `weight` and `bias` are the whole truth, so that they may be used without calling the layer.

    Not so for adapters, which wrap the layer, nor for pruning, weight norm, offloading or anything else that hooks into the call.
    """
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return type(linear) is nn.Linear and not any(hooks) and "forward" not in linear.__dict__


def linear_into(out: Tensor, linear: nn.Linear, x: Tensor) -> Tensor:
    """`linear(x)` in `out` (..., features), a contiguous block of rows: written there at once where nothing forbids it."""
    if not is_plain_linear(linear) or not x.dtype == linear.weight.dtype == out.dtype:
        return out.copy_(linear(x))
    rows, places, weight = x.flatten(0, -2), out.view(-1, out.shape[-1]), linear.weight.t()
    if linear.bias is None:
        torch.mm(rows, weight, out=places)
    else:
        torch.addmm(linear.bias, rows, weight, out=places)
    return out


class MultiHeadLayer(nn.Module):
    """What all our attentions share: W_Q, W_K, W_V, W_O, the sizes of heads, and one projection, owned or handed in."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        max_length: int,
        projected_length: int,
        head_dim: int | None,
        num_kv_heads: int | None,
        projection: str,
        sharing: str,
        rescale: bool,
        dropout: float,
        bias: bool,
    ):
        super().__init__()
        self.embed_dim = positive_integer("embed_dim", embed_dim)
        self.num_heads = positive_integer("num_heads", num_heads)
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}; "
                "choose sizes that divide, or give head_dim yourself"
            )
        self.head_dim = positive_integer("head_dim", embed_dim // num_heads if head_dim is None else head_dim)
        self.num_kv_heads = positive_integer("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads} is not divisible by num_kv_heads={num_kv_heads}: each key-value head serves the same "
                f"number of heads; choose one of {', '.join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)}"
            )
        boolean("bias", bias)
        self.sharing = sharing
        self.dropout = probability("dropout", dropout)

        self.query = nn.Linear(embed_dim, self.num_heads * self.head_dim, bias=bias)
        self.key = nn.Linear(embed_dim, self.num_kv_heads * self.head_dim, bias=bias)
        self.value = nn.Linear(embed_dim, self.num_kv_heads * self.head_dim, bias=bias)
        self.output = nn.Linear(self.num_heads * self.head_dim, embed_dim, bias=bias)
        check_projection_options(projection, max_length, projected_length, sharing, rescale)
        options: dict[str, Any] = {
            "projection": projection,
            "embed_dim": self.embed_dim,
            "max_length": max_length,
            "projected_length": projected_length,
            "sharing": sharing,
            "rescale": rescale,
        }
        # what layers share has one owner, who hands it down; registered in each layer it could not be saved
        self.needed = options if sharing == "layerwise" else None
        self.projection = None if sharing == "layerwise" else make_projection(num_kv_heads=self.num_kv_heads, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh weights, as in `torch.nn.MultiheadAttention`; the projection has a `reset_parameters` of its own."""
        for linear in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def _like(self, x: Tensor) -> Tensor:
        """A tensor of the dtype and device of this layer's weights; `x` itself where they have none, as when quantised."""
        return next((parameter for parameter in self.parameters() if parameter.is_floating_point()), x)

    @property
    def fused(self) -> bool:
        """Whether softmax and products are one operation; otherwise the weights are stored on the way, as the paper's were."""
        return True

    def resize(self, max_length: int) -> None:
        """Let E and F reach over `max_length` tokens: see `Projection.resized`."""
        if self.projection is not None:
            self.projection = self.projection.resized(max_length)
        elif self.needed is not None:
            self.needed["max_length"] = max_length

    def _projection(self, handed_in: Projection | None) -> Projection:
        """The projection to use: this layer's own, or under `sharing="layerwise"` the one handed in."""
        if self.projection is not None:
            if handed_in is not None:
                raise ValueError(
                    f"a projection was handed in, but with sharing={self.sharing!r} this layer owns one; "
                    "leave it out, or build the layer with sharing='layerwise'"
                )
            return self.projection
        if handed_in is None or not hasattr(handed_in, "of_keys"):  # adapters wrap it, and are no Projection
            raise ValueError(
                f"sharing='layerwise' needs the shared projection, but got {handed_in!r}; build one with "
                "make_projection(..., sharing='layerwise') and pass it as projection= to every layer"
            )
        if handed_in.made_with is not None and self.needed is not None:
            for name, needed in self.needed.items():
                if handed_in.made_with[name] != needed:
                    raise ValueError(
                        f"the projection handed in was made with {name}={handed_in.made_with[name]!r} but this layer needs "
                        f"{name}={needed!r}; make it with the layer's own options"
                    )
        for tensor in (*handed_in.parameters(), *handed_in.buffers()):
            own = self._like(tensor)
            if (tensor.device, tensor.dtype) != (own.device, own.dtype):
                raise ValueError(
                    f"the projection handed in is {tensor.dtype} on {tensor.device} but this layer {own.dtype} on {own.device}; "
                    "convert one of them with .to(device, dtype)"
                )
        return handed_in

    def _project_rows(self, linear: nn.Linear, rows_BMKC: Tensor) -> Tensor:
        """`rows · W + b` per key-value head, (B, G, K, D), where M is 1 (rows for all heads) or G (rows for each)."""
        per_head = (self.num_kv_heads, self.head_dim)
        if rows_BMKC.shape[1] == 1:
            return linear(rows_BMKC[:, 0]).unflatten(-1, per_head).transpose(1, 2)
        if is_plain_linear(linear):
            weight_GDC, bias = linear.weight.unflatten(0, per_head), linear.bias
            features_BGKD = torch.einsum("bgkc,gdc->bgkd", rows_BMKC, weight_GDC)
            return (
                features_BGKD
                if bias is None
                else features_BGKD + bias.unflatten(0, per_head)[:, None].to(features_BGKD.dtype)
            )
        # what cannot be cut by heads is run whole on each head's rows, and that head's part kept
        return linear(rows_BMKC).unflatten(-1, per_head).diagonal(dim1=1, dim2=3).movedim(-1, 1)

    def _for_every_head(self, features_BGKD: Tensor) -> Tensor:
        """(B, G, K, D) to (B, H, K, D)."""
        served = self.num_heads // self.num_kv_heads
        return (
            features_BGKD if served == 1 else features_BGKD.repeat_interleave(served, dim=1)
        )  # which copies even for 1

    def _dropout_now(self) -> float:
        return self.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"num_kv_heads={self.num_kv_heads}, sharing={self.sharing!r}, dropout={self.dropout}"
        )
