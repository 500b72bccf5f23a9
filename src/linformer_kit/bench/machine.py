"""The facts that measurements depend on: machine, versions, and a fingerprint of the timed code."""

import ast
import hashlib
import os
import platform
import re
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from .. import __version__
from ..process_memory import bytes_in

PACKAGE = Path(__file__).parent.parent


def describe_machine() -> dict[str, object]:
    """Machine, versions and date. No host name, no paths: it is published with the results."""
    memory = bytes_in("/proc/meminfo", "MemTotal")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "linformer-kit": __version__,
        "transformers": version_of("transformers"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def cpu_name() -> str:
    """The name of the processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def version_of(*packages: str) -> str | None:
    """The version of the first of these packages that is installed."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def timed_code(model: str = "") -> str:
    """A fingerprint of the code that is timed, and of the configuration of a saved model, as JSON."""
    code = code_fingerprint(PACKAGE)
    return f"{code}+{hashlib.sha256(model.encode()).hexdigest()[:8]}" if model else code


@cache
def code_fingerprint(package: Path) -> str:
    """A hash of all Python files of a package, without their comments.

    A list of the modules that run in a measurement would be shorter and would miss some.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n{ast.dump(ast.parse(path.read_text()))}\n".encode())
    return digest.hexdigest()[:12]
