"""Where the time of a forward pass goes, and the choices inside the layers against their alternatives (docs/log.md).

python benchmarks/profile_layers.py    # five minutes; writes results/choices.csv, parts.csv and models_profile.csv
"""

import math
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from linformer_kit import LinformerAttention
from linformer_kit.bench.implementations import make_workload
from linformer_kit.bench.layers import Gemm, layer_call
from linformer_kit.bench.measure import hold_memory, seconds_of, time_interleaved
from linformer_kit.bench.point import Point
from linformer_kit.csv_tables import write_rows
from linformer_kit.models import attention_linformer, encoder_linformer
from linformer_kit.models.attention_linformer import QUERY_CHUNK
from linformer_kit.models.multihead_linformer import softmax_attention

RESULTS = Path(__file__).parent.parent / "results"
BATCH, LENGTH, WIDTH, HEADS, LONG = 2, 4096, 512, 8, 65536
Call = Callable[[], object]
# what operators do; those that are not listed are few and fast
KINDS = {
    "products": ("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm"),
    "fused attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    **{"softmax": ("aten::_softmax",), "activation": ("aten::gelu",), "norms": ("aten::native_layer_norm",)},
    "sums, copies and the like": ("aten::add", "aten::copy_", "aten::cat", "aten::mul", "aten::div", "aten::sub"),
}


def make_layer(projected_length: int, projection: str = "linear", length: int = LENGTH) -> LinformerAttention:
    sizes = {"max_length": length, "projected_length": projected_length}
    return LinformerAttention(WIDTH, HEADS, projection=projection, **sizes).eval()


def patched(call: Call, *patches: tuple[object, str, object]) -> Call:
    """The call with attributes replaced while it runs."""

    def run() -> object:
        with ExitStack() as stack:
            for one in patches:
                stack.enter_context(patch.object(*one))
            return call()

    return run


