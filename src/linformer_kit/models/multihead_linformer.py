"""What all our attentions share: the softmax, the four linear layers, the sizes of heads, and the projection.

Shapes: B batch, L queries, K rows, M matrices, H heads, G key-value heads, D head size, C model size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .projection_linformer import Projection, check_projection_options, make_projection
from .validation_linformer import boolean, positive_integer, probability


def softmax_attention(
    query: Tensor, keys: Tensor, values: Tensor, present: Tensor | None, dropout: float, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """`softmax(query keysᵀ / √D) values` over (..., L, D) and (..., K, D); the weights, before dropout, on request."""
    if not need_weights:  # the same line, fused: the L × K weights are never stored
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=present, dropout_p=dropout), None
    scores = query @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if present is not None:
        scores = scores.masked_fill(~present, -torch.inf)
    weights = scores.softmax(dim=-1).to(values.dtype)
    return F.dropout(weights, dropout) @ values, weights


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
                f"num_heads={num_heads} is not divisible by num_kv_heads={num_kv_heads}; "
                "each key-value head serves the same number of heads"
            )
        boolean("bias", bias)
        self.sharing = sharing
        self.dropout = probability("dropout", dropout)

        self.query = nn.Linear(embed_dim, self.num_heads * self.head_dim, bias=bias)
        self.key = nn.Linear(embed_dim, self.num_kv_heads * self.head_dim, bias=bias)
        self.value = nn.Linear(embed_dim, self.num_kv_heads * self.head_dim, bias=bias)
        self.output = nn.Linear(self.num_heads * self.head_dim, embed_dim, bias=bias)
        check_projection_options(projection, max_length, projected_length, sharing, rescale)
        # what layers share has one owner, who hands it down; registered in each layer it could not be saved
        self.projection = (
            None
            if sharing == "layerwise"
            else make_projection(
                projection,
                embed_dim=embed_dim,
                max_length=max_length,
                projected_length=projected_length,
                sharing=sharing,
                num_kv_heads=self.num_kv_heads,
                rescale=rescale,
            )
        )
        for linear in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def _projection(self, handed_in: Projection | None) -> Projection:
        """The projection to use: this layer's own, or under `sharing="layerwise"` the one handed in."""
        if self.projection is not None:
            if handed_in is not None:
                raise ValueError(
                    f"a projection was handed in, but with sharing={self.sharing!r} this layer owns one; "
                    "leave it out, or build the layer with sharing='layerwise'"
                )
            return self.projection
        if not isinstance(handed_in, Projection):
            raise ValueError(
                f"sharing='layerwise' needs the shared projection, but got {handed_in!r}; build one with "
                "make_projection(..., sharing='layerwise') and pass it as projection= to every layer"
            )
        if handed_in.matrices != 1:
            raise ValueError(f"the projection handed in has {handed_in.matrices} matrices; one made with sharing='layerwise' has 1")
        if handed_in.embed_dim not in (None, self.embed_dim):
            raise ValueError(
                f"the projection handed in is for embed_dim={handed_in.embed_dim}; this layer has embed_dim={self.embed_dim}"
            )
        return handed_in

    def _project_rows(self, linear: nn.Linear, rows_BMKC: Tensor) -> Tensor:
        """`rows · W + b` per key-value head, (B, G, K, D), where M is 1 (rows for all heads) or G (rows for each)."""
        per_head = (self.num_kv_heads, self.head_dim)
        if rows_BMKC.shape[1] == 1:
            return linear(rows_BMKC[:, 0]).unflatten(-1, per_head).transpose(1, 2)
        if type(linear) is nn.Linear:
            weight_GDC, bias = linear.weight.unflatten(0, per_head), linear.bias
            features_BGKD = torch.einsum("bgkc,gdc->bgkd", rows_BMKC, weight_GDC)
            return features_BGKD if bias is None else features_BGKD + bias.unflatten(0, per_head)[:, None]
        # an adapter has no weight to cut by heads: run it whole on each head's rows and keep that head's part
        return linear(rows_BMKC).unflatten(-1, per_head).diagonal(dim1=1, dim2=3).movedim(-1, 1)

    def _for_every_head(self, features_BGKD: Tensor) -> Tensor:
        """(B, G, K, D) to (B, H, K, D)."""
        return features_BGKD.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)

    def _dropout_now(self) -> float:
        return self.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"num_kv_heads={self.num_kv_heads}, sharing={self.sharing!r}, dropout={self.dropout}"
        )
