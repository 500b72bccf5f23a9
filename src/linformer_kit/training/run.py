"""The run directory: its files, its lock, whether it fits the configuration, and the models in it."""

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from ..files import check_writable, lock, write_text
from ..formatting import plural
from ..yaml_loader import parse_yaml
from .checkpoint import MANIFEST, PREFIX, check_unlisted, checkpoints_in, find_damage
from .config import CONFIG_NAME, DataConfig, RunConfig, config_from_dict, config_to_dict, to_yaml

# increase when older run directories can no longer be read
RUN_FORMAT = 1
# keys that may change when a run is resumed, because the result does not depend on them
CHANGEABLE_KEYS = {
    *("run", "data.workers", "data.cache", "training.report", "training.keep", "training.device"),
    *("training.log_every", "training.save_every", "training.evaluation_batch_size"),
}
WANDB_PREFIX = "wandb:"
OTHER_DIRECTORY = "choose another directory with run=DIRECTORY"


class RunFolder:
    """Paths in a run directory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = folder / CONFIG_NAME
        self.data = folder / "data.json"
        self.environment = folder / "environment.json"
        self.tokenizer = folder / "tokenizer"
        self.checkpoints = folder / "checkpoints"
        self.model = folder / "model"
        self.metrics = folder / "metrics.jsonl"
        self.curves = folder / "curves.png"
        self.result = folder / "result.json"
        self.evaluation = folder / "evaluation.json"
        self.wandb_id = folder / "wandb" / "id.txt"

    @property
    def is_finished(self) -> bool:
        return self.result.is_file() and self.model.is_dir()

    @property
    def resumable_config(self) -> RunConfig | None:
        """The stored configuration if the run has a checkpoint or is finished; None if it can still begin anew."""
        has_begun = self.is_finished or checkpoints_in(self.checkpoints)
        if not (self.config.is_file() and has_begun):
            return None
        check_format(self.folder)  # another version may have other keys
        return stored_config(self.folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the directory and hold its lock."""
        check_writable(self.folder, OTHER_DIRECTORY)
        self.folder.mkdir(parents=True, exist_ok=True)
        message = f"another process is writing to {self.folder}; wait until it ends, or {OTHER_DIRECTORY}"
        with lock(self.folder / ".lock", message):
            yield

    def begin(self, config: RunConfig) -> None:
        """Store the configuration, or check it against the stored one if the run is resumed."""
        if self.config.exists():
            check_format(self.folder)
        else:
            # an earlier attempt may have failed after its first file
            others = [path.name for path in self.folder.iterdir() if not path.name.startswith(".")]
            if foreign := [name for name in others if name != self.environment.name]:
                raise UserError(f"{self.folder} is not a run directory: it contains {foreign[0]!r}; {OTHER_DIRECTORY}")
        stored = self.resumable_config
        if stored is None:
            write_text(self.environment, json.dumps(environment(), indent=1))
        elif different := differences(stored, config):
            key, before, now = different[0]
            stored_value = f"without {key}" if before is None else f"with {key}={before}"
            requested = f"{key} is not set" if now is None else f"{key}={now} is requested"
            more = f" (and {plural(len(different) - 1, 'more difference')})" if len(different) > 1 else ""
            raise UserError(
                f"{self.folder} contains a run {stored_value}, but {requested}{more}; "
                f"{OTHER_DIRECTORY}, or delete the old one"
            )
        # older versions stored `auto`; from now on the precision of such a run is fixed
        if stored is None or (stored.training.precision == "auto" and not self.is_finished):
            write_text(self.config, to_yaml(config))

    def check_data(self, facts: dict[str, Any]) -> None:
        """Store facts about the data, or check them if the run is resumed: files may have changed in the meantime."""
        if self.data.is_file() and checkpoints_in(self.checkpoints):
            if json.loads(self.data.read_text(encoding="utf-8")) != facts:
                raise UserError(
                    f"the data has changed since the run in {self.folder} began: it yields different texts, tokens "
                    f"or labels; restore the old data, or {OTHER_DIRECTORY}"
                )
        else:
            write_text(self.data, json.dumps(facts, ensure_ascii=False))


def open_run(folder: Path) -> tuple[RunFolder, RunConfig]:
    """Open a finished run, for `evaluate` and `predict`."""
    if not folder.is_dir():
        raise UserError(f"there is no directory {folder}; pass a run directory, as printed by `linformer train`")
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(f"{folder} is not a run directory: it has no {CONFIG_NAME}")
    check_format(folder)
    run = RunFolder(folder)
    if not run.is_finished:
        found = checkpoints_in(run.checkpoints)
        other = f", or use a checkpoint: {found[-1]}" if found else ""
        raise UserError(f"the run in {folder} is not finished; resume it with `linformer train {run.config}`{other}")
    return run, stored_config(folder)


