"""Where the time of an encoder's forward pass goes: the operators of ours, of ours without projection, and of the next fastest.

python benchmarks/models_profile.py        # about a minute; writes results/models_profile.csv
"""

from pathlib import Path

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from linformer_kit.bench.measure import hold_memory
from linformer_kit.bench.peer_models import ENCODERS, NONE_SDPA, NYSTROMFORMER, Sizes, linear_name, make_model_call
from linformer_kit.csv_tables import write_rows

RESULT = Path(__file__).parent.parent / "results" / "models_profile.csv"
LENGTH, CALLS = 4096, 5
# what an operator does; those of torch that are not named here are few and quick
KINDS = {
    "products": ("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm"),
    "fused attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "softmax": ("aten::_softmax",),
    "activation": ("aten::gelu",),
    "norms": ("aten::native_layer_norm",),
    "sums, copies and the like": ("aten::add", "aten::copy_", "aten::cat", "aten::mul", "aten::div", "aten::sub"),
}


def milliseconds_by_kind(name: str) -> dict[str, float]:
    """Milliseconds of one forward pass, by what operators do."""
    sizes = Sizes()
    call = make_model_call(ENCODERS[name](LENGTH, sizes), sizes.random_ids(1, LENGTH), "forward")
    call()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(CALLS):
            call()
    operators = [event for event in profiled.key_averages() if event.device_type == DeviceType.CPU]
    total = sum(event.self_cpu_time_total for event in operators)
    spent = {
        kind: sum(event.self_cpu_time_total for event in operators if event.key in names)
        for kind, names in KINDS.items()
    }
    return {kind: 1e-3 * time / CALLS for kind, time in {**spent, "the rest": total - sum(spent.values())}.items()}


def main() -> None:
    """Profile a forward pass of three encoders."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    hold_memory()
    rows = []
    for name in (linear_name(128), NONE_SDPA, NYSTROMFORMER):
        spent = milliseconds_by_kind(name)
        total = sum(spent.values())
        rows += [
            {"model": name, "operators": kind, "milliseconds": f"{time:.3g}", "share": f"{time / total:.0%}"}
            for kind, time in spent.items()
        ]
    write_rows(RESULT, rows)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
