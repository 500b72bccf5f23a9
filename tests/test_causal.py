"""The block-causal layer: no leak, any length, the same outputs step by step."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oracle import COMBINATIONS, numpy, randomize, reference_layer, shared_projection
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linformer_kit import CausalLinformerAttention, make_projection, reference
from linformer_kit.models import causal_linformer
from linformer_kit.models.plain_linformer import plain_causal_attention

pytestmark = pytest.mark.usefixtures("float64", "small_chunks")
combinations = st.sampled_from(COMBINATIONS)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a block or two, and pieces of a few chunks, so that short sequences have several."""
    monkeypatch.setattr(causal_linformer, "QUERY_CHUNK", 8)
    monkeypatch.setattr(causal_linformer, "TOKEN_CHUNK", 16)


@pytest.fixture(params=[2**28, 2000], ids=["at once", "in several calls"])
def large_calls(request, monkeypatch):
    """Calls as on a GPU, once with so little memory that there are several."""
    monkeypatch.setattr(causal_linformer, "prefers_large_calls", lambda x: True)
    monkeypatch.setattr(causal_linformer, "TILE_ELEMENTS", request.param)


def build(projection="linear", sharing="headwise", block_length=4, slots=2, **options):
    """A layer with random parameters, and the projection to pass to it."""
    options = {"num_kv_heads": 2, "head_dim": 3, **options}
    layer = CausalLinformerAttention(
        8, 4, block_length=block_length, slots=slots, projection=projection, sharing=sharing, **options
    )
    shared = shared_projection(layer)
    randomize(layer, *([] if shared is None else [shared]))
    return layer, shared


@pytest.mark.parametrize("length", [1, 4, 5, 11])
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_the_layer_equals_the_reference(projection, sharing, length):
    layer, shared = build(projection, sharing)
    x = torch.randn(2, length, 8)
    expected = [
        reference.causal_linformer_attention(numpy(example), reference_layer(layer, shared), 4) for example in x
    ]
    assert_close(layer(x, projection=shared), torch.stack([torch.from_numpy(output) for output in expected]))


@pytest.mark.parametrize("length", [1, 4, 5, 11, 25])
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_the_layer_equals_the_plain_form(projection, sharing, length):
    layer, shared = build(projection, sharing)
    x = torch.randn(2, length, 8)
    expected = plain_causal_attention(layer, x, shared)
    for fused in (True, False):
        assert_close(layer(x, projection=shared, fused=fused), expected)


@pytest.mark.parametrize(("projection", "sharing"), [c for c in COMBINATIONS if c[0] != "none"])
def test_a_given_projection_replaces_that_of_the_layer(projection, sharing):
    layer, _ = build("dynamic" if projection == "linear" else "linear")
    options = {"embed_dim": 8, "max_length": 4, "projected_length": 2 if "conv" in projection else 4}
    given = randomize(make_projection(projection, **options, sharing=sharing, num_kv_heads=2, head_dim=3))
    x = torch.randn(2, 11, 8)
    expected = [reference.causal_linformer_attention(numpy(example), reference_layer(layer, given), 4) for example in x]
    whole = layer(x, projection=given)
    assert_close(whole, torch.from_numpy(np.array(expected)))
    start, cache = layer.step(x[:, :6], projection=given)
    rest, _ = layer.step(x[:, 6:], cache, projection=given)
    assert_close(torch.cat([start, rest], dim=1), whole)


@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_gradients_are_those_of_finite_differences(projection, sharing):
    layer, shared = build(projection, sharing)
    x = torch.randn(1, 10, 8, requires_grad=True)
    parameters = [*layer.parameters(), *(shared.parameters() if shared is not None else [])]
    assert torch.autograd.gradcheck(lambda x, *_: layer(x, projection=shared), (x, *parameters), fast_mode=True)


