"""Measurements in worker processes: one point in isolation, or several in interleaved rounds.

`python -m linformer_kit.bench.isolated` reads a request as JSON and prints the result. A point that is wrong, too
large or too slow fails in its own process and is left out of the rounds.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
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
from .subprocess_call import WorkerFailed, subprocess_call

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


def environment_of(point: Point) -> dict[str, str]:
    """Environment variables of the worker process."""
    if point.subject == "preparation":
        return {"RAYON_NUM_THREADS": "1"}  # the threads of tokenizers
    if point.backend == "torch":
        return {}
    return {"KERAS_BACKEND": point.backend.removeprefix("keras-"), "TF_CPP_MIN_LOG_LEVEL": "3"}


def measure_isolated(point: Point, time_limit: float) -> Isolated:
    """Check a point and measure one call, in a new process; the call may take `time_limit` seconds."""
    request, seconds = {"point": asdict(point), "time_limit": time_limit}, START_SECONDS + 4 * time_limit
    try:
        return Isolated(**subprocess_call(__name__, request, seconds, PLAIN_ALLOCATION | environment_of(point)))
    except WorkerFailed as failure:
        return Isolated(failure.status, note=failure.note)


def measure_rounds(points: Sequence[Point], seconds: float, rounds: int, hold: bool) -> dict[Point, Timing]:
    """Time points in interleaved rounds, in a new process."""
    request = {"points": [asdict(point) for point in points], "seconds": seconds, "rounds": rounds, "hold": hold}
    try:
        results = subprocess_call(__name__, request, environment=environment_of(points[0]))
    except WorkerFailed as failure:
        return dict.fromkeys(points, Timing(failure.status))
    return {point: timing_from(result) for point, result in zip(points, results, strict=True)}


def timing_from(result: dict[str, Any]) -> Timing:
    phases = {phase: timing_from(timing) for phase, timing in result.pop("phases").items()}
    return Timing(**result, phases=phases)


# in the worker


def isolated_here(point: Point, time_limit: float) -> Isolated:
    try:
        check(point)
    except WrongImplementation as error:
        return Isolated(WRONG, note=str(error))
    if point.backend == "torch" and point.subject not in TRAINING_SUBJECTS:
        # libraries load and threads start at the first call; that memory is not the point's
        make_workload(point.small()).call()
    workload = make_workload(point)
    # Keras backends do not report the memory of a GPU
    device = torch.device(point.device if point.backend == "torch" or point.device.startswith("cpu") else "meta")
    if device.type == "cpu" and peak_resident() is None:  # Windows does not report it
        device = torch.device("meta")
    start = time.perf_counter()
    peak_bytes = peak_memory(workload.call) if device.type == "cpu" else accelerator_memory(workload.call, device)
    seconds = time.perf_counter() - start
    note = f"a call took {seconds:.0f} s, the limit is {time_limit:.0f} s" if seconds > time_limit else ""
    parameters = {name: list(shape) for name, shape in workload.parameters.items()}
    return Isolated(OVER_TIME_LIMIT if note else OK, seconds, peak_bytes, note, workload.columns, parameters)


def accelerator_memory(call: Callable[[], object], device: torch.device) -> int | None:
    """`peak_memory` of an accelerator; None if it does not report its memory."""
    backend: Any = getattr(torch, device.type, None)
    if not hasattr(backend, "max_memory_allocated"):
        call()
        return None
    before = backend.memory_allocated(device)
    backend.reset_peak_memory_stats(device)
    call()
    return backend.max_memory_allocated(device) - before


def rounds_here(points: Sequence[Point], seconds: float, rounds: int, hold: bool) -> list[Timing]:
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
    limit_memory()
    if "points" in request:
        points = [Point(**point) for point in request.pop("points")]
        print(json.dumps([asdict(timing) for timing in rounds_here(points, **request)]))
        return
    try:
        found = isolated_here(Point(**request["point"]), request["time_limit"])
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryError("not enough memory") from error
        # other packages do not accept every length; that must not end the sweep
        found = Isolated(FAILED, note=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
