"""The table of `linformer compare`: one row per point and phase, with everything that its numbers depend on."""

from collections.abc import Iterable
from pathlib import Path

from ..csv_tables import Row, Table, read_table
from .measure import MEASURED
from .point import BASELINES, KEYS, current_name

# `note` is the reason for a missing number, `time_limit` is in seconds, `share` is the fraction of a phase in a call
FOUND = (
    *(*MEASURED, "memory_status", "peak_mib"),
    *("multiply_adds", "cache_bytes", "megabytes", "share", "time_limit", "note"),
)
# `package` is the version of the implementation's package, `code` a fingerprint of ours, `tokens` is per batch
FACTS = (
    *("hidden_size", "num_heads", "num_layers", "sharing", "target_length", "tokens", "device"),
    *("package", "linformer-kit", "torch", "transformers", "python", "code"),
    *("cpu", "cores", "threads", "memory_gib", "system", "date"),
)
COLUMNS = (*KEYS, *FOUND, *FACTS)
# a row and its baseline are equal in these columns; a baseline without projection has no K, blocks or sharing
SAME = (
    *("subject", "step", "backend", "precision", "length", "batch", "phase"),
    *("hidden_size", "num_heads", "num_layers", "target_length", "device"),
)


def open_table(path: Path) -> Table:
    return Table(path, KEYS, (*FOUND, *FACTS), renamed)


def read_points(path: Path, phases: bool = False) -> list[Row]:
    """The rows of a table as text, with every column of `COLUMNS`; rows of phases are included with `phases`.

    `projected_length` is empty for implementations without projection.
    """
    return [renamed(row) for row in read_table(path, COLUMNS) if phases or not row["phase"]]


def renamed(row: Row) -> Row:
    """A row with former names of implementations and steps replaced."""
    return {column: current_name(column, value) for column, value in row.items()}


def baseline_name(rows: Iterable[Row]) -> str | None:
    """The implementation that the rows of one subject, step and backend are compared with: the first of `BASELINES`.

    >>> baseline_name([{"implementation": name} for name in ("linformer-kit", "longformer", "bert-eager")])
    'bert-eager'
    """
    found = {row["implementation"] for row in rows}
    return next((name for name in BASELINES if name in found), None)


def baseline_of(row: Row, rows: Iterable[Row], implementation: str | None) -> Row | None:
    """The row of another implementation that this row is compared with; None if there is none.

    It has the same variant if possible. Full attention has no projection, so a variant that names one has no equal.
    """
    found = {
        other["variant"]: other
        for other in rows
        if other["implementation"] == implementation and all(other[name] == row[name] for name in SAME)
    }
    return found.get(row["variant"]) or found.get("")
