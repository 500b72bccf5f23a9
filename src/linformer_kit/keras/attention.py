"""The equation, and the layer that replaces `keras.layers.MultiHeadAttention`.

    keys_K   = Eᵀ X · W_K + b_K
    values_K = Fᵀ X · W_V + b_V
    out      = softmax(Q keys_Kᵀ / √D) values_K · W_O + b_O,    Q = X W_Q + b_Q

The tokens are projected first, so that W_K and W_V multiply K rows instead of N. With a window (see window.py), they
also multiply the N tokens. Without, the products with W_Q and W_O have the cheaper of two orders, as in PyTorch (see
models/plan_linformer.py).

In half precision, softmaxes and their sums are float32.

Shapes: B batch, T queries, N tokens, K projected length, M matrices, H heads, D head size, C model size; of a window:
n blocks, W tokens in a block, P near tokens of a block, R far rows, S = P + R columns of the softmax.
"""

from math import prod
from typing import Any, NamedTuple

import keras
from keras import ops

from ..models.options_linformer import check_window, list_names, plain_number, positive_integer, probability
from ..models.plan_linformer import QueryOrder, cheapest, length_to_plan, query_costs
from .checks import (
    NOT_A_PADDING_MASK,
    check_attention_mask,
    check_features,
    check_length,
    check_lengths,
    key_padding,
    nan_unless,
)
from .projection import Projection, make_projection
from .tokens import (
    Tensor,
    at_least_float32,
    real_positions,
    real_tokens_first,
    split_blocks,
    take_tokens,
    zero_padding,
)
from .window import distance_bias_of_block, far_rows, first_distance_bias, row_bias, token_bias, with_neighbors

TOO_LONG = "truncate it, build the layer with a larger max_length, or use a projection for any length"


class KeysValues(NamedTuple):
    """A projected context: everything that queries attend to."""

    keys_BKHD: Tensor
    values_BKHD: Tensor
    present_BK: Tensor | None  # False at rows that the softmax leaves out


def zero_empty_examples(context: KeysValues, lengths_B: Tensor | None) -> KeysValues:
    """Zero the values of examples without real tokens, so that their output is b_O, and keep their softmax defined."""
    if lengths_B is None:
        return context
    keys_BKHD, values_BKHD, present_BK = context
    is_empty_B = ops.equal(lengths_B, 0)
    values_BKHD = ops.where(is_empty_B[:, None, None, None], ops.zeros_like(values_BKHD), values_BKHD)
    present_BK = None if present_BK is None else ops.logical_or(present_BK, is_empty_B[:, None])
    return KeysValues(keys_BKHD, values_BKHD, present_BK)


