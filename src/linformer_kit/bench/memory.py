"""The memory of one call, in a process of its own: `python -m linformer_kit.bench.memory JSON` prints a `MemoryPoint`'s bytes."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass

import torch

from . import peers
from .measure import OK, OUT_OF_MEMORY, Mode, is_out_of_memory, limit_memory, make_call, peak_memory, release_free_memory

# glibc: every tensor in a mapping of its own, given back when it is freed. The peak is then the layer's, the same in every run;
# by default up to twice as much can stay in the allocator, depending on the order of earlier allocations
PLAIN_ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class MemoryPoint:
    """One call whose memory is measured."""

    implementation: str
    length: int
    projected_length: int
    batch: int
    mode: Mode

    def measure_here(self) -> int:
        """The bytes at the peak of the call, above what was resident before it: weights and input stand outside."""
        layer = peers.build(self.implementation, peers.our_layer(self.length, self.projected_length))
        x = torch.randn(self.batch, self.length, peers.EMBED_DIM)
        # libraries load and threads start at the first call; that memory is not the layer's
        small = peers.build(self.implementation, peers.our_layer(64, 32))
        make_call(small, x[:, :64].contiguous(), self.mode)()
        return peak_memory(make_call(layer, x, self.mode))


def measure_memory(point: MemoryPoint) -> tuple[str, int | None]:
    """Status and bytes of a point, from a fresh process."""
    release_free_memory()  # what this process holds (`hold_memory`) the other one could not have
    command = [sys.executable, "-m", __name__, json.dumps(asdict(point))]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **PLAIN_ALLOCATION})
    if done.returncode == 0:
        return OK, int(done.stdout)
    if done.returncode == -signal.SIGKILL or is_out_of_memory(RuntimeError(done.stderr)):
        return OUT_OF_MEMORY, None
    raise RuntimeError(f"measuring the memory of {point} failed:\n{done.stderr}")


if __name__ == "__main__":
    limit_memory()
    print(MemoryPoint(**json.loads(sys.argv[1])).measure_here())
