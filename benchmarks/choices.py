"""The choices inside layers and models, each timed beside what was not chosen: the numbers of docs/log.md.

python benchmarks/choices.py        # about two minutes; writes results/choices.csv
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from linformer_kit import LinformerAttention
from linformer_kit.bench.measure import MODES, Mode, hold_memory, make_call, seconds_of, time_interleaved
from linformer_kit.csv_tables import write_rows
from linformer_kit.models import attention_linformer, encoder_linformer

RESULT = Path(__file__).parent.parent / "results" / "choices.csv"
BATCH, LENGTH, WIDTH, HEADS = 2, 4096, 512, 8
LONG = 65536
Calls = dict[str, Callable[[], object]]


def layer(projected_length: int, projection: str = "linear") -> LinformerAttention:
    """A layer of the benchmark's sizes."""
    return LinformerAttention(WIDTH, HEADS, max_length=LENGTH, projected_length=projected_length, projection=projection)


def with_orders(attention: LinformerAttention, keys: str, queries: str, x: torch.Tensor) -> Callable[[], object]:
    """The layer's forward in these orders, whatever is cheapest."""

    def call() -> object:
        with (
            torch.no_grad(),
            patch.object(LinformerAttention, "_key_order", lambda *_: keys),
            patch.object(LinformerAttention, "_query_order", lambda *_: queries),
        ):
            return attention(x)

    return call


def orders(x: torch.Tensor) -> dict[str, Calls]:
    """Every order of the products, at K where folding is far cheaper, a little cheaper, and dearer."""
    return {
        f"order of the products, K={k}": {
            f"{keys}, {queries}": with_orders(attention, keys, queries, x)
            for keys in ("sequence first", "features first")
            for queries in ("per head", "folded")
        }
        for k, attention in ((k, layer(k)) for k in (32, 64, 128))
    }


def softmax(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Calls:
    """The fused kernel, and the softmax written out."""

    def written_out(query: torch.Tensor) -> torch.Tensor:
        return (query @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1) @ values

    return {
        "fused": lambda: F.scaled_dot_product_attention(query, keys, values),
        "written out": lambda: written_out(query),
        "written out, 1,024 queries at a time": lambda: torch.cat(
            [written_out(chunk) for chunk in query.split(1024, dim=2)], dim=2
        ),
    }


def chunks(attention: LinformerAttention, x: torch.Tensor) -> Calls:
    """Queries in chunks of several sizes."""

    def call(size: int) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad(), patch.object(attention_linformer, "QUERY_CHUNK", size):
                return attention(x)

        return run

    return {f"{size:,} queries at a time": call(size) for size in (512, 1024, 4096, 8192)}


def feed_forward_rows(x: torch.Tensor) -> Calls:
    """The feed-forward of a model, for several numbers of rows at a time."""
    inner, outer = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def call(rows: int) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad(), patch.object(encoder_linformer, "ROWS", rows):
                return encoder_linformer.feed_forward(x, inner, F.gelu, outer)

        return run

    return {f"{rows:,} rows at a time": call(rows) for rows in (256, 512, 1024, 2048, BATCH * LENGTH)}


def convolution(x: torch.Tensor) -> Calls:
    """Taps applied by multiplying and adding up, and by an einsum."""
    windows, taps = x.unflatten(1, (128, -1)), torch.randn(LENGTH // 128, WIDTH)
    return {
        "multiply and add up": lambda: (windows * taps).sum(dim=2),
        "einsum": lambda: torch.einsum("bkwc,wc->bkc", windows, taps),
    }


def padding(attention: LinformerAttention, x: torch.Tensor) -> Calls:
    """What a mask costs."""
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH // 2]])

    def masked() -> object:
        with torch.no_grad():
            return attention(x, mask=mask)

    return {"without a mask": make_call(attention, x, "forward"), "with a mask": masked}


def questions() -> dict[str, Calls]:
    """Everything that is timed: a question, and the answers to choose from."""
    x = torch.randn(BATCH, LENGTH, WIDTH)
    query, keys, values = (torch.randn(BATCH, HEADS, rows, WIDTH // HEADS) for rows in (LENGTH, 128, 128))
    return {
        **orders(x),
        "softmax(Q keysᵀ) values, K=128": softmax(query, keys, values),
        "chunks of queries, per head, K=128": chunks(layer(128), x),
        "chunks of queries, folded, K=32": chunks(layer(32), x),
        "feed-forward, 4C wide": feed_forward_rows(x),
        "conv, K=128": convolution(x),
        "padding, K=128": padding(layer(128), x),
        "projections, K=128": {
            name: make_call(layer(128, name), x, "forward") for name in ("linear", "dynamic", "conv", "mean", "max")
        },
    }


def medians_of(calls: Calls) -> dict[str, float]:
    """Seconds of each call, taking turns."""
    timings = time_interleaved(calls, budget_seconds=10, most_rounds=15)
    return {answer: timing.median for answer, timing in timings.items() if timing.median}


def allocator(projected_length: int, mode: Mode) -> dict[str, float]:
    """Median seconds over a long input in new memory every time, as glibc has it with large tensors, and in memory that is kept."""
    attention = LinformerAttention(WIDTH, HEADS, max_length=LONG, projected_length=projected_length)
    call = make_call(attention, torch.randn(BATCH, LONG, WIDTH), mode)
    seconds: dict[str, list[float]] = {"new every time": [], "kept": []}
    for _ in range(3):
        for answer, all_seconds in seconds.items():
            hold_memory(answer == "kept")
            call()
            all_seconds.append(seconds_of(call))
    return {answer: statistics.median(all_seconds) for answer, all_seconds in seconds.items()}


@torch.no_grad()
def main() -> None:
    """Time the choices inside the layer beside what was not chosen."""
    medians = {question: medians_of(calls) for question, calls in track(questions().items(), "Timing the choices")}
    with torch.enable_grad():
        medians |= {
            f"memory, N={LONG:,}, K={rows}, {mode}": allocator(rows, mode)
            for rows, mode in zip((32, 128), MODES, strict=True)
        }
    rows = [
        {
            "question": question,
            "answer": answer,
            "milliseconds": f"{1e3 * seconds:.4g}",
            "ratio": f"{seconds / min(answers.values()):.2f}",
        }
        for question, answers in medians.items()
        for answer, seconds in answers.items()
    ]
    write_rows(RESULT, rows)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
