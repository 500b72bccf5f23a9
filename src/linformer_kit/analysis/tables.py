"""The tables of a spectrum: spectrum.csv (curves), ranks.csv (heads), layers.csv (layers)."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..csv_tables import Row, as_text, read_rows, write_rows
from ..errors import UserError
from ..formatting import plural
from ..plots.spectrum import Layer
from .singular_values import SHARES, Curves, quarter, rank_for_share, stored_points, suggest_lengths

CURVES, RANKS, LAYERS = "spectrum.csv", "ranks.csv", "layers.csv"


# writing


def write_tables(directory: Path, layers: list[Curves], error: float, *, model: str, length: int, pieces: int) -> None:
    """Write the curves of the heads of every layer, (heads, k), and the K that loses at most `error` in each layer."""
    heads = [(layer, head, curve) for layer, curves in enumerate(layers, 1) for head, curve in enumerate(curves, 1)]
    points = [
        {"layer": str(layer), "head": str(head), "k": str(k), "share": as_text(float(curve[k - 1]))}
        for layer, head, curve in heads
        for k in stored_points(len(curve))
    ]
    same = {"model": model, "length": str(length), "pieces": str(pieces)}
    ranks = [{"layer": str(layer), "head": str(head), **same, **ranks_of(curve)} for layer, head, curve in heads]
    write_rows(directory / CURVES, points)
    write_rows(directory / RANKS, ranks)
    write_rows(directory / LAYERS, layer_rows(layers, error))


def ranks_of(curve: Curves) -> Row:
    """The k that hold 90, 95 and 99%."""
    return {name: str(rank_for_share(curve, share)) for name, share in SHARES.items()}


def layer_rows(layers: list[Curves], error: float) -> list[Row]:
    """A row for every layer, of the mean over its heads."""
    return [
        {
            "layer": str(number),
            **ranks_of(curves.mean(axis=0)),
            "kept_by_a_quarter": f"{curves.mean(axis=0)[quarter(curves.shape[-1]) - 1]:.3f}",
            "projected_length": str(k),
        }
        for number, (curves, k) in enumerate(zip(layers, suggest_lengths(layers, error), strict=True), start=1)
    ]


# reading


def read_tables(directory: Path) -> tuple[list[Layer], list[Row], str]:
    """The layers to draw, the rows of layers.csv, and what was measured."""
    try:
        curves, ranks, rows = (read_rows(directory / name) for name in (CURVES, RANKS, LAYERS))
        pieces, length = int(ranks[0]["pieces"]), int(ranks[0]["length"])
        source = f"{ranks[0]['model']}, {plural(pieces, 'piece')} of {length:,} tokens"
        layers = [read_layer(row, curves, ranks) for row in rows]
        if not layers:
            raise ValueError(f"{LAYERS} has no rows")
    except (csv.Error, LookupError, TypeError, ValueError) as error:  # missing columns, rows or numbers
        raise UserError(f"{directory} contains a damaged spectrum ({error}); run `linformer spectrum` again") from None
    return layers, rows, source


def read_layer(mean: Row, curves: Sequence[Row], ranks: Sequence[Row]) -> Layer:
    """A layer; raises an error of any kind if the tables lack something."""
    points = [row for row in curves if row["layer"] == mean["layer"]]
    heads = [row for row in ranks if row["layer"] == mean["layer"]]
    ks = sorted({int(row["k"]) for row in points})
    shares = np.array([float(row["share"]) for row in points]).reshape(-1, len(ks))
    if len(heads) != len(shares) or quarter(ks[-1]) not in ks or not np.isfinite(shares).all():
        raise ValueError(f"layer {mean['layer']} is incomplete")
    head_ranks = {share: [int(row[name]) for row in heads] for name, share in SHARES.items()}
    mean_ranks = {share: int(mean[name]) for name, share in SHARES.items()}
    return Layer(int(mean["layer"]), ks, shares, quarter(ks[-1]), head_ranks, mean_ranks)
