"""A benchmark as a command: one run at a time in a folder, stopped at any time and taken up again, its progress shown."""

import contextlib
import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import UserError
from ..files import write_atomically
from ..formatting import format_duration
from .measure import Timing, hold_memory, limit_memory
from .peers import MissingPeer, WrongImplementation


@dataclass(frozen=True)
class Step:
    """A piece of the run that is kept when it is done."""

    name: str
    is_done: Callable[[], bool]
    run: Callable[[], Iterable[str]]  # gives lines to print


@dataclass(frozen=True)
class Program:
    """What a command measures, and where it keeps it."""

    results: Path  # the folder of the published results
    machine_file: str
    tables: tuple[str, ...]
    sweeps: tuple[Any, Any]  # complete, quick; each has a name
    make: Callable[[Any, Path], Any]  # of sweep and folder; what it gives has steps()
    describe: Callable[[], dict[str, object]]  # machine, versions, code
    summarise: Callable[[Any, dict, Console], None]


def fail(message: str) -> NoReturn:
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
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder with --output") from None


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Refuse a second run in one folder: each would overwrite what the other has measured, and slow it down."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run is measuring in {folder}; wait for it, or choose another folder with --output"
            ) from None
        yield
    finally:
        os.close(handle)


def read_machine(path: Path) -> dict:
    """The record of an earlier run."""
    try:
        return json.loads(path.read_text())
    except ValueError:
        fail(f"{path} is not a record of a run; remove it to measure anew, or choose another folder with --output")


def start_over_if_needed(program: Program, folder: Path, machine: dict, fresh: bool, console: Console) -> dict:
    """Keep earlier points only if they come from this machine, these versions and this code; gives the record that holds."""
    path = folder / program.machine_file
    if path.exists() and not fresh:
        earlier = read_machine(path)
        if {**earlier, "date": ""} == {**machine, "date": ""}:
            return earlier
        changed = ", ".join(name for name in machine if name != "date" and machine[name] != earlier.get(name))
        console.print(f"{path} tells of another {changed}: measuring everything anew")
    for name in program.tables:
        (folder / name).unlink(missing_ok=True)
    write_atomically(path, lambda part: part.write_text(json.dumps(machine, indent=2) + "\n"))
    return machine


def run_steps(steps: list[Step], console: Console) -> None:
    """Measure what has not been measured yet."""
    torch.manual_seed(0)
    limit_memory()
    hold_memory()
    if os.getloadavg()[0] > 0.5:
        console.print(
            "[yellow]Other programs are running: layers with many small steps will look slower than they are.[/]"
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(steps))
        for step in steps:
            progress.update(task, description=step.name)
            if not step.is_done():
                for text in step.run():
                    console.print(text, highlight=False, soft_wrap=True)
            progress.advance(task)


def run_program(program: Program, output: Path, fresh: bool, summary: bool, quick: bool) -> None:
    """What the command does, by its options."""
    if summary and fresh:
        fail("--summary draws earlier measurements and --fresh forgets them: choose one")
    if quick and output.resolve() == program.results:
        fail("--quick would replace the results by numbers that mean nothing; give another folder with --output")
    console = Console()
    sweeps = {sweep.name: sweep for sweep in program.sweeps}
    try:
        require_writable(output)
        if summary:
            if not (output / program.machine_file).exists():
                fail(f"there are no measurements in {output}; run without --summary first")
            machine = read_machine(output / program.machine_file)
            benchmark = program.make(sweeps[machine["sweep"]], output)
        else:
            sweep = program.sweeps[1 if quick else 0]
            with alone_in(output):
                machine = start_over_if_needed(
                    program, output, {"sweep": sweep.name, **program.describe()}, fresh, console
                )
                benchmark = program.make(sweep, output)
                run_steps(benchmark.steps(), console)
    except KeyboardInterrupt:
        print(
            f"stopped; what was measured is kept in {output}, and the same command goes on from there", file=sys.stderr
        )
        raise typer.Exit(130) from None
    except (MissingPeer, WrongImplementation, ValueError) as error:
        fail(str(error))
    program.summarise(benchmark, machine, console)
    console.print(f"CSVs and pictures are in {output}")


def in_words(point: str, timings: dict[str, Timing]) -> str:
    """One line about a point."""
    parts = [
        f"{name} {format_duration(timing.median) if timing.median else timing.status}"
        for name, timing in timings.items()
    ]
    return f"{point}: {', '.join(parts)}"
