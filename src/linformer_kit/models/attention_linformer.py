"""The equation, and the layer.

    keys_K   = Eᵀ X · W_K + b_K
    values_K = Fᵀ X · W_V + b_V
    out      = softmax(Q keys_Kᵀ / √D) values_K · W_O + b_O,    Q = X W_Q + b_Q

The layer computes the products in the cheapest order (`plan_linformer.py`).

Shapes: B batch, L queries, N tokens that give the keys, K projected length, M matrices, H heads, G key-value heads,
D head size, C model size.
"""

import math
from typing import Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from .multihead_linformer import MultiHeadLayer, is_plain_linear, linear_into, softmax_attention
from .options_linformer import check_window, checked_options, choice, positive_integer
from .packing_linformer import Packing
from .plan_linformer import KeyOrder, Plan, QueryOrder, cheapest, key_costs, length_to_plan, query_costs
from .projection_linformer import (
    Blocks,
    DenseProjection,
    Matrices,
    NoProjection,
    Projection,
    is_static,
    real_tokens_first,
    scaled,
)
from .tiling_linformer import Tiling, column_bias, far_rows, first_tokens
from .validation_linformer import boolean_mask, check_features, compute_dtype, computes_in_chunks
from .window_linformer import DistanceBias, NearAndFar, WindowAttention

# queries per chunk on CPUs when no gradient is needed: intermediate results stay in the processor's cache. Without
# chunks, they are about as large as the input: the folded order stores H·K scores for each query, but is the cheapest
# only up to about H·K = C + K, and the other order stores no scores.
QUERY_CHUNK = 1024
FULL_ATTENTION = NoProjection()


class KeysValues(NamedTuple):
    """A projected context: K rows, for a context of any length."""

    keys_BGKD: Tensor
    values_BGKD: Tensor
    present_BK: Tensor | None  # False at rows that the softmax skips

    def reorder(self, index_B: Tensor) -> "KeysValues":
        """Select examples of the batch, for beam search."""
        present_BK = None if self.present_BK is None else self.present_BK[index_B]
        return KeysValues(self.keys_BGKD[index_B], self.values_BGKD[index_B], present_BK)


class Attend(Protocol):
    """Queries of some examples of the batch to outputs, written to `out` if given, and weights."""

    def __call__(
        self, x_BLC: Tensor, examples: slice = ..., out: Tensor | None = ...
    ) -> tuple[Tensor, Tensor | None]: ...


