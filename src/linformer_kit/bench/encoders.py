"""Encoders of one size: ours, those of other packages with our weights, those of transformers, and their checks.

Shapes: B batch, N length, C hidden size.
"""

import copy
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from ..errors import UserError
from ..files import read_json
from ..models.configuration_linformer import LinformerConfig
from ..models.modeling_linformer import LinformerModel
from ..models.options_linformer import NO_WINDOW
from ..models.projection_linformer import LinearProjection
from .checks import require_model_agreement
from .layers import copy_to_linformer, copy_to_linformer_pytorch
from .point import (
    CHECKED_TOKENS,
    FULL_EAGER,
    LINFORMER_PYTORCH,
    OURS_CHECKPOINTING,
    OURS_REVERSIBLE,
    Point,
)
from .workload import Build, Workload, counted_multiply_adds, torch_workload

VOCABULARY = 8192
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def config_options(point: Point) -> dict[str, Any]:
    """The sizes, by the field names of the configurations in transformers.

    All models have the same activation, because the default of some consists of many small operations. Features have
    unit variance: with the usual 0.02 all scores are near 0, which would hide errors.
    """
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": point.hidden_size,
        "num_hidden_layers": point.num_layers,
        "num_attention_heads": point.num_heads,
        "intermediate_size": 4 * point.hidden_size,
        "hidden_act": "gelu",
        "max_position_embeddings": point.length,
        "initializer_range": point.hidden_size**-0.5,
    }


def random_ids(batch: int, length: int) -> Tensor:
    """Random token ids, without those that a model may treat as padding or another special token."""
    return torch.randint(5, VOCABULARY, (batch, length))


def our_encoder(point: Point) -> LinformerModel:
    """Our encoder without dropout; post-norm for linformer-pytorch, which supports nothing else."""
    options = {**config_options(point), **NO_DROPOUT, **point.projection_options}
    options["norm_first"] = point.implementation != LINFORMER_PYTORCH
    options["reversible"] = point.implementation == OURS_REVERSIBLE
    config = LinformerConfig(**options) if point.model is None else saved_encoder_config(point.model, point)
    config._attn_implementation = "eager" if point.implementation == FULL_EAGER else "sdpa"
    model = LinformerModel(config)
    for module in model.modules():
        if isinstance(module, LinearProjection):
            # rows of unit variance; with the segment means of a new layer most would be near 0
            nn.init.normal_(module.weight, std=point.length**-0.5)
    if point.implementation == OURS_CHECKPOINTING:
        model.gradient_checkpointing_enable()
    return model


def saved_encoder_config(directory: str, point: Point) -> LinformerConfig:
    """The configuration of a saved model, for the length of the point."""
    saved = saved_config(directory)
    options = {
        **saved.to_dict(),
        "vocab_size": max(saved.vocab_size, VOCABULARY),
        "max_position_embeddings": point.length,
        "initializer_range": point.hidden_size**-0.5,
        **NO_DROPOUT,
        **point.projection_options,
    }
    if point.projected_length is None:
        without = {"sharing": "headwise", "rescale": False, **NO_WINDOW}
        return LinformerConfig.from_dict(options | without | {"projected_length": 1})
    lengths = [min(length, point.projected_length) for length in saved.projected_lengths]
    return LinformerConfig.from_dict(options | {"projected_length": lengths})


@cache
def saved_config(directory: str) -> LinformerConfig:
    """The configuration of a run or a saved model; raises `UserError` unless it is an encoder with a projection."""
    found = (read_json(Path(directory, *parts, "config.json")) for parts in (("model",), ()))
    options = next(filter(None, found), {})
    if options.get("model_type") != "linformer":
        raise UserError(
            f"model is {directory!r}, which has no configuration of a Linformer (config.json); pass the directory of a "
            "finished run or of a saved model"
        )
    config = LinformerConfig.from_dict(options)
    if config.is_decoder or config.is_encoder_decoder or config.projection == "none":
        kind = "has full attention" if config.projection == "none" else "is a decoder or an encoder-decoder"
        raise UserError(f"model is {directory!r}, which {kind}; pass an encoder with a projection")
    return config


# other packages


