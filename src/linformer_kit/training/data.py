"""Reads files, directories and Hub datasets of any supported format into splits of rows."""

import glob
import json
import logging
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, time
from pathlib import Path
from typing import Any, TypeAlias

import datasets

from ..errors import UserError
from ..models.options_linformer import nearest_of
from .config import DataConfig, RunConfig
from .sources import (
    Source,
    check_files,
    encoding_without_bom,
    find_sources,
    open_decompressed,
    split_roles,
    suffix_of,
)

# independent of the seed of the run: all runs are evaluated on the same examples
SPLIT_SEED = 0

Rows: TypeAlias = Any  # a datasets.Dataset, or when streaming a datasets.IterableDataset

ENCODING_REMEDY = "set data.encoding (latin-1, cp1252, …) for text, CSV and TSV files, or convert the file with iconv"


# reading


def read_splits(config: RunConfig) -> dict[str, Rows]:
    """Read the splits `train`, `validation` and, if there is one, `test`."""
    data = config.data
    sources = find_sources(data, config.task)
    if sources is None:
        splits = {role: read_hub(data, split) for role, split in hub_splits(data).items()}
    else:
        roles = split_roles(data, list(sources))
        splits = {role: read_sources(sources[split], data, f"{role} split") for role, split in roles.items()}
    for role, rows in splits.items():
        check_columns(rows, config, role)
    if "validation" not in splits:
        splits["train"], splits["validation"] = split_validation(splits["train"], config)
    if data.max_examples is not None:
        splits["train"] = limit_examples(splits["train"], data.max_examples, config)
    return splits


def read_sources(sources: list[Source], data: DataConfig, what: str) -> Rows:
    """Read the rows of some files; `what` names them in errors."""
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # its readers log errors that `read_error` reports
    parts = []
    for source in sources:
        check_files(source)
        try:
            rows = load_dataset(
                **builder_options(source, data),
                data_files=[glob.escape(str(path)) for path in source.files],  # names are treated as patterns
                split="train",
                cache_dir=str(Path(data.cache).expanduser() / "datasets"),
                streaming=data.streaming,
            )
        except Exception as error:  # from pandas, pyarrow or a codec
            raise read_error(source, data, error) from error
        # the JSON reader does not check the encoding
        if source.format == "jsonl" and not data.streaming and (wrong := find_encoding_error(source, data)):
            raise wrong
        if source.label is not None:
            rows = rows.add_column("label", [source.label] * len(rows))
        parts.append(rows)
    with translate_stream_errors():  # a stream is read to find its columns
        rows = datasets.concatenate_datasets(parts)
    if not data.streaming and len(rows) == 0:
        raise UserError(
            f"the {what} has no rows: {', '.join(str(path) for source in sources for path in source.files)}"
        )
    return rows


def load_dataset(**options: Any) -> Rows:
    """`datasets.load_dataset`, but Ctrl-C is not reported as an error in the data."""
    try:
        return datasets.load_dataset(**options)
    except Exception as error:
        if not isinstance(cause := root_cause(error), Exception):
            raise cause from None
        raise


def builder_options(source: Source, data: DataConfig) -> dict[str, Any]:
    """Arguments of `datasets.load_dataset` for a format."""
    table: dict[str, Any] = {
        "encoding": data.encoding,
        "keep_default_na": False,  # the texts "NA" and "null" stay texts
        "converters": {name: str for name in asdict(data.columns).values() if name is not None},  # 007 stays 007
        "index_col": False,  # otherwise an extra field in a row shifts the columns
    }
    if data.header:
        table["names"] = data.header
    sample = "document" if source.label is not None else data.sample
    builders: dict[str, dict[str, Any]] = {
        "text": {"path": "text", "encoding": encoding_without_bom(data.encoding), "sample_by": sample},
        "csv": {"path": "csv", **table},
        # quotation marks have no meaning in TSV
        "tsv": {"path": "csv", "sep": "\t", "quoting": 3, **table},
        "jsonl": {"path": "json"},
        "parquet": {"path": "parquet"},
    }
    return builders[source.format]


