"""The table of `linformer compare`: one row per point, with all that its number depends on."""

import csv
from pathlib import Path

from ..csv_tables import Row
from ..errors import UserError
from .measure import MEASURED

# what a point is
KEYS = ("subject", "step", "implementation", "length", "projected_length", "batch")
# what came of it; `note` says why there is no number, `time_limit` how long a call was allowed to take
FOUND = (*MEASURED, "memory_status", "peak_mib", "time_limit", "note")
# what it depends on besides: `package` is the version of the implementation's own package
FACTS = (
    *("hidden_size", "num_heads", "num_layers", "sharing", "target_length", "tokens", "device"),
    *("package", "linformer-kit", "torch", "transformers", "python", "code"),
    *("cpu", "cores", "threads", "memory_gib", "system", "date"),
)
COLUMNS = (*KEYS, *FOUND, *FACTS)


def read_points(path: Path) -> list[Row]:
    """The rows of a table of `linformer compare`, as text; `projected_length` is empty where nothing is projected."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), tuple(reader.fieldnames or ())
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file in UTF-8, so it cannot be a CSV of `linformer compare`") from None
    if columns != COLUMNS:
        missing = [name for name in COLUMNS if name not in columns]
        what = f"it lacks the column {missing[0]}" if missing else "its columns differ"
        raise UserError(f"{path} is not a table of this version of `linformer compare`: {what}; measure again with it")
    return rows
