"""The encoder-decoder: two models of `modeling_linformer.py`, connected by Linformer cross-attention.

Keys and values of cross-attention are projected once per source: K rows per layer, for a source of any length.
"""

import copy
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils.generic import can_return_tuple

from .cache_linformer import LinformerCache
from .configuration_linformer import DECODER_SIZES, LinformerConfig
from .modeling_linformer import LinformerGenerationMixin, LinformerModel, LinformerPreTrainedModel, make_map
from .options_linformer import NO_WINDOW
from .validation_linformer import check_classes, check_integers

WORDS = "word_embeddings.weight"


class LoadsEncoders:
    """`from_pretrained` of an encoder-decoder, which also takes checkpoints of encoders."""

    encoder_prefix: str  # of the names of the encoder's weights

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any):
        """As in the base class; a checkpoint of an encoder is loaded into the encoder."""
        is_mapped = kwargs.get("key_mapping") is None
        if is_mapped:
            kwargs["key_mapping"] = encoder_names(cls.encoder_prefix)
        loaded = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        if is_mapped:  # otherwise the weights would be saved under the names of the encoder
            (loaded[0] if isinstance(loaded, tuple) else loaded)._weight_conversions = None
        return loaded


def encoder_names(new: str) -> dict[str, str]:
    """Patterns of names in checkpoints of encoders, without and with a head, and their new names."""
    return {
        rf"^{prefix}{part}\.": f"{new}{part}."
        for prefix in ("", r"model\.")
        for part in ("embeddings", "layers", "norm", "projection")
    }


