"""E itself: how many there are, how they start, what the paper's theorem says of them."""

import pytest
import torch
from oracle import COMBINATIONS, PROJECTIONS, WITHOUT_MATRICES, randomize
from torch.testing import assert_close

from linformer_kit import CausalLinformerAttention, LinformerAttention, LinformerEncoder, make_projection
from linformer_kit.models.projection_linformer import LinearProjection


def matrices(module):
    """How many matrices of E and F are stored."""
    return sum(projection.matrices for projection in module.modules() if isinstance(projection, LinearProjection))


@pytest.mark.parametrize(("sharing", "expected"), [("none", 288), ("headwise", 24), ("kv", 12), ("layerwise", 1)])
@pytest.mark.parametrize("projection", ["linear", "random", "dynamic", "conv"])
def test_sharing_stores_as_many_matrices_as_the_paper_counts(projection, sharing, expected):
    sizes = {"embed_dim": 96, "num_heads": 12, "depth": 12, "max_length": 64, "projected_length": 16}
    with torch.device("meta"):
        encoder = LinformerEncoder(**sizes, projection=projection, sharing=sharing)
        without = LinformerEncoder(**sizes, projection="none")

    def numbers(module):
        return sum(tensor.numel() for tensor in [*module.parameters(), *module.buffers()])

    size = {"linear": 64 * 16, "random": 64 * 16, "dynamic": 96 * 16, "conv": 4 * 96}[projection]
    assert numbers(encoder) - numbers(without) == expected * size
    if projection in ("linear", "random"):
        assert matrices(encoder) == expected


@pytest.mark.parametrize(("sharing", "expected"), [("kv", 1_179_904), ("headwise", 1_307_904)])
def test_parameters_of_a_layer_equal_the_formula(sharing, expected):
    layer = LinformerAttention(256, 8, head_dim=128, max_length=2000, projected_length=64, sharing=sharing)
    # 4 · C · HD + 3 · HD + C, and the matrices
    assert sum(parameter.numel() for parameter in layer.parameters()) == expected


@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_saving_and_loading_the_state_is_exact(projection, sharing):
    sizes = {"embed_dim": 8, "num_heads": 2, "depth": 2, "max_length": 12, "projected_length": 3}
    first, second = (LinformerEncoder(**sizes, projection=projection, sharing=sharing) for _ in range(2))
    randomize(first)
    names = list(first.state_dict())
    assert len(names) == len({tensor.data_ptr() for tensor in first.state_dict().values()}), (
        "a tensor is registered twice"
    )
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, 9, 8)
    assert torch.equal(first(x), second(x))
    for name, tensor in second.state_dict().items():
        assert torch.equal(tensor, first.state_dict()[name])


def test_the_random_matrix_is_saved_but_not_trained():
    layer = LinformerAttention(8, 2, max_length=12, projected_length=3, projection="random")
    assert "projection.weight" in layer.state_dict()
    assert "projection.weight" not in dict(layer.named_parameters())


def test_a_matrix_starts_as_segment_means_with_a_little_noise():
    E = make_projection("linear", embed_dim=8, max_length=64, projected_length=16).weight
    means = torch.kron(torch.eye(16), torch.ones(4, 1)) / 4
    noise = E - means[:, None]
    assert noise.std().item() == pytest.approx(0.1 * 4 / 64, rel=0.1)
    assert not torch.equal(E[:, 0], E[:, 1])
    # a tenth of what the means give on tokens that know nothing of each other
    x = torch.randn(100, 64, 8)
    signal, disturbance = torch.einsum("nk,bnc->bkc", means, x), torch.einsum("nk,bnc->bkc", noise[:, 0], x)
    assert (disturbance.std() / signal.std()).item() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(("length", "rows"), [(64, 16), (50, 16), (7, 16)])
def test_every_token_starts_in_one_segment_and_segments_are_even(length, rows):
    E = make_projection("linear", embed_dim=8, max_length=length, projected_length=rows).weight[:, 0]
    segment = E.argmax(dim=1)
    sizes = segment.bincount(minlength=rows)
    assert (segment.diff() >= 0).all()
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("projection", ["linear", "conv"])
def test_linear_and_conv_start_near_mean_pooling(projection):
    x = torch.randn(4, 64, 8)
    rows = make_projection(projection, embed_dim=8, max_length=64, projected_length=16)(x).rows_BMKC
    mean = make_projection("mean", embed_dim=8, projected_length=16)(x).rows_BMKC.expand_as(rows)
    assert ((rows - mean).norm() / mean.norm()).item() == pytest.approx(0.1, rel=0.3)


@pytest.mark.parametrize("projection", ["mean", "max"])
def test_pooling_no_more_tokens_than_rows_is_ordinary_attention(projection):
    layer = LinformerAttention(8, 2, projected_length=10, projection=projection)
    full = LinformerAttention(8, 2, projection="none")
    full.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, 8)
    assert_close(layer(x), full(x))


def test_the_paper_s_theorem():
    """‖P R Rᵀ V − P V‖ falls like 1/√K for the R of `random` and real attention weights P (Theorem 1)."""
    torch.manual_seed(0)
    layer = LinformerAttention(64, 1, projection="none")
    x = torch.randn(1, 512, 64)
    _, weights = layer(x, need_weights=True)
    P, V = weights[0, 0].detach(), layer.value(x)[0].detach()
    lengths, errors = [16, 32, 64, 128, 256], []
    for projected_length in lengths:
        samples = []
        for _ in range(20):
            R = make_projection(
                "random", embed_dim=64, max_length=512, projected_length=projected_length, sharing="kv"
            ).weight[:, 0]
            samples.append((P @ R @ R.T @ V - P @ V).norm() / (P @ V).norm())
        errors.append(torch.stack(samples).mean().log())
    exponent = (
        torch.linalg.lstsq(
            torch.stack([torch.tensor(lengths).log(), torch.ones(5)], dim=1), torch.stack(errors)[:, None]
        )
        .solution[0]
        .item()
    )
    assert exponent == pytest.approx(-0.5, abs=0.03)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_every_projection_is_reproducible_under_a_seed(projection):
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        layer = LinformerAttention(8, 2, max_length=12, projected_length=3, projection=projection)
        outputs.append(layer(torch.randn(2, 9, 8)))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_fresh_layers_keep_the_scale_of_their_input(projection):
    x = torch.randn(4, 128, 64)
    for layer in (
        LinformerAttention(64, 4, max_length=128, projected_length=32, projection=projection),
        CausalLinformerAttention(64, 4, block_length=16, slots=4, projection=projection),
    ):
        output = layer(x)
        assert 0.01 < output.std() < 3
        if projection in WITHOUT_MATRICES:
            assert not [name for name in layer.state_dict() if name.startswith("projection")]