def read_stream(rows: Iterable[Any]) -> Iterator[Any]:
    """The rows of a stream; errors in the data are raised as `UserError`."""
    with translate_stream_errors():
        yield from rows


@contextmanager
def translate_stream_errors() -> Iterator[None]:
    """Turn errors of the readers of a stream into `UserError`."""
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"the stream contains the byte 0x{byte:02x}, which is not {error.encoding}; {ENCODING_REMEDY}"
        ) from error
    except Exception as error:  # from pandas, pyarrow, gzip or the network
        raise UserError(
            f"the stream cannot be read to the end: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def read_error(source: Source, data: DataConfig, error: Exception) -> UserError:
    """The error for a file that cannot be read."""
    if source.format != "parquet" and (wrong := find_encoding_error(source, data) or find_json_error(source)):
        return wrong
    files = ", ".join(str(path) for path in source.files)
    if "corresponds to no data" in str(error):  # message of `datasets`
        return UserError(f"{files} has no rows")
    return UserError(f"{files} cannot be read as {source.format}: {' '.join(str(root_cause(error)).split())}")


def root_cause(error: BaseException) -> BaseException:
    """The first error in a chain of causes."""
    return error if error.__cause__ is None else root_cause(error.__cause__)


def find_encoding_error(source: Source, data: DataConfig) -> UserError | None:
    """Find a byte that is not in the encoding, or a truncated file."""
    encoding = "utf-8" if source.format == "jsonl" else data.encoding
    for path in source.files:
        number = 0
        try:
            with open_decompressed(path) as file:
                for line in file:
                    number += 1
                    line.decode(encoding)
        except UnicodeDecodeError as wrong:
            byte = wrong.object[wrong.start]
            return UserError(f"{path}, line {number}: the byte 0x{byte:02x} is not {encoding}; {ENCODING_REMEDY}")
        except (OSError, EOFError, zlib.error) as wrong:
            return UserError(f"{path} cannot be read to the end: {wrong}")
    return None


def find_json_error(source: Source) -> UserError | None:
    """Find a line that is not JSON."""
    for path in source.files:
        if source.format != "jsonl" or suffix_of(path) == ".json":  # may be one value on many lines
            continue
        with open_decompressed(path) as file:
            for number, line in enumerate(file, start=1):
                try:
                    json.loads(line)
                except ValueError as wrong:
                    if line.strip():
                        return UserError(f"{path}, line {number}: not JSON ({wrong}); fix or remove the line")
    return None


def read_hub(data: DataConfig, split: str) -> Rows:
    """Read a split of a dataset on the Hub."""
    try:
        return load_dataset(
            path=data.path,
            name=data.name,
            split=split,
            revision=data.revision,
            streaming=data.streaming,
            cache_dir=str(Path(data.cache).expanduser() / "datasets"),
        )
    except Exception as error:  # no network, no such name, no such configuration
        raise hub_error(data, error) from None


def hub_splits(data: DataConfig) -> dict[str, str]:
    """The role of each split of a Hub dataset."""
    try:
        found = datasets.get_dataset_split_names(data.path, data.name, revision=data.revision)
    except Exception as error:
        raise hub_error(data, error) from None
    return split_roles(data, found)


def hub_error(data: DataConfig, error: Exception) -> UserError:
    return UserError(
        f"data.path is {data.path!r}: there is no such file or directory, and reading it from the Hugging Face Hub "
        f"failed ({type(error).__name__}: {' '.join(str(error).split())[:300]}); for local files, set "
        "data.path=DIRECTORY"
    )


# columns


def required_columns(config: RunConfig) -> dict[str, str]:
    """The columns that a task needs, by configuration key."""
    columns = config.data.columns
    if config.task == "classification":
        pair = {"data.columns.pair": columns.pair} if columns.pair else {}
        return {"data.columns.text": columns.text, **pair, "data.columns.label": columns.label}
    if config.task == "translation":
        return {"data.columns.source": columns.source, "data.columns.target": columns.target}
    return {"data.columns.text": columns.text}


def check_columns(rows: Rows, config: RunConfig, role: str) -> None:
    """Raise `UserError` if a required column is missing."""
    present = rows.column_names
    for key, name in required_columns(config).items():
        if key == "data.columns.label" and role == "test":
            continue  # labels may be secret; `prepare` then skips the split
        if present is not None and top_column(name, present) not in present:
            hint = nearest_of(name, present)
            header = "; files without a header need data.header" if header_may_be_data(present, config) else ""
            raise UserError(
                f"{key} is {name!r}, but the {role} split has the columns {', '.join(present)}{hint}{header}"
            )


def top_column(name: str, present: list[str]) -> str:
    """The top-level column of a dotted name; the name itself if it is a column."""
    return name if name in present else name.split(".")[0]


def header_may_be_data(present: list[str], config: RunConfig) -> bool:
    """Whether the first row of a table may have been read as its header."""
    return config.data.header is None and any(" " in name or name.isdigit() for name in present)


def column(batch: dict[str, list], name: str) -> list:
    """A column of a batch of rows; `translation.en` selects the key `en` of the column `translation`.

    >>> column({"translation": [{"en": "one", "de": "eins"}]}, "translation.en")
    ['one']
    """
    first, *rest = name.split(".") if name not in batch else [name]
    values = batch[first]
    for key in rest:
        for value in values:
            if not isinstance(value, dict) or key not in value:
                found = f"has the keys {', '.join(value)}" if isinstance(value, dict) else f"is {value!r}"
                raise UserError(f"some rows have no column {name!r}: there, {first!r} {found}")
        values = [value[key] for value in values]
    return values


def texts(batch: dict[str, list], name: str) -> list[str]:
    """A column of texts; other scalars are converted, missing values raise `UserError`."""
    values = column(batch, name)
    for value in values:
        if value is None:
            raise UserError(f"the column {name!r} has rows without a value; remove or fill them")
        if isinstance(value, dict | list):
            hint = f"; did you mean '{name}.{next(iter(value))}'?" if isinstance(value, dict) and value else ""
            raise UserError(f"the column {name!r} contains {type(value).__name__}s, not texts{hint}")
    return [value if isinstance(value, str) else to_text(value) for value in values]


def to_text(value: Any) -> str:
    """Convert a value to text; `datasets` parses JSON strings that look like dates.

    >>> to_text(7), to_text(datetime(2024, 1, 1)), to_text(datetime(2024, 1, 1, 9))
    ('7', '2024-01-01', '2024-01-01 09:00:00')
    """
    is_date = isinstance(value, datetime) and value.time() == time()
    return str(value.date() if is_date else value)


def iterate_texts(rows: Rows, names: list[str], batch_size: int = 1000) -> Iterator[str]:
    """All texts of some columns."""
    for batch in read_stream(rows.iter(batch_size)):
        for name in names:
            yield from texts(batch, name)


# splits


def is_language_model(task: str) -> bool:
    """Whether the task uses running text, whose order matters."""
    return task in ("masked-lm", "causal-lm", "denoising")


def split_validation(rows: Rows, config: RunConfig) -> tuple[Rows, Rows]:
    """Split off a validation set: random rows, or the end of running text; returns (train, validation)."""
    data = config.data
    if isinstance(rows, datasets.IterableDataset):
        return rows.skip(data.streaming_validation), rows.take(data.streaming_validation)
    size = round(len(rows) * data.validation_share)
    if not 1 <= size < len(rows):
        raise UserError(
            f"data.validation_share is {data.validation_share}: of {len(rows)} rows, {max(0, len(rows) - size)} are "
            f"for training and {size} for validation; both need one. Provide a validation split, or change the share"
        )
    if is_language_model(config.task):
        return rows.select(range(len(rows) - size)), rows.select(range(len(rows) - size, len(rows)))
    parts = rows.train_test_split(test_size=size, seed=SPLIT_SEED)
    return parts["train"], parts["test"]


def limit_examples(rows: Rows, count: int, config: RunConfig) -> Rows:
    """At most `count` rows: the first ones of running text, otherwise a random sample."""
    if isinstance(rows, datasets.IterableDataset):
        return rows.take(count)
    if not is_language_model(config.task):
        rows = rows.shuffle(seed=SPLIT_SEED)
    return rows.select(range(min(count, len(rows))))
