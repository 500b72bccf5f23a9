"""Calls in a separate process, which may run out of memory or time without affecting this one."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ..process_memory import is_out_of_memory
from .measure import FAILED, OUT_OF_MEMORY, OVER_TIME_LIMIT


class WorkerFailed(Exception):
    """The process ended without a result; `status` is the reason, `note` the last line of its standard error."""

    def __init__(self, status: str, note: str = ""):
        super().__init__(f"{status}: {note}" if note else status)
        self.status, self.note = status, note


def subprocess_call(
    module: str, request: Any, seconds: float | None = None, environment: Mapping[str, str] | None = None
) -> Any:
    """Run `python -m MODULE` with `request` as JSON on standard input; returns the JSON that it prints last."""
    command, variables = [sys.executable, "-m", module], {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, env=variables, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise WorkerFailed(OVER_TIME_LIMIT) from None
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    # SIGKILL (signal.SIGKILL does not exist on Windows): Linux ends a process without memory in this way
    if done.returncode == -9 or is_out_of_memory(RuntimeError(done.stderr)):
        raise WorkerFailed(OUT_OF_MEMORY)
    last = next(iter(done.stderr.strip().splitlines()[-1:]), "")
    raise WorkerFailed(FAILED, last[:200] or f"the process ended with {done.returncode}")
