"""Reads the state dicts of other packages: PyPI `linformer`, `linformer-pytorch`, and the example of fairseq.

Each reader uses every tensor of the file, or raises.
"""

import re
import warnings
from dataclasses import dataclass
from itertools import count
from typing import NoReturn

import torch
from torch import Tensor

from ..errors import UserError
from .weights import HeadMatrices, Matrix, Weights

# a name that only the files of one package have
SIGNATURES = {
    "linformer": r"(^|\.)proj_k$",
    "linformer-pytorch": r"(^|\.)to_q\.0\.weight$",
    "fairseq": r"(^|\.)compress_k\.weight$",
    "linformer-kit": r"(^|\.)attention\.query\.weight$|^query\.weight$",
}
PACKAGES = tuple(SIGNATURES)[:3]
CLASSES = {
    "linformer": "Linformer, LinformerLM or LinformerSelfAttention",
    "linformer-pytorch": "Linformer, LinformerLM or MHAttention",
    "fairseq": "examples/linformer: linformer_roberta, or MultiheadLinearAttention",
}
# what the shapes of the tensors do not tell
OPTIONS = {
    "linformer": ("heads",),
    "linformer-pytorch": ("activation", "full_attention", "max_length"),
    "fairseq": ("heads", "activation"),
}


@dataclass
class Options:
    """What a file does not tell: None stands for the default of the package."""

    heads: int | None = None
    activation: str | None = None
    full_attention: bool | None = None
    max_length: int | None = None


class Source:
    """The tensors of a file. Each is taken once or several times; `finish` raises if some were not."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str = ""):
        self.tensors, self.prefix = tensors, prefix
        self.taken: set[str] = set()

    def at(self, prefix: str) -> "Source":
        """The same tensors, with names relative to `prefix`."""
        inner = Source(self.tensors, self.prefix + prefix)
        inner.taken = self.taken
        return inner

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def take(self, name: str) -> Tensor:
        if name not in self:
            raise UserError(f"the file has no {self.prefix + name}; it is incomplete, or of another version")
        self.taken.add(self.prefix + name)
        return self.tensors[self.prefix + name]

    def linear(self, ours: str, theirs: str) -> dict[str, Tensor]:
        """Weight and bias of a linear layer or layer norm, under our name; a missing bias is zero."""
        weight = self.take(f"{theirs}.weight")
        bias = self.take(f"{theirs}.bias") if f"{theirs}.bias" in self else weight.new_zeros(len(weight))
        return {f"{ours}.weight": weight, f"{ours}.bias": bias}

    def drop(self, pattern: str) -> list[str]:
        """Mark the names that match as taken, without using them."""
        found = [name for name in self.tensors if re.search(pattern, name)]
        self.taken.update(found)
        return found

    def finish(self) -> None:
        if rest := [name for name in self.tensors if name not in self.taken]:
            raise UserError(
                f"the file has {len(rest)} tensors that are no part of such a model: {', '.join(rest[:3])}"
                f"{' …' if len(rest) > 3 else ''}; if it is part of a larger model, keep only its own names"
            )


def recognize(tensors: dict[str, Tensor]) -> str | None:
    """The package that a state dict comes from."""
    return next((package for package, name in SIGNATURES.items() if any(re.search(name, key) for key in tensors)), None)


def read_weights(tensors: dict[str, Tensor], package: str, options: Options) -> Weights:
    """The state dict of a package's model under our names."""
    found = recognize(tensors)
    if found == "linformer-kit":
        raise UserError("the file is a state dict of linformer-kit itself; use load_state_dict or from_pretrained")
    if found is None:
        names = ", ".join(list(tensors)[:3])
        raise UserError(
            f"the file has no model of {package} ({CLASSES[package]}): its tensors are {names} …; if the model is part "
            "of a larger one, keep only its own names, without the prefix"
        )
    if found != package:
        raise UserError(f"the file looks like {found}, not {package}: use --from {found}, in Python source={found!r}")
    for name, value in vars(options).items():
        if value is not None and name not in OPTIONS[package]:
            others = ", ".join(OPTIONS[package])
            raise UserError(f"{name} is {value!r}, but files of {package} need only {others}; leave it out")
    source = Source(tensors)
    reader = {"linformer": read_linformer, "linformer-pytorch": read_linformer_pytorch, "fairseq": read_fairseq}
    weights = reader[package](source, options)
    source.finish()
    return weights


def head_count(heads: int | None, features: int, option: str) -> int:
    """The number of heads, which has to be given; raises unless it divides the features of the queries."""
    if heads is None:
        raise UserError(
            f"the number of heads is missing: the file only tells that all heads together have {features} features; "
            f"pass --heads, in Python heads=, as the model was built ({option})"
        )
    if heads < 1 or features % heads:
        raise UserError(f"heads is {heads}, but the queries have {features} features, which it must divide")
    return heads


