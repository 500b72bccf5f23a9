"""Estimates the memory and the time of training with a step on a copy of the model."""

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..process_memory import release_free_memory
from .training_state import preserve_rng_state

# weights, gradients and the two moments of AdamW
TENSORS_PER_PARAMETER = 4


@dataclass(frozen=True)
class Estimate:
    """Bytes of weights, gradients, optimizer and saved activations; seconds per step."""

    bytes: int
    seconds: float


def estimate(
    model: PreTrainedModel,
    longest: dict[str, Tensor],
    typical: dict[str, Tensor],
    accumulate: int,
    checkpointing: bool = False,
) -> Estimate:
    """Measure memory on the longest batch and time on a typical one; the model and the RNG state are unchanged."""
    with preserve_rng_state():
        trial = copy.deepcopy(model).train()
        if checkpointing:
            trial.gradient_checkpointing_enable()
        saved = saved_bytes(trial, longest)
        seconds = min(step_seconds(trial, typical) for _ in range(2))
    del trial
    release_free_memory()  # what the longest batch needed
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return Estimate(TENSORS_PER_PARAMETER * weights + saved, accumulate * seconds)


def saved_bytes(model: PreTrainedModel, batch: dict[str, Tensor]) -> int:
    """Bytes that autograd saves during a forward pass, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        # detached: an operation that saves its own output would own itself, and its graph would never be freed
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        outputs: Any = model(**batch)
    del outputs
    return sum(saved.values())


def step_seconds(model: PreTrainedModel, batch: dict[str, Tensor]) -> float:
    """Seconds of a forward and a backward pass."""
    start = time.perf_counter()
    model(**batch).loss.backward()
    return time.perf_counter() - start
