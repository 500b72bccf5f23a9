"""Window attention: exact for the tokens around each query, in one softmax with the K rows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from oracle import COMBINATIONS, randomize, shared_projection, windowed_reference
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from linformer_kit import CausalLinformerAttention, LinformerAttention, LinformerConfig, LinformerEncoder
from linformer_kit.models import tiling_linformer, window_linformer
from linformer_kit.models.modeling_linformer import LinformerForCausalLM
from linformer_kit.models.projection_linformer import Blocks, Projection
from linformer_kit.models.tiling_linformer import Tiling, column_bias, mass_outside
from linformer_kit.models.window_linformer import NearAndFar, WindowAttention, weights_on_tokens

WINDOWED = [pair for pair in COMBINATIONS if pair[0] != "none"]
KINDS = list(dict.fromkeys(kind for kind, _ in WINDOWED))
# whose mass depends on weights or input, and is a constant for the gradient
MASS_BY_WEIGHT = ("linear", "affine", "dynamic")
SIZES = {"embed_dim": 12, "num_heads": 4, "num_kv_heads": 2, "head_dim": 5, "max_length": 40, "projected_length": 4}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of several blocks, and chunks of several tiles, in short inputs."""
    monkeypatch.setattr(tiling_linformer, "TILE", 6)
    monkeypatch.setattr(window_linformer, "KEY_CHUNK", 400)
    monkeypatch.setattr(window_linformer, "SCORE_CHUNK", 1000)


def build(projection="dynamic", sharing="headwise", window_length=3, global_tokens=0, **options):
    """A layer with random parameters, and the projection it shares if it shares one."""
    options = {**SIZES, **options}
    layer = LinformerAttention(
        projection=projection,
        sharing=sharing,
        window_length=window_length,
        global_tokens=global_tokens,
        **options,
    )
    shared = shared_projection(layer)
    randomize(layer, *([] if shared is None else [shared]))
    return layer, shared


