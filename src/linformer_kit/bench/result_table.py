"""The table of `linformer compare`: one row per point and phase, with everything that its numbers depend on."""

import csv
from pathlib import Path

from ..csv_tables import Row, Table
from ..errors import UserError
from .measure import MEASURED
from .point import KEYS, RENAMED

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
# columns that earlier versions did not write, with their values in such rows
ADDED = {
    **dict.fromkeys(("variant", "block_length", "phase"), ""),
    **dict.fromkeys(("multiply_adds", "cache_bytes", "megabytes", "share"), ""),
    "backend": "torch",
}


def open_table(path: Path) -> Table:
    return Table(path, KEYS, (*FOUND, *FACTS))


def read_points(path: Path, phases: bool = False) -> list[Row]:
    """The rows of a table of this or an earlier version, as text; rows of phases are included with `phases`.

    `projected_length` is empty for implementations without projection.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), tuple(reader.fieldnames or ())
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a UTF-8 text file, so it cannot be a CSV of `linformer compare`") from None
    missing = [name for name in COLUMNS if name not in columns and name not in ADDED]
    unknown = [name for name in columns if name not in COLUMNS]
    if missing or unknown:
        what = f"it lacks the column {missing[0]}" if missing else f"it has an unknown column {unknown[0]}"
        raise UserError(f"{path} is not a table of `linformer compare`: {what}; measure again with this version")
    added = {name: value for name, value in ADDED.items() if name not in columns}
    rows = [{**row, **added, "implementation": RENAMED.get(name := row["implementation"], name)} for row in rows]
    return rows if phases else [row for row in rows if not row["phase"]]
