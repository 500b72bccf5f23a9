"""The layers under what PyTorch offers: compile, autocast, dtypes, meta tensors, copies."""

import copy
from unittest.mock import patch

import pytest
import torch
from oracle import COMBINATIONS, PROJECTIONS, randomize
from torch.testing import assert_close

from linformer_kit import CausalLinformerAttention, LinformerAttention, LinformerEncoder, make_projection
from linformer_kit.models import attention_linformer


def fresh(projection="linear", sharing="headwise"):
    """One of each layer; single ones own their projection, so of "layerwise" they know nothing."""
    single = {"projection": projection, "sharing": "headwise" if sharing == "layerwise" else sharing}
    return [
        LinformerEncoder(16, 2, depth=2, max_length=32, projected_length=4, projection=projection, sharing=sharing),
        LinformerAttention(16, 2, max_length=32, projected_length=4, **single),
        CausalLinformerAttention(16, 2, block_length=8, slots=2, **single),
    ]


def build(projection="linear", sharing="headwise"):
    """One of each layer, with random parameters."""
    return [randomize(layer) for layer in fresh(projection, sharing)]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("projection", "sharing", "masked"),
    [
        (projection, sharing, masked)
        for projection, sharing in COMBINATIONS
        for masked in (False, True)
        if projection != "affine"  # two additions more than `linear`
        and (projection, sharing) != ("random", "headwise")  # the graph of `linear`; "layerwise" compiles it, too
        and (sharing == "headwise" or projection == "linear" or (sharing == "layerwise" and masked))
    ],
)
def test_a_compiled_layer_is_one_graph_without_breaks(projection, sharing, masked):
    """The single layers; where layers share a projection, the encoder that owns it."""
    x, mask = (
        torch.randn(2, 21, 16, requires_grad=True),
        torch.arange(21) < torch.tensor([[21], [9]]) if masked else None,
    )
    encoder, *single = build(projection, sharing)
    for layer in [encoder] if sharing == "layerwise" else single:
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        results = []
        for function in (layer, compiled):
            output = function(x, mask=mask)
            results.append((output, *torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])))
        for eager, graph in zip(*results, strict=True):
            assert_close(graph, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
def test_a_layer_compiled_to_machine_code_has_the_same_outputs_and_gradients():
    x, mask = torch.randn(2, 21, 16), torch.arange(21) < torch.tensor([[21], [9]])
    _, attention, causal = build()
    results = []
    for function in (torch.compile(attention, fullgraph=True), attention):
        output = function(x, mask=mask)
        results.append([output, *torch.autograd.grad(output.square().sum(), list(attention.parameters()))])
    assert_close(*results, rtol=1e-4, atol=1e-4)
    assert_close(torch.compile(causal, fullgraph=True)(x), causal(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
def test_a_compiled_window_is_trained_on_short_inputs_of_many_lengths():
    """Inductor fails if the size of a tile, or the number of rows beside it, depends on the length."""
    layer = LinformerAttention(16, 2, projected_length=16, projection="mean", window_length=8)
    compiled = torch.compile(layer, fullgraph=True)
    for length in (20, 24, 12):
        x, results = torch.randn(2, length, 16, requires_grad=True), []
        for function in (compiled, layer):
            output = function(x)
            results.append([output, *torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])])
        assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
def test_one_compiled_graph_serves_many_lengths():
    layer = build("linear")[1]
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=count)
    for length in (9, 10, 17, 31):
        x = torch.randn(2, length, 16)
        assert_close(compiled(x), layer(x))
    assert len(graphs) <= 2  # at most one for each side of the point where another order is cheaper


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_autocast_is_close_to_float32(projection, masked):
    x, mask = torch.randn(2, 21, 16), torch.arange(21) < torch.tensor([[21], [9]]) if masked else None
    for layer in fresh(projection):
        exact = layer(x, mask=mask)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(x, mask=mask)
            output.float().square().sum().backward()
        assert (output.float() - exact).norm() < 0.02 * exact.norm()  # bfloat16 rounds to 0.4%
        for parameter in layer.parameters():
            assert parameter.grad.isfinite().all()
            assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("sharing", ["none", "headwise", "kv"])
