"""The stack: its parts, sharing with one owner, checkpointing."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oracle import COMBINATIONS, randomize
from torch.testing import assert_close

from linformer_kit import LinformerAttention, LinformerEncoder

pytestmark = pytest.mark.usefixtures("float64")
SIZES = {"embed_dim": 8, "num_heads": 2, "depth": 3, "max_length": 12, "projected_length": 4}


def by_hand(encoder, x, norm_first, feed_forward):
    """The stack written out, with the layers' own attention."""
    activation = {"gelu": F.gelu, "relu": F.relu, "gated": lambda inner: F.gelu(inner[..., :5]) * inner[..., 5:]}.get(
        feed_forward
    )
    for layer in encoder.layers:
        if norm_first:
            x = x + layer.attention(layer.attention_norm(x), projection=encoder.projection)
            if activation:
                x = x + layer.feed_forward.outer(activation(layer.feed_forward.inner(layer.feed_forward_norm(x))))
        else:
            x = layer.attention_norm(x + layer.attention(x, projection=encoder.projection))
            if activation:
                x = layer.feed_forward_norm(x + layer.feed_forward.outer(activation(layer.feed_forward.inner(x))))
    return x if encoder.norm is None else encoder.norm(x)


@pytest.mark.parametrize("sharing", ["headwise", "layerwise"])
@pytest.mark.parametrize("feed_forward", ["gelu", "relu", "gated", "none"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_the_stack_equals_its_layers_applied_in_turn(norm_first, feed_forward, sharing):
    inner_dim = None if feed_forward == "none" else 5
    encoder = randomize(
        LinformerEncoder(
            **SIZES, norm_first=norm_first, feed_forward=feed_forward, feed_forward_dim=inner_dim, sharing=sharing
        )
    )
    x = torch.randn(2, 10, 8)
    assert_close(encoder(x), by_hand(encoder, x, norm_first, feed_forward))


def test_the_final_norm_can_be_left_out():
    for norm_first, final_norm, has_norm in [(True, None, True), (True, False, False), (False, False, False)]:
        encoder = randomize(LinformerEncoder(**SIZES, norm_first=norm_first, final_norm=final_norm))
        assert (encoder.norm is not None) is has_norm
        x = torch.randn(2, 10, 8)
        assert_close(encoder(x), by_hand(encoder, x, norm_first, "gelu"))
    with pytest.raises(ValueError, match="final_norm=True with norm_first=False"):
        LinformerEncoder(**SIZES, norm_first=False, final_norm=True)


@pytest.mark.parametrize("feed_forward", ["gelu", "relu", "gated", "none"])
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_gradients_reach_every_parameter(projection, sharing, feed_forward):
    encoder = randomize(LinformerEncoder(**SIZES, projection=projection, sharing=sharing, feed_forward=feed_forward))
    encoder(torch.randn(2, 12, 8)).square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        # b_K moves all scores of a query alike, which the softmax does not see: its gradient is zero but for round-off
        assert (parameter.grad != 0).any() or name.endswith("key.bias"), name


@given(
    st.sampled_from(COMBINATIONS),
    st.sampled_from(["gelu", "gated", "none"]),
    st.booleans(),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.3]),
)
def test_checkpointing_on_and_off_agree(combination, feed_forward, norm_first, length, dropout):
    encoder = randomize(
        LinformerEncoder(
            **SIZES,
            projection=combination[0],
            sharing=combination[1],
            feed_forward=feed_forward,
            norm_first=norm_first,
            dropout=dropout,
            feed_forward_dropout=dropout,
        )
    )
    x, mask = torch.randn(2, length, 8, requires_grad=True), torch.rand(2, length) > 0.3
    results = []
    for encoder.gradient_checkpointing in (False, True):
        torch.manual_seed(1)
        output = encoder(x, mask)
        results.append((output, *torch.autograd.grad(output.square().sum(), [x, *encoder.parameters()])))
    for plain, checkpointed in zip(*results, strict=True):
        assert torch.equal(plain, checkpointed)


def test_checkpointing_saves_memory():
    def saved_bytes(gradient_checkpointing):
        encoder = LinformerEncoder(**SIZES, gradient_checkpointing=gradient_checkpointing)
        total = 0

        def count(tensor):
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            encoder(torch.randn(8, 12, 8))
        return total

    assert saved_bytes(True) < 0.3 * saved_bytes(False)


def test_one_projected_length_per_layer():
    encoder = randomize(LinformerEncoder(**{**SIZES, "projected_length": [5, 3, 1]}))
    output, weights = encoder(torch.randn(2, 9, 8), need_weights=True)
    assert [w.shape for w in weights] == [(2, 2, 9, 5), (2, 2, 9, 3), (2, 2, 9, 1)]
    assert output.shape == (2, 9, 8)


def test_layers_use_parts_of_a_shared_projection():
    encoder = randomize(LinformerEncoder(**{**SIZES, "projected_length": [2, 4, 1]}, sharing="layerwise"))
    x = torch.randn(2, 12, 8)
    E_NK = encoder.projection.weight[:, 0]
    assert E_NK.shape == (12, 4)
    expected = x
    for layer, E in zip(encoder.layers, (E_NK.unflatten(1, (2, 2)).mean(2), E_NK, E_NK.mean(1, True)), strict=True):
        kv = LinformerAttention(8, 2, max_length=12, projected_length=E.shape[1], sharing="kv")
        kv.load_state_dict({**layer.attention.state_dict(), "projection.weight": E[:, None]})
        expected = expected + kv(layer.attention_norm(expected))
        expected = expected + layer.feed_forward(layer.feed_forward_norm(expected))
    assert_close(encoder(x), encoder.norm(expected))
    with pytest.raises(ValueError, match="cannot use a part of a shared one; pass one number, use sharing='kv'"):
        LinformerEncoder(**{**SIZES, "projected_length": [2, 4, 1]}, sharing="layerwise", projection="conv")


def test_weights_come_with_the_same_output():
    encoder = randomize(LinformerEncoder(**SIZES, sharing="layerwise"))
    x = torch.randn(2, 9, 8)
    output, weights = encoder(x, need_weights=True)
    assert_close(output, encoder(x))
    for layer_weights in weights:
        assert_close(layer_weights.sum(-1), torch.ones(2, 2, 9))


def test_feed_forward_dropout_acts_in_training_only():
    encoder = randomize(LinformerEncoder(**SIZES, feed_forward_dropout=0.5))
    x = torch.randn(2, 9, 8)
    assert not torch.equal(encoder(x), encoder(x))
    encoder.eval()
    assert torch.equal(encoder(x), encoder(x))


@pytest.mark.slow
def test_a_quarter_of_a_million_tokens():
    torch.set_default_dtype(torch.float32)
    encoder = LinformerEncoder(64, 4, depth=2, max_length=262_144, projected_length=128).eval()
    x = torch.randn(1, 262_144, 64)
    with torch.no_grad():
        output = encoder(x)
        assert output.isfinite().all()
        # the first of all these tokens is moved by the last
        x[:, -1] += 100
        assert not torch.equal(encoder(x)[:, 0], output[:, 0])
