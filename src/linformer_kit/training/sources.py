"""Finds the files of `data.path`, their format and their splits, and opens them."""

import codecs
import gzip
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

from ..errors import UserError
from ..models.options_linformer import nearest_of
from .config import DataConfig, RunConfig

FORMATS = {
    ".txt": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
# common names of splits
ALIASES = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}


@dataclass(frozen=True)
class Source:
    """Files of one split; `label`, if not None, is the label of all of them, from the name of their directory."""

    files: tuple[Path, ...]
    format: str
    label: str | None = None


def find_sources(data: DataConfig, task: str) -> dict[str, list[Source]] | None:
    """The local files of each split; None if `data.path` is not a local path but a name on the Hub."""
    assert data.path is not None
    path = Path(data.path).expanduser()
    if path.is_file():
        return {data.train: [Source((path,), format_of(path, data))]}
    if not path.is_dir():
        looks_local = (
            path.is_absolute() or data.path.startswith((".", "~")) or len(path.parts) > 2 or suffix_of(path) in FORMATS
        )
        if looks_local:
            raise UserError(f"data.path is {data.path!r}: there is no such file or directory")
        return None
    found = {}
    for split, names in (*ALIASES.items(), (data.train, (data.train,)), (data.validation, ()), (data.test, ())):
        if split is not None and (sources := sources_of_split(path, (*names, split), data, task)):
            found[split] = sources
    if not found and (sources := sources_in(path, data, task)):  # no file is named after a split
        found[data.train] = sources
    if not found:
        raise UserError(
            f"data.path is {data.path!r}, a directory without files of the types {', '.join(FORMATS)} (or with .gz)"
        )
    return found


def sources_of_split(folder: Path, names: tuple[str, ...], data: DataConfig, task: str) -> list[Source]:
    """The files named after a split, such as train.jsonl.gz, Train-00000.parquet, imdb_test.csv, or those in train/."""
    for below in sorted(folder.iterdir()):
        if below.is_dir() and (below.name in names or below.name.lower() in names):
            return sources_in(below, data, task)
    files = [path for path in data_files(folder, data) if split_named_by(path, data) in names]
    return [Source(tuple(files), common_format(files, folder, data))] if files else []


def split_named_by(path: Path, data: DataConfig) -> str | None:
    """The split name that a file name equals, begins with or ends with."""
    known = {data.train, data.validation, data.test, *chain(*ALIASES.values())}
    stem = path.name.split(".")[0]
    words = re.split("[-_]", stem)
    return next((word for each in (stem, words[0], words[-1]) for word in (each, each.lower()) if word in known), None)


def sources_in(folder: Path, data: DataConfig, task: str) -> list[Source]:
    """All files of a directory; for classification, each subdirectory of text files is a class."""
    files = data_files(folder, data)
    below = {path.name: data_files(path, data) for path in sorted(folder.iterdir()) if path.is_dir()}
    by_class = {name: found for name, found in below.items() if found}
    # next to two or more class directories, other files are ignored, such as an index
    if task == "classification" and len(by_class) > (1 if files else 0) and all_text(chain(*by_class.values()), data):
        return [Source(tuple(found), "text", label) for label, found in by_class.items()]
    if files:
        return [Source(tuple(files), common_format(files, folder, data))]
    files = [path for deeper in sorted(folder.rglob("*")) if deeper.is_dir() for path in data_files(deeper, data)]
    return [Source(tuple(files), common_format(files, folder, data))] if files else []


def all_text(files: Iterable[Path], data: DataConfig) -> bool:
    return all(format_of(path, data) == "text" for path in files)


def common_format(files: list[Path], folder: Path, data: DataConfig) -> str:
    """The common format of some files."""
    formats = {format_of(path, data) for path in files}
    if len(formats) > 1:
        raise UserError(
            f"{folder} contains files of several formats ({', '.join(sorted(formats))}); keep one, or set data.format"
        )
    return formats.pop()


def data_files(folder: Path, data: DataConfig) -> list[Path]:
    """The data files of a directory, sorted by name."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.startswith(".") and (suffix_of(path) in FORMATS or data.format != "auto")
        if path.suffix != ".md"
    ]


def suffix_of(path: Path) -> str:
    """The file extension without `.gz`."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def format_of(path: Path, data: DataConfig) -> str:
    """The format of a file."""
    if data.format != "auto":
        return data.format
    if suffix_of(path) not in FORMATS:
        raise UserError(f"{path}: unknown file extension; allowed: {', '.join(FORMATS)}, or set data.format")
    if path.suffix == ".gz" and suffix_of(path) == ".parquet":
        raise UserError(f"{path}: Parquet files cannot be read from gzip; decompress it with gunzip")
    return FORMATS[suffix_of(path)]


# content


def encoding_without_bom(encoding: str) -> str:
    """The encoding that skips a byte order mark in UTF-8."""
    return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding


def open_decompressed(path: Path) -> IO[bytes]:
    """Open a file for reading bytes, decompressed if it is a gzip file."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def check_files(source: Source) -> None:
    """Raise `UserError` for empty or damaged files."""
    for path in source.files:
        try:
            with open_decompressed(path) as file:
                if not file.read(1):
                    raise UserError(f"{path} is empty")
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise UserError(f"{path} is not a complete gzip file: {error}") from None


# roles of splits


def split_roles(data: DataConfig, found: list[str]) -> dict[str, str]:
    """The split for each role: train, validation and test."""
    roles = {}
    for role, wanted in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        names = (wanted,) if wanted is not None else ALIASES[role]
        present = [name for name in names if name in found]
        if present:
            roles[role] = present[0]
        elif role == "train" or wanted is not None:
            hint = nearest_of(wanted, found) or f"; there are {', '.join(found)}"
            raise UserError(f"data.{role} is {wanted!r}, but {data.path!r} has no such split{hint}")
    return roles


def describe_sources(config: RunConfig) -> str:
    """The files of each role, for printing."""
    sources = find_sources(config.data, config.task)
    if sources is None:
        return f"{config.data.path} on the Hub"
    parts = []
    for role, split in split_roles(config.data, list(sources)).items():
        first, *others = [path.name for source in sources[split] for path in source.files]
        parts.append(f"{role}: {first}" + (f" and {len(others):,} more" if others else ""))
    return ", ".join(parts)
