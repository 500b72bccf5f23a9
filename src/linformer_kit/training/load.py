"""Loads the model of a run; imports nothing that only training needs."""

import logging
import os

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from ..errors import NEEDS_CODE, UserError, needs_code
from ..models.configuration_linformer import LinformerConfig
from ..precision import Precision, compiled, in_precision
from .arguments import device_of
from .model import MODELS
from .run import TrainedModel


def quiet_libraries() -> None:
    """Silence the libraries' own messages and progress bars."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    # tokenizers warns when a process with threads forks, as datasets does
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def load_model(
    trained: TrainedModel, precision: Precision, compile: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a model and its tokenizer with our classes and those of transformers: code in the directory never runs."""
    config = trained.config
    try:
        kind = LinformerConfig.get_config_dict(trained.folder)[0].get("model_type")
        if kind != LinformerConfig.model_type:
            raise UserError(f"it is a model of type {kind!r}, not a Linformer; its own code is never run")
        model = MODELS[config.task].from_pretrained(trained.folder, trust_remote_code=False, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(trained.tokenizer, trust_remote_code=False)
    except Exception as error:  # safetensors, json and transformers raise different types
        reason = f"the tokenizer {NEEDS_CODE}" if needs_code(error) else " ".join(str(error).split())
        raise UserError(f"{trained.folder} cannot be loaded: {reason}") from error
    model = in_precision(model.to(device_of(config.training)).eval(), precision)
    return compiled(model) if compile else model, tokenizer


def labels_of_model(model: PreTrainedModel) -> list[str]:
    """The labels in the order of their indices."""
    return [model.config.id2label[number] for number in range(model.config.num_labels)]
