"""Where tensors on the CPU get their memory from: glibc can be told to keep what is freed for the next one."""

import ctypes
import sys


def hold_memory(hold: bool = True) -> None:
    """Let the process keep the memory of freed tensors, as tcmalloc and jemalloc do, instead of giving it back (glibc's default).

    Else every tensor beyond 32 MiB is made of new pages, and the system takes its time to hand them out.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # glibc has it, musl does not
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        mallopt(M_MMAP_MAX, 0 if hold else 65536)
        mallopt(M_TRIM_THRESHOLD, -1 if hold else 128 * 1024)
    if not hold:
        release_free_memory()


def release_free_memory() -> None:
    """Give freed memory back to the system, else a call that reuses it seems to need less."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)
