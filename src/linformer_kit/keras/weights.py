"""Weights to and from PyTorch: every parameter of one side has its twin on the other, and `twins` says which.

PyTorch is imported here only, and only when something is converted.
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
from .seq2seq import LinformerSeq2Seq

if TYPE_CHECKING:
    import torch

# options here, fields of LinformerConfig there
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
# options that the weights do not depend on
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

Twins = Iterator[tuple[str, Any]]  # the name there, the variable here


def of_attention(attention: LinearMultiHeadAttention, name: str) -> Twins:
    linears = {
        "query": attention.query_dense,
        "key": attention.key_dense,
        "value": attention.value_dense,
        "output": attention.output_dense,
    }
    for linear, layer in linears.items():
        yield from of_dense(layer, f"{name}{linear}")
    if attention.projection is not None:
        yield from of_projection(attention.projection, f"{name}projection")


def of_projection(projection: Any, name: str) -> Twins:
    if projection is not None and projection.weights:
        yield f"{name}.weight", projection.weight


def of_dense(layer: Any, name: str) -> Twins:
    yield f"{name}.weight", layer.kernel
    if layer.bias is not None:
        yield f"{name}.bias", layer.bias


def of_norm(layer: keras.layers.LayerNormalization, name: str) -> Twins:
    yield f"{name}.weight", layer.gamma
    yield f"{name}.bias", layer.beta


def of_layer(layer: LinformerLayer, name: str) -> Twins:
    yield from of_attention(layer.attention, f"{name}attention.")
    if layer.local is not None:
        yield f"{name}local.weight", layer.local.weight
        yield f"{name}local.bias", layer.local.bias
    yield from of_norm(layer.attention_residual.norm, f"{name}attention_residual.norm")
    if layer.cross_attention is not None:
        yield from of_attention(layer.cross_attention, f"{name}cross_attention.")
        yield from of_norm(layer.cross_attention_residual.norm, f"{name}cross_attention_residual.norm")
    yield from of_dense(layer.inner, f"{name}feed_forward.inner")
    yield from of_dense(layer.outer, f"{name}feed_forward.outer")
    yield from of_norm(layer.feed_forward_residual.norm, f"{name}feed_forward_residual.norm")


def of_stack(stack: Stack, name: str) -> Twins:
    embeddings = stack.embeddings
    yield f"{name}embeddings.word_embeddings.weight", embeddings.words.embeddings
    if embeddings.positions is not None:
        yield f"{name}embeddings.position_embeddings.weight", embeddings.positions
    if embeddings.types is not None:
        yield f"{name}embeddings.token_type_embeddings.weight", embeddings.types.embeddings
    yield from of_norm(embeddings.norm, f"{name}embeddings.norm")
    yield from of_projection(stack.shared_projection, f"{name}projection")
    yield from of_projection(stack.shared_source_projection, f"{name}source_projection")
    for number, layer in enumerate(stack.blocks):
        yield from of_layer(layer, f"{name}layers.{number}.")
    if stack.norm is not None:
        yield from of_norm(stack.norm, f"{name}norm")


def of_head(head: Head, name: str) -> Twins:
    yield from of_dense(head.dense, f"{name}.dense")
    yield from of_norm(head.norm, f"{name}.norm")


def of_words(words: keras.layers.ReversibleEmbedding) -> Twins:
    """What turns hidden states into words."""
    yield "lm_head.weight", words.embeddings if words.tie_weights else words.reverse_embeddings


def twins(model: Any) -> Twins:
    """Every parameter of a model, or of an attention, with the name of its twin in PyTorch."""
    match model:
        case LinearMultiHeadAttention():
            yield from of_attention(model, "")
        case LinformerBackbone():
            yield from of_stack(model.stack, "")
        case Linformer():
            yield from of_stack(model.stack, "model.")
            yield from of_head(model.head, "head")
            yield from of_dense(model.classifier, "classifier")
        case LinformerMaskedLM():
            yield from of_stack(model.stack, "model.")
            yield from of_head(model.head, "head")
            yield from of_words(model.words)
            yield "lm_head.bias", model.bias
        case LinformerCausalLM():
            yield from of_stack(model.decoder, "model.")
            yield from of_words(model.words)
        case LinformerSeq2Seq():
            yield from of_stack(model.encoder, "encoder.")
            yield from of_stack(model.decoder, "decoder.")
            yield from of_words(model.target_words)
        case _:
            raise no_twin(model)


def no_twin(model: Any) -> TypeError:
    names = ", ".join(sorted(kind.__name__ for kind in MODELS.values()))
    return TypeError(
        f"{type(model).__name__} has no twin in PyTorch; those that have are LinearMultiHeadAttention, {names}"
    )


def is_transposed(name: str) -> bool:
    """Whether PyTorch stores this weight (out, in) and Keras (in, out), heads and their sizes being one axis or two."""
    kinds = ("query", "key", "value", "output", "inner", "outer", "dense", "classifier")
    return name.endswith(".weight") and name.removesuffix(".weight").split(".")[-1] in kinds


def refuse_quantised(model: Any) -> None:
    """What is stored as integers with scales is not the weight itself."""
    if any(getattr(layer, "quantization_mode", None) is not None for layer in model._flatten_layers()):
        raise ValueError(
            "the model is quantised, and its weights are integers with scales; convert it before you quantise it"
        )


def assign(model: Any, weights: dict[str, np.ndarray]) -> None:
    """Fill the model with weights by their names in PyTorch."""
    for name, variable in twins(model):
        value = weights[name]
        if name == "lm_head.weight" and tuple(variable.shape) != value.shape:  # untied words are stored (in, out)
            value = value.T
        variable.assign(np.reshape(value.T if is_transposed(name) else value, variable.shape))


def from_torch(source: Any, **changes: Any) -> Any:
    """A PyTorch model of ours as a Keras model with the same weights; or the folder of one, or of a run of `linformer train`.

    >>> from linformer_kit import LinformerConfig, LinformerForMaskedLM
    >>> twin = LinformerForMaskedLM(LinformerConfig(vocab_size=90, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    >>> model = from_torch(twin)
    >>> type(model).__name__, model.num_params() == twin.num_parameters()
    ('LinformerMaskedLM', True)

    A classifier gives logits, as in PyTorch; with `classifier_activation="softmax"` probabilities. What weights do not depend on
    can be changed by its name, too, such as `dropout`. Key-value heads that serve several heads are repeated for each: the outputs
    are the same. A `LinformerAttention` becomes a `LinearMultiHeadAttention`.
    """
    from linformer_kit.models.attention_linformer import LinformerAttention

    for name in changes:
        choice("what is to be changed", name, CHANGEABLE)
    if isinstance(source, str | Path):
        source = load(Path(source))
    weights = {name: tensor.detach().cpu().float().numpy() for name, tensor in source.state_dict().items()}
    if isinstance(source, LinformerAttention):
        layer = LinearMultiHeadAttention(**{**options_of_attention(source), **changes})
        layer.build((None, None, source.embed_dim), (None, None, source.embed_dim))
        kind_of_E = options_of_attention(source)["projection"]
        sizes = (source.num_heads, source.num_kv_heads, source.head_dim, source.sharing, kind_of_E)
        assign(layer, for_every_head(weights, *sizes))
        return layer
    kind = MODELS.get(type(source).__name__)
    if kind is None:
        raise TypeError(
            f"{type(source).__name__} has no twin in Keras; those that have are {', '.join(MODELS)}, LinformerAttention"
        )
    config = source.config
    if kind is LinformerBackbone and config.is_decoder:
        raise ValueError(
            "a LinformerModel with is_decoder=True has no twin in Keras; convert the LinformerForCausalLM that owns it"
        )
    options = {name: getattr(config, field) for name, field in NAMES.items()}
    if options["projection"] == "none":
        options |= {"projection": "linear", "full_attn": True, "rescale": False}
    if isinstance(options["end_id"], list):
        if len(options["end_id"]) > 1:
            raise ValueError(
                f"eos_token_id is {options['end_id']}; here there is one end: set model.config.eos_token_id to it"
            )
        options["end_id"] = next(iter(options["end_id"]), None)
    if kind is Linformer:
        options |= {name: getattr(config, field) for name, field in CLASSIFIER_NAMES.items()}
        options["classifier_activation"] = None
    model = kind(**{**options, **changes})
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // heads
    assign(model, for_every_head(weights, heads, kv_heads, head_dim, config.sharing, config.projection))
    return model


def options_of_attention(layer: Any) -> dict[str, Any]:
    """What a `LinformerAttention` is built from, by the names here."""
    made_with = layer.needed or layer.projection.made_with
    is_full = made_with["projection"] == "none"
    return {
        "num_heads": layer.num_heads,
        "key_dim": layer.head_dim,
        "projection_dim": None if is_full else made_with["projected_length"],
        "projection": "linear" if is_full else made_with["projection"],
        "max_length": made_with["max_length"],
        "sharing": layer.sharing,
        "rescale": made_with["rescale"],
        "dropout": layer.dropout,
        "use_bias": layer.query.bias is not None,
    }


def for_every_head(
    weights: dict[str, np.ndarray], heads: int, kv_heads: int, head_dim: int, sharing: str, projection: str
) -> dict[str, np.ndarray]:
    """The weights with a key-value head for every head."""
    served, repeated = heads // kv_heads, dict(weights)
    for name, value in weights.items():
        owner = ["", *name.split(".")][-2]
        if owner in ("key", "value"):
            by_head = value.reshape(kv_heads, head_dim, *value.shape[1:])
            repeated[name] = np.repeat(by_head, served, axis=0).reshape(heads * head_dim, *value.shape[1:])
        elif owner == "projection" and sharing == "none":  # E and F for each
            repeated[name] = np.repeat(value, served, axis=0 if projection == "conv" else 1)
    return repeated


def load(folder: Path) -> Any:
    """The PyTorch model in a folder, or in the folder of a run."""
    import linformer_kit

    model = folder / "model" if (folder / "model" / "config.json").is_file() else folder
    if not (model / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no model: there is neither config.json nor model/config.json; give the folder of a finished run of "
            "`linformer train`, or one that save_pretrained wrote"
        )
    names = linformer_kit.LinformerConfig.from_pretrained(model).architectures or ["LinformerModel"]
    if names[0] not in MODELS:
        raise TypeError(
            f"{folder} holds a {names[0]}, which has no twin in Keras; those that have are {', '.join(MODELS)}"
        )
    return getattr(linformer_kit, names[0]).from_pretrained(model)


def to_torch(model: Any) -> torch.nn.Module:
    """A Keras model of ours as a PyTorch model with the same weights, ready for `save_pretrained`, in evaluation mode.

    >>> from linformer_kit.keras import LinformerBackbone
    >>> backbone = LinformerBackbone(k=16, max_len=64, vocab_size=90, d_model=32, d_ff=64, n_heads=2, n_layers=1)
    >>> type(to_torch(backbone)).__name__
    'LinformerModel'

    A classifier gives logits there.
    """
    import torch

    import linformer_kit

    if isinstance(model, keras.layers.Layer):
        refuse_quantised(model)
    twin: torch.nn.Module
    if isinstance(model, LinearMultiHeadAttention):
        twin = attention_in_torch(model)
    else:
        name = next((name for name, kind in MODELS.items() if isinstance(model, kind)), None)
        if name is None:
            raise no_twin(model)
        options = model.options.config()
        fields = {field: options[name] for name, field in NAMES.items()}
        heads = model.options.heads
        fields |= {"attention_probs_dropout_prob": heads["dropout"]}
        if options["full_attn"]:
            fields |= {"projection": "none", "rescale": False}
            fields["sharing"] = "headwise" if options["sharing"] == "none" else options["sharing"]
        if isinstance(model, Linformer):
            fields |= {field: model.own_config()[name] for name, field in CLASSIFIER_NAMES.items()}
        twin = getattr(linformer_kit, name)(linformer_kit.LinformerConfig(**fields))
    shapes = {name: tensor.shape for name, tensor in twin.state_dict().items()}
    weights = {}
    for name, variable in twins(model):
        value = np.array(keras.ops.convert_to_numpy(variable), dtype="float32")
        if is_transposed(name) or (name == "lm_head.weight" and tuple(value.shape) != tuple(shapes[name])):
            value = value.reshape(tuple(shapes[name])[::-1]).T
        weights[name] = torch.from_numpy(np.ascontiguousarray(value.reshape(tuple(shapes[name]))))
    twin.load_state_dict(weights)
    return twin.eval()


def attention_in_torch(layer: LinearMultiHeadAttention) -> Any:
    """An untrained `LinformerAttention` of the same sizes."""
    from linformer_kit import LinformerAttention

    if not layer.built:
        raise ValueError("this layer has no weights yet; call it, or build it, first")
    width = layer.query_dense.kernel.shape[0]
    others = {
        "value_dim": layer.value_dim == layer.key_dim,
        "output_shape": layer.output_dense.kernel.shape[-1] == width and len(layer.output_dense.kernel.shape) == 3,
        "width of key or value": layer.key_dense.kernel.shape[0] == layer.value_dense.kernel.shape[0] == width,
        "use_gate": not layer.get_config()["use_gate"],
        "causal way of attending": not isinstance(layer, CausalLinearMultiHeadAttention),
        "sequence of several axes": layer.reads_sequences,
    }
    for name, is_alike in others.items():
        if not is_alike:
            raise ValueError(f"this layer has a {name} that LinformerAttention does not have; it cannot be converted")
    is_full = layer.projection_dim is None
    return LinformerAttention(
        width,
        layer.num_heads,
        head_dim=layer.key_dim,
        max_length=layer.max_length or 1,
        projected_length=layer.projection_dim or 1,
        projection="none" if is_full else layer.projection_kind,
        sharing="headwise" if is_full else layer.sharing,
        rescale=False if is_full else layer.rescale,
        dropout=layer.dropout,
        bias=layer.use_bias,
    )
