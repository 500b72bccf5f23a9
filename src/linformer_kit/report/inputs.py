"""The inputs of `linformer plot` and `linformer report`: tables of `linformer compare`, runs, saved models, spectra."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..csv_tables import Row
from ..errors import UserError
from ..files import read_json
from ..plots.costs import without_other_sizes

if TYPE_CHECKING:  # tables can be drawn without the packages that runs need
    from ..plots.spectrum import Layer
    from ..training.config import RunConfig

Spectrum = tuple[list["Layer"], list[Row], str]  # the layers to draw, the rows of layers.csv, and what was measured


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
    spectra: dict[str, Spectrum] = field(default_factory=dict)


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Read all inputs; duplicates are read once."""
    inputs = Inputs()
    different = list({path.resolve(): path for path in paths}.values())
    for path, name in zip(different, short_names(different), strict=True):
        if path.is_file():
            inputs.tables[name] = read_table(path)
        elif (path / "config.yaml").is_file():
            inputs.runs.append(read_run(path, name))
        elif read_json(path / "config.json").get("model_type") == "linformer":
            inputs.models.append(path)
        elif spectrum := read_spectrum(path):
            inputs.spectra[name] = spectrum
        elif path.is_dir():
            raise UserError(
                f"{path} is neither a run (no config.yaml), a saved Linformer (no config.json), nor a spectrum; "
                "pass one of these"
            )
        else:
            raise UserError(f"{path} does not exist; pass tables of `linformer compare`, or directories of runs")
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

    return [without_other_sizes(row) for row in read_points(path)]


def read_run(folder: Path, name: str) -> Run:
    """A run, finished or not."""
    from ..training.progress import read_metrics
    from ..training.run import RunFolder, check_format, stored_config

    check_format(folder)
    run = RunFolder(folder)
    metrics = read_metrics(run.metrics) if run.metrics.is_file() else []
    result = read_json(run.result) if run.is_finished else {}
    return Run(folder, name, stored_config(folder), metrics, result, read_json(run.evaluation))


def read_spectrum(folder: Path) -> Spectrum | None:
    """The tables of a directory written by `linformer spectrum`; None if it is not one."""
    from ..analysis.tables import CURVES, LAYERS, RANKS, read_tables

    is_spectrum = all((folder / name).is_file() for name in (CURVES, RANKS, LAYERS))
    return read_tables(folder) if is_spectrum else None
