"""The settings of runs, with defaults filled in."""

from pathlib import Path
from typing import Any

from ..errors import UserError
from ..models.configuration_linformer import LinformerConfig
from ..training.config import DERIVED_FIELDS, config_to_dict, model_settings
from ..training.run import CHANGEABLE_KEYS, RunFolder, flatten_keys
from .inputs import Run, read_json

WITH_DECODER = ("causal-lm", "translation", "denoising")


def model_config(run: Run) -> dict[str, Any]:
    """The configuration of the saved model, or else of the run's configuration file."""
    saved = RunFolder(run.folder).model / "config.json"
    if saved.is_file():
        return read_model_config(saved)
    if "from" not in run.config.model:
        return LinformerConfig(**model_settings(run.config.model)).to_dict()
    start = Path(run.config.model["from"]) / "config.json"
    # unknown if the model that the run started from is gone
    return read_model_config(start) if start.is_file() else dict.fromkeys(LinformerConfig.__annotations__)


def read_model_config(path: Path) -> dict[str, Any]:
    """The configuration of a saved model."""
    try:
        return LinformerConfig.from_dict(read_json(path)).to_dict()
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; train again, or omit the run") from None


def run_settings(run: Run) -> dict[str, Any]:
    """Every setting that affects the result, by its dotted key; those of the model as it was built."""
    tree, model = config_to_dict(run.config), model_config(run)
    chosen = {name: value for name, value in run.config.model.items() if name in ("from", "attention")}
    # use_cache is set on saving, and does not affect training
    own = {
        name: model.get(name)
        for name in LinformerConfig.__annotations__
        if name not in DERIVED_FIELDS and name != "use_cache"
    }
    tree["model"] = {"attention": "linformer", "from": None, **chosen, **own}
    return {key: value for key, value in flatten_keys(tree) if key not in CHANGEABLE_KEYS}


def attention_kind(model: dict[str, Any], task: str) -> str:
    """linformer, full, or linformer with a full decoder."""
    if model["projection"] is None:
        return "unknown"
    is_decoder_full = task in WITH_DECODER and model["decoder_attention"] == "full"
    if model["projection"] == "none" or (task == "causal-lm" and is_decoder_full):
        return "full"
    return "linformer, decoder full" if is_decoder_full else "linformer"
