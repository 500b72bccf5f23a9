"""Checkpoints that are either whole or not there: written under a temporary name, sealed with checksums, renamed.

Nothing in them is a pickle: tensors are safetensors, everything else is JSON.
"""

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..errors import UserError

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"


def step_of(path: Path) -> int:
    """The step a checkpoint was written at.

    >>> step_of(Path("checkpoints/checkpoint-120"))
    120
    """
    return int(path.name.removeprefix(PREFIX))


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob(f"{PREFIX}*") if re.fullmatch(rf"{PREFIX}\d+", path.name)]
    return sorted(found, key=step_of)


@contextmanager
def written_whole(folder: Path, is_writer: bool = True, barrier: Any = lambda: None) -> Iterator[Path]:
    """A temporary folder that takes the name `folder` once everything in it is written and sealed.

    Of several processes all write into it, one seals and renames it; `barrier` waits for the others.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        if is_writer:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        barrier()
        yield unfinished
        barrier()
        if is_writer:
            seal(unfinished)
            replace_folder(unfinished, folder)
        barrier()
    except Exception as error:
        # the libraries written in Rust have their own words for what the system refused
        if not isinstance(error, OSError | SafetensorError) and "(os error" not in str(error):
            raise
        shutil.rmtree(unfinished, ignore_errors=True)
        raise not_written(folder, error) from error


def not_written(folder: Path, error: Exception) -> UserError:
    """What to say of a full disk or a folder that cannot be written."""
    places = (folder.parent, folder.parent / "checkpoints", folder / "checkpoints")
    whole = next((found[-1] for place in places if (found := checkpoints_in(place))), None)
    kept = "no checkpoint was written before" if whole is None else f"the last whole checkpoint is {whole}"
    return UserError(
        f"{folder} could not be written ({error}); {kept}. Make room or mend the folder, then give the same command to go on"
    )


def replace_folder(new: Path, old: Path) -> None:
    """Give a folder another's name; what had it before goes last."""
    gone = old.with_name(f".{old.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if old.exists():
        os.rename(old, gone)
    os.rename(new, old)
    sync(old.parent)
    shutil.rmtree(gone, ignore_errors=True)


def sync(path: Path) -> None:
    """See to it that a file, or the names in a folder, have reached the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def seal(folder: Path) -> None:
    """Store the checksum of every file, and see to it that all of them have reached the disk."""
    sums = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sums[str(path.relative_to(folder))] = checksum(path)
        sync(path)
    (folder / MANIFEST).write_text(json.dumps(sums, indent=1), encoding="utf-8")
    sync(folder / MANIFEST)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is as it was written."""
    try:
        sums = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in sums.items():
            if checksum(folder / name) != expected:
                return f"{name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def latest_whole(folder: Path, console: Console) -> Path | None:
    """The newest checkpoint that is whole; tells of those that are not."""
    for path in reversed(checkpoints_in(folder)):
        if (reason := damage(path)) is None:
            return path
        console.print(
            f"{path} is damaged: {reason}. The one before is used.", style="yellow", markup=False, soft_wrap=True
        )
    return None


def remove_beyond(folder: Path, last: Path | None) -> None:
    """Remove what is newer than the last whole checkpoint, and what was never finished: it will be written again."""
    for path in checkpoints_in(folder):
        if last is None or step_of(path) > step_of(last):
            shutil.rmtree(path, ignore_errors=True)
    for path in (*folder.glob(".*.unfinished"), *folder.glob(".*.gone")):
        shutil.rmtree(path, ignore_errors=True)


def remove_old(folder: Path, keep: int, best: Path | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best."""
    for path in checkpoints_in(folder)[:-keep]:
        if best is None or path.name != best.name:
            shutil.rmtree(path, ignore_errors=True)


# optimizer and schedule


def save_optimizer(folder: Path, optimizer: dict[str, Any], scheduler: dict[str, Any]) -> None:
    """The states of an optimizer and its schedule."""
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for parameter, state in optimizer["state"].items():
        for name, value in state.items():
            target = tensors if isinstance(value, torch.Tensor) else others
            target[f"{parameter}.{name}"] = value
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "optimizer.safetensors")
    rest = {"param_groups": optimizer["param_groups"], "others": others, "scheduler": scheduler}
    (folder / "optimizer.json").write_text(json.dumps(rest), encoding="utf-8")


def load_optimizer(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `save_optimizer` was given."""
    rest = json.loads((folder / "optimizer.json").read_text(encoding="utf-8"))
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**load_file(folder / "optimizer.safetensors"), **rest["others"]}.items():
        parameter, name = key.split(".", 1)
        state.setdefault(int(parameter), {})[name] = value
    groups = [{**group, "betas": tuple(group["betas"])} for group in rest["param_groups"]]
    return {"state": state, "param_groups": groups}, rest["scheduler"]


# chance


def random_state() -> dict[str, Any]:
    """The state of every generator that training may draw from."""
    version, numbers, gauss = random.getstate()
    name, keys, *place = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *place],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """The reverse of `random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *place = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *place))
    torch.set_rng_state(bytes_tensor(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([bytes_tensor(one) for one in state["cuda"]])


def bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """What is drawn inside does not change what is drawn afterwards."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
