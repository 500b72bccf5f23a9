"""How a model is executed: the precision of its matrix products, and compilation."""

import os
import shutil
from itertools import chain
from typing import Literal, TypeVar, get_args

import torch
from torch import nn

from .errors import UserError
from .models.int8_linformer import Int8Linear, quantize

Precision = Literal["float32", "bfloat16", "int8"]
InferencePrecision = Literal["auto", "float32", "bfloat16", "int8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

Model = TypeVar("Model", bound=nn.Module)


def has_fast_bfloat16(device: str | torch.device) -> bool:
    """Whether a device has instructions that multiply bfloat16; on CPUs these are AVX512-BF16 and AMX."""
    kind = torch.device(device).type
    if kind == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def fastest_precision(device: str | torch.device) -> Literal["float32", "bfloat16"]:
    """The precision that `auto` stands for: bfloat16 where it is fast, float32 elsewhere."""
    return "bfloat16" if has_fast_bfloat16(device) else "float32"


def compiled(model: Model) -> Model:
    """The same model, which `torch.compile` compiles at its first call, for all batch sizes and lengths."""
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
        raise UserError("compiling needs a C++ compiler such as g++, and none is found; install one, or do not compile")
    model.compile(dynamic=True)
    return model


def in_precision(model: Model, precision: Precision) -> Model:
    """The model for inference in a precision.

    - "bfloat16": under autocast, which converts the operands of matrix products, attention and convolutions. Weights,
      norms, residuals and the loss stay in float32. The model is changed in place.
    - "int8": with linear layers of 8-bit weights, a copy (`quantize`); the other products in bfloat16 where it is fast.

    >>> from linformer_kit import LinformerAttention
    >>> layer = in_precision(LinformerAttention(64, 4), "bfloat16")
    >>> layer(torch.randn(2, 100, 64)).dtype
    torch.bfloat16
    """
    if precision == "int8" and not any(isinstance(module, Int8Linear) for module in model.modules()):
        try:
            model = quantize(model)
        except ValueError as error:
            raise UserError(f"precision is int8: {error}") from error
    device = next(chain(model.parameters(), model.buffers())).device.type
    if precision == "bfloat16" or (precision == "int8" and has_fast_bfloat16(device)):
        # around the method of the instance, so that all callers find it, such as `generate`
        model.forward = torch.autocast(device, torch.bfloat16)(model.forward)
    return model
