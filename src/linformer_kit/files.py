"""Files and directories that appear complete or not at all, locks, and checks that an output can be written."""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import UserError


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary file next to `path` that takes its name when the block ends without an exception.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_file(folder / "numbers.txt") as unfinished:
    ...     _ = unfinished.write_text("1 2 3")
    >>> (folder / "numbers.txt").read_text()
    '1 2 3'
    """
    unfinished = path.with_name(f".{path.stem}-{secrets.token_hex(8)}{path.suffix}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The keys of a JSON file of a run or model; empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: not a JSON object; train or evaluate again, or omit {path.parent}")
    return found


@contextlib.contextmanager
def atomic_directory(
    directory: Path,
    *,
    is_writer: bool = True,
    barrier: Callable[[], object] = lambda: None,
    before_rename: Callable[[Path], object] = lambda unfinished: None,
    keep_existing: bool = False,
) -> Iterator[Path]:
    """A temporary directory that takes the name `directory` when the block ends without an exception.

    With several processes, all of them write into it, one (`is_writer`) creates and renames it, and `barrier` waits
    for the others. `before_rename` runs last, in the writer.

    An existing `directory` is replaced. With `keep_existing`, the one that another process has finished in the
    meantime is kept: independent processes may build the same directory at the same time.
    """
    # processes that share a directory must agree on its temporary name; independent ones must not
    unique = f".{secrets.token_hex(8)}" if keep_existing else ""
    unfinished = directory.with_name(f".{directory.name}{unique}.unfinished")
    try:
        if is_writer:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        barrier()
        yield unfinished
        barrier()
        if is_writer:
            before_rename(unfinished)
            if keep_existing:
                rename_unless_exists(unfinished, directory)
            else:
                replace_directory(unfinished, directory)
        barrier()
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def rename_unless_exists(new: Path, name: Path) -> None:
    """Rename the directory `new` to `name`; if that exists, remove `new`."""
    try:
        os.rename(new, name)
    except OSError:
        if not name.exists():
            raise
        shutil.rmtree(new, ignore_errors=True)


def replace_directory(new: Path, old: Path) -> None:
    """Rename `new` to `old`; a directory that already has this name is removed last."""
    gone = old.with_name(f".{old.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if old.exists():
        os.rename(old, gone)
    os.rename(new, old)
    sync(old.parent)
    shutil.rmtree(gone, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, have reached the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open directories
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextlib.contextmanager
def lock(path: Path, message: str) -> Iterator[None]:
    """Hold the lock file `path`; raises `UserError(message)` if another process holds it.

    The system releases the lock when the process ends, however it ends.
    """
    from filelock import FileLock, Timeout

    try:
        held = FileLock(path).acquire(timeout=0)
    except Timeout:
        raise UserError(message) from None
    with held:
        yield


def check_writable(directory: Path, remedy: str) -> None:
    """Raise `UserError` if `directory` can be neither written nor created; creates nothing.

    Called before long work, so that no result is lost because it cannot be stored. `remedy` ends the message.
    """
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"{existing} is a file, not a directory; {remedy}")
    try:
        # trying is the only sure way: disks fill up, mounts are read-only, and root may write anywhere
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(f"cannot write to {existing} ({error.strerror}); {remedy}") from None


def check_new_directory(directory: Path, remedy: str) -> None:
    """`check_writable`, and raise `UserError` if `directory` contains files."""
    check_writable(directory, remedy)
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"{directory} exists and is not empty; {remedy}, or delete it")
