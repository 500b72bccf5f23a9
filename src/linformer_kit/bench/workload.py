"""The workload of a point: the timed call, other columns of its row, and the shapes of its parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from .point import Point

Build = Callable[[Point], nn.Module]  # builds the subject of a point


@dataclass(frozen=True)
class Workload:
    """The timed call of a point, other columns of its row by phase, and the shapes of its parameters."""

    call: Callable[[], object]
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)


def torch_workload(point: Point, model: nn.Module, call: Callable[[], object], **columns: Any) -> Workload:
    """The workload of a PyTorch model. Its call returns when everything has been computed."""
    parameters = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    is_cpu = torch.device(point.device).type == "cpu"
    return Workload(call if is_cpu else partial(call_and_wait, call, point.device), {"": columns}, parameters)


def call_and_wait(call: Callable[[], object], device: str) -> None:
    """Call and synchronize: a GPU computes asynchronously."""
    call()
    torch.accelerator.synchronize(torch.device(device))