@given(combinations, st.integers(1, 7), st.integers(1, 9), st.integers(2, 30), st.data())
def test_no_token_attends_to_a_later_one(combination, block_length, slots, length, data):
    layer, shared = build(*combination, block_length, slots)
    x = torch.randn(1, length, 8, requires_grad=True)
    position = data.draw(st.integers(0, length - 2))
    # by perturbation: not one bit changes
    changed = x.detach().clone()
    changed[:, position + 1 :] = torch.randn(1, length - position - 1, 8)
    before, after = layer(x, projection=shared), layer(changed, projection=shared)
    assert torch.equal(before[:, : position + 1], after[:, : position + 1])
    # by gradient
    (gradient,) = torch.autograd.grad(before[:, : position + 1].square().sum(), x, retain_graph=True)
    assert (gradient[:, position + 1 :] == 0).all()
    # and every token that came before is seen, by the summaries of its block if not by itself
    if combination[0] != "max":  # a maximum is one token's per channel
        (gradient,) = torch.autograd.grad(before[:, position].square().sum(), x)
        assert (gradient[:, : position + 1] != 0).any(dim=-1).all()


@given(combinations, st.integers(1, 7), st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_stepping_with_the_cache_equals_the_full_pass_at_every_prefix(combination, block_length, slots, pieces):
    layer, shared = build(*combination, block_length, slots)
    x = torch.randn(2, sum(pieces), 8)
    outputs, cache = [], None
    for piece in x.split(pieces, dim=1):
        output, cache = layer.step(piece, cache, projection=shared)
        outputs.append(output)
        prefix = torch.cat(outputs, dim=1)
        assert_close(prefix, layer(x[:, : prefix.shape[1]], projection=shared))
    assert_close(torch.cat(outputs, dim=1), layer(x, projection=shared))


@given(
    combinations, st.integers(1, 7), st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data()
)
def test_stepping_with_padded_examples_equals_each_alone(combination, block_length, slots, pieces, data):
    layer, shared = build(*combination, block_length, slots)
    length = sum(pieces)
    x = torch.randn(3, length, 8)
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=3, max_size=3))
    )
    outputs, cache = [], None
    for piece, real in zip(x.split(pieces, dim=1), mask.split(pieces, dim=1), strict=True):
        # once examples stand at different places, pieces without padding need no mask
        output, cache = layer.step(piece, cache, mask=None if real.all() else real, projection=shared)
        outputs.append(output)
    stepped = torch.cat(outputs, dim=1)
    for example in range(3):
        real = mask[example]
        if real.any():
            assert_close(stepped[example, real], layer(x[example : example + 1, real], projection=shared)[0])


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_a_cache_of_fixed_size_gives_the_same_outputs_and_keeps_its_shapes(projection, sharing, masked):
    layer, shared = build(projection, sharing)
    pieces = [torch.randn(3, length, 8) for length in (6, 1, 1, 1, 5, 1, 9)]
    cache = fixed = None
    shapes = set()
    for x in pieces:
        mask = torch.rand(3, x.shape[1]) > 0.4 if masked else None
        expected, cache = layer.step(x, cache, mask=mask, projection=shared)
        output, _, fixed = layer.advance(x, fixed, mask, shared, max_length=24)
        if masked:
            output, expected = output[mask], expected[mask]
        assert_close(output, expected)
        shapes.add(tuple(tensor.shape for tensor in tree_leaves(fixed)))
    slots = cache.sizes["slots"]
    assert shapes == {((3, 6 * slots, 6),) * 2 + ((3, 3, 8), (3, 3, 6), (3, 3, 6), (3,))}
    assert torch.equal(fixed.seen, torch.zeros(3, dtype=torch.long) + cache.seen)


def test_left_padded_prompts_continue_token_by_token():
    layer, _ = build(block_length=4, slots=2)
    prompts, mask = torch.randn(3, 9, 8), torch.arange(9) >= torch.tensor([[0], [3], [8]])
    more = torch.randn(3, 14, 8)
    _, cache = layer.step(prompts, mask=mask)
    outputs = []
    for token in more.split(1, dim=1):
        output, cache = layer.step(token, cache)
        outputs.append(output)
    for example in range(3):
        alone = torch.cat([prompts[example : example + 1, mask[example]], more[example : example + 1]], dim=1)
        assert_close(torch.cat(outputs, dim=1)[example], layer(alone)[0, -14:])


