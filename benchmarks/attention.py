"""Speed and memory of the attention layers beside other packages: `make bench`.

Writes to results/: attention.csv (length × K × implementation), attention_growth.csv (our layer up to 262,144 tokens),
attention_causal.csv (the causal layer), attention_share.csv (our layer beside a GEMM), attention_machine.json,
attention_targets.csv and the pictures attention.png and attention_growth.png. Every point is kept as soon as it is measured:
stop at any time, run again to go on.

- Layers of a point have the same weights and are compared with a float64 evaluation before they are timed.
- Times are medians over rounds; every round calls each implementation with each K once, in an order that changes.
- Times are those in memory that the process holds already: glibc is told not to give it back (`hold_memory`).
- Memory is the peak above what was resident before the call (weights and input stand outside), each in a fresh process in which
  every freed tensor goes back to the system at once.
- The share of the GEMM rate is `plan(...).multiply_adds / seconds`, divided by the multiply-adds per second of a large float32
  matrix product, the faster of 2048 × 2048 × 2048 and 8192 × 512 × 512; our layers and the two products take turns; medians all.
"""

from pathlib import Path
from typing import Annotated

import typer
from attention_summary import summarise
from attention_sweep import CAUSAL, COMPLETE, GROWTH, MACHINE, MAIN, QUICK, SHARE, Benchmark

from linformer_kit.bench.machine import describe_machine, layer_dependencies
from linformer_kit.bench.run import Program, run_program

RESULTS = Path(__file__).resolve().parent.parent / "results"
PROGRAM = Program(
    results=RESULTS,
    machine_file=MACHINE,
    tables=(MAIN, GROWTH, CAUSAL, SHARE),
    sweeps=(COMPLETE, QUICK),
    make=Benchmark,
    describe=lambda: describe_machine(layer_dependencies()),
    summarise=summarise,
)


def main(
    output: Annotated[Path, typer.Option(help="Folder for CSVs and pictures.")] = RESULTS,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier measurements.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Only draw and print what has been measured.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny sweep, to try the benchmark itself; needs --output.")
    ] = False,
) -> None:
    """Measure time and memory of the attention layers beside other packages."""
    run_program(PROGRAM, output, fresh, summary, quick)


if __name__ == "__main__":
    typer.run(main)
