"""Memory of this process: its use, its release to the system, and errors that mean it is exhausted."""

import ctypes
import os
import re
import sys
from pathlib import Path

# allocators whose memory does not grow with the number of different tensor sizes, unlike that of glibc; the first is
# used, with its name
ALLOCATORS = {"libtcmalloc_minimal.so.4": "tcmalloc", "libtcmalloc.so.4": "tcmalloc", "libjemalloc.so.2": "jemalloc"}
LIBRARY_FOLDERS = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib")


def preloaded_allocator() -> str | None:
    """The allocator that LD_PRELOAD names, if it is one of `ALLOCATORS`."""
    loaded = os.environ.get("LD_PRELOAD", "")
    return next((name for library, name in ALLOCATORS.items() if library in loaded), None)


def preload_allocator() -> None:
    """Start this program again with one of `ALLOCATORS`, if there is one and LD_PRELOAD is not set.

    A process can only choose its allocator when it starts. The call does not return then.
    """
    if sys.platform != "linux" or "LD_PRELOAD" in os.environ:
        return
    patterns = [f"{folder}/{library}" for library in ALLOCATORS for folder in LIBRARY_FOLDERS]
    found = next((path for pattern in patterns for path in Path("/").glob(pattern)), None)
    if found is not None:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": str(found)})


def bytes_in(path: str, field: str) -> int | None:
    """A field of a file such as /proc/meminfo in bytes; None if there is no such file or field."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def status_bytes(field: str) -> int | None:
    """A field of /proc/self/status in bytes; None outside Linux."""
    return bytes_in("/proc/self/status", field)


def peak_resident() -> int | None:
    """Peak memory of this process in bytes, Python and libraries included; None if the system does not report it."""
    # not ru_maxrss on Linux: it is inherited over exec, so it starts at the parent's peak
    peak = status_bytes("VmHWM")
    if peak is not None:
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def release_free_memory() -> None:
    """Return freed memory to the system; glibc keeps free blocks that lie between blocks in use."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)


class FreeMemoryLimit:
    """Bounds the freed memory that the process holds: call `check` where little memory is in use, as after a step.

    Batches of many lengths leave holes that glibc keeps. Returning them costs time, because their pages have to be
    mapped again, so nothing is returned until the process has grown by `allowed` bytes. It does nothing outside Linux.
    """

    def __init__(self, allowed: int):
        self.allowed = allowed
        self.start: int | None = None  # resident bytes after the last return

    def check(self) -> None:
        resident = status_bytes("RssAnon")  # not mapped files, such as the data
        if resident is None:
            return
        if self.start is None or resident > self.start + self.allowed:
            release_free_memory()
            self.start = status_bytes("RssAnon")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation; PyTorch reports those on CPUs as RuntimeError.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    # torch.OutOfMemoryError is recognized by its name, so that torch need not be imported here
    words = r"OutOfMemoryError|can't allocate memory|not enough memory|bad_alloc|out of memory"
    words += "|RESOURCE_EXHAUSTED|OOM when allocating"  # of JAX and TensorFlow
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, MemoryError) or re.search(words, text, re.IGNORECASE) is not None
