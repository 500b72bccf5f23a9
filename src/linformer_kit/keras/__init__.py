"""Linformer for Keras 3 on TensorFlow, JAX or PyTorch; `KERAS_BACKEND` selects the backend."""

try:
    import keras  # noqa: F401 — for an error that names the packages to install
except ImportError as error:
    raise ImportError(
        "Keras or its backend is not installed; pip install 'linformer-kit[keras]' for PyTorch, "
        f"'linformer-kit[tensorflow]' or 'linformer-kit[jax]' ({error})"
    ) from error

from .attention import LinearMultiHeadAttention
from .models import Linformer, LinformerBackbone, LinformerCausalLM, LinformerMaskedLM
from .options import Options
from .projection import make_projection
from .seq2seq import LinformerSeq2Seq
from .weights import from_torch, to_torch

__all__ = [
    "LinearMultiHeadAttention",
    "Linformer",
    "LinformerBackbone",
    "LinformerCausalLM",
    "LinformerMaskedLM",
    "LinformerSeq2Seq",
    "Options",
    "from_torch",
    "make_projection",
    "to_torch",
]
