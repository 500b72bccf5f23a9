"""Checks of input tensors. Each error names the value, what is allowed and the remedy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode


def check_features(name: str, x: Any, width: int, like: Tensor, option: str = "embed_dim") -> None:
    """Raise unless `x` is a (batch, length, width) tensor with the device and dtype of the parameter `like`.

    `option` is the name of the width among the options of the layer.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor of shape (batch, length, {width})")
    if x.dim() != 3:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it must have 3 dimensions, (batch, length, {width}): "
            "add a batch dimension with x.unsqueeze(0), or flatten the leading dimensions"
        )
    if x.shape[-1] != width:
        raise ValueError(
            f"{name} has width {x.shape[-1]} but this layer has {option}={width}; build it for the width of its input"
        )
    if x.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: it must contain at least one token")
    # a layer on the meta device with an input elsewhere is offloaded: hooks will load its weights
    if x.device != like.device and not like.is_meta:
        raise ValueError(
            f"{name} is on {x.device} but the layer is on {like.device}; move one of them with .to(device)"
        )
    if x.dtype != like.dtype:
        # autocast does not convert float64
        can_be_cast = x.is_floating_point() and torch.float64 not in (x.dtype, like.dtype)
        if not (can_be_cast and autocast_is_on(x.device)):
            raise ValueError(
                f"{name} is {x.dtype} but the layer's weights are {like.dtype}; convert one of them with .to(dtype)"
                f"{', or run under torch.autocast' if can_be_cast else ''}"
            )


def autocast_is_on(device: torch.device) -> bool:
    """Whether autocast is enabled for the device; some devices, such as meta, do not support it."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of products with `weight`: its own, or that of autocast."""
    is_cast = autocast_is_on(weight.device) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(weight.device.type) if is_cast else weight.dtype


def has_values(tensor: Tensor) -> bool:
    """Whether code may depend on the values of a tensor: not in a compiled graph, on the meta device, or if fake."""
    return not (torch.compiler.is_compiling() or tensor.is_meta or detect_fake_mode(tensor) is not None)


def can_read_values(tensor: Tensor) -> bool:
    """Whether values can be read at no cost: on a CPU. Elsewhere, the program would wait until the device is idle.

    So other devices skip checks of values. A wrong id raises there in the kernel that uses it.
    """
    return tensor.device.type == "cpu" and has_values(tensor)


def computes_in_chunks(x: Tensor) -> bool:
    """Whether to compute pieces one after the other, so that intermediate results stay in the cache of a CPU.

    Other devices need few and large calls. With gradients, and in graphs, intermediate results are kept anyway.
    """
    return x.device.type == "cpu" and not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def boolean_mask(name: str, mask: Any, x: Tensor) -> Tensor:
    """`mask` as a boolean (batch, length) tensor for `x`; accepts integers 0 and 1, as tokenizers return them."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} is a {type(mask).__name__}; it must be a tensor of shape (batch, length)")
    if mask.shape != x.shape[:2]:
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}; it must be (batch, length) = {tuple(x.shape[:2])}, "
            "True at the real tokens of the context"
        )
    if mask.device != x.device:
        raise ValueError(f"{name} is on {mask.device} but the tokens are on {x.device}; move it with .to(device)")
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"{name} is {mask.dtype}; it must be boolean, or integers 0 and 1: use mask.bool()")
    if can_read_values(mask) and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            f"{name} has integers from {int(mask.min())} to {int(mask.max())}; only 0 (padding) and 1 (real) are "
            "allowed"
        )
    return mask.bool()


def check_integers(name: str, ids: Any, shape: str) -> None:
    """Raise unless `ids` is a tensor of integers."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name} is a {type(ids).__name__}; it must be a tensor of shape {shape}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{name} is {ids.dtype}; it must contain integers, of shape {shape}")


