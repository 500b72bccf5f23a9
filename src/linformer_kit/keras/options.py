"""The options of the models: one set of names for all of them, with meanings and checks."""

import warnings
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..models.options_linformer import (
    boolean,
    check_local_width,
    check_window,
    choice,
    is_finite_number,
    nearest_of,
    plain_number,
    positive_integer,
    probability,
)
from .projection import Projection

ACTIVATIONS = ("gelu", "relu", "silu", "tanh")
POSITIONS = ("learned", "sinusoidal", "none")
DECODER_ATTENTIONS = ("causal", "full")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The sizes and choices of a model.

    - `k`: projected length of keys and values; one number, or one per layer. `max_len`: maximum number of tokens.
    - `window_length`: number of tokens in a block of the window of an encoder; 0 for none. Each token attends exactly
      to its own block and to the blocks on either side, in one softmax with the `k` rows. With a window, `k` may be
      0. `global_tokens`: number of tokens at the beginning that all tokens attend to exactly. `distance_bias`: add a
      learned number for each head and distance to the scores of the tokens in the window.
    - `vocab_size`, `d_model`, `d_ff`, `n_heads`, `head_dim` (default `d_model / n_heads`), `n_layers`: the sizes.
    - `full_attn`: use full attention; everything else stays the same.
    - `projection`: "linear", "affine", "dynamic", "conv", "head_conv", "mean", "max" or "random". `sharing`: how E and
      F are shared: "none", "headwise", "kv" or "layerwise". `rescale`: compensate for the rows of E that a short input
      leaves unused.
    - `dropout`; `attention_dropout` (default `dropout`). `activation` of the feed-forward network: "gelu", "relu",
      "silu" or "tanh".
    - `positions`: "learned", "sinusoidal" or "none". `token_types`: number of token types; 0 for none.
    - `local_width`: width of the local convolution in the encoder layers, in tokens; odd, or 0 for none.
    - `norm_first`: normalize before attention and feed-forward instead of after. `epsilon` of the norms.
      `initializer_range`: standard deviation of the initial weights.
    - `pad_id`: the id of padding; None if there is none. `tied`: input and output embeddings share one matrix.
    - Decoders: `decoder_attention` "causal" (blocks of `block_length` tokens, each projected to `slots` rows once it is
      complete) or "full"; `n_decoder_layers` (default `n_layers`); `start_id` and `end_id` of generated sequences.
    """

    k: int | list[int] = 256
    max_len: int = 512
    vocab_size: int = 20_000
    d_model: int = 256
    d_ff: int = 1024
    n_heads: int = 4
    n_layers: int = 3
    dropout: float = 0.1
    full_attn: bool = False

    projection: str = "linear"
    sharing: str = "headwise"
    rescale: bool = False
    window_length: int = 0
    global_tokens: int = 0
    distance_bias: bool = False
    head_dim: int | None = None
    attention_dropout: float | None = None
    activation: str = "gelu"
    positions: str = "learned"
    token_types: int = 0
    local_width: int = 0
    norm_first: bool = True
    epsilon: float = 1e-12
    initializer_range: float = 0.02
    pad_id: int | None = 0
    tied: bool = True

    decoder_attention: str = "causal"
    block_length: int = 128
    slots: int = 4
    n_decoder_layers: int | None = None
    start_id: int | None = None
    end_id: int | None = None

    @classmethod
    def from_keywords(cls, options: dict[str, Any]) -> "Options":
        """Build from keyword arguments. The error for an unknown one suggests the closest name."""
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                raise TypeError(f"unknown option {name!r}{nearest_of(name, names)}; options are {', '.join(names)}")
        if hasattr(options.get("k"), "tolist"):  # an array
            options = {**options, "k": options["k"].tolist()}
        return cls(**{name: plain_number(value) for name, value in options.items()})

    def __post_init__(self) -> None:
        for name in ("max_len", "vocab_size", "d_model", "d_ff", "n_heads", "n_layers", "block_length", "slots"):
            positive_integer(name, getattr(self, name))
        for name in ("head_dim", "n_decoder_layers"):
            if getattr(self, name) is not None:
                positive_integer(name, getattr(self, name))
        for name in ("full_attn", "norm_first", "tied"):
            boolean(name, getattr(self, name))
        probability("dropout", self.dropout)
        if self.attention_dropout is not None:
            probability("attention_dropout", self.attention_dropout)
        check_local_width(self.local_width)
        choice("activation", self.activation, ACTIVATIONS)
        choice("positions", self.positions, POSITIONS)
        choice("decoder_attention", self.decoder_attention, DECODER_ATTENTIONS)
        if self.projection == "none":
            raise ValueError("projection is 'none'; for full attention use full_attn=True")
        Projection.check_options(self.projection, self.max_len, 1, self.sharing, self.rescale)
        window = (self.window_length, self.global_tokens, self.distance_bias)
        for k in self.k_per_layer:
            check_window(Projection.kinds[self.projection], k, *window, "k")
        if self.full_attn and self.window_length:
            raise ValueError(
                f"window_length={self.window_length} with full_attn=True, which sees every token exactly already; set "
                "window_length=0, or full_attn=False"
            )
        if self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(
                f"d_model={self.d_model} is not divisible by n_heads={self.n_heads}; change one, or set head_dim"
            )
        if self.slots > self.block_length:
            raise ValueError(
                f"slots={self.slots} is more than block_length={self.block_length}; use fewer slots or longer blocks"
            )
        if isinstance(self.token_types, bool) or not isinstance(self.token_types, int) or self.token_types < 0:
            raise ValueError(f"token_types is {self.token_types!r}; it must be an integer of at least 0")
        for name in ("epsilon", "initializer_range"):
            if not (is_finite_number(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a number larger than 0")
        for name in ("pad_id", "start_id", "end_id"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and 0 <= value < self.vocab_size):
                raise ValueError(
                    f"{name} is {value!r} but vocab_size is {self.vocab_size}; use one of 0 … {self.vocab_size - 1}"
                )

    @property
    def k_per_layer(self) -> list[int]:
        """The projected length of every layer."""
        if not isinstance(self.k, list | tuple):
            return [self.k] * self.n_layers
        if len(self.k) != self.n_layers:
            raise ValueError(
                f"k has {len(self.k)} values but n_layers is {self.n_layers}; use one number, or one per layer"
            )
        if self.sharing == "layerwise" and len(set(self.k)) > 1:
            raise ValueError(
                f"k is {self.k} with sharing='layerwise', where all layers share one matrix; use a single number"
            )
        return list(self.k)

    @property
    def heads(self) -> dict[str, Any]:
        """The options that all attention layers of a model have in common."""
        dropout = self.dropout if self.attention_dropout is None else self.attention_dropout
        return {"num_heads": self.n_heads, "key_dim": self.head_dim or self.d_model // self.n_heads, "dropout": dropout}

    def to_dict(self) -> dict[str, Any]:
        """The options as keyword arguments."""
        return asdict(self)

    # names of version 0.1.0 before its release

    @classmethod
    def of(cls, options: dict[str, Any]) -> "Options":
        """Deprecated: use `from_keywords`."""
        warnings.warn("Options.of is now called Options.from_keywords", FutureWarning, stacklevel=2)
        return cls.from_keywords(options)

    def config(self) -> dict[str, Any]:
        """Deprecated: use `to_dict`."""
        warnings.warn("Options.config is now called Options.to_dict", FutureWarning, stacklevel=2)
        return self.to_dict()

    @property
    def k_of_layers(self) -> list[int]:
        """Deprecated: use `k_per_layer`."""
        warnings.warn("Options.k_of_layers is now called Options.k_per_layer", FutureWarning, stacklevel=2)
        return self.k_per_layer
