"""Reading: files, folders and hub data sets become splits of rows, whatever they were stored as."""

import codecs
import glob
import gzip
import json
import logging
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, time
from pathlib import Path
from typing import IO, Any, TypeAlias

import datasets

from ..errors import UserError
from ..models.options_linformer import nearest_of
from .config import DataConfig, RunConfig
from .sources import Source, find_sources, split_roles, suffix_of

# the same for every run, so that runs with other seeds are measured on the same examples
SPLIT_SEED = 0

Rows: TypeAlias = Any  # a datasets.Dataset, or when streaming a datasets.IterableDataset


# reading


def read_splits(config: RunConfig) -> dict[str, Rows]:
    """`train`, `validation` and, if there is one, `test`."""
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
        splits["train"], splits["validation"] = carve(splits["train"], config)
    if data.max_examples is not None:
        splits["train"] = first_examples(splits["train"], data.max_examples, config)
    return splits


def read_sources(sources: list[Source], data: DataConfig, what: str) -> Rows:
    """The rows of some files."""
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what its readers log before they raise, `diagnosis` says
    parts = []
    for source in sources:
        check_files(source)
        try:
            rows = load_dataset(
                **builder_of(source, data),
                data_files=[glob.escape(str(path)) for path in source.files],  # it takes names for patterns
                split="train",
                cache_dir=str(Path(data.cache).expanduser() / "datasets"),
                streaming=data.streaming,
            )
        except Exception as error:  # the readers of `datasets` raise whatever pandas, pyarrow or the codec raised
            raise diagnosis(source, data, error) from error
        if (
            source.format == "jsonl" and not data.streaming and (wrong := wrong_bytes(source, data))
        ):  # its reader does not look
            raise wrong
        if source.label is not None:
            rows = rows.add_column("label", [source.label] * len(rows))
        parts.append(rows)
    with errors_of_a_stream():  # the first rows tell what the columns are
        rows = datasets.concatenate_datasets(parts)
    if not data.streaming and len(rows) == 0:
        raise UserError(
            f"the {what} has no rows: {', '.join(str(path) for source in sources for path in source.files)}"
        )
    return rows


def load_dataset(**options: Any) -> Rows:
    """What `datasets` reads. It takes Ctrl-C for an error of the data, which it is not."""
    try:
        return datasets.load_dataset(**options)
    except Exception as error:
        if not isinstance(cause := cause_of(error), Exception):
            raise cause from None
        raise


def builder_of(source: Source, data: DataConfig) -> dict[str, Any]:
    """How `datasets` reads a format."""
    table: dict[str, Any] = {
        "encoding": data.encoding,
        "keep_default_na": False,  # a text that happens to be "NA" or "null" is a text
        "converters": {name: str for name in asdict(data.columns).values() if name is not None},  # and 007 is not 7
        "index_col": False,  # a row with a field too many does not push the others aside
    }
    if data.header:
        table["names"] = data.header
    sample = "document" if source.label is not None else data.sample
    builders: dict[str, dict[str, Any]] = {
        "text": {"path": "text", "encoding": without_mark(data.encoding), "sample_by": sample},
        "csv": {"path": "csv", **table},
        # a quotation mark between tabs is only a quotation mark
        "tsv": {"path": "csv", "sep": "\t", "quoting": 3, **table},
        "jsonl": {"path": "json"},
        "parquet": {"path": "parquet"},
    }
    return builders[source.format]


def readable(rows: Iterable[Any]) -> Iterator[Any]:
    """The rows of a stream, which is read while it is used."""
    with errors_of_a_stream():
        yield from rows


