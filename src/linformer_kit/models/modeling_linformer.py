"""Encoder, masked LM, classifiers and causal LM, read from top to bottom: embeddings, attention, layer, model, heads.

What a model is built from is in `configuration_linformer.py`, the equation in `attention_linformer.py`.

Shapes: B batch, N length, C hidden size, K projected length, H heads, V vocabulary.
"""

import copy
from typing import Any

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
from .cache_linformer import LinformerCache
from .causal_linformer import CausalLinformerAttention
from .configuration_linformer import LinformerConfig
from .encoder_linformer import feed_forward
from .multihead_linformer import MultiHeadLayer
from .options_linformer import positive_integer
from .projection_linformer import Projection, at_least_float32, make_projection, real_tokens_first, repeated_rows
from .validation_linformer import (
    can_read_values,
    check_classes,
    check_embedded,
    check_ids,
    check_indices,
    check_spans,
    padding_mask,
)


class LinformerEmbeddings(nn.Module):
    """Words, positions and token types, summed, normalised, dropped out."""

    def __init__(self, config: LinformerConfig):
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.position_embeddings: nn.Embedding | SinusoidalPositions | None = None
        if config.position_embedding == "learned":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        elif config.position_embedding == "sinusoidal":
            self.position_embeddings = SinusoidalPositions(width, config.initializer_range)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, words_BNC: Tensor, position_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """(B, N, C) embedded words, (B or 1, N) positions, (B, N) token types to (B, N, C)."""
        embedded_BNC = words_BNC
        if self.token_type_embeddings is not None:
            types = torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids
            embedded_BNC = embedded_BNC + self.token_type_embeddings(types)
        if self.position_embeddings is not None:
            embedded_BNC = embedded_BNC + self.position_embeddings(position_ids).to(embedded_BNC.dtype)
        return self.dropout(self.norm(embedded_BNC))


class SinusoidalPositions(nn.Module):
    """Sines and cosines of position / 10000^(2i / C), for any length, as large as freshly initialised word embeddings."""

    def __init__(self, width: int, size: float):
        super().__init__()
        self.width = width
        self.size = size

    def forward(self, position_ids: Tensor) -> Tensor:
        even_C = torch.arange(0, self.width, 2, device=position_ids.device)
        angles_BNC = position_ids[..., None] * 10000.0 ** (-even_C / self.width)
        waves_BNC = torch.stack([angles_BNC.sin(), angles_BNC.cos()], dim=-1).flatten(-2)[..., : self.width]
        return waves_BNC * (self.size * 2**0.5)


class OfModel:
    """Attention in a model: fused unless the model was told `attn_implementation="eager"`."""

    config: LinformerConfig

    @property
    def fused(self) -> bool:
        return self.config._attn_implementation != "eager"


def attention_sizes(config: LinformerConfig) -> dict[str, Any]:
    """What all attentions of a model have in common."""
    return {
        "embed_dim": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "num_kv_heads": config.num_key_value_heads,
        "sharing": config.sharing,
        "dropout": config.attention_probs_dropout_prob,
    }


class LinformerSelfAttention(OfModel, LinformerAttention):
    """Of the encoder: every token attends to the K rows that stand for all of them."""

    def __init__(self, config: LinformerConfig, layer_idx: int):
        super().__init__(**attention_sizes(config), **projection_options(config, config.projected_lengths[layer_idx]))
        self.config = config

    def forward(self, x_BNC: Tensor, mask_BN, projection, past, need_weights):  # type: ignore[override]
        output = super().forward(x_BNC, mask=mask_BN, projection=projection, need_weights=need_weights)
        return output if need_weights else (output, None)


