"""What this process holds of the machine's memory."""

import ctypes
import re
import sys
from pathlib import Path


def bytes_in(path: str, field: str) -> int | None:
    """A field of a file such as /proc/meminfo in bytes; None where there is no such file or field."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def status_bytes(field: str) -> int | None:
    """A field of what Linux tells of this process."""
    return bytes_in("/proc/self/status", field)


def peak_resident() -> int | None:
    """The most memory that this process has had, Python and libraries included; None where the system does not tell."""
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
    """Give freed memory back to the system, which glibc does not by itself for what lies between pieces in use."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)