class PackageEncoder(nn.Module):
    """The layers of another package between our embeddings and our last norm, and nothing that costs memory."""

    def __init__(self, ours: LinformerModel, stack: nn.Module):
        super().__init__()
        self.embeddings = copy.deepcopy(ours.embeddings)
        self.stack = stack
        self.norm = copy.deepcopy(ours.norm) or nn.Identity()

    def forward(self, ids_BN: Tensor) -> BaseModelOutput:
        position_1N = torch.arange(ids_BN.shape[1], device=ids_BN.device)[None]
        x_BNC = self.embeddings(self.embeddings.word_embeddings(ids_BN), position_1N, None)
        return BaseModelOutput(last_hidden_state=self.norm(self.stack(x_BNC)))


class PackageLayers(nn.Module):
    """All layers of another package, in the place of the layers of our model, for the trainer."""

    def __init__(self, stack: nn.Module):
        super().__init__()
        self.stack = stack

    def forward(self, x_BNC: Tensor, mask_BN: Tensor | None, *others: Any, **options: Any) -> tuple[Tensor, None, None]:
        if mask_BN is not None:
            raise ValueError("other packages ignore masks; all examples must have the same length")
        return self.stack(x_BNC), None, None  # as `LinformerLayer`: hidden states, and no attention weights


def linformer_encoder(point: Point) -> nn.Module:
    ours = our_encoder(point)
    return PackageEncoder(ours, linformer_stack(ours))


def linformer_trainer_encoder(point: Point) -> nn.Module:
    return with_linformer_layers(our_encoder(point))


def with_linformer_layers(model: Any) -> nn.Module:
    """Our model with the layers of the package `linformer`; everything else stays."""
    model.layers = nn.ModuleList([PackageLayers(linformer_stack(model))])
    return model


def linformer_stack(ours: LinformerModel) -> nn.Module:
    """The layers of the package `linformer` with our weights and dropout; their feed-forward is 4C wide."""
    from linformer import Linformer

    config = ours.config
    sizes: dict[str, Any] = {
        "dim": config.hidden_size,
        "seq_len": config.max_position_embeddings,
        "depth": config.num_hidden_layers,
    }
    sizes |= {"k": config.projected_length, "heads": config.num_attention_heads}
    stack = Linformer(**sizes, dropout=config.hidden_dropout_prob)
    for layer, (attention, feed_forward) in zip(ours.layers, stack.net.layers, strict=True):
        copy_to_linformer(layer.attention, attention.fn)
        copy_feed_forward(layer, attention, feed_forward, "w1", "w2")
    return stack


def linformer_pytorch_encoder(point: Point) -> nn.Module:
    """The layers of the package `linformer-pytorch`."""
    from linformer_pytorch import Linformer

    ours = our_encoder(point)
    options = {"dropout": 0.0, "dropout_ff": 0.0, "activation": "gelu", "parameter_sharing": "headwise"}
    sizes = {"dim_ff": 4 * point.hidden_size, "nhead": point.num_heads, "depth": point.num_layers}
    stack = Linformer(point.length, point.hidden_size, point.projected_length, **sizes, **options)
    for layer, attention, feed_forward in zip(ours.layers, stack.seq[::2], stack.seq[1::2], strict=True):
        copy_to_linformer_pytorch(layer.attention, attention.fn)
        copy_feed_forward(layer, attention, feed_forward, "w_1", "w_2")
    return PackageEncoder(ours, stack)


def copy_feed_forward(layer: Any, attention: Any, feed_forward: Any, inner: str, outer: str) -> None:
    """Copy the feed-forward and the norms of a layer; `attention` and `feed_forward` wrap modules as `fn`."""
    for ours, theirs in (
        (layer.feed_forward.inner, getattr(feed_forward.fn, inner)),
        (layer.feed_forward.outer, getattr(feed_forward.fn, outer)),
        (layer.attention_residual.norm, attention.norm),
        (layer.feed_forward_residual.norm, feed_forward.norm),
    ):
        theirs.load_state_dict(ours.state_dict())
        if hasattr(ours, "eps"):
            theirs.eps = ours.eps


# transformers


def bert(point: Point, attention: str = "sdpa") -> nn.Module:
    config = transformers.BertConfig(**config_options(point), **NO_DROPOUT, attn_implementation=attention)
    return transformers.BertModel(config, add_pooling_layer=False)


