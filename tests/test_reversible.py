"""Reversible layers: the gradients of their equations, without keeping activations."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import COMBINATIONS, randomize
from torch.testing import assert_close
from zoo import build, ids, loss_of

from linformer_kit import (
    LinformerEncoder,
    LinformerForCausalLM,
    LinformerForConditionalGeneration,
    LinformerForMaskedLM,
    LinformerForSequenceClassification,
)
from linformer_kit.models import encoder_linformer, modeling_linformer

SIZES = {"embed_dim": 8, "num_heads": 2, "depth": 3, "max_length": 12, "projected_length": 4, "reversible": True}
float64 = pytest.mark.usefixtures("float64")
DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}


def with_and_without_recomputing(compute, monkeypatch):
    """The results of `compute` with reversible layers, and with autograd applied to the same equations."""
    results = []
    for can_recompute in (True, False):
        for module in (encoder_linformer, modeling_linformer):
            monkeypatch.setattr(module, "can_recompute", lambda: can_recompute)  # noqa: B023 — used in this turn only
        torch.manual_seed(1)
        results.append(compute())
    return results


@float64
@pytest.mark.parametrize("feed_forward", ["gelu", "gated", "none"])
def test_the_output_is_that_of_the_equations(feed_forward):
    encoder = randomize(LinformerEncoder(**SIZES, sharing="layerwise", feed_forward=feed_forward))
    x = torch.randn(2, 10, 8)
    first, second = x, x
    for layer in encoder.layers:
        attended = layer.attention(layer.attention_norm(second), projection=encoder.projection)
        if feed_forward == "none":
            first, second = second, first + attended
        else:
            first = first + attended
            second = second + layer.feed_forward(layer.feed_forward_norm(first))
    expected = encoder.norm(first + second)
    assert_close(encoder(x), expected)
    with torch.no_grad():
        assert_close(encoder(x), expected)
    output, weights = encoder(x, need_weights=True)
    assert_close(output, expected)
    assert [one.shape for one in weights] == 3 * [(2, 2, 10, 4)]


@float64
@given(st.sampled_from(COMBINATIONS), st.sampled_from(["gelu", "none"]), st.integers(1, 12), st.booleans())
def test_gradients_are_those_of_autograd(combination, feed_forward, length, is_frozen):
    encoder = randomize(
        LinformerEncoder(
            **SIZES,
            projection=combination[0],
            sharing=combination[1],
            feed_forward=feed_forward,
            dropout=0.2,
            feed_forward_dropout=0.3,
        )
    )
    x, mask = torch.randn(2, length, 8, requires_grad=True), torch.rand(2, length) > 0.3
    encoder.layers[1].requires_grad_(not is_frozen)
    inputs = [x, *(parameter for parameter in encoder.parameters() if parameter.requires_grad)]

    def compute():
        output = encoder(x, mask)
        return output, torch.autograd.grad(output.square().sum(), inputs), torch.get_rng_state()

    with pytest.MonkeyPatch.context() as monkeypatch:
        assert_close(*with_and_without_recomputing(compute, monkeypatch))


@float64
@pytest.mark.parametrize("changes", [{}, {"sharing": "layerwise", "projection": "dynamic"}, {"intermediate_size": 0}])
@pytest.mark.parametrize(
    "model_class",
    [
        LinformerForMaskedLM,
        LinformerForSequenceClassification,
        LinformerForCausalLM,
        LinformerForConditionalGeneration,
    ],
)
def test_gradients_of_models_are_those_of_autograd(model_class, changes, monkeypatch):
    model = build(model_class, reversible=True, local_width=3, **DROPOUT, **changes).train()
    input_ids, mask = ids(), torch.arange(21) < torch.tensor([[21], [11]])

    def compute():
        model.zero_grad()
        for part in input_ids.split(1), input_ids.flip(0).split(1):  # accumulated over several backward passes
            torch.manual_seed(2)
            loss_of(model, torch.cat(part), attention_mask=mask).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    assert_close(*with_and_without_recomputing(compute, monkeypatch))


@pytest.mark.parametrize("is_inside", [False, True], ids=["backward outside", "backward inside"])
def test_autocast_is_that_of_the_forward_pass(is_inside, monkeypatch):
    model = build(LinformerForMaskedLM, spread=0.1, reversible=True, **DROPOUT).train()
    input_ids = ids()

    def compute():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids, labels=input_ids).loss
            if is_inside:
                loss.backward()
        if not is_inside:
            loss.backward()
        return [loss, *(parameter.grad for parameter in model.parameters())]

    (loss, *actual), (expected_loss, *expected) = with_and_without_recomputing(compute, monkeypatch)
    assert_close(loss, expected_loss)
    # float32 streams; their rounding may move a value of a layer across a boundary of bfloat16
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).norm() <= 0.01 * other.norm() + 1e-6


@float64
def test_adapters_get_the_gradients_of_autograd(monkeypatch):
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(target_modules=["query", "value", "inner"], lora_dropout=0.2, r=2)
    model = peft.get_peft_model(build(LinformerForMaskedLM, reversible=True), options).train()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    input_ids, (hooked, *_) = ids(), (one for name, one in trained.items() if "lora_B" in name)
    hooked.register_hook(lambda gradient: 2 * gradient)  # once

    def compute():
        model.zero_grad()
        model(input_ids, labels=input_ids).loss.backward()
        return {name: one.grad for name, one in trained.items()}

    assert_close(*with_and_without_recomputing(compute, monkeypatch))
    assert hooked.grad.any()


def test_kept_activations_do_not_grow_with_depth():
    class Kept:  # without the tensor, which would keep its own graph
        def __init__(self, tensor):
            self.pointer, self.nbytes = tensor.data_ptr(), tensor.nbytes

    def kept_bytes(depth, **changes):
        encoder = LinformerEncoder(**{**SIZES, "depth": depth, **changes})
        parameters, kept = {one.data_ptr() for one in encoder.parameters()}, weakref.WeakSet()

        def keep(tensor):
            one = Kept(tensor)
            kept.add(one)
            return one

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: None):
            output = encoder(torch.randn(8, 12, 8))
        assert output.requires_grad
        return sum(one.nbytes for one in kept if one.pointer not in parameters)

    assert kept_bytes(9) == kept_bytes(2) < 0.2 * kept_bytes(2, reversible=False)


def test_hidden_states_are_the_sums_of_both_streams():
    model = build(LinformerForCausalLM, reversible=True)
    output = model(ids(), output_hidden_states=True, output_attentions=True)
    embedded, after_one, last = output.hidden_states
    layer, start = model.model.layers[0], embedded / 2
    first = start + layer.attention(layer.attention_residual.norm(start))
    second = start + layer.feed_forward(layer.feed_forward_residual.norm(first))
    assert_close(after_one, first + second)
    assert last.shape == after_one.shape
    assert len(output.attentions) == 2


def test_an_exported_model_gives_the_same_output():
    model, input_ids = build(LinformerForSequenceClassification, reversible=True), ids()
    with torch.no_grad():
        exported = torch.export.export(model, (input_ids,)).module()
        assert_close(exported(input_ids).logits, model(input_ids).logits)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"norm_first": False}, "a sum that was normalized; use norm_first=True"),
        ({"gradient_checkpointing": True}, "reversible layers keep no activations"),
        ({"reversible": 1}, "reversible is 1; it must be True or False"),
    ],
)
def test_contradictory_options_of_the_encoder_raise(wrong, message):
    with pytest.raises(ValueError, match=message):
        LinformerEncoder(**{**SIZES, **wrong})