def scattered_mask(batch, length):
    mask = torch.rand(batch, length) > 0.3
    mask[:, length // 2] = True
    mask[0] = True
    return mask


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    ("projection", "sharing", "window", "global_tokens", "rows", "distance_bias"),
    [
        *((projection, sharing, 3, 2, 4, False) for projection, sharing in WINDOWED),
        *((projection, "headwise", 1, 0, 7, True) for projection in KINDS),
        ("mean", "headwise", 7, 9, 4, False),  # global tokens in several blocks
        ("mean", "headwise", 7, 9, 4, True),
        ("linear", "none", 2, 3, 4, True),
        ("linear", "headwise", 4, 1, 0, False),
        ("linear", "headwise", 4, 1, 0, True),
        ("linear", "layerwise", 20, 0, 4, False),
        ("linear", "layerwise", 20, 0, 4, True),
    ],
)
class TestReference:
    @pytest.fixture
    def case(self, projection, sharing, window, global_tokens, rows, distance_bias, masked):
        sizes = {"projected_length": rows, "distance_bias": distance_bias}
        layer, shared = build(projection, sharing, window, global_tokens, **sizes)
        x = torch.randn(2, 17, 12)
        return layer, shared, x, scattered_mask(2, 17) if masked else None

    def test_the_layer_equals_the_reference(self, case):
        layer, shared, x, mask = case
        expected = windowed_reference(layer, x, mask, shared)
        for gradients, fused in ((True, True), (False, True), (True, False)):
            with torch.set_grad_enabled(gradients):
                output = layer(x, mask=mask, projection=shared, fused=fused)
            for example, (of_reference, _) in enumerate(expected):
                real = slice(None) if mask is None else mask[example]
                assert_close(output[example][real], of_reference, rtol=1e-9, atol=1e-11)

    def test_the_weights_are_those_of_the_reference(self, case, window, global_tokens):
        """Column j < 3w of the query with rank i is the token with rank (i // w - 1) · w + j, then global tokens."""
        layer, shared, x, mask = case
        output, weights = layer(x, mask=mask, projection=shared, need_weights=True)
        near = 3 * window
        assert_close(output, layer(x, mask=mask, projection=shared), rtol=1e-9, atol=1e-11)
        for example, (_, expected) in enumerate(windowed_reference(layer, x, mask, shared)):
            real = slice(None) if mask is None else mask[example]
            ours = weights[example][:, real]
            length = ours.shape[1]
            on_tokens = torch.zeros(layer.num_heads, length, length)
            for query in range(length):
                for column in range(near + global_tokens):
                    token = (query // window - 1) * window + column if column < near else column - near
                    if 0 <= token < length:
                        on_tokens[:, query, token] += ours[:, query, column]
            rows = expected.shape[2] - length
            on_rows = ours[:, :, near + global_tokens :]
            assert_close(torch.cat([on_tokens, on_rows[..., :rows]], dim=-1), expected, rtol=1e-9, atol=1e-11)
            drawn = weights_on_tokens(weights, window, global_tokens, mask)[example][:, real]
            assert_close(drawn[..., : on_rows.shape[-1]], on_rows)
            assert_close(drawn[..., on_rows.shape[-1] :][..., real], on_tokens)
            assert (on_rows[..., rows:] < 1e-30).all()  # rows of padding in shorter examples

    def test_the_gradients_are_those_of_the_equation(self, case, projection, rows, monkeypatch):
        layer, shared, x, mask = case
        leaves = [x.requires_grad_(), *layer.parameters(), *(shared.parameters() if shared is not None else [])]

        def loss(fused):
            output = layer(x, mask=mask, projection=shared, fused=fused)
            real = output if mask is None else output[mask]
            return real.square().sum()

        whole, chunked = (torch.autograd.grad(loss(fused), leaves, allow_unused=True) for fused in (False, True))
        assert_close(chunked, whole, rtol=1e-9, atol=1e-10)
        monkeypatch.setattr(WindowAttention, "has_gradients_by_products", lambda *_: False)
        by_autograd = torch.autograd.grad(loss(True), leaves, allow_unused=True)
        assert_close(by_autograd, whole, rtol=1e-9, atol=1e-10)
        if projection not in MASS_BY_WEIGHT or rows == 0:
            assert torch.autograd.gradcheck(
                lambda x: layer(x, mask=mask, projection=shared)[slice(None) if mask is None else mask],
                [x],
                fast_mode=True,
            )


@pytest.mark.usefixtures("float64")
@given(
    st.sampled_from(WINDOWED), st.integers(1, 9), st.integers(0, 5), st.integers(0, 6), st.data(), st.integers(1, 19)
)
def test_an_input_that_fits_into_the_window_has_full_attention(pair, window, global_tokens, rows, data, length):
    """Also in a batch with longer inputs, where it uses the code path for longer inputs."""
    layer, shared = build(*pair, window, global_tokens, projected_length=rows)
    short = min(length, 2 * window)
    full = LinformerAttention(**{**SIZES, "projected_length": 1}, projection="none")
    full.load_state_dict({name: value for name, value in layer.state_dict().items() if "projection" not in name})
    x = torch.randn(2, length, 12)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0] = False
    mask[0, data.draw(st.permutations(range(length)))[:short]] = True
    output = layer(x, mask=mask, projection=shared)
    assert_close(output[0][mask[0]], full(x[:1, mask[0]])[0])
    assert_close(layer(x[:, :short], projection=shared), full(x[:, :short]))


@pytest.mark.usefixtures("float64")
@given(st.integers(1, 9), st.integers(0, 5), st.integers(1, 33), st.booleans())
def test_a_window_without_rows_is_attention_with_a_band_mask(window, global_tokens, length, distance_bias):
    options = {"projected_length": 0, "num_kv_heads": 4, "distance_bias": distance_bias}
    layer, _ = build(window_length=window, global_tokens=global_tokens, **options)
    x, position = torch.randn(2, length, 12), torch.arange(length)
    block, distance = position // window, position - position[:, None]
    is_near = (block[:, None] - block).abs() <= 1
    band = is_near | (position < global_tokens)
    if distance_bias:
        bias = layer.distance_bias.weight[(distance + 2 * window - 1).clamp(0, 4 * window - 2)].movedim(-1, 0)
        band = (bias * is_near).masked_fill(~band, -torch.inf)
    query, keys, values = (
        linear(x).unflatten(-1, (4, 5)).transpose(1, 2) for linear in (layer.query, layer.key, layer.value)
    )
    heads = F.scaled_dot_product_attention(query, keys, values, attn_mask=band)
    assert_close(layer(x), layer.output(heads.transpose(1, 2).flatten(2)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("depth", [1, 2])
@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 4), st.integers(5, 30), st.data())
def test_a_token_moves_exactly_what_sees_it(depth, window, global_tokens, rows, length, data):
    """Without rows, a layer carries a change one block further; with rows, a token outside reaches every query."""
    encoder = LinformerEncoder(
        12,
        2,
        depth=depth,
        max_length=40,
        projected_length=rows,
        projection="mean",
        window_length=window,
        global_tokens=global_tokens,
        feed_forward="none",
    )
    randomize(encoder)
    x, position = torch.randn(1, length, 12), torch.arange(length)
    changed = data.draw(st.integers(0, length - 1))
    block = position // window
    sees = ((block[:, None] - block).abs() <= 1) | (position < global_tokens) | (rows > 0)
    moved = torch.eye(length, dtype=torch.bool)[:, changed]
    for _ in range(depth):
        moved = (sees & moved).any(dim=1) | moved
    other = x.clone()
    other[0, changed] += torch.randn(12)
    difference = (encoder(other) - encoder(x)).abs().amax(dim=-1)[0]
    assert_close(difference > 0, moved)


