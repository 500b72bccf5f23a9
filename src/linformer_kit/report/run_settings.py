"""What runs were made with, defaults filled in."""

from pathlib import Path
from typing import Any

from ..errors import UserError
from ..models.configuration_linformer import LinformerConfig
from ..training.config import DERIVED_FIELDS, config_to_dict, model_settings
from ..training.run import CHANGEABLE_KEYS, RunFolder, flatten_keys
from .inputs import Run, read_json


def model_of(run: Run) -> dict[str, Any]:
    """What the model is made of: as it was saved, else as the configuration says."""
    saved = RunFolder(run.folder).model / "config.json"
    if saved.is_file():
        return read_model(saved)
    if "from" not in run.config.model:
        return LinformerConfig(**model_settings(run.config.model)).to_dict()
    start = Path(run.config.model["from"]) / "config.json"
    return (
        read_model(start) if start.is_file() else dict.fromkeys(LinformerConfig.__annotations__)
    )  # gone: nobody knows


def read_model(path: Path) -> dict[str, Any]:
    """The configuration of a saved model."""
    try:
        return LinformerConfig.from_dict(read_json(path)).to_dict()
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; train again, or leave the run out") from None


def settings_of(run: Run) -> dict[str, Any]:
    """Every setting that the result depends on, by its path; those of the model as it was built."""
    tree, model = config_to_dict(run.config), model_of(run)
    given = {name: value for name, value in run.config.model.items() if name in ("from", "attention")}
    # a saved model says of its cache what suits whoever loads it
    own = {
        name: model.get(name)
        for name in LinformerConfig.__annotations__
        if name not in DERIVED_FIELDS and name != "use_cache"
    }
    tree["model"] = {"attention": "linformer", "from": None, **given, **own}
    return {key: value for key, value in flatten_keys(tree) if key not in CHANGEABLE_KEYS}
