"""LinformerConfig: the configuration of all models, with the field names of Hugging Face."""

import copy
from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from .options_linformer import (
    POST_NORM_IS_NOT_REVERSIBLE,
    WINDOW_IN_DECODER,
    check_local_width,
    check_window,
    choice,
    nearest_of,
    positive_integer,
    probability,
)
from .projection_linformer import Projection

POSITIONS = ("learned", "sinusoidal", "none")
DECODER_ATTENTIONS = ("full", "causal")
# fields whose decoder_… is that of the decoder in an encoder-decoder
DECODER_SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")
POOLINGS = ("mean", "first")
QUANTIZATIONS = ("none", "int8")
# keys that transformers passes or stores in addition to the fields of a configuration
HUGGING_FACE_KEYS = {
    *("num_labels", "name_or_path", "model_type", "torch_dtype", "attn_implementation", "experts_implementation"),
    *(
        "output_attentions",
        "per_layer_config",
        "auto_map",
        "custom_pipelines",
        "quantization_config",
        "tokenizer_class",
    ),
    *("finetuning_task", "task_specific_params", "use_return_dict", "tie_last_hidden_states"),
    # of tokenizers, and of earlier versions
    *("cls_token_id", "sep_token_id", "mask_token_id", "unk_token_id", "torchscript", "gradient_checkpointing"),
    *("pruned_heads", "prefix", "use_bfloat16", "tie_encoder_decoder"),
}

# similarity, from 0 to 1, above which an unknown key is a misspelled field and not a key of another library
MISSPELLING_CUTOFF = 0.9

logger = logging.get_logger(__name__)


