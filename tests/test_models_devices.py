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
from zoo import CAUSAL_VARIANTS, LENGTH, MODELS, VARIANTS, build, ids, is_per_token, labels_for, run

from linformer_kit import LinformerForCausalLM, LinformerForConditionalGeneration, LinformerForMaskedLM, LinformerModel
from linformer_kit.models import causal_linformer, modeling_linformer, validation_linformer
from linformer_kit.models.cache_linformer import LinformerCache

SIZES = [(2, 512), (32, 4096)]  # batch and length
# convolutions have several rows for the short input, too, and the long one has no other order of the products
SIZES_OF_MODEL = {"max_position_embeddings": 4096, "projected_length": 16, "hidden_size": 32}
# every model, and every variant of encoder and decoder; for training, those with a backward pass of their own
CASES = [
    *((model_class, "default", is_training) for model_class in MODELS for is_training in (False, True)),
    *((LinformerModel, name, False) for name in VARIANTS if name != "default"),
    *((LinformerForCausalLM, name, False) for name in CAUSAL_VARIANTS if name != "default"),
    (LinformerForConditionalGeneration, "window", False),
    (LinformerForConditionalGeneration, "full decoder", False),
    *((LinformerModel, name, True) for name in ("window", "window without rows", "random")),
    (LinformerForCausalLM, "full decoder", True),
]


class Operations(TorchDispatchMode):
    """Counts operations, and raises for tensors on another device."""

    def __init__(self, device):
        super().__init__()
        self.device, self.counts = device, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        assert all(leaf.device.type == self.device for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        if function.namespace == "aten":  # not questions such as `prim::device`
            self.counts[str(function)] += 1
        return result


@pytest.mark.parametrize(
    ("model_class", "variant", "is_training"),
    CASES,
    ids=[f"{model.__name__}-{name}-{'training' if is_training else 'inference'}" for model, name, is_training in CASES],
)
def test_an_accelerator_reads_no_values_and_the_number_of_operations_does_not_grow(model_class, variant, is_training):
    # "lazy" has no random numbers, whose state reversible layers keep for the backward pass
    device = "meta" if is_training and "reversible" in VARIANTS[variant] else "lazy"
    counts = []
    with FakeTensorMode():  # raises for operations that read values
        with torch.device(device):
            model = build(model_class, **{**SIZES_OF_MODEL, **VARIANTS[variant]}).train(is_training)
        for batch, length in SIZES:
            with torch.device(device):
                inputs = {
                    "input_ids": ids(batch, length),
                    "attention_mask": torch.ones(batch, length, dtype=torch.long),
                }
                if is_training:
                    inputs |= labels_for(model, inputs["input_ids"])
                elif model_class is LinformerForConditionalGeneration:
                    inputs["decoder_input_ids"] = ids(batch, length)
            model.zero_grad()
            with Operations(device) as seen, torch.set_grad_enabled(is_training):
                output = model(**inputs)
                if is_training:
                    (output.loss if "loss" in output else output[0].square().mean()).backward()
            counts.append(seen.counts)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("model_class", MODELS)
def test_a_fake_model_on_the_cpu_takes_a_mask_and_labels(model_class):
    with FakeTensorMode():
        model, input_ids = build(model_class), ids()
        loss = model(input_ids, attention_mask=torch.ones_like(input_ids), **labels_for(model, input_ids))
        assert loss[0].device.type == "cpu"


@pytest.fixture
def unread(monkeypatch):
    """Values are not read, as on an accelerator."""
    for module in (validation_linformer, modeling_linformer, causal_linformer):
        monkeypatch.setattr(module, "can_read_values", lambda _: False)


@pytest.mark.parametrize("model_class", MODELS)
def test_outputs_are_the_same_if_no_values_are_read(model_class, request):
    model, input_ids = build(model_class), ids()
    full, padded = torch.ones_like(input_ids), torch.ones_like(input_ids)
    padded[1, :9] = 0
    masks = (full, padded, padded.bool(), padded.float())
    expected = [run(model, input_ids, attention_mask=mask) for mask in masks]
    request.getfixturevalue("unread")
    for mask, output in zip(masks, expected, strict=True):
        real = mask.bool() if is_per_token(model) else slice(None)
        assert_close(run(model, input_ids, attention_mask=mask)[real], output[real])


def test_padded_prompts_are_continued_the_same_if_no_values_are_read(unread):
    """The cache has room for the summaries of all columns, and no more."""
    model, input_ids = build(LinformerForCausalLM), ids()
    mask, cache = torch.ones_like(input_ids), LinformerCache(model.config)
    mask[1, :6] = 0
    expected = model(input_ids, attention_mask=mask, use_cache=False).logits
    for first, after in ((0, 11), *((place, place + 1) for place in range(11, LENGTH))):
        logits = model(input_ids[:, first:after], attention_mask=mask[:, :after], past_key_values=cache).logits
        real = mask[:, first:after].bool()
        assert_close(logits[real], expected[:, first:after][real])
        summaries = cache.layers[0].past.summaries.keys_BSF
        assert summaries.shape[1] == after // model.config.block_length * model.config.slots


def test_logits_are_computed_at_places_as_at_a_mask():
    """Places need no counting."""
    model, input_ids = build(LinformerForMaskedLM), ids()
    mask = torch.rand(input_ids.shape) < 0.3
    labels = input_ids.masked_fill(~mask, -100)
    masked, placed = (
        model(input_ids, labels=labels, logits_to_keep=kept) for kept in (mask, mask.flatten().nonzero().flatten())
    )
    assert torch.equal(masked.logits, placed.logits)
    assert torch.equal(masked.loss, placed.loss)
