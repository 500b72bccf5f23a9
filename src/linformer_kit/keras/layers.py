"""From tokens to hidden states: embeddings, layers and the stack of them, as in the PyTorch models.

Shapes: B batch, N length, C model size. Real tokens come first everywhere; `lengths_B` counts them.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import keras
from keras import ops

from ..models.options_linformer import NO_WINDOW, WINDOW_IN_DECODER
from .attention import KeysValues, LinearMultiHeadAttention
from .causal import Cache, CausalLinearMultiHeadAttention
from .checks import check_length, nan_unless
from .options import Options
from .projection import Projection, make_projection
from .tokens import Tensor, at_least_float32, zero_padding


class Source(NamedTuple):
    """Encoder output, for cross-attention."""

    states_BNC: Tensor
    lengths_B: Tensor | None


class Prompt(NamedTuple):
    """The first tokens of generation, the real ones first, and the projected source of each layer."""

    ids_BN: Tensor
    lengths_B: Tensor
    types_BN: Tensor | None
    sources: list[KeysValues | None]


def initializer(options: Options) -> keras.initializers.Initializer:
    """Normal with standard deviation `initializer_range`; a new one per weight: one object repeats its numbers."""
    return keras.initializers.RandomNormal(stddev=options.initializer_range)


def make_dense(units: int, options: Options, **kwargs: Any) -> keras.layers.Dense:
    return keras.layers.Dense(units, kernel_initializer=initializer(options), **kwargs)


def make_norm(options: Options, **kwargs: Any) -> keras.layers.LayerNormalization:
    return keras.layers.LayerNormalization(epsilon=options.epsilon, **kwargs)


class Embeddings(keras.layers.Layer):
    """Sum of word, position and token type embeddings, then norm and dropout."""

    def __init__(self, options: Options, words: keras.layers.ReversibleEmbedding, **kwargs: Any):
        super().__init__(**kwargs)
        self.options = options
        self.words = words
        self.types = None
        if options.token_types:
            self.types = keras.layers.Embedding(
                options.token_types,
                options.d_model,
                initializer(options),
                dtype=keras.config.dtype_policy().variable_dtype,  # as of `make_embedding`
                name="types",
            )
        self.norm = make_norm(options, name="norm")
        self.dropout = keras.layers.Dropout(options.dropout, name="dropout")
        self.positions = None

    def build(self, _: Any = None) -> None:
        options, shape = self.options, (None, None, self.options.d_model)
        for layer in (self.words, self.types):
            if layer is not None and not layer.built:
                layer.build((None, None))
        if options.positions == "learned":
            self.positions = self.add_weight(
                shape=(options.max_len, options.d_model), initializer=initializer(options), name="positions"
            )
        self.norm.build(shape)
        self.built = True

    def call(
        self, ids_BN: Tensor, types_BN: Tensor | None = None, first_B: Tensor | None = None, training=None
    ) -> Tensor:
        """(B, N) ids and token types to (B, N, C); positions start at 0, or at `first_B` (B,)."""
        embedded_BNC = self.words(ids_BN)
        if self.types is not None:
            embedded_BNC = embedded_BNC + self.types(ops.zeros_like(ids_BN) if types_BN is None else types_BN)
        if self.options.positions != "none":
            embedded_BNC = embedded_BNC + ops.cast(self._positions(ops.shape(ids_BN)[1], first_B), embedded_BNC.dtype)
        # some backends silently clip or wrap ids outside the vocabulary
        counts = {"input_ids": self.options.vocab_size, "token_type_ids": max(1, self.options.token_types)}
        for (name, count), x_BN in zip(counts.items(), (ids_BN, types_BN), strict=True):
            if x_BN is not None:
                is_valid_B = ops.all(ops.logical_and(x_BN >= 0, x_BN < count), axis=1)
                message = f"{name} contains values outside the allowed integers 0 … {count - 1}"
                embedded_BNC = nan_unless(is_valid_B, embedded_BNC, message)
        return self.dropout(self.norm(embedded_BNC), training=training)

    def _positions(self, length: Any, first_B: Tensor | None) -> Tensor:
        """(N, C), or (B, N, C) if `first_B` is given."""
        position = ops.arange(length, dtype="int32")
        if first_B is not None:
            position = position + first_B[:, None]
        if self.positions is not None:
            return self.positions[:length] if first_B is None else ops.take(self.positions, position, axis=0)
        return sinusoidal(position, self.options.d_model) * (self.options.initializer_range * 2**0.5)


def sinusoidal(position: Tensor, width: int) -> Tensor:
    """(…) positions to (…, C): alternating sines and cosines of position / 10000^(2i / C)."""
    even = ops.arange(0, width, 2, dtype="float32")
    angles = ops.cast(position, "float32")[..., None] * 10000.0 ** (-even / width)
    waves = ops.stack([ops.sin(angles), ops.cos(angles)], axis=-1)
    return ops.reshape(waves, (*ops.shape(angles)[:-1], 2 * angles.shape[-1]))[..., :width]


class Residual(keras.layers.Layer):
    """`x + dropout(f(norm(x)))` or, without `norm_first`, `norm(x + dropout(f(x)))`."""

    def __init__(self, options: Options, **kwargs: Any):
        super().__init__(**kwargs)
        self.norm = make_norm(options, name="norm")
        self.dropout = keras.layers.Dropout(options.dropout, name="dropout")
        self.norm_first = options.norm_first

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.built = True

    def before(self, x_BNC: Tensor) -> Tensor:
        """The input of f."""
        return self.norm(x_BNC) if self.norm_first else x_BNC

    def after(self, x_BNC: Tensor, output_BNC: Tensor, training: bool | None) -> Tensor:
        """The sum of `x` and the output of f."""
        sum_BNC = x_BNC + self.dropout(output_BNC, training=training)
        return sum_BNC if self.norm_first else self.norm(sum_BNC)


class LocalConvolution(keras.layers.Layer):
    """A depthwise convolution over the real tokens, centered on each token."""

    def __init__(self, width: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.width = width

    def build(self, shape: Any) -> None:
        normal = keras.initializers.RandomNormal(stddev=self.width**-0.5)
        self.weight = self.add_weight(shape=(shape[-1], 1, self.width), initializer=normal, name="weight")
        self.bias = self.add_weight(shape=(shape[-1],), initializer="zeros", name="bias")
        self.built = True

    def call(self, x_BNC: Tensor, lengths_B: Tensor | None) -> Tensor:
        """(B, N, C) to (B, N, C); positions outside the real tokens count as zero."""
        last, reach = self.width - 1, self.width // 2
        padded_BNC = at_least_float32(ops.pad(zero_padding(x_BNC, lengths_B), [[0, 0], [reach, reach], [0, 0]]))
        weight, bias = (ops.cast(variable, padded_BNC.dtype) for variable in (self.weight, self.bias))
        sums_BNC = bias + sum(
            weight[:, 0, place] * padded_BNC[:, place : place - last or None] for place in range(self.width)
        )
        return ops.cast(sums_BNC, x_BNC.dtype)


class LinformerLayer(keras.layers.Layer):
    """Self-attention, cross-attention if there is a source, and the feed-forward network."""

    def __init__(self, options: Options, k: int, is_decoder: bool, has_source: bool, **kwargs: Any):
        super().__init__(**kwargs)
        self.options = options
        self.is_decoder = is_decoder
        heads = {**options.heads, "sharing": options.sharing, "projection": options.projection}
        encoder_options = {
            **heads,
            "projection_dim": None if options.full_attn else k,
            "max_length": options.max_len,
            "rescale": options.rescale,
        }
        if is_decoder:
            slots = None if options.full_attn or options.decoder_attention == "full" else options.slots
            self.attention = CausalLinearMultiHeadAttention(
                **heads,
                block_length=options.block_length,
                slots=slots,
                kernel_initializer=initializer(options),
                name="attention",
            )
        else:
            self.attention = LinearMultiHeadAttention(
                **encoder_options,
                window_length=options.window_length,
                global_tokens=options.global_tokens,
                distance_bias=options.distance_bias,
                kernel_initializer=initializer(options),
                name="attention",
            )
        self.local = None
        if options.local_width and not is_decoder:
            self.local = LocalConvolution(options.local_width, name="local")
        self.attention_residual = Residual(options, name="attention_residual")
        self.cross_attention = None
        if has_source:
            self.cross_attention = LinearMultiHeadAttention(
                **encoder_options, kernel_initializer=initializer(options), name="cross_attention"
            )
            self.cross_attention_residual = Residual(options, name="cross_attention_residual")
        self.inner = make_dense(options.d_ff, options, activation=options.activation, name="inner")
        self.outer = make_dense(options.d_model, options, name="outer")
        self.feed_forward_residual = Residual(options, name="feed_forward_residual")

    def build(self, _: Any = None) -> None:
        shape = (None, None, self.options.d_model)
        self.attention.build(*[shape] * (1 if self.is_decoder else 2))
        if self.local is not None:
            self.local.build(shape)
        self.attention_residual.build(shape)
        if self.cross_attention is not None:
            self.cross_attention.build(shape, shape)
            self.cross_attention_residual.build(shape)
        self.inner.build(shape)
        self.outer.build((None, None, self.options.d_ff))
        self.feed_forward_residual.build(shape)
        self.built = True

    def call(
        self,
        x_BNC: Tensor,
        lengths_B: Tensor | None = None,
        shared_projection: Projection | None = None,
        source: KeysValues | None = None,
        training: bool | None = None,
    ) -> Tensor:
        queries_BNC = self.attention_residual.before(x_BNC)
        if self.is_decoder:
            attended_BNC = self.attention(queries_BNC, training=training, shared_projection=shared_projection)
        else:
            attended_BNC, _ = self.attention.attend_to_itself(queries_BNC, lengths_B, shared_projection, training)
        if self.local is not None:
            attended_BNC = attended_BNC + self.local(queries_BNC, lengths_B)
        return self.after_attention(self.attention_residual.after(x_BNC, attended_BNC, training), source, training)

    def project_source(self, source: Source, shared_projection: Projection | None) -> KeysValues:
        """Project the source to the keys and values of cross-attention."""
        assert self.cross_attention is not None
        return self.cross_attention.project([source.states_BNC], source.lengths_B, shared_projection)

    def after_attention(self, x_BNC: Tensor, source: KeysValues | None, training: bool | None = None) -> Tensor:
        """Cross-attention and the feed-forward network."""
        if self.cross_attention is not None:
            assert source is not None
            attended_BNC, _ = self.cross_attention.attend(self.cross_attention_residual.before(x_BNC), source, training)
            x_BNC = self.cross_attention_residual.after(x_BNC, attended_BNC, training)
        inner_BNC = self.inner(self.feed_forward_residual.before(x_BNC))
        return self.feed_forward_residual.after(x_BNC, self.outer(inner_BNC), training)

    def prefill(
        self, x_BNC, lengths_B, capacity: int, shared_projection, source: KeysValues | None
    ) -> tuple[Tensor, Cache]:
        """As `call`, and the cache for `step`."""
        queries_BNC = self.attention_residual.before(x_BNC)
        attended_BNC, cache = self.attention.prefill(queries_BNC, lengths_B, capacity, shared_projection)
        return self.after_attention(self.attention_residual.after(x_BNC, attended_BNC, False), source, False), cache

    def step(self, x_B1C, cache: Cache, seen_B, shared_projection, source: KeysValues | None) -> tuple[Tensor, Cache]:
        """As `call`, for the next token of every example."""
        attended_B1C, cache = self.attention.step(
            self.attention_residual.before(x_B1C), cache, seen_B, shared_projection
        )
        return self.after_attention(self.attention_residual.after(x_B1C, attended_B1C, False), source, False), cache


class Stack(keras.layers.Layer):
    """Embeddings and layers of an encoder or a causal decoder."""

    def __init__(
        self,
        options: Options,
        words: keras.layers.ReversibleEmbedding,
        is_decoder: bool = False,
        has_source: bool = False,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if is_decoder and options.window_length:
            raise ValueError(WINDOW_IN_DECODER.format(window_length=options.window_length))
        self.options = options
        self.is_decoder = is_decoder
        self.embeddings = Embeddings(options, words, name="embeddings")
        self.blocks = [
            LinformerLayer(options, k, is_decoder, has_source, name=f"layer_{number}")
            for number, k in enumerate(options.k_per_layer)
        ]
        self.norm = make_norm(options, name="norm") if options.norm_first else None
        # the stack owns the shared projections and passes them to its layers
        self.shared_projection = self.shared_source_projection = None
        if options.sharing == "layerwise" and not options.full_attn:
            token_options = (options.max_len, options.k_per_layer[0], options.rescale)
            if not is_decoder and options.k_per_layer[0]:
                self.shared_projection = self._make_shared(*token_options, "shared_projection")
            elif is_decoder and options.decoder_attention == "causal":
                block_options = (options.block_length, options.slots, False)  # all are complete: nothing to rescale
                self.shared_projection = self._make_shared(*block_options, "shared_projection")
            if has_source:
                self.shared_source_projection = self._make_shared(*token_options, "shared_source_projection")

    def _make_shared(self, max_length: int, projected_length: int, rescale: bool, name: str) -> Projection:
        return make_projection(
            self.options.projection,
            embed_dim=self.options.d_model,
            max_length=max_length,
            projected_length=projected_length,
            sharing="layerwise",
            num_heads=self.options.n_heads,
            rescale=rescale,
            head_dim=self.options.heads["key_dim"],
            name=name,
        )

    def build(self, _: Any = None) -> None:
        self.embeddings.build()
        for layer in self.blocks:
            layer.build()
        if self.norm is not None:
            self.norm.build((None, None, self.options.d_model))
        for projection in (self.shared_projection, self.shared_source_projection):
            if projection is not None:
                projection.build()
        self.built = True

    def check_length(self, length: Any) -> None:
        """Raise for inputs longer than the position embeddings or E."""
        options = self.options
        is_projected = not self.is_decoder and not options.full_attn and any(options.k_per_layer)
        is_limited_by_E = is_projected and not Projection.kinds[options.projection].takes_any_length
        if options.positions == "learned" or is_limited_by_E:
            check_length("the input", length, options.max_len, "truncate it, or build the model with a larger max_len")

    def call(
        self,
        ids_BN: Tensor,
        lengths_B: Tensor | None = None,
        types_BN: Tensor | None = None,
        source: Source | None = None,
        training: bool | None = None,
    ) -> Tensor:
        """(B, N) ids to (B, N, C) hidden states."""
        self.check_length(ids_BN.shape[1])
        x_BNC = self.embeddings(ids_BN, types_BN, training=training)
        for layer, context in zip(self.blocks, self.project_source(source), strict=True):
            x_BNC = layer(x_BNC, lengths_B, shared_projection=self.shared_projection, source=context, training=training)
        return x_BNC if self.norm is None else self.norm(x_BNC)

    def project_source(self, source: Source | None) -> list[KeysValues | None]:
        """Project the source to the keys and values of every layer: K rows each, whatever its length."""
        if source is None:
            return [None] * len(self.blocks)
        return [layer.project_source(source, self.shared_source_projection) for layer in self.blocks]

    def prefill(self, prompt: Prompt, capacity: int) -> tuple[Tensor, list[Cache]]:
        """As `call`, and the caches for `step`, with room for `capacity` tokens in total."""
        x_BNC, caches = self.embeddings(prompt.ids_BN, prompt.types_BN, training=False), []
        for layer, source in zip(self.blocks, prompt.sources, strict=True):
            x_BNC, cache = layer.prefill(x_BNC, prompt.lengths_B, capacity, self.shared_projection, source)
            caches.append(cache)
        return x_BNC if self.norm is None else self.norm(x_BNC), caches

    def step(
        self,
        ids_B1: Tensor,
        types_B1: Tensor | None,
        caches: list[Cache],
        seen_B: Tensor,
        sources: list[KeysValues | None],
    ) -> tuple[Tensor, list[Cache]]:
        """(B, C) hidden states of the next token of every example, which follows `seen_B` tokens."""
        x_B1C, updated = self.embeddings(ids_B1, types_B1, first_B=seen_B, training=False), []
        for layer, cache, source in zip(self.blocks, caches, sources, strict=True):
            x_B1C, cache = layer.step(x_B1C, cache, seen_B, self.shared_projection, source)
            updated.append(cache)
        return (x_B1C if self.norm is None else self.norm(x_B1C))[:, 0], updated


def decoder_options(options: Options) -> Options:
    """The options of the decoder in an encoder-decoder. Cross-attention uses the k of the last encoder layer."""
    layers, k = options.n_decoder_layers or options.n_layers, options.k_per_layer[-1]
    if k == 0:
        raise ValueError(
            "k is 0 in the last layer of the encoder, but cross-attention has as many rows, and no window; set k to at "
            "least 1"
        )
    return replace(options, n_layers=layers, k=k, token_types=0, **NO_WINDOW)
