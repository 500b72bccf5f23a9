"""What a model of another package is converted to: tensors under our names, and the modules that they build.

Shapes: N maximum length, K projected length, M matrices, W window, D head size.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..models.attention_linformer import LinformerAttention
from ..models.configuration_linformer import LinformerConfig
from ..models.encoder_linformer import LinformerEncoder
from ..models.modeling_linformer import LinformerForMaskedLM, LinformerModel
from ..models.projection_linformer import Projection

# names in the layers of a LinformerEncoder, and in those of the models
MODEL_NAMES = {
    ".attention_norm.": ".attention_residual.norm.",
    ".feed_forward_norm.": ".feed_forward_residual.norm.",
}


class Matrix(NamedTuple):
    """One E or F: a matrix (N, K), with a bias (K,) if it has one, or a kernel (W, D, D) with a bias (D,)."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def projection(self) -> str:
        """The kind of projection that has such matrices."""
        if self.weight.dim() == 3:
            return "head_conv"
        return "linear" if self.bias is None else "affine"

    def rows(self, length: int) -> int:
        """The projected length for `length` tokens, which the window of a kernel divides."""
        return self.weight.shape[1] if self.weight.dim() == 2 else length // self.weight.shape[0]

    def equals(self, other: "Matrix") -> bool:
        if self.bias is None or other.bias is None:
            return self.bias is other.bias and torch.equal(self.weight, other.weight)
        return torch.equal(self.bias, other.bias) and torch.equal(self.weight, other.weight)


HeadMatrices = list[tuple[Matrix, Matrix]]  # E and F of each key-value head of a layer


