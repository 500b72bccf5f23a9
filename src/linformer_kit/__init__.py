"""Transformers for long sequences at linear cost.

Names are loaded on first use, so that `import linformer_kit` is fast. Once transformers is imported too, in any
order, its Auto classes and pipelines support the models.
"""

import sys
from importlib import abc, import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# the module that defines each public name
_HOMES = {
    "LinformerAttention": "models.attention_linformer",
    "Plan": "models.plan_linformer",
    "CausalLinformerAttention": "models.causal_linformer",
    "CausalCache": "models.causal_linformer",
    "LinformerEncoder": "models.encoder_linformer",
    "make_projection": "models.projection_linformer",
    "quantize": "models.int8_linformer",
    "LinformerConfig": "models.configuration_linformer",
    "LinformerCache": "models.cache_linformer",
    "LinformerModel": "models.modeling_linformer",
    "LinformerForMaskedLM": "models.modeling_linformer",
    "LinformerForSequenceClassification": "models.modeling_linformer",
    "LinformerForTokenClassification": "models.modeling_linformer",
    "LinformerForQuestionAnswering": "models.modeling_linformer",
    "LinformerForCausalLM": "models.modeling_linformer",
    "LinformerSeq2SeqModel": "models.modeling_linformer_seq2seq",
    "LinformerForConditionalGeneration": "models.modeling_linformer_seq2seq",
    "plot_heads": "plots.heads",
    "import_model": "convert.import_model",
    "load_imported": "convert.import_model",
}
# transformers, and the modules that import it
_TRANSFORMERS = (
    "transformers",
    *(
        f"{__name__}.models.{name}"
        for name in (
            "auto_linformer",
            "cache_linformer",
            "configuration_linformer",
            "modeling_linformer",
            "modeling_linformer_seq2seq",
        )
    ),
)

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:  # for type checkers and editors
    from .convert.import_model import import_model as import_model
    from .convert.import_model import load_imported as load_imported
    from .models.attention_linformer import LinformerAttention as LinformerAttention
    from .models.cache_linformer import LinformerCache as LinformerCache
    from .models.causal_linformer import CausalCache as CausalCache
    from .models.causal_linformer import CausalLinformerAttention as CausalLinformerAttention
    from .models.configuration_linformer import LinformerConfig as LinformerConfig
    from .models.encoder_linformer import LinformerEncoder as LinformerEncoder
    from .models.int8_linformer import quantize as quantize
    from .models.modeling_linformer import LinformerForCausalLM as LinformerForCausalLM
    from .models.modeling_linformer import LinformerForMaskedLM as LinformerForMaskedLM
    from .models.modeling_linformer import LinformerForQuestionAnswering as LinformerForQuestionAnswering
    from .models.modeling_linformer import LinformerForSequenceClassification as LinformerForSequenceClassification
    from .models.modeling_linformer import LinformerForTokenClassification as LinformerForTokenClassification
    from .models.modeling_linformer import LinformerModel as LinformerModel
    from .models.modeling_linformer_seq2seq import (
        LinformerForConditionalGeneration as LinformerForConditionalGeneration,
    )
    from .models.modeling_linformer_seq2seq import LinformerSeq2SeqModel as LinformerSeq2SeqModel
    from .models.plan_linformer import Plan as Plan
    from .models.projection_linformer import make_projection as make_projection
    from .plots.heads import plot_heads as plot_heads


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    module = f"{__name__}.{_HOMES[name]}"
    if module in _TRANSFORMERS:
        _register()
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def _register() -> None:
    """Register the models with the Auto classes."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _RegisterAfterImport)]
    import_module(".models.auto_linformer", __name__)


class _RegisterAfterImport(abc.MetaPathFinder):
    """Registers the models when transformers is imported.

    Importing the Auto classes takes seconds, and transformers has no entry point for other packages. So this hook
    waits until the user imports transformers, or one of our modules that need it.
    """

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in _TRANSFORMERS:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                # modules that are still loading cannot be registered yet; the last of them registers all
                if self in sys.meta_path and not any(map(_is_loading, {*_TRANSFORMERS} - {fullname})):
                    _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _is_loading(name: str) -> bool:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


if "transformers" in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _RegisterAfterImport())