def in_chunks(attend: Attend, x: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """`attend(x)` in chunks of about `QUERY_CHUNK` queries, which keeps intermediate results small and in the cache."""
    batch, length = x.shape[:2]
    examples, queries = max(1, QUERY_CHUNK // length), min(length, QUERY_CHUNK)
    weights: list[list[Tensor]] = []
    for example in range(0, batch, examples):
        weights.append([])
        for query in range(0, length, queries):
            batch_chunk, query_chunk = slice(example, example + examples), slice(query, query + queries)
            _, chunk_weights = attend(x[batch_chunk, query_chunk], batch_chunk, outputs[batch_chunk, query_chunk])
            weights[-1] += [] if chunk_weights is None else [chunk_weights]
    return outputs, torch.cat([torch.cat(pieces, dim=2) for pieces in weights]) if weights[0] else None


class LinformerAttention(MultiHeadLayer):
    """Multi-head attention with keys and values projected from N to `projected_length` rows. Its cost is linear in N.

    >>> attention = LinformerAttention(embed_dim=64, num_heads=4, max_length=1024, projected_length=32)
    >>> x = torch.randn(2, 1000, 64)
    >>> attention(x).shape
    torch.Size([2, 1000, 64])
    >>> mask = torch.arange(1000) < torch.tensor([[1000], [300]])  # True at real tokens
    >>> torch.allclose(attention(x, mask=mask)[1, :300], attention(x[1:, :300])[0], atol=1e-5)
    True
    >>> output, weights = attention(x, need_weights=True)
    >>> weights.shape
    torch.Size([2, 4, 1000, 32])

    - `window_length`: number of tokens in a block of the window; 0 for none. In self-attention, each token attends
      exactly to its own block and to the blocks on either side, 3 × `window_length` tokens, in one softmax with the K
      rows (see `window_linformer.py`). With a window, `projected_length` may be 0.
    - `global_tokens`: number of tokens at the beginning that all tokens attend to exactly.
    - `distance_bias`: add a learned number for each head and distance to the scores of the tokens in the window.

    >>> attention = LinformerAttention(64, 4, max_length=1024, projected_length=32, window_length=50, global_tokens=1)
    >>> output, weights = attention(x, need_weights=True)
    >>> weights.shape  # 3 blocks, 1 global token, 32 rows
    torch.Size([2, 4, 1000, 183])
    """

    @checked_options
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        max_length: int = 512,
        projected_length: int = 128,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        projection: str = "linear",
        sharing: str = "headwise",
        rescale: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        context_dim: int | None = None,
        window_length: int = 0,
        global_tokens: int = 0,
        distance_bias: bool = False,
    ):
        kind = Projection.kinds[choice("projection", projection, Projection.kinds)]
        check_window(kind, projected_length, window_length, global_tokens, distance_bias)
        if window_length and context_dim not in (None, embed_dim):
            raise ValueError(
                f"context_dim={context_dim} with window_length={window_length}, but a window is for self-attention; "
                "drop one of them"
            )
        super().__init__(
            embed_dim,
            num_heads,
            max_length=max_length,
            projected_length=projected_length,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            projection=projection,
            sharing=sharing,
            rescale=rescale,
            dropout=dropout,
            bias=bias,
            context_dim=context_dim,
        )
        self.window_length, self.global_tokens = window_length, global_tokens
        self.distance_bias = DistanceBias(window_length, num_heads) if distance_bias else None

    @overload
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        value: Tensor | None = None,
        mask: Tensor | Packing | None = None,
        projection: Projection | None = None,
        need_weights: Literal[False] = False,
        fused: bool = True,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        value: Tensor | None = None,
        mask: Tensor | Packing | None = None,
        projection: Projection | None = None,
        need_weights: Literal[True],
        fused: bool = True,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        value: Tensor | None = None,
        mask: Tensor | Packing | None = None,
        projection: Projection | None = None,
        need_weights: bool,
        fused: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def forward(self, x, context=None, *, value=None, mask=None, projection=None, need_weights=False, fused=True):
        """Attend from `x` (B, L, embed_dim) to `context` (B, N, context_dim), by default `x`; (B, L, embed_dim).

        - `value` (B, N, context_dim) gives the values, and `context` only the keys; by default, it gives both. The
          rows of the keys are made from `context` with E, those of the values from `value` with F.

        - `mask` (B, N) is True at the real tokens of the context. The output of an example without real tokens is b_O.
          A `Packing` in its place says which of the tokens `x` (1, T, embed_dim) belong to which example.
        - `projection` replaces the projection of the layer in this call. It has the same number of rows, or more,
          which are cut to `projected_length` (see `Projection.cut`). With `sharing="layerwise"` it is required.
        - `need_weights` also returns the (B, H, L, K) attention weights. With a window of w they are (B, H, L, 3w +
          global_tokens + K): real token i has weights on the 3w real tokens from (i // w - 1) · w on, on the global
          tokens outside of these, and on the rows.
        - `fused=False` computes the softmax in separate steps, which stores the weights.
        """
        check_features("x", x, self.embed_dim, self._like(x))
        if context is None and self.context_dim != self.embed_dim:
            raise ValueError(
                f"context is missing: with embed_dim={self.embed_dim} and context_dim={self.context_dim}, x cannot be "
                f"its own context; pass a context of width {self.context_dim}, or build the layer without context_dim"
            )
        if isinstance(mask, Packing):
            return self._packed(x, mask, projection, fused)
        if context is None and mask is not None:
            # padding may hold anything, and as queries it would reach the gradients of the weights
            x = x.masked_fill(~boolean_mask("mask", mask, x)[..., None], 0)
        if self.window_length:
            self._check_no_context(context, value)
            output, weights = self.near_and_far(x, mask, projection, need_weights, fused)
        else:
            keys_values = self.project(x if context is None else context, mask, projection, value)
            output, weights = self.attend(x, keys_values, need_weights, fused)
        return (output, weights) if need_weights else output

    def _packed(self, x_1TC: Tensor, packing: Packing, given: Projection | None, fused: bool) -> Tensor:
        """Each example of a packed batch attends to itself."""
        groups = packing.split(x_1TC)
        if self.window_length:
            return packing.join(self.near_and_far(x_gnC, None, given, False, fused)[0] for x_gnC in groups)
        projection, longest = self._projection(given), packing.longest
        projection.check_length(longest)
        contexts = self._contexts(projection.up_to(longest), groups)
        if self._query_order(longest, projection.rows(longest)) == "folded":
            pairs = zip(groups, contexts, strict=True)
            return packing.join(self.attend(x_gnC, context, fused=fused)[0] for x_gnC, context in pairs)
        # W_Q and W_O for all tokens at once
        heads, queries = [], packing.split(self.query(x_1TC))
        for query_gnF, (keys_gGKD, values_gGKD, _) in zip(queries, contexts, strict=True):
            query_gHnD = query_gnF.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            rows = self._for_every_head(keys_gGKD), self._for_every_head(values_gGKD), None
            heads_gHnD, _ = softmax_attention(query_gHnD, *rows, self._dropout_now(), need_weights=False, fused=fused)
            heads.append(heads_gHnD.transpose(1, 2).flatten(2))
        return self.output(packing.join(heads))

    def _contexts(self, projection: Projection, groups: list[Tensor]) -> list[KeysValues]:
        """`project` of each group; W_K and W_V for all groups at once if they have as many rows."""
        sizes, lengths = zip(*(x_gnC.shape[:2] for x_gnC in groups), strict=True)
        rows = {projection.rows_of_features(length) for length in lengths}
        if len(rows) > 1 or {self._key_order(projection, length) for length in lengths} != {"sequence first"}:
            return [self._keys_values(projection, x_gnC, None, None) for x_gnC in groups]
        pairs = [projection.split_rows(projection(x_gnC).rows_BMKC) for x_gnC in groups]
        key_rows, value_rows = (torch.cat(rows_gMKC) for rows_gMKC in zip(*pairs, strict=True))
        features = self._project_rows(self.key, key_rows), self._project_rows(self.value, value_rows)
        keys, values = (features_BGKD.split(sizes) for features_BGKD in projection.finish(*features))
        return [KeysValues(*rows, None) for rows in zip(keys, values, strict=True)]

    def project(
        self,
        context: Tensor,
        mask: Tensor | None = None,
        projection: Projection | None = None,
        value: Tensor | None = None,
    ) -> KeysValues:
        """The keys and values of `context` (B, N, context_dim), which can be kept for several calls of `attend`."""
        self._check_no_context(context, value)
        projection = self._projection(projection)
        self._check_context(context, value)
        projection.check_length(context.shape[1])
        lengths_B = None
        if mask is not None:
            # E mixes positions, so padding must be zero before it; a mask after it is too late
            mask_BN = boolean_mask("mask", mask, context)
            context, lengths_B, _ = real_tokens_first(context, mask_BN)
            value = None if value is None else real_tokens_first(value, mask_BN)[0]
        elif not is_static(context.shape[1]):  # there may be more windows than the tokens fill: see `windows`
            lengths_B = context.new_full(context.shape[:1], context.shape[1], dtype=torch.long)
        return self._keys_values(projection, context, value, lengths_B)

    def _keys_values(
        self, projection: Projection, context: Tensor, value: Tensor | None, lengths_B: Tensor | None
    ) -> KeysValues:
        """`project`, with the real tokens first."""
        order = self._key_order(projection, context.shape[1], value is not None)
        is_reordered = order == "features first" and isinstance(projection, DenseProjection)
        keys, values, present = (self._features_first if is_reordered else self._sequence_first)(
            projection, context, value, lengths_B
        )
        keys, values = projection.finish(keys, values)
        if lengths_B is not None:
            is_empty_B = lengths_B == 0
            values = values.masked_fill(is_empty_B[:, None, None, None], 0)
            # an empty softmax is nan: use all rows, whose values are zero
            present = None if present is None else present | is_empty_B[:, None]
        return KeysValues(keys, values, present)

    def _check_no_context(self, context: Tensor | None, value: Tensor | None) -> None:
        """Raise if a layer with a window is given a context: the tokens around a query are those of its own input."""
        if self.window_length and (context is not None or value is not None):
            raise ValueError(
                f"a layer with window_length={self.window_length} attends to the tokens around each query in x, so it "
                "takes no context and no value, and has no project(); call it with x only, or build it with "
                "window_length=0"
            )

    def _check_context(self, context: Tensor, value: Tensor | None) -> None:
        """Raise unless there are tokens of the right width, and as many values as keys."""
        width = "embed_dim" if self.context_dim == self.embed_dim else "context_dim"
        for name, tokens in (("context", context), *([] if value is None else [("value", value)])):
            check_features(name, tokens, self.context_dim, self._like(tokens), width)
        if value is not None and value.shape != context.shape:
            raise ValueError(
                f"value has shape {tuple(value.shape)} but the context, which gives the keys, has shape "
                f"{tuple(context.shape)}; pass one value for each key"
            )

    def attend(
        self, x: Tensor, context: KeysValues, need_weights: bool = False, fused: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `x` (B, L, C) to a context prepared by `project`. Returns output and weights."""
        check_features("x", x, self.embed_dim, self._like(x))
        if context.keys_BGKD.shape[0] != x.shape[0]:
            raise ValueError(
                f"x has {x.shape[0]} examples but the context has {context.keys_BGKD.shape[0]}; pass one "
                "context per example"
            )
        kept, now = context.keys_BGKD, compute_dtype(self._like(x))
        if (kept.dtype, kept.device) != (now, x.device):
            raise ValueError(
                f"the context was projected to {kept.dtype} on {kept.device} but x needs {now} on {x.device}; "
                "use the same device, dtype and autocast in project and attend"
            )
        order = self._query_order(x.shape[1], context.keys_BGKD.shape[2])
        if order == "folded":
            attend = self._folded(context, need_weights)
        else:
            attend = self._per_head(context, need_weights, fused)
        if not computes_in_chunks(x) or x.shape[0] * x.shape[1] <= QUERY_CHUNK:
            return attend(x)
        return in_chunks(attend, x, context.values_BGKD.new_empty(*x.shape[:2], self.embed_dim))

    def plan(
        self, length: int, batch: int = 1, context_length: int | None = None, projection: Projection | None = None
    ) -> Plan:
        """The cheapest order of the products for `length` queries, and its multiply-adds for the whole batch.

        With a window, features first must save more than 5% of the multiply-adds, because its products are smaller and
        therefore slower. The plan for an input that fits into the window is that of full attention, used if no gradient
        is needed.

        >>> LinformerAttention(512, 8, max_length=4096, projected_length=32).plan(4096)
        Plan(keys='sequence first', queries='folded', multiply_adds=1241513984)
        >>> LinformerAttention(512, 8, max_length=4096, projected_length=128, sharing="none").plan(4096).keys
        'features first'
        """
        length, batch = positive_integer("length", length), positive_integer("batch", batch)
        if self.window_length:
            if context_length not in (None, length):
                raise ValueError(
                    f"context_length is {context_length} in a layer with window_length={self.window_length}, which is "
                    f"for self-attention: queries and context are the same {length} tokens; drop context_length"
                )
            return self._plan_with_window(length, batch, projection)
        context_length = length if context_length is None else positive_integer("context_length", context_length)
        projection = self._projection(projection)
        projection.check_length(context_length)
        keys = self._key_order(projection, context_length)
        rows = projection.rows(context_length)
        queries = self._query_order(length, rows)
        cost = key_costs(projection, context_length, self.context_dim, self.num_kv_heads * self.head_dim)[keys]
        cost += query_costs(length, rows, self.embed_dim, self.num_heads, self.head_dim)[queries]
        return Plan(keys, queries, batch * cost)

    def _plan_with_window(self, length: int, batch: int, given: Projection | None) -> Plan:
        """`plan` of a layer with a window; an input that fits into it has full attention if no gradient is needed."""
        projection, features = self._rows_projection(given, length), self.num_kv_heads * self.head_dim
        if self._fits_into_window(length):
            cost = key_costs(FULL_ATTENTION, length, self.embed_dim, features)["sequence first"]
            sizes = (length, length, self.embed_dim, self.num_heads, self.head_dim)
            queries = self._query_order(length, length)
            return Plan("sequence first", queries, batch * (cost + query_costs(*sizes)[queries]))
        tiling, rows = Tiling.of(length, self.window_length, self.global_tokens), 0
        keys: KeyOrder = "features first"
        cost = 2 * length * self.embed_dim * features
        if projection is not None:
            keys, rows = self._key_order(projection, length), projection.rows(length)
            cost = key_costs(projection, length, self.embed_dim, features, window=True)[keys]
        width = self.num_heads * self.head_dim
        cost += 2 * length * self.embed_dim * width + 2 * tiling.scores(rows) * width
        return Plan(keys, "per head", batch * cost)

    def _key_order(self, projection: Projection, length: int, separate: bool = False) -> KeyOrder:
        features, window = self.num_kv_heads * self.head_dim, self.window_length > 0
        costs = key_costs(projection, length_to_plan(length), self.context_dim, features, separate, window)
        if not (is_plain_linear(self.key) and is_plain_linear(self.value)):
            return next(iter(costs))  # the one that calls the linear layers
        if window and len(costs) > 1:
            # features first has smaller products, which are slower: it must save more than 5% of the multiply-adds
            costs["features first"] = costs["features first"] * 105 // 100
        return cheapest(costs)

    def _query_order(self, queries: int, rows: int) -> QueryOrder:
        sizes = (length_to_plan(queries), length_to_plan(rows), self.embed_dim, self.num_heads, self.head_dim)
        costs = query_costs(*sizes)
        if not (is_plain_linear(self.query) and is_plain_linear(self.output)):
            return "per head"
        return cheapest(costs)

    def _sequence_first(
        self, projection: Projection, context_BNC: Tensor, value_BNC: Tensor | None, lengths_B: Tensor | None
    ) -> KeysValues:
        """`(Eᵀ X) W + b`; for `head_conv`, whose rows are all tokens, `X W + b`."""
        if value_BNC is None:
            rows_BMKC, present_BK = projection(context_BNC, lengths_B)
            key_rows, value_rows = projection.split_rows(rows_BMKC)
        else:
            key_rows, present_BK = projection.part(projection.key_slice())(context_BNC, lengths_B)
            value_rows = projection.part(projection.value_slice())(value_BNC, lengths_B).rows_BMKC
        keys_BGKD = self._project_rows(self.key, key_rows)
        values_BGKD = self._project_rows(self.value, value_rows)
        return KeysValues(keys_BGKD, values_BGKD, present_BK)

    def _features_first(
        self, projection: Projection, context_BNC: Tensor, value_BNC: Tensor | None, lengths_B: Tensor | None
    ) -> KeysValues:
        """`Eᵀ (X W) + b`: the bias comes last, because E must not scale it."""
        assert isinstance(projection, DenseProjection)

        def project(linear: nn.Linear, x_BNC: Tensor, matrices: Matrices) -> Tensor:
            return self._project_features(linear, functional.linear(x_BNC, linear.weight), matrices)

        key_part, value_part = projection.key_slice(), projection.value_slice()
        if value_BNC is None:
            value_BNC, both = context_BNC, projection.matrices_for(context_BNC, lengths_B)
            E, F = both.part(key_part), both.part(value_part)
        else:
            E = projection.part(key_part).matrices_for(context_BNC, lengths_B)
            F = projection.part(value_part).matrices_for(value_BNC, lengths_B)
        return KeysValues(project(self.key, context_BNC, E), project(self.value, value_BNC, F), None)

    def _project_features(self, linear: nn.Linear, features_BNF: Tensor, matrices: Matrices) -> Tensor:
        """`Eᵀ features + b`, (B, G, K, D); features are without bias."""
        E, scale = matrices
        features_BNGD = features_BNF.unflatten(-1, (self.num_kv_heads, self.head_dim))
        E_one = E.expand(*E.shape[:-2], self.num_kv_heads, -1)
        equation = "ngk,bngd->bgkd" if E.dim() == 3 else "bngk,bngd->bgkd"
        projected_BGKD = torch.einsum(equation, E_one, features_BNGD)
        if scale is not None:
            projected_BGKD = scaled(projected_BGKD, scale[..., None])
        if linear.bias is None:
            return projected_BGKD
        bias_G1D = linear.bias.unflatten(0, (self.num_kv_heads, self.head_dim))[:, None]
        # under autocast, the sum would have the precision of the bias
        return projected_BGKD + bias_G1D.to(projected_BGKD.dtype)

    def _per_head(self, context: KeysValues, need_weights: bool, fused: bool) -> Attend:
        """`softmax((X W_Q + b_Q) keysᵀ / √D) values · W_O + b_O`."""
        keys_BHKD, values_BHKD = self._for_every_head(context.keys_BGKD), self._for_every_head(context.values_BGKD)
        present = None if context.present_BK is None else context.present_BK[:, None, None, :]

        def attend(
            x_BLC: Tensor, examples: slice = slice(None), out: Tensor | None = None
        ) -> tuple[Tensor, Tensor | None]:
            query_BHLD = self.query(x_BLC).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            rows = (keys_BHKD[examples], values_BHKD[examples], None if present is None else present[examples])
            heads_BHLD, weights = softmax_attention(query_BHLD, *rows, self._dropout_now(), need_weights, fused)
            heads_BLF = heads_BHLD.transpose(1, 2).flatten(2)
            return self.output(heads_BLF) if out is None else linear_into(out, self.output, heads_BLF), weights

        return attend

    def _folded(self, context: KeysValues, need_weights: bool) -> Attend:
        """`softmax((X (W_Q keysᵀ) + b_Q keysᵀ) / √D) (values W_O) + b_O`: skips queries and heads."""
        heads = (self.num_heads, self.head_dim)
        keys_BHKD = self._for_every_head(context.keys_BGKD) / math.sqrt(self.head_dim)
        folded_keys_BFC = torch.einsum("bhkd,hdc->bhkc", keys_BHKD, self.query.weight.unflatten(0, heads)).flatten(1, 2)
        folded_bias_BHK = keys_BHKD.new_zeros(keys_BHKD.shape[:3])
        if self.query.bias is not None:
            folded_bias_BHK = torch.einsum("bhkd,hd->bhk", keys_BHKD, self.query.bias.unflatten(0, heads))
        if context.present_BK is not None:
            folded_bias_BHK = folded_bias_BHK.masked_fill(~context.present_BK[:, None], -torch.inf)
        values_BHKD = self._for_every_head(context.values_BGKD)
        folded_values_BHKC = torch.einsum("bhkd,chd->bhkc", values_BHKD, self.output.weight.unflatten(1, heads))
        dropout, bias = self._dropout_now(), self.output.bias
        bias_is_folded = not dropout and not need_weights
        if bias is not None and bias_is_folded:
            # the weights of a head sum to 1, so a bias on the values of one head is a bias on the output, at no cost;
            # but the gradient of the weights would contain it
            folded_values_BHKC[:, 0] += bias
        folded_bias_B1F, folded_values_BFC = folded_bias_BHK.flatten(1)[:, None], folded_values_BHKC.flatten(1, 2)

        def attend(
            x_BLC: Tensor, examples: slice = slice(None), out: Tensor | None = None
        ) -> tuple[Tensor, Tensor | None]:
            scores_BLF = torch.baddbmm(folded_bias_B1F[examples], x_BLC, folded_keys_BFC[examples].transpose(1, 2))
            weights_BLHK = scores_BLF.unflatten(-1, (self.num_heads, -1)).softmax(dim=-1).to(folded_values_BFC.dtype)
            # the output is computed from the returned tensor itself, so that it has a gradient
            weights_BHLK = weights_BLHK.transpose(1, 2)
            weights_BLF = functional.dropout(weights_BHLK.transpose(1, 2), dropout).flatten(2)
            output_BLC = torch.bmm(weights_BLF, folded_values_BFC[examples], out=out)
            if bias is not None and not bias_is_folded:
                output_BLC += bias
            return output_BLC, weights_BHLK if need_weights else None

        return attend

    def _rows_projection(self, given: Projection | None, length: int) -> Projection | None:
        """The projection of a layer with a window; None if there are no rows."""
        if self.projected_length == 0:
            return None
        projection = self._projection(given)
        projection.check_length(length)
        return projection

    def _fits_into_window(self, length: int) -> bool:
        """Whether `length` tokens have ordinary full attention: two blocks see each other."""
        return is_static(length) and length <= 2 * self.window_length and self.distance_bias is None

    def near_and_far(
        self, x_BNC: Tensor, mask: Tensor | None, given: Projection | None, need_weights: bool, fused: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attention to window and rows, (B, N, C), and on request the weights: see `window_linformer.py`.

        `given` is a projection from outside of the layer, or None.
        """
        length, lengths_B, place_BN = x_BNC.shape[1], None, None
        projection = self._rows_projection(given, length)
        if mask is not None:
            x_BNC, lengths_B, place_BN = real_tokens_first(x_BNC, boolean_mask("mask", mask, x_BNC))
        elif not is_static(length):
            lengths_B = x_BNC.new_full(x_BNC.shape[:1], length, dtype=torch.long)
        # with gradients, E takes part: parameters without a gradient would stop distributed training
        if self._fits_into_window(length) and not need_weights and not torch.is_grad_enabled():
            context = self._keys_values(FULL_ATTENTION, x_BNC, None, lengths_B)
            output_BNC, weights = self.attend(x_BNC, context, fused=fused)
        else:
            tiling = Tiling.of(length, self.window_length, self.global_tokens, single_blocks=need_weights)
            attention = WindowAttention(tiling, self.num_heads, self.num_kv_heads, self._dropout_now(), fused)
            near_and_far = self._project_window(projection, x_BNC, lengths_B, tiling)
            if torch.compiler.is_dynamo_compiling() and not need_weights:
                # Inductor fails if the number of columns of the fused kernel depends on the length
                near_and_far = near_and_far.filled_up(self.global_tokens + self.projected_length)
            output_BNC, weights = self._attend_window(attention, x_BNC, near_and_far, lengths_B, need_weights)
        if place_BN is None:
            return output_BNC, weights
        batch_B1 = torch.arange(x_BNC.shape[0], device=x_BNC.device)[:, None]
        if weights is not None:
            weights = weights.transpose(1, 2)[batch_B1, place_BN].transpose(1, 2)
        return output_BNC[batch_B1, place_BN], weights

    def _project_window(
        self, projection: Projection | None, x_BNC: Tensor, lengths_B: Tensor | None, tiling: Tiling
    ) -> NearAndFar:
        """Keys and values of all tokens and of the rows, and what is added to their scores."""
        length = x_BNC.shape[1]
        key_rows = value_rows = mass_BMnK = None
        if projection is None:
            keys_BNF, values_BNF = self.key(x_BNC), self.value(x_BNC)
        else:
            keys_BNF, values_BNF, key_rows, value_rows, E = self._tokens_and_rows(projection, x_BNC, lengths_B)
            key_rows, value_rows = projection.finish(key_rows, value_rows)
            blocks = Blocks(tiling.blocks, tiling.window, skipped=self.global_tokens)
            mass_BMnK = projection.mass_in_blocks(x_BNC, lengths_B, blocks, E)
        real_B = torch.full((1,), length, device=x_BNC.device) if lengths_B is None else lengths_B
        return NearAndFar(
            keys_BNF,
            values_BNF,
            far_rows(keys_BNF, key_rows, self.global_tokens),
            far_rows(values_BNF, value_rows, self.global_tokens),
            column_bias(tiling, real_B, mass_BMnK, keys_BNF.dtype).expand(x_BNC.shape[0], -1, -1, -1),
            None if self.distance_bias is None else self.distance_bias(tiling),
        )

    def _tokens_and_rows(
        self, projection: Projection, x_BNC: Tensor, lengths_B: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Keys and values of the tokens, (B, N, F), and of the rows, (B, G, K, D), and E of the keys, if it exists."""
        length, E = x_BNC.shape[1], None
        if projection.is_features_first:  # its rows are all tokens
            tokens_BNC = projection(x_BNC, lengths_B).rows_BMKC[:, 0]
            features = [linear(tokens_BNC) for linear in (self.key, self.value)]
            rows = [each.unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2) for each in features]
            return *(first_tokens(each, length) for each in features), *rows, None
        if not isinstance(projection, DenseProjection):
            rows_BMKC = projection(x_BNC, lengths_B).rows_BMKC
        else:
            matrices = projection.matrices_for(x_BNC, lengths_B)
            parts = [matrices.part(part) for part in (projection.key_slice(), projection.value_slice())]
            E = parts[0].E
            if self._key_order(projection, length) == "features first":
                linears = (self.key, self.value)
                plain = [functional.linear(x_BNC, linear.weight) for linear in linears]
                features = [
                    each if linear.bias is None else each + linear.bias.to(each.dtype)
                    for linear, each in zip(linears, plain, strict=True)
                ]
                return *features, *map(self._project_features, linears, plain, parts), E
            rows_BMKC = projection.apply_matrices(matrices, x_BNC)
        key_rows, value_rows = projection.split_rows(rows_BMKC)
        key_rows, value_rows = self._project_rows(self.key, key_rows), self._project_rows(self.value, value_rows)
        return self.key(x_BNC), self.value(x_BNC), key_rows, value_rows, E

    def _attend_window(
        self,
        attention: WindowAttention,
        x_BNC: Tensor,
        context: NearAndFar,
        lengths_B: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Queries, attention and output."""
        length, tiling = x_BNC.shape[1], attention.tiling

        def queries(x: Tensor, tiles: int) -> Tensor:
            missing = tiles * tiling.size - x.shape[1]
            query = self.query(x)
            # `pad` by zero tokens copies everything
            return functional.pad(query, (0, 0, 0, missing)) if not is_static(missing) or missing else query

        def without_padding(heads: Tensor, length: int, is_empty: Tensor | None) -> Tensor:
            heads = first_tokens(heads, length)
            return heads if is_empty is None else heads.masked_fill(is_empty[:, None, None], 0)

        is_empty_B = None if lengths_B is None else lengths_B == 0
        is_whole = torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_static(length)
        if is_whole or need_weights or attention.is_one_chunk(context):
            query_BNF, weights = queries(x_BNC, tiling.tiles), None
            if need_weights:
                heads_BNF, weights = attention.whole(query_BNF, context, need_weights)
            else:
                heads_BNF = attention(query_BNF, context)
            weights = None if weights is None else first_tokens(weights, length)
            return self.output(without_padding(heads_BNF, length, is_empty_B)), weights
        output_BNC = context.near_values_BPF.new_empty(*x_BNC.shape[:2], self.embed_dim)
        for examples, tiles in attention.chunks(context):
            rows, is_empty = attention.queries(tiles), None if is_empty_B is None else is_empty_B[examples]
            x, piece = x_BNC[examples, rows], attention.piece(context, examples, tiles)
            heads, _ = attention.attend(queries(x, tiles.stop - tiles.start), piece)
            linear_into(output_BNC[examples, rows], self.output, without_padding(heads, x.shape[1], is_empty))
        return output_BNC, None

    def extra_repr(self) -> str:
        window = f", window_length={self.window_length}, global_tokens={self.global_tokens}"
        window += "" if self.distance_bias is None else ", distance_bias=True"
        return super().extra_repr() + (window if self.window_length else "")