def questions() -> dict[str, dict[str, Call]]:
    """Everything that is timed: a question, and the answers to choose from."""
    x = torch.randn(BATCH, LENGTH, WIDTH)
    query, keys, values = (torch.randn(BATCH, HEADS, rows, WIDTH // HEADS) for rows in (LENGTH, 128, 128))
    windows, taps = x.unflatten(1, (128, -1)), torch.randn(LENGTH // 128, WIDTH)
    mask, attention = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH // 2]]), make_layer(128)
    inner, outer = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def written_out(query: Tensor) -> Tensor:
        return (query @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1) @ values

    def forward(rows: int, *patches: tuple[object, str, object], projection: str = "linear") -> Call:
        return patched(layer_call(make_layer(rows, projection), x, "forward"), *patches)

    def ordered(rows: int, keys: str, queries: str) -> Call:
        chosen = (("_key_order", lambda *_: keys), ("_query_order", lambda *_: queries))
        return forward(rows, *((LinformerAttention, name, choose) for name, choose in chosen))

    def chunks(rows: int) -> dict[str, Call]:
        sizes = (512, 1024, 4096, 8192)
        return {f"{n:,} queries at a time": forward(rows, (attention_linformer, "QUERY_CHUNK", n)) for n in sizes}

    return {
        **{
            f"order of the products, K={k}": {
                f"{keys}, {queries}": ordered(k, keys, queries)
                for keys in ("sequence first", "features first")
                for queries in ("per head", "folded")
            }
            for k in (32, 64, 128)
        },
        "softmax(Q keysᵀ) values, K=128": {
            "fused": lambda: F.scaled_dot_product_attention(query, keys, values),
            "written out": lambda: written_out(query),
            "written out, 1,024 queries at a time": lambda: [written_out(chunk) for chunk in query.split(1024, dim=2)],
        },
        "chunks of queries, per head, K=128": chunks(128),
        "chunks of queries, folded, K=32": chunks(32),
        "feed-forward, 4C wide": {
            f"{n:,} rows at a time": patched(
                lambda: encoder_linformer.feed_forward(x, inner, F.gelu, outer), (encoder_linformer, "ROW_CHUNK", n)
            )
            for n in (256, 512, 1024, 2048, BATCH * LENGTH)
        },
        "conv, K=128": {
            "multiply and add up": lambda: (windows * taps).sum(dim=2),
            "einsum": lambda: torch.einsum("bkwc,wc->bkc", windows, taps),
        },
        "padding, K=128": {"without a mask": lambda: attention(x), "with a mask": lambda: attention(x, mask=mask)},
        "projections, K=128": {
            name: forward(128, projection=name) for name in ("linear", "dynamic", "conv", "mean", "max")
        },
    }


def allocator(projected_length: int, step: str) -> dict[str, float]:
    """Median seconds over a long input in new memory every time, as glibc provides it, and in kept memory."""
    call = layer_call(make_layer(projected_length, length=LONG), torch.randn(BATCH, LONG, WIDTH), step)
    seconds: dict[str, list[float]] = {"new every time": [], "kept": []}
    for _ in range(3):
        for answer, all_seconds in seconds.items():
            hold_memory(answer == "kept")
            call()
            all_seconds.append(seconds_of(call)[""])
    return {answer: statistics.median(all_seconds) for answer, all_seconds in seconds.items()}


def choices() -> list[dict[str, str]]:
    """The table choices.csv."""
    with torch.no_grad():
        timings = {question: time_interleaved(calls, most_rounds=15) for question, calls in questions().items()}
    medians = {question: {name: one.median or 0 for name, one in found.items()} for question, found in timings.items()}
    medians |= {f"memory, N={LONG:,}, K={k}, {s}": allocator(k, s) for k, s in ((32, "forward"), (128, "training"))}
    return [
        {"question": question, "answer": answer, "milliseconds": f"{1e3 * seconds:.4g}"}
        | {"ratio": f"{seconds / min(answers.values()):.2f}"}
        for question, answers in medians.items()
        for answer, seconds in answers.items()
    ]


def parts_of(attention: LinformerAttention, x: Tensor, rows: int) -> dict[str, tuple[int, Call]]:
    """Multiply-adds and call of each part."""
    projection, context, columns = attention.projection, attention.project(x), HEADS * rows
    assert projection is not None
    x_chunks, per_column = x.view(-1, 1, QUERY_CHUNK, WIDTH), BATCH * LENGTH * WIDTH
    shortened, fold = BATCH * WIDTH * projection.multiply_adds_per_channel(LENGTH), 2 * BATCH * rows * WIDTH * WIDTH
    plan = attention.plan(LENGTH, BATCH)
    parts: dict[str, tuple[int, Call]] = {
        "all of it": (plan.multiply_adds, lambda: attention(x)),
        "Eᵀ X": (shortened, lambda: projection(x)),
        "Eᵀ X, keys and values": (shortened + fold, lambda: attention.project(x)),
    }
    if plan.queries == "folded":
        keys, values, bias = (torch.randn(1, *size) for size in ((WIDTH, columns), (columns, WIDTH), (1, columns)))
        weights, outputs = torch.randn(1, QUERY_CHUNK, HEADS, rows), torch.empty_like(x_chunks)
        return parts | {
            "W_Q keysᵀ and values W_O": (fold, lambda: attention._folded(context, need_weights=False)),
            "scores": (per_column * columns, lambda: [torch.baddbmm(bias, chunk, keys) for chunk in x_chunks]),
            "softmax": (0, lambda: [weights.softmax(dim=-1) for _ in x_chunks]),
            "weights · values": (
                per_column * columns,
                lambda: [torch.bmm(weights.flatten(2), values, out=output) for output in outputs],
            ),
        }
    keys, values = (torch.randn(1, HEADS, rows, WIDTH // HEADS) for _ in range(2))
    query = torch.randn(1, QUERY_CHUNK, HEADS, WIDTH // HEADS).transpose(1, 2)
    return parts | {
        "X W_Q": (per_column * WIDTH, lambda: [attention.query(chunk) for chunk in x_chunks]),
        "softmax(Q keysᵀ) values": (
            2 * per_column * rows,
            lambda: [softmax_attention(query, keys, values, None, 0.0, need_weights=False) for _ in x_chunks],
        ),
        "heads · W_O": (per_column * WIDTH, lambda: [attention.output(chunk) for chunk in x_chunks]),
    }


@torch.no_grad()
def parts() -> list[dict[str, str]]:
    """The table parts.csv."""
    x, gemm, found = torch.randn(BATCH, LENGTH, WIDTH), Gemm(Point("layer", "forward", "gemm", LENGTH, None, BATCH)), []
    for rows in (32, 128):
        attention = make_layer(rows)
        named = parts_of(attention, x, rows) | {"gemm": (math.prod(gemm.shape), lambda: gemm(x))}
        timings = time_interleaved({name: call for name, (_, call) in named.items()}, most_rounds=75, budget_seconds=30)
        seconds = {name: timing.median or 0 for name, timing in timings.items()}
        found += [
            {"layer": f"K={rows}, {attention.plan(LENGTH, BATCH).queries}", "part": name}
            | {"million multiply-adds": f"{products / 1e6:.0f}", "milliseconds": f"{1e3 * seconds[name]:.2f}"}
            | {"at the GEMM rate": f"{1e3 * products * seconds['gemm'] / named['gemm'][0]:.2f}"}
            for name, (products, _) in named.items()
        ]
    return found


def models(calls: int = 5) -> list[dict[str, str]]:
    """The table models_profile.csv."""
    found = []
    for name, rows in (("linformer-kit", 128), ("full-attention", None), ("nystromformer", None)):
        call = make_workload(Point("encoder", "forward", name, LENGTH, rows, 1)).call
        call()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(calls):
                call()
        events = [event for event in profiled.key_averages() if event.device_type == DeviceType.CPU]
        spent = {kind: sum(e.self_cpu_time_total for e in events if e.key in keys) for kind, keys in KINDS.items()}
        total = sum(event.self_cpu_time_total for event in events)
        spent["the rest"] = total - sum(spent.values())
        model = {"model": name if rows is None else f"{name} K={rows}"}
        found += [
            {**model, "operators": kind, "milliseconds": f"{1e-3 * time / calls:.3g}", "share": f"{time / total:.0%}"}
            for kind, time in spent.items()
        ]
    return found


def main() -> None:
    """Write all three tables."""
    for name, measure in (("choices", choices), ("parts", parts), ("models_profile", models)):
        write_rows(RESULTS / f"{name}.csv", measure())


if __name__ == "__main__":
    typer.run(main)