def add_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the weights of earlier versions, in which encoder and decoder were not part of a base model."""
    for name in [name for name in state_dict if name.startswith((f"{prefix}encoder.", f"{prefix}decoder."))]:
        state_dict[f"{prefix}model.{name.removeprefix(prefix)}"] = state_dict.pop(name)


def encoder_config(config: LinformerConfig) -> LinformerConfig:
    """The configuration of the encoder."""
    changes: dict[str, Any] = {"is_decoder": False, "add_cross_attention": False}
    if config.decoder_vocab_size is not None:  # these are ids of the other vocabulary
        changes |= {"bos_token_id": None, "eos_token_id": None, "decoder_start_token_id": None}
    return stack_config(config, changes)


def decoder_config(config: LinformerConfig) -> LinformerConfig:
    """The configuration of the decoder."""
    if config.projected_lengths[-1] == 0:
        raise ValueError(
            f"projected_length is {config.projected_length}, but the decoder attends to as many rows as the last "
            "encoder layer has, and cross-attention has no window; set projected_length of the last layer to at least 1"
        )
    changes = {
        "is_decoder": True,
        "add_cross_attention": True,
        "cross_attention_hidden_size": config.hidden_size,
        "projected_length": config.projected_lengths[-1],
        "type_vocab_size": 0,
        **NO_WINDOW,
        **config.decoder_sizes(),
    }
    return stack_config(config, changes)


def stack_config(config: LinformerConfig, changes: dict[str, Any]) -> LinformerConfig:
    """A copy for one stack of an encoder-decoder, without the sizes of the other."""
    config = copy.deepcopy(config)
    sizes = {f"decoder_{name}": None for name in DECODER_SIZES} | {"num_decoder_layers": None}
    for name, value in {"is_encoder_decoder": False, **sizes, **changes}.items():
        setattr(config, name, value)
    return config


class LinformerSeq2SeqModel(LoadsEncoders, LinformerPreTrainedModel):
    """Encoder and decoder without an output layer: ids of source and target to (B, T, C) hidden states of the target.

    >>> import torch
    >>> sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = LinformerSeq2SeqModel(LinformerConfig(**sizes, decoder_hidden_size=16))
    >>> source, target = torch.randint(2, 100, (2, 300)), torch.randint(2, 100, (2, 20))
    >>> model(source, decoder_input_ids=target).last_hidden_state.shape
    torch.Size([2, 20, 16])
    """

    encoder_prefix = "encoder."

    def __init__(self, config: LinformerConfig):
        config = copy.deepcopy(config)
        config.is_encoder_decoder = True
        super().__init__(config)
        self.encoder = LinformerModel(encoder_config(config))
        self.decoder = LinformerModel(decoder_config(config))
        # different vocabularies or widths cannot be tied
        words = f"embeddings.{WORDS}"
        self._tied_weights_keys = {f"decoder.{words}": f"encoder.{words}"} if self.shares_embeddings else {}
        self.post_init()

    @property
    def shares_embeddings(self) -> bool:
        """Whether the embeddings of source and target can be tied: one vocabulary, and one width."""
        widths = {stack.config.embedding_width for stack in (self.encoder, self.decoder)}
        return self.config.decoder_vocab_size is None and len(widths) == 1

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.encoder.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: LinformerCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """`encoder_outputs`, returned by an earlier call, skip the encoder.

        With `past_key_values`, which hold the projected source, only the inputs of the decoder are needed.
        """
        # encoder and decoder have their own configurations, but this one decides which outputs to return
        kwargs.setdefault("output_attentions", self.config.output_attentions)
        kwargs.setdefault("output_hidden_states", self.config.output_hidden_states)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "the decoder has no input: pass labels, decoder_input_ids or decoder_inputs_embeds, or call generate"
            )
        if encoder_outputs is None and input_ids is None and getattr(past_key_values, "has_source", False):
            encoder_outputs = BaseModelOutput()
        elif encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
            )
        elif not isinstance(encoder_outputs, dict):
            names = ("last_hidden_state", "hidden_states", "attentions")
            encoder_outputs = BaseModelOutput(**dict(zip(names, encoder_outputs, strict=False)))
        outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            position_ids=decoder_position_ids,
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=self.config.use_cache if use_cache is None else use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class LinformerForConditionalGeneration(LoadsEncoders, LinformerPreTrainedModel, LinformerGenerationMixin):
    """Encoder-decoder for translation, summarization or denoising: (B, N, V) logits of the target.

    >>> import torch
    >>> sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> config = LinformerConfig(**sizes, bos_token_id=1)
    >>> model = LinformerForConditionalGeneration(config).eval()
    >>> source, target = torch.randint(2, 100, (2, 300)), torch.randint(2, 100, (2, 20))
    >>> model(source, labels=target).logits.shape
    torch.Size([2, 20, 100])
    >>> model.generate(source, max_new_tokens=5, do_sample=False).shape  # starts with decoder_start_token_id
    torch.Size([2, 6])

    If `projected_length` has one number per encoder layer, cross-attention uses the last. `from_pretrained` also loads
    an encoder, such as a masked LM; the decoder is then new.
    """

    encoder_prefix = "model.encoder."

    def __init__(self, config: LinformerConfig):
        config = copy.deepcopy(config)
        config.is_encoder_decoder = True
        if config.decoder_start_token_id is None:
            config.decoder_start_token_id = config.pad_token_id if config.bos_token_id is None else config.bos_token_id
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # without shifting the labels: the decoder's inputs are shifted
        self.model = LinformerSeq2SeqModel(config)
        decoder = self.model.decoder.config
        self.head = make_map(decoder.hidden_size, decoder.embedding_width)
        self.lm_head = nn.Linear(decoder.embedding_width, decoder.vocab_size, bias=False)
        # tied: one matrix for the embeddings of source and target and for the output layer; untied: three
        stack = "encoder" if self.model.shares_embeddings else "decoder"
        self._tied_weights_keys = {"lm_head.weight": f"model.{stack}.embeddings.{WORDS}"}
        self.register_load_state_dict_pre_hook(add_prefix)
        self.post_init()

    @property
    def encoder(self) -> LinformerModel:
        return self.model.encoder

    @property
    def decoder(self) -> LinformerModel:
        return self.model.decoder

    def set_encoder(self, encoder: LinformerModel, *args: Any, **kwargs: Any) -> None:
        self.model.set_encoder(encoder, *args, **kwargs)

    def set_decoder(self, decoder: LinformerModel) -> None:
        self.model.set_decoder(decoder)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the embeddings of encoder and decoder, and the output layer.

        With `config.decoder_vocab_size`, resize those of the encoder only: see `resize_decoder_token_embeddings`.
        """
        if self.config.decoder_vocab_size is not None:
            resized = self.encoder.resize_token_embeddings(new_num_tokens, *args, **kwargs)
            self.config.vocab_size = self.model.config.vocab_size = resized.num_embeddings
            return resized
        resized = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        if self.decoder.get_input_embeddings().num_embeddings != resized.num_embeddings:
            self.decoder.resize_token_embeddings(resized.num_embeddings, *args, **kwargs)
            self.tie_weights()
        for stack in (self.model, self.encoder, self.decoder):
            stack.config.vocab_size = resized.num_embeddings
        return resized

    def resize_decoder_token_embeddings(self, new_num_tokens: int, *args: Any, **kwargs: Any) -> nn.Embedding:
        """With `config.decoder_vocab_size`, resize the embeddings of the decoder and the output layer."""
        if self.config.decoder_vocab_size is None:
            raise ValueError(
                "decoder_vocab_size is None, so encoder and decoder have one vocabulary; call resize_token_embeddings"
            )
        resized = self.decoder.resize_token_embeddings(new_num_tokens, *args, **kwargs)
        self.lm_head = self._get_resized_lm_head(self.lm_head, resized.num_embeddings)
        self.config.decoder_vocab_size = self.model.config.decoder_vocab_size = resized.num_embeddings
        self.tie_weights()
        return resized

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: Any = None,
        labels: Tensor | None = None,
        past_key_values: LinformerCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """`labels` (B, T) is the target, -100 at ignored tokens; by default, the decoder's inputs are made from it.

        `encoder_outputs`, returned by an earlier call, skip the encoder. With `past_key_values` of an earlier call,
        which hold the projected source, only the decoder's inputs are needed.
        """
        # the base model has its own configuration, but this one decides which outputs to return
        kwargs.setdefault("output_attentions", self.config.output_attentions)
        kwargs.setdefault("output_hidden_states", self.config.output_hidden_states)
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None
        if labels is not None:
            self._check_labels(labels)
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            decoder_input_ids,
            decoder_attention_mask,
            decoder_position_ids,
            decoder_inputs_embeds,
            encoder_outputs,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(self.head(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            check_classes("labels", labels, logits)
            loss = self.loss_function(logits, labels.contiguous(), vocab_size=logits.shape[-1], **kwargs)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def _check_labels(self, labels: Tensor) -> None:
        """Check labels before they become the decoder's inputs, where an error would name the wrong argument."""
        check_integers("labels", labels, "(batch, length)")
        if labels.dim() != 2:
            raise ValueError(f"labels has shape {tuple(labels.shape)}; it must be (batch, length)")
        check_classes(
            "labels", labels, self.lm_head.weight.new_empty(()).expand(*labels.shape, self.lm_head.weight.shape[0])
        )

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The target shifted right, after `decoder_start_token_id`; ignored tokens become padding."""
        self._check_labels(labels)
        start, padding = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or padding is None:
            raise ValueError(
                f"decoder_start_token_id is {start} and pad_token_id is {padding}; set both in the configuration, or "
                "pass decoder_input_ids"
            )
        shifted = labels.roll(1, dims=1).masked_fill(labels.roll(1, dims=1) == -100, padding)
        shifted[:, 0] = start
        return shifted
