"""E and F: facts, number of matrices, initialization, the paper's theorem, and how a projection is added."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import (
    COMBINATIONS,
    PROJECTIONS,
    WITHOUT_MATRICES,
    numpy,
    randomize,
    reference_layer,
    reference_output,
    shared_projection,
)
from torch.testing import assert_close

from linformer_kit import (
    CausalLinformerAttention,
    LinformerAttention,
    LinformerConfig,
    LinformerEncoder,
    LinformerForCausalLM,
    LinformerModel,
    make_projection,
    reference,
)
from linformer_kit.keras import from_torch
from linformer_kit.keras.projection import Projection as KerasProjection
from linformer_kit.models.options_linformer import projection_names
from linformer_kit.models.projection_linformer import LinearProjection, Projection

FACTS = {
    "has_matrices": {"linear", "affine", "random", "dynamic", "conv", "head_conv"},
    "takes_any_length": {"dynamic", "conv", "head_conv", "mean", "max", "none"},
    "can_rescale": {"linear", "affine", "random", "conv"},
    "sized_by_max_length": {"linear", "affine", "random", "conv", "head_conv"},
    "sized_by_width": {"dynamic", "conv"},
    "sized_by_head": {"head_conv"},
    "is_features_first": {"head_conv"},
    "can_be_cut": {"linear", "affine", "random", "dynamic", "mean", "max", "none"},
    "has_own_learning_rate": {"linear", "affine"},
    "matrix_depends_on": {"linear", "affine", "random", "dynamic", "mean"},
    "why_no_matrix": {"conv", "head_conv", "max", "none"},
}


@pytest.mark.parametrize("fact", FACTS)
def test_every_fact_lists_its_projections(fact):
    assert set(Projection.kind_names(fact)) == FACTS[fact]


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_facts_describe_the_weights(kind):
    def shapes(**options):
        sizes = {"embed_dim": 8, "head_dim": 4, "max_length": 12, "projected_length": 3, **options}
        return [tuple(tensor.shape) for tensor in make_projection(kind, **sizes).tensors()]

    facts = Projection.kinds[kind]
    assert bool(shapes()) is facts.has_matrices
    assert (shapes(max_length=24) != shapes()) is facts.sized_by_max_length
    assert (shapes(embed_dim=16) != shapes()) is facts.sized_by_width
    assert (shapes(head_dim=2) != shapes()) is facts.sized_by_head
    assert (make_projection(kind, embed_dim=8, max_length=12).max_length is None) is facts.takes_any_length


def test_the_command_line_knows_all_projections():
    assert list(projection_names()) == PROJECTIONS


@pytest.mark.parametrize("kind", Projection.kind_names("matrix_depends_on"))
def test_the_key_matrix_gives_the_rows_of_the_keys(kind):
    projection, x = make_projection(kind, embed_dim=8, max_length=12, projected_length=3), torch.randn(1, 10, 8)
    E_NGK = projection.key_matrix(x)
    assert E_NGK.shape == (10, 1, 3)
    assert_close(torch.einsum("nk,nc->kc", E_NGK[:, 0], x[0]), projection(x).rows_BMKC[0, 0])
    if Projection.kinds[kind].matrix_depends_on == "length":
        assert torch.equal(projection.key_matrix(torch.zeros_like(x)), E_NGK)


@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_a_cut_of_a_new_projection_covers_the_whole_sequence(rows):
    weight_NK = make_projection("linear", embed_dim=8, max_length=64, projected_length=8).cut(rows).weight[:, 0]
    segments_NK = weight_NK > weight_NK.max(dim=0).values / 2  # the tokens that each row averages, and not the noise
    assert (segments_NK.sum(dim=1) == 1).all()
    assert_close(weight_NK.sum(dim=0), torch.ones(rows), rtol=0, atol=0.4)


def test_a_cut_random_projection_has_the_variance_of_a_smaller_one():
    cut = make_projection("random", embed_dim=8, max_length=4000, projected_length=64).cut(16)
    assert cut.weight.std().item() == pytest.approx(16**-0.5, rel=0.02)


def test_a_cut_projection_owns_no_parameters():
    shared = make_projection("linear", embed_dim=8, max_length=12, projected_length=6)
    cut = shared.cut(3)
    assert shared.cut(6) is shared
    assert not cut.tensors()
    assert shared.projected_length == 6
    cut(torch.randn(1, 12, 8)).rows_BMKC.sum().backward()
    assert (shared.weight.grad != 0).all()  # every column of the shared matrix learns


@pytest.mark.parametrize("kind", ["conv", "head_conv"])
@pytest.mark.parametrize("length", [3, 8, 11, 13, 24])
def test_a_resized_kernel_has_the_same_sum(kind, length):
    projection = randomize(make_projection(kind, embed_dim=6, max_length=12, projected_length=3))
    resized = projection.resized(length)
    assert resized.window == -(-length // 3)
    assert_close(resized.weight.sum(dim=1), projection.weight.sum(dim=1))
    if length % 12 == 0:  # each tap in equal parts, which make it again
        assert_close(resized.resized(12).weight, projection.weight)


def test_a_kind_is_registered_once(monkeypatch):
    monkeypatch.setattr(Projection, "kinds", dict(Projection.kinds))
    with pytest.raises(ValueError, match="kind 'mean' is already registered by MeanProjection; choose another name"):

        class OtherMean(Projection, kind="mean"):
            pass


@pytest.fixture
def first(own_projections):
    """Adds the projection "first" by running the example of CONTRIBUTING.md."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## How to add a projection")[1].split("\n## ")[0]
    blocks = re.findall(r"^ *```python\n(.*?)```", section, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    for block in blocks:
        exec(textwrap.dedent(block), {"__name__": "__main__"})


@pytest.mark.usefixtures("first")
class TestAddedProjection:
    """A projection that is added as CONTRIBUTING.md says works everywhere."""

    @pytest.mark.parametrize("sharing", ["headwise", "kv", "layerwise"])
    def test_layers_equal_the_reference(self, sharing):
        sizes = {"embed_dim": 8, "num_heads": 2, "projection": "first", "sharing": sharing}
        layer = randomize(LinformerAttention(**sizes, projected_length=3)).double()
        causal = randomize(CausalLinformerAttention(**sizes, block_length=4, slots=2)).double()
        shared = {each: shared_projection(each) for each in (layer, causal)}
        x = torch.randn(2, 9, 8).double()
        assert_close(layer(x, projection=shared[layer]), reference_output(layer, x, shared=shared[layer]))
        expected = [
            reference.causal_linformer_attention(numpy(example), reference_layer(causal, shared[causal]), 4)
            for example in x
        ]
        assert_close(causal(x, projection=shared[causal]), torch.from_numpy(np.array(expected)))

    def test_padding_never_changes_the_output(self):
        layer, x = LinformerAttention(8, 2, projected_length=3, projection="first"), torch.randn(2, 9, 8)
        for places in (range(5), range(4, 9), (0, 2, 3, 7, 8)):
            mask = torch.zeros(2, 9, dtype=torch.bool)
            mask[0], mask[1, list(places)] = True, True
            alone = layer(x[1:, list(places)])[0]
            assert_close(layer(x, mask=mask)[1, list(places)], alone)

    @pytest.mark.parametrize("model_class", [LinformerModel, LinformerForCausalLM])
    def test_models_are_built_saved_and_loaded(self, model_class, tmp_path):
        sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LinformerConfig(**sizes, projection="first", projected_length=4, block_length=4, slots=2)
        model, ids = model_class(config).eval(), torch.randint(3, 50, (2, 21))
        model.save_pretrained(tmp_path)
        loaded = model_class.from_pretrained(tmp_path).eval()
        assert loaded.config.projection == "first"
        assert torch.equal(loaded(ids)[0], model(ids)[0])

    @pytest.mark.parametrize("length", [2, 9])
    def test_the_keras_model_equals_the_torch_model(self, length):
        sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LinformerModel(LinformerConfig(**sizes, projection="first", projected_length=4)).eval()
        ids, mask = torch.randint(3, 50, (2, length)), torch.ones(2, length, dtype=torch.long)
        mask[1, 1:] = 0
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).last_hidden_state
            actual = from_torch(model)({"input_ids": ids, "attention_mask": mask})
        assert_close(actual[mask.bool()], expected[mask.bool()])

    def test_its_facts_are_checked_and_listed(self):
        with pytest.raises(ValueError, match="projection='first' has no matrices"):
            LinformerAttention(8, 2, projection="first", sharing="none")
        with pytest.raises(ValueError, match=r"projection is 'frist'.*'first'; did you mean 'first'?"):
            LinformerConfig(projection="frist")
        with pytest.raises(ValueError, match="'max' or 'first', which take any length"):
            LinformerAttention(8, 2, max_length=4, projected_length=2)(torch.zeros(1, 5, 8))


