"""Time, interleaved; peak memory; how a cost grows."""

import contextlib
import ctypes
import gc
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..process_memory import bytes_in, peak_resident, release_free_memory, status_bytes

Name = TypeVar("Name", bound=Hashable)
Mode = Literal["forward", "forward+backward"]
MODES: tuple[Mode, ...] = ("forward", "forward+backward")

OK = "ok"
OUT_OF_MEMORY = "out of memory"
OVER_TIME_LIMIT = "over the time limit"
WRONG = "wrong"
FAILED = "failed"

# a timing in the columns of a table
MEASURED = ("status", "seconds_median", "seconds_fastest", "seconds_slowest", "rounds")

# the products whose rate is the yardstick, as rows × inner × columns: which is faster depends on the machine
GEMM_SHAPES = {"GEMM, square": (2048, 2048, 2048), "GEMM, tall": (8192, 512, 512)}


@dataclass(frozen=True)
class Timing:
    """Seconds per call over several rounds, or the reason why there are none."""

    status: str
    median: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    rounds: int = 0


def as_row(timing: Timing) -> dict[str, object]:
    """A timing in the columns `MEASURED`."""
    numbers = (timing.median, timing.fastest, timing.slowest, timing.rounds or None)
    return dict(zip(MEASURED, (timing.status, *numbers), strict=True))


def make_call(layer: nn.Module, x: Tensor, mode: Mode) -> Callable[[], object]:
    """What is measured: inference without gradients, or a training step's forward and backward, the input's gradient included."""
    if mode == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return layer(x)

        return forward

    leaf = x.detach().requires_grad_()

    def forward_backward() -> None:
        layer.zero_grad(set_to_none=True)
        layer(leaf).backward(x)  # any gradient from above will do
        leaf.grad = None  # so that many such calls at great length fit side by side

    return forward_backward


def gemm_calls() -> dict[str, Callable[[], object]]:
    """Large float32 matrix products, to be timed beside layers."""

    def product(rows: int, inner: int, columns: int) -> Callable[[], object]:
        a, b = torch.randn(rows, inner), torch.randn(inner, columns)
        return lambda: a @ b

    return {name: product(*shape) for name, shape in GEMM_SHAPES.items()}


def gemm_rate(timings: Mapping[Any, Timing]) -> float | None:
    """Multiply-adds per second of the faster of the products of `gemm_calls`; None if they were not timed."""
    rates = [
        math.prod(shape) / median
        for name, shape in GEMM_SHAPES.items()
        if name in timings and (median := timings[name].median)
    ]
    return max(rates, default=None)


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def seconds_if_it_fits(call: Callable[[], object]) -> float | None:
    """Seconds of a call; None if it ran out of memory."""
    try:
        return seconds_of(call)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is a failed allocation: torch reports those of the CPU as a RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return bool(
        re.search(r"can't allocate memory|not enough memory|bad_alloc|out of memory", str(error), re.IGNORECASE)
    )


def time_interleaved(
    calls: Mapping[Name, Callable[[], object]],
    *,
    budget_seconds: float = 20.0,
    least_rounds: int = 3,
    most_rounds: int = 9,
) -> dict[Name, Timing]:
    """Time every call once per round, so that whatever slows the machine for a while slows all of them.

    The order within a round is shuffled: a call that always came after the same other one would always find its caches.
    One round to warm up says how many rounds fit in the budget. A call that runs out of memory takes no further part; it may do so
    late, since what others leave behind differs from round to round.
    """
    warm_up = {name: seconds_if_it_fits(call) for name, call in calls.items()}
    seconds: dict[Name, list[float]] = {name: [] for name, one in warm_up.items() if one is not None}
    rounds = min(
        max(int(budget_seconds / max(sum(one or 0 for one in warm_up.values()), 1e-9)), least_rounds), most_rounds
    )
    gc.collect()
    shuffler, order = random.Random(0), list(seconds)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in tuple(order):
            one = seconds_if_it_fits(calls[name])
            if one is None:
                order.remove(name)
                del seconds[name]
            else:
                seconds[name].append(one)
    timings = {name: Timing(OUT_OF_MEMORY) for name in calls if name not in seconds}
    for name, times in seconds.items():
        timings[name] = Timing(OK, statistics.median(times), min(times), max(times), rounds)
    return timings


def _peak() -> int:
    peak = peak_resident()
    if peak is None:  # not 0, which would be a figure
        raise OSError(f"{sys.platform} does not tell how much memory a process has had")
    return peak


def _reset_peak() -> None:
    """Let the peak start anew from what is resident now. Where the system cannot, it goes on from the peak so far."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(call: Callable[[], object]) -> int:
    """Bytes that `call` needs at its peak, above what was resident just before it."""
    gc.collect()
    release_free_memory()  # else a call that reuses it seems to need less
    _reset_peak()
    before = _peak()
    result = call()
    peak = _peak() - before
    del result
    return peak


def hold_memory(hold: bool = True) -> None:
    """Let the process keep the memory of freed tensors, as tcmalloc and jemalloc do, instead of giving it back (glibc's default).

    Else every tensor beyond 32 MiB is made of new pages, and what the system takes to hand them out counts as a layer's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # glibc has it, musl does not
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        mallopt(M_MMAP_MAX, 0 if hold else 65536)
        mallopt(M_TRIM_THRESHOLD, -1 if hold else 128 * 1024)
    if not hold:
        release_free_memory()


def limit_memory() -> None:
    """Make an allocation beyond the memory that is free fail with an error, where Linux would kill the process instead."""
    in_use, available = status_bytes("VmData"), available_bytes()
    if in_use is not None and available is not None:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = in_use + int(0.95 * available)
        resource.setrlimit(
            resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def available_bytes() -> int | None:
    """Memory that is free for us: of the machine, and of the container; None where the system does not say."""
    found = [meminfo_bytes("MemAvailable")]
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        found.append(limit - used)
    return min((bytes_ for bytes_ in found if bytes_ is not None), default=None)


def meminfo_bytes(field: str) -> int | None:
    """A field of /proc/meminfo in bytes; None where there is no such file."""
    return bytes_in("/proc/meminfo", field)


def fit_exponent(sizes: Iterable[float], costs: Iterable[float]) -> float:
    """The p of cost = c · size^p, by least squares over the logarithms.

    >>> round(fit_exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    points = [(math.log(size), math.log(cost)) for size, cost in zip(sizes, costs, strict=True)]
    if len(points) < 2:
        raise ValueError(f"an exponent needs two points or more, got {len(points)}")
    return statistics.linear_regression(*zip(*points, strict=True)).slope
