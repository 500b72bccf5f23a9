"""`linformer plot`: which pictures come of what was given, and where they go."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..plots.style import save
from .inputs import Given, read_inputs
from .output import check_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
# what somebody may want, and matplotlib could write, but a README cannot show
OTHER_SUFFIXES = (".pdf", ".eps", ".ps", ".jpg", ".jpeg", ".gif", ".tif", ".tiff", ".webp")
OF_TABLES = ("costs", "paper-table")
OF_RUNS = ("learning", "quality", "sharing")
OF_ONE_MODEL = ("heads", "slots")


def plot(given: list[Path], what: str | None, text: str | None, output: Path) -> list[Path]:
    """Draw, and write PNG and SVG into the folder `output`, or the one picture into the file of that name; what was written."""
    is_file = output.suffix.lower() in SUFFIXES and not output.is_dir()
    if output.suffix.lower() in OTHER_SUFFIXES:
        raise UserError(f"--output is {output}; a picture is a .png or .svg, and any other name is a folder")
    folder = output.parent if is_file else output
    check_output(output, folder)
    pictures = figures(given, what, text)
    if is_file and len(pictures) > 1:
        raise UserError(
            f"{output} is one file, but {len(pictures)} pictures come of this: {', '.join(pictures)}; give a folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in pictures.items():
        for path in [output] if is_file else [folder / f"{name}{suffix}" for suffix in SUFFIXES]:
            save(figure, path)
            written.append(path)
    return written


def figures(given: Sequence[Path], what: str | None = None, text: str | None = None) -> "dict[str, Figure]":
    """The pictures by short names. Without `what`: costs of tables, learning of runs."""
    if text is not None and what not in OF_ONE_MODEL:
        raise UserError(
            "--text is for --what heads, and for --what slots of a dynamic projection; add one, or leave the text out"
        )
    read = read_inputs(given)
    kinds = [what] if what else ["costs"] * bool(read.tables) + ["learning"] * bool(read.runs)
    if what:
        check_kinds(read, what)
    elif read.models:
        raise UserError(
            f"{read.models[0]} is a saved model; give it alone, and what to draw of it: --what heads or --what slots"
        )
    return {**{kind: figure_of(kind, read, text) for kind in kinds}, **draw_spectra(list(read.spectra.values()))}


def draw_spectra(folders: list[Path]) -> "dict[str, Figure]":
    """The pictures of folders that `linformer spectrum` has written."""
    if len(folders) > 1:
        raise UserError(f"{len(folders)} spectra were given, whose pictures have the same names; give one at a time")
    if not folders:
        return {}
    from ..plots.spectrum import draw_spectrum

    return draw_spectrum(folders[0])


def check_kinds(given: Given, what: str) -> None:
    """Refuse what does not go into the picture, instead of leaving it out."""
    if given.spectra:
        raise UserError(
            f"{next(iter(given.spectra))} holds a spectrum, which has pictures of its own; leave --what out"
        )
    if what in OF_TABLES and (others := [*(run.folder for run in given.runs), *given.models]):
        raise UserError(
            f"{what} comes from tables of `linformer compare`, but {others[0]} is a folder; remove it, or --what"
        )
    if what not in OF_TABLES and given.tables:
        raise UserError(
            f"{what} comes from folders of runs, but {next(iter(given.tables))} is a table; remove it, or --what"
        )
    if what in OF_RUNS and given.models:
        raise UserError(
            f"{what} comes from folders of runs, but {given.models[0]} is a saved model alone; give the run's folder"
        )
    if what in OF_ONE_MODEL and (count := len(given.runs) + len(given.models)) > 1:
        raise UserError(f"{what} shows one model, but {count} folders were given; give one run or saved model")


def figure_of(what: str, given: Given, text: str | None) -> "Figure":
    """One picture."""
    if what == "costs":
        from ..plots.costs import draw_costs

        return draw_costs(given.tables)
    if what == "paper-table":
        from ..bench.paper_table import cells, draw

        rows = [row for table in given.tables.values() for row in table]
        if not (found := cells(rows)):
            raise UserError(
                "there is no encoder of linformer-kit in the table; run `linformer compare --preset paper-table-3`"
            )
        return draw(found, rows[0])
    if what in OF_RUNS:
        from .learning import draw_learning, draw_quality, draw_sharing

        return {"learning": draw_learning, "quality": draw_quality, "sharing": draw_sharing}[what](given.runs)
    from .weights import draw_heads, draw_slots, load

    model = load(given.models[0], None) if given.models else load(given.runs[0].folder, given.runs[0].config)
    return {"heads": draw_heads, "slots": draw_slots}[what](model, text)
