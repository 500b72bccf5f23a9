"""Encoder, masked LM, classifiers and causal LM, from top to bottom: embeddings, layer, model, heads.

The configuration is in `configuration_linformer.py`, the equation in `attention_linformer.py`.

Shapes: B batch, N length, C hidden size, W width of the embeddings, K projected length, H heads, V vocabulary.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_linformer import LinformerAttention
from .cache_linformer import LinformerCache, LinformerCacheLayer
from .causal_linformer import CausalLinformerAttention
from .configuration_linformer import LinformerConfig
from .encoder_linformer import Attended, feed_forward
from .int8_linformer import Int8Linear, replace_linears
from .multihead_linformer import make_shared_projection
from .options_linformer import CHECKPOINTING_OF_REVERSIBLE, positive_integer
from .packing_linformer import Packing
from .projection_linformer import (
    Projection,
    at_least_float32,
    is_static,
    real_tokens_first,
    repeated_rows,
)
from .reversible_linformer import Sublayer, can_recompute, reversible
from .validation_linformer import (
    can_read_values,
    check_classes,
    check_embedded,
    check_ids,
    check_indices,
    check_spans,
    padding_mask,
)
from .window_linformer import DistanceBias


class LinformerEmbeddings(nn.Module):
    """The sum of word, position and token type embeddings, with layer norm and dropout, mapped to the hidden size.

    W is the width of the embeddings; there is no map if it is the hidden size.
    """

    def __init__(self, config: LinformerConfig):
        super().__init__()
        width = config.embedding_width
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.position_embeddings: nn.Embedding | SinusoidalPositions | None = None
        if config.position_embedding == "learned":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        elif config.position_embedding == "sinusoidal":
            self.position_embeddings = SinusoidalPositions(width, config.initializer_range)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps) if config.outer_norms else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.dense = make_map(width, config.hidden_size)

    def forward(self, words_BNW: Tensor, position_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """(B, N, W) embedded words, (B or 1, N) positions, (B, N) token types to (B, N, C)."""
        embedded_BNW = words_BNW
        if self.token_type_embeddings is not None:
            types = torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids
            embedded_BNW = embedded_BNW + self.token_type_embeddings(types)
        if self.position_embeddings is not None:
            embedded_BNW = embedded_BNW + self.position_embeddings(position_ids).to(embedded_BNW.dtype)
        if self.norm is not None:
            embedded_BNW = self.norm(embedded_BNW)
        return self.dense(self.dropout(embedded_BNW))


def make_map(width: int, new_width: int) -> nn.Linear | nn.Identity:
    """`X W + b` between the widths of embeddings and hidden states; nothing if they are equal."""
    return nn.Identity() if width == new_width else nn.Linear(width, new_width)


class SinusoidalPositions(nn.Module):
    """Sines and cosines of position / 10000^(2i / C), for any length, on the scale of new word embeddings."""

    def __init__(self, width: int, size: float):
        super().__init__()
        self.width = width
        self.size = size

    def forward(self, position_ids: Tensor) -> Tensor:
        even_C = torch.arange(0, self.width, 2, device=position_ids.device)
        angles_BNC = position_ids[..., None] * 10000.0 ** (-even_C / self.width)
        waves_BNC = torch.stack([angles_BNC.sin(), angles_BNC.cos()], dim=-1).flatten(-2)[..., : self.width]
        return waves_BNC * (self.size * 2**0.5)


def attention_options(config: LinformerConfig) -> dict[str, Any]:
    """The options that all attention layers of a model have in common."""
    return {
        "embed_dim": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "num_kv_heads": config.num_key_value_heads,
        "projection": config.projection,
        "sharing": config.sharing,
        "dropout": config.attention_probs_dropout_prob,
    }


def make_attention(config: LinformerConfig, layer_idx: int, context_dim: int | None = None) -> LinformerAttention:
    """Self-attention of an encoder, or cross-attention of a decoder."""
    return LinformerAttention(
        **attention_options(config),
        max_length=config.max_position_embeddings,
        projected_length=config.projected_lengths[layer_idx],
        rescale=config.rescale,
        context_dim=context_dim,
        window_length=config.window_length,
        global_tokens=config.global_tokens,
        distance_bias=config.distance_bias,
    )


def make_causal_attention(config: LinformerConfig) -> CausalLinformerAttention:
    """Self-attention of a decoder."""
    options = attention_options(config) | {"block_length": config.block_length, "slots": config.slots}
    if config.decoder_attention == "full":
        options |= {"projection": "none", "sharing": "headwise"}
    return CausalLinformerAttention(**options)


class LinformerFeedForward(nn.Module):
    """`activation(X W_1 + b_1) W_2 + b_2`."""

    def __init__(self, config: LinformerConfig):
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.outer = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_BNC: Tensor) -> Tensor:
        return feed_forward(x_BNC, self.inner, self.activation, self.outer)


class Residual(nn.Module):
    """`x + f(norm(x))`, or `norm(x + f(x))` in post-norm models, with dropout on the output of f.

    f returns its output and attention weights, or None; so do the methods of this module.
    """

    def __init__(self, config: LinformerConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.norm_first = config.norm_first

    def forward(self, x_BNC: Tensor, function: Callable[[Tensor], Attended]) -> Attended:
        if self.norm_first:
            output_BNC, weights = self.branch(x_BNC, function)
            return x_BNC + output_BNC, weights
        output_BNC, weights = function(x_BNC)
        return self.norm(x_BNC + self.dropout(output_BNC)), weights

    def branch(self, x_BNC: Tensor, function: Callable[[Tensor], Attended]) -> Attended:
        """`f(norm(x))` with dropout: what a pre-norm layer adds to its input."""
        output_BNC, weights = function(self.norm(x_BNC))
        return self.dropout(output_BNC), weights


class LocalMixing(nn.Module):
    """A depthwise convolution over neighboring tokens.

    K rows cannot tell each of N tokens from the next, and full attention learns slowly which of N tokens is adjacent.
    The convolution adds this local information at a low cost.
    """

    def __init__(self, hidden_size: int, local_width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, local_width))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize so that the output has about the scale of the input."""
        with torch.no_grad():
            self.weight.normal_(std=self.weight.shape[-1] ** -0.5)
            self.bias.zero_()

    def forward(self, x_BNC: Tensor, mask_BN: Tensor | Packing | None) -> Tensor:
        """(B, N, C) to (B, N, C); skips padding between real tokens, and pads with zeros at both ends."""
        if isinstance(mask_BN, Packing):
            return mask_BN.join(self(x_gnC, None) for x_gnC in mask_BN.split(x_BNC))
        real_BNC, place_BN = x_BNC, None
        if mask_BN is not None:
            real_BNC, _, place_BN = real_tokens_first(x_BNC, mask_BN)
        mixed_BCN = functional.conv1d(
            real_BNC.transpose(1, 2),
            self.weight,
            self.bias,
            padding=self.weight.shape[-1] // 2,
            groups=self.weight.shape[0],
        )
        mixed_BNC = mixed_BCN.transpose(1, 2)
        # not take_along_dim, which cannot be exported with dynamic shapes
        return mixed_BNC if place_BN is None else mixed_BNC.gather(1, place_BN[..., None].expand_as(mixed_BNC))