@keras.saving.register_keras_serializable(package="linformer_kit")
class LinearMultiHeadAttention(keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` with cost linear in the length: keys and values are projected to K rows.

    >>> import numpy as np
    >>> attention = LinearMultiHeadAttention(num_heads=4, key_dim=16, projection_dim=32)
    >>> x = np.random.normal(size=(2, 1000, 64)).astype("float32")
    >>> tuple(attention(x, x).shape)
    (2, 1000, 64)
    >>> mask = np.arange(1000) < [[1000], [300]]  # True at real tokens
    >>> padded, single = attention(x, x, value_mask=mask)[1, :300], attention(x[1:, :300], x[1:, :300])[0]
    >>> bool(abs(keras.ops.convert_to_numpy(padded - single)).max() < 1e-5)
    True

    It accepts the arguments of `MultiHeadAttention`, has the same weights under the same names, and adds E and F:

    - `projection_dim`: the projected length K. None: full attention, computed by `MultiHeadAttention` itself. 0: no
      rows, only a window.
    - `projection`: "linear", "affine", "dynamic", "conv", "head_conv", "mean", "max" or "random".
    - `rescale`: see docs/mathematics.md.
    - `sharing`: "headwise" (E and F, shared by all heads), "kv" (E = F), "none" (E and F for each head), or "layerwise"
      (a subclass of `keras.Model` creates one with `make_projection` and passes it to every call as
      `shared_projection`).
    - `max_length`: maximum length of the keys (default: the length of the first input).
    - `window_length`: number of tokens in a block of the window; 0 for none. In self-attention, each token attends
      exactly to its own block and to the blocks on either side, in one softmax with the K rows. The scores have
      `3 * window_length + global_tokens + K` columns: column j < 3 * window_length of the i-th real token is the real
      token `(i // window_length - 1) * window_length + j`.
    - `global_tokens`: number of tokens at the beginning that all tokens attend to exactly.
    - `distance_bias`: add a learned number for each head and distance to the scores of the tokens in the window.

    All queries see the same keys. So `use_causal_mask` and `sliding_window` raise an error, as does an `attention_mask`
    that is not a padding mask. If padding is at the end, `lengths` (B,), the number of real tokens, is faster than a
    mask.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        projection_dim: int | None = 64,
        *,
        sharing: str = "headwise",
        projection: str = "linear",
        max_length: int | None = None,
        rescale: bool = False,
        window_length: int = 0,
        global_tokens: int = 0,
        distance_bias: bool = False,
        attention_axes: int | tuple[int, ...] | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ):
        sizes = (positive_integer("num_heads", num_heads), positive_integer("key_dim", key_dim))
        probability("dropout", plain_number(kwargs.get("dropout", 0.0)))
        super().__init__(*sizes, sliding_window=sliding_window, **kwargs)
        self.projection_dim = plain_number(projection_dim)
        self.sharing = sharing
        self.projection_kind = projection
        self.max_length = plain_number(max_length)
        self.rescale = rescale
        self.window_length = plain_number(window_length)
        self.global_tokens = plain_number(global_tokens)
        self.distance_bias = distance_bias
        self.requested_axes = attention_axes
        self.projection: Projection | None = None
        if max_length is not None:
            positive_integer("max_length", max_length)
        if projection == "none":
            raise ValueError("projection is 'none'; for full attention use projection_dim=None")
        Projection.check_options(projection, self.max_length or 1, 1, sharing, rescale)
        rows = 1 if projection_dim is None else self.projection_dim
        window = (self.window_length, self.global_tokens, distance_bias)
        check_window(Projection.kinds[projection], rows, *window, "projection_dim")
        if projection_dim is None and window_length:
            raise ValueError(
                f"window_length={window_length} with projection_dim=None, full attention, which sees every token "
                "exactly already; set window_length=0, or projection_dim (0 for only a window)"
            )
        if projection_dim is None:
            self._attention_axes = (attention_axes,) if isinstance(attention_axes, int) else attention_axes
        elif sliding_window is not None:
            raise ValueError(
                f"sliding_window is {sliding_window}, but each projected key mixes tokens of the whole sequence, so no "
                "window can be cut out of them; set window_length instead, or use projection_dim=None"
            )

    def build(self, query_shape, value_shape, key_shape=None):
        key_shape = value_shape if key_shape is None else key_shape
        self.rank = len(query_shape)
        if self.projection_dim is None:
            super().build(query_shape, value_shape, key_shape)
            return
        check_features("query", query_shape)
        check_features("value", value_shape, self.rank)
        check_features("key", key_shape, self.rank)
        self.axes = self._sequence_axes(self.rank)
        # the parent is built for sequences: other axes are folded into the batch, and its weights do not depend on them
        super().build(*((None, self._length(shape), shape[-1]) for shape in (query_shape, value_shape, key_shape)))
        gate = [self._gate_dense] if self._use_gate else []
        for layer in (self.query_dense, self.key_dense, self.value_dense, *gate):
            layer.supports_masking = True  # masks are applied before these layers; avoids a warning that they get lost
        self.key_width = key_shape[-1]
        if self.distance_bias:
            self.distance_weight = self.add_weight(
                shape=(4 * self.window_length - 1, self.num_heads),
                initializer=first_distance_bias,
                autocast=False,  # it is added in float32
                name="distance_bias",
            )
        if self.projection_dim == 0:
            return
        self._check_widths(key_shape[-1], value_shape[-1])
        if self.sharing != "layerwise":
            self.max_length = self.max_length or self._length(value_shape)
            self.projection = self._create_projection(value_shape[-1])
            self.projection.build()

    def _build_attention(self, rank: int) -> None:
        super()._build_attention(rank)
        exact = keras.backend.result_type(self.compute_dtype, "float32")
        self._softmax = keras.layers.Softmax(self._softmax.axis, dtype=exact)  # type: ignore[has-type]

    def _masked_softmax(self, attention_scores, attention_mask=None):
        weights = super()._masked_softmax(attention_scores, attention_mask)
        return ops.cast(weights, attention_scores.dtype)

    def _check_widths(self, key_width: int, value_width: int) -> None:
        """Raise if keys and values have different widths, and the projection has weights for one width."""
        kind, kinds = self.projection_kind, Projection.kinds
        if key_width != value_width and kinds[kind].sized_by_width:
            others = list_names(name for name, cls in kinds.items() if not cls.sized_by_width)
            raise ValueError(
                f"key has width {key_width} and value {value_width}, but projection={kind!r} needs equal widths; use "
                f"projection={others}"
            )
        if self.key_dim != self.value_dim and kinds[kind].sized_by_head:
            others = list_names(name for name, cls in kinds.items() if not cls.sized_by_head)
            raise ValueError(
                f"key_dim is {self.key_dim} and value_dim {self.value_dim}, but projection={kind!r} needs heads of "
                f"equal widths; use projection={others}"
            )

    def _create_projection(self, width: int) -> Projection:
        """E and F of this layer, not built yet."""
        kind, kinds = self.projection_kind, Projection.kinds
        if self.max_length is None and kinds[kind].sized_by_max_length:
            others = list_names(name for name, cls in kinds.items() if not cls.sized_by_max_length)
            raise ValueError(
                f"the length of the keys is unknown, but projection={kind!r} needs the maximum length; set "
                f"max_length=, or use projection={others}"
            )
        return make_projection(
            kind,
            embed_dim=width,
            max_length=self.max_length or 1,
            projected_length=self.projection_dim or 1,
            sharing=self.sharing,
            num_heads=self.num_heads,
            rescale=self.rescale,
            head_dim=self.key_dim,
            dtype=self.dtype_policy,
            name="projection",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.window_length:  # here, because `call` gets copies if tensors are converted or cast
            self._check_self_attention(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _check_self_attention(self, query, value, key=None, *_: Any, **__: Any) -> None:
        for name, x in (("value", value), ("key", key)):
            if x is not None and x is not query:
                raise ValueError(
                    f"the {name} is another tensor than the query, but window_length={self.window_length}, and a "
                    "window holds the tokens around a query, which a context does not have; pass the query as "
                    f"{name}, or build the layer with window_length=0"
                )

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
        lengths=None,
        shared_projection=None,
    ):
        if lengths is not None:
            lengths = ops.convert_to_tensor(lengths, "int32")
            check_lengths(tuple(lengths.shape), len(value.shape))
            query, lengths = self._validate_lengths(query, value, lengths)
        if self.projection_dim is None:
            if lengths is not None:
                real = ops.expand_dims(real_positions(ops.shape(value)[1], lengths), 1)
                if attention_mask is not None:
                    real = ops.expand_dims(real, 1) if len(attention_mask.shape) == 4 else real
                    real = ops.logical_and(ops.cast(attention_mask, "bool"), real)
                attention_mask = real
            return super().call(
                query,
                value,
                key=key,
                query_mask=query_mask,
                value_mask=value_mask,
                key_mask=key_mask,
                attention_mask=attention_mask,
                return_attention_scores=return_attention_scores,
                training=training,
                use_causal_mask=use_causal_mask,
            )
        self._check_call(query, value, key, attention_mask, use_causal_mask)
        folded_query = self._fold(query)
        masks = [self._fold_mask(mask) for mask in (value_mask, key_mask) if mask is not None]
        if attention_mask is not None:
            seen_BS, is_padding_B = key_padding(attention_mask)
            masks.append(seen_BS)
            folded_query = nan_unless(is_padding_B, folded_query, f"the attention_mask {NOT_A_PADDING_MASK}")
        if self.window_length:
            tokens = [folded_query]
        else:
            tokens = [self._fold(x) for x in ([value] if key is None or key is value else [key, value])]
        length = ops.shape(tokens[0])[1]
        if masks and lengths is not None:
            masks.append(real_positions(length, lengths))
        if masks:
            mask_BN = ops.broadcast_to(ops.cast(masks[0], "bool"), ops.shape(tokens[0])[:2])
            for mask in masks[1:]:
                mask_BN = ops.logical_and(mask_BN, ops.cast(mask, "bool"))
            lengths, origin_BN, place_BN = real_tokens_first(mask_BN)
            tokens = [take_tokens(x, origin_BN) for x in tokens]
        if self.window_length:
            output, scores = self.attend_to_itself(
                tokens[0], lengths, shared_projection, training, return_attention_scores
            )
            if masks:  # back to the order of the query
                output = take_tokens(output, place_BN)
            if masks and scores is not None:
                scores = ops.swapaxes(take_tokens(ops.swapaxes(scores, 1, 2), place_BN), 1, 2)
        else:
            context = self.project(tokens, lengths, shared_projection)
            output, scores = self.attend(folded_query, context, training, return_attention_scores)
        output = self._unfold(output, query)
        return (output, self._unfold_scores(scores, query)) if return_attention_scores else output

    def project(
        self, tokens: list[Tensor], lengths_B: Tensor | None, shared_projection: Projection | None
    ) -> KeysValues:
        """Project tokens, the real ones first, to keys and values. `tokens` is one tensor for both, or one for each."""
        if self.projection_dim is None:
            return self._all_tokens(tokens, lengths_B)
        projection = self._select_projection(shared_projection, tokens[-1].shape[1])
        return self._all_rows(projection, tokens, lengths_B)

    def _all_rows(self, projection: Projection, tokens: list[Tensor], lengths_B: Tensor | None) -> KeysValues:
        """The keys and values of the K rows."""
        # zero the padding before projecting: E mixes positions, and a mask after it is too late
        tokens = [zero_padding(x, lengths_B) for x in tokens]
        if len(tokens) == 1:
            rows_BMKC, present_BK = projection(tokens[0], lengths_B)
            key_rows, value_rows = (projection.rows_of(part, rows_BMKC) for part in ("keys", "values"))
        else:
            key_rows, present_BK = projection(tokens[0], lengths_B, part="keys")
            value_rows, _ = projection(tokens[1], lengths_B, part="values")
        keys_BKHD = projection.finish(self._features(self.key_dense, key_rows), "keys")
        values_BKHD = projection.finish(self._features(self.value_dense, value_rows), "values")
        return zero_empty_examples(KeysValues(keys_BKHD, values_BKHD, present_BK), lengths_B)

    def _all_tokens(self, tokens: list[Tensor], lengths_B: Tensor | None) -> KeysValues:
        """The keys and values of all tokens, for full attention."""
        keys_BNHD, values_BNHD = self.key_dense(tokens[0]), self.value_dense(tokens[-1])
        present_BN = None if lengths_B is None else real_positions(ops.shape(tokens[0])[1], lengths_B)
        return zero_empty_examples(KeysValues(keys_BNHD, values_BNHD, present_BN), lengths_B)

    def attend_to_itself(
        self,
        x_BNC: Tensor,
        lengths_B: Tensor | None = None,
        shared_projection: Projection | None = None,
        training: bool | None = None,
        need_scores: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention of (B, N, C) tokens, the real ones first, with or without a window; results as of `attend`."""
        if not self.window_length:
            return self.attend(x_BNC, self.project([x_BNC], lengths_B, shared_projection), training, need_scores)
        length = ops.shape(x_BNC)[1]
        projection = self._select_projection(shared_projection, length) if self.projection_dim else None
        x_BNC = zero_padding(x_BNC, lengths_B)
        # two blocks see each other; not in training, where the optimizer would miss the gradient of E, which is zero
        fits = isinstance(length, int) and length <= 2 * self.window_length and not self.distance_bias
        if fits and not training and not need_scores:
            return self.attend(x_BNC, self._all_tokens([x_BNC], lengths_B))
        return self._attend_window(x_BNC, lengths_B, projection, training, need_scores)

    def _attend_window(
        self,
        x_BNC: Tensor,
        lengths_B: Tensor | None,
        projection: Projection | None,
        training: bool | None,
        need_scores: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """One softmax over the near tokens and the far rows, for the queries of each block; see window.py."""
        length, window = ops.shape(x_BNC)[1], self.window_length
        keys_BNHD, values_BNHD = self.key_dense(x_BNC), self.value_dense(x_BNC)
        key_rows = value_rows = None
        bias_BMnS = token_bias(length, lengths_B, window, self.global_tokens)
        if projection is not None:
            key_rows, value_rows, _ = self._all_rows(projection, [x_BNC], lengths_B)
            biases = [bias_BMnS, row_bias(projection.mass_in_blocks(x_BNC, lengths_B, window, self.global_tokens))]
            # one of them may be for all examples or heads; the zeros give it the shape of the other
            bias_BMnS = ops.concatenate([bias + 0 * other[..., :1] for bias, other in (biases, biases[::-1])], axis=-1)
        query_BnWHD = split_blocks(self.query_dense(x_BNC) * self._inverse_sqrt_key_dim, window)
        near_keys_BnPHD, near_values_BnPHD = (with_neighbors(split_blocks(x, window)) for x in (keys_BNHD, values_BNHD))
        far_keys_BRHD = far_rows(keys_BNHD, key_rows, self.global_tokens)
        far_values_BRHD = far_rows(values_BNHD, value_rows, self.global_tokens)
        near_BHnWP = at_least_float32(ops.einsum("bnwhd,bnphd->bhnwp", query_BnWHD, near_keys_BnPHD))
        far_BHnWR = at_least_float32(ops.einsum("bnwhd,brhd->bhnwr", query_BnWHD, far_keys_BRHD))
        if self.distance_bias:
            near_BHnWP = near_BHnWP + distance_bias_of_block(self.distance_weight, window)[:, None]
        scores = ops.concatenate([near_BHnWP, far_BHnWR], axis=-1) + bias_BMnS[:, :, :, None]
        scores = ops.cast(ops.softmax(scores, axis=-1), x_BNC.dtype)
        weights = self._dropout_layer(scores, training=training) if self.dropout else scores
        heads_BnWHD = ops.einsum("bhnwp,bnphd->bnwhd", weights[..., : 3 * window], near_values_BnPHD)
        heads_BnWHD = heads_BnWHD + ops.einsum("bhnwr,brhd->bnwhd", weights[..., 3 * window :], far_values_BRHD)
        tokens = ops.shape(query_BnWHD)[1] * window
        heads_BNHD = ops.reshape(heads_BnWHD, (-1, tokens, self.num_heads, self.value_dim))[:, :length]
        if lengths_B is not None:  # the output of an example without real tokens is b_O
            heads_BNHD = ops.where((lengths_B == 0)[:, None, None, None], ops.zeros_like(heads_BNHD), heads_BNHD)
        output_BNC = self._output(x_BNC, heads_BNHD)
        if not need_scores:
            return output_BNC, None
        scores = ops.reshape(scores, (-1, self.num_heads, tokens, ops.shape(scores)[-1]))
        return output_BNC, scores[:, :, :length]

    def attend(
        self, query_BTC: Tensor, context: KeysValues, training: bool | None = None, need_scores: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from (B, T, C) queries to a context. Returns (B, T, C) and, if needed, (B, H, T, K) scores."""
        if self._query_order(query_BTC, context.keys_BKHD) == "folded":
            return self._attend_folded(query_BTC, context, training, need_scores)
        keys_BKHD, values_BKHD, present_BK = context
        mask_B1K = None if present_BK is None else ops.expand_dims(present_BK, 1)
        heads_BTHD, scores_BHTK = self.softmax_attention(
            self.query_dense(query_BTC), keys_BKHD, values_BKHD, mask_B1K, training, need_scores
        )
        return self._output(query_BTC, heads_BTHD), scores_BHTK

    def _query_order(self, query_BTC: Tensor, keys_BKHD: Tensor) -> QueryOrder:
        """The cheaper order of the products with W_Q and W_O: see `attend` and `_attend_folded`."""
        outputs = self._output_shape or query_BTC.shape[-1:]
        needs_heads = self._use_gate or self._flash_attention or len(outputs) > 1
        denses = (self.query_dense, self.output_dense)
        if needs_heads or any(dense.quantization_mode or dense.activity_regularizer for dense in denses):
            return "per head"
        queries, rows = (length_to_plan(ops.shape(x)[1]) for x in (query_BTC, keys_BKHD))
        # each counts W_Q and W_O, as if both had its widths
        sizes = ((query_BTC.shape[-1], self.key_dim), (outputs[0], self.value_dim))
        costs = [query_costs(queries, rows, channels, self.num_heads, dim) for channels, dim in sizes]
        return cheapest({order: sum(cost[order] for cost in costs) for order in costs[0]})

    def _attend_folded(
        self, query_BTC: Tensor, context: KeysValues, training: bool | None, need_scores: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`softmax((X (W_Q keysᵀ) + b_Q keysᵀ) / √D) (values W_O) + b_O`: skips queries and heads."""
        keys_BKHD, values_BKHD, present_BK = context
        query_BTC, dtype = ops.cast(query_BTC, keys_BKHD.dtype), keys_BKHD.dtype
        query_CHD, output_HDC = (ops.cast(dense.kernel, dtype) for dense in (self.query_dense, self.output_dense))
        keys_BKHD = keys_BKHD * self._inverse_sqrt_key_dim
        folded_keys_BCHK = ops.einsum("bkhd,chd->bchk", keys_BKHD, query_CHD)
        scores_BTHK = at_least_float32(ops.einsum("btc,bchk->bthk", query_BTC, folded_keys_BCHK))
        if self.query_dense.bias is not None:
            bias_HD = ops.cast(self.query_dense.bias, dtype)
            scores_BTHK = scores_BTHK + at_least_float32(ops.einsum("bkhd,hd->bhk", keys_BKHD, bias_HD))[:, None]
        if present_BK is not None:
            scores_BTHK = ops.where(present_BK[:, None, None], scores_BTHK, -float("inf"))
        scores_BTHK = ops.cast(ops.softmax(scores_BTHK, axis=-1), dtype)
        weights_BTHK = self._dropout_layer(scores_BTHK, training=training) if self.dropout else scores_BTHK
        folded_values_BHKC = ops.einsum("bkhd,hdc->bhkc", values_BKHD, output_HDC)
        output_BTC = ops.einsum("bthk,bhkc->btc", weights_BTHK, folded_values_BHKC)
        if self.output_dense.bias is not None:
            output_BTC = output_BTC + ops.cast(self.output_dense.bias, dtype)
        return output_BTC, ops.transpose(scores_BTHK, (0, 2, 1, 3)) if need_scores else None

    def _output(self, query_BTC: Tensor, heads_BTHD: Tensor) -> Tensor:
        """What follows the softmax: the gate, if there is one, and W_O."""
        if self._use_gate:
            heads_BTHD = heads_BTHD * self._gate_dense(query_BTC)
        return self.output_dense(heads_BTHD)

    def softmax_attention(
        self, query_BTHD, keys_BKHD, values_BKHD, mask_BTK=None, training=None, need_scores=False, is_causal=False
    ) -> tuple[Tensor, Tensor | None]:
        """`softmax(query keysᵀ / √D) values`, fused unless scores or dropout are needed."""
        # JAX fuses only keys and values of one size, and nothing in float16 on CPU
        jax_cannot_fuse = self.key_dim != self.value_dim or self.compute_dtype == "float16"
        is_fused = not (keras.backend.backend() == "jax" and jax_cannot_fuse)
        if need_scores or (training and self.dropout) or not is_fused:
            tensors = (query_BTHD, keys_BKHD, values_BKHD, mask_BTK, training)
            return self._compute_attention(*tensors, return_attention_scores=True, use_causal_mask=is_causal)
        heads_BTHD = ops.dot_product_attention(
            query_BTHD,
            keys_BKHD,
            values_BKHD,
            mask=None if mask_BTK is None else ops.expand_dims(mask_BTK, 1),
            scale=self._inverse_sqrt_key_dim,
            is_causal=is_causal,
            flash_attention=self._flash_attention,
        )
        return heads_BTHD, None

    def _features(self, dense: keras.layers.EinsumDense, rows_BMKC: Tensor) -> Tensor:
        """`rows · W + b`, (B, K, H, D), where M is 1 (the same rows for all heads) or H (rows for each head)."""
        if rows_BMKC.shape[1] == 1:
            return dense(rows_BMKC[:, 0])
        if dense.quantization_mode is not None:
            # the kernel lacks its scales: call the layer on the rows of each head, and keep that head
            return ops.stack([dense(rows_BMKC[:, head])[:, :, head] for head in range(self.num_heads)], axis=2)
        features_BKHD = ops.einsum("bhkc,chd->bkhd", rows_BMKC, ops.cast(dense.kernel, rows_BMKC.dtype))
        if dense.bias is not None:
            features_BKHD = features_BKHD + ops.cast(dense.bias, features_BKHD.dtype)
        if dense.activity_regularizer is not None:  # calling the layer would add this loss
            loss = dense.activity_regularizer(features_BKHD)
            self.add_loss(loss / ops.cast(ops.shape(features_BKHD)[0], loss.dtype))
        return features_BKHD

    def _select_projection(self, shared_projection: Projection | None, length: Any = None) -> Projection:
        """The layer's own projection or, with `sharing="layerwise"`, the shared one, for `length` tokens if known."""
        if (shared_projection is None) is (self.sharing == "layerwise"):
            raise ValueError(
                f"shared_projection is {'missing' if shared_projection is None else 'given'} but "
                f"sharing={self.sharing!r}; pass one to every call with 'layerwise', and none otherwise"
            )
        if shared_projection is None:
            assert self.projection is not None
            check_length("value", length, self.projection.max_length, TOO_LONG)
            return self.projection
        expected = {"projection": self.projection_kind, "projected_length": self.projection_dim, "sharing": "layerwise"}
        sizes = {
            "max_length": (self.max_length, shared_projection.sized_by_max_length and self.max_length is not None),
            "embed_dim": (self.key_width, shared_projection.sized_by_width),
            "head_dim": (self.key_dim, shared_projection.sized_by_head),
        }
        expected |= {name: size for name, (size, matters) in sizes.items() if matters}
        for name, value in expected.items():
            if shared_projection.options[name] != value:
                raise ValueError(
                    f"the shared_projection has {name}={shared_projection.options[name]!r} but this layer "
                    f"has {value!r}; create it with the options of the layer"
                )
        check_length("value", length, shared_projection.max_length, TOO_LONG)
        return shared_projection

    def _validate_lengths(self, query: Tensor, value: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, NaN where a length is invalid, and lengths between 0 and the length of the values."""
        length = ops.shape(value)[1]
        is_valid_B = ops.logical_and(lengths >= 0, lengths <= length)
        query = nan_unless(is_valid_B, query, f"lengths contains numbers outside 0 … {length}, the length of value")
        return query, ops.clip(lengths, 0, length)

    def _check_call(self, query, value, key, attention_mask, use_causal_mask) -> None:
        if use_causal_mask:
            raise ValueError(
                "use_causal_mask=True, but E mixes every token, future ones too, into each projected key, so no mask "
                "can hide the future; use projection_dim=None, or a model with a causal decoder (docs/mathematics.md)"
            )
        rank = self.rank
        for name, x in (("query", query), ("value", value), ("key", value if key is None else key)):
            check_features(name, tuple(x.shape), rank)
        if key is not None and tuple(key.shape[1:-1]) != tuple(value.shape[1:-1]):
            raise ValueError(
                f"key has shape {tuple(key.shape)} and value {tuple(value.shape)}; there must be one value per key"
            )
        if self.projection is not None:
            check_length("value", self._length(value.shape), self.projection.max_length, TOO_LONG)
        if attention_mask is not None and rank != 3:
            raise ValueError(
                f"attention_mask with inputs of rank {rank}: flatten them to (batch, length, width), or pass value_mask"
            )
        if attention_mask is not None:
            check_attention_mask("attention_mask", tuple(attention_mask.shape), query.shape[1], value.shape[1])

    def _sequence_axes(self, rank: int) -> tuple[int, ...]:
        """The attention axes as positive numbers."""
        requested = self.requested_axes
        if requested is None:
            requested = tuple(range(1, rank - 1))
        axes = tuple(axis % rank for axis in ((requested,) if isinstance(requested, int) else requested))
        if not axes or len(set(axes)) != len(axes) or not set(axes) <= set(range(1, rank - 1)):
            raise ValueError(
                f"attention_axes is {self.requested_axes!r}; for inputs of rank {rank} use axes between batch and width"
            )
        self.other_axes = tuple(axis for axis in range(1, rank - 1) if axis not in axes)
        return axes

    @property
    def reads_sequences(self) -> bool:
        """Whether inputs are (batch, length, width)."""
        return self.rank == 3

    def _length(self, shape: tuple[int | None, ...]) -> int | None:
        """The number of tokens along the attention axes; None if unknown."""
        sizes = [shape[axis] for axis in self.axes]
        return None if None in sizes else prod(sizes)  # type: ignore[arg-type]

    def _fold(self, x: Tensor) -> Tensor:
        """(B, …, C) to (B', N, C): the attention axes become the sequence, the others part of the batch."""
        if self.axes == (1,) and not self.other_axes:
            return x
        shape = ops.shape(x)
        moved = ops.transpose(x, (0, *self.other_axes, *self.axes, len(shape) - 1))
        return ops.reshape(moved, (-1, prod(shape[axis] for axis in self.axes), shape[-1]))

    def _fold_mask(self, mask: Tensor) -> Tensor:
        return self._fold(ops.expand_dims(mask, -1))[..., 0]

    def _unfold(self, output: Tensor, query: Tensor) -> Tensor:
        """Back to the axes of the query."""
        if self.axes == (1,) and not self.other_axes:
            return output
        order = (0, *self.other_axes, *self.axes)
        shape, features = ops.shape(query), ops.shape(output)[2:]
        moved = ops.reshape(output, (-1, *(shape[axis] for axis in order[1:]), *features))
        places = [order.index(axis) for axis in range(len(order))]
        return ops.transpose(moved, (*places, *range(len(order), len(order) + len(features))))

    def _unfold_scores(self, scores: Tensor, query: Tensor) -> Tensor:
        """(B', H, T, K) to (B, other axes, H, attention axes, K)."""
        if self.axes == (1,) and not self.other_axes:
            return scores
        shape = ops.shape(query)
        others, attended = ([shape[axis] for axis in axes] for axes in (self.other_axes, self.axes))
        return ops.reshape(scores, (-1, *others, self.num_heads, *attended, ops.shape(scores)[-1]))

    def compute_output_shape(self, query_shape, value_shape, key_shape=None):
        if self.projection_dim is not None:
            check_features("query", query_shape)
            check_features("value", value_shape, len(query_shape))
        return super().compute_output_shape(query_shape, value_shape, key_shape)

    def compute_output_spec(
        self, query, value, key=None, return_attention_scores=False, use_causal_mask=False, **kwargs
    ):
        lengths = kwargs.get("lengths")
        if lengths is not None:
            check_lengths(tuple(lengths.shape) if hasattr(lengths, "shape") else (len(lengths),), len(value.shape))
        if self.projection_dim is None:
            kwargs.pop("lengths", None)
            kwargs.pop("shared_projection", None)
            flags = {"return_attention_scores": return_attention_scores, "use_causal_mask": use_causal_mask}
            return super().compute_output_spec(query, value, key, **flags, **kwargs)
        self._check_call(query, value, key, kwargs.get("attention_mask"), use_causal_mask)
        shape = self.compute_output_shape(query.shape, value.shape, None if key is None else key.shape)
        output = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        columns, length = 3 * self.window_length + self.global_tokens, self._length(value.shape)
        if self.projection_dim:
            projection = self._select_projection(kwargs.get("shared_projection"))
            columns = None if length is None else columns + projection.rows(length)
        attended, others = ([query.shape[axis] for axis in axes] for axes in (self.axes, self.other_axes))
        shape = (query.shape[0], *others, self.num_heads, *attended, columns)
        return output, keras.KerasTensor(shape, dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "projection_dim": self.projection_dim,
            "sharing": self.sharing,
            "projection": self.projection_kind,
            "max_length": self.max_length,
            "rescale": self.rescale,
            "window_length": self.window_length,
            "global_tokens": self.global_tokens,
            "distance_bias": self.distance_bias,
            "attention_axes": self.requested_axes,
        }