@contextmanager
def errors_of_a_stream() -> Iterator[None]:
    """Errors of the readers of a stream as what a person can do about them."""
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"the stream holds the byte 0x{byte:02x}, which is not {error.encoding}; set data.encoding (latin-1, cp1252, …) for "
            "text, CSV and TSV files, or convert the files with iconv"
        ) from error
    except Exception as error:  # whatever pandas, pyarrow, gzip or the network raised
        raise UserError(
            f"the stream cannot be read to its end: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def without_mark(encoding: str) -> str:
    """The encoding that passes over the mark with which some programs begin a file in UTF-8."""
    return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding


def open_plain(path: Path) -> IO[bytes]:
    """A file's bytes, unpacked."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def check_files(source: Source) -> None:
    """Refuse what is empty or damaged before any library stumbles over it."""
    for path in source.files:
        try:
            with open_plain(path) as file:
                if not file.read(1):
                    raise UserError(f"{path} is empty")
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise UserError(f"{path} is not a whole gzip file: {error}") from None


def diagnosis(source: Source, data: DataConfig, error: Exception) -> UserError:
    """What a person can do about a file that could not be read."""
    if source.format != "parquet" and (wrong := wrong_bytes(source, data) or wrong_json(source)):
        return wrong
    files = ", ".join(str(path) for path in source.files)
    if "corresponds to no data" in str(error):  # in the words of `datasets`
        return UserError(f"{files} has no rows")
    return UserError(f"{files} cannot be read as {source.format}: {' '.join(str(cause_of(error)).split())}")


def cause_of(error: BaseException) -> BaseException:
    """The error behind all errors."""
    return error if error.__cause__ is None else cause_of(error.__cause__)


def wrong_bytes(source: Source, data: DataConfig) -> UserError | None:
    """Where a file is not in its encoding, or does not end as it should."""
    encoding = "utf-8" if source.format == "jsonl" else data.encoding
    for path in source.files:
        number = 0
        try:
            with open_plain(path) as file:
                for line in file:
                    number += 1
                    line.decode(encoding)
        except UnicodeDecodeError as wrong:
            byte = wrong.object[wrong.start]
            return UserError(
                f"{path}, line {number}: the byte 0x{byte:02x} is not {encoding}; set data.encoding (latin-1, cp1252, …) for text, "
                "CSV and TSV files, or convert the file with iconv"
            )
        except (OSError, EOFError, zlib.error) as wrong:
            return UserError(f"{path} cannot be read to its end: {wrong}")
    return None


def wrong_json(source: Source) -> UserError | None:
    """Which line of a file of JSON lines is not JSON."""
    for path in source.files:
        if source.format != "jsonl" or suffix_of(path) == ".json":  # that may be one value over many lines
            continue
        with open_plain(path) as file:
            for number, line in enumerate(file, start=1):
                try:
                    json.loads(line)
                except ValueError as wrong:
                    if line.strip():
                        return UserError(f"{path}, line {number}: this is not JSON ({wrong}); mend or remove the line")
    return None


def read_hub(data: DataConfig, split: str) -> Rows:
    """A split of a data set on the hub."""
    try:
        return load_dataset(
            path=data.path,
            name=data.name,
            split=split,
            revision=data.revision,
            streaming=data.streaming,
            cache_dir=str(Path(data.cache).expanduser() / "datasets"),
        )
    except Exception as error:  # no network, no such name, no such configuration: all end here
        raise hub_error(data, error) from None


def hub_splits(data: DataConfig) -> dict[str, str]:
    """Which of a hub data set's splits is for what."""
    try:
        found = datasets.get_dataset_split_names(data.path, data.name, revision=data.revision)
    except Exception as error:
        raise hub_error(data, error) from None
    return split_roles(data, found)


def hub_error(data: DataConfig, error: Exception) -> UserError:
    return UserError(
        f"data.path is {data.path!r}: no file or folder here, and reading it from the Hugging Face hub failed "
        f"({type(error).__name__}: {' '.join(str(error).split())[:300]}); give data.path=FOLDER with local files"
    )


# columns


def wanted_columns(config: RunConfig) -> dict[str, str]:
    """The columns a task needs, by what they are for."""
    columns = config.data.columns
    if config.task == "classification":
        pair = {"data.columns.pair": columns.pair} if columns.pair else {}
        return {"data.columns.text": columns.text, **pair, "data.columns.label": columns.label}
    if config.task == "translation":
        return {"data.columns.source": columns.source, "data.columns.target": columns.target}
    return {"data.columns.text": columns.text}


def check_columns(rows: Rows, config: RunConfig, role: str) -> None:
    """Refuse a column that is not there."""
    present = rows.column_names
    for key, name in wanted_columns(config).items():
        if key == "data.columns.label" and role == "test":
            continue  # its answers may be kept by others; `prepare` flatten_keys it out then
        if present is not None and top_column(name, present) not in present:
            hint = nearest_of(name, present)
            header = "; files without a heading need data.header" if is_guess(present, config) else ""
            raise UserError(
                f"{key} is {name!r}, but the {role} split has the columns {', '.join(present)}{hint}{header}"
            )


def top_column(name: str, present: list[str]) -> str:
    """The column that holds what is meant: a dot reaches into it, unless the name has a dot itself."""
    return name if name in present else name.split(".")[0]


def is_guess(present: list[str], config: RunConfig) -> bool:
    """Whether the first row of a table may have been taken for its heading."""
    return config.data.header is None and any(" " in name or name.isdigit() for name in present)


def column(batch: dict[str, list], name: str) -> list:
    """A column of a batch of rows; `translation.en` is the key `en` of the column `translation`.

    >>> column({"translation": [{"en": "one", "de": "eins"}]}, "translation.en")
    ['one']
    """
    first, *rest = name.split(".") if name not in batch else [name]
    values = batch[first]
    for key in rest:
        for value in values:
            if not isinstance(value, dict) or key not in value:
                holds = f"has the keys {', '.join(value)}" if isinstance(value, dict) else f"is {value!r}"
                raise UserError(
                    f"the column {name!r} is not everywhere in the data: where {key!r} should be, {first!r} {holds}"
                )
        values = [value[key] for value in values]
    return values


def texts(batch: dict[str, list], name: str) -> list[str]:
    """A column of texts; numbers are written out, nothing is an error."""
    values = column(batch, name)
    for value in values:
        if value is None:
            raise UserError(f"the column {name!r} has rows without a value; remove them, or give them a text")
        if isinstance(value, dict | list):
            hint = f"; did you mean '{name}.{next(iter(value))}'?" if isinstance(value, dict) and value else ""
            raise UserError(f"the column {name!r} holds {type(value).__name__}s, not texts{hint}")
    return [value if isinstance(value, str) else written(value) for value in values]


def written(value: Any) -> str:
    """A value that is no text as one; what JSON calls a text and looks like a date comes as a date.

    >>> written(7), written(datetime(2024, 1, 1)), written(datetime(2024, 1, 1, 9))
    ('7', '2024-01-01', '2024-01-01 09:00:00')
    """
    is_date = isinstance(value, datetime) and value.time() == time()
    return str(value.date() if is_date else value)


def all_texts(rows: Rows, names: list[str], batch_size: int = 1000) -> Iterator[str]:
    """Every text of some columns."""
    for batch in readable(rows.iter(batch_size)):
        for name in names:
            yield from texts(batch, name)


# splits


def is_language_model(task: str) -> bool:
    """Whether the examples are running text, whose order means something."""
    return task in ("masked-lm", "causal-lm", "denoising")


def carve(rows: Rows, config: RunConfig) -> tuple[Rows, Rows]:
    """(train, validation) where there was no validation split: random rows, or the end of a running text."""
    data = config.data
    if isinstance(rows, datasets.IterableDataset):
        return rows.skip(data.streaming_validation), rows.take(data.streaming_validation)
    size = round(len(rows) * data.validation_share)
    if not 1 <= size < len(rows):
        raise UserError(
            f"data.validation_share is {data.validation_share}: of {len(rows)} rows that flatten_keys {max(0, len(rows) - size)} "
            f"to train on and {size} to validate; both need one at least. Give a validation split, or another share"
        )
    if is_language_model(config.task):
        return rows.select(range(len(rows) - size)), rows.select(range(len(rows) - size, len(rows)))
    parts = rows.train_test_split(test_size=size, seed=SPLIT_SEED)
    return parts["train"], parts["test"]


def first_examples(rows: Rows, count: int, config: RunConfig) -> Rows:
    """So many rows: of running text the first, else drawn."""
    if isinstance(rows, datasets.IterableDataset):
        return rows.take(count)
    if not is_language_model(config.task):
        rows = rows.shuffle(seed=SPLIT_SEED)
    return rows.select(range(min(count, len(rows))))
