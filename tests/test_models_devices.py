"""Models on accelerators: a constant number of operations, none of which waits for values, and the same outputs.

The accelerator is "lazy" with fake tensors, which compute shapes only: a device that is neither the CPU nor "meta", and
the only one that PyTorch for CPUs can handle.
"""

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import CAUSAL_VARIANTS, LENGTH, MODELS, VARIANTS, build, ids, labels_for, run

from linformer_kit import LinformerForCausalLM, LinformerForConditionalGeneration, LinformerForMaskedLM, LinformerModel
from linformer_kit.models import causal_linformer, modeling_linformer, validation_linformer

SIZES = [(2, 512), (2, 4096), (32, 512)]  # batch and length
# every model, and every variant of encoder and decoder
CASES = [
    *((model_class, "default") for model_class in MODELS),
    *((LinformerModel, name) for name in VARIANTS if name != "default"),
    *((LinformerForCausalLM, name) for name in CAUSAL_VARIANTS if name != "default"),
    (LinformerForConditionalGeneration, "window"),
    (LinformerForConditionalGeneration, "full decoder"),
]
cases = pytest.mark.parametrize(
    ("model_class", "variant"), CASES, ids=[f"{model.__name__}-{name}" for model, name in CASES]
)


class Operations(TorchDispatchMode):
    """Counts operations, and raises for tensors on another device."""

    def __init__(self, device):
        super().__init__()
        self.device, self.counts = device, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        assert all(leaf.device.type == self.device for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.counts[str(function)] += 1
        return result


def operations(model_class, variant, is_training):
    """The operations of a forward pass or a training step for each of the sizes."""
    # "lazy" has no random numbers, whose state reversible layers keep for the backward pass
    device = "meta" if is_training and "reversible" in VARIANTS[variant] else "lazy"
    counts = []
    for batch, length in SIZES:
        with FakeTensorMode():  # raises for operations that read values
            with torch.device(device):
                model = build(model_class, **{"max_position_embeddings": 4096, **VARIANTS[variant]}).train(is_training)
                inputs = {"input_ids": ids(batch, length), "attention_mask": torch.ones(batch, length, dtype=torch.long)}
                if is_training:
                    inputs |= labels_for(model, inputs["input_ids"])
                elif model_class is LinformerForConditionalGeneration:
                    inputs["decoder_input_ids"] = ids(batch, length)
            with Operations(device) as seen, torch.set_grad_enabled(is_training):
                output = model(**inputs)
                if is_training:
                    (output.loss if "loss" in output else output[0].square().mean()).backward()
        counts.append(seen.counts)
    return counts


@cases
@pytest.mark.parametrize("is_training", [False, True], ids=["inference", "training"])
def test_on_an_accelerator_no_values_are_read_and_the_number_of_operations_does_not_grow(
    model_class, variant, is_training
):
    short, long, many = operations(model_class, variant, is_training)
    assert short == long == many


@pytest.mark.parametrize("model_class", MODELS)
def test_a_fake_model_on_the_cpu_takes_a_mask_and_labels(model_class):
    with FakeTensorMode():
        model, input_ids = build(model_class), ids()
        loss = model(input_ids, attention_mask=torch.ones_like(input_ids), **labels_for(model, input_ids))
        assert loss[0].device.type == "cpu"
