"""Work in a process of its own, which may run out of memory or of time without harm to anybody else."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

from ..process_memory import release_free_memory
from .measure import OUT_OF_MEMORY, OVER_TIME_LIMIT, is_out_of_memory

# glibc: every tensor in a mapping of its own, given back when it is freed. The peak is then the layer's, the same in every run;
# by default up to twice as much can stay in the allocator, depending on the order of earlier allocations
PLAIN_ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class WorkerFailed(Exception):
    """The process ended without an answer; `status` says why."""

    def __init__(self, status: str):
        super().__init__(status)
        self.status = status


def ask(module: str, question: Any, seconds: float | None = None) -> Any:
    """What `python -m MODULE JSON` answers, as JSON; raises `WorkerFailed` if memory or time ran out."""
    release_free_memory()  # what this process holds (`hold_memory`) the other one could not have
    command = [sys.executable, "-m", module, json.dumps(question)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **PLAIN_ALLOCATION}, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise WorkerFailed(OVER_TIME_LIMIT) from None
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if done.returncode == -signal.SIGKILL or is_out_of_memory(RuntimeError(done.stderr)):
        raise WorkerFailed(OUT_OF_MEMORY)
    raise RuntimeError(f"{module} failed at {question}:\n{done.stderr}")