class LinformerCausalSelfAttention(OfModel, CausalLinformerAttention):
    """Of decoders: every token attends to its block up to itself, and to the rows that stand for the blocks before."""

    def __init__(self, config: LinformerConfig, layer_idx: int):
        super().__init__(**attention_sizes(config) | block_options(config))
        self.config = config

    def forward(self, x_BNC: Tensor, mask_BN, projection, past, need_weights):  # type: ignore[override]
        before = None if past is None else past.past
        output, weights, after = self._advance(x_BNC, before, mask_BN, projection, need_weights, keep=past is not None)
        if past is not None:
            past.past = after
            past.tokens += x_BNC.shape[1]
        return output, weights


class LinformerCrossAttention(OfModel, LinformerAttention):
    """From decoder to encoder: every token attends to the K rows that stand for the source, projected once and kept."""

    def __init__(self, config: LinformerConfig, layer_idx: int):
        super().__init__(**attention_sizes(config), **projection_options(config, config.projected_lengths[layer_idx]))
        self.config = config

    def forward(self, x_BNC: Tensor, source_BNC, mask_BN, projection, past, need_weights):  # type: ignore[override]
        kept = None if past is None else past.source
        source = self.project(source_BNC, mask_BN, projection) if kept is None else kept
        if past is not None:
            past.source = source
        return self.attend(x_BNC, source, need_weights)


def projection_options(config: LinformerConfig, projected_length: int) -> dict[str, Any]:
    """What E of an encoder, or of cross-attention, is."""
    return {
        "projection": config.projection,
        "max_length": config.max_position_embeddings,
        "projected_length": projected_length,
        "rescale": config.rescale,
    }


def block_options(config: LinformerConfig) -> dict[str, Any]:
    """What E of the blocks of a decoder is; with "full" attention no block is shortened, and there is nothing to share."""
    sizes = {"block_length": config.block_length, "slots": config.slots}
    if config.decoder_attention == "full":
        return {**sizes, "projection": "none", "sharing": "headwise"}
    return {**sizes, "projection": config.projection}


