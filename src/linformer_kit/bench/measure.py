"""Interleaved timing and peak memory."""

import contextlib
import ctypes
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..process_memory import bytes_in, is_out_of_memory, peak_resident, release_free_memory, status_bytes

Name = TypeVar("Name", bound=Hashable)

OK = "ok"
OUT_OF_MEMORY = "out of memory"
OVER_TIME_LIMIT = "over the time limit"
WRONG = "wrong"
FAILED = "failed"

# a timing in the columns of a table
MEASURED = ("status", "seconds_median", "seconds_fastest", "seconds_slowest", "rounds")


class Phases(dict[str, float]):
    """Seconds by phase, returned by a call that times itself; the phase "" is the whole."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call over several rounds, or the reason why there are none."""

    status: str
    median: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    rounds: int = 0
    share: float | None = None  # of a phase: its fraction of the total time
    note: str = ""  # why there are none
    phases: dict[str, "Timing"] = field(default_factory=dict)

    @classmethod
    def of(cls, seconds: list[float], **more: Any) -> "Timing":
        return cls(OK, statistics.median(seconds), min(seconds), max(seconds), len(seconds), **more)


def as_row(timing: Timing) -> dict[str, object]:
    """A timing in the columns `MEASURED`."""
    numbers = (timing.median, timing.fastest, timing.slowest, timing.rounds or None)
    return dict(zip(MEASURED, (timing.status, *numbers), strict=True))


def seconds_of(call: Callable[[], object]) -> Phases:
    start = time.perf_counter()
    result = call()
    return result if isinstance(result, Phases) else Phases({"": time.perf_counter() - start})


def seconds_if_it_fits(call: Callable[[], object]) -> Phases | None:
    """Seconds of a call; None if it ran out of memory."""
    try:
        return seconds_of(call)
    except Exception as error:  # JAX and TensorFlow have their own classes
        if not is_out_of_memory(error):
            raise
        return None


def time_interleaved(
    calls: Mapping[Name, Callable[[], object]],
    *,
    budget_seconds: float = 20.0,
    least_rounds: int = 3,
    most_rounds: int = 9,
) -> dict[Name, Timing]:
    """Time every call once per round, so that temporary slowdowns of the machine affect all of them.

    The order within a round is shuffled, because the previous call affects the processor's caches. A
    warm-up round decides how many rounds fit in the budget. A call that runs out of memory is dropped; this may happen
    late, since the memory that the others leave differs from round to round.
    """
    warm_up = {name: seconds_if_it_fits(call) for name, call in calls.items()}
    found: dict[Name, list[Phases]] = {name: [] for name, one in warm_up.items() if one is not None}
    round_seconds = max(sum(one[""] for one in warm_up.values() if one is not None), 1e-9)
    rounds = min(max(int(budget_seconds / round_seconds), least_rounds), most_rounds)
    gc.collect()
    shuffler, order = random.Random(0), list(found)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in tuple(order):
            one = seconds_if_it_fits(calls[name])
            if one is None:
                order.remove(name)
                del found[name]
            else:
                found[name].append(one)
    return {name: timing_of(found[name]) if name in found else Timing(OUT_OF_MEMORY) for name in calls}


def timing_of(rounds: list[Phases]) -> Timing:
    """All rounds of one call."""
    seconds = {phase: [one[phase] for one in rounds] for phase in rounds[0]}
    whole = seconds.pop("")
    phases = {phase: Timing.of(times, share=sum(times) / sum(whole)) for phase, times in seconds.items()}
    return Timing.of(whole, phases=phases)


def _peak() -> int:
    peak = peak_resident()
    if peak is None:  # 0 would look like a measurement
        raise OSError(f"{sys.platform} does not report the peak memory of a process")
    return peak


def _reset_peak() -> None:
    """Reset the peak to the current resident size; on systems without this, earlier peaks are included."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(call: Callable[[], object]) -> int:
    """Bytes that `call` needs at its peak, above what was resident just before it."""
    gc.collect()
    release_free_memory()  # otherwise a call that reuses it would seem to need less
    _reset_peak()
    before = _peak()
    result = call()
    peak = _peak() - before
    del result
    return peak


def hold_memory(hold: bool = True) -> None:
    """Let the process keep the memory of freed tensors, as tcmalloc and jemalloc do.

    By default glibc returns it, so every tensor beyond 32 MiB consists of new pages, which take time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # glibc has it, musl does not
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        mallopt(M_MMAP_MAX, 0 if hold else 65536)
        mallopt(M_TRIM_THRESHOLD, -1 if hold else 128 * 1024)
    if not hold:
        release_free_memory()


def limit_memory() -> None:
    """Make an allocation beyond the available memory raise an error; otherwise Linux kills the process."""
    in_use, available = status_bytes("VmData"), available_bytes()
    if in_use is not None and available is not None:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = in_use + int(0.95 * available)
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def available_bytes() -> int | None:
    """Available memory of the machine and of the container; None where the system does not report it."""
    found = [bytes_in("/proc/meminfo", "MemAvailable")]
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        found.append(limit - used)
    return min((bytes_ for bytes_ in found if bytes_ is not None), default=None)
