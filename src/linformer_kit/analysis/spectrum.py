"""`linformer spectrum`: the rank of a model's attention, as in Figure 1 of the paper, and the K it suggests."""

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ..csv_tables import Row
from ..errors import UserError
from ..files import check_writable, write_text
from ..formatting import progress_bar, say
from ..plots.spectrum import draw_spectrum
from ..plots.style import save
from .attention_weights import Encoder, attention_on, cut_pieces, load_encoder, read_text_file
from .singular_values import Curves, is_causal, share_curves
from .tables import read_tables, write_tables


def spectrum(
    model: str, texts: list[Path], length: int, pieces: int, error: float, output: Path, console: Console
) -> None:
    """Measure; write tables, figures and the suggested K to `output`; print a summary."""
    if not 0 < error < 1:
        raise UserError(f"--error is {error}; it must be larger than 0 and less than 1, such as 0.05")
    check_writable(output, "choose another directory with --output")
    read = [read_text_file(path) for path in texts]
    encoder = load_encoder(model)
    cut = cut_pieces(encoder, read, length, pieces)
    if (len(cut), len(cut[0])) != (pieces, length):
        say(console, f"The text is short: measuring {len(cut)} × {len(cut[0])} tokens instead of {pieces} × {length}.")
    curves, causal = measure(encoder, cut, console)
    output.mkdir(parents=True, exist_ok=True)
    write_tables(output, curves, error, model=encoder.name, length=len(cut[0]), pieces=len(cut))
    layers, rows, source = read_tables(output)
    write_suggestion(rows, source, error, output / "projected_length.yaml")
    for name, figure in draw_spectrum(layers, source).items():
        for suffix in (".png", ".svg"):
            save(figure, output / f"{name}{suffix}")
    print_summary(rows, source, error, causal, console)
    say(console, f"Tables, figures and projected_length.yaml are in {output}")


def measure(encoder: Encoder, pieces: list[list[int]], console: Console) -> tuple[list[Curves], bool]:
    """The curves of all layers, averaged over the pieces, and whether the attention is causal."""
    found: list[list[Curves]] = []
    causal = True
    with progress_bar(console, "singular values", len(pieces)) as advance:
        for piece in pieces:  # the weights of one piece at a time are in memory
            weights = attention_on(encoder, piece)
            causal = causal and is_causal(weights)
            found.append([share_curves(weights_HNM) for weights_HNM in weights])
            advance("")
    return [np.mean(curves, axis=0) for curves in zip(*found, strict=True)], causal


def write_suggestion(layers: list[Row], source: str, error: float, path: Path) -> None:
    """K per layer as the `model` section of a configuration."""
    lengths = [int(row["projected_length"]) for row in layers]
    write_text(
        path,
        f"# linformer spectrum, {source}: K that holds {1 - error:.6g} of the sum of the singular values, "
        "mean over heads\n"
        f'# linformer train CONFIG model.num_hidden_layers={len(lengths)} "model.projected_length={lengths}"\n'
        f"model:\n  projected_length: {lengths}\n",
    )


def print_summary(layers: list[Row], source: str, error: float, causal: bool, console: Console) -> None:
    """The table of layers, and what the suggestion means."""
    table = Table("layer", "90%", "95%", "99%", "kept by N/4", "suggested K", box=None, padding=(0, 2, 0, 0))
    for row in layers:
        table.add_row(*row.values())
    say(console, f"{source}: number of singular values that hold 90, 95 and 99% of their sum, mean over heads")
    console.print(table)
    say(
        console,
        f"Suggested K: the best rank-K approximation loses at most {error:.6g} of the sum, on average over heads and "
        "pieces. This does not guarantee quality: the best approximation differs between texts, while E is one matrix "
        "for all texts.",
    )
    if causal:
        say(
            console,
            "The attention is causal; projected_length applies to encoders, so the suggestion is for an encoder with "
            "as many layers.",
        )
