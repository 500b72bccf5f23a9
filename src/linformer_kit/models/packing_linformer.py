"""Batches without padding: the real tokens of all examples, one example after the other.

Embeddings, norms, linear layers and feed-forward treat each token alone, so they need no padding. What mixes tokens, E,
attention and the local convolution, is computed for each group of examples of the same length.

Shapes: B batch, N length with padding, T real tokens of all examples, g examples of a group, n tokens of each of them,
C channels.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .validation_linformer import can_read_values

# a further group takes about as much time as GROUP_COST / C² tokens, and masks as much as one in MASK_COST tokens
GROUP_COST, MASK_COST = 400_000, 16


class Packing(NamedTuple):
    """Where the real tokens of a batch are; layers take it in place of a mask, with tokens (1, T, C).

    >>> mask = torch.tensor([[True, True, False], [False, True, False]])
    >>> packing = Packing.of(mask, width=512)
    >>> packing.pack(torch.tensor([[5, 6, 0], [0, 7, 0]])), packing.groups
    (tensor([[7, 5, 6]]), [(1, 1), (1, 2)])
    >>> packing.unpack(torch.ones(1, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    groups: list[tuple[int, int]]  # (g, n) of examples with the same number of real tokens, which are neighbors
    shape: torch.Size  # (B, N)
    place_T: Tensor  # of each real token in the batch, counted from 0 to B·N

    @classmethod
    def of(cls, mask_BN: Tensor | None, width: int) -> "Packing | None":
        """None without padding, or if there are so many short groups of width C that a mask is faster.

        Also None where the lengths cannot be read, or not without waiting for a device.
        """
        if mask_BN is None or mask_BN.device.type != "cpu" or not can_read_values(mask_BN) or torch.jit.is_tracing():
            return None
        lengths_B, order_B = mask_BN.sum(dim=1).sort(stable=True)
        place_BN = torch.arange(mask_BN.numel()).view_as(mask_BN)
        place_T = place_BN[order_B][mask_BN[order_B]]
        lengths, counts = lengths_B[lengths_B > 0].unique_consecutive(return_counts=True)
        groups = list(zip(counts.tolist(), lengths.tolist(), strict=True))
        tokens, padding = len(place_T), mask_BN.numel() - len(place_T)
        is_faster = padding + tokens // MASK_COST >= len(groups) * GROUP_COST // width**2
        return cls(groups, mask_BN.shape, place_T) if tokens and padding and is_faster else None

    @property
    def longest(self) -> int:
        return self.groups[-1][1]

    def pack(self, x_BN: Tensor) -> Tensor:
        """(B or 1, N, ...) to (1, T, ...)."""
        return x_BN.expand(*self.shape, *x_BN.shape[2:]).flatten(0, 1)[self.place_T][None]

    def unpack(self, x_1TC: Tensor) -> Tensor:
        """(1, T, C) to (B, N, C), with zeros at padding."""
        batch, length = self.shape
        zeros = x_1TC.new_zeros(batch * length, x_1TC.shape[-1])
        return zeros.index_copy(0, self.place_T, x_1TC[0]).unflatten(0, (batch, length))

    def split(self, x_1TC: Tensor) -> list[Tensor]:
        """The (g, n, C) tokens of each group."""
        # not slices: the gradient of each would be as long as the whole
        pieces = x_1TC[0].split([examples * length for examples, length in self.groups])
        return [piece.unflatten(0, group) for piece, group in zip(pieces, self.groups, strict=True)]

    def join(self, groups: Iterable[Tensor]) -> Tensor:
        """The backward pass of `split`: groups of (g, n, C) to (1, T, C)."""
        return torch.cat([x_gnC.flatten(0, 1) for x_gnC in groups])[None]