@dataclass
class Weights:
    """A converted model: `layers` has the names of an attention layer or of a `LinformerEncoder`."""

    layers: dict[str, Tensor]
    matrices: list[HeadMatrices]  # of each layer; empty: full attention
    heads: int
    max_length: int
    norm_first: bool
    activation: str = "gelu"
    reversible: bool = False
    # those of a language model outside of its layers, with the names of LinformerForMaskedLM
    outside: dict[str, Tensor] = field(default_factory=dict)
    outer_norms: bool = False
    config: dict[str, Any] = field(default_factory=dict)  # fields of LinformerConfig that only this package needs
    dropout: tuple[float, float] = (0.0, 0.0)  # on hidden states, and on attention weights

    @property
    def depth(self) -> int:
        """The number of layers; 0 for a bare attention layer."""
        return len({name.split(".")[1] for name in self.layers if name.startswith("layers.")})

    def tensor(self, name: str) -> Tensor:
        """A tensor of the first, or only, layer."""
        return self.layers[f"layers.0.{name}" if self.depth else name.removeprefix("attention.")]

    def build(self) -> nn.Module:
        """A LinformerAttention, LinformerEncoder, LinformerModel or LinformerForMaskedLM, in evaluation mode."""
        tensors = {**self.layers, **self.projections()}
        model: nn.Module
        if self.outside:
            for old, new in MODEL_NAMES.items():
                tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
            tensors = {**{f"model.{name}": tensor for name, tensor in tensors.items()}, **self.outside}
            config = LinformerConfig(**self.model_options())
            if "lm_head.weight" in tensors:
                model = LinformerForMaskedLM(config)
            else:
                model = LinformerModel(config)
                tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        elif self.depth:
            model = LinformerEncoder(**self.encoder_options())
        else:
            model = LinformerAttention(**self.attention_options())
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise UserError(f"the shapes of the tensors do not fit together: {error}") from None
        return model.eval()

    def attention_options(self) -> dict[str, Any]:
        """The options that layers and encoders have in common."""
        query_features, embed_dim = self.tensor("attention.query.weight").shape
        head_dim = query_features // self.heads
        options = {
            "embed_dim": embed_dim,
            "num_heads": self.heads,
            "head_dim": head_dim,
            "num_kv_heads": self.tensor("attention.key.weight").shape[0] // head_dim,
            "max_length": self.max_length,
        }
        if not self.matrices:
            return {**options, "projection": "none"}
        lengths = [heads[0][0].rows(self.max_length) for heads in self.matrices]
        return {
            **options,
            "projected_length": lengths[0] if len(set(lengths)) == 1 else lengths,
            "projection": self.matrices[0][0][0].projection,
            "sharing": find_sharing(self.matrices),
        }

    def encoder_options(self) -> dict[str, Any]:
        has_feed_forward = "layers.0.feed_forward.inner.weight" in self.layers
        options: dict[str, Any] = {
            **self.attention_options(),
            "depth": self.depth,
            "norm_first": self.norm_first,
            "final_norm": False,
            "feed_forward": self.activation if has_feed_forward else "none",
            "feed_forward_dim": self.tensor("feed_forward.inner.weight").shape[0] if has_feed_forward else None,
        }
        return {**options, "reversible": True} if self.reversible else options

    def model_options(self) -> dict[str, Any]:
        options = self.encoder_options()
        words = self.outside["model.embeddings.word_embeddings.weight"]
        hidden_dropout, attention_dropout = self.dropout
        fields: dict[str, Any] = {
            "vocab_size": words.shape[0],
            "hidden_size": options["embed_dim"],
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
            "num_key_value_heads": options["num_kv_heads"],
            "head_dim": options["head_dim"],
            "intermediate_size": options["feed_forward_dim"] or 0,
            "hidden_act": self.activation,
            "max_position_embeddings": self.max_length,
            "type_vocab_size": 0,
            "norm_first": self.norm_first,
            "outer_norms": self.outer_norms,
            "layer_norm_eps": 1e-5,  # PyTorch's default
            "hidden_dropout_prob": hidden_dropout,
            "attention_probs_dropout_prob": attention_dropout,
            "pad_token_id": None,
            "tie_word_embeddings": False,
            **{name: options[name] for name in ("projection", "projected_length", "sharing") if name in options},
            **self.config,
        }
        if words.shape[1] != options["embed_dim"]:
            fields["embedding_size"] = words.shape[1]
        return {**fields, "reversible": True} if self.reversible else fields

    def projections(self) -> dict[str, Tensor]:
        """The tensors of E and F: one projection of a bare layer or of all layers, or one for each layer."""
        if not self.matrices:
            return {}
        sharing = find_sharing(self.matrices)
        if sharing == "layerwise" or not self.depth:
            return stacked(self.matrices[0], sharing, "projection.")
        tensors: dict[str, Tensor] = {}
        for number, heads in enumerate(self.matrices):
            tensors |= stacked(heads, sharing, f"layers.{number}.attention.projection.")
        return tensors


def find_sharing(layers: list[HeadMatrices]) -> str:
    """Which matrices are the same. The files store shared ones once for each use, so only their values tell."""
    if not all(E.equals(heads[0][0]) and F.equals(heads[0][1]) for heads in layers for E, F in heads):
        return "none"
    firsts = [heads[0] for heads in layers]
    if not all(E.equals(F) for E, F in firsts):
        return "headwise"
    return "layerwise" if len(layers) > 1 and all(E.equals(firsts[0][0]) for E, _ in firsts) else "kv"


def stacked(heads: HeadMatrices, sharing: str, name: str) -> dict[str, Tensor]:
    """The weight of a projection, and its bias if there is one: (N, M, K) and (M, K), or for kernels M first."""
    (E, F), every_E, every_F = heads[0], [E for E, _ in heads], [F for _, F in heads]
    matrices = {"none": [*every_E, *every_F], "headwise": [E, F]}.get(sharing, [E])
    axis = Projection.kinds[E.projection].matrix_axis
    tensors = {f"{name}weight": torch.stack([matrix.weight for matrix in matrices], dim=axis)}
    biases = [matrix.bias for matrix in matrices if matrix.bias is not None]
    return {**tensors, f"{name}bias": torch.stack(biases)} if biases else tensors