class LinformerLayer(GradientCheckpointingLayer):
    """Self-attention, cross-attention in a decoder of an encoder-decoder, and feed-forward."""

    def __init__(self, config: LinformerConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.attention = make_causal_attention(config) if config.is_decoder else make_attention(config, layer_idx)
        # a decoder attends to the tokens of its block exactly, and must not see later tokens
        has_local = config.local_width and not config.is_decoder
        self.local = LocalMixing(config.hidden_size, config.local_width) if has_local else None
        self.attention_residual = Residual(config)
        if config.add_cross_attention:
            self.cross_attention = make_attention(config, layer_idx, config.cross_attention_hidden_size)
            self.cross_attention_residual = Residual(config)
        self.feed_forward = None
        if config.intermediate_size:
            self.feed_forward = LinformerFeedForward(config)
            self.feed_forward_residual = Residual(config)

    def forward(self, x_BNC: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The hidden states, the attention weights and the cross-attention weights; arguments of `sublayers`."""
        all_weights = []
        for residual, function in self.sublayers(*args, **kwargs):
            x_BNC, weights = residual(x_BNC, function)
            all_weights.append(weights)
        return x_BNC, all_weights[0], all_weights[1] if self.config.add_cross_attention else None

    def sublayers(
        self,
        mask_BN: Tensor | Packing | None,
        projection: Projection | None,
        source_BNC: Tensor | None = None,
        source_mask_BN: Tensor | None = None,
        source_projection: Projection | None = None,
        past_key_values: LinformerCache | None = None,
        need_weights: bool = False,
    ) -> list[tuple[Residual, Callable[[Tensor], Attended]]]:
        """The functions of this layer, from first to last, and their residuals."""
        past = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        fused = self.config._attn_implementation != "eager"

        def attend(x_BNC: Tensor) -> Attended:
            output_BNC, weights = self._attend(x_BNC, mask_BN, projection, past, need_weights, fused)
            return output_BNC if self.local is None else output_BNC + self.local(x_BNC, mask_BN), weights

        def attend_to_source(x_BNC: Tensor) -> Attended:
            source = (source_BNC, source_mask_BN, source_projection)
            return self._attend_to_source(x_BNC, *source, past, need_weights, fused)

        sublayers: list[tuple[Residual, Callable[[Tensor], Attended]]] = [(self.attention_residual, attend)]
        if self.config.add_cross_attention:
            sublayers.append((self.cross_attention_residual, attend_to_source))
        if (feed_forward := self.feed_forward) is not None:
            sublayers.append((self.feed_forward_residual, lambda x_BNC: (feed_forward(x_BNC), None)))
        return sublayers

    def _attend(self, x_BNC, mask_BN, projection, past: LinformerCacheLayer | None, need_weights, fused) -> Attended:
        options = {"mask": mask_BN, "projection": projection, "need_weights": need_weights, "fused": fused}
        if past is None:
            output = self.attention(x_BNC, **options)
            return output if need_weights else (output, None)
        return past.advance(cast(CausalLinformerAttention, self.attention), x_BNC, **options)

    def _attend_to_source(
        self, x_BNC, source_BNC, mask_BN, projection, past: LinformerCacheLayer | None, need_weights, fused
    ) -> Attended:
        kept = None if past is None else past.source
        source = self.cross_attention.project(source_BNC, mask_BN, projection) if kept is None else kept
        if past is not None:  # the source is projected once
            past.source = source
        return self.cross_attention.attend(x_BNC, source, need_weights, fused)


class ReversibleLinformerLayer(LinformerLayer):
    """A layer over two streams, as in `reversible_linformer.py`, evaluated like any other layer.

    The first argument is the sum of the streams, which transformers records as the hidden states.
    """

    def forward(  # type: ignore[override]
        self, _: Tensor, streams: tuple[Tensor, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Tensor, Tensor]]:
        """As in the base class, with the sum of the streams for the hidden states, and the streams."""
        all_weights = []
        for residual, function in self.sublayers(*args, **kwargs):
            output_BNC, weights = residual.branch(streams[1], function)
            streams = streams[1], streams[0] + output_BNC
            all_weights.append(weights)
        cross_weights = all_weights[1] if self.config.add_cross_attention else None
        return streams[0] + streams[1], all_weights[0], cross_weights, streams


class LinformerPreTrainedModel(PreTrainedModel):
    """The base class of all models: initialization, recorded outputs, resizing."""

    config: LinformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # transformers reads class attributes
    _no_split_modules = ["LinformerEmbeddings", "LinformerLayer", "ReversibleLinformerLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True  # tokens cannot be removed from the cache, so assisted generation is not possible
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": LinformerLayer,
        "attentions": OutputRecorder(LinformerLayer, index=1),
        "cross_attentions": OutputRecorder(LinformerLayer, index=2),
    }

    def __init__(self, config: LinformerConfig):
        config.check()
        super().__init__(config)

    def post_init(self) -> None:
        """As in the base class; a model of `quantize` gets its layers."""
        if self.config.quantization == "int8":
            replace_linears(self)
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as BERT does; projections, local convolutions and others initialize themselves."""
        super()._init_weights(module)
        if not isinstance(module, Projection | LocalMixing | DistanceBias | Int8Linear):
            return
        if not all(getattr(t, "_is_hf_initialized", False) for t in (*module.parameters(), *module.buffers())):
            module.reset_parameters()

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """As in the base class; raises for reversible models."""
        if self.config.reversible:
            raise ValueError(CHECKPOINTING_OF_REVERSIBLE)
        super().gradient_checkpointing_enable(*args, **kwargs)

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Resize position embeddings and E for a new maximum length.

        New positions and new rows of E repeat the old ones from the first, so the outputs for inputs of the old
        length do not change, except with `rescale`, `conv`, `head_conv`, and with a window beside "linear", "affine" or
        "random". Fine-tune the model on longer inputs.

        >>> model = LinformerModel(LinformerConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)).eval()
        >>> ids = torch.arange(1, 500)[None]
        >>> before = model(ids).last_hidden_state
        >>> model.resize_position_embeddings(2048)
        >>> torch.allclose(model(ids).last_hidden_state, before, atol=1e-5), model.config.max_position_embeddings
        (True, 2048)
        """
        length = positive_integer("new_num_position_embeddings", new_num_position_embeddings)
        for module in self.modules():
            if isinstance(module, LinformerModel):
                module.resize_positions(length)
            if isinstance(module, LinformerPreTrainedModel):
                module.config.max_position_embeddings = length

    def get_position_embeddings(self) -> Any:
        """The module of the position embeddings, or None; of an encoder-decoder, those of encoder and decoder."""
        embeddings = [module for module in self.modules() if isinstance(module, LinformerEmbeddings)]
        positions = tuple(module.position_embeddings for module in embeddings)
        return positions if self.config.is_encoder_decoder else positions[0]


class LinformerModel(LinformerPreTrainedModel):
    """Token ids to hidden states: an encoder, or with `config.is_decoder` a causal decoder.

    >>> sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> config = LinformerConfig(**sizes, max_position_embeddings=1024)
    >>> model = LinformerModel(config).eval()
    >>> model(input_ids=torch.arange(1, 1001)[None]).last_hidden_state.shape
    torch.Size([1, 1000, 64])
    >>> model(input_ids=torch.arange(1, 1001)[None], output_attentions=True).attentions[0].shape  # (B, H, N, K)
    torch.Size([1, 4, 1000, 128])
    """

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        if config.is_encoder_decoder:
            raise ValueError(
                "the configuration is that of an encoder-decoder (is_encoder_decoder=True); load the model with "
                "AutoModelForSeq2SeqLM, or without its output layer with LinformerSeq2SeqModel, and get its encoder "
                "with model.get_encoder()"
            )
        self.embeddings = LinformerEmbeddings(config)
        layer_class = ReversibleLinformerLayer if config.reversible else LinformerLayer
        layers = [layer_class(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        has_norm = config.norm_first and config.outer_norms
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if has_norm else None
        # what the layers share belongs to the model, which passes it to them
        self.projection = make_shared_projection(layer.attention for layer in layers)
        self.source_projection = None
        if config.add_cross_attention:
            self.source_projection = make_shared_projection(layer.cross_attention for layer in layers)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    def resize_positions(self, length: int) -> None:
        positions = self.embeddings.position_embeddings
        if self.config.position_embedding == "learned" and not isinstance(positions, nn.Embedding):
            raise ValueError(
                f"position_embeddings is a {type(positions).__name__}, which cannot be resized; resize before adding "
                "adapters, or merge them first"
            )
        if isinstance(positions, nn.Embedding):
            weight = repeated_rows(positions.weight, length)
            self.embeddings.position_embeddings = nn.Embedding.from_pretrained(
                weight, freeze=not positions.weight.requires_grad
            )
        for module in self.modules():
            if isinstance(module, LinformerAttention):  # a causal one depends on the block length instead
                module.resize(length)
        if self.projection is not None and not self.config.is_decoder:
            self.projection = self.projection.resized(length)
        if self.source_projection is not None:
            self.source_projection = self.source_projection.resized(length)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: LinformerCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """(B, N) ids, or (B, N, W) `inputs_embeds`, to (B, N, C) hidden states.

        `attention_mask` (B, N) is 1 at real tokens; padding may be anywhere. With `past_key_values`, pass only the
        new tokens, and the mask of all tokens so far.
        """
        inputs_BN = self._inputs(input_ids, inputs_embeds)
        (batch, length), device = inputs_BN.shape[:2], inputs_BN.device
        past = self._past(past_key_values, use_cache)
        seen = 0 if past is None else past.get_seq_length()
        is_counted = is_static(seen)  # not in exported graphs, where it is a tensor
        self._check_length(seen + length if is_counted else length)
        mask_BN = None
        if attention_mask is not None:
            # a prompt that is processed in pieces may start with a piece of padding
            columns = seen + length if is_counted else attention_mask.shape[1]
            shape, is_piece = (batch, columns), past_key_values is not None
            mask_BN = padding_mask("attention_mask", attention_mask, shape, device, allow_empty=is_piece)
        if position_ids is None:
            position_ids = self._positions(mask_BN, seen, length, device)
        else:
            self._check_positions(position_ids, batch, length, attention_mask)
        if token_type_ids is not None:
            check_indices("token_type_ids", token_type_ids, max(1, self.config.type_vocab_size), batch, length)
        if mask_BN is not None and not (is_counted and seen == 0):
            new_BN = mask_BN[:, mask_BN.shape[1] - length :]
            mask_BN = padding_mask("attention_mask", new_BN, (batch, length), device, allow_empty=True)
        source_mask_BN = None
        if encoder_attention_mask is not None and encoder_hidden_states is not None:
            sizes = encoder_hidden_states.shape[:2]
            source_mask_BN = padding_mask("encoder_attention_mask", encoder_attention_mask, sizes, device)
        has_source = encoder_hidden_states is not None or (past is not None and past.has_source)
        if has_source is not self.config.add_cross_attention:
            raise ValueError(
                f"encoder_hidden_states is {'missing' if encoder_hidden_states is None else 'given'} but "
                f"add_cross_attention is {self.config.add_cross_attention}; a decoder with cross-attention needs "
                "both, other models neither"
            )

        need_weights = bool(kwargs.get("output_attentions", self.config.output_attentions))
        need_states = bool(kwargs.get("output_hidden_states", self.config.output_hidden_states))
        packing = None
        if not (self.config.is_decoder or need_weights or need_states):
            packing = Packing.of(mask_BN, self.config.hidden_size)
        if packing is not None:
            inputs_BN, position_ids = packing.pack(inputs_BN), packing.pack(position_ids)
            token_type_ids = None if token_type_ids is None else packing.pack(token_type_ids)
        words_BNC = inputs_BN if input_ids is None else self.embeddings.word_embeddings(inputs_BN)
        hidden_states = self.embeddings(words_BNC, position_ids, token_type_ids)
        inputs = (packing or mask_BN, self.projection, encoder_hidden_states, source_mask_BN, self.source_projection)
        options = {"past_key_values": past, "need_weights": need_weights}
        if not self.config.reversible:
            for layer in self.layers:
                hidden_states, *_ = layer(hidden_states, *inputs, **options)
        elif can_recompute() and past is None and not need_weights and not need_states:
            hidden_states = reversible(hidden_states, self._reversible_sublayers(*inputs))
        else:
            streams = hidden_states, hidden_states
            hidden_states = hidden_states + hidden_states
            for layer in self.layers:
                hidden_states, _, _, streams = layer(hidden_states, streams, *inputs, **options)
        if self.norm is not None:
            hidden_states = self.norm(hidden_states)
        if packing is not None:
            hidden_states = packing.unpack(hidden_states)
        elif mask_BN is not None and not self.config.is_decoder:
            hidden_states = hidden_states.masked_fill(~mask_BN[..., None], 0)  # as if packed
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states, past_key_values=past)

    def _reversible_sublayers(self, *inputs: Any) -> list[Sublayer]:
        """The sublayers of all layers, whose arguments are `inputs`."""

        def branch(residual: Residual, function: Callable[[Tensor], Attended], x_BNC: Tensor) -> Tensor:
            return residual.branch(x_BNC, function)[0]

        shared = [one for one in inputs if isinstance(one, Tensor)]
        shared += [weight for one in inputs if isinstance(one, Projection) for weight in one.parameters()]
        return [
            Sublayer(partial(branch, residual, function), [*layer.parameters(), *shared])
            for layer in self.layers
            for residual, function in cast(LinformerLayer, layer).sublayers(*inputs)
        ]

    def _inputs(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """The ids (B, N), or the embedded words (B, N, W)."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                f"{'neither' if input_ids is None else 'both'} of input_ids and inputs_embeds given; pass exactly one "
                "of them"
            )
        if inputs_embeds is not None:
            check_embedded("inputs_embeds", inputs_embeds, self.config.embedding_width)
            return inputs_embeds
        check_ids("input_ids", input_ids, self.embeddings.word_embeddings.weight.shape[0])
        assert input_ids is not None
        return input_ids

    def _past(self, past_key_values: LinformerCache | None, use_cache: bool | None) -> LinformerCache | None:
        if past_key_values is not None and not self.config.is_decoder:
            raise ValueError("past_key_values is not supported by encoders; omit it")
        if past_key_values is not None and not isinstance(past_key_values, LinformerCache):
            raise TypeError(
                f"past_key_values is a {type(past_key_values).__name__}; it must be the LinformerCache that the model "
                "returned, LinformerCache(model.config), or None at first"
            )
        if past_key_values is None and use_cache and self.config.is_decoder:
            return LinformerCache(self.config)
        return past_key_values

    def _check_length(self, length: int) -> None:
        limit = self.config.max_position_embeddings
        is_limited = self.config.position_embedding == "learned" or (
            not self.config.is_decoder and not Projection.kinds[self.config.projection].takes_any_length
        )
        if is_limited and length > limit:
            raise ValueError(
                f"input has {length} tokens but max_position_embeddings is {limit}; truncate it, or extend the model "
                f"with model.resize_position_embeddings({length})"
            )

    def _check_positions(self, position_ids: Tensor, batch: int, length: int, attention_mask: Tensor | None) -> None:
        table = self.embeddings.position_embeddings
        check_indices(
            "position_ids",
            position_ids,
            table.num_embeddings if isinstance(table, nn.Embedding) else None,
            batch,
            length,
        )
        if attention_mask is None and can_read_values(position_ids) and bool((position_ids.diff(dim=1) < 0).any()):
            raise ValueError(
                "position_ids decrease within an example, as if several texts were packed into it, and they would "
                "attend to each other; put each text into its own row, padded, with an attention_mask"
            )

    @staticmethod
    def _positions(mask_BN: Tensor | None, seen: int, length: int, device: torch.device) -> Tensor:
        """The position of a token is its rank among the real tokens, so padding may be anywhere."""
        if mask_BN is None:
            return (seen + torch.arange(length, device=device))[None]
        return (mask_BN.long().cumsum(dim=1) - 1).clamp(min=0)[:, mask_BN.shape[1] - length :]


