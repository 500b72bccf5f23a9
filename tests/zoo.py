"""Every model, small, with inputs and labels: what the tests of models share."""

import torch

from linformer_kit import (
    LinformerConfig,
    LinformerForCausalLM,
    LinformerForConditionalGeneration,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)

MODELS = [
    LinformerModel,
    LinformerForMaskedLM,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerForQuestionAnswering,
    LinformerForCausalLM,
    LinformerForConditionalGeneration,
]
VOCABULARY = 50
LENGTH = 21
# settings that change which code runs; several in one where they do not meet, since every variant takes time
VARIANTS = {
    "default": {},
    "post-norm": {"norm_first": False},
    "per head": {"sharing": "none"},
    "kv": {"sharing": "kv", "num_key_value_heads": 1},
    "layerwise": {"sharing": "layerwise"},
    "layerwise random": {"sharing": "layerwise", "projection": "random", "reversible": True},
    "K per layer": {"projected_length": [6, 3]},
    "rescale": {"rescale": True},
    "dynamic": {"projection": "dynamic", "position_embedding": "sinusoidal"},
    "conv": {"projection": "conv", "position_embedding": "none", "local_width": 3},
    "mean": {"projection": "mean", "type_vocab_size": 0, "embedding_size": 6},
    "max": {"projection": "max", "classifier_pooling": "first", "outer_norms": False, "intermediate_size": 0},
    "affine": {"projection": "affine", "sharing": "none"},
    "head_conv": {"projection": "head_conv", "sharing": "layerwise", "num_key_value_heads": 1},
    "random": {"projection": "random", "reversible": True},
    "none": {"projection": "none", "local_width": 5},
    "none layerwise": {"projection": "none", "sharing": "layerwise"},
    "full decoder": {"decoder_attention": "full", "sharing": "layerwise", "projected_length": [3, 6]},
    "untied": {"tie_word_embeddings": False, "head_dim": 5, "hidden_act": "relu"},
    "window": {"window_length": 3, "global_tokens": 2, "sharing": "layerwise"},
    "window without rows": {
        "window_length": 4,
        "projected_length": [0, 5],
        "projection": "dynamic",
        "distance_bias": True,
    },
}
# a causal layer has no window
CAUSAL_VARIANTS = [name for name, options in VARIANTS.items() if "window_length" not in options]


def config(**changes):
    return LinformerConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
            "projected_length": 5,
            "block_length": 4,
            "slots": 2,
            "num_labels": 3,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            **changes,
        }
    )


def build(model_class, spread=0.3, **changes):
    """A model whose parameters are large enough for every one of them to matter."""
    model = model_class(config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return model


def ids(batch=2, length=LENGTH):
    return torch.randint(3, VOCABULARY, (batch, length))


def labels_for(model, input_ids):
    """Labels under the names the model knows them by; none for the bare model."""
    batch, length = input_ids.shape
    if isinstance(model, LinformerForQuestionAnswering):
        return {"start_positions": torch.randint(length, (batch,)), "end_positions": torch.randint(length, (batch,))}
    if isinstance(model, LinformerForSequenceClassification):
        return {"labels": torch.randint(3, (batch,))}
    if isinstance(model, LinformerForTokenClassification):
        return {"labels": torch.randint(3, (batch, length))}
    if isinstance(model, LinformerForConditionalGeneration):
        return {"labels": ids(batch, 9)}
    if isinstance(model, LinformerForMaskedLM | LinformerForCausalLM):
        return {"labels": input_ids.clone()}
    return {}


def run(model, input_ids, **kwargs):
    """The model's answer, as one tensor; the encoder-decoder is asked about a fixed target."""
    if isinstance(model, LinformerForConditionalGeneration) and not {"labels", "decoder_input_ids"} & set(kwargs):
        kwargs["decoder_input_ids"] = (torch.arange(9)[None] * 5 % (VOCABULARY - 3) + 3).repeat(input_ids.shape[0], 1)
    output = model(input_ids, **kwargs)
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.logits if "logits" in output else output.last_hidden_state


def loss_of(model, input_ids, **kwargs):
    """The loss; of the bare model, which has none, the mean square of its output."""
    labels = labels_for(model, input_ids)
    if not labels:
        return run(model, input_ids, **kwargs).square().mean()
    return model(input_ids, **labels, **kwargs).loss


def is_per_token(model):
    """Whether there is an answer for every token of the input."""
    return not isinstance(model, LinformerForSequenceClassification | LinformerForConditionalGeneration)
