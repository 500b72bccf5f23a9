"""The order of the products of the equation, and its cost.

Every product is linear, so the same result has several orders of products, at very different costs. `key_costs` and
`query_costs` count multiply-adds from the shapes. Nothing here imports PyTorch: the Keras layers use it too.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from .projection_linformer import Projection

# the length for which a graph exported with dynamic shapes chooses its order: long inputs are what costs
EXPORT_LENGTH = 2**20

KeyOrder = Literal["sequence first", "features first"]
QueryOrder = Literal["per head", "folded"]
Order = TypeVar("Order", bound=str)


@dataclass(frozen=True)
class Plan:
    """The order of the products for one shape, and its cost.

    `keys`: `(Eᵀ X) W` ("sequence first") or `Eᵀ (X W)` ("features first"). `queries`: `(X W_Q) keysᵀ` and `(weights
    values) W_O` ("per head"), or `X (W_Q keysᵀ)` and `weights (values W_O)` ("folded").
    """

    keys: KeyOrder
    queries: QueryOrder
    multiply_adds: int


def key_costs(
    projection: "Projection", length: int, channels: int, features: int, separate: bool = False, window: bool = False
) -> dict[KeyOrder, int]:
    """Multiply-adds of one example's keys and values in each possible order; `features` is G·D.

    `separate`: keys and values have their own tokens, so that a matrix E = F is applied to both. `window`: those of all
    tokens are needed too, which features first has already.
    """
    rows, times = projection.rows(length), 2 if separate and projection.matrices == 1 else 1
    order: KeyOrder = "features first" if projection.is_features_first else "sequence first"
    costs: dict[KeyOrder, int] = {
        order: times * projection.multiply_adds_per_channel(length) * channels
        + 2 * projection.rows_of_features(length) * channels * features
        + projection.finish_multiply_adds(length, features)
    }
    if window and order == "sequence first":
        costs[order] += 2 * length * channels * features
    if projection.is_dense:
        costs["features first"] = (
            times * projection.own_multiply_adds_per_channel(length) * channels
            + 2 * length * channels * features
            + 2 * length * rows * features
        )
    return costs


def query_costs(queries: int, rows: int, channels: int, heads: int, head_dim: int) -> dict[QueryOrder, int]:
    """Multiply-adds of one example's queries, attention and output in each order."""
    features = heads * head_dim
    return {
        "per head": 2 * queries * channels * features + 2 * queries * rows * features,
        "folded": 2 * queries * channels * heads * rows + 2 * rows * channels * features,
    }


def cheapest(costs: dict[Order, int]) -> Order:
    """The order with the lowest cost, the first of equals. A loop, because `min` with a key cannot be traced."""
    best, *others = costs
    for order in others:
        best = order if costs[order] < costs[best] else best
    return best


def length_to_plan(length: int) -> int:
    """The length for which the order is chosen: the input's, or `EXPORT_LENGTH` while it is symbolic."""
    return length if isinstance(length, int) else EXPORT_LENGTH
