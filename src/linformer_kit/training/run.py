"""The folder of a run: what lies where, who may write there, and whether it fits the configuration."""

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import UserError
from ..yaml_loader import parse_yaml
from .checkpoint import checkpoints_in
from .config import CONFIG_NAME, RunConfig, config_from_dict, config_to_dict, to_yaml

# raise it when a folder of before can no longer be read
RUN_FORMAT = 1
# what may change between the beginning of a run and its resumption, since the result does not depend on it
CHANGEABLE_KEYS = {
    *("run", "data.workers", "data.cache", "training.report", "training.keep", "training.device"),
    *("training.log_every", "training.save_every", "training.evaluation_batch_size"),
}


class RunFolder:
    """What lies where in the folder of a run."""

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

    @property
    def is_finished(self) -> bool:
        return self.result.is_file() and self.model.is_dir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else may write here meanwhile; the lock ends with the process, however that ends."""
        make_folder(self.folder)
        lock = FileLock(self.folder / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(
                f"another run is writing to {self.folder}; wait until it has ended, or give run=ANOTHER_FOLDER"
            ) from None
        except OSError as error:
            raise UserError(f"{self.folder} cannot be written ({error.strerror}); give run=ANOTHER_FOLDER") from None
        try:
            yield
        finally:
            lock.release()

    def begin(self, config: RunConfig) -> None:
        """Store the configuration, or see that it is the one that is stored."""
        if not self.config.exists():
            # a full disk may have ended an earlier attempt after its first file
            first = ("environment.json",)
            if others := [
                path.name for path in self.folder.iterdir() if path.name not in first and not path.name.startswith(".")
            ]:
                raise UserError(
                    f"{self.folder} is not the folder of a run, but holds {others[0]!r}; give run=ANOTHER_FOLDER"
                )
            write_text(self.environment, json.dumps(environment(), indent=1))
            write_text(self.config, to_yaml(config))
            return
        check_format(self.folder)
        if not self.is_finished and not checkpoints_in(
            self.checkpoints
        ):  # an attempt that failed; nothing belongs to it
            write_text(self.environment, json.dumps(environment(), indent=1))
            write_text(self.config, to_yaml(config))
        elif different := differences(stored_config(self.folder), config):
            key, before, now = different[0]
            more = f" and {len(different) - 1} more differences" if len(different) > 1 else ""
            raise UserError(
                f"{self.folder} holds a run with {key}={before}, now {key}={now} is wanted{more}; "
                "give run=ANOTHER_FOLDER, or remove that one"
            )

    def begin_with(self, facts: dict[str, Any]) -> None:
        """Store what the data are like, or see that they still are: files may have changed since a run began."""
        if self.data.is_file() and checkpoints_in(self.checkpoints):
            if json.loads(self.data.read_text(encoding="utf-8")) != facts:
                raise UserError(
                    f"the data have changed since the run in {self.folder} began: other texts, tokens or labels come of them now; "
                    "put the old ones back, or give run=ANOTHER_FOLDER"
                )
        else:
            write_text(self.data, json.dumps(facts, ensure_ascii=False))


def open_run(folder: Path) -> tuple[RunFolder, RunConfig]:
    """A trained run, for `evaluate` and `predict`."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give the folder of a run, as `linformer train` has named it")
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(f"{folder} is not the folder of a run: it has no {CONFIG_NAME}")
    check_format(folder)
    run = RunFolder(folder)
    if not run.is_finished:
        raise UserError(f"the run in {folder} is not finished; `linformer train {run.config}` goes on with it")
    return run, stored_config(folder)


def stored_config(folder: Path) -> RunConfig:
    """The configuration of a run."""
    path = folder / CONFIG_NAME
    tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path} is damaged: it holds no keys")
    # the folder may have been moved since
    return config_from_dict({**tree, "run": str(folder)})


def check_format(folder: Path) -> None:
    """Refuse the folder of another version, before its files are misread."""
    path = folder / "environment.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        number, version = found["run_format"], found["packages"]["linformer-kit"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} is missing or damaged: it says which version wrote the run") from None
    if number != RUN_FORMAT:
        raise UserError(
            f"{folder} was written by linformer-kit {version} in format {number}; this is version "
            f"{metadata.version('linformer-kit')}, which reads format {RUN_FORMAT}. Install that version, or train again"
        )


def differences(before: RunConfig, now: RunConfig) -> list[tuple[str, Any, Any]]:
    """The keys whose values differ and matter."""
    old, new = dict(flatten_keys(config_to_dict(before))), dict(flatten_keys(config_to_dict(now)))
    return [
        (key, old.get(key), new.get(key))
        for key in {**old, **new}
        if key not in CHANGEABLE_KEYS and old.get(key) != new.get(key)
    ]


def flatten_keys(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a tree with the path to it."""
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from flatten_keys(value, name)
        else:
            yield name, value


def environment() -> dict[str, Any]:
    """What the run was made with."""
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


def make_folder(folder: Path) -> None:
    """Create a folder, or say why that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(None, "Permission denied")
    except FileExistsError:
        raise UserError(f"{folder} is a file; give run=ANOTHER_FOLDER") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); give run=ANOTHER_FOLDER") from None


def write_text(path: Path, text: str) -> None:
    """A file that is either as before or as wanted."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
