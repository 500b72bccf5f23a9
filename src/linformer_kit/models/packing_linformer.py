"""Batches without padding: the real tokens of all examples, one example after the other.

Embeddings, norms, linear layers and feed-forward treat each token alone, so they need no padding. What mixes tokens is
computed for each example: E, attention and the local convolution.

Shapes: B batch, N length with padding, T real tokens of all examples, n real tokens of one example, C channels.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .validation_linformer import can_read_values


class Packing(NamedTuple):
    """Where the real tokens of a batch are; layers take it in place of a mask, with tokens (1, T, C).

    >>> mask = torch.tensor([[True, True, False], [False, True, False]])
    >>> packing = Packing.of(mask)
    >>> packing.pack(torch.tensor([[5, 6, 0], [0, 7, 0]]))
    tensor([[5, 6, 7]])
    >>> packing.unpack(torch.ones(1, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    lengths: list[int]  # real tokens of each example that has some
    shape: torch.Size  # (B, N)
    place_T: Tensor  # of each real token in the batch, counted from 0 to B·N

    @classmethod
    def of(cls, mask_BN: Tensor | None) -> "Packing | None":
        """None without padding, and where the lengths cannot be read, or not without waiting for a device."""
        if mask_BN is None or mask_BN.device.type != "cpu" or not can_read_values(mask_BN):
            return None
        place_T = mask_BN.flatten().nonzero().flatten()
        lengths = [length for length in mask_BN.sum(dim=1).tolist() if length]
        return cls(lengths, mask_BN.shape, place_T) if 0 < len(place_T) < mask_BN.numel() else None

    def pack(self, x_BN: Tensor) -> Tensor:
        """(B or 1, N, ...) to (1, T, ...)."""
        return x_BN.expand(*self.shape, *x_BN.shape[2:]).flatten(0, 1).index_select(0, self.place_T)[None]

    def unpack(self, x_1TC: Tensor) -> Tensor:
        """(1, T, C) to (B, N, C), with zeros at padding."""
        batch, length = self.shape
        zeros = x_1TC.new_zeros(batch * length, x_1TC.shape[-1])
        return zeros.index_copy(0, self.place_T, x_1TC[0]).unflatten(0, (batch, length))

    def split(self, x_1TC: Tensor) -> tuple[Tensor, ...]:
        """The (1, n, C) tokens of each example."""
        # not slices: the gradient of each would be as long as the whole
        return x_1TC.split(self.lengths, dim=1)

    def each(self, function: Callable[[Tensor], Tensor], x_1TC: Tensor) -> Tensor:
        """The outputs of `function` for each example, (1, T, C)."""
        return torch.cat([function(x_1nC) for x_1nC in self.split(x_1TC)], dim=1)
