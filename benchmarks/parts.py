"""Where the time of a forward pass goes, part by part, beside what a GEMM would take: the profile of docs/log.md.

python benchmarks/parts.py        # about a minute; writes results/parts.csv
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from linformer_kit import LinformerAttention
from linformer_kit.bench.measure import gemm_calls, gemm_rate, hold_memory, time_interleaved
from linformer_kit.csv_tables import write_rows
from linformer_kit.models.attention_linformer import QUERY_CHUNK
from linformer_kit.models.multihead_linformer import softmax_attention

RESULT = Path(__file__).parent.parent / "results" / "parts.csv"
BATCH, LENGTH, WIDTH, HEADS = 2, 4096, 512, 8
CHUNKS = BATCH * LENGTH // QUERY_CHUNK


@dataclass(frozen=True)
class Part:
    """A part of the forward pass: its multiply-adds for the whole batch, and the call that is timed."""

    name: str
    multiply_adds: int
    call: Callable[[], object]


def key_parts(attention: LinformerAttention, x: Tensor, rows: int) -> list[Part]:
    """From X to K keys and values, sequence first."""
    projection = attention.projection
    assert projection is not None
    rows_BMKC, _ = projection(x)

    def keys_and_values() -> None:
        attention._project_rows(attention.key, rows_BMKC[:, projection.of_keys()])
        attention._project_rows(attention.value, rows_BMKC[:, projection.of_values()])

    return [
        Part("Eᵀ X", BATCH * WIDTH * projection.multiply_adds_per_channel(LENGTH), lambda: projection(x)),
        Part("keys and values", 2 * BATCH * rows * WIDTH * WIDTH, keys_and_values),
    ]


def folded_parts(attention: LinformerAttention, x: Tensor, rows: int) -> list[Part]:
    """`softmax((X (W_Q keysᵀ) + b_Q keysᵀ) / √D) (values W_O)`, a chunk of queries at a time."""
    context, columns = attention.project(x), HEADS * rows
    keys, values, bias = torch.randn(1, WIDTH, columns), torch.randn(1, columns, WIDTH), torch.randn(1, 1, columns)
    weights, outputs = torch.randn(1, QUERY_CHUNK, HEADS, rows), torch.empty_like(x).view(CHUNKS, 1, QUERY_CHUNK, WIDTH)
    x_chunks, one_product = x.view(CHUNKS, 1, QUERY_CHUNK, WIDTH), BATCH * LENGTH * WIDTH * columns
    return [
        Part(
            "W_Q keysᵀ and values W_O",
            2 * BATCH * rows * WIDTH * WIDTH,
            lambda: attention._folded(context, need_weights=False),
        ),
        Part("scores", one_product, lambda: [torch.baddbmm(bias, chunk, keys) for chunk in x_chunks]),
        Part("softmax", 0, lambda: [weights.softmax(dim=-1) for _ in x_chunks]),
        Part(
            "weights · values",
            one_product,
            lambda: [torch.bmm(weights.flatten(2), values, out=output) for output in outputs],
        ),
    ]


def per_head_parts(attention: LinformerAttention, x: Tensor, rows: int) -> list[Part]:
    """`softmax((X W_Q + b_Q) keysᵀ / √D) values · W_O`, a chunk of queries at a time."""
    keys, values = (torch.randn(1, HEADS, rows, WIDTH // HEADS) for _ in range(2))
    query = torch.randn(1, QUERY_CHUNK, HEADS, WIDTH // HEADS).transpose(1, 2)
    x_chunks, linear = x.view(CHUNKS, QUERY_CHUNK, WIDTH), BATCH * LENGTH * WIDTH * WIDTH
    return [
        Part("X W_Q", linear, lambda: [attention.query(chunk) for chunk in x_chunks]),
        Part(
            "softmax(Q keysᵀ) values",
            2 * BATCH * LENGTH * rows * WIDTH,
            lambda: [softmax_attention(query, keys, values, None, 0.0, need_weights=False) for _ in x_chunks],
        ),
        Part("heads · W_O", linear, lambda: [attention.output(chunk) for chunk in x_chunks]),
    ]


@torch.no_grad()
def main() -> None:
    """Time the parts of a forward pass beside a GEMM."""
    hold_memory()
    x, found = torch.randn(BATCH, LENGTH, WIDTH), []
    for rows, query_parts in track([(32, folded_parts), (128, per_head_parts)], "Timing the parts"):
        attention = LinformerAttention(WIDTH, HEADS, max_length=LENGTH, projected_length=rows).eval()
        plan = attention.plan(LENGTH, BATCH)
        whole = Part("all of it", plan.multiply_adds, lambda attention=attention: attention(x))
        parts = [whole, *key_parts(attention, x, rows), *query_parts(attention, x, rows)]
        calls = {part.name: part.call for part in parts} | gemm_calls()
        timings = time_interleaved(calls, budget_seconds=30, most_rounds=75)
        rate = gemm_rate(timings)
        assert rate is not None
        found += [
            {
                "layer": f"K={rows}, {plan.queries}",
                "part": part.name,
                "million multiply-adds": f"{part.multiply_adds / 1e6:.0f}",
                "milliseconds": f"{1e3 * (timings[part.name].median or 0):.2f}",
                "at the GEMM rate": f"{1e3 * part.multiply_adds / rate:.2f}",
            }
            for part in parts
        ]
    write_rows(RESULT, found)
    table = Table(*found[0])
    for row in found:
        table.add_row(*row.values())
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
