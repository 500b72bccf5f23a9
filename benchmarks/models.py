"""Speed of whole models beside those of transformers, and of generation: `make bench`.

Writes to results/: models.csv (encoder × length × mode), models_generation.csv (decoders, and the encoder-decoder),
models_machine.json, models_targets.csv and the pictures models_forward.png, models_training.png and models_generation.png.
Every length and mode is kept as soon as it is measured: stop at any time, run again to go on.

- All encoders have 4 layers of hidden size 512 with 8 heads, an inner size of 2048 and 8192 words; float32; random ids without
  padding, and no mask. Batches hold 4096 tokens, above N=4096 one example.
- Ours, with and without projection, and BERT are compared with a plain float64 evaluation before anything is timed.
- "forward" is inference without gradients; "forward+backward" a training step without dropout and without the optimizer.
- Times are medians over rounds; every round calls each model once, in an order that changes, in memory that the process holds
  already (`hold_memory`).
- Multiply-adds are those of the layers of our encoders: what `plan` counts for attention, and 2 · N · C · I for the feed-forward.
- Generation: a prompt, or a source, is read, and then 64 tokens are generated from the cache, one after another; each phase is
  timed by itself.
"""

from pathlib import Path
from typing import Annotated

import transformers
import typer
from models_summary import summarise
from models_sweep import COMPLETE, ENCODERS, GENERATION, MACHINE, QUICK, Benchmark

from linformer_kit.bench.machine import describe_machine
from linformer_kit.bench.peer_models import model_dependencies
from linformer_kit.bench.run import Program, run_program

RESULTS = Path(__file__).resolve().parent.parent / "results"
PROGRAM = Program(
    results=RESULTS,
    machine_file=MACHINE,
    tables=(ENCODERS, GENERATION),
    sweeps=(COMPLETE, QUICK),
    make=Benchmark,
    describe=lambda: describe_machine(model_dependencies()),
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
    """Measure the time of whole models beside those of transformers, and of generation."""
    transformers.logging.set_verbosity_error()  # BigBird says at N=512 that it falls back to full attention; so do we
    run_program(PROGRAM, output, fresh, summary, quick)


if __name__ == "__main__":
    typer.run(main)
