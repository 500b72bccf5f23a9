"""Padding never matters: properties over random shapes and masks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import COMBINATIONS, PROJECTIONS, randomize, shared_projection
from torch.testing import assert_close

from linformer_kit import CausalLinformerAttention, LinformerAttention, LinformerEncoder
from linformer_kit.models import packing_linformer

pytestmark = pytest.mark.usefixtures("float64")

masks = st.integers(1, 3).flatmap(
    lambda batch: st.integers(1, 15).flatmap(
        lambda length: st.lists(
            st.lists(st.booleans(), min_size=length, max_size=length), min_size=batch, max_size=batch
        )
    )
)


def layers(projection, sharing, projected_length, rescale):
    """Our layer and our stack, without and with a window, as functions of tokens and mask."""
    windows = [{}] if projection == "none" else [{}, {"window_length": 1, "global_tokens": 1}]
    return [
        layer
        for window in windows
        for layer in layer_and_stack(projection, sharing, projected_length, rescale, **window)
    ]


def layer_and_stack(projection, sharing, projected_length, rescale, **window):
    options = {
        "embed_dim": 8,
        "num_heads": 2,
        "max_length": 16,
        "projected_length": projected_length,
        "projection": projection,
        "sharing": sharing,
        "rescale": rescale and projection in ("linear", "random", "conv"),
        **window,
    }
    encoder = randomize(LinformerEncoder(depth=2, **options))
    attention = LinformerAttention(**options)
    shared = shared_projection(attention)
    randomize(attention, *([] if shared is None else [shared]))
    return [lambda x, mask=None: attention(x, mask=mask, projection=shared), encoder]


def causal_layer(projection, sharing, slots):
    causal = CausalLinformerAttention(8, 2, block_length=4, slots=slots, projection=projection, sharing=sharing)
    shared = shared_projection(causal)
    randomize(causal, *([] if shared is None else [shared]))
    return lambda x, mask=None: causal(x, mask=mask, projection=shared)


@given(
    masks,
    st.sampled_from(COMBINATIONS),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from([1e6, torch.inf, torch.nan]),
)
def test_values_at_padding_never_change_the_output(mask, combination, projected_length, rescale, garbage):
    mask = torch.tensor(mask)
    x = torch.randn(*mask.shape, 8)
    spoiled = x.masked_fill(~mask[..., None], garbage)
    for layer in [*layers(*combination, projected_length, rescale), causal_layer(*combination, projected_length)]:
        assert torch.equal(layer(spoiled, mask)[mask], layer(x, mask)[mask])


@given(masks, st.sampled_from(COMBINATIONS), st.integers(1, 20), st.booleans())
def test_a_padded_batch_equals_each_example_alone(mask, combination, projected_length, rescale):
    mask = torch.tensor(mask)
    x = torch.randn(*mask.shape, 8)
    for layer in [*layers(*combination, projected_length, rescale), causal_layer(*combination, projected_length)]:
        padded = layer(x, mask)
        for example in range(len(x)):
            if mask[example].any():
                assert_close(padded[example][mask[example]], layer(x[example : example + 1, mask[example]])[0])


@given(masks, st.sampled_from(COMBINATIONS), st.integers(1, 20), st.booleans())
def test_a_packed_batch_gives_what_masks_give(mask, combination, projected_length, rescale):
    mask = torch.tensor(mask)
    x = torch.randn(*mask.shape, 8, requires_grad=True)
    for encoder in layers(*combination, projected_length, rescale)[1::2]:
        packed, (masked, _) = encoder(x, mask), encoder(x, mask, need_weights=True)
        assert_close(packed, masked)
        leaves = [x, *encoder.parameters()]
        gradients = (torch.autograd.grad(y.square().sum(), leaves, allow_unused=True) for y in (packed, masked))
        for one, other in zip(*gradients, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize(
    ("lengths", "width", "is_packed"),
    [
        (range(20, 36), 128, False),  # many groups, each of a few short texts
        (range(20, 36), 512, True),
        (range(285, 301), 128, True),
        ([20] * 15 + [50], 128, True),  # two groups
        ([300] * 16, 512, False),  # no padding
        ([0, 0], 512, False),
    ],
)
def test_a_batch_is_packed_where_that_is_faster(lengths, width, is_packed, monkeypatch):
    monkeypatch.setattr(packing_linformer, "GROUP_COST", 400_000)
    mask = torch.arange(max(1, *lengths)) < torch.tensor(lengths)[:, None]
    assert (packing_linformer.Packing.of(mask, width) is not None) is is_packed


@given(st.sampled_from(COMBINATIONS), st.integers(1, 6), st.integers(0, 9))
def test_further_padding_changes_nothing(combination, projected_length, more):
    x, mask = torch.randn(2, 7, 8), torch.arange(7) < torch.tensor([[7], [3]])
    longer, longer_mask = (
        torch.cat([x, torch.randn(2, more, 8)], 1),
        torch.cat([mask, torch.zeros(2, more, dtype=torch.bool)], 1),
    )
    for layer in layers(*combination, projected_length, True):
        assert_close(layer(longer, longer_mask)[:, :7][mask], layer(x, mask)[mask])


@pytest.mark.parametrize("rescale", [False, True], ids=["plain", "rescale"])
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_rows_without_a_real_token_are_finite_and_so_are_all_gradients(projection, sharing, rescale):
    torch.set_default_dtype(torch.float32)  # where nan and inf come from sooner
    mask = torch.tensor([[True, False, True, False], [False] * 4])
    for layer in [*layers(projection, sharing, 3, rescale), causal_layer(projection, sharing, 3)]:
        x = torch.randn(2, 4, 8, requires_grad=True)
        output = layer(x, mask)
        assert output.isfinite().all()
        output.square().sum().backward()
        assert x.grad.isfinite().all()
        cells = [] if isinstance(layer, torch.nn.Module) else layer.__closure__
        for module in [layer, *(cell.cell_contents for cell in cells)]:
            if isinstance(module, torch.nn.Module):
                for name, parameter in module.named_parameters():
                    assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_nothing_to_attend_to_gives_the_output_bias(projection):
    layer = randomize(LinformerAttention(8, 2, max_length=16, projected_length=4, projection=projection))
    output = layer(torch.randn(2, 5, 8), torch.randn(2, 9, 8), mask=torch.zeros(2, 9, dtype=torch.bool))
    assert_close(output, layer.output.bias.expand(2, 5, 8))


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_padding_receives_no_gradient_as_context(projection):
    layer = randomize(LinformerAttention(8, 2, max_length=16, projected_length=4, projection=projection))
    context, mask = torch.randn(2, 9, 8, requires_grad=True), torch.rand(2, 9) > 0.5
    layer(torch.randn(2, 3, 8), context, mask=mask).square().sum().backward()
    assert (context.grad[~mask] == 0).all()
    assert (context.grad[mask] != 0).any()


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_garbage_behind_the_mask_does_not_reach_the_gradients(projection):
    x, mask = torch.randn(2, 9, 8), torch.arange(9) < torch.tensor([[9], [4]])
    spoiled = x.masked_fill(~mask[..., None], torch.nan)
    for layer in (
        LinformerEncoder(8, 2, depth=2, max_length=16, projected_length=4, projection=projection),
        LinformerAttention(8, 2, max_length=16, projected_length=4, projection=projection),
        CausalLinformerAttention(8, 2, block_length=4, slots=2, projection=projection),
    ):
        randomize(layer)(spoiled, mask=mask)[mask].square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_integer_masks_mean_the_same(dtype):
    layer, causal = (
        LinformerAttention(8, 2, max_length=16, projected_length=4),
        CausalLinformerAttention(8, 2, block_length=4, slots=2),
    )
    x, mask = torch.randn(2, 9, 8), torch.rand(2, 9) > 0.5
    for function in (layer, causal, LinformerEncoder(8, 2, depth=1, max_length=16, projected_length=4)):
        assert torch.equal(function(x, mask=mask.to(dtype)), function(x, mask=mask))
