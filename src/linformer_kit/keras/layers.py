"""From tokens to hidden states: embeddings, attention, feed-forward, and the stack of them, as in the PyTorch models.

Shapes: B batch, N length, C model size. Real tokens come first everywhere; `lengths_B` says how many there are.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import keras
from keras import ops

from .attention import KeysValues, LinearMultiHeadAttention
from .causal import Cache, CausalLinearMultiHeadAttention
from .checks import check_length, poison_unless
from .options import Options
from .projection import Projection, make_projection
from .tokens import Tensor, real_positions


class Source(NamedTuple):
    """What a decoder attends to."""

    states_BNC: Tensor
    lengths_B: Tensor | None


class Beginning(NamedTuple):
    """What generation begins with, the real tokens first, and what the decoder attends to beside them, layer by layer."""

    ids_BN: Tensor
    lengths_B: Tensor
    types_BN: Tensor | None
    sources: list[KeysValues | None]


def normal(options: Options) -> keras.initializers.Initializer:
    """Normal numbers of size `initializer_range`; a new one for each weight, since the same one gives the same numbers."""
    return keras.initializers.RandomNormal(stddev=options.initializer_range)


def dense(units: int, options: Options, **kwargs: Any) -> keras.layers.Dense:
    return keras.layers.Dense(units, kernel_initializer=normal(options), **kwargs)


def norm(options: Options, **kwargs: Any) -> keras.layers.LayerNormalization:
    return keras.layers.LayerNormalization(epsilon=options.epsilon, **kwargs)


class Embeddings(keras.layers.Layer):
    """Words, positions and token types, summed, normalised, dropped out."""

    def __init__(self, options: Options, words: keras.layers.ReversibleEmbedding, **kwargs: Any):
        super().__init__(**kwargs)
        self.options = options
        self.words = words
        self.types = None
        if options.token_types:
            self.types = keras.layers.Embedding(options.token_types, options.d_model, normal(options), name="types")
        self.norm = norm(options, name="norm")
        self.dropout = keras.layers.Dropout(options.dropout, name="dropout")
        self.positions = None

    def build(self, _: Any = None) -> None:
        options, shape = self.options, (None, None, self.options.d_model)
        for layer in (self.words, self.types):
            if layer is not None and not layer.built:
                layer.build((None, None))
        if options.positions == "learned":
            self.positions = self.add_weight(
                shape=(options.max_len, options.d_model), initializer=normal(options), name="positions"
            )
        self.norm.build(shape)
        self.built = True

    def call(
        self, ids_BN: Tensor, types_BN: Tensor | None = None, first_B: Tensor | None = None, training=None
    ) -> Tensor:
        """(B, N) ids, and token types, to (B, N, C); positions count from 0, or from `first_B` (B,)."""
        embedded_BNC = self.words(ids_BN)
        if self.types is not None:
            embedded_BNC = embedded_BNC + self.types(ops.zeros_like(ids_BN) if types_BN is None else types_BN)
        if self.options.positions != "none":
            embedded_BNC = embedded_BNC + ops.cast(self._positions(ops.shape(ids_BN)[1], first_B), embedded_BNC.dtype)
        # some backends clip or wrap what is not in the vocabulary, and would go on
        for name, given_BN, count in (
            ("input_ids", ids_BN, self.options.vocab_size),
            ("token_type_ids", types_BN, max(1, self.options.token_types)),
        ):
            if given_BN is not None:
                is_known_B = ops.all(ops.logical_and(given_BN >= 0, given_BN < count), axis=1)
                complaint = f"{name} holds others than the integers 0 … {count - 1}, which are allowed"
                embedded_BNC = poison_unless(is_known_B, embedded_BNC, complaint)
        return self.dropout(self.norm(embedded_BNC), training=training)

    def _positions(self, length: Any, first_B: Tensor | None) -> Tensor:
        """(N, C), or (B, N, C) where they do not begin at 0."""
        position = ops.arange(length, dtype="int32")
        if first_B is not None:
            position = position + first_B[:, None]
        if self.positions is not None:
            return self.positions[:length] if first_B is None else ops.take(self.positions, position, axis=0)
        return sinusoidal(position, self.options.d_model) * (self.options.initializer_range * 2**0.5)


def sinusoidal(position: Tensor, width: int) -> Tensor:
    """(…) positions to (…, C): sines and cosines of position / 10000^(2i / C), in turn."""
    even = ops.arange(0, width, 2, dtype="float32")
    angles = ops.cast(position, "float32")[..., None] * 10000.0 ** (-even / width)
    waves = ops.stack([ops.sin(angles), ops.cos(angles)], axis=-1)
    return ops.reshape(waves, (*ops.shape(angles)[:-1], 2 * angles.shape[-1]))[..., :width]


class Residual(keras.layers.Layer):
    """`x + f(norm(x))`, or with norms last `norm(x + f(x))`; dropout on what f gives."""

    def __init__(self, options: Options, **kwargs: Any):
        super().__init__(**kwargs)
        self.norm = norm(options, name="norm")
        self.dropout = keras.layers.Dropout(options.dropout, name="dropout")
        self.norm_first = options.norm_first

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.built = True

    def before(self, x_BNC: Tensor) -> Tensor:
        """What f is to be given."""
        return self.norm(x_BNC) if self.norm_first else x_BNC

    def after(self, x_BNC: Tensor, result_BNC: Tensor, training: bool | None) -> Tensor:
        """`x` and what f gave, joined."""
        joined_BNC = x_BNC + self.dropout(result_BNC, training=training)
        return joined_BNC if self.norm_first else self.norm(joined_BNC)


class LocalMixing(keras.layers.Layer):
    """A weighted sum of each token's neighbours, itself in the middle, channel by channel: a depthwise convolution."""

    def __init__(self, neighbours: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.neighbours = neighbours

    def build(self, shape: Any) -> None:
        size = keras.initializers.RandomNormal(stddev=self.neighbours**-0.5)
        self.weight = self.add_weight(shape=(shape[-1], 1, self.neighbours), initializer=size, name="weight")
        self.bias = self.add_weight(shape=(shape[-1],), initializer="zeros", name="bias")
        self.built = True

    def call(self, x_BNC: Tensor, lengths_B: Tensor | None) -> Tensor:
        """(B, N, C) to the same; there are no neighbours beyond the first and the last real token."""
        last, reach = self.neighbours - 1, self.neighbours // 2
        if lengths_B is not None:
            is_real_BN = real_positions(ops.shape(x_BNC)[1], lengths_B)
            x_BNC = ops.where(is_real_BN[..., None], x_BNC, ops.zeros_like(x_BNC))
        padded_BNC = ops.pad(x_BNC, [[0, 0], [reach, reach], [0, 0]])
        weight, bias = (ops.cast(each, x_BNC.dtype) for each in (self.weight, self.bias))
        return bias + sum(
            weight[:, 0, place] * padded_BNC[:, place : place - last or None] for place in range(self.neighbours)
        )


class LinformerLayer(keras.layers.Layer):
    """Attention, in decoders over a source also cross-attention, and feed-forward."""

    def __init__(self, options: Options, k: int, is_decoder: bool, has_source: bool, **kwargs: Any):
        super().__init__(**kwargs)
        self.options = options
        self.is_decoder = is_decoder
        heads = {**options.heads, "sharing": options.sharing, "projection": options.projection}
        of_source = {**heads, "projection_dim": None if options.full_attn else k, "max_length": options.max_len}
        if is_decoder:
            slots = None if options.full_attn or options.decoder_attention == "full" else options.slots
            self.attention = CausalLinearMultiHeadAttention(
                **heads,
                block_length=options.block_length,
                slots=slots,
                kernel_initializer=normal(options),
                name="attention",
            )
        else:
            self.attention = LinearMultiHeadAttention(
                **of_source, rescale=options.rescale, kernel_initializer=normal(options), name="attention"
            )
        self.local = LocalMixing(options.local_width, name="local") if options.local_width and not is_decoder else None
        self.attention_residual = Residual(options, name="attention_residual")
        self.cross_attention = None
        if has_source:
            self.cross_attention = LinearMultiHeadAttention(
                **of_source, rescale=options.rescale, kernel_initializer=normal(options), name="cross_attention"
            )
            self.cross_attention_residual = Residual(options, name="cross_attention_residual")
        self.inner = dense(options.d_ff, options, activation=options.activation, name="inner")
        self.outer = dense(options.d_model, options, name="outer")
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
            context = self.attention.project([queries_BNC], lengths_B, shared_projection)
            attended_BNC, _ = self.attention.attend(queries_BNC, context, training)
        if self.local is not None:
            attended_BNC = attended_BNC + self.local(queries_BNC, lengths_B)
        return self.rest(self.attention_residual.after(x_BNC, attended_BNC, training), source, training)

    def read(self, source: Source, shared_projection: Projection | None) -> KeysValues:
        """Keys and values of the source."""
        assert self.cross_attention is not None
        return self.cross_attention.project([source.states_BNC], source.lengths_B, shared_projection)

    def rest(self, x_BNC: Tensor, source: KeysValues | None, training: bool | None = None) -> Tensor:
        """What comes after the attention of tokens to each other."""
        if self.cross_attention is not None:
            assert source is not None
            attended_BNC, _ = self.cross_attention.attend(self.cross_attention_residual.before(x_BNC), source, training)
            x_BNC = self.cross_attention_residual.after(x_BNC, attended_BNC, training)
        inner_BNC = self.inner(self.feed_forward_residual.before(x_BNC))
        return self.feed_forward_residual.after(x_BNC, self.outer(inner_BNC), training)

    def start(
        self, x_BNC, lengths_B, capacity: int, shared_projection, source: KeysValues | None
    ) -> tuple[Tensor, Cache]:
        """As `call`, and what `step` goes on with."""
        queries_BNC = self.attention_residual.before(x_BNC)
        attended_BNC, cache = self.attention.start(queries_BNC, lengths_B, capacity, shared_projection)
        return self.rest(self.attention_residual.after(x_BNC, attended_BNC, False), source, False), cache

    def step(self, x_B1C, cache: Cache, seen_B, shared_projection, source: KeysValues | None) -> tuple[Tensor, Cache]:
        """One more token of every example."""
        attended_B1C, cache = self.attention.step(
            self.attention_residual.before(x_B1C), cache, seen_B, shared_projection
        )
        return self.rest(self.attention_residual.after(x_B1C, attended_B1C, False), source, False), cache


class Stack(keras.layers.Layer):
    """Embeddings and layers: ids, the real ones first, to hidden states. An encoder, or a causal decoder."""

    def __init__(
        self,
        options: Options,
        words: keras.layers.ReversibleEmbedding,
        is_decoder: bool = False,
        has_source: bool = False,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.options = options
        self.is_decoder = is_decoder
        self.embeddings = Embeddings(options, words, name="embeddings")
        self.blocks = [
            LinformerLayer(options, k, is_decoder, has_source, name=f"layer_{number}")
            for number, k in enumerate(options.k_of_layers)
        ]
        self.norm = norm(options, name="norm") if options.norm_first else None
        # what layers share has one owner, who hands it down
        self.shared_projection = self.shared_source_projection = None
        if options.sharing == "layerwise" and not options.full_attn:
            of_tokens = (options.max_len, options.k_of_layers[0], options.rescale)
            if not is_decoder:
                self.shared_projection = self._shared(*of_tokens, "shared_projection")
            elif options.decoder_attention == "causal":  # only full blocks are projected: nothing to rescale
                self.shared_projection = self._shared(options.block_length, options.slots, False, "shared_projection")
            if has_source:
                self.shared_source_projection = self._shared(*of_tokens, "shared_source_projection")

    def _shared(self, max_length: int, projected_length: int, rescale: bool, name: str) -> Projection:
        return make_projection(
            self.options.projection,
            embed_dim=self.options.d_model,
            max_length=max_length,
            projected_length=projected_length,
            sharing="layerwise",
            num_heads=self.options.n_heads,
            rescale=rescale,
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
        """Refuse more tokens than the stack was built for."""
        limited_by_E = (
            not self.is_decoder and not self.options.full_attn and self.options.projection in ("linear", "random")
        )
        if self.options.positions == "learned" or limited_by_E:
            check_length(
                "the input", length, self.options.max_len, "truncate it, or build the model with a larger max_len"
            )

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
        for layer, of_source in zip(self.blocks, self.read(source), strict=True):
            x_BNC = layer(
                x_BNC, lengths_B, shared_projection=self.shared_projection, source=of_source, training=training
            )
        return x_BNC if self.norm is None else self.norm(x_BNC)

    def read(self, source: Source | None) -> list[KeysValues | None]:
        """Keys and values of the source in every layer: K rows each, whatever its length."""
        if source is None:
            return [None] * len(self.blocks)
        return [layer.read(source, self.shared_source_projection) for layer in self.blocks]

    def start(self, beginning: Beginning, capacity: int) -> tuple[Tensor, list[Cache]]:
        """As `call`, with room for `capacity` tokens in all, and what `step` goes on with."""
        x_BNC, caches = self.embeddings(beginning.ids_BN, beginning.types_BN, training=False), []
        for layer, source in zip(self.blocks, beginning.sources, strict=True):
            x_BNC, cache = layer.start(x_BNC, beginning.lengths_B, capacity, self.shared_projection, source)
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
        """(B, C) hidden states of one more token of every example, which has `seen_B` before it."""
        x_B1C, after = self.embeddings(ids_B1, types_B1, first_B=seen_B, training=False), []
        for layer, cache, source in zip(self.blocks, caches, sources, strict=True):
            x_B1C, cache = layer.step(x_B1C, cache, seen_B, self.shared_projection, source)
            after.append(cache)
        return (x_B1C if self.norm is None else self.norm(x_B1C))[:, 0], after


def of_decoder(options: Options) -> Options:
    """The options of the decoder of an encoder-decoder: cross-attention reads the last layer's output, and takes its k."""
    return replace(
        options, n_layers=options.n_decoder_layers or options.n_layers, k=options.k_of_layers[-1], token_types=0
    )