@pytest.mark.parametrize("queries", ["per head", "folded"])
def test_under_autocast_the_dtype_does_not_depend_on_the_plan(queries, sharing):
    layer = LinformerAttention(16, 2, max_length=32, projected_length=4, sharing=sharing)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        patch.object(LinformerAttention, "_query_order", lambda *_: queries),
    ):
        output, weights = layer(torch.randn(2, 21, 16), need_weights=True)
        assert output.dtype == weights.dtype == layer(torch.randn(2, 21, 16)).dtype == torch.bfloat16
        with torch.no_grad(), patch.object(attention_linformer, "QUERY_CHUNK", 8):
            assert layer(torch.randn(2, 21, 16)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("projection", ["linear", "random", "conv"])
def test_rescaling_is_close_to_float32_in_half_precision(projection, dtype):
    """Squares of a fresh E vanish in float16."""
    projected = make_projection(projection, embed_dim=8, max_length=4096, projected_length=128, rescale=True)
    x, lengths = torch.randn(2, 4096, 8), torch.tensor([4096, 70])
    x[1, 70:] = 0
    exact, half = projected(x, lengths).rows_BMKC, copy.deepcopy(projected).to(dtype)(x.to(dtype), lengths).rows_BMKC
    assert (half.float() - exact).norm() < 0.05 * exact.norm()
    with torch.autocast("cpu", dtype=dtype):
        assert (projected(x, lengths).rows_BMKC.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("sharing", ["headwise", "none"])
@pytest.mark.parametrize("projection", ["linear", "random", "conv"])
def test_rescaling_one_token_does_not_overflow_in_half_precision(projection, sharing):
    """One row of a fresh E may be shorter than its columns by more than float16 can say."""
    sizes = {"max_length": 4096, "projected_length": 128, "projection": projection, "sharing": sharing, "rescale": True}
    layer = LinformerAttention(64, 4, **sizes)
    x, mask = torch.randn(2, 100, 64), torch.arange(100) < torch.tensor([[100], [1]])
    half = copy.deepcopy(layer).half()
    output, exact = half(x.half(), mask=mask), layer(x, mask=mask)
    assert (output.float() - exact).norm() < 0.02 * exact.norm()
    output[0].float().square().sum().backward()  # the short example must not spoil what the other one teaches
    assert all(parameter.grad.isfinite().all() for parameter in half.parameters())


def test_rescaling_a_row_of_tiny_numbers_stays_finite():
    projected = make_projection("linear", embed_dim=8, max_length=64, projected_length=4, rescale=True)
    with torch.no_grad():
        projected.weight[0] = 1e-20
    assert projected(torch.randn(1, 1, 8)).rows_BMKC.isfinite().all()


def test_long_windows_do_not_overflow_in_half_precision():
    x = torch.full((1, 3000, 4), 60.0, dtype=torch.float16)
    mean = make_projection("mean", embed_dim=4, projected_length=1)
    assert (mean(x, torch.tensor([2999])).rows_BMKC == 60).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_other_dtypes_are_close_to_float32(projection, dtype):
    x, mask = torch.randn(2, 21, 16), torch.arange(21) < torch.tensor([[21], [0]])
    for layer in fresh(projection):
        output, exact = copy.deepcopy(layer).to(dtype)(x.to(dtype), mask=mask), layer(x, mask=mask)
        assert output.dtype == dtype
        assert (output.float() - exact).norm() < (1e-6 if dtype == torch.float64 else 0.02) * exact.norm()


@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_parameters_are_counted_without_memory(projection, sharing):
    def parameters(encoder):
        return {name: parameter.shape for name, parameter in encoder.named_parameters()}

    with torch.device("meta"):
        counted = build(projection, sharing)
        huge = LinformerEncoder(
            4096, 32, depth=96, max_length=1_000_000, projected_length=256, projection=projection, sharing=sharing
        )
    assert sum(parameter.numel() for parameter in huge.parameters()) > 10**10
    for meta, real in zip(counted, build(projection, sharing), strict=True):
        assert parameters(meta) == parameters(real)
        assert all(parameter.is_meta for parameter in meta.parameters())


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_shapes_are_computed_on_meta_tensors(projection):
    with torch.device("meta"):
        for layer in build(projection):
            assert layer(torch.empty(2, 21, 16)).shape == (2, 21, 16)
            assert layer(torch.empty(2, 21, 16), mask=torch.ones(2, 21, dtype=torch.bool)).shape == (2, 21, 16)
        attention = LinformerAttention(64, 4, max_length=100_000, projected_length=128, projection=projection)
        with torch.no_grad():
            assert attention(torch.empty(1, 100_000, 64)).shape == (1, 100_000, 64)


def test_a_layer_made_on_meta_is_filled_by_reset_or_load():
    with torch.device("meta"):
        empty = LinformerAttention(16, 2, max_length=32, projected_length=4)
        unloaded = copy.deepcopy(empty)
    torch.manual_seed(1)
    full = LinformerAttention(16, 2, max_length=32, projected_length=4)
    unloaded.load_state_dict(full.state_dict(), assign=True)
    x = torch.randn(2, 21, 16)
    assert torch.equal(unloaded(x), full(x))
    empty.to_empty(device="cpu")
    for module in (empty, empty.projection):
        module.reset_parameters()
    for name, tensor in empty.state_dict().items():
        assert tensor.std().item() == pytest.approx(full.state_dict()[name].std().item(), rel=0.2)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_nothing_is_left_uninitialized(projection):
    torch.use_deterministic_algorithms(True)  # fills fresh memory with nan
    try:
        for layer in fresh(projection, sharing="layerwise"):
            assert all(tensor.isfinite().all() for tensor in layer.state_dict().values())
    finally:
        torch.use_deterministic_algorithms(False)


def test_copies_are_equal_and_repr_shows_the_sizes():
    for layer in build():
        x = torch.randn(2, 9, 16)
        assert torch.equal(copy.deepcopy(layer)(x), layer(x))
        assert "projected_length=" in repr(layer)
        assert "num_heads=2" in repr(layer)