def test_the_cache_holds_slots_per_finished_block_and_the_open_block():
    layer, _ = build(block_length=16, slots=2)
    _, cache = layer.step(torch.randn(1, 16 * 50 + 5, 8))
    assert cache.summaries.keys_BSF.shape == cache.summaries.values_BSF.shape == (1, 50 * 2, 6)
    assert cache.open.x_BPC.shape == (1, 5, 8)
    assert cache.nbytes == 8 * (50 * 2 * 2 * 6 + 5 * (8 + 2 * 6))
    # and does not keep what it was cut from alive
    assert all(rows.untyped_storage().nbytes() == rows.numel() * 8 for rows in (*cache.summaries, *cache.open))
    # stepping on, padded or not, never lets it grow beyond that
    for mask in (None, torch.tensor([[True]])):
        grown = cache
        for _ in range(27):
            _, grown = layer.step(torch.randn(1, 1, 8), grown, mask=mask)
        assert grown.summaries.keys_BSF.shape[1] == 52 * 2
        assert grown.open.x_BPC.shape[1] == 0


def test_the_cache_of_examples_at_different_places_is_as_long_as_the_longest_needs():
    layer, _ = build(block_length=16, slots=2)
    _, cache = layer.step(torch.randn(2, 14, 8), mask=torch.arange(14) >= torch.tensor([[0], [11]]))
    for seen in range(15, 75):
        _, cache = layer.step(torch.randn(2, 1, 8), cache)
        assert cache.seen.tolist() == [seen, seen - 11]
        assert cache.summaries.keys_BSF.shape[1] == seen // 16 * 2
        assert cache.open.x_BPC.shape[1] == max(seen % 16, (seen - 11) % 16)


def test_an_old_cache_stays_valid_and_can_be_reordered():
    layer, _ = build()
    x = torch.randn(3, 10, 8)
    for mask in (None, torch.arange(10) >= torch.tensor([[0], [4], [9]])):
        _, cache = layer.step(x, mask=mask)
        token = torch.randn(3, 1, 8)
        first, _ = layer.step(token, cache)
        layer.step(torch.randn(3, 7, 8), cache)
        assert_close(layer.step(token, cache)[0], first)
        order = torch.tensor([2, 0, 0])
        assert_close(layer.step(token[order], cache.reorder(order))[0], first[order])


