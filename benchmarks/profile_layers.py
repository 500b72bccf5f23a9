"""Where the time of a forward pass goes, and the choices inside the layers against their alternatives (docs/log.md).

python benchmarks/profile_layers.py    # five minutes; writes results/choices.csv and profile.csv
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
import typer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from linformer_kit import LinformerAttention
from linformer_kit.bench.implementations import make_workload
from linformer_kit.bench.layers import layer_call
from linformer_kit.bench.measure import Phases, hold_memory, seconds_of, time_interleaved
from linformer_kit.bench.point import FULL, OURS, Point
from linformer_kit.csv_tables import write_rows
from linformer_kit.models import attention_linformer, encoder_linformer

RESULTS = Path(__file__).parent.parent / "results"
BATCH, LENGTH, WIDTH, HEADS, LONG = 2, 4096, 512, 8, 65536
Call = Callable[[], object]
PROFILED = (
    *(Point("layer", "forward", OURS, LENGTH, rows, BATCH) for rows in (32, 128)),
    Point("encoder", "forward", OURS, LENGTH, 128, 1),
    *(Point("encoder", "forward", name, LENGTH, None, 1) for name in (FULL, "nystromformer")),
)
# what operators do; those that are not listed are few and fast
KINDS = {
    "products": ("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm"),
    "fused attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    **{"softmax": ("aten::_softmax",), "activation": ("aten::gelu",), "norms": ("aten::native_layer_norm",)},
    "element-wise and copies": ("aten::add", "aten::copy_", "aten::cat", "aten::mul", "aten::div", "aten::sub"),
}


def make_layer(projected_length: int, projection: str = "linear", length: int = LENGTH) -> LinformerAttention:
    sizes = {"max_length": length, "projected_length": projected_length}
    return LinformerAttention(WIDTH, HEADS, projection=projection, **sizes).eval()


def alternatives() -> dict[str, dict[str, Call]]:
    """Everything that is timed: for each choice, the calls of its alternatives."""
    x, long_x = (torch.randn(BATCH, length, WIDTH) for length in (LENGTH, LONG))
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH // 2]])
    inner, outer = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(rows: int, projection: str = "linear", **options: object) -> Call:
        return layer_call(partial(make_layer(rows, projection), **options), x, "forward")

    def ordered(rows: int, keys: str, queries: str) -> Call:
        orders = {"_key_order": lambda *_: keys, "_query_order": lambda *_: queries}
        return patch.multiple(LinformerAttention, **orders)(forward(rows))

    def chunks(rows: int) -> dict[str, Call]:
        return {
            f"{n:,} queries at a time": patch.object(attention_linformer, "QUERY_CHUNK", n)(forward(rows))
            for n in (512, 1024, 4096, 8192)
        }

    @torch.no_grad()
    def feed_forward() -> object:
        return encoder_linformer.feed_forward(x, inner, F.gelu, outer)

    def memory(rows: int, step: str) -> dict[str, Call]:
        call = layer_call(make_layer(rows, length=LONG), long_x, step)
        return {"new every time": partial(in_memory, call, kept=False), "kept": partial(in_memory, call, kept=True)}

    return {
        **{
            f"order of the products, K={rows}": {
                f"{keys}, {queries}": ordered(rows, keys, queries)
                for keys in ("sequence first", "features first")
                for queries in ("per head", "folded")
            }
            for rows in (32, 64, 128)
        },
        "softmax, per head, K=128": {"fused": forward(128), "in separate steps": forward(128, fused=False)},
        "chunks of queries, per head, K=128": chunks(128),
        "chunks of queries, folded, K=32": chunks(32),
        "feed-forward, 4C wide": {
            f"{n:,} rows at a time": patch.object(encoder_linformer, "ROW_CHUNK", n)(feed_forward)
            for n in (256, 512, 1024, 2048, BATCH * LENGTH)
        },
        "padding, K=128": {"without a mask": forward(128), "with a mask": forward(128, mask=mask)},
        "projections, K=128": {name: forward(128, name) for name in ("linear", "dynamic", "conv", "mean", "max")},
        f"memory, N={LONG:,}, K=32, forward": memory(32, "forward"),
        f"memory, N={LONG:,}, K=128, training": memory(128, "training"),
    }


def in_memory(call: Call, kept: bool) -> Phases:
    """Time a call in new memory, as glibc provides it, or in memory that an earlier call has left."""
    hold_memory(kept)
    call()
    return seconds_of(call)


def choices() -> list[dict[str, str]]:
    """The table choices.csv."""
    found = []
    for choice, calls in alternatives().items():
        timings = time_interleaved(calls, most_rounds=15)
        seconds = {name: timing.median or 0 for name, timing in timings.items()}
        found += [
            {"choice": choice, "alternative": name, "milliseconds": f"{1e3 * median:.4g}"}
            | {"ratio": f"{median / min(seconds.values()):.2f}"}
            for name, median in seconds.items()
        ]
    return found


def profiles(calls: int = 5) -> list[dict[str, str]]:
    """The table profile.csv."""
    found = []
    for point in PROFILED:
        call = make_workload(point).call
        call()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(calls):
                call()
        events = [event for event in profiled.key_averages() if event.device_type == DeviceType.CPU]
        spent = {kind: sum(e.self_cpu_time_total for e in events if e.key in keys) for kind, keys in KINDS.items()}
        total = sum(event.self_cpu_time_total for event in events)
        spent["other"] = total - sum(spent.values())
        rows = "" if point.projected_length is None else f" K={point.projected_length}"
        model = {"model": f"{point.subject}, {point.implementation}{rows}"}
        found += [
            {**model, "operators": kind, "milliseconds": f"{1e-3 * time / calls:.3g}", "share": f"{time / total:.0%}"}
            for kind, time in spent.items()
            if time
        ]
    return found


def main() -> None:
    """Write both tables."""
    write_rows(RESULTS / "choices.csv", choices())
    write_rows(RESULTS / "profile.csv", profiles())


if __name__ == "__main__":
    typer.run(main)