def test_new_heads_attend_to_the_nearest_neighbors():
    weight = LinformerAttention(12, 6, projected_length=0, window_length=4, distance_bias=True).distance_bias.weight
    assert weight.shape == (15, 6)
    assert (weight.argmax(dim=0) - 7).tolist() == [-1, 1, -2, 2, -3, 3]
    assert (weight.amax(dim=0) == 5).all()
    assert weight.count_nonzero() == 6
    # two neighbors for any number of heads
    weight = LinformerAttention(12, 6, projected_length=0, window_length=1, distance_bias=True).distance_bias.weight
    assert (weight.argmax(dim=0) - 1).tolist() == [-1, 1, -1, 1, -1, 1]


def test_rows_of_means_stand_for_the_tokens_outside_of_the_window():
    """12 tokens in blocks of 2 and 4 segments of 3: block 0 sees tokens 0 to 3, block 2 sees 2 to 7."""
    projection = Projection.make(
        "mean", embed_dim=1, max_length=12, projected_length=4, sharing="kv", num_kv_heads=1, rescale=False
    )
    mass = projection.mass_in_blocks(torch.zeros(1, 12, 1), None, Blocks(6, 2))
    outside = mass_outside(mass)[0, 0]
    assert outside[0].tolist() == [0, 2, 3, 3]
    assert outside[2].tolist() == [2, 0, 1, 3]
    assert mass.sum() == 12
    # without the first token, which all queries see
    skipped = projection.mass_in_blocks(torch.zeros(1, 12, 1), None, Blocks(6, 2, skipped=1))
    assert mass_outside(skipped)[0, 0, 2].tolist() == [1, 0, 1, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_the_mass_of_a_row_is_its_tokens_or_one(kind):
    """A new linear E starts as segment means, so the mass of its rows lies in their segments, up to noise."""
    options = {"embed_dim": 6, "max_length": 40, "projected_length": 8, "num_kv_heads": 2, "rescale": False}
    sharing = "none" if kind in Projection.kind_names("has_matrices") else "kv"
    projection = Projection.make(kind, sharing=sharing, head_dim=3, **options)
    mass = projection.mass_in_blocks(torch.randn(2, 40, 6), None, Blocks(8, 5))
    assert_close(mass.sum(dim=2), torch.full_like(mass[:, :, 0], 5.0 if kind == "mean" else 1.0))
    assert not mass.requires_grad
    padded = projection.mass_in_blocks(torch.randn(2, 40, 6), torch.tensor([40, 15]), Blocks(8, 5))
    assert (padded[1:, :, 3:] == 0).all()
    if kind in ("linear", "affine"):
        assert (mass[0, 0] - torch.eye(8)).abs().max() < 0.3


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("sharing", ["none", "kv"])
def test_dropout_draws_the_same_numbers_in_the_backward_pass(sharing):
    layer, _ = build("dynamic", sharing, dropout=0.4, distance_bias=sharing == "none")
    x, direction, upstream = torch.randn(2, 23, 12), torch.randn(2, 23, 12), torch.randn(2, 23, 12)

    def loss(x):
        torch.manual_seed(3)
        return (layer(x) * upstream).sum()

    # a constant, as it is for gradients
    layer.projection.mass_in_blocks = lambda x, lengths, blocks, E: torch.ones(1, 1, blocks.number, 4)
    (gradient,) = torch.autograd.grad(loss(x.requires_grad_()), x)
    numeric = (loss(x + 1e-6 * direction) - loss(x - 1e-6 * direction)) / 2e-6
    assert_close((gradient * direction).sum(), numeric.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("distance_bias", [False, True])
def test_dropout_of_a_kernel_that_draws_its_own_numbers(monkeypatch, distance_bias):
    """As on GPUs. The output is linear in W_V and b_V, so its product with the gradient is the output again."""
    layer, _ = build("mean", dropout=0.4, distance_bias=distance_bias)
    torch.nn.init.zeros_(layer.output.bias)

    def fused(query, keys, values, attn_mask, dropout_p):
        dropped = torch.rand(query.shape[-2], *query.shape[:2], keys.shape[-2]).movedim(0, 2) < dropout_p
        scores = query @ keys.mT / query.shape[-1] ** 0.5 + attn_mask
        return (scores.softmax(dim=-1).masked_fill(dropped, 0) / (1 - dropout_p)) @ values

    monkeypatch.setattr(F, "scaled_dot_product_attention", fused)
    x, upstream = torch.randn(2, 23, 12), torch.randn(2, 23, 12)
    loss = (layer(x) * upstream).sum()
    leaves = list(layer.value.parameters())
    gradients = torch.autograd.grad(loss, leaves)
    assert_close(sum((leaf * gradient).sum() for leaf, gradient in zip(leaves, gradients, strict=True)), loss)


@pytest.mark.parametrize(
    ("window", "distance_bias", "expected"), [(128, False, True), (512, False, False), (512, True, True)]
)
def test_the_backward_pass_stores_the_scores_of_short_blocks_only(monkeypatch, window, distance_bias, expected):
    """Those of a long block would need more memory than everything else."""
    monkeypatch.setattr(window_linformer, "SCORE_CHUNK", 2**19)
    attention = WindowAttention(Tiling.of(4096, window, 0), num_heads=8, num_kv_heads=8, dropout=0)
    tokens, bias = torch.empty(1, 4096, 8), torch.empty(1, 1, 4096 // window, 3 * window + 128)
    context = NearAndFar(tokens, tokens, tokens, tokens, bias, torch.empty(8, 1, 1) if distance_bias else None)
    assert attention.has_gradients_by_products(tokens, context) == expected


@pytest.mark.parametrize(("dropout", "create_graph"), [(0.0, False), (0.0, True), (0.4, False)])
def test_a_backward_pass_under_autocast_has_the_precision_of_the_forward_pass(dropout, create_graph):
    tiling = Tiling.of(24, 3, 0)
    attention = WindowAttention(tiling, num_heads=2, num_kv_heads=2, dropout=dropout)
    leaves = [torch.randn(2, 24, 8, requires_grad=True) for _ in range(3)]
    bias = column_bias(tiling, torch.tensor([24, 24]), torch.ones(1, 1, tiling.blocks, 4), torch.float32)

    def gradients(autocast):
        torch.manual_seed(0)
        query, keys, values = leaves
        loss = attention(query, NearAndFar(keys, values, keys[:, :4], values[:, :4], bias, None)).square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return torch.autograd.grad(loss, leaves, create_graph=create_graph)

    assert_close(gradients(autocast=True), gradients(autocast=False))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("distance_bias", [False, True])
def test_second_derivatives_are_those_of_autograd(distance_bias):
    """With a residual, so that a missing part of the graph would not be an error."""
    layer, _ = build("dynamic", distance_bias=distance_bias)
    x, upstream = torch.randn(2, 23, 12, requires_grad=True), torch.randn(2, 23, 12)
    leaves, results = [x, *layer.parameters()], []
    for fused in (True, False):
        first = torch.autograd.grad(((x.tanh() + layer(x, fused=fused)) * upstream).sum(), leaves, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        results.append(torch.autograd.grad(penalty, leaves, allow_unused=True, materialize_grads=True))
    assert_close(*results, rtol=1e-8, atol=1e-8)


def test_no_weight_is_drawn_on_padding():
    layer, _ = build(projected_length=0)
    mask = torch.zeros(2, 17, dtype=torch.bool)
    mask[0, :5] = True
    weights = layer(torch.randn(2, 17, 12), mask=mask, need_weights=True)[1]
    drawn = weights_on_tokens(weights, 3, 0, mask)
    assert (drawn[0, ..., 5:] == 0).all()
    assert (drawn[1] == 0).all()


def test_a_backward_pass_with_dropout_leaves_the_random_state_unchanged():
    layer, _ = build("mean", dropout=0.4)
    loss = layer(torch.randn(2, 23, 12, requires_grad=True)).sum()
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_second_derivatives_with_dropout_say_what_to_do():
    layer, _ = build("mean", dropout=0.4)
    x = torch.randn(2, 23, 12, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"dropout=0\.4 need fused=False"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    (gradient,) = torch.autograd.grad(layer(x, fused=False).sum(), x, create_graph=True)
    assert gradient.requires_grad


@pytest.mark.parametrize("gradients", [False, True])
def test_long_inputs_are_processed_in_chunks(monkeypatch, gradients):
    layer, _ = build("mean")
    sizes, attend = [], WindowAttention.attend

    def spy(self, query, *rest):
        sizes.append(query.shape[:2].numel())
        return attend(self, query, *rest)

    monkeypatch.setattr(WindowAttention, "attend", spy)
    with torch.set_grad_enabled(gradients):
        layer(torch.randn(2, 37, 12))
    assert max(sizes) < 2 * 37


def test_a_chunk_has_several_examples_but_few_scores(monkeypatch):
    monkeypatch.setattr(window_linformer, "KEY_CHUNK", 2**20)
    monkeypatch.setattr(window_linformer, "SCORE_CHUNK", 2**19)
    attention = WindowAttention(Tiling.of(2048, 128, 0), num_heads=8, num_kv_heads=8, dropout=0)
    tokens, bias = torch.empty(4, 2048, 64), torch.empty(4, 1, 16, 512)
    context = NearAndFar(tokens, tokens, tokens, tokens, bias, None)
    with_bias = context._replace(distance_bias_HQP=torch.empty(8, 1, 1))
    assert len(list(attention.chunks(context))) == 2  # 2 × 16 tiles of 512 × 64 keys in each
    # 8 × 128 × 512 = 2**19 scores in a tile
    assert len(list(attention.chunks(with_bias))) == len(list(attention.chunks(context, True))) == 4 * 16


@pytest.mark.parametrize("distance_bias", [False, True])
def test_the_backward_pass_keeps_neither_columns_nor_weights(distance_bias):
    """Only a few tensors of N × C: not the 3w + K columns of each block, not the N × (3w + K) weights."""
    layer = LinformerAttention(
        32, 4, max_length=512, projected_length=16, projection="mean", window_length=16, distance_bias=distance_bias
    )
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(1, 512, 32, requires_grad=True))
    weights = sum(parameter.numel() for parameter in layer.parameters())
    assert sum(kept.values()) - weights < 7 * 512 * 32


@pytest.mark.parametrize("length", [7, 24, 33, 40])
@pytest.mark.parametrize(("projection", "sharing"), [pair for pair in WINDOWED if pair[1] != "layerwise"])
def test_the_plan_counts_the_multiply_adds_and_takes_the_cheaper_order(projection, sharing, length):
    for window, global_tokens, rows in ((3, 2, 4), (7, 0, 0), (10, 0, 4)):
        layer, _ = build(projection, sharing, window, global_tokens, projected_length=rows)
        plan, counter = layer.plan(length, batch=2), FlopCounterMode(display=False)
        with counter, torch.no_grad():
            layer(torch.randn(2, length, 12), fused=False)  # the counter does not know the fused kernel
        expected = plan.multiply_adds
        if plan.queries == "folded":  # b_Q keysᵀ, a vector's worth
            expected += 2 * layer.num_heads * length * layer.head_dim
        if rows and projection in ("conv", "mean", "max") and length > 2 * window:  # pooling is not a matrix product
            expected -= 2 * layer.projection.multiply_adds_per_channel(length) * 12
        assert counter.get_total_flops() == 2 * expected


def test_keys_are_computed_before_the_sequence_is_shortened_only_if_that_is_much_cheaper():
    """Keys and values of all tokens are needed, so sequence first no longer saves them."""
    options = {"max_length": 4096, "projected_length": 128, "window_length": 128}
    assert LinformerAttention(512, 8, **options, sharing="none").plan(4096).keys == "features first"
    assert LinformerAttention(512, 8, **options, sharing="kv").plan(4096).keys == "sequence first"
    assert LinformerAttention(512, 8, **options).plan(4096).queries == "per head"
    # 2 · N · C² for keys and values of the tokens, and as much for queries and output; 2 · N · (3w + K) · C scores
    costs = 4 * 4096 * 512**2 + 2 * 4096 * 512 * 512
    rows = 2 * 4096 * 128 * 512 + 2 * 128 * 512**2
    assert LinformerAttention(512, 8, **options).plan(4096).multiply_adds == costs + rows


@pytest.mark.parametrize("global_tokens", [0, 2])
@pytest.mark.parametrize("projection", ["linear", "dynamic", "mean", "head_conv"])
def test_half_precision_and_autocast_are_close_to_float32(projection, global_tokens):
    layer, _ = build(projection, "headwise", 3, global_tokens, distance_bias=global_tokens == 0)
    x, mask = torch.randn(2, 23, 12), scattered_mask(2, 23)
    expected = layer(x, mask=mask)
    results = [copy.deepcopy(layer).to(dtype)(x.to(dtype), mask=mask) for dtype in (torch.bfloat16, torch.float16)]
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results.append(layer(leaf, mask=mask))
    for result in results:
        assert (result[mask].float() - expected[mask]).abs().max() < 0.04 * expected[mask].abs().max()
    results[-1].float().square().sum().backward()
    exact = torch.autograd.grad(layer(x.requires_grad_(), mask=mask).square().sum(), x)[0]
    assert (leaf.grad - exact)[mask].norm() < 0.05 * exact[mask].norm()


@pytest.mark.parametrize("scale", [1, 20], ids=["small scores", "large scores"])
@pytest.mark.parametrize("distance_bias", [False, True])
def test_chunks_cost_no_precision_in_half_precision(monkeypatch, scale, distance_bias):
    """Sums over many chunks in bfloat16 would stop growing, and scores stored in bfloat16 have large errors."""
    layer, _ = build("mean", distance_bias=distance_bias)
    monkeypatch.setattr(window_linformer, "KEY_CHUNK", 1)
    with torch.no_grad():
        layer.query.weight.mul_(scale)
    layer.bfloat16()
    x, upstream = torch.randn(2, 600, 12).bfloat16(), torch.rand(2, 600, 12).bfloat16()

    def gradients(layer):
        dtype = layer.query.weight.dtype
        leaves = [x.to(dtype).requires_grad_(), *layer.parameters()]
        return torch.autograd.grad((layer(leaves[0]) * upstream.to(dtype)).sum(), leaves)

    exact = gradients(copy.deepcopy(layer).double())
    in_chunks = gradients(layer)
    monkeypatch.setattr(window_linformer, "can_recompute", lambda: False)
    for ours, whole, reference in zip(in_chunks, gradients(layer), exact, strict=True):
        error, error_of_whole = ((each.double() - reference).norm() for each in (ours, whole))
        assert error < 1.2 * error_of_whole + 1e-3 * reference.norm()


def test_the_mass_of_a_row_can_be_more_than_float16_can_represent():
    tiling = Tiling.of(200_000, 64, 0)
    mass = torch.full((1, 1, tiling.blocks, 1), 64.0, dtype=torch.float16)
    bias = column_bias(tiling, torch.tensor([200_000]), mass, torch.float16)[0, 0, :, -1]
    outside = 64 * torch.tensor([tiling.blocks - 2, tiling.blocks - 3])
    assert_close(bias[:2], outside.log().half(), rtol=1e-3, atol=0)


def test_mass_is_summed_in_float32():
    options = {"sharing": "kv", "embed_dim": 4, "max_length": 5000, "projected_length": 2, "num_kv_heads": 1}
    random, mean = (Projection.make(kind, rescale=False, **options) for kind in ("random", "mean"))
    x = torch.zeros(1, 5000, 4)
    exact = random.mass_in_blocks(x, None, Blocks(2, 2500))
    for dtype in (torch.bfloat16, torch.float16):
        mass = copy.deepcopy(random).to(dtype).mass_in_blocks(x.to(dtype), None, Blocks(2, 2500))
        assert_close(mass, exact, rtol=1e-3, atol=0)  # of the same dtype
    mass = mean.mass_in_blocks(x[:, :2002].bfloat16(), None, Blocks(2, 1001))
    assert mass.diagonal(dim1=-2, dim2=-1).tolist() == [[[1001, 1001]]]  # bfloat16 has no 1001


@pytest.mark.parametrize("rows", [0, 4])
def test_padding_that_sees_nothing_is_finite_in_float16(rows):
    layer, _ = build("mean", projected_length=rows, distance_bias=True)
    with torch.no_grad():
        layer.query.weight.mul_(30)
        layer.distance_bias.weight.fill_(-50)
    layer.half()
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[0, :4] = True
    x = torch.randn(2, 40, 12).half().requires_grad_()
    for fused in (True, False):
        output = layer(x, mask=mask, fused=fused)
        assert output.isfinite().all()
        assert torch.autograd.grad(output[mask].square().sum(), x)[0].isfinite().all()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("gradients", [False, True])
def test_an_example_without_real_tokens_has_only_the_output_bias(gradients):
    layer, _ = build("mean")
    mask = scattered_mask(3, 37)
    mask[1] = False
    with torch.set_grad_enabled(gradients):
        output = layer(torch.randn(3, 37, 12), mask=mask)
    assert_close(output[1], layer.output.bias.expand(37, -1))
    assert (output[0] - layer.output.bias).abs().min() > 0


@pytest.mark.usefixtures("float64", "fresh_compiler")
@pytest.mark.parametrize("projection", ["dynamic", "conv"])
def test_a_compiled_layer_is_one_graph_without_breaks(projection):
    layer, _ = build(projection, "headwise", 3, 2, distance_bias=projection == "dynamic")
    x, mask = torch.randn(2, 17, 12, requires_grad=True), scattered_mask(2, 17)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        output = function(x, mask=mask)
        results.append((output, *torch.autograd.grad(output[mask].square().sum(), [x, *layer.parameters()])))
    assert_close(*results, rtol=1e-9, atol=1e-10)


def test_a_layer_without_a_mask_is_exported_for_all_lengths():
    layer, _ = build("mean", global_tokens=2)
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=3, max=40)}
    with torch.no_grad():
        program = torch.export.export(layer.eval(), (torch.randn(2, 23, 12),), dynamic_shapes=(sizes,)).module()
        for length in (5, 24, 40):
            x = torch.randn(3, length, 12)
            assert_close(program(x), layer(x), rtol=1e-4, atol=1e-5)


def test_shapes_are_computed_on_meta_tensors(monkeypatch):
    monkeypatch.setattr(window_linformer, "KEY_CHUNK", 2**20)
    layer = LinformerAttention(64, 4, max_length=2**20, projected_length=16, projection="mean", window_length=64)
    layer.to("meta")
    x = torch.empty(1, 100_000, 64, device="meta", requires_grad=True)
    output = layer(x)
    output.sum().backward()
    assert output.shape == x.grad.shape == (1, 100_000, 64)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("recompute", ["gradient_checkpointing", "reversible"])
def test_encoders_that_recompute_have_the_same_gradients(recompute):
    encoder = LinformerEncoder(
        12,
        2,
        depth=2,
        max_length=40,
        projected_length=[0, 4],
        window_length=3,
        global_tokens=1,
        distance_bias=True,
        sharing="layerwise",
        **{recompute: True},
    )
    randomize(encoder)
    x, mask = torch.randn(2, 23, 12, requires_grad=True), scattered_mask(2, 23)
    leaves = [x, *encoder.parameters()]
    ours = torch.autograd.grad(encoder(x, mask)[mask].square().sum(), leaves)
    encoder.gradient_checkpointing = False
    plain = encoder(x, mask, need_weights=True)[0]  # keeps everything
    assert_close(ours, torch.autograd.grad(plain[mask].square().sum(), leaves), rtol=1e-8, atol=1e-9)


def test_a_window_of_zero_is_the_layer_without_a_window():
    torch.manual_seed(0)
    plain = LinformerAttention(12, 2, max_length=40, projected_length=4)
    torch.manual_seed(0)
    zero = LinformerAttention(12, 2, max_length=40, projected_length=4, window_length=0)
    x = torch.randn(2, 40, 12)
    assert torch.equal(zero(x), plain(x))


def test_a_tiling_covers_the_tokens():
    assert Tiling.of(100, 3, 0) == Tiling(window=3, global_tokens=0, blocks_per_tile=2, tiles=17)
    assert Tiling.of(5, 3, 0).blocks == 2
    assert Tiling.of(5, 30, 0) == Tiling(window=3, global_tokens=0, blocks_per_tile=2, tiles=1)  # no longer than needed
    assert Tiling.of(100, 8, 1).size == 8
    assert Tiling.of(100, 4, 0).size == 4  # two blocks are more than TILE
    assert Tiling.of(4, 1, 0).size == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection": "none"}, "sees every token exactly already"),
        ({"window_length": -1}, "window_length is -1; it must be an integer of at least 0"),
        ({"window_length": 2.5}, "window_length"),
        ({"window_length": True}, "window_length"),
        ({"global_tokens": -2}, "global_tokens is -2"),
        ({"window_length": 0, "global_tokens": 1}, "global_tokens=1 needs a window"),
        ({"window_length": 0, "projected_length": 0}, "only layers with a window"),
        ({"window_length": 0, "distance_bias": True}, "distance_bias=True needs a window"),
        ({"distance_bias": 1}, "distance_bias"),
        ({"projected_length": -1}, "projected_length is -1; with a window it must be an integer of at least 0"),
        ({"projected_length": True}, "projected_length"),
    ],
)
def test_options_without_a_meaning_are_refused(options, message):
    options = {"window_length": 4, "projected_length": 4, **options}
    for build_one in (
        lambda: LinformerAttention(12, 2, **options),
        lambda: LinformerEncoder(12, 2, depth=2, **options),
        lambda: LinformerConfig(hidden_size=12, num_attention_heads=2, num_hidden_layers=2, **options),
    ):
        with pytest.raises((ValueError, TypeError, StrictDataclassError), match=message):
            build_one()


