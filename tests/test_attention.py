"""The layer against the reference: outputs, gradients, and every order of the products."""

import copy
from contextlib import contextmanager
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import ANY_LENGTH, COMBINATIONS, randomize, reference_layer, reference_output, shared_projection
from torch.nn.utils import prune
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from linformer_kit import LinformerAttention, make_projection, reference
from linformer_kit.models import attention_linformer
from linformer_kit.models.multihead_linformer import softmax_attention
from linformer_kit.models.plain_linformer import plain_attention

pytestmark = pytest.mark.usefixtures("float64")
DENSE = ("linear", "affine", "random", "dynamic")
SIZES = {"embed_dim": 12, "num_heads": 4, "max_length": 13, "projected_length": 3, "head_dim": 5, "num_kv_heads": 2}


def build(projection, sharing, **options):
    """A layer with random parameters, and the projection it shares if it shares one."""
    options = {**SIZES, **options}
    layer = LinformerAttention(projection=projection, sharing=sharing, **options)
    shared = shared_projection(layer)
    randomize(layer, *([] if shared is None else [shared]))
    return layer, shared


def padding(length, lengths):
    return torch.arange(length) < torch.tensor(lengths)[:, None]


@contextmanager
def orders(keys, queries):
    """Compute in these orders, whatever is cheapest."""
    with (
        patch.object(LinformerAttention, "_key_order", lambda *_: keys),
        patch.object(LinformerAttention, "_query_order", lambda *_: queries),
    ):
        yield


