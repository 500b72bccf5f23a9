"""What the numbers depend on: the machine, the versions, the code of the layers."""

import ast
import hashlib
import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path

import torch

from .. import __version__
from ..models import attention_linformer, causal_linformer, multihead_linformer, projection_linformer
from .measure import meminfo_bytes
from .peers import peer_versions


def describe_machine() -> dict[str, object]:
    """Machine, versions and date. No host name, no paths: it is published with the results."""
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
        **peer_versions(),
        "layer_code": layer_code_fingerprint(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def layer_code_fingerprint() -> str:
    """Changes with the code of the layers but not with their comments: times of different code must not be mixed."""
    modules = (attention_linformer, causal_linformer, multihead_linformer, projection_linformer)
    code = [ast.dump(ast.parse(Path(str(module.__file__)).read_text())) for module in modules]
    return hashlib.sha256("".join(code).encode()).hexdigest()[:12]