def shared_projection(attention: MultiHeadLayer) -> Projection | None:
    """The projection of all layers like this one, under `sharing="layerwise"`."""
    return None if attention.needed is None else make_projection(**attention.needed)


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
    """`x + f(norm(x))`, or with norms last `norm(x + f(x))`; dropout on what f gives."""

    def __init__(self, config: LinformerConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.norm_first = config.norm_first

    def forward(self, x_BNC: Tensor, function) -> Tensor:
        if self.norm_first:
            return x_BNC + self.dropout(function(self.norm(x_BNC)))
        return self.norm(x_BNC + self.dropout(function(x_BNC)))


class LocalMixing(nn.Module):
    """A weighted sum of each token's neighbours, itself in the middle, channel by channel: a depthwise convolution.

    K rows for N tokens cannot tell every token from the next one, and full attention takes long to find out which of N tokens is
    the next one. What stands beside a word is worth knowing, and costs little this way.
    """

    def __init__(self, width: int, neighbours: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, neighbours))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small enough for the sum over the neighbours to be about as large as each of them."""
        with torch.no_grad():
            self.weight.normal_(std=self.weight.shape[-1] ** -0.5)
            self.bias.zero_()

    def forward(self, x_BNC: Tensor, mask_BN: Tensor | None) -> Tensor:
        """(B, N, C) to the same; neighbours are the nearest real tokens, and there are none beyond the first and the last."""
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
        # not take_along_dim, which no graph for several lengths can hold
        return mixed_BNC if place_BN is None else mixed_BNC.gather(1, place_BN[..., None].expand_as(mixed_BNC))


class LinformerLayer(GradientCheckpointingLayer):
    """Attention, in decoders over a source also cross-attention, and feed-forward."""

    def __init__(self, config: LinformerConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.attention = (LinformerCausalSelfAttention if config.is_decoder else LinformerSelfAttention)(
            config, layer_idx
        )
        # a decoder has the tokens of its own block before it, and must not hear of those behind
        self.local = (
            LocalMixing(config.hidden_size, config.local_width)
            if config.local_width and not config.is_decoder
            else None
        )
        self.attention_residual = Residual(config)
        if config.add_cross_attention:
            self.cross_attention = LinformerCrossAttention(config, layer_idx)
            self.cross_attention_residual = Residual(config)
        self.feed_forward = LinformerFeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(
        self,
        x_BNC: Tensor,
        mask_BN: Tensor | None,
        projection: Projection | None,
        source_BNC: Tensor | None = None,
        source_mask_BN: Tensor | None = None,
        source_projection: Projection | None = None,
        past_key_values: LinformerCache | None = None,
        need_weights: bool = False,
    ) -> Tensor:
        past = None if past_key_values is None else past_key_values.layers[self.layer_idx]

        def attend(x_BNC: Tensor) -> Tensor:
            far_BNC = self.attention(x_BNC, mask_BN, projection, past, need_weights)[0]
            return far_BNC if self.local is None else far_BNC + self.local(x_BNC, mask_BN)

        x_BNC = self.attention_residual(x_BNC, attend)
        if source_BNC is not None:
            x_BNC = self.cross_attention_residual(
                x_BNC,
                lambda x: self.cross_attention(x, source_BNC, source_mask_BN, source_projection, past, need_weights)[0],
            )
        return self.feed_forward_residual(x_BNC, self.feed_forward)


class LinformerPreTrainedModel(PreTrainedModel):
    """What all models share: how they start, what they can show of themselves, how they grow longer."""

    config: LinformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LinformerEmbeddings", "LinformerLayer"]  # noqa: RUF012 — class attributes, as transformers reads them
    _supports_sdpa = True
    _is_stateful = True  # tokens cannot be taken back out of the cache, so nothing can be generated on trial
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": LinformerLayer,
        "attentions": OutputRecorder(OfModel, index=1, layer_name="attention"),
        "cross_attentions": OutputRecorder(OfModel, index=1, layer_name="cross_attention"),
    }

    def __init__(self, config: LinformerConfig):
        config.check()
        super().__init__(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal numbers of size `initializer_range`, as in BERT; projections as they start themselves."""
        super()._init_weights(module)
        if not isinstance(module, Projection | LocalMixing):
            return
        if not all(getattr(t, "_is_hf_initialized", False) for t in (*module.parameters(), *module.buffers())):
            module.reset_parameters()

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Let the model read up to this many tokens, or fewer: positions and E are extended or cut.

        New positions, and new rows of E, repeat the old ones from the first, so what the model says of inputs that it could
        read before stays as it is (with `rescale`, or windows of `conv`, approximately). Fine-tune it for the new ones.

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

    def get_position_embeddings(self) -> nn.Module | None:
        """The module that gives the positions; None without any."""
        return next(module for module in self.modules() if isinstance(module, LinformerEmbeddings)).position_embeddings


