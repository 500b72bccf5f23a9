"""Conversion to and from PyTorch. `parameter_pairs` maps every Keras variable to the name of its PyTorch parameter.

PyTorch is imported only here, and only inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from ..models.options_linformer import choice
from .attention import LinearMultiHeadAttention
from .causal import CausalLinearMultiHeadAttention
from .layers import LinformerLayer, Stack
from .models import Head, Linformer, LinformerBackbone, LinformerCausalLM, LinformerMaskedLM, LinformerModel
from .projection import Projection
from .seq2seq import LinformerSeq2Seq

if TYPE_CHECKING:
    import torch

# Keras option: field of LinformerConfig
NAMES = {
    "k": "projected_length",
    "max_len": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "dropout": "hidden_dropout_prob",
    "projection": "projection",
    "sharing": "sharing",
    "rescale": "rescale",
    "window_length": "window_length",
    "global_tokens": "global_tokens",
    "distance_bias": "distance_bias",
    "head_dim": "head_dim",
    "attention_dropout": "attention_probs_dropout_prob",
    "activation": "hidden_act",
    "positions": "position_embedding",
    "token_types": "type_vocab_size",
    "local_width": "local_width",
    "norm_first": "norm_first",
    "epsilon": "layer_norm_eps",
    "initializer_range": "initializer_range",
    "pad_id": "pad_token_id",
    "tied": "tie_word_embeddings",
    "decoder_attention": "decoder_attention",
    "block_length": "block_length",
    "slots": "slots",
    "n_decoder_layers": "num_decoder_layers",
    "start_id": "decoder_start_token_id",
    "end_id": "eos_token_id",
}
CLASSIFIER_NAMES = {
    "n_classes": "num_labels",
    "pooling": "classifier_pooling",
    "classifier_dropout": "classifier_dropout",
}
# fields of LinformerConfig that Keras models do not have, with the value that they stand for
FIXED = {
    "embedding_size": None,
    "outer_norms": True,
    "reversible": False,
    "decoder_vocab_size": None,
    "decoder_hidden_size": None,
    "decoder_num_attention_heads": None,
    "decoder_intermediate_size": None,
}
# options that do not affect the weights
CHANGEABLE = (
    *("dropout", "attention_dropout", "classifier_dropout", "classifier_activation", "pad_id", "start_id", "end_id"),
    *("name", "dtype", "trainable", "seed"),
)
MODELS: dict[str, type[LinformerModel]] = {
    "LinformerModel": LinformerBackbone,
    "LinformerForSequenceClassification": Linformer,
    "LinformerForMaskedLM": LinformerMaskedLM,
    "LinformerForCausalLM": LinformerCausalLM,
    "LinformerForConditionalGeneration": LinformerSeq2Seq,
}

Pairs = Iterator[tuple[str, Any]]  # name in the PyTorch state dict, Keras variable


def attention_pairs(attention: LinearMultiHeadAttention, name: str) -> Pairs:
    linears = {
        "query": attention.query_dense,
        "key": attention.key_dense,
        "value": attention.value_dense,
        "output": attention.output_dense,
    }
    for linear, layer in linears.items():
        yield from dense_pairs(layer, f"{name}{linear}")
    if attention.projection is not None:
        yield from projection_pairs(attention.projection, f"{name}projection")
    if attention.distance_bias:
        yield f"{name}distance_bias.weight", attention.distance_weight


def projection_pairs(projection: Any, name: str) -> Pairs:
    for variable in () if projection is None else projection.weights:
        yield f"{name}.{variable.name}", variable


def dense_pairs(layer: Any, name: str) -> Pairs:
    yield f"{name}.weight", layer.kernel
    if layer.bias is not None:
        yield f"{name}.bias", layer.bias


def norm_pairs(layer: keras.layers.LayerNormalization, name: str) -> Pairs:
    yield f"{name}.weight", layer.gamma
    yield f"{name}.bias", layer.beta


def layer_pairs(layer: LinformerLayer, name: str) -> Pairs:
    yield from attention_pairs(layer.attention, f"{name}attention.")
    if layer.local is not None:
        yield f"{name}local.weight", layer.local.weight
        yield f"{name}local.bias", layer.local.bias
    yield from norm_pairs(layer.attention_residual.norm, f"{name}attention_residual.norm")
    if layer.cross_attention is not None:
        yield from attention_pairs(layer.cross_attention, f"{name}cross_attention.")
        yield from norm_pairs(layer.cross_attention_residual.norm, f"{name}cross_attention_residual.norm")
    yield from dense_pairs(layer.inner, f"{name}feed_forward.inner")
    yield from dense_pairs(layer.outer, f"{name}feed_forward.outer")
    yield from norm_pairs(layer.feed_forward_residual.norm, f"{name}feed_forward_residual.norm")


def stack_pairs(stack: Stack, name: str) -> Pairs:
    embeddings = stack.embeddings
    yield f"{name}embeddings.word_embeddings.weight", embeddings.words.embeddings
    if embeddings.positions is not None:
        yield f"{name}embeddings.position_embeddings.weight", embeddings.positions
    if embeddings.types is not None:
        yield f"{name}embeddings.token_type_embeddings.weight", embeddings.types.embeddings
    yield from norm_pairs(embeddings.norm, f"{name}embeddings.norm")
    yield from projection_pairs(stack.shared_projection, f"{name}projection")
    yield from projection_pairs(stack.shared_source_projection, f"{name}source_projection")
    for number, layer in enumerate(stack.blocks):
        yield from layer_pairs(layer, f"{name}layers.{number}.")
    if stack.norm is not None:
        yield from norm_pairs(stack.norm, f"{name}norm")


def head_pairs(head: Head, name: str) -> Pairs:
    yield from dense_pairs(head.dense, f"{name}.dense")
    yield from norm_pairs(head.norm, f"{name}.norm")


def output_pairs(words: keras.layers.ReversibleEmbedding) -> Pairs:
    """The output embedding."""
    yield "lm_head.weight", words.embeddings if words.tie_weights else words.reverse_embeddings


def parameter_pairs(model: Any) -> Pairs:
    """Every variable of a model or attention layer, with its name in PyTorch."""
    match model:
        case LinearMultiHeadAttention():
            yield from attention_pairs(model, "")
        case LinformerBackbone():
            yield from stack_pairs(model.stack, "")
        case Linformer():
            yield from stack_pairs(model.stack, "model.")
            yield from head_pairs(model.head, "head")
            yield from dense_pairs(model.classifier, "classifier")
        case LinformerMaskedLM():
            yield from stack_pairs(model.stack, "model.")
            yield from head_pairs(model.head, "head")
            yield from output_pairs(model.words)
            yield "lm_head.bias", model.bias
        case LinformerCausalLM():
            yield from stack_pairs(model.decoder, "model.")
            yield from output_pairs(model.words)
        case LinformerSeq2Seq():
            yield from stack_pairs(model.encoder, "model.encoder.")
            yield from stack_pairs(model.decoder, "model.decoder.")
            yield from output_pairs(model.target_words)
        case _:
            raise no_torch_class(model)


def no_torch_class(model: Any) -> TypeError:
    names = ", ".join(sorted(kind.__name__ for kind in MODELS.values()))
    return TypeError(
        f"{type(model).__name__} has no PyTorch counterpart; supported are LinearMultiHeadAttention, {names}"
    )


def is_transposed(name: str) -> bool:
    """Whether PyTorch stores this weight as (out, in) and Keras as (in, out), perhaps with heads as an axis."""
    kinds = ("query", "key", "value", "output", "inner", "outer", "dense", "classifier")
    return name.endswith(".weight") and name.removesuffix(".weight").split(".")[-1] in kinds


def check_not_quantized(model: Any) -> None:
    """Raise for quantized models, whose weights are integers with scales."""
    if any(getattr(layer, "quantization_mode", None) is not None for layer in model._flatten_layers()):
        raise ValueError("the model is quantized: its weights are integers with scales; convert it before quantizing")


def assign(model: Any, weights: dict[str, np.ndarray]) -> None:
    """Set the weights of a model from those of a PyTorch state dict."""
    for name, variable in parameter_pairs(model):
        value = weights[name]
        if (
            name == "lm_head.weight" and tuple(variable.shape) != value.shape
        ):  # untied output embeddings are stored as (in, out)
            value = value.T
        variable.assign(np.reshape(value.T if is_transposed(name) else value, variable.shape))


def from_torch(source: Any, **changes: Any) -> Any:
    """Convert a PyTorch model, the directory of one, or the run directory of `linformer train`, to a Keras model.

    >>> from linformer_kit import LinformerConfig, LinformerForMaskedLM
    >>> config = LinformerConfig(vocab_size=90, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> torch_model = LinformerForMaskedLM(config)
    >>> model = from_torch(torch_model)
    >>> type(model).__name__, model.num_params() == torch_model.num_parameters()
    ('LinformerMaskedLM', True)

    A classifier returns logits, as in PyTorch, or probabilities with `classifier_activation="softmax"`. Other options
    that do not affect the weights, such as `dropout`, can be changed by keyword. Grouped key-value heads are repeated,
    which does not change the outputs. A `LinformerAttention` becomes a `LinearMultiHeadAttention`.
    """
    from linformer_kit.models.attention_linformer import LinformerAttention

    for name in changes:
        choice("the option to change", name, CHANGEABLE)
    if isinstance(source, str | Path):
        source = load(Path(source))
    weights = {name: tensor.detach().cpu().float().numpy() for name, tensor in source.state_dict().items()}
    if isinstance(source, LinformerAttention):
        options = attention_options(source)
        layer = LinearMultiHeadAttention(**{**options, **changes})
        layer.build((None, None, source.embed_dim), (None, None, source.context_dim))
        sizes = (source.num_heads, source.num_kv_heads, source.head_dim, source.sharing)
        assign(layer, repeat_kv_heads(weights, *sizes, options["projection"]))
        return layer
    kind = MODELS.get(type(source).__name__)
    if kind is None:
        raise TypeError(
            f"{type(source).__name__} has no Keras counterpart; supported are {', '.join(MODELS)}, LinformerAttention"
        )
    config = source.config
    if kind is LinformerBackbone and config.is_decoder:
        raise ValueError(
            "a LinformerModel with is_decoder=True has no Keras counterpart; convert the LinformerForCausalLM around it"
        )
    check_supported(config)
    options = {name: getattr(config, field) for name, field in NAMES.items()}
    if options["projection"] == "none":
        options |= {"projection": "linear", "full_attn": True, "rescale": False}
    if isinstance(options["end_id"], list):
        if len(options["end_id"]) > 1:
            raise ValueError(f"eos_token_id is {options['end_id']}, but Keras models have one end_id; set it to one id")
        options["end_id"] = next(iter(options["end_id"]), None)
    if kind is Linformer:
        options |= {name: getattr(config, field) for name, field in CLASSIFIER_NAMES.items()}
        options["classifier_activation"] = None
    model = kind(**{**options, **changes})
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // heads
    assign(model, repeat_kv_heads(weights, heads, kv_heads, head_dim, config.sharing, config.projection))
    return model


def check_supported(config: Any) -> None:
    """Raise for options of PyTorch models that Keras models do not have."""
    for field, value in FIXED.items():
        is_default = field == "embedding_size" and config.embedding_width == config.hidden_size
        if getattr(config, field) != value and not is_default:
            raise ValueError(
                f"{field} is {getattr(config, field)!r}, but Keras models have no such option (they compute with "
                f"{field}={value!r}), so the weights would give other outputs; use the PyTorch model"
            )
    if not config.intermediate_size:
        raise ValueError(
            "intermediate_size is 0, but layers of Keras models always have a feed-forward; use the PyTorch model"
        )


def attention_options(layer: Any) -> dict[str, Any]:
    """The options of a `LinearMultiHeadAttention` like this `LinformerAttention`."""
    has_rows = layer.projected_length > 0
    options = layer.shared_projection_options or (layer.projection.options if has_rows else {})
    is_full = options.get("projection") == "none"
    return {
        "num_heads": layer.num_heads,
        "key_dim": layer.head_dim,
        "projection_dim": None if is_full else layer.projected_length,
        "projection": "linear" if is_full else options.get("projection", "linear"),
        "max_length": options.get("max_length"),
        "sharing": layer.sharing,
        "rescale": options.get("rescale", False),
        "window_length": layer.window_length,
        "global_tokens": layer.global_tokens,
        "distance_bias": layer.distance_bias is not None,
        "dropout": layer.dropout,
        "use_bias": layer.query.bias is not None,
    }


def repeat_kv_heads(
    weights: dict[str, np.ndarray], heads: int, kv_heads: int, head_dim: int, sharing: str, projection: str
) -> dict[str, np.ndarray]:
    """The weights with one key-value head per head."""
    group, repeated = heads // kv_heads, dict(weights)
    for name, value in weights.items():
        owner = ["", *name.split(".")][-2]
        if owner in ("key", "value"):
            by_head = value.reshape(kv_heads, head_dim, *value.shape[1:])
            repeated[name] = np.repeat(by_head, group, axis=0).reshape(heads * head_dim, *value.shape[1:])
        elif owner == "projection" and sharing == "none":  # E and F for each head, and the biases of `affine`
            repeated[name] = np.repeat(value, group, axis=Projection.kinds[projection].matrix_axis)
    return repeated


def load(folder: Path) -> Any:
    """The PyTorch model in a directory, or in a run directory."""
    import linformer_kit

    model = folder / "model" if (folder / "model" / "config.json").is_file() else folder
    if not (model / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} has no model: there is neither config.json nor model/config.json; use the directory of a "
            "finished run of `linformer train`, or one written by save_pretrained"
        )
    names = linformer_kit.LinformerConfig.from_pretrained(model).architectures or ["LinformerModel"]
    if names[0] not in MODELS:
        raise TypeError(
            f"{folder} contains a {names[0]}, which has no Keras counterpart; supported are {', '.join(MODELS)}"
        )
    return getattr(linformer_kit, names[0]).from_pretrained(model)


def to_torch(model: Any) -> torch.nn.Module:
    """Convert a Keras model to a PyTorch model in evaluation mode, ready for `save_pretrained`.

    >>> from linformer_kit.keras import LinformerBackbone
    >>> backbone = LinformerBackbone(k=16, max_len=64, vocab_size=90, d_model=32, d_ff=64, n_heads=2, n_layers=1)
    >>> type(to_torch(backbone)).__name__
    'LinformerModel'

    Classifiers return logits in PyTorch.
    """
    import torch

    import linformer_kit

    if isinstance(model, keras.layers.Layer):
        check_not_quantized(model)
    torch_model: torch.nn.Module
    if isinstance(model, LinearMultiHeadAttention):
        torch_model = make_torch_attention(model)
    else:
        name = next((name for name, kind in MODELS.items() if isinstance(model, kind)), None)
        if name is None:
            raise no_torch_class(model)
        options = model.options.to_dict()
        fields = {field: options[name] for name, field in NAMES.items()}
        heads = model.options.heads
        fields |= {"attention_probs_dropout_prob": heads["dropout"]}
        if options["full_attn"]:
            fields |= {"projection": "none", "rescale": False}
            fields["sharing"] = "headwise" if options["sharing"] == "none" else options["sharing"]
        if isinstance(model, Linformer):
            fields |= {field: model.own_config()[name] for name, field in CLASSIFIER_NAMES.items()}
        torch_model = getattr(linformer_kit, name)(linformer_kit.LinformerConfig(**fields))
    shapes = {name: tensor.shape for name, tensor in torch_model.state_dict().items()}
    weights = {}
    for name, variable in parameter_pairs(model):
        value = np.array(keras.ops.convert_to_numpy(variable), dtype="float32")
        if is_transposed(name) or (name == "lm_head.weight" and tuple(value.shape) != tuple(shapes[name])):
            value = value.reshape(tuple(shapes[name])[::-1]).T
        weights[name] = torch.from_numpy(np.ascontiguousarray(value.reshape(tuple(shapes[name]))))
    torch_model.load_state_dict(weights)
    return torch_model.eval()


def make_torch_attention(layer: LinearMultiHeadAttention) -> Any:
    """A new `LinformerAttention` of the same sizes."""
    from linformer_kit import LinformerAttention

    if not layer.built:
        raise ValueError("this layer has no weights yet; call it or build it first")
    width, context_width = layer.query_dense.kernel.shape[0], layer.key_dense.kernel.shape[0]
    supported = {
        "value_dim": layer.value_dim == layer.key_dim,
        "output_shape": layer.output_dense.kernel.shape[-1] == width and len(layer.output_dense.kernel.shape) == 3,
        "different width of keys and values": layer.value_dense.kernel.shape[0] == context_width,
        "use_gate": not layer.get_config()["use_gate"],
        "causal mask": not isinstance(layer, CausalLinearMultiHeadAttention),
        "multi-axis sequence": layer.reads_sequences,
    }
    for name, is_supported in supported.items():
        if not is_supported:
            raise ValueError(
                f"this layer has a {name}, which LinformerAttention does not support; it cannot be converted"
            )
    is_full = layer.projection_dim is None
    return LinformerAttention(
        width,
        layer.num_heads,
        head_dim=layer.key_dim,
        max_length=layer.max_length or 1,
        projected_length=1 if is_full else layer.projection_dim,
        projection="none" if is_full else layer.projection_kind,
        sharing="headwise" if is_full else layer.sharing,
        rescale=False if is_full else layer.rescale,
        dropout=layer.dropout,
        bias=layer.use_bias,
        context_dim=context_width,
        window_length=layer.window_length,
        global_tokens=layer.global_tokens,
        distance_bias=layer.distance_bias,
    )
