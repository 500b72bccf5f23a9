"""The settings of runs, with defaults filled in."""

from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_json
from ..models.configuration_linformer import LinformerConfig
from ..models.options_linformer import NO_WINDOW
from ..models.projection_linformer import Projection
from ..training.config import DERIVED_FIELDS, config_to_dict, model_settings
from ..training.run import CHANGEABLE_KEYS, RunFolder, flatten_keys
from .inputs import Run

WITH_DECODER = ("causal-lm", "translation", "denoising")


def model_config(run: Run) -> dict[str, Any]:
    """The configuration of the saved model, or else of the run's configuration file."""
    start = run.config.model.get("from")
    for path in (RunFolder(run.folder).model, *([Path(start)] if start else [])):
        if (saved := path / "config.json").is_file():
            try:
                return LinformerConfig.from_dict(read_json(saved)).to_dict()
            except ValueError as error:
                raise UserError(f"{saved} is damaged: {error}; train again, or omit the run") from None
    # unknown if the model that the run started from is gone
    unknown = dict.fromkeys(LinformerConfig.__annotations__)
    return unknown if start else LinformerConfig(**model_settings(run.config.model)).to_dict()


def effective_config(run: Run) -> dict[str, Any]:
    """The configuration of the model without the fields that have no effect in it; `projection` is always there."""
    model, task = model_config(run), run.config.task
    has_full_decoder = task in WITH_DECODER and model["decoder_attention"] == "full"
    unused = set()
    if task not in WITH_DECODER:
        unused |= {"decoder_attention", "block_length", "slots", "num_decoder_layers"}
    if has_full_decoder:
        unused |= {"block_length", "slots"}
    if task == "causal-lm":  # projects blocks instead of the whole input
        unused |= {"projected_length"}
        model["projection"] = "none" if has_full_decoder else model["projection"]
    if model["projection"] == "none":
        unused |= {"projected_length", *NO_WINDOW, "rescale"}
        unused |= {"decoder_attention", "block_length", "slots"}
    if model["projection"] and not Projection.kinds[model["projection"]].has_matrices:
        unused |= {"sharing"}
    return {name: value for name, value in model.items() if name not in unused}


def attention_kind(model: dict[str, Any]) -> str:
    """linformer, full, or linformer with a full decoder; of an effective configuration."""
    if model["projection"] in (None, "none"):
        return "full" if model["projection"] else "unknown"
    return "linformer, decoder full" if model.get("decoder_attention") == "full" else "linformer"


def run_settings(run: Run, model: dict[str, Any]) -> dict[str, Any]:
    """Every setting that affects the result, by its dotted key; those of the model from its configuration."""
    tree = config_to_dict(run.config)
    chosen = {name: value for name, value in run.config.model.items() if name in ("from", "attention")}
    # use_cache is set on saving, and does not affect training
    names = [name for name in LinformerConfig.__annotations__ if name not in DERIVED_FIELDS and name != "use_cache"]
    fields = {name: model[name] for name in names if name in model}
    tree["model"] = {"attention": "linformer", "from": None, **chosen, **fields}
    return {key: value for key, value in flatten_keys(tree) if key not in CHANGEABLE_KEYS}