# PyPI linformer


def read_linformer(source: Source, options: Options) -> Weights:
    """`LinformerSelfAttention`, `Linformer` or `LinformerLM` of PyPI `linformer` 0.2.3."""
    is_model = "token_emb.weight" in source
    inner = source.at("linformer.") if is_model else source
    is_bare, is_reversible = "to_q.weight" in inner, "net.blocks.0.f.net.norm.weight" in inner
    layers: dict[str, Tensor] = {}
    matrices = []
    if is_bare:
        layers, heads = linformer_attention(inner, "")
        matrices.append(heads)
    for number in count():
        attention, feed_forward = f"net.layers.{number}.0.", f"net.layers.{number}.1."
        if is_reversible:
            attention, feed_forward = f"net.blocks.{number}.f.net.", f"net.blocks.{number}.g.net."
        if f"{attention}norm.weight" not in inner:
            break
        name = f"layers.{number}."
        tensors, heads = linformer_attention(inner.at(f"{attention}fn."), f"{name}attention.")
        layers |= tensors
        matrices.append(heads)
        layers |= inner.linear(f"{name}attention_norm", f"{attention}norm")
        layers |= inner.linear(f"{name}feed_forward_norm", f"{feed_forward}norm")
        layers |= inner.linear(f"{name}feed_forward.inner", f"{feed_forward}fn.w1")
        layers |= inner.linear(f"{name}feed_forward.outer", f"{feed_forward}fn.w2")
    if not matrices:
        incomplete(source, "linformer")
    first = "" if is_bare else "layers.0.attention."
    features, key_features = (layers[f"{first}{each}.weight"].shape[0] for each in ("query", "key"))
    if key_features < features:  # one_kv_head=True: the width of a head is known
        if options.heads not in (None, features // key_features):
            raise UserError(f"heads is {options.heads}, but the file has {features // key_features} (one_kv_head=True)")
        head_number = features // key_features
    else:
        head_number = head_count(options.heads, features, "heads=8 unless it was set")
    if not any(name.endswith("to_v.weight") for name in source.tensors):
        warnings.warn(
            "the model has W_V = W_K (share_kv=True): both get the same weights, but training changes each of them",
            stacklevel=2,
        )
    outside: dict[str, Tensor] = {}
    if is_model:
        outside = {
            "model.embeddings.word_embeddings.weight": source.take("token_emb.weight"),
            "model.embeddings.position_embeddings.weight": source.take("pos_emb.weight"),
            **source.linear("lm_head", "to_logits"),
        }
    length = matrices[0][0][0].weight.shape[0]
    return Weights(layers, matrices, head_number, length, norm_first=True, reversible=is_reversible, outside=outside)


def linformer_attention(source: Source, ours: str) -> tuple[dict[str, Tensor], HeadMatrices]:
    has_values = "to_v.weight" in source
    tensors = {
        **source.linear(f"{ours}query", "to_q"),
        **source.linear(f"{ours}key", "to_k"),
        **source.linear(f"{ours}value", "to_v" if has_values else "to_k"),
        **source.linear(f"{ours}output", "to_out"),
    }
    E, F = source.take("proj_k"), source.take("proj_v" if has_values else "proj_k")
    return tensors, [(Matrix(E), Matrix(F))]


# linformer-pytorch


def read_linformer_pytorch(source: Source, options: Options) -> Weights:
    """`MHAttention`, `Linformer` or `LinformerLM` of `linformer-pytorch` 0.19.3, also in its `Padder`."""
    if all(name.startswith("net.") for name in source.tensors):
        source = source.at("net.")
    if "encoder.to_token_emb.weight" in source:
        raise UserError(
            "the file is a LinformerEncDec, whose decoder sees the tokens that it should predict (its masks are "
            "swapped and leak the future), so its weights are of no use; train LinformerForConditionalGeneration"
        )
    if any(".resample." in name for name in source.tensors):
        raise UserError(
            "the model was built with ff_intermediate, which changes the width from layer to layer; all layers of our "
            "models have the same width"
        )
    is_model = "to_token_emb.weight" in source
    inner = source.at("linformer.") if is_model else source
    has_maps = "project_in.weight" in inner
    stack = inner.at("fn.") if has_maps else inner
    layers: dict[str, Tensor] = {}
    matrices: list[HeadMatrices] = []
    if "to_q.0.weight" in stack:
        layers, heads = linformer_pytorch_attention(stack, "")
        matrices.append(heads)
    for number in count():
        part, name = stack.at(f"seq.{number}."), f"layers.{len(matrices) - 1}."
        if "fn.to_q.0.weight" in part:
            name = f"layers.{len(matrices)}."
            tensors, heads = linformer_pytorch_attention(part.at("fn."), f"{name}attention.")
            layers |= {**tensors, **part.linear(f"{name}attention_norm", "norm")}
            matrices.append(heads)
        elif "fn.w_1.weight" in part:
            layers |= part.linear(f"{name}feed_forward_norm", "norm")
            layers |= part.linear(f"{name}feed_forward.inner", "fn.w_1")
            layers |= part.linear(f"{name}feed_forward.outer", "fn.w_2")
        else:
            break
    if not matrices:
        incomplete(source, "linformer-pytorch")
    length, heads_of_all = linformer_pytorch_length(matrices, options), len(matrices[0])
    outside: dict[str, Tensor] = {}
    if is_model:
        # sines, then cosines, of position / 100000^(2i / width): stored as learned positions
        frequencies = source.take("pos_emb.inv_freq")
        angles = torch.arange(length, device=frequencies.device).to(frequencies.dtype)[:, None] * frequencies
        outside = {
            "model.embeddings.word_embeddings.weight": source.take("to_token_emb.weight"),
            "model.embeddings.position_embeddings.weight": torch.cat([angles.sin(), angles.cos()], dim=-1),
        }
        if has_maps:
            outside |= inner.linear("model.embeddings.dense", "project_in")
            outside |= inner.linear("head", "project_out")
        if "to_logits.weight" in source:
            outside |= source.linear("lm_head", "to_logits")
        elif has_maps:
            raise UserError(
                "the model was built with return_emb=True and emb_dim: it ends with a map to emb_dim, which our "
                "models have only before an output layer"
            )
    return Weights(
        layers,
        [] if options.full_attention else matrices,
        heads_of_all,
        length,
        norm_first=False,
        activation=options.activation or "gelu",
        outside=outside,
        dropout=(0.1, 0.05),
    )


def linformer_pytorch_attention(source: Source, ours: str) -> tuple[dict[str, Tensor], HeadMatrices]:
    number = next(number for number in count() if f"to_q.{number}.weight" not in source)
    tensors: dict[str, Tensor] = {}
    for our, their in (("query", "to_q"), ("key", "to_k"), ("value", "to_v")):
        weight = torch.cat([source.take(f"{their}.{head}.weight") for head in range(number)])
        tensors |= {f"{ours}{our}.weight": weight, f"{ours}{our}.bias": weight.new_zeros(len(weight))}
    if "w_o.weight" in source:
        tensors |= source.linear(f"{ours}output", "w_o")
    else:  # w_o_intermediate_dim: two linear maps in a row are one
        first, second = source.linear("", "w_o_1"), source.linear("", "w_o_2")
        tensors[f"{ours}output.weight"] = second[".weight"] @ first[".weight"]
        tensors[f"{ours}output.bias"] = second[".weight"] @ first[".bias"] + second[".bias"]
    each = [source.at(f"heads.{head}.") for head in range(number)]
    return tensors, [(linformer_pytorch_matrix(head, "E"), linformer_pytorch_matrix(head, "F")) for head in each]


def linformer_pytorch_matrix(source: Source, name: str) -> Matrix:
    if f"{name}.weight" not in source:
        raise UserError(
            f"the file has no {source.prefix}{name}.weight: with method='no_params', linformer-pytorch does not save "
            "E, so the model cannot be restored from its state dict"
        )
    weight = source.take(f"{name}.weight")
    bias = source.take(f"{name}.bias") if f"{name}.bias" in source else None
    return Matrix(weight.permute(*reversed(range(weight.dim()))), bias)  # a linear map, or with 3 axes a convolution


def linformer_pytorch_length(matrices: list[HeadMatrices], options: Options) -> int:
    """The maximum length: N of a matrix; with kernels, which do not tell it, the given one, cut to whole windows."""
    first, given = matrices[0][0][0], options.max_length
    if first.projection != "head_conv":
        length = first.weight.shape[0]
        if given not in (None, length):
            raise UserError(f"max_length is {given}, but the file is for {length} tokens; leave it out")
        return length
    windows = sorted({heads[0][0].weight.shape[0] for heads in matrices})
    taps = " and ".join(map(str, windows))
    if given is None:
        raise UserError(
            "the maximum length is missing: the model was built with method='convolution', whose kernels only tell "
            f"input_size / dim_k = {taps}; pass --max-length, in Python max_length=, the input_size of the model"
        )
    if given < windows[-1]:
        raise UserError(f"max_length is {given}, but the kernels have {taps} taps; pass the input_size of the model")
    if options.full_attention:  # the kernels are not used
        return given
    lengths = {given - given % window for window in windows}
    if len(lengths) > 1:
        raise UserError(
            f"max_length is {given}, but the kernels have {taps} taps: each layer leaves out other tokens at the end, "
            "which our layers do not; if the input_size of the model is another, pass it"
        )
    (length,) = lengths
    if length < given:
        warnings.warn(
            f"the kernels have {taps} taps, so the keys of the original are those of the first {length} of {given} "
            f"tokens; the converted model is for {length} tokens, with the same outputs for them",
            stacklevel=2,
        )
    return length


# fairseq


def read_fairseq(source: Source, options: Options) -> Weights:
    """`linformer_roberta` of fairseq's examples/linformer, or one of its `MultiheadLinearAttention`."""
    if heads := source.drop(r"^classification_heads\."):
        warnings.warn(f"classification heads are left out: {heads[0]} …", stacklevel=2)
    source.drop(r"(^|\.)(version|shared_compress_layer\.\w+|compress_layer\.\w+)$")
    source.drop(r"(^|\.)compress_[kv]\.bias$")  # of a shared compressor; fairseq never adds it
    roots = ("encoder.sentence_encoder.", "decoder.sentence_encoder.", "sentence_encoder.", "")
    root = next((root for root in roots if f"{root}layers.0.self_attn.k_proj.weight" in source), "")
    inner = source.at(root)
    layers: dict[str, Tensor] = {}
    matrices = []
    if is_bare := "k_proj.weight" in inner:
        layers, matrix = fairseq_attention(inner, "")
        matrices.append(matrix)
    for number in count():
        layer, name = inner.at(f"layers.{number}."), f"layers.{number}."
        if "self_attn.k_proj.weight" not in layer:
            break
        tensors, matrix = fairseq_attention(layer.at("self_attn."), f"{name}attention.")
        layers |= tensors
        matrices.append(matrix)
        layers |= layer.linear(f"{name}attention_norm", "self_attn_layer_norm")
        layers |= layer.linear(f"{name}feed_forward_norm", "final_layer_norm")
        layers |= layer.linear(f"{name}feed_forward.inner", "fc1")
        layers |= layer.linear(f"{name}feed_forward.outer", "fc2")
    if not matrices:
        incomplete(source, "fairseq")
    length = matrices[0][0][0].weight.shape[0]
    features = layers["query.weight" if is_bare else "layers.0.attention.query.weight"].shape[0]
    weights = Weights(
        layers,
        matrices,
        head_count(options.heads, features, "encoder_attention_heads, 12 for linformer_roberta_base"),
        length,
        norm_first="layer_norm.weight" in inner,
        activation=options.activation or "gelu",
        outer_norms=True,
        dropout=(0.1, 0.1),
    )
    if not is_bare:
        read_fairseq_outside(source, inner, root.removesuffix("sentence_encoder."), weights)
    return weights


def read_fairseq_outside(source: Source, inner: Source, root: str, weights: Weights) -> None:
    """Embeddings, norms and the output layer."""
    words, positions = inner.take("embed_tokens.weight"), inner.take("embed_positions.weight")
    # the table starts with rows for the ids up to that of padding, which are no positions
    unused = positions.shape[0] - weights.max_length
    if unused < 1:
        raise UserError(
            f"embed_positions has {positions.shape[0]} rows, but the compressors are for {weights.max_length} tokens; "
            "fairseq has at least one row more"
        )
    outside = {
        "model.embeddings.word_embeddings.weight": words,
        "model.embeddings.position_embeddings.weight": positions[unused:],
    }
    norm = "layernorm_embedding" if "layernorm_embedding.weight" in inner else "emb_layer_norm"
    outside |= inner.linear("model.embeddings.norm", norm)
    if weights.norm_first:
        outside |= inner.linear("model.norm", "layer_norm")
    is_tied = False
    if f"{root}lm_head.dense.weight" in source:
        outside |= source.linear("head.dense", f"{root}lm_head.dense")
        outside |= source.linear("head.norm", f"{root}lm_head.layer_norm")
        outside |= source.linear("lm_head", f"{root}lm_head")
        is_tied = torch.equal(outside["lm_head.weight"], words)
    weights.outside = outside
    weights.config = {"pad_token_id": unused - 1, "tie_word_embeddings": is_tied}


def fairseq_attention(source: Source, ours: str) -> tuple[dict[str, Tensor], HeadMatrices]:
    tensors: dict[str, Tensor] = {}
    for name in ("query", "key", "value"):
        tensors |= source.linear(f"{ours}{name}", f"{name[0]}_proj")
    tensors |= source.linear(f"{ours}output", "out_proj")
    E = source.take("compress_k.weight")
    F = source.take("compress_v.weight") if "compress_v.weight" in source else E
    return tensors, [(Matrix(E.T), Matrix(F.T))]


def incomplete(source: Source, package: str) -> NoReturn:
    names = ", ".join(list(source.tensors)[:3])
    raise UserError(
        f"the file has tensors of {package}, but not the names of {CLASSES[package]}: {names} …; if the model is part "
        "of a larger one, keep only its own names, without the prefix"
    )
