"""Reads the tensors of a PyTorch or safetensors file. Nothing is unpickled: a file cannot run code."""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UserError
from ..models.projection_linformer import at_least_float32

# where training scripts and fairseq keep the state dict in a checkpoint
NESTED = ("model", "state_dict", "model_state_dict")
NO_TORCH_FILE = "is not a file of torch.save, or damaged; save the state dict again"
# wrappers that put a prefix before all names: DataParallel, torch.compile
WRAPPERS = ("module.", "_orig_mod.")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The state dict in a file, on the CPU."""
    if path.is_dir():
        raise UserError(f"{path} is a directory; pass the file with the state dict")
    if not path.is_file():
        raise UserError(f"{path} does not exist; pass a file written by torch.save(model.state_dict(), …)")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty; save the state dict again")
    return state_dict_of(read_safetensors(path) if path.suffix == ".safetensors" else read_pytorch(path), str(path))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — not a dict
            # `safetensors.torch.save_model` stores shared tensors once, and the other names here
            others = file.metadata() or {}
    except SafetensorError as error:
        raise UserError(f"{path} is not a valid safetensors file ({error}); save the state dict again") from None
    return {**tensors, **{name: tensors[same] for name, same in others.items() if same in tensors}}


def read_pytorch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if found := re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", str(error)):
            raise UserError(
                f"{path} holds more than tensors ({found[1]}), and loading it could run code. If you trust the file, "
                "extract the state dict where it was made: "
                "torch.save(torch.load(path, weights_only=False)['model'], 'weights.pt') for a checkpoint of fairseq, "
                "torch.save(model.state_dict(), 'weights.pt') for a saved model"
            ) from None
        raise UserError(f"{path} {NO_TORCH_FILE}") from None
    except (LookupError, AttributeError, TypeError):  # of the unpickler, in a file that begins like a pickle
        raise UserError(f"{path} {NO_TORCH_FILE}") from None
    except (RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path} is damaged ({str(error).splitlines()[0]}); save the state dict again") from None


def state_dict_of(loaded: Any, name: str) -> dict[str, Tensor]:
    """The tensors of a state dict, or of the one in a checkpoint: in float32 or wider, without a wrapper's prefix."""
    if isinstance(loaded, dict):
        loaded = next((loaded[key] for key in NESTED if isinstance(loaded.get(key), dict)), loaded)
    if not isinstance(loaded, dict) or not any(isinstance(value, Tensor) for value in loaded.values()):
        raise UserError(f"{name} holds no state dict: a dict of tensors, as model.state_dict() returns it")
    tensors = {key: value.detach() for key, value in loaded.items() if isinstance(value, Tensor)}
    tensors = {key: at_least_float32(value) if value.is_floating_point() else value for key, value in tensors.items()}
    for wrapper in WRAPPERS:
        if all(key.startswith(wrapper) for key in tensors):
            tensors = {key.removeprefix(wrapper): value for key, value in tensors.items()}
    return tensors
