"""What a training will need, found out by one step on a copy of the model."""

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .checkpoint import preserve_rng_state

# weights, gradients and the two moments of AdamW
TENSORS_PER_PARAMETER = 4


@dataclass(frozen=True)
class Estimate:
    """Bytes of weights, gradients, optimizer and of what the backward pass keeps; seconds of a step."""

    bytes: int
    seconds: float


def estimate(
    model: PreTrainedModel,
    longest: dict[str, Tensor],
    typical: dict[str, Tensor],
    accumulate: int,
    checkpointing: bool = False,
) -> Estimate:
    """Memory by the longest batch, time by a typical one. The model and the generators stay as they are."""
    with preserve_rng_state():
        trial = copy.deepcopy(model).train()
        if checkpointing:
            trial.gradient_checkpointing_enable()
        kept = kept_for_backward(trial, longest)
        seconds = min(step_seconds(trial, typical) for _ in range(2))
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return Estimate(TENSORS_PER_PARAMETER * weights + kept, accumulate * seconds)


def kept_for_backward(model: PreTrainedModel, batch: dict[str, Tensor]) -> int:
    """Bytes that autograd keeps of a forward pass, the weights themselves excepted."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs: Any = model(**batch)
    del outputs
    return sum(kept.values())


def step_seconds(model: PreTrainedModel, batch: dict[str, Tensor]) -> float:
    """Forward and backward."""
    start = time.perf_counter()
    model(**batch).loss.backward()
    return time.perf_counter() - start
