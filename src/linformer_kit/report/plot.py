"""`linformer plot`: which figures the inputs allow, and where they are written."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..bench.paper_table import cells
from ..errors import UserError
from ..files import check_writable
from ..plots.costs import draw_costs
from ..plots.paper_table import draw_paper_table
from ..plots.style import save
from .inputs import Inputs, read_inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
# formats that matplotlib can write, but a README cannot show
OTHER_SUFFIXES = (".pdf", ".eps", ".ps", ".jpg", ".jpeg", ".gif", ".tif", ".tiff", ".webp")
OF_TABLES = ("costs", "paper-table")
OF_RUNS = ("learning", "quality", "sharing")
OF_ONE_MODEL = ("heads", "slots")
CHOOSE_OUTPUT = "choose another directory with --output"


def plot(paths: list[Path], what: str | None, text: str | None, output: Path) -> list[Path]:
    """Draw, and write PNG and SVG to the directory `output`, or one figure to the file `output`; returns the files."""
    is_file = output.suffix.lower() in SUFFIXES and not output.is_dir()
    if output.suffix.lower() in OTHER_SUFFIXES:
        raise UserError(f"--output is {output}; pass a .png or .svg file, or a directory")
    folder = output.parent if is_file else output
    check_writable(folder, CHOOSE_OUTPUT)
    pictures = figures(paths, what, text)
    if is_file and len(pictures) > 1:
        raise UserError(
            f"--output is the file {output}, but there are {len(pictures)} figures: {', '.join(pictures)}; "
            "pass a directory"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in pictures.items():
        for path in [output] if is_file else [folder / f"{name}{suffix}" for suffix in SUFFIXES]:
            save(figure, path)
            written.append(path)
    return written


def figures(paths: Sequence[Path], what: str | None = None, text: str | None = None) -> "dict[str, Figure]":
    """Figures by name. Without `what`: costs of tables, learning of runs, and the figures of a spectrum."""
    if text is not None and what not in OF_ONE_MODEL:
        raise UserError(
            "--text requires --what heads, or --what slots with a dynamic projection; add one of these, or omit --text"
        )
    inputs = read_inputs(paths)
    if what:
        check_inputs(inputs, what)
        return {what: make_figure(what, inputs, text)}
    if inputs.models:
        raise UserError(f"{inputs.models[0]} is a saved model; choose its figure with --what heads or --what slots")
    if (count := len(inputs.spectra)) > 1:
        raise UserError(f"{count} spectra were given, whose figures have the same names; pass one at a time")
    kinds = ["costs"] * bool(inputs.tables) + ["learning"] * bool(inputs.runs)
    found = {kind: make_figure(kind, inputs, text) for kind in kinds}
    for layers, _, source in inputs.spectra.values():
        from ..plots.spectrum import draw_spectrum

        found |= draw_spectrum(layers, source)
    return found


def check_inputs(inputs: Inputs, what: str) -> None:
    """Reject inputs that the figure does not show, instead of ignoring them."""
    kinds: dict[str, list] = {
        "a table": list(inputs.tables),
        "a run": [run.folder for run in inputs.runs],
        "a saved model": inputs.models,
        "a spectrum": list(inputs.spectra),
    }
    shown = ["a table"] if what in OF_TABLES else ["a run"] if what in OF_RUNS else ["a run", "a saved model"]
    for kind, found in kinds.items():
        if found and kind not in shown:
            raise UserError(
                f"--what {what} requires {' or '.join(shown)}, but {found[0]} is {kind}; omit it, or --what"
            )
    if what in OF_ONE_MODEL and (count := len(inputs.runs) + len(inputs.models)) > 1:
        raise UserError(f"--what {what} shows one model, but {count} were given; pass one run or saved model")


def make_figure(what: str, inputs: Inputs, text: str | None) -> "Figure":
    if what == "costs":
        return draw_costs(inputs.tables)
    if what == "paper-table":
        rows = [row for table in inputs.tables.values() for row in table]
        if not (found := cells(rows)):
            raise UserError("the table has no encoder of linformer-kit; run `linformer compare --preset paper-table-3`")
        return draw_paper_table(found, rows[0])
    if what in OF_RUNS:
        from .series import draw_learning, draw_quality, draw_sharing

        return {"learning": draw_learning, "quality": draw_quality, "sharing": draw_sharing}[what](inputs.runs)
    from .weights import draw_heads, draw_slots, load_model

    run = None if inputs.models else inputs.runs[0]
    model = load_model(run.folder, run.config) if run else load_model(inputs.models[0], None)
    return {"heads": draw_heads, "slots": draw_slots}[what](model, text)
