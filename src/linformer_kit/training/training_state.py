"""The state of training that a checkpoint stores besides the model: optimizer, scheduler, random number generators."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

# optimizer and scheduler


def save_optimizer(folder: Path, optimizer: dict[str, Any], scheduler: dict[str, Any]) -> None:
    """Save the states of an optimizer and its scheduler."""
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for parameter, state in optimizer["state"].items():
        for name, value in state.items():
            target = tensors if isinstance(value, torch.Tensor) else others
            target[f"{parameter}.{name}"] = value
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "optimizer.safetensors")
    rest = {"param_groups": optimizer["param_groups"], "others": others, "scheduler": scheduler}
    (folder / "optimizer.json").write_text(json.dumps(rest), encoding="utf-8")


def load_optimizer(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load the states saved by `save_optimizer`."""
    rest = json.loads((folder / "optimizer.json").read_text(encoding="utf-8"))
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**load_file(folder / "optimizer.safetensors"), **rest["others"]}.items():
        parameter, name = key.split(".", 1)
        state.setdefault(int(parameter), {})[name] = value
    groups = [{**group, "betas": tuple(group["betas"])} for group in rest["param_groups"]]
    return {"state": state, "param_groups": groups}, rest["scheduler"]


# random number generators


def random_state() -> dict[str, Any]:
    """The states of all random number generators that training uses."""
    version, numbers, gauss = random.getstate()
    name, keys, *place = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *place],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the states returned by `random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *place = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *place))
    torch.set_rng_state(bytes_tensor(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([bytes_tensor(one) for one in state["cuda"]])


def bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the random number generators at the end of the block."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
