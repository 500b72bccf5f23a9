"""Of how low a rank attention matrices are: singular values, what the largest of them hold, and how many are needed.

A curve is what Figure 1 of the paper shows: its k-th number is the share of the sum of all singular values that the k largest hold.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Curves = NDArray[np.float64]

# shares of the sum of the singular values for which K is told
KEPT = {"k90": 0.90, "k95": 0.95, "k99": 0.99}
# K is rounded up to a multiple of this, which matrix products like
MULTIPLE = 8
# 1 − 0.05 and a sum that is 0.95 on paper may differ by a rounding
ROUNDING = 1e-9
# all points of a curve up to here, then so many steps that grow like a power, are enough to draw it
FIRST, STEPS = 32, 64


def curves_of(weights_HNM: Tensor) -> Curves:
    """The curves of matrices, (H, min(N, M)).

    In float32: with MiniLM at N = 512 the shares differ by 1e-7 from those in float64, which takes half as long again.

    >>> curves_of(torch.eye(4)[None]).tolist()
    [[0.25, 0.5, 0.75, 1.0]]
    """
    sums_HK = torch.linalg.svdvals(weights_HNM.float()).double().cumsum(dim=-1)
    return (sums_HK / sums_HK[:, -1:]).numpy()


def is_causal(layers: Sequence[Tensor]) -> bool:
    """Whether no token sees those after it, in (H, N, M) of any layer."""
    return not any(weights_HNM.triu(diagonal=1).any() for weights_HNM in layers)


def needed(curves: Curves, kept: float) -> NDArray[np.int64]:
    """The smallest k whose share is at least `kept`, along the last axis.

    >>> needed(np.array([0.5, 0.8, 0.95, 1.0]), 1 - 0.05)
    np.int64(3)
    """
    return (curves >= kept - ROUNDING).argmax(axis=-1) + 1


def suggested(layers: Sequence[Curves], error: float) -> list[int]:
    """K of each layer: the smallest that keeps 1 − error on average over its heads, rounded up, at most as many as there are."""
    exact = [int(needed(curves.mean(axis=0), 1 - error)) for curves in layers]
    return [min(-(-k // MULTIPLE) * MULTIPLE, curves.shape[-1]) for k, curves in zip(exact, layers, strict=True)]


def quarter(count: int) -> int:
    """The k of the paper's heat map, 128 of 512.

    >>> quarter(512), quarter(3)
    (128, 1)
    """
    return max(1, count // 4)


def points_to_show(count: int) -> list[int]:
    """Which k of 1 … count to write and draw; a quarter is among them.

    >>> len(points_to_show(512)), points_to_show(512)[30:35], points_to_show(3)
    (96, [31, 32, 33, 35, 36], [1, 2, 3])
    """
    later = np.geomspace(FIRST, count, STEPS + 1).round().astype(int).tolist() if count > FIRST else []
    return sorted({*range(1, min(FIRST, count) + 1), *later, quarter(count)})
