"""The base class of the attention layers: softmax, the four linear layers, head sizes, projection.

Shapes: B batch, L queries, K rows, M matrices, H heads, G key-value heads, D head size, C model size.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .options_linformer import boolean, positive_integer, probability
from .projection_linformer import Projection, is_static, make_projection

# queries in one call of the fused kernel with gradients in half precision
HALF_PRECISION_CHUNK = 4096
# at most so many keys are compared in separate steps in bfloat16 on CPUs
FEW_KEYS = 512


def softmax_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    dropout: float,
    need_weights: bool,
    fused: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`softmax(query keysᵀ / √D) values` over (..., L, D) and (..., K, D), and on request the weights, before dropout.

    `mask` is True at the keys that count, or is added to the scores. `fused` uses PyTorch's fused kernel, which never
    stores the L × K weights, except where separate steps are faster.
    """
    if fused and not need_weights and not prefers_separate_steps(query, keys, mask, dropout):
        return fused_attention(query, keys, values, mask, dropout), None
    weights = softmax_weights(query, keys, mask)
    return F.dropout(weights, dropout) @ values, weights if need_weights else None


def prefers_separate_steps(query: Tensor, keys: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether matrix products and a softmax are faster than PyTorch's fused kernel: in some cases on CPUs."""
    if query.device.type != "cpu":
        return False
    if query.dtype == torch.bfloat16:
        # the kernel reaches a third of the rate of a product; the weights of few keys are as small as other activations
        return is_static(keys.shape[-2]) and keys.shape[-2] <= FEW_KEYS
    # no fused kernel of the CPU has dropout, and PyTorch's separate steps also look for empty softmaxes
    return dropout > 0 and mask is None and query.dtype != torch.float16


def fused_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """`softmax(query keysᵀ / √D) values` by PyTorch's fused kernel.

    On CPUs, its backward pass adds up the gradients of keys and values in their own dtype. In half precision a sum over
    many queries would stop growing, so the gradients of chunks of queries are added in float32.
    """
    length, dtype = query.shape[-2], query.dtype
    is_half = dtype.itemsize == 2 and query.device.type == "cpu" and torch.is_grad_enabled()
    if not (is_half and is_static(length) and length > HALF_PRECISION_CHUNK):
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, dropout_p=dropout)
    keys, values = keys.float(), values.float()
    queries = query.split(HALF_PRECISION_CHUNK, dim=-2)
    # one row for all queries, or one for each
    masks = [mask] * len(queries) if mask is None or mask.shape[-2] == 1 else mask.split(HALF_PRECISION_CHUNK, dim=-2)
    chunks = [
        F.scaled_dot_product_attention(each, keys.to(dtype), values.to(dtype), attn_mask=of_each, dropout_p=dropout)
        for each, of_each in zip(queries, masks, strict=True)
    ]
    return torch.cat(chunks, dim=-2)


def softmax_weights(query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """`softmax(query keysᵀ / √D)`, (..., L, K)."""
    scores = query @ (keys / math.sqrt(query.shape[-1])).transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1).to(keys.dtype)


def is_plain_linear(linear: nn.Module) -> bool:
    """Whether the layer only computes `x Wᵀ + b`, so that `weight` and `bias` may be used without calling it.

    Not so for adapters, which wrap the layer, and for pruning, weight norm, offloading and others that hook into the
    call.
    """
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return type(linear) is nn.Linear and not any(hooks) and "forward" not in linear.__dict__


def linear_into(out: Tensor, linear: nn.Linear, x: Tensor) -> Tensor:
    """`linear(x)`, written to `out` (..., features), a contiguous block of rows; without a copy if possible."""
    if not is_plain_linear(linear) or not x.dtype == linear.weight.dtype == out.dtype:
        return out.copy_(linear(x))
    rows, places, weight = x.flatten(0, -2), out.view(-1, out.shape[-1]), linear.weight.t()
    if linear.bias is None:
        torch.mm(rows, weight, out=places)
    else:
        torch.addmm(linear.bias, rows, weight, out=places)
    return out