@given(st.integers(1, 7), st.integers(1, 20))
def test_without_projection_it_is_causal_softmax_attention(block_length, length):
    layer = randomize(CausalLinformerAttention(8, 2, block_length=block_length, slots=1, projection="none"))
    x = torch.randn(2, length, 8)
    query, key, value = (
        linear(x).unflatten(-1, (2, 4)).transpose(1, 2) for linear in (layer.query, layer.key, layer.value)
    )
    expected = layer.output(
        F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
    )
    assert_close(layer(x), expected)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_weights_sum_to_one_and_have_a_column_for_each_summary_and_token(masked):
    layer, _ = build(num_kv_heads=4)
    x = torch.randn(2, 11, 8)
    mask = torch.rand(2, 11) > 0.3 if masked else None
    output, weights = layer(x, mask=mask, need_weights=True)
    assert_close(output, layer(x, mask=mask))
    assert weights.shape == (2, 4, 11, 2 * 2 + 11)
    assert_close(weights.sum(-1), torch.ones(2, 4, 11))
    # a token's place is its rank among the real ones, and weights stand where the tokens stand
    real = torch.ones(2, 11, dtype=torch.bool) if mask is None else mask
    rank = real.cumsum(dim=1) - 1
    for example in range(2):
        places = rank[example, real[example]]
        block = places // 4
        own = weights[example][:, real[example]][..., 4:][..., real[example]]
        assert ((own > 0) == ((block[:, None] == block) & (places <= places[:, None]))).all()
        assert ((weights[example][:, real[example]][..., :4] > 0) == (torch.arange(4) // 2 < block[:, None])).all()


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_the_output_is_computed_from_the_weights(projection, sharing, masked):
    """In whole sequences and in steps, the output and the gradients are those without weights."""
    layer, shared = build(projection, sharing)
    x, mask = torch.randn(2, 11, 8, requires_grad=True), torch.rand(2, 11) > 0.3 if masked else None
    cache = None
    for part in (slice(0, 6), slice(6, 11)):
        piece, real = x[:, part], None if mask is None else mask[:, part]
        expected, _, _ = layer.advance(piece, cache, real, shared)
        output, weights, cache = layer.advance(piece, cache, real, shared, need_weights=True)
        assert_close(output, expected)
        gradients = [torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (output, expected)]
        assert_close(*gradients)
        # the output is linear in the weights
        direction = torch.randn_like(output)
        (gradient,) = torch.autograd.grad(output, weights, direction, retain_graph=True)
        assert_close((gradient * weights).sum(), ((output - layer.output.bias) * direction).sum())


@pytest.mark.parametrize("block_length", [3, 50, 200])
def test_the_size_of_query_chunks_does_not_change_the_output(block_length, monkeypatch):
    layer, _ = build(block_length=block_length, slots=2)
    x = torch.randn(2, 333, 8)
    whole = layer(x)
    for chunk in (1, 64, 1000):
        monkeypatch.setattr(causal_linformer, "QUERY_CHUNK", chunk)
        assert_close(layer(x), whole)


@given(combinations, st.integers(1, 7), st.integers(1, 9), st.integers(1, 60), st.integers(0, 59), st.booleans())
def test_what_is_computed_without_gradients_is_the_same(combination, block_length, slots, length, cached, is_padded):
    """In pieces, whole or with a cache, and the new cache too."""
    layer, shared = build(*combination, block_length, slots)
    x, mask = torch.randn(2, length, 8), torch.rand(2, length) > 0.3 if is_padded else None
    cached = min(cached, length - 1)
    results = []
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode:
            whole = layer(x, mask=mask, projection=shared)
            cache = layer.step(x[:, :cached], projection=shared)[1] if cached else None
            output, cache = layer.step(
                x[:, cached:], cache, mask=None if mask is None else mask[:, cached:], projection=shared
            )
        results.append([whole, output, *tree_leaves(cache)])
    assert_close(*results)


@pytest.mark.parametrize("length", [5, 24, 41])
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_large_calls_compute_the_same(projection, sharing, length, large_calls):
    layer, shared = build(projection, sharing)
    x = torch.randn(3, length, 8, requires_grad=True)
    expected = plain_causal_attention(layer, x, shared)
    output = layer(x, projection=shared)
    assert_close(output, expected)
    assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (output, expected)))
    for parts in ([4, length - 4], [3, length - 3], [1, 2, length - 3]):  # the last part begins in an open block or not
        pieces, cache = [], None
        for piece in x.split(parts, dim=1):
            output, cache = layer.step(piece, cache, projection=shared)
            pieces.append(output)
        assert_close(torch.cat(pieces, dim=1), expected)


def test_large_calls_with_padding_compute_the_same(large_calls):
    layer, _ = build()
    x, mask = torch.randn(3, 41, 8), torch.rand(3, 41) > 0.3
    start, cache = layer.step(x[:, :20], mask=mask[:, :20])
    rest, _ = layer.step(x[:, 20:], cache, mask=mask[:, 20:])
    for output in (layer(x, mask=mask), torch.cat([start, rest], dim=1)):
        for example, real in enumerate(mask):
            assert_close(output[example, real], plain_causal_attention(layer, x[example : example + 1, real])[0])


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_off_cpus_the_number_of_operations_does_not_depend_on_the_input(projection, sharing, is_padded):
    """Nor are values read, which the meta device does not have."""

    class Operations(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += 1
            return function(*args, **(kwargs or {}))

    layer, shared = (None if module is None else module.to("meta") for module in build(projection, sharing))
    counts = set()
    for batch, length in ((2, 512), (2, 4096), (8, 512), (8, 4096)):
        x = torch.empty(batch, length, 8, device="meta")
        mask = torch.empty(batch, length, dtype=torch.bool, device="meta") if is_padded else None
        with Operations() as operations, torch.no_grad():
            layer(x, mask=mask, projection=shared)
        counts.add(operations.count)
    assert len(counts) == 1


def test_the_gradient_of_a_chunk_is_not_as_long_as_the_sequence():
    """Else the time to train grows with the square of the length."""

    class LongTensors(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            self.count += isinstance(result, torch.Tensor) and result.numel() >= x.numel()
            return result

    layer, counts = CausalLinformerAttention(8, 2, block_length=8, slots=1), set()
    for chunks in (4, 16):
        x = torch.randn(1, 8 * chunks, 8)
        output = layer(x)
        with LongTensors() as long_tensors:
            output.sum().backward()
        counts.add(long_tensors.count)
    assert len(counts) == 1