class LinformerModel(LinformerPreTrainedModel):
    """Tokens to hidden states: an encoder; with `config.is_decoder` a causal decoder.

    >>> config = LinformerConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=1024)
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
                "this is the configuration of an encoder-decoder (is_encoder_decoder=True); load the whole with "
                "AutoModelForSeq2SeqLM, its encoder is then model.get_encoder()"
            )
        self.embeddings = LinformerEmbeddings(config)
        layers = [LinformerLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm_first else None
        # what layers share has one owner, who hands it down
        self.projection = shared_projection(layers[0].attention)
        self.source_projection = shared_projection(layers[0].cross_attention) if config.add_cross_attention else None
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
                f"position_embeddings is a {type(positions).__name__}, which cannot be resized; resize before adapters are added, "
                "or merge them first"
            )
        if isinstance(positions, nn.Embedding):
            weight = repeated_rows(positions.weight, length)
            self.embeddings.position_embeddings = nn.Embedding.from_pretrained(
                weight, freeze=not positions.weight.requires_grad
            )
        for module in self.modules():
            if isinstance(module, LinformerSelfAttention | LinformerCrossAttention):
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
        """(B, N) ids, or (B, N, C) `inputs_embeds`, to (B, N, C) hidden states.

        `attention_mask` (B, N) is 1 at real tokens; padding may stand anywhere. A decoder that goes on from
        `past_key_values` gets the mask of all tokens so far, and the new tokens only.
        """
        words_BNC = self._words(input_ids, inputs_embeds)
        batch, length = words_BNC.shape[:2]
        past = self._past(past_key_values, use_cache)
        seen = 0 if past is None else past.get_seq_length()
        self._check_length(seen + length)
        mask_BN = None
        if attention_mask is not None:
            # what is read in pieces may begin with a piece of padding
            shape, in_pieces = (batch, seen + length), past_key_values is not None
            mask_BN = padding_mask("attention_mask", attention_mask, shape, words_BNC.device, allow_empty=in_pieces)
        if position_ids is None:
            position_ids = self._positions(mask_BN, seen, length, words_BNC.device)
        else:
            self._check_positions(position_ids, batch, length, attention_mask)
        if token_type_ids is not None:
            check_indices("token_type_ids", token_type_ids, max(1, self.config.type_vocab_size), batch, length)
        if mask_BN is not None and seen:
            mask_BN = padding_mask(
                "attention_mask", mask_BN[:, seen:], (batch, length), words_BNC.device, allow_empty=True
            )
        source_mask_BN = None
        if encoder_attention_mask is not None and encoder_hidden_states is not None:
            sizes, device = encoder_hidden_states.shape[:2], words_BNC.device
            source_mask_BN = padding_mask("encoder_attention_mask", encoder_attention_mask, sizes, device)
        if (encoder_hidden_states is None) is self.config.add_cross_attention:
            raise ValueError(
                f"encoder_hidden_states is {'missing' if encoder_hidden_states is None else 'given'} but add_cross_attention is "
                f"{self.config.add_cross_attention}; a decoder over a source needs both, others neither"
            )

        hidden_states = self.embeddings(words_BNC, position_ids, token_type_ids)
        need_weights = bool(kwargs.get("output_attentions", self.config.output_attentions))
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                mask_BN,
                self.projection,
                encoder_hidden_states,
                source_mask_BN,
                self.source_projection,
                past_key_values=past,
                need_weights=need_weights,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states if self.norm is None else self.norm(hidden_states), past_key_values=past
        )

    def _words(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                f"{'neither' if input_ids is None else 'both'} of input_ids and inputs_embeds given; give exactly one of them"
            )
        if inputs_embeds is not None:
            check_embedded("inputs_embeds", inputs_embeds, self.config.hidden_size)
            return inputs_embeds
        check_ids("input_ids", input_ids, self.embeddings.word_embeddings.weight.shape[0])
        return self.embeddings.word_embeddings(input_ids)

    def _past(self, past_key_values: LinformerCache | None, use_cache: bool | None) -> LinformerCache | None:
        if past_key_values is not None and not self.config.is_decoder:
            raise ValueError("past_key_values given, but an encoder sees the whole input at once; leave them out")
        if past_key_values is not None and not isinstance(past_key_values, LinformerCache):
            raise TypeError(
                f"past_key_values is a {type(past_key_values).__name__}; a Linformer keeps a LinformerCache: pass the one that "
                "the model returned, LinformerCache(model.config), or None at first"
            )
        if past_key_values is None and use_cache and self.config.is_decoder:
            return LinformerCache(self.config)
        return past_key_values

    def _check_length(self, length: int) -> None:
        limit = self.config.max_position_embeddings
        is_limited = self.config.position_embedding == "learned" or (
            not self.config.is_decoder and self.config.projection in ("linear", "random")
        )
        if is_limited and length > limit:
            raise ValueError(
                f"input has {length} tokens but max_position_embeddings is {limit}; truncate it, or extend the model with "
                f"model.resize_position_embeddings({length})"
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
                "position_ids begin again within an example, as if several texts were packed into it: they would see each other; "
                "give each text a row of its own, padded, with an attention_mask"
            )

    @staticmethod
    def _positions(mask_BN: Tensor | None, seen: int, length: int, device: torch.device) -> Tensor:
        """A token's position is its rank among the real ones, so padding may stand anywhere."""
        if mask_BN is None:
            return torch.arange(seen, seen + length, device=device)[None]
        return (mask_BN.long().cumsum(dim=1) - 1).clamp(min=0)[:, seen:]