def test_an_added_projection_is_gone_after_the_test():
    assert not any("first" in names for names in (Projection.kinds, KerasProjection.kinds, reference.ROWS))


def matrices(module):
    """The number of stored matrices."""
    return sum(projection.matrices for projection in module.modules() if isinstance(projection, LinearProjection))


@pytest.mark.parametrize(("sharing", "expected"), [("none", 288), ("headwise", 24), ("kv", 12), ("layerwise", 1)])
@pytest.mark.parametrize("projection", ["linear", "random", "dynamic", "conv", "head_conv"])
def test_sharing_stores_as_many_matrices_as_the_paper_counts(projection, sharing, expected):
    sizes = {"embed_dim": 96, "num_heads": 12, "depth": 12, "max_length": 64, "projected_length": 16}
    with torch.device("meta"):
        encoder = LinformerEncoder(**sizes, projection=projection, sharing=sharing)
        without = LinformerEncoder(**sizes, projection="none")

    def numbers(module):
        return sum(tensor.numel() for tensor in [*module.parameters(), *module.buffers()])

    size = {"linear": 64 * 16, "random": 64 * 16, "dynamic": 96 * 16, "conv": 4 * 96, "head_conv": 4 * 8 * 8 + 8}[
        projection
    ]
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
    # a tenth of the signal, for independent tokens
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
def test_pooling_no_more_tokens_than_rows_is_full_attention(projection):
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
