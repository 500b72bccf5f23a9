"""Transformers over long sequences at linear cost.

Names load on first use, so that `import linformer_kit` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# where each public name lives
_HOMES = {
    "LinformerAttention": "models.attention_linformer",
    "Plan": "models.attention_linformer",
    "CausalLinformerAttention": "models.causal_linformer",
    "CausalCache": "models.causal_linformer",
    "LinformerEncoder": "models.encoder_linformer",
    "make_projection": "models.projection_linformer",
}

if TYPE_CHECKING:  # the same names again, where type checkers and editors look for them
    from .models.attention_linformer import LinformerAttention as LinformerAttention
    from .models.attention_linformer import Plan as Plan
    from .models.causal_linformer import CausalCache as CausalCache
    from .models.causal_linformer import CausalLinformerAttention as CausalLinformerAttention
    from .models.encoder_linformer import LinformerEncoder as LinformerEncoder
    from .models.projection_linformer import make_projection as make_projection


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