@strict
class LinformerConfig(PreTrainedConfig):
    """Configuration of a Linformer.

    >>> LinformerConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, projected_length=64).sharing
    'headwise'
    >>> LinformerConfig(projected_lenght=64)
    Traceback (most recent call last):
    ...
    TypeError: LinformerConfig has no field 'projected_lenght'; did you mean 'projected_length'?

    - `vocab_size`, `hidden_size`, `num_hidden_layers`, `num_attention_heads`, `num_key_value_heads`, `head_dim`,
      `intermediate_size` (0: no feed-forward), `hidden_act`, `max_position_embeddings`, `type_vocab_size` (0: no token
      types): the sizes.
    - `embedding_size`: width of the embeddings, mapped to `hidden_size` before the first layer and back before the
      output layer of a language model; default `hidden_size`, without the two maps.
    - `projection`: the kind of E and F: "linear", "affine", "dynamic", "conv", "head_conv", "mean", "max" or
      "random"; "none" for full attention.
    - `projected_length`: K, the number of rows of keys and values; one number, or one for each layer. With
      `sharing="layerwise"`, the shared projection has the largest, and each layer uses a part of it (`Projection.cut`).
    - `sharing`: which E and F are shared: "none", "headwise", "kv" or "layerwise".
    - `window_length`: number of tokens in a block of the window of an encoder; 0 for none. Each token attends exactly
      to its own block and to the blocks on either side, 3 × `window_length` tokens, in one softmax with the K rows.
      With a window, `projected_length` may be 0.
    - `global_tokens`: number of tokens at the beginning that all tokens attend to exactly; needs `window_length`.
    - `distance_bias`: add a learned number for each head and distance to the scores of the tokens in the window; needs
      `window_length`.
    - `rescale`: give the keys and values of short inputs the scale of full ones.
    - `position_embedding`: "learned", "sinusoidal" or "none".
    - `norm_first`: layer norm before attention and feed-forward (pre-norm), or after them as in BERT.
    - `outer_norms`: layer norms outside of the layers: after the embeddings, after the last pre-norm layer, and in the
      transform (dense, activation, norm) before the output layer of a masked LM. False leaves out the norms and the
      transform.
    - `reversible`: reversible residual layers, whose activations are recomputed in the backward pass; pre-norm only.
    - `local_width`: width of the local convolution in each encoder layer, in tokens; odd, or 0 for none.
    - `hidden_dropout_prob`, `attention_probs_dropout_prob`, `classifier_dropout`: dropout probabilities.
    - `classifier_pooling`: "mean" over the real tokens, or the "first" token.
    - `quantization`: "int8" for a model of `linformer_kit.quantize`, whose linear layers have 8-bit weights; otherwise
      "none".
    - `decoder_attention`: in decoders, "causal" (blocks of `block_length` tokens, each projected to `slots` rows when
      it is finished) or "full".
    - `num_decoder_layers`, `decoder_hidden_size`, `decoder_num_attention_heads`, `decoder_intermediate_size`: sizes of
      the decoder in an encoder-decoder; default those of the encoder. `decoder_vocab_size`: size of its vocabulary if
      it has its own.
    - `is_decoder`, `add_cross_attention`, `cross_attention_hidden_size`, `is_encoder_decoder`: set by the models.

    Full attention is `projection="none"` in layers and encoders, `decoder_attention="full"` in decoders,
    `model.attention: full` in YAML, `full-attention` in `linformer compare`, and `projection_dim=None` or
    `full_attn=True` in Keras.
    """

    model_type = "linformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 — as in every configuration of transformers

    vocab_size: int = 30522
    hidden_size: int = 768
    embedding_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2

    projection: str = "linear"
    projected_length: int | list[int] = 128
    sharing: str = "headwise"
    window_length: int = 0
    global_tokens: int = 0
    distance_bias: bool = False
    rescale: bool = False
    position_embedding: str = "learned"
    local_width: int = 0
    norm_first: bool = True
    outer_norms: bool = True
    reversible: bool = False

    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    classifier_dropout: float | int | None = None
    classifier_pooling: str = "mean"
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12

    quantization: str = "none"

    num_decoder_layers: int | None = None
    decoder_vocab_size: int | None = None
    decoder_hidden_size: int | None = None
    decoder_num_attention_heads: int | None = None
    decoder_intermediate_size: int | None = None
    decoder_attention: str = "causal"
    block_length: int = 128
    slots: int = 4
    is_decoder: bool = False
    add_cross_attention: bool = False
    cross_attention_hidden_size: int | None = None
    use_cache: bool = True

    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any):
        names = [field.name for field in fields(self)]
        for name in kwargs:
            if not is_hugging_face_key(name):
                hint = nearest_of(name, names) or f"; it has {', '.join(names)}"
                raise TypeError(f"LinformerConfig has no field {name!r}{hint}")
        super().__post_init__(**kwargs)
        self.check()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """As in the base class, but keeps unknown keys of other versions, unless they look misspelled."""
        names = [field.name for field in fields(cls)]
        for name in kwargs:  # other names may be options of `from_pretrained`
            if name not in names and (hint := nearest_of(name, names, MISSPELLING_CUTOFF)):
                raise TypeError(f"LinformerConfig has no field {name!r}{hint}")
        unknown = [
            name
            for name in config_dict
            if name not in names and not is_hugging_face_key(name) and not nearest_of(name, names, MISSPELLING_CUTOFF)
        ]
        if unknown:
            logger.warning(f"unknown keys of the configuration are kept, but have no effect: {unknown}")
        known = {name: value for name, value in config_dict.items() if name not in unknown}
        result = super().from_dict(known, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        for name in unknown:
            setattr(config, name, config_dict[name])
        return result

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "LinformerConfig":
        """The configuration with the sizes of the decoder if only `decoder` is set, and else the configuration itself.

        The base class would rename every field `decoder_…`, for example `decoder_attention` to `attention`.
        """
        if not decoder or encoder:
            return self
        config = copy.deepcopy(self)
        for name, value in self.decoder_sizes().items():
            setattr(config, name, value)
        return config

    def decoder_sizes(self) -> dict[str, int]:
        """The sizes of the decoder in an encoder-decoder that are not those of the encoder."""
        sizes = {name: getattr(self, f"decoder_{name}") for name in DECODER_SIZES}
        sizes["num_hidden_layers"] = self.num_decoder_layers
        return {name: size for name, size in sizes.items() if size is not None}

    def check(self) -> None:
        """Raise for invalid or contradictory values. Models check again when they are built."""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            positive_integer(name, getattr(self, name))
        for name in ("max_position_embeddings", "block_length", "slots"):
            positive_integer(name, getattr(self, name))
        optional = ("embedding_size", "num_key_value_heads", "head_dim", "num_decoder_layers", "decoder_vocab_size")
        for name in (*optional, "decoder_hidden_size", "decoder_num_attention_heads", "cross_attention_hidden_size"):
            if getattr(self, name) is not None:
                positive_integer(name, getattr(self, name))
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
            if getattr(self, name) is not None:
                probability(name, getattr(self, name))
        choice("position_embedding", self.position_embedding, POSITIONS)
        choice("decoder_attention", self.decoder_attention, DECODER_ATTENTIONS)
        choice("classifier_pooling", self.classifier_pooling, POOLINGS)
        choice("hidden_act", self.hidden_act, ACT2FN)
        choice("quantization", self.quantization, QUANTIZATIONS)
        if self.quantization != "none" and (self.is_decoder or self.is_encoder_decoder):
            raise ValueError(f"quantization={self.quantization!r} is only for encoders; leave it out")
        kind = Projection.kinds[choice("projection", self.projection, Projection.kinds)]
        for length in self.projected_lengths:
            check_window(kind, length, self.window_length, self.global_tokens, self.distance_bias)
            lengths = (self.max_position_embeddings, length or 1)
            Projection.check_options(self.projection, *lengths, self.sharing, self.rescale)
        if self.is_decoder and self.window_length:
            raise ValueError(WINDOW_IN_DECODER.format(window_length=self.window_length))
        Projection.check_lengths(self.projection, self.projected_lengths, self.sharing)
        self._check_heads()
        sizes = {"type_vocab_size": "token types", "intermediate_size": "feed-forward"}
        for name, absent in (sizes | {"decoder_intermediate_size": "feed-forward"}).items():
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 (no {absent}) or more")
        check_local_width(self.local_width)
        if self.slots > self.block_length:
            raise ValueError(
                f"slots={self.slots} is more than block_length={self.block_length}; choose fewer slots, or longer "
                "blocks"
            )
        if self.num_labels is not None and self.num_labels < 1:
            raise ValueError(f"num_labels is {self.num_labels}; it must be at least 1")
        if self.layer_norm_eps <= 0:
            raise ValueError(f"layer_norm_eps is {self.layer_norm_eps}; it must be larger than 0")
        if self.reversible and not self.norm_first:
            raise ValueError(POST_NORM_IS_NOT_REVERSIBLE)
        if self.add_cross_attention and not self.is_decoder:
            raise ValueError("add_cross_attention=True needs is_decoder=True; set both, or neither")
        self._check_tokens()

    def _check_tokens(self) -> None:
        """The ids of special tokens; generated ones are of the decoder's vocabulary, and padding is of both."""
        target = "vocab_size" if self.decoder_vocab_size is None else "decoder_vocab_size"
        ends = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        named = [(name, getattr(self, name), target) for name in ("bos_token_id", "decoder_start_token_id")]
        named += [("pad_token_id", self.pad_token_id, size) for size in dict.fromkeys(("vocab_size", target))]
        for name, value, size in [*named, *(("eos_token_id", end, target) for end in ends)]:
            count = getattr(self, size)
            if value is not None and not 0 <= value < count:
                raise ValueError(f"{name} is {value} but {size} is {count}; choose one of 0 … {count - 1}")

    def _check_heads(self) -> None:
        for prefix in ("", "decoder_"):
            width = getattr(self, f"{prefix}hidden_size") or self.hidden_size
            heads = getattr(self, f"{prefix}num_attention_heads") or self.num_attention_heads
            if self.head_dim is None and width % heads:
                raise ValueError(
                    f"{prefix}hidden_size={width} is not divisible by {prefix}num_attention_heads={heads}; choose "
                    "divisible sizes, or set head_dim"
                )
            if self.num_key_value_heads is not None and heads % self.num_key_value_heads:
                raise ValueError(
                    f"{prefix}num_attention_heads={heads} is not divisible by "
                    f"num_key_value_heads={self.num_key_value_heads}; choose divisible sizes"
                )

    @property
    def embedding_width(self) -> int:
        """The width of the embeddings: `embedding_size`, or `hidden_size` if it is None."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def projected_lengths(self) -> list[int]:
        """K of every layer."""
        if not isinstance(self.projected_length, list):
            return [self.projected_length] * self.num_hidden_layers
        if len(self.projected_length) != self.num_hidden_layers:
            raise ValueError(
                f"projected_length has {len(self.projected_length)} numbers but num_hidden_layers is "
                f"{self.num_hidden_layers}; pass one number, or one per layer"
            )
        return self.projected_length


def is_hugging_face_key(name: str) -> bool:
    """Whether transformers passes or stores this key in addition to our fields."""
    generation_keys = GenerationConfig._get_default_generation_params()
    return name.startswith("_") or name in HUGGING_FACE_KEYS or name in generation_keys
