"""One point by itself, in a fresh process: the check, then one call, its time and its peak memory.

`python -m linformer_kit.bench.solo JSON` prints a `Solo` of the `Point` in the JSON. What is wrong, too large or too slow shows
here, and takes no part in the rounds.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .implementations import Point, call_of, check, small_of
from .measure import FAILED, OK, OVER_TIME_LIMIT, WRONG, is_out_of_memory, limit_memory, peak_memory
from .peers import WrongImplementation
from .subprocess_call import WorkerFailed, ask

# a check and the imports take a while whatever the point
START_SECONDS = 120.0


@dataclass(frozen=True)
class Solo:
    """What came of it."""

    status: str
    seconds: float | None = None
    peak_bytes: int | None = None
    note: str = ""


def solo(point: Point, time_limit: float) -> Solo:
    """Measure a point in a process of its own; a call may take `time_limit` seconds."""
    try:
        return Solo(**ask(__name__, {"point": asdict(point), "time_limit": time_limit}, START_SECONDS + 3 * time_limit))
    except WorkerFailed as end:
        return Solo(end.status)
    except RuntimeError as error:  # the process crashed
        return Solo(FAILED, note=str(error).strip().splitlines()[-1][:200])


def measure_here(point: Point, time_limit: float) -> Solo:
    """The same in this process."""
    try:
        check(point)
    except WrongImplementation as error:
        return Solo(WRONG, note=str(error))
    torch.manual_seed(0)
    # libraries load and threads start at the first call; that memory is not the point's
    call_of(replace(small_of(point), batch=1))()
    return measure_call(call_of(point), torch.device(point.device), time_limit)


def measure_call(call: Callable[[], object], device: torch.device, time_limit: float) -> Solo:
    """Time and peak memory of a call, in this process."""
    start = time.perf_counter()
    peak_bytes = peak_memory(call) if device.type == "cpu" else accelerator_memory(call, device)
    seconds = time.perf_counter() - start
    if seconds > time_limit:
        return Solo(
            OVER_TIME_LIMIT, seconds, peak_bytes, f"a call took {seconds:.0f} s, the limit is {time_limit:.0f} s"
        )
    return Solo(OK, seconds, peak_bytes)


def accelerator_memory(call: Callable[[], object], device: torch.device) -> int | None:
    """As `peak_memory`, of a GPU; None for a kind of device that does not tell."""
    backend: Any = getattr(torch, device.type, None)
    if not hasattr(backend, "max_memory_allocated"):
        call()
        return None
    before = backend.memory_allocated(device)
    backend.reset_peak_memory_stats(device)
    call()
    return backend.max_memory_allocated(device) - before


def main() -> None:
    import transformers

    transformers.logging.set_verbosity_error()  # BigBird says that it falls back to full attention at short lengths
    question = json.loads(sys.argv[1])
    limit_memory()
    try:
        found = measure_here(Point(**question["point"]), question["time_limit"])
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # others may not take every length, such as Nystromformer; that must not end the sweep
        found = Solo(FAILED, note=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
