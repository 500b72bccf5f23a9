"""The encoder-decoder: two models of `modeling_linformer.py`, connected by Linformer cross-attention.

Keys and values of cross-attention are projected once per source: K rows per layer, for a source of any length.
"""

import copy
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils.generic import can_return_tuple

from .cache_linformer import LinformerCache
from .configuration_linformer import LinformerConfig
from .modeling_linformer import LinformerGenerationMixin, LinformerModel, LinformerPreTrainedModel, make_map
from .validation_linformer import check_classes, check_integers


def stack_config(config: LinformerConfig, **changes: Any) -> LinformerConfig:
    """The configuration of the encoder or of the decoder."""
    config = copy.deepcopy(config)
    for name, value in {"is_encoder_decoder": False, **changes}.items():
        setattr(config, name, value)
    return config


class LinformerForConditionalGeneration(LinformerPreTrainedModel, LinformerGenerationMixin):
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

    If `projected_length` has one number per encoder layer, cross-attention uses the last.
    """

    # tied: one matrix for the embeddings of source and target and for the output layer; untied: three
    _tied_weights_keys = {  # noqa: RUF012
        "decoder.embeddings.word_embeddings.weight": "encoder.embeddings.word_embeddings.weight",
        "lm_head.weight": "encoder.embeddings.word_embeddings.weight",
    }

    def __init__(self, config: LinformerConfig):
        config = copy.deepcopy(config)
        config.is_encoder_decoder = True
        if config.decoder_start_token_id is None:
            config.decoder_start_token_id = config.pad_token_id if config.bos_token_id is None else config.bos_token_id
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # without shifting the labels: the decoder's inputs are shifted
        self.encoder = LinformerModel(stack_config(config, is_decoder=False, add_cross_attention=False))
        self.decoder = LinformerModel(
            stack_config(
                config,
                is_decoder=True,
                add_cross_attention=True,
                num_hidden_layers=config.num_decoder_layers or config.num_hidden_layers,
                projected_length=config.projected_lengths[-1],
                type_vocab_size=0,
            )
        )
        self.head = make_map(config.hidden_size, config.embedding_width)
        self.lm_head = nn.Linear(config.embedding_width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.encoder.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the embeddings of encoder and decoder, and the output layer."""
        resized = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        if not self.config.tie_word_embeddings:
            self.decoder.resize_token_embeddings(resized.num_embeddings)
        for stack in (self.encoder, self.decoder):
            stack.config.vocab_size = resized.num_embeddings
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
        # encoder and decoder have their own configurations, but this one decides which outputs to return
        kwargs.setdefault("output_attentions", self.config.output_attentions)
        kwargs.setdefault("output_hidden_states", self.config.output_hidden_states)
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None
        if labels is not None:
            self._check_labels(labels)
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "the decoder has no input: pass labels, decoder_input_ids or decoder_inputs_embeds, or call generate"
            )
        if encoder_outputs is None and input_ids is None and inputs_embeds is None and past_key_values is not None:
            encoder_outputs = BaseModelOutput()  # the cache holds what the decoder needs of the source
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
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
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
