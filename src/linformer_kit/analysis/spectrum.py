"""`linformer spectrum`: of how low a rank the attention of a model is, as in Figure 1 of the paper, and which K that suggests."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..csv_tables import as_text, write_rows
from ..errors import UserError
from ..files import write_atomically
from ..plots.spectrum import CURVES, LAYERS, RANKS, draw_spectrum, what_was_measured
from ..plots.style import save
from ..report.output import check_output
from ..report.texts import read_text
from .attention_weights import Encoder, attention_on, cut_pieces, load_encoder
from .singular_values import KEPT, Curves, curves_of, is_causal, needed, points_to_show, quarter, suggested

PICTURES = (".png", ".svg")


@dataclass(frozen=True)
class Spectrum:
    """What was found: for every layer the curves of its heads, (heads, k), averaged over the pieces."""

    name: str
    layers: list[Curves]
    length: int
    pieces: int
    is_causal: bool

    @property
    def source(self) -> str:
        return what_was_measured(self.name, self.pieces, self.length)


def spectrum(
    model: str, texts: list[Path], length: int, pieces: int, error: float, output: Path, console: Console
) -> None:
    """Measure, write tables, pictures and the suggestion to `output`, and tell it."""
    if not 0 < error < 1:
        raise UserError(f"--error is {error}; it must be larger than 0 and less than 1, such as 0.05")
    check_output(output, output)
    read = [read_text(path) for path in texts]
    encoder = load_encoder(model)
    cut = cut_pieces(encoder, read, length, pieces)
    if (len(cut), len(cut[0])) != (pieces, length):
        say(
            console,
            f"The text is short: {len(cut)} × {len(cut[0])} tokens are measured instead of {pieces} × {length}.",
        )
    found = measure(encoder, cut, console)
    output.mkdir(parents=True, exist_ok=True)
    write_tables(found, error, output)
    write_suggestion(found, error, output / "projected_length.yaml")
    for name, figure in draw_spectrum(output).items():
        for suffix in PICTURES:
            save(figure, output / f"{name}{suffix}")
    tell(found, error, output, console)


# measuring


def measure(encoder: Encoder, pieces: list[list[int]], console: Console) -> Spectrum:
    """The curves of all layers, averaged over the pieces, of which one at a time is in memory."""
    sums: list[Curves] = []
    causal = True
    for piece in track(pieces, console):
        weights = attention_on(encoder, piece)
        causal = causal and is_causal(weights)
        curves = [curves_of(weights_HNM) for weights_HNM in weights]
        sums = [total + more for total, more in zip(sums, curves, strict=True)] if sums else curves
    return Spectrum(encoder.name, [total / len(pieces) for total in sums], len(pieces[0]), len(pieces), causal)


def track(pieces: list[list[int]], console: Console) -> Iterator[list[int]]:
    """The pieces, with a bar on a terminal that goes away at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield from progress.track(pieces, description="singular values")


# writing


def write_tables(found: Spectrum, error: float, folder: Path) -> None:
    """spectrum.csv: the curves, thinned out; ranks.csv: every head; layers.csv: every layer."""
    heads = [
        (layer, head, curve) for layer, curves in enumerate(found.layers, 1) for head, curve in enumerate(curves, 1)
    ]
    write_rows(
        folder / CURVES,
        [
            {"layer": str(layer), "head": str(head), "k": str(k), "share": as_text(float(curve[k - 1]))}
            for layer, head, curve in heads
            for k in points_to_show(len(curve))
        ],
    )
    same = {"model": found.name, "length": str(found.length), "pieces": str(found.pieces)}
    write_rows(
        folder / RANKS,
        [{"layer": str(layer), "head": str(head), **same, **ranks(curve)} for layer, head, curve in heads],
    )
    write_rows(folder / LAYERS, rows_of_layers(found.layers, error))


def ranks(curve: Curves) -> dict[str, str]:
    """The k that keep 90, 95 and 99 %."""
    return {name: str(needed(curve, kept)) for name, kept in KEPT.items()}


def rows_of_layers(layers: list[Curves], error: float) -> list[dict[str, str]]:
    """A row for every layer, of the mean over its heads."""
    return [
        {
            "layer": str(number),
            **ranks(curves.mean(axis=0)),
            "kept_by_a_quarter": f"{curves.mean(axis=0)[quarter(curves.shape[-1]) - 1]:.3f}",
            "projected_length": str(k),
        }
        for number, (curves, k) in enumerate(zip(layers, suggested(layers, error), strict=True), start=1)
    ]


def write_suggestion(found: Spectrum, error: float, path: Path) -> None:
    """K per layer as the section `model` of a configuration."""
    lengths = suggested(found.layers, error)
    text = (
        f"# linformer spectrum, {found.source}: K that keeps {1 - error:.6g} of the sum of the singular values, mean over heads\n"
        f'# linformer train CONFIG model.num_hidden_layers={len(lengths)} "model.projected_length={lengths}"\n'
        f"model:\n  projected_length: {lengths}\n"
    )
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


# telling


def tell(found: Spectrum, error: float, folder: Path, console: Console) -> None:
    """The table of layers, and what the suggestion means."""
    table = Table("layer", "90 %", "95 %", "99 %", "kept by N/4", "suggested K", box=None, padding=(0, 2, 0, 0))
    for row in rows_of_layers(found.layers, error):
        table.add_row(*row.values())
    say(
        console,
        f"{found.source}: how many of the largest singular values hold 90, 95 and 99 % of their sum, mean over heads",
    )
    console.print(table)
    say(
        console,
        f"Suggested K: the best matrices of rank K would lose {error:.6g} of the sum at most, on average over heads and pieces. "
        "A guide and no promise of quality: the best one differs from text to text, while E is one matrix for all texts.",
    )
    if found.is_causal:
        say(
            console,
            "The attention is causal; projected_length is for encoders, so the suggestion is for an encoder of as many layers.",
        )
    say(console, f"Tables, pictures and projected_length.yaml in {folder}")


def say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)
