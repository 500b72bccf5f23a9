"""What was given on the command line, told apart: tables of `linformer compare`, folders of runs, saved models and spectra."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:  # what runs need is slow to import, and tables can be drawn without it
    from ..training.config import RunConfig

Row = dict[str, str]


@dataclass(frozen=True)
class Run:
    """A run and what it has written so far; `result` is empty until it is finished, `evaluation` until it was evaluated."""

    folder: Path
    name: str
    config: "RunConfig"
    metrics: list[dict[str, Any]]
    result: dict[str, Any]
    evaluation: dict[str, Any]


@dataclass(frozen=True)
class Given:
    """Each kind in the order given; tables and spectra by their names."""

    tables: dict[str, list[Row]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    models: list[Path] = field(default_factory=list)
    spectra: dict[str, Path] = field(default_factory=dict)


def read_inputs(paths: Sequence[Path]) -> Given:
    """Read everything that was given; what is given twice counts once."""
    given = Given()
    different = list({path.resolve(): path for path in paths}.values())
    for path, name in zip(different, short_names(different), strict=True):
        if path.is_file():
            given.tables[name] = read_table(path)
        elif (path / "config.yaml").is_file():
            given.runs.append(read_run(path, name))
        elif is_model(path):
            given.models.append(path)
        elif is_spectrum(path):
            given.spectra[name] = path
        elif path.is_dir():
            raise UserError(
                f"{path} is neither the folder of a run (no config.yaml) nor of a saved Linformer (no config.json that says so) "
                "nor of a spectrum"
            )
        else:
            raise UserError(
                f"there is no file or folder {path}; give tables of `linformer compare`, or folders of runs"
            )
    return given


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as few as tell them apart; whole paths would show whose machine it was.

    >>> short_names([Path("/a/seed1/run"), Path("/a/seed2/run")])
    ['seed1/run', 'seed2/run']
    """
    parts = [path.resolve().parts for path in paths]
    names: list[str] = []
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def read_table(path: Path) -> list[Row]:
    """The rows of a table of `linformer compare`."""
    from ..bench.result_table import read_points

    try:
        rows = read_points(path)
    except csv.Error as error:
        raise UserError(f"{path} cannot be read as a CSV of `linformer compare`: {error}") from None
    for place, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise UserError(
                f"{path} is damaged: row {place} has more or fewer values than there are columns; measure it again"
            )
    return rows


def read_run(folder: Path, name: str) -> Run:
    """A run, finished or not."""
    from ..training.progress import read_metrics
    from ..training.run import RunFolder, check_format, stored_config

    check_format(folder)
    run = RunFolder(folder)
    metrics = read_metrics(run.metrics) if run.metrics.is_file() else []
    result = read_json(run.result) if run.is_finished else {}
    return Run(folder, name, stored_config(folder), metrics, result, read_json(run.evaluation))


def number(row: Row, column: str) -> float:
    """A number of a table."""
    try:
        return float(row[column])
    except ValueError:
        where = f"{row['implementation']}, N={row['length']}"
        raise UserError(
            f"the table is damaged: {column} is {row[column]!r} in the row of {where}; measure it again"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """What a file of a run holds; nothing if it is not there."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: it holds no keys of JSON; train or evaluate again, or leave the run out")
    return found


def is_model(folder: Path) -> bool:
    """Whether a Linformer was saved there."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "linformer"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_spectrum(folder: Path) -> bool:
    """Whether `linformer spectrum` has written there."""
    return all((folder / name).is_file() for name in ("spectrum.csv", "ranks.csv", "layers.csv"))
