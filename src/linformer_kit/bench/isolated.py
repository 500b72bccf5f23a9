"""Measurements in worker processes: one point in isolation, or several in interleaved rounds.

`python -m linformer_kit.bench.isolated` reads a request as JSON and prints the result. A point that is wrong, too
large or too slow fails in its own process and is left out of the rounds.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..process_memory import is_out_of_memory, peak_resident
from .checks import WrongImplementation
from .implementations import check, make_workload
from .measure import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    OVER_TIME_LIMIT,
    WRONG,
    Timing,
    hold_memory,
    limit_memory,
    peak_memory,
    seconds_if_it_fits,
    time_interleaved,
)
from .point import TRAINING_SUBJECTS, Point

# seconds allowed for imports and the check, in addition to the timed call
START_SECONDS = 120.0
# glibc maps each tensor separately and returns it when freed, so the peak is that of the call and reproducible. By
# default the allocator may keep up to twice as much, depending on earlier allocations
PLAIN_ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Isolated:
    """The measurement of one point in isolation."""

    status: str
    seconds: float | None = None
    peak_bytes: int | None = None
    note: str = ""
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)  # by phase
    parameters: dict[str, list[int]] = field(default_factory=dict)  # shapes

    @property
    def peak_mib(self) -> float | None:
        return None if self.peak_bytes is None else self.peak_bytes / 2**20


def measure_isolated(point: Point, time_limit: float) -> Isolated:
    """Check a point and measure one call, in a new process; the call may take `time_limit` seconds."""
    request, seconds = {"points": [asdict(point)], "time_limit": time_limit}, START_SECONDS + 4 * time_limit
    return Isolated(**run_worker(request, PLAIN_ALLOCATION | environment_of(point), seconds))


def measure_rounds(points: Sequence[Point], seconds: float, rounds: int, hold: bool) -> dict[Point, Timing]:
    """Time points in interleaved rounds, in a new process."""
    request = {"points": [asdict(point) for point in points], "seconds": seconds, "rounds": rounds, "hold": hold}
    found = run_worker(request, environment_of(points[0]))
    if found["status"] != OK:
        return dict.fromkeys(points, Timing(**found))
    return {point: timing_from(result) for point, result in zip(points, found["timings"], strict=True)}


def timing_from(result: dict[str, Any]) -> Timing:
    phases = {phase: timing_from(timing) for phase, timing in result.pop("phases").items()}
    return Timing(**result, phases=phases)


def environment_of(point: Point) -> dict[str, str]:
    """Environment variables of the worker process."""
    if point.subject == "preparation":
        return {"RAYON_NUM_THREADS": "1"}  # the threads of tokenizers
    if point.backend == "torch":
        return {}
    return {"KERAS_BACKEND": point.backend.removeprefix("keras-"), "TF_CPP_MIN_LOG_LEVEL": "3"}


def run_worker(
    request: Any, environment: Mapping[str, str], seconds: float | None = None, module: str = __name__
) -> dict[str, Any]:
    """Run `python -m MODULE` with `request` as JSON on standard input; returns the JSON that it prints last.

    If the process ends without a result, `status` is the reason and `note` the last line of its standard error.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"status": OVER_TIME_LIMIT}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    # SIGKILL (signal.SIGKILL does not exist on Windows): Linux ends a process without memory in this way
    if done.returncode == -9 or is_out_of_memory(RuntimeError(done.stderr)):
        return {"status": OUT_OF_MEMORY}
    last = next(iter(done.stderr.strip().splitlines()[-1:]), "")
    return {"status": FAILED, "note": last[:200] or f"the process ended with {done.returncode}"}


# in the worker


def run_isolated(point: Point, time_limit: float) -> Isolated:
    try:
        check(point)
    except WrongImplementation as error:
        return Isolated(WRONG, note=str(error))
    if point.backend == "torch" and point.subject not in TRAINING_SUBJECTS:
        # libraries load and threads start at the first call; that memory is not the point's
        make_workload(point.small()).call()
    workload = make_workload(point)
    start = time.perf_counter()
    peak_bytes = peak_of(workload.call, point.device, point.backend)
    seconds = time.perf_counter() - start
    note = f"a call took {seconds:.0f} s, the limit is {time_limit:.0f} s" if seconds > time_limit else ""
    parameters = {name: list(shape) for name, shape in workload.parameters.items()}
    if workload.count_multiply_adds is not None and not note:
        workload.columns[""]["multiply_adds"] = workload.count_multiply_adds()
    return Isolated(OVER_TIME_LIMIT if note else OK, seconds, peak_bytes, note, workload.columns, parameters)


def peak_of(call: Callable[[], object], device: str, backend: str = "torch") -> int | None:
    """Bytes that a call needs at its peak on a device; None if they are not reported."""
    if device.startswith("cpu") and peak_resident() is not None:  # Windows does not report it
        return peak_memory(call)
    # Keras backends do not report the memory of a GPU
    memory: Any = getattr(torch, torch.device(device).type) if backend == "torch" else None
    if not hasattr(memory, "max_memory_allocated"):
        call()
        return None
    before = memory.memory_allocated(device)
    memory.reset_peak_memory_stats(device)
    call()
    return memory.max_memory_allocated(device) - before


def run_rounds(points: Sequence[Point], seconds: float, rounds: int, hold: bool) -> list[Timing]:
    hold_memory(hold)
    calls: dict[int, Callable[[], object]] = {}
    for index, point in enumerate(points):
        try:
            call = make_workload(point).call
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            continue  # it does not fit next to the others
        # the first call of a Keras backend compiles
        if point.backend == "torch" or seconds_if_it_fits(call) is not None:
            calls[index] = call
    least = min(3, rounds)
    timings = time_interleaved(calls, budget_seconds=seconds, least_rounds=least, most_rounds=rounds)
    return [timings.get(index, Timing(OUT_OF_MEMORY)) for index in range(len(points))]


def main() -> None:
    import transformers

    transformers.logging.set_verbosity_error()  # BigBird warns that it falls back to full attention at short lengths
    request = json.load(sys.stdin)
    points = [Point(**point) for point in request.pop("points")]
    limit_memory()
    if points[0].subject == "preparation":
        use_one_core()
    if "rounds" in request:
        timings = run_rounds(points, **request)
        print(json.dumps({"status": OK, "timings": [asdict(timing) for timing in timings]}))
        return
    try:
        found = run_isolated(points[0], **request)
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryError("not enough memory") from error
        # other packages do not accept every length; that must not end the sweep
        found = Isolated(FAILED, note=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    print(json.dumps(asdict(found)))


def use_one_core() -> None:
    """Run this process on one core, where the system supports it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


if __name__ == "__main__":
    main()
