"""`linformer export`: the model of a run, a checkpoint or a saved model in another precision, as one directory."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from ..errors import NEEDS_CODE, UserError, needs_code
from ..files import atomic_directory, check_new_directory, read_json
from ..formatting import format_size
from ..models.configuration_linformer import LinformerConfig
from ..models.int8_linformer import quantize
from .config import CONFIG_NAME
from .load import load_model, quiet_libraries
from .run import WANDB_PREFIX, TrainedModel, open_model

MODEL_CONFIG, WEIGHTS = "config.json", "model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export(source: str, output: Path, precision: str) -> str:
    """Write the directory `output`, which transformers opens, and the commands too if the source has a run.

    Returns a line that describes it.
    """
    check_new_directory(output, "choose another --output")
    quiet_libraries()
    trained = None if is_saved_model(source) else open_model(source)
    model, tokenizer = load_saved_model(Path(source)) if trained is None else load_model(trained, "float32")
    model = with_weights(model.to("cpu"), precision)
    with atomic_directory(output.absolute()) as unfinished:  # "." has no name
        model.save_pretrained(unfinished)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        if trained is not None:
            copy_run(trained, unfinished)
    size = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    return f"{type(model).__name__} with {precision} weights in {output}: {format_size(size / 2**20)}"


def is_saved_model(source: str) -> bool:
    """Whether the directory holds a model without its run."""
    path = Path(source)
    if source.startswith(WANDB_PREFIX) or path.absolute().parent.name == "checkpoints":
        return False
    return (path / MODEL_CONFIG).is_file() and not (path / CONFIG_NAME).is_file()


def load_saved_model(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast | None]:
    """A model of `save_pretrained`, and its tokenizer if it is there; code in the directory never runs."""
    from ..models import modeling_linformer, modeling_linformer_seq2seq

    config = read_json(folder / MODEL_CONFIG)
    name = (config.get("architectures") or ["LinformerModel"])[0]
    found: Any = getattr(modeling_linformer, name, None) or getattr(modeling_linformer_seq2seq, name, None)
    if config.get("model_type") != LinformerConfig.model_type or found is None:
        raise UserError(f"{folder} contains a {name} of type {config.get('model_type')!r}, not a Linformer")
    try:
        model = found.from_pretrained(folder, trust_remote_code=False, use_safetensors=True).eval()
        has_tokenizer = (folder / "tokenizer_config.json").is_file()
        return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False) if has_tokenizer else None
    except Exception as error:  # safetensors, json and transformers raise different types
        reason = f"the tokenizer {NEEDS_CODE}" if needs_code(error) else " ".join(str(error).split())
        raise UserError(f"{folder} cannot be loaded: {reason}") from error


def with_weights(model: PreTrainedModel, precision: str) -> PreTrainedModel:
    """The model with weights of that precision."""
    if model.config.quantization != "none" and precision != model.config.quantization:
        raise UserError(
            f"the model has {model.config.quantization} weights, which cannot become {precision}; export the original"
        )
    if precision in DTYPES:
        return model.to(DTYPES[precision])
    try:
        return quantize(model.float())
    except ValueError as error:
        raise UserError(str(error)) from None


def copy_run(trained: TrainedModel, folder: Path) -> None:
    """Copy what `evaluate` and `predict` need of the run: its settings, and facts about its data."""
    for path in (trained.run.config, trained.run.environment, trained.run.data):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