class LinformerHead(nn.Module):
    """`norm(activation(X W + b))`: the transform that BERT has between its last layer and its output layer."""

    def __init__(self, config: LinformerConfig, width: int):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, width)
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


class LinformerForMaskedLM(LinformerPreTrainedModel):
    """Masked language model: (B, N, V) logits.

    >>> config = LinformerConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LinformerForMaskedLM(config)
    >>> ids = torch.randint(1, 100, (2, 300))
    >>> output = model(ids, labels=ids.masked_fill(torch.rand(2, 300) > 0.15, -100))
    >>> output.logits.shape, output.loss.shape
    (torch.Size([2, 300, 100]), torch.Size([]))
    """

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # by default the name of the class, which subclasses change
        if config.is_decoder:
            raise ValueError(
                "is_decoder=True, but a masked LM needs both sides of a mask; use LinformerForCausalLM, or "
                "is_decoder=False"
            )
        self.model = LinformerModel(config)
        width = config.embedding_width
        self.head = LinformerHead(config, width) if config.outer_norms else make_map(config.hidden_size, width)
        self.lm_head = nn.Linear(width, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """`labels` (B, N) are the ids to predict, -100 at ignored tokens.

        `logits_to_keep` is a (B, N) mask of S tokens; logits (S, V) and loss are computed for these only. With
        `labels != -100` the loss is the same, and the output layer is computed only for the tokens to predict. It may
        also be the (S,) places of these tokens in the flattened batch, `mask.flatten().nonzero().flatten()`: with a
        mask on a GPU, the program waits until the GPU has counted its tokens.
        """
        kwargs["use_cache"] = False
        outputs = self.model(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        hidden = outputs.last_hidden_state
        if logits_to_keep is not None:
            if logits_to_keep.dtype != torch.bool:
                hidden, labels = hidden.flatten(0, 1), None if labels is None else labels.flatten()
            hidden = hidden[logits_to_keep]
            labels = None if labels is None else labels[logits_to_keep]
        logits = self.lm_head(self.head(hidden))
        loss = None
        if labels is not None:
            check_classes("labels", labels, logits)
            loss = self.loss_function(logits, labels.contiguous(), vocab_size=logits.shape[-1], **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class LinformerForSequenceClassification(LinformerPreTrainedModel):
    """Classification or regression of whole texts: (B, `num_labels`) logits.

    >>> sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> config = LinformerConfig(**sizes, num_labels=3)
    >>> model = LinformerForSequenceClassification(config)
    >>> model(torch.randint(1, 100, (2, 300)), labels=torch.tensor([0, 2])).logits.shape
    torch.Size([2, 3])

    Labels (B,) of integers are classes; 0s and 1s (B, `num_labels`) are several classes for each text; `num_labels=1`
    is a regression. `config.problem_type` sets it explicitly.
    """

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"
        if config.is_decoder and config.classifier_pooling == "first":
            raise ValueError(
                "classifier_pooling='first', but the first token of a causal decoder attends only to itself; use 'mean'"
            )
        self.model = LinformerModel(config)
        self.head = LinformerHead(config, config.hidden_size)
        self.dropout = nn.Dropout(
            config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        )
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        kwargs["use_cache"] = False
        outputs = self.model(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        pooled_BC = pooled(outputs.last_hidden_state, attention_mask, self.config.classifier_pooling)
        logits = self.classifier(self.dropout(self.head(pooled_BC)))
        loss = None if labels is None else self._loss(logits, labels, **kwargs)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def _loss(self, logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        if self.config.problem_type is None:
            is_class = not labels.is_floating_point() and labels.shape != logits.shape
            kind = "single_label_classification" if is_class else "multi_label_classification"
            self.config.problem_type = "regression" if logits.shape[-1] == 1 else kind
        if self.config.problem_type == "single_label_classification":
            check_classes("labels", labels, logits)
            return self.loss_function(labels=labels.contiguous(), pooled_logits=logits, config=self.config, **kwargs)
        if labels.numel() != logits.numel() or labels.shape[0] != logits.shape[0]:
            raise ValueError(
                f"labels has shape {tuple(labels.shape)} but for problem_type={self.config.problem_type!r} it must be "
                f"{tuple(logits.shape)}, one number for each of the {logits.shape[-1]} labels"
            )
        targets = labels.to(logits.dtype).reshape(logits.shape)
        loss = self.loss_function(labels=targets, pooled_logits=logits, config=self.config, **kwargs)
        # the mean over all batches of an accumulated step; transformers does this for classes only
        items = kwargs.get("num_items_in_batch")
        return loss if items is None else loss * targets.numel() / items


def pooled(hidden_BNC: Tensor, attention_mask: Tensor | None, pooling: str) -> Tensor:
    """(B, C): the mean of the real tokens, or the first of them."""
    if attention_mask is None:
        return hidden_BNC.mean(dim=1) if pooling == "mean" else hidden_BNC[:, 0]
    real_BN = attention_mask.bool()
    if pooling == "first":
        batch_B = torch.arange(hidden_BNC.shape[0], device=hidden_BNC.device)
        return hidden_BNC[batch_B, real_BN.int().argmax(dim=1)]
    real_BN1 = real_BN[..., None]
    sums_BC = at_least_float32(hidden_BNC.masked_fill(~real_BN1, 0)).sum(dim=1)
    return (sums_BC / real_BN1.sum(dim=1)).to(hidden_BNC.dtype)


class LinformerForTokenClassification(LinformerPreTrainedModel):
    """Classification of each token: (B, N, `num_labels`) logits.

    >>> sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> config = LinformerConfig(**sizes, num_labels=5)
    >>> LinformerForTokenClassification(config)(torch.randint(1, 100, (2, 300))).logits.shape
    torch.Size([2, 300, 5])
    """

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        self.loss_type = "ForTokenClassification"
        self.model = LinformerModel(config)
        self.dropout = nn.Dropout(
            config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        )
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """`labels` (B, N) are classes, -100 at ignored tokens."""
        kwargs["use_cache"] = False
        outputs = self.model(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            check_classes("labels", labels, logits)
            loss = self.loss_function(logits, labels.contiguous(), self.config, **kwargs)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class LinformerForQuestionAnswering(LinformerPreTrainedModel):
    """Start and end of an answer within a text: (B, N) logits for each.

    >>> config = LinformerConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> LinformerForQuestionAnswering(config)(torch.randint(1, 100, (2, 300))).start_logits.shape
    torch.Size([2, 300])
    """

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        self.loss_type = "ForQuestionAnswering"
        self.model = LinformerModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Positions (B,) of the first and last token of the answer; those beyond the (truncated) input are ignored."""
        kwargs["use_cache"] = False
        outputs = self.model(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            check_spans(start_positions, end_positions, start_logits.shape[0])
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class LinformerGenerationMixin(GenerationMixin):
    """`generate` with a `LinformerCache`."""

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
            return
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation is {generation_config.cache_implementation!r}, but a Linformer always uses a "
                "LinformerCache; leave it out"
            )
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            # here once, because prompts may be processed in pieces
            padding_mask("attention_mask", mask, mask.shape, mask.device)
        model_kwargs["past_key_values"] = LinformerCache(self.config)


class LinformerForCausalLM(LinformerPreTrainedModel, LinformerGenerationMixin):
    """Causal language model: (B, N, V) logits of the next token, and `generate`.

    >>> sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> config = LinformerConfig(**sizes, block_length=16)
    >>> model = LinformerForCausalLM(config).eval()
    >>> prompt = torch.randint(1, 100, (2, 40))
    >>> model.generate(prompt, max_new_tokens=5, do_sample=False).shape
    torch.Size([2, 45])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: LinformerConfig):
        config = copy.deepcopy(config)
        config.is_decoder = True
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        if config.add_cross_attention:
            raise ValueError(
                "add_cross_attention=True, but a causal LM has no encoder; use LinformerForConditionalGeneration"
            )
        self.model = LinformerModel(config)
        self.head = make_map(config.hidden_size, config.embedding_width)
        self.lm_head = nn.Linear(config.embedding_width, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: LinformerCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """`labels` (B, N) are the input ids, -100 at ignored tokens; the model shifts them.

        `logits_to_keep` computes logits only for this many last tokens, or for these indices; 0 means all.
        """
        if use_cache is None and labels is not None:
            use_cache = False  # an unused cache costs memory
        outputs = self.model(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(self.head(outputs.last_hidden_state[:, kept]))
        loss = None
        if labels is not None:
            check_classes("labels", labels, logits)
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