class TrainedModel(NamedTuple):
    """A model to evaluate: the finished model of a run, one of its checkpoints, or what `linformer export` wrote."""

    run: RunFolder
    config: RunConfig
    folder: Path
    tokenizer: Path
    name: str = ""  # of a checkpoint

    def output(self, name: str) -> Path:
        """The path of a result in the run directory; that of a checkpoint has a name of its own."""
        path = self.run.folder / name
        return path.with_stem(f"{path.stem}-{self.name}") if self.name else path


def open_model(source: Path | str) -> TrainedModel:
    """Open a finished run, a checkpoint of any run, an exported model, or `wandb:ENTITY/PROJECT/ARTIFACT:ALIAS`.

    W&B artifacts are downloaded.
    """
    if str(source).startswith(WANDB_PREFIX):
        from .wandb_report import download

        opened = open_model(download(str(source).removeprefix(WANDB_PREFIX)))
        # a file from elsewhere must not choose where this machine writes
        data = replace(opened.config.data, cache=DataConfig.cache)
        return opened._replace(config=replace(opened.config, data=data))
    path = Path(source)
    place = Path(os.path.abspath(path))  # of a relative path in the directory of checkpoints, too
    if place.parent.name == "checkpoints" and (place.parent.parent / CONFIG_NAME).is_file():
        return open_checkpoint(place)
    if (path / CONFIG_NAME).is_file() and (path / "config.json").is_file():  # of `linformer export`
        check_format(path)
        return TrainedModel(RunFolder(path), stored_config(path), path, path)
    if path.is_dir() and not (path / CONFIG_NAME).is_file():
        if found := checkpoints_in(path):
            raise UserError(f"{path} contains checkpoints; pass the run directory, or one of them, such as {found[-1]}")
        if (path / MANIFEST).is_file():
            raise UserError(
                f"{path} is a model without its run, which has the data and the settings; pass the run directory, or "
                f"a checkpoint inside it, such as RUN/checkpoints/{PREFIX}100"
            )
    run, config = open_run(path)
    return TrainedModel(run, config, run.model, run.model)


def open_checkpoint(path: Path) -> TrainedModel:
    """Open a checkpoint of a run, which need not be finished."""
    run = RunFolder(path.parent.parent)
    found = [each.name for each in checkpoints_in(run.checkpoints)]
    others = f"{run.checkpoints} has {', '.join(found) or 'no checkpoint yet'}"
    if path.name not in found:
        what = f"{path} is not a checkpoint" if path.exists() else f"there is no checkpoint {path}"
        raise UserError(f"{what}; {others}")
    if (reason := find_damage(path)) is not None:
        raise UserError(f"{path} is damaged: {reason}; {others}")
    check_unlisted(path)
    check_format(run.folder)
    if not run.tokenizer.is_dir():
        raise UserError(
            f"{run.folder} has no tokenizer, because an older version began the run; resume it once with "
            f"`linformer train {run.config}`"
        )
    return TrainedModel(run, stored_config(run.folder), path, run.tokenizer, path.name)


def stored_config(folder: Path) -> RunConfig:
    """The configuration of a run."""
    path = folder / CONFIG_NAME
    tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path} is damaged: it has no keys")
    # the directory may have been moved
    return config_from_dict({**tree, "run": str(folder)})


def check_format(folder: Path) -> None:
    """Raise `UserError` if an incompatible version wrote the directory."""
    path = folder / "environment.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        number, version = found["run_format"], found["packages"]["linformer-kit"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} is missing or damaged; it records the version that wrote the run") from None
    if number != RUN_FORMAT:
        raise UserError(
            f"{folder} was written by linformer-kit {version} in format {number}; this is version "
            f"{metadata.version('linformer-kit')}, which reads format {RUN_FORMAT}. "
            "Install that version, or train again"
        )


def differences(before: RunConfig, now: RunConfig) -> list[tuple[str, Any, Any]]:
    """The keys with different values that affect the result, each with both values."""
    old, new = dict(flatten_keys(config_to_dict(before))), dict(flatten_keys(config_to_dict(now)))
    ignored = CHANGEABLE_KEYS | ({"training.precision"} if before.training.precision == "auto" else set())
    return [
        (key, old.get(key), new.get(key))
        for key in {**old, **new}
        if key not in ignored and old.get(key) != new.get(key)
    ]


def flatten_keys(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """All values of a nested dictionary, each with its dotted path."""
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from flatten_keys(value, name)
        else:
            yield name, value


def environment() -> dict[str, Any]:
    """Versions, system and command of the run."""
    packages = ("linformer-kit", "torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy")
    return {
        "run_format": RUN_FORMAT,
        "packages": {name: metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "command": " ".join(["linformer", *sys.argv[1:]]),
        "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
