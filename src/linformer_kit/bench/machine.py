"""What the numbers depend on: the machine, the versions, the code of the layers."""

import ast
import hashlib
import os
import platform
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import torch

from .. import __version__
from ..models import attention_linformer, causal_linformer, multihead_linformer, projection_linformer
from .measure import meminfo_bytes
from .peers import peer_versions


def describe_machine(dependencies: Mapping[str, str]) -> dict[str, object]:
    """Machine, versions and date. No host name, no paths: it is published with the results.

    `dependencies` is what else the numbers depend on: other packages with their versions, and the code that is measured.
    """
    memory = meminfo_bytes("MemTotal")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "linformer-kit": __version__,
        **dependencies,
        "date": datetime.now(UTC).date().isoformat(),
    }


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def layer_dependencies() -> dict[str, str]:
    """What the numbers of the attention layers depend on: times of different code must not be mixed."""
    modules = (attention_linformer, causal_linformer, multihead_linformer, projection_linformer)
    return {**peer_versions(), "layer_code": code_fingerprint(*modules)}


def code_fingerprint(*modules: ModuleType) -> str:
    """Changes with the code of these modules but not with their comments."""
    code = [ast.dump(ast.parse(Path(str(module.__file__)).read_text())) for module in modules]
    return hashlib.sha256("".join(code).encode()).hexdigest()[:12]
