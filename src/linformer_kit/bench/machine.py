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
from .point import TRAINING_SUBJECTS

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


def timed_code(subject: str, backend: str, model: str = "") -> str:
    """A fingerprint of the code that runs in a measurement, and of the configuration of its saved model, as JSON."""
    folders = ["models"]
    if backend != "torch":
        folders.append("keras")
    if subject in TRAINING_SUBJECTS:
        folders.append("training")
    code = code_fingerprint(*(PACKAGE / folder for folder in folders))
    return f"{code}+{hashlib.sha256(model.encode()).hexdigest()[:8]}" if model else code


@cache
def code_fingerprint(*folders: Path) -> str:
    """A hash of the Python files in these folders, without their comments."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(f"{path.relative_to(path.parent.parent)}\n{ast.dump(ast.parse(path.read_text()))}\n".encode())
    return digest.hexdigest()[:12]
