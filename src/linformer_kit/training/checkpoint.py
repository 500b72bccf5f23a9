"""Checkpoints that are complete or absent: written under a temporary name, sealed with checksums, then renamed.

They contain no pickles: tensors are stored as safetensors, everything else as JSON.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from ..errors import UserError
from ..files import atomic_directory, sync

if TYPE_CHECKING:
    from rich.console import Console

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"


def step_of(path: Path) -> int:
    """The training step of a checkpoint.

    >>> step_of(Path("checkpoints/checkpoint-120"))
    120
    """
    return int(path.name.removeprefix(PREFIX))


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a directory, oldest first."""
    found = [path for path in folder.glob(f"{PREFIX}*") if re.fullmatch(rf"{PREFIX}\d+", path.name)]
    return sorted(found, key=step_of)


@contextmanager
def atomic_checkpoint(
    folder: Path, is_writer: bool = True, barrier: Callable[[], object] = lambda: None
) -> Iterator[Path]:
    """`files.atomic_directory` with checksums; disk errors become a `UserError` that names the last checkpoint."""
    try:
        with atomic_directory(folder, is_writer=is_writer, barrier=barrier, before_rename=write_manifest) as unfinished:
            yield unfinished
    except Exception as error:
        # libraries written in Rust do not raise OSError
        if not isinstance(error, OSError | SafetensorError) and "(os error" not in str(error):
            raise
        raise write_error(folder, error) from error


def write_error(folder: Path, error: Exception) -> UserError:
    """The error for a full disk or a directory that cannot be written."""
    places = (folder.parent, folder.parent / "checkpoints", folder / "checkpoints")
    last = next((found[-1] for place in places if (found := checkpoints_in(place))), None)
    kept = "there is no checkpoint yet" if last is None else f"the last complete checkpoint is {last}"
    return UserError(
        f"{folder} could not be written ({error}); {kept}. Free some space or fix the directory, "
        "then resume with the same command"
    )


def write_manifest(folder: Path) -> None:
    """Store the checksums of all files in a manifest and flush everything to disk."""
    sums = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sums[str(path.relative_to(folder))] = checksum(path)
        sync(path)
    (folder / MANIFEST).write_text(json.dumps(sums, indent=1), encoding="utf-8")
    sync(folder / MANIFEST)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damage(folder: Path) -> str | None:
    """Describe how a checkpoint is damaged; None if it is intact."""
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


def check_unlisted(folder: Path) -> None:
    """Raise `UserError` if an intact checkpoint has files that its manifest does not list: libraries would load them.

    Names with a leading dot are ignored: file managers make them, and nothing loads them.
    """
    listed = {*json.loads((folder / MANIFEST).read_text(encoding="utf-8")), MANIFEST}
    found = sorted(path.relative_to(folder) for path in folder.rglob("[!.]*") if path.is_file())
    if foreign := [path for path in found if str(path) not in listed]:
        raise UserError(f"{folder / foreign[0]} is not part of the checkpoint: {MANIFEST} does not list it; remove it")


def latest_intact(folder: Path, console: "Console") -> Path | None:
    """The newest intact checkpoint; prints a warning for each damaged one."""
    for path in reversed(checkpoints_in(folder)):
        if (reason := find_damage(path)) is None:
            check_unlisted(path)
            return path
        console.print(
            f"{path} is damaged: {reason}. Using the previous checkpoint.", style="yellow", markup=False, soft_wrap=True
        )
    return None


def remove_newer(folder: Path, last: Path | None) -> None:
    """Remove checkpoints newer than the last intact one, and unfinished ones: training writes them again."""
    for path in checkpoints_in(folder):
        if last is None or step_of(path) > step_of(last):
            shutil.rmtree(path, ignore_errors=True)
    for path in (*folder.glob(".*.unfinished"), *folder.glob(".*.gone")):
        shutil.rmtree(path, ignore_errors=True)


def remove_old(folder: Path, keep: int, best: Path | None) -> None:
    """Remove all checkpoints except the newest `keep` and the best."""
    for path in checkpoints_in(folder)[:-keep]:
        if best is None or path.name != best.name:
            shutil.rmtree(path, ignore_errors=True)