@pytest.mark.usefixtures("float64")
def test_all_parameters_have_a_gradient_for_short_inputs_too():
    """Distributed training stops at parameters without one."""
    layer, _ = build("linear", window_length=6, distance_bias=True)
    x = torch.randn(1, 9, 12)
    layer(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    # a frozen bias has none, and does not change the others
    expected = {name: parameter.grad for name, parameter in layer.named_parameters() if "distance" not in name}
    layer.zero_grad()
    layer.distance_bias.requires_grad_(False)
    layer(x).square().sum().backward()
    assert_close({name: each.grad for name, each in layer.named_parameters() if each.grad is not None}, expected)


def test_torch_func_computes_the_gradient():
    layer, _ = build("mean", distance_bias=True)
    x = torch.randn(2, 9, 12, requires_grad=True)

    def loss(x):
        return layer(x).square().sum()

    assert_close(torch.func.grad(loss)(x.detach()), torch.autograd.grad(loss(x), x)[0])
    assert "window_length=3, global_tokens=0, distance_bias=True" in repr(layer)


def test_a_window_is_only_for_self_attention():
    layer, _ = build()
    with pytest.raises(ValueError, match="context_length is 5"):
        layer.plan(9, context_length=5)
    with pytest.raises(ValueError, match="context_dim=7 with window_length=4"):
        LinformerAttention(12, 2, window_length=4, context_dim=7)
    x = torch.randn(1, 9, 12)
    for call in (lambda: layer(x, x), lambda: layer(x, value=x), lambda: layer.project(x)):
        with pytest.raises(ValueError, match="window_length=3 attends to the tokens around each query in x"):
            call()
    with pytest.raises(TypeError, match=r"only encoders have a window; a causal layer .* see block_length"):
        CausalLinformerAttention(12, 2, window_length=4)
    with pytest.raises(ValueError, match="in a causal layer"):
        LinformerForCausalLM(
            LinformerConfig(vocab_size=9, hidden_size=12, num_attention_heads=2, num_hidden_layers=1, window_length=4)
        )


def test_inputs_longer_than_E_are_refused_even_if_they_fit_into_the_window():
    layer, _ = build("linear", window_length=30)
    with pytest.raises(ValueError, match="max_length is 40"):
        layer(torch.randn(1, 41, 12))


def test_a_projection_that_does_not_know_its_mass_says_so(own_projections):
    class FirstTokens(Projection, kind="first"):
        def __init__(self, projected_length):
            super().__init__()
            self.projected_length = projected_length

    with pytest.raises(NotImplementedError, match="define `mass_in_blocks`"):
        FirstTokens(3).mass_in_blocks(torch.zeros(1, 4, 2), None, Blocks(2, 2))