class MultiHeadLayer(nn.Module):
    """The base class of the attention layers: W_Q, W_K, W_V, W_O, head sizes, and one projection, owned or shared."""

    window_length: int = 0  # 0: no window

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
        context_dim: int | None = None,
    ):
        super().__init__()
        self.embed_dim = positive_integer("embed_dim", embed_dim)
        self.context_dim = positive_integer("context_dim", embed_dim if context_dim is None else context_dim)
        self.projected_length = projected_length  # 0: there are no rows, only a window
        self.num_heads = positive_integer("num_heads", num_heads)
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}; "
                "choose divisible sizes, or set head_dim"
            )
        self.head_dim = positive_integer("head_dim", embed_dim // num_heads if head_dim is None else head_dim)
        self.num_kv_heads = positive_integer("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads} is not divisible by num_kv_heads={num_kv_heads}: each key-value head serves "
                "the same number of heads; choose one of "
                f"{', '.join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)}"
            )
        boolean("bias", bias)
        self.sharing = sharing
        self.dropout = probability("dropout", dropout)

        self.query = nn.Linear(embed_dim, self.num_heads * self.head_dim, bias=bias)
        self.key = nn.Linear(self.context_dim, self.num_kv_heads * self.head_dim, bias=bias)
        self.value = nn.Linear(self.context_dim, self.num_kv_heads * self.head_dim, bias=bias)
        self.output = nn.Linear(self.num_heads * self.head_dim, embed_dim, bias=bias)
        Projection.check_options(projection, max_length, projected_length or 1, sharing, rescale)
        options: dict[str, Any] = {
            "projection": projection,
            "embed_dim": self.context_dim,
            "max_length": max_length,
            "projected_length": projected_length,
            "sharing": sharing,
            "rescale": rescale,
            "head_dim": self.head_dim,
        }
        # the model owns a shared projection and passes it to the layers; registered in each, it could not be saved
        is_shared = sharing == "layerwise" and projected_length > 0
        self.shared_projection_options = options if is_shared else None
        self.projection = None
        if projected_length and not is_shared:
            self.projection = make_projection(num_kv_heads=self.num_kv_heads, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the linear layers as in `torch.nn.MultiheadAttention`; not the projection."""
        for linear in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def _like(self, x: Tensor) -> Tensor:
        """A tensor with the dtype and device of this layer's weights; `x` if they are quantized."""
        return next((parameter for parameter in self.parameters() if parameter.is_floating_point()), x)

    def resize(self, max_length: int) -> None:
        """Resize E and F for `max_length` tokens: see `Projection.resized`."""
        if self.projection is not None:
            self.projection = self.projection.resized(max_length)
        elif self.shared_projection_options is not None:
            self.shared_projection_options["max_length"] = max_length

    def _projection(self, given: Projection | None) -> Projection:
        """The projection of this call: the given one, cut to `projected_length` rows, or else the layer's own."""
        # not isinstance: adapters wrap a projection
        if self.projection is None and not hasattr(given, "key_slice"):
            raise ValueError(
                f"sharing='layerwise' needs the shared projection, but got {given!r}; build one with "
                "make_projection(..., sharing='layerwise') and pass it as projection= to every layer"
            )
        if given is None:
            assert self.projection is not None
            return self.projection
        self._check_projection(given)
        return given.cut(self.projected_length) if given.projected_length != self.projected_length else given

    def _check_projection(self, given: Projection) -> None:
        """Raise unless this layer can use the projection; one for `sharing="layerwise"` must have its options."""
        if not hasattr(given, "key_slice"):
            raise TypeError(f"projection is a {type(given).__name__}; build one with make_projection")
        if given.projected_length is not None and given.projected_length < self.projected_length:
            raise ValueError(
                f"the projection was built with projected_length={given.projected_length} but this layer needs "
                f"projected_length={self.projected_length}; pass one with at least as many rows"
            )
        needed = {} if self.shared_projection_options is None else dict(self.shared_projection_options)
        if given.sized_by_width:
            needed["embed_dim"] = self.context_dim
        needed.pop("projected_length", None)  # larger ones are cut
        needed.pop("head_dim", None)
        if given.sized_by_head:
            needed["head_dim"] = self.head_dim
        for name, value in needed.items():
            if given.options is not None and given.options[name] != value:
                raise ValueError(
                    f"the projection was built with {name}={given.options[name]!r} but this layer needs "
                    f"{name}={value!r}; build it with the options of the layer"
                )
        if given.matrices not in (1, 2, 2 * self.num_kv_heads):
            raise ValueError(
                f"the projection has {given.matrices} matrices but this layer with num_kv_heads={self.num_kv_heads} "
                f"can use 1 (E = F), 2 (E and F) or {2 * self.num_kv_heads} (E and F for each key-value head); build "
                "it with another sharing, or with the num_kv_heads of the layer"
            )
        for tensor in (*given.parameters(), *given.buffers()):
            own = self._like(tensor)
            if (tensor.device, tensor.dtype) != (own.device, own.dtype):
                raise ValueError(
                    f"the projection is {tensor.dtype} on {tensor.device} but this layer is {own.dtype} on "
                    f"{own.device}; convert one of them with .to(device, dtype)"
                )

    def _project_rows(self, linear: nn.Linear, rows_BMKC: Tensor) -> Tensor:
        """`rows · W + b` for each key-value head, (B, G, K, D); M is 1 (the same rows for all) or G (rows for each)."""
        per_head = (self.num_kv_heads, self.head_dim)
        if rows_BMKC.shape[1] == 1:
            return linear(rows_BMKC[:, 0]).unflatten(-1, per_head).transpose(1, 2)
        if is_plain_linear(linear):
            weight_GDC, bias = linear.weight.unflatten(0, per_head), linear.bias
            features_BGKD = torch.einsum("bgkc,gdc->bgkd", rows_BMKC, weight_GDC)
            if bias is None:
                return features_BGKD
            return features_BGKD + bias.unflatten(0, per_head)[:, None].to(features_BGKD.dtype)
        # other layers cannot be split by heads: apply them to the rows of each head, and keep the part of that head
        return linear(rows_BMKC).unflatten(-1, per_head).diagonal(dim1=1, dim2=3).movedim(-1, 1)

    def _for_every_head(self, features_BGKD: Tensor) -> Tensor:
        """(B, G, K, D) to (B, H, K, D)."""
        group = self.num_heads // self.num_kv_heads
        # repeat_interleave would copy even for groups of 1
        return features_BGKD if group == 1 else features_BGKD.repeat_interleave(group, dim=1)

    def _dropout_now(self) -> float:
        return self.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        context = "" if self.context_dim == self.embed_dim else f"context_dim={self.context_dim}, "
        return (
            f"embed_dim={self.embed_dim}, {context}num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"num_kv_heads={self.num_kv_heads}, sharing={self.sharing!r}, dropout={self.dropout}"
        )


def make_shared_projection(attentions: Iterable[MultiHeadLayer]) -> Projection | None:
    """With `sharing="layerwise"`, the projection of all layers: as large as the largest of them needs."""
    options = max(attentions, key=lambda attention: attention.projected_length).shared_projection_options
    return None if options is None else make_projection(**options)
