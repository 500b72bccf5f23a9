"""The memory of one call, in a process of its own: `python -m linformer_kit.bench.memory JSON` prints a `MemoryPoint`'s bytes."""

import json
import sys
from dataclasses import asdict, dataclass

import torch

from . import peers
from .measure import OK, Mode, limit_memory, make_call, peak_memory
from .subprocess_call import WorkerFailed, ask


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
    try:
        return OK, ask(__name__, asdict(point))
    except WorkerFailed as end:
        return end.status, None


if __name__ == "__main__":
    limit_memory()
    print(MemoryPoint(**json.loads(sys.argv[1])).measure_here())
