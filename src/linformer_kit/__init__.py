"""Transformers over long sequences at linear cost.

Names load on first use, so that `import linformer_kit` is quick. As soon as transformers is imported too, in whichever
order, its Auto classes and pipelines know the models.
"""

import sys
from importlib import abc, import_module
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
    "LinformerConfig": "models.configuration_linformer",
    "LinformerCache": "models.cache_linformer",
    "LinformerModel": "models.modeling_linformer",
    "LinformerForMaskedLM": "models.modeling_linformer",
    "LinformerForSequenceClassification": "models.modeling_linformer",
    "LinformerForTokenClassification": "models.modeling_linformer",
    "LinformerForQuestionAnswering": "models.modeling_linformer",
    "LinformerForCausalLM": "models.modeling_linformer",
    "LinformerForConditionalGeneration": "models.modeling_linformer_seq2seq",
}
# the modules that import transformers
_OF_TRANSFORMERS = tuple(
    f"{__name__}.models.{kind}_linformer" for kind in ("auto", "cache", "configuration", "modeling")
)

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:  # the same names again, where type checkers and editors look for them
    from .models.attention_linformer import LinformerAttention as LinformerAttention
    from .models.attention_linformer import Plan as Plan
    from .models.cache_linformer import LinformerCache as LinformerCache
    from .models.causal_linformer import CausalCache as CausalCache
    from .models.causal_linformer import CausalLinformerAttention as CausalLinformerAttention
    from .models.configuration_linformer import LinformerConfig as LinformerConfig
    from .models.encoder_linformer import LinformerEncoder as LinformerEncoder
    from .models.modeling_linformer import LinformerForCausalLM as LinformerForCausalLM
    from .models.modeling_linformer import LinformerForMaskedLM as LinformerForMaskedLM
    from .models.modeling_linformer import LinformerForQuestionAnswering as LinformerForQuestionAnswering
    from .models.modeling_linformer import LinformerForSequenceClassification as LinformerForSequenceClassification
    from .models.modeling_linformer import LinformerForTokenClassification as LinformerForTokenClassification
    from .models.modeling_linformer import LinformerModel as LinformerModel
    from .models.modeling_linformer_seq2seq import (
        LinformerForConditionalGeneration as LinformerForConditionalGeneration,
    )
    from .models.projection_linformer import make_projection as make_projection


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    home = f"{__name__}.{_HOMES[name]}"
    if home.startswith(_OF_TRANSFORMERS):
        _register()
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def _register() -> None:
    """Make the models known to the Auto classes."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _WhenTransformersIsImported)]
    import_module(".models.auto_linformer", __name__)


class _WhenTransformersIsImported(abc.MetaPathFinder):
    """Registers the models right after transformers, or our modules that import it, are loaded: it is slow, not ours to ask for."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "transformers" and not fullname.startswith(_OF_TRANSFORMERS):
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module):
            execute(module)
            # what is still being loaded cannot be registered yet; it will come here too
            loading = [name for name in sys.modules if name == "transformers" or name.startswith(_OF_TRANSFORMERS)]
            if self in sys.meta_path and not any(_is_loading(name) for name in loading if name != fullname):
                _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _is_loading(name: str) -> bool:
    return getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False)


if "transformers" in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _WhenTransformersIsImported())