@pytest.mark.parametrize("length", [1, 2, 7, 13])
@pytest.mark.parametrize("crossed", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_the_layer_equals_the_plain_form(projection, sharing, crossed, length):
    layer, shared = build(projection, sharing)
    x, context = torch.randn(2, 5 if crossed else length, 12), torch.randn(2, length, 12) if crossed else None
    expected = plain_attention(layer, x, context, shared)
    for queries in ("per head", "folded"):
        with orders("sequence first", queries):
            for fused in (True, False):
                assert_close(layer(x, context, projection=shared, fused=fused), expected)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("crossed", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
class TestReference:
    @pytest.fixture
    def case(self, projection, sharing, crossed, masked):
        layer, shared = build(projection, sharing)
        x, context = torch.randn(3, 8, 12), torch.randn(3, 11, 12) if crossed else None
        mask = torch.rand(3, 11 if crossed else 8) > 0.4 if masked else None
        if masked:
            mask[2] = False  # no real token at all
        return layer, shared, x, context, mask

    def test_the_layer_equals_the_reference(self, case):
        layer, shared, x, context, mask = case
        ours = layer(x, context, mask=mask, projection=shared)
        assert_close(ours, reference_output(layer, x, context, mask, shared), rtol=1e-9, atol=1e-11)

    def test_gradients_equal_the_finite_differences_of_the_reference(self, case):
        layer, shared, x, context, mask = case
        inputs = [x] if context is None else [x, context]
        flatten_keys = [*inputs, *layer.parameters(), *(shared.parameters() if shared is not None else [])]
        for leaf in flatten_keys:
            leaf.requires_grad_()
        seen_from_outside = torch.randn(3, 8, 12)
        gradients = torch.autograd.grad(
            (layer(x, context, mask=mask, projection=shared) * seen_from_outside).sum(), flatten_keys
        )
        for leaf, gradient in zip(flatten_keys, gradients, strict=True):
            direction = torch.randn_like(leaf)
            sides = []
            for sign in (1, -1):
                with torch.no_grad():
                    leaf += sign * 1e-5 * direction
                    sides.append((reference_output(layer, x, context, mask, shared) * seen_from_outside).sum())
                    leaf -= sign * 1e-5 * direction
            assert_close((gradient * direction).sum(), (sides[0] - sides[1]) / 2e-5, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("projection", "sharing"), [(p, s) for p, s in COMBINATIONS if p in ("linear", "random", "conv")]
)
def test_rescaled_columns_equal_the_reference(projection, sharing):
    layer, shared = build(projection, sharing, rescale=True)
    x = torch.randn(3, 10, 12)
    mask = padding(10, [10, 4, 1])
    assert_close(layer(x, projection=shared), reference_output(layer, x, shared=shared))
    assert_close(layer(x, mask=mask, projection=shared), reference_output(layer, x, mask=mask, shared=shared))
    parameters = [x.requires_grad_(), *layer.parameters(), *(shared.parameters() if shared is not None else [])]
    for real in (None, mask):
        assert torch.autograd.gradcheck(
            lambda x, *_, real=real: layer(x, mask=real, projection=shared), parameters, fast_mode=True
        )


def test_rescaling_keeps_the_keys_of_short_inputs_as_long_as_those_of_full_ones():
    layer = LinformerAttention(64, 1, max_length=64, projected_length=16, projection="random", rescale=True)
    plain = copy.deepcopy(layer)
    plain.projection.rescale = False

    def key_norm(layer, length):
        return (
            torch.stack([layer.project(torch.randn(1, length, 64)).keys_BGKD.norm() for _ in range(50)]).mean().item()
        )

    assert key_norm(layer, 1) / key_norm(layer, 64) == pytest.approx(1, abs=0.1)
    assert key_norm(plain, 1) / key_norm(plain, 64) < 0.2


@pytest.mark.parametrize(
    ("projection", "sharing", "rescale"),
    [(*c, False) for c in COMBINATIONS if c[0] in DENSE]
    + [(*c, True) for c in COMBINATIONS if c[0] in ("linear", "affine", "random")],
)
@settings(max_examples=8)
@given(data=st.data())
def test_every_order_of_the_products_agrees(projection, sharing, rescale, data):
    queries, length, rows, kv_heads, head_dim = (data.draw(st.integers(1, most)) for most in (9, 12, 9, 2, 6))
    options = {"projected_length": rows, "num_heads": 2 * kv_heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    layer, shared = build(projection, sharing, rescale=rescale, **options)
    x, context = torch.randn(2, queries, 12, requires_grad=True), torch.randn(2, length, 12, requires_grad=True)
    mask = torch.rand(2, length) > 0.3
    flatten_keys = [x, context, *layer.parameters(), *(shared.parameters() if shared is not None else [])]
    results = []
    for keys, queries in product(("sequence first", "features first"), ("per head", "folded")):
        with orders(keys, queries):
            output, weights = layer(x, context, mask=mask, projection=shared, need_weights=True)
            fused = layer(x, context, mask=mask, projection=shared)
        assert_close(output, fused)
        results.append((output, weights, *torch.autograd.grad(output.square().sum(), [weights, *flatten_keys])))
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert_close(first, second, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_a_context_of_another_width_gives_the_keys_and_values(projection, sharing):
    layer = LinformerAttention(**SIZES, projection=projection, sharing=sharing, context_dim=7)
    shared = shared_projection(layer)
    randomize(layer, *([] if shared is None else [shared]))
    assert layer.key.in_features == layer.value.in_features == 7
    assert layer.query.in_features == layer.output.out_features == 12
    x, context, mask = torch.randn(2, 5, 12), torch.randn(2, 9, 7), padding(9, [9, 4])
    expected = reference_output(layer, x, context, mask, shared)
    for keys in ("sequence first", "features first") if projection in DENSE else ("sequence first",):
        with orders(keys, "per head"):
            assert_close(layer(x, context, mask=mask, projection=shared), expected)
    assert_close(plain_attention(layer, x, context, shared), layer(x, context, projection=shared))


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_separate_keys_and_values_equal_the_reference(projection, sharing, masked):
    layer, shared = build(projection, sharing, rescale=projection == "linear")
    x, key, value = torch.randn(2, 5, 12), torch.randn(2, 9, 12), torch.randn(2, 9, 12)
    mask = padding(9, [4, 9]) if masked else None
    leaves = [key.requires_grad_(), value.requires_grad_(), *layer.parameters()]
    leaves += [] if shared is None else list(shared.parameters())
    expected = reference_output(layer, x, key, mask, shared, value)
    for keys in ("sequence first", "features first") if projection in DENSE else ("sequence first",):
        with orders(keys, "per head"):

            def output(*_):
                return layer(x, key, value=value, mask=mask, projection=shared)

            assert_close(output(), expected, rtol=1e-9, atol=1e-11)
            assert torch.autograd.gradcheck(output, leaves, fast_mode=True)
    same = layer(x, key, value=key, mask=mask, projection=shared)
    assert_close(same, layer(x, key, mask=mask, projection=shared))
    assert_close(layer(x, x, value=value[:, :5], projection=shared), layer(x, value=value[:, :5], projection=shared))


def test_separate_keys_and_values_equal_multi_head_attention_without_a_projection():
    theirs = torch.nn.MultiheadAttention(12, 4, kdim=7, vdim=7, batch_first=True)
    randomize(theirs)
    ours = LinformerAttention(12, 4, projection="none", context_dim=7)
    bias = theirs.in_proj_bias.chunk(3)
    parts = zip(("query", "key", "value"), bias, strict=True)
    weights = {f"{name}.weight": getattr(theirs, f"{name[0]}_proj_weight") for name in ("query", "key", "value")}
    outputs = {f"output.{name}": value for name, value in theirs.out_proj.state_dict().items()}
    ours.load_state_dict({**weights, **outputs, **{f"{name}.bias": value for name, value in parts}})
    x, key, value, mask = torch.randn(2, 5, 12), torch.randn(2, 9, 7), torch.randn(2, 9, 7), padding(9, [9, 4])
    expected, weights = theirs(x, key, value, key_padding_mask=~mask, average_attn_weights=False)
    assert_close(ours(x, key, value=value, mask=mask, need_weights=True), (expected, weights))


@pytest.mark.parametrize(
    ("projection", "sharing", "rows"),
    [(*c, rows) for c in COMBINATIONS for rows in (3, 7, 12) if rows == 3 or c[0] not in ("conv", "head_conv", "none")],
)
def test_a_given_projection_replaces_that_of_the_layer(projection, sharing, rows):
    """It may have more rows than the layer, whose own projection is of another kind and sharing."""
    layer, _ = build("dynamic" if projection == "linear" else "linear", "headwise")
    options = {"embed_dim": 12, "max_length": 13, "projected_length": rows, "sharing": sharing, "num_kv_heads": 2}
    given = randomize(make_projection(projection, **options, head_dim=5))
    x, mask = torch.randn(2, 9, 12), padding(9, [9, 4])
    output, weights = layer(x, mask=mask, projection=given, need_weights=True)
    assert_close(output, reference_output(layer, x, mask=mask, shared=given))
    assert weights.shape == (2, 4, 9, {"none": 9, "conv": 2, "head_conv": 2}.get(projection, 3))
    assert layer.plan(9, projection=given).multiply_adds > 0
    assert not torch.allclose(output, layer(x, mask=mask))
    for parameter in given.parameters():
        assert torch.autograd.gradcheck(
            lambda *_: layer(x, mask=mask, projection=given), parameter, fast_mode=True, check_batched_grad=False
        )


def test_a_given_projection_is_cut_after_rescaling_in_both_key_orders():
    layer, _ = build("linear", "headwise")
    options = {"embed_dim": 12, "max_length": 13, "projected_length": 7, "rescale": True}
    given = randomize(make_projection("linear", **options))
    x, mask = torch.randn(2, 9, 12), padding(9, [9, 4])
    for keys in ("sequence first", "features first"):
        with orders(keys, "per head"):
            assert_close(layer(x, mask=mask, projection=given), reference_output(layer, x, mask=mask, shared=given))


@pytest.mark.parametrize("queries", ["per head", "folded"])
@pytest.mark.parametrize("projection", ["conv", "head_conv", "mean", "max", "none"])
def test_pooled_keys_agree_in_both_query_orders(projection, queries):
    layer, _ = build(projection, "headwise")
    x, mask = torch.randn(3, 9, 12), padding(9, [9, 4, 0])
    with orders("sequence first", queries):
        output, weights = layer(x, mask=mask, need_weights=True)
        assert_close(output, layer(x, mask=mask))
    assert_close(output, reference_output(layer, x, mask=mask))
    assert_close(weights.sum(-1), torch.ones(3, 4, 9))


@given(
    length=st.integers(1, 5000),
    context=st.integers(1, 5000),
    rows=st.integers(1, 300),
    heads=st.integers(1, 16),
    group=st.integers(1, 4),
    head_dim=st.integers(1, 80),
    channels=st.integers(1, 600),
    batch=st.integers(1, 3),
    combination=st.sampled_from(COMBINATIONS),
)
def test_plan_is_the_cheapest_of_all_orders(
    length, context, rows, heads, group, head_dim, channels, batch, combination
):
    projection, sharing = combination
    with torch.device("meta"):
        layer = LinformerAttention(
            channels,
            heads * group,
            max_length=5000,
            projected_length=rows,
            head_dim=head_dim,
            num_kv_heads=heads,
            projection=projection,
            sharing=sharing,
        )
        shared = shared_projection(layer)
    N, L, C, GD, HD, H = context, length, channels, heads * head_dim, heads * group * head_dim, heads * group
    window = -(-5000 // rows)
    K = {
        "conv": -(-N // window),
        "head_conv": -(-N // window),
        "mean": min(rows, N),
        "max": min(rows, N),
        "none": N,
    }.get(projection, rows)
    matrices = {"none": 2 * heads, "headwise": 2, "kv": 1, "layerwise": 1}[sharing]
    # keys, values, queries and outputs each in either order, the mixed ones too
    if projection in DENSE:
        extra = matrices * N * C * K if projection == "dynamic" else 0
        sequence_first, features_first = N * K * C * max(1, matrices // 2) + K * C * GD, N * C * GD + N * K * GD
        costs = [extra + key + value for key, value in product((sequence_first, features_first), repeat=2)]
        if matrices == 1:  # E = F: its product with X serves both
            costs[0] -= N * K * C
    elif projection == "head_conv":  # W_K for every token of a window, then the kernel
        costs = [2 * K * window * (C + head_dim) * GD]
    else:
        costs = [{"conv": matrices * K * window * C, "none": 0}.get(projection, N * C) + 2 * K * C * GD]
    per_head, folded = L * C * HD + L * K * HD, L * C * H * K + K * C * HD
    cheapest = min(
        keys + query + output for keys, query, output in product(costs, (per_head, folded), (per_head, folded))
    )
    assert layer.plan(length, batch, context_length=context, projection=shared).multiply_adds == batch * cheapest


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("projected_length", [2, 40])
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_the_multiply_adds_of_plan_are_those_computed(projection, sharing, projected_length, heads):
    layer, shared = build(
        projection,
        sharing,
        embed_dim=16,
        num_heads=heads,
        num_kv_heads=None,
        head_dim=8,
        max_length=64,
        projected_length=projected_length,
    )
    x, context = torch.randn(3, 32, 16), torch.randn(3, 64, 16)
    # the counter does not know the fused kernel; the same products, one by one
    with FlopCounterMode(display=False) as counter:
        layer(x, context, projection=shared, need_weights=True)
    plan = layer.plan(32, batch=3, context_length=64, projection=shared)
    multiply_adds = plan.multiply_adds
    if projection in ("mean", "max", "conv"):  # pooling is not a matrix product
        multiply_adds -= 3 * layer._projection(shared).multiply_adds_per_channel(64) * 16
    if plan.queries == "folded":  # b_Q keysᵀ, a vector's worth
        multiply_adds += 3 * heads * layer.project(context, projection=shared).keys_BGKD.shape[2] * 8
    assert counter.get_total_flops() == 2 * multiply_adds


def test_costs_are_those_of_the_table_in_the_documents():
    N, C, H, D = 4096, 512, 8, 64
    for K, sharing in product((32, 128), ("headwise", "kv")):
        layer = LinformerAttention(C, H, max_length=N, projected_length=K, sharing=sharing)
        keys = {"headwise": 2, "kv": 1}[sharing] * N * K * C + 2 * K * C * H * D
        queries = min(2 * N * C * H * D + 2 * N * K * H * D, 2 * N * C * H * K + 2 * K * C * H * D)
        assert layer.plan(N).multiply_adds == keys + queries
        assert layer.plan(N).keys == "sequence first"
        assert layer.plan(N).queries == ("folded" if H * K < C + K else "per head")


@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 20),
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 8),
    cross=st.integers(0, 20),
)
def test_identity_projection_is_softmax_attention(batch, length, heads, head_dim, cross):
    layer = randomize(
        LinformerAttention(8, heads, head_dim=head_dim, max_length=cross or length, projected_length=cross or length)
    )
    with torch.no_grad():
        layer.projection.weight.copy_(torch.eye(cross or length)[:, None].expand(-1, 2, -1))
    x = torch.randn(batch, length, 8)
    context = torch.randn(batch, cross, 8) if cross else x
    query, key, value = (
        linear(source).unflatten(-1, (heads, head_dim)).transpose(1, 2)
        for linear, source in ((layer.query, x), (layer.key, context), (layer.value, context))
    )
    expected = layer.output(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
    assert_close(layer(x, context if cross else None), expected)
    full = LinformerAttention(8, heads, head_dim=head_dim, projection="none")
    full.load_state_dict(
        {name: value for name, value in layer.state_dict().items() if not name.startswith("projection")}
    )
    assert_close(full(x, context), expected)


@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_weights_are_those_of_the_reference(projection, sharing):
    layer, shared = build(projection, sharing)
    x = torch.randn(1, 7, 12)
    output, weights = layer(x, projection=shared, need_weights=True)
    expected_output, expected = reference.linformer_attention(
        x[0].numpy(), x[0].numpy(), reference_layer(layer, shared)
    )
    assert_close(output[0], torch.from_numpy(expected_output))
    assert_close(weights[0], torch.from_numpy(expected))


@pytest.mark.parametrize("queries", ["per head", "folded"])
@given(st.sampled_from(COMBINATIONS), st.integers(1, 4), st.integers(1, 30), st.integers(1, 130), st.booleans())
def test_chunked_and_whole_agree(queries, combination, batch, length, chunk, masked):
    layer, shared = build(*combination, max_length=30)
    x, mask = torch.randn(batch, length, 12), torch.rand(batch, length) > 0.3 if masked else None
    with orders("sequence first", queries), torch.no_grad():
        with patch.object(attention_linformer, "QUERY_CHUNK", 10**9):
            whole, whole_weights = layer(x, mask=mask, projection=shared, need_weights=True)
        with patch.object(attention_linformer, "QUERY_CHUNK", chunk):
            assert_close(layer(x, mask=mask, projection=shared), whole)
            output, weights = layer(x, mask=mask, projection=shared, need_weights=True)
    assert_close(output, whole)
    assert_close(weights, whole_weights)


@pytest.mark.parametrize("projected_length", [4, 32])  # folded, per head
def test_memory_between_input_and_output_does_not_grow_with_the_length(projected_length):
    class LargestTensor(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in inputs:
                self.largest = max(self.largest, result.untyped_storage().nbytes() // 8)
            return result

    layer = LinformerAttention(16, 4, max_length=50_000, projected_length=projected_length)
    x = torch.randn(2, 50_000, 16)
    inputs = {tensor.untyped_storage().data_ptr() for tensor in (x, *layer.parameters())}
    context = layer.project(x)
    with torch.no_grad(), LargestTensor() as seen:
        output, _ = layer.attend(x, context)
    assert layer.plan(50_000).queries == ("folded" if projected_length == 4 else "per head")
    assert seen.largest == output.numel()  # the output itself, and nothing larger
    inputs.add(output.untyped_storage().data_ptr())
    with (
        torch.no_grad(),
        LargestTensor() as seen,
        patch.object(torch.Tensor, "new_empty", lambda *_: output),
    ):  # the output again
        layer.attend(x, context)
    assert seen.largest <= attention_linformer.QUERY_CHUNK * 4 * max(projected_length, 4)


def test_dropout_drops_the_weights_that_pytorch_drops():
    inputs = [torch.randn(2, 3, length, 5, requires_grad=True) for length in (7, 4, 4)]
    torch.manual_seed(1)
    ours, _ = softmax_attention(*inputs, mask=None, dropout=0.4, need_weights=False)
    torch.manual_seed(1)
    theirs = F.scaled_dot_product_attention(*inputs, dropout_p=0.4)
    for one, other in zip(*((y, *torch.autograd.grad(y.square().sum(), inputs)) for y in (ours, theirs)), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("queries", ["per head", "folded"])
def test_dropout_acts_on_the_weights_in_training_only(queries):
    layer, _ = build("linear", "headwise", dropout=0.5, num_heads=1, num_kv_heads=1, projected_length=400)
    x = torch.randn(1, 5, 12)
    with orders("sequence first", queries):
        layer.train()
        several = torch.stack([layer(x) for _ in range(2000)])
        assert several.std(0).min() > 0
        layer.eval()
        assert_close(several.mean(0), layer(x), rtol=0, atol=6 * (several.std(0).max() / 2000**0.5).item())
        assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("projection", ANY_LENGTH)
def test_projections_for_any_length_ignore_max_length(projection):
    layer, _ = build(projection, "headwise", max_length=5)
    x = torch.randn(2, 23, 12)
    assert_close(layer(x), reference_output(layer, x))


@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_with_more_rows_than_tokens_the_layer_equals_the_reference(projection, sharing):
    layer, shared = build(projection, sharing, projected_length=29)
    x = torch.randn(2, 6, 12)
    mask = padding(6, [6, 2])
    assert_close(layer(x, mask=mask, projection=shared), reference_output(layer, x, mask=mask, shared=shared))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_with_biases_and_grouped_key_value_heads_the_layer_equals_the_reference(bias, kv_heads):
    for sharing in ("none", "headwise"):
        layer, _ = build("linear", sharing, bias=bias, num_kv_heads=kv_heads)
        assert (layer.query.bias is not None) == bias
        assert layer.key.out_features == kv_heads * 5
        x = torch.randn(2, 9, 12)
        assert_close(layer(x), reference_output(layer, x))


def test_a_projected_context_serves_many_queries():
    layer, _ = build("linear", "headwise")
    x, context = torch.randn(2, 6, 12), torch.randn(2, 13, 12)
    kept = layer.project(context)
    assert kept.keys_BGKD.shape == (2, 2, 3, 5)
    one_by_one = torch.cat([layer.attend(x[:, i : i + 1], kept)[0] for i in range(6)], dim=1)
    assert_close(one_by_one, layer(x, context))


class Adapter(torch.nn.Module):
    """A linear layer wrapped the way LoRA does it: it can be called, its weight alone would be wrong."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.more = linear, torch.nn.Linear(linear.in_features, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.more(x)


@pytest.mark.parametrize("projected_length", [1, 9])
@pytest.mark.parametrize("sharing", ["none", "headwise"])
def test_hooks_on_the_linear_layers_are_not_bypassed(sharing, projected_length):
    """Pruning keeps the class and computes the weight in a hook before each call."""
    layer, _ = build("linear", sharing, projected_length=projected_length)
    for linear in (layer.query, layer.key, layer.value, layer.output):
        prune.l1_unstructured(linear, "weight", amount=0.3)
    x = torch.randn(2, 9, 12)
    first = layer(x)
    with torch.no_grad():
        for linear in (layer.query, layer.key, layer.value, layer.output):
            linear.weight_orig *= 2
    changed = layer(x)
    for linear in (layer.query, layer.key, layer.value, layer.output):
        prune.remove(linear, "weight")
    assert_close(changed, layer(x))
    assert not torch.allclose(changed, first)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_on_the_linear_layers_are_called(register):
    layer, _ = build("linear", "headwise", projected_length=1)
    called = []
    for name in ("query", "key", "value", "output"):
        getattr(getattr(layer, name), register)(lambda *_, name=name: called.append(name))
    layer(torch.randn(2, 9, 12, requires_grad=True)).sum().backward()
    assert sorted(called) == ["key", "output", "query", "value"]


@pytest.mark.parametrize("projected_length", [1, 9])
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_adapters_around_the_linear_layers_are_not_bypassed(projection, sharing, projected_length):
    layer, shared = build(projection, sharing, projected_length=projected_length)
    merged = copy.deepcopy(layer)
    for name in ("query", "key", "value", "output"):
        adapter = Adapter(getattr(layer, name))
        setattr(layer, name, adapter)
        with torch.no_grad():
            getattr(merged, name).weight += adapter.more.weight
    x, mask = torch.randn(2, 9, 12), padding(9, [9, 4])
    assert_close(layer(x, mask=mask, projection=shared), merged(x, mask=mask, projection=shared))