def check_indices(name: str, ids: Any, count: int | None, batch: int, length: int) -> None:
    """Raise for indices outside 0 … count - 1; on some devices they would crash the process."""
    check_integers(name, ids, f"({batch}, {length})")
    if tuple(ids.shape) not in ((batch, length), (1, length)):
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; it must be ({batch}, {length})")
    if count is not None and can_read_values(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < count):
        raise ValueError(
            f"{name} has values from {int(ids.min())} to {int(ids.max())}; only 0 … {count - 1} are allowed: "
            "use the tokenizer of this model, or build a larger model"
        )


def check_ids(name: str, ids: Any, vocabulary: int) -> None:
    """Raise unless `ids` is a non-empty (batch, length) tensor of indices into the vocabulary."""
    check_integers(name, ids, "(batch, length)")
    if ids.dim() != 2 or 0 in ids.shape:
        raise ValueError(
            f"{name} has shape {tuple(ids.shape)}; it must be (batch, length) with at least one example and one token"
        )
    if can_read_values(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
        raise ValueError(
            f"{name} has ids from {int(ids.min())} to {int(ids.max())} but the vocabulary has {vocabulary}; "
            "use the tokenizer of this model, or model.resize_token_embeddings(...)"
        )


def check_embedded(name: str, x: Any, width: int) -> None:
    """Raise unless `x` is a non-empty (batch, length, width) tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor of shape (batch, length, {width})")
    if x.dim() != 3 or x.shape[-1] != width or 0 in x.shape:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it must be (batch, length, {width}) "
            "with at least one example and one token"
        )


def padding_mask(
    name: str, mask: Any, shape: Sequence[int], device: torch.device, allow_empty: bool = False
) -> Tensor | None:
    """`mask` as a boolean (batch, length) tensor, or None if all tokens are real. Raises for empty examples.

    Where reading values is not free, it is always a tensor, and may have empty examples.
    Floats are accepted if all are 0 or 1, as some libraries pass them; others may be meant as scores to add.
    """
    # also where reading is not free, since what floats mean depends on them
    if isinstance(mask, Tensor) and mask.is_floating_point() and has_values(mask):
        is_boolean = bool(((mask == 0) | (mask == 1)).all())
        mask = mask.bool() if is_boolean else mask
    mask = boolean_mask(name, mask, torch.empty((), device=device).expand(*shape))
    if not can_read_values(mask):
        return mask
    if not allow_empty and not bool(mask.any(dim=1).all()):
        empty = (~mask.any(dim=1)).nonzero().flatten().tolist()
        raise ValueError(f"{name} has no real token in examples {empty}; drop them, or give each at least one token")
    return None if bool(mask.all()) else mask


def check_classes(name: str, labels: Any, logits: Tensor, ignored: int = -100) -> None:
    """Raise unless there is one label for each row of `logits`, a class of its last dimension or `ignored`."""
    check_integers(name, labels, str(tuple(logits.shape[:-1])))
    classes = logits.shape[-1]
    if labels.numel() != logits[..., 0].numel():
        raise ValueError(f"{name} has shape {tuple(labels.shape)}; it must be {tuple(logits.shape[:-1])}")
    if can_read_values(labels):
        wrong = labels[((labels < 0) | (labels >= classes)) & (labels != ignored)]
        if wrong.numel():
            raise ValueError(
                f"{name} has {int(wrong[0])}; only 0 … {classes - 1} are allowed, or {ignored} to ignore a token"
            )


def check_spans(start_positions: Any, end_positions: Any, batch: int) -> None:
    """Raise unless there is one non-negative integer per example."""
    for name, positions in (("start_positions", start_positions), ("end_positions", end_positions)):
        check_integers(name, positions, "(batch,)")
        if positions.numel() != batch:
            raise ValueError(
                f"{name} has shape {tuple(positions.shape)}; it must be ({batch},), one position per example"
            )
        if can_read_values(positions) and int(positions.min()) < 0:
            raise ValueError(
                f"{name} has {int(positions.min())}; a position is 0 or more, and ignored if beyond the input"
            )
