"""Registers the models with the Auto classes of transformers, and so with pipelines, on import."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .configuration_linformer import LinformerConfig
from .modeling_linformer import (
    LinformerForCausalLM,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)
from .modeling_linformer_seq2seq import LinformerForConditionalGeneration

MODELS = {
    AutoModel: LinformerModel,
    AutoModelForMaskedLM: LinformerForMaskedLM,
    AutoModelForSequenceClassification: LinformerForSequenceClassification,
    AutoModelForTokenClassification: LinformerForTokenClassification,
    AutoModelForQuestionAnswering: LinformerForQuestionAnswering,
    AutoModelForCausalLM: LinformerForCausalLM,
    AutoModelForSeq2SeqLM: LinformerForConditionalGeneration,
}

AutoConfig.register("linformer", LinformerConfig, exist_ok=True)
for auto_class, model_class in MODELS.items():
    auto_class.register(LinformerConfig, model_class, exist_ok=True)
# Trainer uses this list of names to decide whether label smoothing shifts the labels
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["linformer"] = LinformerForCausalLM.__name__
