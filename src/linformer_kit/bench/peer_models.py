"""Whole encoders to compare, ours and those of transformers, all of one size, and the check that ours compute what they should.

Shapes: B batch, N length, K projected length, C hidden size.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from ..models import (
    attention_linformer,
    cache_linformer,
    causal_linformer,
    configuration_linformer,
    encoder_linformer,
    modeling_linformer,
    modeling_linformer_seq2seq,
    multihead_linformer,
    projection_linformer,
)
from ..models.attention_linformer import LinformerAttention
from ..models.configuration_linformer import LinformerConfig
from ..models.modeling_linformer import LinformerLayer, LinformerModel, Residual
from ..models.modeling_linformer_seq2seq import LinformerForConditionalGeneration
from ..models.projection_linformer import LinearProjection
from .machine import code_fingerprint
from .measure import Mode
from .peers import OURS, MaskedBlockCausal, require_agreement

PROJECTED_LENGTHS = (64, 128, 256)
NONE_SDPA = f"{OURS} none (sdpa)"
NONE_EAGER = f"{OURS} none (eager)"  # stores all attention weights, as the paper's baseline did
BERT = "BERT (sdpa)"
LONGFORMER = "Longformer"
BIG_BIRD = "BigBird"
NYSTROMFORMER = "Nystromformer"
FNET = "FNet"
MODERN_BERT = "ModernBERT"

# tokens on which models are compared: more than a chunk of queries, or of rows of the feed-forward, which is how they are timed
COMPARED_BATCH, COMPARED_LENGTH = 18, 64
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def linear_name(projected_length: int) -> str:
    """The name of our encoder with K rows."""
    return f"{OURS} K={projected_length}"


@dataclass(frozen=True)
class Sizes:
    """What all models have in common."""

    hidden: int = 512
    layers: int = 4
    heads: int = 8
    intermediate: int = 2048
    vocabulary: int = 8192

    def of_config(self, length: int) -> dict[str, Any]:
        """By the names that configurations use.

        One activation for all: the default of some is many small steps. Features of unit variance: with the usual start of 0.02
        all scores are near 0, whatever the keys, and a mistake would not show.
        """
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.intermediate,
            "hidden_act": "gelu",
            "max_position_embeddings": length,
            "initializer_range": self.hidden**-0.5,
        }

    def random_ids(self, batch: int, length: int) -> Tensor:
        """Ids of words, beyond those that any of the models takes for padding or another mark."""
        return torch.randint(5, self.vocabulary, (batch, length))


def model_dependencies() -> dict[str, str]:
    """What the numbers of the models depend on: times of different code must not be mixed."""
    modules = (
        *(attention_linformer, cache_linformer, causal_linformer, configuration_linformer, encoder_linformer),
        *(modeling_linformer, modeling_linformer_seq2seq, multihead_linformer, projection_linformer),
    )
    return {"transformers": transformers.__version__, "model_code": code_fingerprint(*modules)}


def our_encoder(length: int, sizes: Sizes, attention: str = "sdpa", **options: Any) -> LinformerModel:
    """An encoder of ours, without dropout."""
    model = LinformerModel(
        LinformerConfig(**sizes.of_config(length), **NO_DROPOUT, **options, attn_implementation=attention)
    )
    for module in model.modules():
        if isinstance(module, LinearProjection):
            # rows of unit variance also from the few tokens that are compared: with the segment means of a new model most are 0
            nn.init.normal_(module.weight, std=min(length, COMPARED_LENGTH) ** -0.5)
    return model


def bert(length: int, sizes: Sizes, attention: str = "sdpa") -> nn.Module:
    config = transformers.BertConfig(**sizes.of_config(length), **NO_DROPOUT, attn_implementation=attention)
    return transformers.BertModel(config, add_pooling_layer=False)


def longformer(length: int, sizes: Sizes) -> nn.Module:
    # its positions begin behind the id of padding, which is 1
    config = transformers.LongformerConfig(**sizes.of_config(length + 2), **NO_DROPOUT, attention_window=256)
    return transformers.LongformerModel(config, add_pooling_layer=False)


def big_bird(length: int, sizes: Sizes) -> nn.Module:
    # up to 704 tokens, (5 + 2 · 3 random) blocks of 64, it falls back to full attention by itself: so it is at N=512
    config = transformers.BigBirdConfig(**sizes.of_config(length), **NO_DROPOUT, attention_type="block_sparse")
    return transformers.BigBirdModel(config, add_pooling_layer=False)


def nystromformer(length: int, sizes: Sizes) -> nn.Module:
    options = {"num_landmarks": 64, "segment_means_seq_len": length}
    return transformers.NystromformerModel(
        transformers.NystromformerConfig(**sizes.of_config(length), **NO_DROPOUT, **options)
    )


def fnet(length: int, sizes: Sizes) -> nn.Module:
    # a Fourier transform instead of attention: shown, but not counted as an attention-based model
    options = {name: value for name, value in sizes.of_config(length).items() if name != "num_attention_heads"}
    return transformers.FNetModel(transformers.FNetConfig(**options, hidden_dropout_prob=0.0), add_pooling_layer=False)


def modern_bert(length: int, sizes: Sizes) -> nn.Module:
    # no dropout by default; its feed-forward is gated, so an inner size of 2048 means three matrices where others have two
    options = {name: value for name, value in sizes.of_config(length).items() if name != "hidden_act"}
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(**options, **marks, hidden_activation="gelu", attn_implementation="sdpa")
    return transformers.ModernBertModel(config)


OUR_ENCODERS: dict[str, Callable[[int, Sizes], nn.Module]] = {
    **{linear_name(rows): partial(our_encoder, projected_length=rows) for rows in PROJECTED_LENGTHS},
    NONE_SDPA: partial(our_encoder, projection="none"),
    NONE_EAGER: partial(our_encoder, attention="eager", projection="none"),
}
PEER_ENCODERS: dict[str, Callable[[int, Sizes], nn.Module]] = {
    BERT: bert,
    LONGFORMER: longformer,
    BIG_BIRD: big_bird,
    NYSTROMFORMER: nystromformer,
    FNET: fnet,
    MODERN_BERT: modern_bert,
}
ENCODERS = OUR_ENCODERS | PEER_ENCODERS


def build_encoders(length: int, sizes: Sizes) -> dict[str, nn.Module]:
    """All encoders for inputs of this length; the two without projection have the same weights."""
    models = {name: build(length, sizes) for name, build in ENCODERS.items()}
    models[NONE_EAGER].load_state_dict(models[NONE_SDPA].state_dict())
    return models


def make_model_call(model: nn.Module, ids_BN: Tensor, mode: Mode) -> Callable[[], object]:
    """What is measured: inference without gradients, or a training step but for the optimizer. Puts the model into that mode.

    Like everybody who has no padding, it passes no mask.
    """
    model.train(mode != "forward")
    if mode == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return model(ids_BN).last_hidden_state

        return forward

    def training_step() -> None:
        model(ids_BN).last_hidden_state.square().mean().backward()
        model.zero_grad(set_to_none=True)

    return training_step


def eager_training_bytes(sizes: Sizes, batch: int, length: int) -> int:
    """About what a training step needs that stores all attention weights: those of every layer, and three more on the way."""
    return (sizes.layers + 3) * batch * sizes.heads * length**2 * 4


def encoder_multiply_adds(model: LinformerModel, length: int, batch: int = 1) -> int:
    """Multiply-adds of the layers of one of our encoders: what the attention plans, and the feed-forward."""
    feed_forward = 2 * batch * length * model.config.hidden_size * model.config.intermediate_size
    plans = [attention.plan(length, batch, projection=model.projection) for _, attention in layers_of(model)]
    return sum(plan.multiply_adds + feed_forward for plan in plans)


def layers_of(model: LinformerModel) -> list[tuple[LinformerLayer, LinformerAttention]]:
    """The layers of an encoder, each with its attention."""
    layers = [layer for layer in model.layers if isinstance(layer, LinformerLayer)]
    return [(layer, layer.attention) for layer in layers if isinstance(layer.attention, LinformerAttention)]


def check_encoders(models: Mapping[str, nn.Module], ids_BN: Tensor) -> None:
    """Raise `WrongImplementation` unless outputs and gradients are those of a plain float64 evaluation.

    Unfused attention has to be what fused attention is, and BERT what ours is with its weights, without projection and with norms
    last. The other models compute functions of their own.
    """
    for name, model in models.items():
        exact = models.get(NONE_SDPA, model) if name == NONE_EAGER else model
        if isinstance(exact, transformers.BertModel):
            exact = as_linformer(exact)
        if isinstance(exact, LinformerModel):
            require_model_agreement(name, model, copy.deepcopy(exact).double(), ids_BN)


def require_model_agreement(name: str, model: nn.Module, exact: LinformerModel, ids_BN: Tensor) -> None:
    """Compare hidden states, as timed and as trained, and the gradient of the embedded words with those of `exact`, in float64."""
    model.eval()
    exact_words, words = (one.get_parameter("embeddings.word_embeddings.weight") for one in (exact, model))
    exact_hidden_BNC, hidden_BNC = plain_hidden_states(exact, ids_BN), model(ids_BN).last_hidden_state
    upstream_BNC = torch.randn_like(hidden_BNC)
    (exact_gradient_VC,) = torch.autograd.grad(exact_hidden_BNC, exact_words, upstream_BNC.double())
    (gradient_VC,) = torch.autograd.grad(hidden_BNC, words, upstream_BNC)
    with torch.no_grad():
        require_agreement(name, "output", model(ids_BN).last_hidden_state, exact_hidden_BNC)
        require_agreement(name, "output with gradients", hidden_BNC, exact_hidden_BNC)
        require_agreement(name, "gradient", gradient_VC[ids_BN], exact_gradient_VC[ids_BN])


def plain_hidden_states(model: LinformerModel, ids_BN: Tensor) -> Tensor:
    """What one of our encoders computes, in the plainest way: nothing reordered, fused, or done in pieces."""
    x_BNC = plain_embedded(model, ids_BN)
    for layer, attention in layers_of(model):
        attend = partial(plain_attention, attention, projection=model.projection)
        x_BNC = plain_residual(layer.attention_residual, x_BNC, attend)
        x_BNC = plain_feed_forward(layer, x_BNC)
    return x_BNC if model.norm is None else model.norm(x_BNC)


def plain_logits(model: LinformerForConditionalGeneration, source_BN: Tensor, target_BT: Tensor) -> Tensor:
    """What one of our encoder-decoders computes, likewise: (B, T, V)."""
    source_BNC, decoder = plain_hidden_states(model.encoder, source_BN), model.decoder
    x_BTC = plain_embedded(decoder, target_BT)
    layer: Any
    for layer in decoder.layers:
        attend = MaskedBlockCausal(layer.attention, decoder.projection)
        x_BTC = plain_residual(layer.attention_residual, x_BTC, attend)
        cross = partial(
            plain_attention, layer.cross_attention, context_BNC=source_BNC, projection=decoder.source_projection
        )
        x_BTC = plain_residual(layer.cross_attention_residual, x_BTC, cross)
        x_BTC = plain_feed_forward(layer, x_BTC)
    return model.lm_head(x_BTC if decoder.norm is None else decoder.norm(x_BTC))


def plain_embedded(model: LinformerModel, ids_BN: Tensor) -> Tensor:
    """Words, positions and the first token type."""
    embeddings = model.embeddings
    x_BNC = F.embedding(ids_BN, embeddings.word_embeddings.weight)
    assert embeddings.position_embeddings is not None
    x_BNC = x_BNC + embeddings.position_embeddings(torch.arange(ids_BN.shape[1]))
    if embeddings.token_type_embeddings is not None:
        x_BNC = x_BNC + embeddings.token_type_embeddings.weight[0]
    return embeddings.norm(x_BNC)


def plain_feed_forward(layer: LinformerLayer, x_BNC: Tensor) -> Tensor:
    feed_forward = nn.Sequential(layer.feed_forward.inner, nn.GELU(), layer.feed_forward.outer)
    return plain_residual(layer.feed_forward_residual, x_BNC, feed_forward)


def plain_residual(residual: Residual, x_BNC: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return x_BNC + function(residual.norm(x_BNC)) if residual.norm_first else residual.norm(x_BNC + function(x_BNC))


def plain_attention(
    layer: LinformerAttention, x_BLC: Tensor, context_BNC: Tensor | None = None, projection: nn.Module | None = None
) -> Tensor:
    """`softmax(Q (Eᵀ X W_K)ᵀ / √D) (Fᵀ X W_V) W_O`, with E = F = 1 where nothing is projected.

    Queries of `x_BLC`; keys and values of the context, if there is one. `projection` is that of all layers, if they share one.
    """
    context_BNC = x_BLC if context_BNC is None else context_BNC
    projection = layer.projection if projection is None else projection

    def heads(linear: nn.Linear, rows_BKC: Tensor) -> Tensor:
        return linear(rows_BKC).unflatten(-1, (layer.num_heads, layer.head_dim)).transpose(1, 2)

    def rows(matrix: int) -> Tensor:
        if not isinstance(projection, LinearProjection):
            return context_BNC
        E_NK = projection.weight[: context_BNC.shape[1], min(matrix, projection.matrices - 1)]  # one matrix: E = F
        return torch.einsum("nk,bnc->bkc", E_NK, context_BNC)

    query, keys, values = heads(layer.query, x_BLC), heads(layer.key, rows(0)), heads(layer.value, rows(1))
    weights_BHNK = (query @ keys.transpose(-1, -2) / layer.head_dim**0.5).softmax(dim=-1)
    return layer.output((weights_BHNK @ values).transpose(1, 2).flatten(2))


def as_linformer(bert: transformers.BertModel) -> LinformerModel:
    """Our encoder without projection and with norms last, with the weights of a BERT: the same function."""
    options = {name: getattr(bert.config, name) for name in Sizes().of_config(1)}
    eps = bert.config.layer_norm_eps
    model = LinformerModel(
        LinformerConfig(**options, **NO_DROPOUT, projection="none", norm_first=False, layer_norm_eps=eps)
    )
    in_bert = {
        "embeddings.norm": "embeddings.LayerNorm",
        "layers.": "encoder.layer.",
        "attention.output": "attention.output.dense",
        **{f"attention.{name}": f"attention.self.{name}" for name in ("query", "key", "value")},
        "attention_residual.norm": "attention.output.LayerNorm",
        "feed_forward.inner": "intermediate.dense",
        "feed_forward.outer": "output.dense",
        "feed_forward_residual.norm": "output.LayerNorm",
    }

    def name_in_bert(name: str) -> str:
        for ours, theirs in in_bert.items():
            name = name.replace(ours, theirs)
        return name

    weights = bert.state_dict()
    model.load_state_dict({name: weights[name_in_bert(name)] for name in model.state_dict()})
    return model
