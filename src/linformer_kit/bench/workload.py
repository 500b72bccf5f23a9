"""The workload of a point: the timed call, other columns of its row, and the shapes of its parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from .point import Point

Build = Callable[[Point], nn.Module]  # builds the subject of a point


@dataclass(frozen=True)
class Workload:
    """The timed call of a point, other columns of its row by phase, and the shapes of its parameters."""

    call: Callable[[], object]
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    count_multiply_adds: Callable[[], int] | None = None  # where no formula gives them: one more call


def torch_workload(
    point: Point,
    model: nn.Module,
    call: Callable[[], object],
    count_multiply_adds: Callable[[], int] | None = None,
    **columns: Any,
) -> Workload:
    """The workload of a PyTorch model. Its call returns when everything has been computed."""
    parameters = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    is_cpu = torch.device(point.device).type == "cpu"
    call = call if is_cpu else partial(call_and_wait, call, point.device)
    return Workload(call, {"": columns}, parameters, count_multiply_adds)


def counted_multiply_adds(call: Callable[[], object]) -> int:
    """The multiply-adds of the matrix products in a call."""
    # PyTorch's counter does not know the fused kernel of the CPU
    fused = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused_attention_flops}
    with FlopCounterMode(display=False, custom_mapping=fused) as counter:
        call()
    return counter.get_total_flops() // 2


def fused_attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def call_and_wait(call: Callable[[], object], device: str) -> None:
    """Call and synchronize: a GPU computes asynchronously."""
    call()
    torch.accelerator.synchronize(torch.device(device))
