"""The encoder-decoder: two stacks connected by Linformer cross-attention."""

from typing import Any

import keras
import numpy as np
from keras import ops

from .checks import check_ids
from .generation import GenerationMixin
from .layers import Prompt, Source, Stack, decoder_options
from .models import LinformerModel, make_embedding
from .options import Options
from .tokens import Tensor

TARGET = "decoder_input_ids"


@keras.saving.register_keras_serializable(package="linformer_kit")
class LinformerSeq2Seq(LinformerModel, GenerationMixin):
    """Encoder-decoder for translation, summarization and denoising: source and shifted target to (B, T, V) logits.

    >>> sizes = {"k": 16, "max_len": 64, "vocab_size": 100, "d_model": 32, "d_ff": 64, "n_heads": 2, "n_layers": 1}
    >>> model = LinformerSeq2Seq(**sizes, start_id=1)
    >>> source, target = np.full((2, 50), 7), np.full((2, 20), 9)
    >>> tuple(model({"input_ids": source, "decoder_input_ids": target}).shape)
    (2, 20, 100)
    >>> model.generate(source, max_new_tokens=5).shape  # starts with start_id
    (2, 6)

    Train it with `keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)`, where 0 is padding.
    """

    def create_layers(self, options: Options) -> None:
        # source, target and output embeddings are one matrix if tied, otherwise three
        self.words = make_embedding(options, has_output=options.tied)
        self.target_words = self.words
        if not options.tied:
            self.target_words = make_embedding(options, has_output=True, name="target_words")
        self.encoder = Stack(options, self.words, name="encoder")
        self.decoder = Stack(
            decoder_options(options), self.target_words, is_decoder=True, has_source=True, name="decoder"
        )

    def build_layers(self) -> None:
        self.encoder.build()
        self.decoder.build()

    def call(self, inputs: Any, training: bool | None = None) -> Tensor:
        """A dict of (B, N) `input_ids` and (B, T) `decoder_input_ids` to (B, T, V); target padding is at the end."""
        named, target_BT = self.validate_inputs(inputs)
        states_BTC = self.decoder(ops.cast(target_BT, "int32"), source=self._encode(named, training), training=training)
        return self.target_words(states_BTC, reverse=True)

    @property
    def input_stack(self) -> Stack:
        return self.encoder

    def validate_inputs(self, inputs: Any) -> tuple[dict[str, Any], Any]:
        """The inputs of the encoder by name, and the target."""
        if not isinstance(inputs, dict) or TARGET not in inputs:
            raise ValueError(
                f"the input must be a dict of input_ids and {TARGET}, optionally with an attention_mask; without "
                "a target, call generate"
            )
        target_BT = inputs[TARGET]
        check_ids(TARGET, target_BT, self.options.vocab_size)
        self.decoder.check_length(target_BT.shape[1])
        return self.named_inputs({name: x for name, x in inputs.items() if name != TARGET}), target_BT

    def signature(self, ids: keras.InputSpec) -> Any:
        return {"input_ids": ids, TARGET: ids}

    def _encode(self, named: dict[str, Any], training: bool | None) -> Source:
        packed = self.pack(named)
        states_BNC = self.encoder(packed.ids_BN, packed.lengths_B, packed.types_BN, training=training)
        return Source(states_BNC, packed.lengths_B)

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> keras.KerasTensor:
        _, target = self.validate_inputs(inputs)
        return keras.KerasTensor((*target.shape, self.options.vocab_size), dtype="float32")

    @property
    def start_id(self) -> int:
        """The first id of every target."""
        return (self.options.pad_id or 0) if self.options.start_id is None else self.options.start_id

    def make_prompt(self, inputs: dict[str, Tensor]) -> Prompt:
        sources = self.decoder.project_source(self._encode(inputs, False))
        ids_B1 = ops.full_like(inputs["input_ids"][:, :1], self.start_id, dtype="int32")
        return Prompt(ids_B1, ops.ones_like(ids_B1[:, 0]), None, sources)

    def logits(self, states_BC: Tensor) -> Tensor:
        return self.target_words(states_BC, reverse=True)

    def output_prefix(self, ids_BN: np.ndarray, longest: int) -> tuple[np.ndarray, int]:
        return np.full((len(ids_BN), 1), self.start_id, "int32"), 1