def longformer(point: Point) -> nn.Module:
    # positions start after the padding id, which is 1
    options = config_options(point) | {"max_position_embeddings": point.length + 2}
    config = transformers.LongformerConfig(**options, **NO_DROPOUT, attention_window=point.window_length or 256)
    return transformers.LongformerModel(config, add_pooling_layer=False)


def big_bird(point: Point) -> nn.Module:
    # up to 704 tokens, (5 + 2 · 3 random) blocks of 64, it falls back to full attention
    config = transformers.BigBirdConfig(**config_options(point), **NO_DROPOUT, attention_type="block_sparse")
    return transformers.BigBirdModel(config, add_pooling_layer=False)


def nystromformer(point: Point) -> nn.Module:
    options = {**config_options(point), **NO_DROPOUT, "num_landmarks": 64, "segment_means_seq_len": point.length}
    return transformers.NystromformerModel(transformers.NystromformerConfig(**options))


def fnet(point: Point) -> nn.Module:
    # a Fourier transform instead of attention
    options = {name: value for name, value in config_options(point).items() if name != "num_attention_heads"}
    return transformers.FNetModel(transformers.FNetConfig(**options, hidden_dropout_prob=0.0), add_pooling_layer=False)


def modern_bert(point: Point) -> nn.Module:
    # no dropout by default; its feed-forward is gated, so it has three matrices where the others have two
    options = {name: value for name, value in config_options(point).items() if name != "hidden_act"}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(**options, **special, hidden_activation="gelu", attn_implementation="sdpa")
    return transformers.ModernBertModel(config)


# check and call


def check_encoder(point: Point, build: Build) -> None:
    """Compare outputs and gradients of at least 1,152 tokens with the plain form in float64.

    Models that compute another function are not checked.
    """
    small = point.small()
    model = build(small)
    if isinstance(model, transformers.BertModel):
        exact = as_linformer(model)
    elif isinstance(model, LinformerModel | PackageEncoder):
        torch.manual_seed(0)  # the same weights
        exact = our_encoder(small)
    else:
        return
    ids_BN = random_ids(math.ceil(CHECKED_TOKENS / small.length), small.length)
    require_model_agreement(point.implementation, model, exact.double(), ids_BN)


def as_linformer(model: transformers.BertModel) -> LinformerModel:
    """Our post-norm encoder without projection, with the weights of a BERT: the same function."""
    names = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    names += ["hidden_act", "max_position_embeddings", "layer_norm_eps"]
    options = {name: getattr(model.config, name) for name in names}
    ours = LinformerModel(LinformerConfig(**options, **NO_DROPOUT, projection="none", norm_first=False))
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
        for our_name, their_name in in_bert.items():
            name = name.replace(our_name, their_name)
        return name

    weights = model.state_dict()
    ours.load_state_dict({name: weights[name_in_bert(name)] for name in ours.state_dict()})
    return ours


@torch.no_grad()
def output(point: Point, model: nn.Module) -> Tensor:
    """The hidden states of random ids."""
    return model(random_ids(2, point.length).to(point.device)).last_hidden_state


def encoder_workload(point: Point, build: Build) -> Workload:
    """Inference without gradients, or a training step without the optimizer; no padding and no mask."""
    model = build(point)
    ids_BN = random_ids(point.batch, point.length).to(point.device)

    def training() -> None:
        model(ids_BN).last_hidden_state.square().mean().backward()
        model.zero_grad(set_to_none=True)

    if point.step == "training":
        return torch_workload(point, model, training)
    forward = torch.no_grad()(lambda: model(ids_BN).last_hidden_state)
    if not isinstance(model, LinformerModel):
        return torch_workload(point, model, forward, partial(counted_multiply_adds, forward))
    return torch_workload(point, model, forward, multiply_adds=encoder_multiply_adds(model, point.length, point.batch))


def encoder_multiply_adds(model: LinformerModel, length: int, batch: int) -> int:
    """Multiply-adds of the layers of our encoder: attention (`plan`) and feed-forward."""
    feed_forward = 2 * batch * length * model.config.hidden_size * model.config.intermediate_size
    layers: list[Any] = list(model.layers)
    plans = [layer.attention.plan(length, batch, projection=model.projection) for layer in layers]
    return sum(plan.multiply_adds + feed_forward for plan in plans)
