"""Builds the model of a run, or loads the model that it starts from."""

import json
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ..errors import UserError
from ..models.configuration_linformer import LinformerConfig
from ..models.modeling_linformer import LinformerForCausalLM, LinformerForMaskedLM, LinformerForSequenceClassification
from ..models.modeling_linformer_seq2seq import LinformerForConditionalGeneration
from ..models.options_linformer import NO_WINDOW
from ..models.projection_linformer import Projection
from ..models.window_linformer import DistanceBias
from .config import RunConfig, check_not_checkpointing, model_settings
from .tokenizer import end_token, start_token

MODELS: dict[str, Any] = {
    "classification": LinformerForSequenceClassification,
    "masked-lm": LinformerForMaskedLM,
    "causal-lm": LinformerForCausalLM,
    "translation": LinformerForConditionalGeneration,
    "denoising": LinformerForConditionalGeneration,
}


def build_model(config: RunConfig, tokenizer: PreTrainedTokenizerFast, labels: list[str]) -> PreTrainedModel:
    """The model of a run, with initial weights or those of a saved model."""
    if config.task in ("masked-lm", "denoising") and tokenizer.mask_token_id is None:
        raise UserError(
            f"the task {config.task} needs a mask token, which the tokenizer lacks; remove tokenizer.from to train one"
        )
    derived: dict[str, Any] = {}
    if labels:
        derived |= {
            "id2label": dict(enumerate(labels)),
            "label2id": {label: number for number, label in enumerate(labels)},
        }
    model_class = MODELS[config.task]
    try:
        if "from" in config.model:
            return load_initial_model(config, tokenizer, model_class, derived)
        derived |= {
            "vocab_size": len(tokenizer),
            "type_vocab_size": 2 if config.data.columns.pair else 0,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": start_token(tokenizer),
            "eos_token_id": end_token(tokenizer),
            "decoder_start_token_id": start_token(tokenizer),
        }
        return model_class(LinformerConfig(**model_settings(config.model), **derived))
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(f"model: {error}") from error


def load_initial_model(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast, model_class: Any, derived: dict[str, Any]
) -> PreTrainedModel:
    """The saved model that a run starts from; a missing head and missing token types are initialized."""
    source = check_initial_model(config)
    if config.data.columns.pair:
        derived = {**derived, "type_vocab_size": 2}
    model, found = model_class.from_pretrained(
        source,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        trust_remote_code=False,
        use_safetensors=True,
        **derived,
    )
    missing = sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
    if body := [name for name in missing if name.startswith("model.") and "token_type" not in name]:
        raise UserError(
            f"model.from is {source!r}, a {saved_class_name(source)}, which has no weights for {', '.join(body[:2])} … "
            f"of {model_class.__name__}, the model of {config.task}; start from a run of a similar task"
        )
    if model.config.reversible:
        check_not_checkpointing(config)
    if "id2label" in derived and LinformerConfig.from_pretrained(source).id2label != derived["id2label"]:
        # even if the number of labels is the same
        nn.init.normal_(model.classifier.weight, std=model.config.initializer_range)
        nn.init.zeros_(model.classifier.bias)
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"model.from is {source!r}, which has {model.config.vocab_size} token embeddings, but the tokenizer has "
            f"{len(tokenizer)} tokens; set tokenizer.from={source}"
        )
    return convert_attention(
        model, model_settings({key: value for key, value in config.model.items() if key != "from"})
    )


def convert_attention(model: PreTrainedModel, changes: dict[str, Any]) -> PreTrainedModel:
    """The same weights in a model with another attention or maximum length; a new E or F is initialized.

    A new distance bias is zero, and so are the new distances of a longer window. For example, a model with full
    attention, trained on short inputs, becomes a Linformer for long ones.
    """
    if changes.get("window_length") == 0:  # what needs a window goes with it
        changes = NO_WINDOW | changes
        if 0 in model.config.projected_lengths:
            changes = {"projected_length": LinformerConfig.projected_length, **changes}
    length = changes.get("max_position_embeddings", model.config.max_position_embeddings)
    if length != model.config.max_position_embeddings:
        model.resize_position_embeddings(length)
    if all(getattr(model.config, key) == value for key, value in changes.items()):
        return model
    changed = type(model)(LinformerConfig.from_dict({**model.config.to_dict(), **changes}))
    if model.can_generate():
        changed.generation_config = model.generation_config
    weights, fresh = model.state_dict(), changed.state_dict()
    is_other_kind = changed.config.projection != model.config.projection
    projections = [f"{name}." for name, module in changed.named_modules() if isinstance(module, Projection)]
    for name in list(weights):
        is_of_projection = any(name.startswith(each) for each in projections)
        if name not in fresh or (is_of_projection and (is_other_kind or fresh[name].shape != weights[name].shape)):
            del weights[name]
    for name, module in changed.named_modules():
        if isinstance(module, DistanceBias):
            weights[f"{name}.weight"] = module.resized_weight(weights.get(f"{name}.weight"))
    missing = changed.load_state_dict(weights, strict=False).missing_keys
    assert all(any(name.startswith(each) for each in projections) for name in missing), missing
    return changed


def saved_class_name(source: str) -> str:
    """The class name of a saved model."""
    return (LinformerConfig.from_pretrained(source).architectures or ["model"])[0]


def max_length(config: RunConfig) -> int:
    """The maximum length of an input in tokens."""
    if "from" in config.model and "max_position_embeddings" not in config.model:
        return LinformerConfig.from_pretrained(check_initial_model(config)).max_position_embeddings
    return config.model.get("max_position_embeddings", LinformerConfig.max_position_embeddings)


def check_initial_model(config: RunConfig) -> str:
    """The directory of the model that a run starts from; raises `UserError` if it is not a Linformer."""
    source = config.model["from"]
    try:
        kind = json.loads(Path(source, "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        raise UserError(
            f"model.from is {source!r}, which has no config.json; set it to the directory model/ of a run, or to a "
            "saved model"
        ) from None
    if kind != "linformer":
        raise UserError(
            f"model.from is {source!r}, a model of type {kind!r}; set it to the directory model/ of a run of "
            "linformer-kit"
        )
    return source


def count_parameters(model: PreTrainedModel) -> tuple[int, int]:
    """(number of parameters, number of parameters of E and F)."""
    total = sum(parameter.numel() for parameter in model.parameters())
    projections = {
        id(parameter): parameter.numel()
        for module in model.modules()
        if isinstance(module, Projection)
        for parameter in module.parameters()
    }
    return total, sum(projections.values())