class LinformerHead(nn.Module):
    """`norm(activation(X W + b))`: what BERT puts between its last layer and the words."""

    def __init__(self, config: LinformerConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


class LinformerForMaskedLM(LinformerPreTrainedModel):
    """Fills masks: (B, N, V) logits.

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
        self.loss_type = "ForMaskedLM"  # not by the name of the class, which subclasses change
        if config.is_decoder:
            raise ValueError(
                "is_decoder=True: a masked LM has to see both sides; use LinformerForCausalLM, or is_decoder=False"
            )
        self.model = LinformerModel(config)
        self.head = LinformerHead(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
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
        """`labels` (B, N) are the words to predict, -100 where there is nothing to predict.

        `logits_to_keep`: a mask (B, N) of S tokens; logits (S, V) and the loss of these only. With `labels != -100` the loss is
        the same, and the largest product of a small model is done for the words to predict instead of all.
        """
        kwargs["use_cache"] = False
        outputs = self.model(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        hidden = outputs.last_hidden_state
        if logits_to_keep is not None:
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
    """A class, several classes, or a number for a whole text: (B, `num_labels`) logits.

    >>> config = LinformerConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=3)
    >>> model = LinformerForSequenceClassification(config)
    >>> model(torch.randint(1, 100, (2, 300)), labels=torch.tensor([0, 2])).logits.shape
    torch.Size([2, 3])

    Integers (B,) as labels mean one class each, 0s and 1s (B, `num_labels`) several, and with `num_labels=1` it is a
    regression; `config.problem_type` says so explicitly.
    """

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"
        if config.is_decoder and config.classifier_pooling == "first":
            raise ValueError(
                "classifier_pooling='first': the first token of a causal decoder has seen nothing else; use 'mean'"
            )
        self.model = LinformerModel(config)
        self.head = LinformerHead(config)
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
                f"{tuple(logits.shape)}, a number for each of the {logits.shape[-1]} labels"
            )
        targets = labels.to(logits.dtype).reshape(logits.shape)
        loss = self.loss_function(labels=targets, pooled_logits=logits, config=self.config, **kwargs)
        # the mean over all batches that a step accumulates, as transformers does for classes only
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
    """A class for every token: (B, N, `num_labels`) logits.

    >>> config = LinformerConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=5)
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
        """`labels` (B, N) are classes, -100 where there is none."""
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
    """Where in a text an answer starts and ends: two times (B, N) logits.

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
        """Positions (B,) of first and last token of the answer; those beyond the input, cut off with it, are ignored."""
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
    """`generate`, with the cache of a Linformer."""

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
            return
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation is {generation_config.cache_implementation!r}, but a Linformer keeps a LinformerCache; "
                "leave it out"
            )
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            padding_mask("attention_mask", mask, mask.shape, mask.device)  # once, for prompts that are read in pieces
        model_kwargs["past_key_values"] = LinformerCache(self.config)


class LinformerForCausalLM(LinformerPreTrainedModel, LinformerGenerationMixin):
    """Predicts the next token: (B, N, V) logits, and generates.

    >>> config = LinformerConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, block_length=16)
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
                "add_cross_attention=True: a causal LM has no source; use LinformerForConditionalGeneration"
            )
        self.model = LinformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
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
        """`labels` (B, N) are the inputs themselves, -100 where there is nothing to predict; they are shifted here.

        `logits_to_keep`: logits of the last so many tokens only, or of these indices; 0 for all.
        """
        if use_cache is None and labels is not None:
            use_cache = False  # a cache nobody will use costs memory
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
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
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
