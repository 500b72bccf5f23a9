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

import contextlib
import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from attention_summary import summarise
from attention_sweep import CAUSAL, COMPLETE, GROWTH, MACHINE, MAIN, QUICK, SHARE, Benchmark
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from linformer_kit.bench import peers
from linformer_kit.bench.machine import describe_machine
from linformer_kit.bench.measure import hold_memory, limit_memory
from linformer_kit.bench.table import write_atomically

RESULTS = Path(__file__).resolve().parent.parent / "results"


def fail(message: str) -> None:
    """Stop with a message."""
    print(message, file=sys.stderr)
    raise typer.Exit(1)


def require_writable(folder: Path) -> None:
    """Fail before measuring rather than after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fail(f"cannot write to {folder}: {error.strerror}; choose another folder with --output")


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Refuse a second run in one folder: each would overwrite what the other has measured, and slow it down."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"another run is measuring in {folder}; wait for it, or choose another folder with --output")
        yield
    finally:
        os.close(handle)


def start_over_if_needed(folder: Path, machine: dict, fresh: bool, console: Console) -> dict:
    """Keep earlier points only if they come from this machine, these versions and this code; gives the record that holds."""
    path = folder / MACHINE
    if path.exists() and not fresh:
        earlier = json.loads(path.read_text())
        if {**earlier, "date": ""} == {**machine, "date": ""}:
            return earlier
        changed = ", ".join(name for name in machine if name != "date" and machine[name] != earlier.get(name))
        console.print(f"{path} tells of another {changed}: measuring everything anew")
    for name in (MAIN, GROWTH, CAUSAL, SHARE):
        (folder / name).unlink(missing_ok=True)
    write_atomically(path, lambda part: part.write_text(json.dumps(machine, indent=2) + "\n"))
    return machine


def run(benchmark: Benchmark, console: Console) -> None:
    """Measure what has not been measured yet."""
    torch.manual_seed(0)
    limit_memory()
    hold_memory()
    if os.getloadavg()[0] > 0.5:
        console.print("[yellow]Other programs are running: layers with many small steps will look slower than they are.[/]")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        steps = benchmark.steps()
        task = progress.add_task("", total=len(steps))
        for step in steps:
            progress.update(task, description=step.name)
            if not step.is_done():
                for text in step.run():
                    console.print(text, highlight=False, soft_wrap=True)
            progress.advance(task)


def main(
    output: Annotated[Path, typer.Option(help="Folder for CSVs and pictures.")] = RESULTS,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier measurements.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Only draw and print what has been measured.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny sweep, to try the benchmark itself; needs --output.")] = False,
) -> None:
    """Measure time and memory of the attention layers beside other packages."""
    if summary and fresh:
        fail("--summary draws earlier measurements and --fresh forgets them: choose one")
    if quick and output.resolve() == RESULTS:
        fail("--quick would replace the results by numbers that mean nothing; give another folder with --output")
    console = Console()
    require_writable(output)
    try:
        if summary:
            if not (output / MACHINE).exists():
                fail(f"there are no measurements in {output}; run without --summary first")
            machine = json.loads((output / MACHINE).read_text())
            benchmark = Benchmark(QUICK if machine["sweep"] == QUICK.name else COMPLETE, output)
        else:
            sweep = QUICK if quick else COMPLETE
            with alone_in(output):
                machine = start_over_if_needed(output, {"sweep": sweep.name, **describe_machine()}, fresh, console)
                benchmark = Benchmark(sweep, output)
                run(benchmark, console)
    except KeyboardInterrupt:
        print(f"stopped; what was measured is kept in {output}, and the same command goes on from there", file=sys.stderr)
        raise typer.Exit(130) from None
    except (peers.MissingPeer, peers.WrongImplementation, ValueError) as error:
        fail(str(error))
    summarise(benchmark, machine, console)
    console.print(f"CSVs and pictures are in {output}")


if __name__ == "__main__":
    typer.run(main)
