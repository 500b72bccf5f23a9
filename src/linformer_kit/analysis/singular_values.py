"""The rank of attention matrices: singular values, the share that the largest of them hold, and how many are needed.

A curve is that of Figure 1 of the paper: its k-th value is the share of the sum of all singular values that the k
largest hold.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Curves = NDArray[np.float64]

# shares of the sum of the singular values for which k is reported, by column name
SHARES = {"k90": 0.90, "k95": 0.95, "k99": 0.99}
MULTIPLE = 8  # K is rounded up to a multiple of this, for fast matrix products
ROUNDING = 1e-9  # 1 − 0.05 and a sum that is 0.95 in exact arithmetic may differ by a rounding error
FIRST, STEPS = 32, 64  # a curve is stored at every k up to FIRST, then in STEPS geometric steps


def share_curves(weights_HNM: Tensor) -> Curves:
    """The curves of matrices, (H, min(N, M)).

    Computed in float32: for MiniLM at N = 512 the shares differ from those in float64 by 1e-7, and float64 takes 1.5×
    the time.

    >>> share_curves(torch.eye(4)[None]).tolist()
    [[0.25, 0.5, 0.75, 1.0]]
    """
    sums_HK = torch.linalg.svdvals(weights_HNM.float()).double().cumsum(dim=-1)
    return (sums_HK / sums_HK[:, -1:]).numpy()


def is_causal(layers: Sequence[Tensor]) -> bool:
    """Whether no token attends to later ones, in the (H, N, M) weights of any layer."""
    return not any(weights_HNM.triu(diagonal=1).any() for weights_HNM in layers)


def rank_for_share(curves: Curves, share: float) -> NDArray[np.int64]:
    """The smallest k that holds at least `share`, along the last axis.

    >>> rank_for_share(np.array([0.5, 0.8, 0.95, 1.0]), 1 - 0.05)
    np.int64(3)
    """
    return (curves >= share - ROUNDING).argmax(axis=-1) + 1


def suggest_lengths(layers: Sequence[Curves], error: float) -> list[int]:
    """K of each layer: the smallest that holds 1 − error on average over heads, rounded up to `MULTIPLE`, at most N."""
    exact = [int(rank_for_share(curves.mean(axis=0), 1 - error)) for curves in layers]
    return [min(-(-k // MULTIPLE) * MULTIPLE, curves.shape[-1]) for k, curves in zip(exact, layers, strict=True)]


def quarter(count: int) -> int:
    """The k of the paper's heat map, 128 of 512.

    >>> quarter(512), quarter(3)
    (128, 1)
    """
    return max(1, count // 4)


def stored_points(count: int) -> list[int]:
    """The k of 1 … count at which a curve is stored and drawn; the quarter is one of them.

    >>> len(stored_points(512)), stored_points(512)[30:35], stored_points(3)
    (96, [31, 32, 33, 35, 36], [1, 2, 3])
    """
    later = np.geomspace(FIRST, count, STEPS + 1).round().astype(int).tolist() if count > FIRST else []
    return sorted({*range(1, min(FIRST, count) + 1), *later, quarter(count)})
