"""The inputs of `linformer plot` and `linformer report`: tables of `linformer compare`, runs, saved models, spectra."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..csv_tables import Row
from ..errors import UserError
from ..plots.costs import complete_rows

if TYPE_CHECKING:  # tables can be drawn without the packages that runs need
    from ..training.config import RunConfig


@dataclass(frozen=True)
class Run:
    """A run; `result` is empty until it is finished, `evaluation` until it is evaluated."""

    folder: Path
    name: str
    config: "RunConfig"
    metrics: list[dict[str, Any]]
    result: dict[str, Any]
    evaluation: dict[str, Any]

    @property
    def is_finished(self) -> bool:
        return bool(self.result)


@dataclass(frozen=True)
class Inputs:
    """Each kind in the order given; tables and spectra by name."""

    tables: dict[str, list[Row]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    models: list[Path] = field(default_factory=list)
    spectra: dict[str, Path] = field(default_factory=dict)


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Read all inputs; duplicates are read once."""
    inputs = Inputs()
    different = list({path.resolve(): path for path in paths}.values())
    for path, name in zip(different, short_names(different), strict=True):
        if path.is_file():
            inputs.tables[name] = read_table(path)
        elif (path / "config.yaml").is_file():
            inputs.runs.append(read_run(path, name))
        elif is_model(path):
            inputs.models.append(path)
        elif is_spectrum(path):
            inputs.spectra[name] = path
        elif path.is_dir():
            raise UserError(
                f"{path} is neither a run (no config.yaml), nor a saved Linformer (no config.json of one), nor a "
                "spectrum; give one of these"
            )
        else:
            raise UserError(f"{path} does not exist; give tables of `linformer compare`, or directories of runs")
    return inputs


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as few as make them unique; whole paths would show the user's machine.

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
    return complete_rows(rows)


def read_run(folder: Path, name: str) -> Run:
    """A run, finished or not."""
    from ..training.progress import read_metrics
    from ..training.run import RunFolder, check_format, stored_config

    check_format(folder)
    run = RunFolder(folder)
    metrics = read_metrics(run.metrics) if run.metrics.is_file() else []
    result = read_json(run.result) if run.is_finished else {}
    return Run(folder, name, stored_config(folder), metrics, result, read_json(run.evaluation))


def read_json(path: Path) -> dict[str, Any]:
    """The keys of a JSON file of a run; empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: not a JSON object; train or evaluate again, or omit the run")
    return found


def is_model(folder: Path) -> bool:
    """Whether a directory holds a saved Linformer."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "linformer"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_spectrum(folder: Path) -> bool:
    """Whether a directory holds the tables of `linformer spectrum`."""
    from ..analysis.tables import CURVES, LAYERS, RANKS

    return all((folder / name).is_file() for name in (CURVES, RANKS, LAYERS))
