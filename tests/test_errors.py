"""Bad input: each error names the value, what is allowed and what to do."""

import inspect
import math
import re

import numpy as np
import pytest
import torch

from linformer_kit import CausalLinformerAttention, LinformerAttention, LinformerEncoder, make_projection

X = torch.zeros(2, 6, 8)


def attention(**options):
    return LinformerAttention(**{"embed_dim": 8, "num_heads": 2, "max_length": 6, "projected_length": 3, **options})


def causal(**options):
    return CausalLinformerAttention(**{"embed_dim": 8, "num_heads": 2, "block_length": 4, "slots": 2, **options})


def encoder(**options):
    return LinformerEncoder(
        **{"embed_dim": 8, "num_heads": 2, "depth": 2, "max_length": 6, "projected_length": 3, **options}
    )


def raises(*parts, error=ValueError):
    """An error that says all of `parts`, in this order."""
    return pytest.raises(error, match=".*".join(re.escape(part) for part in parts))


@pytest.mark.parametrize("build", [attention, causal, encoder])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"embed_dim": 0}, ["embed_dim is 0", "at least 1"]),
        ({"embed_dim": 8.0}, ["embed_dim is 8.0", "integer"]),
        ({"num_heads": -1}, ["num_heads is -1", "at least 1"]),
        ({"num_heads": True}, ["num_heads is True", "integer"]),
        ({"num_heads": 3}, ["embed_dim=8", "num_heads=3", "head_dim"]),
        ({"head_dim": 0}, ["head_dim is 0", "at least 1"]),
        ({"num_heads": 4, "num_kv_heads": 3}, ["num_heads=4", "not divisible", "num_kv_heads=3"]),
        ({"num_kv_heads": 0}, ["num_kv_heads is 0", "at least 1"]),
        ({"projection": "liner"}, ["projection is 'liner'", "'dynamic'", "did you mean 'linear'"]),
        ({"projection": None}, ["projection is None", "'linear'"]),
        ({"projection": np.array(["linear", "none"])}, ["projection is array", "'linear'"]),
        ({"sharing": "layer"}, ["sharing is 'layer'", "did you mean 'layerwise'"]),
        ({"dropout": math.nan}, ["dropout is nan", "0"]),
        ({"dropout": 1.0}, ["dropout is 1.0", "not including"]),
        ({"dropout": -0.1}, ["dropout is -0.1"]),
        ({"dropout": "0.1"}, ["dropout is '0.1'"]),
        ({"bias": "yes"}, ["bias is 'yes'", "True or False"]),
        ({"projection": "mean", "sharing": "none"}, ["sharing='none'", "projection='mean'", "no matrices", "headwise"]),
        ({"projection": "none", "sharing": "none"}, ["sharing='none'", "projection='none'", "no matrices"]),
    ],
    ids=str,
)
def test_invalid_options_of_all_layers_raise(build, options, parts):
    with raises(*parts):
        build(**options)


@pytest.mark.parametrize("build", [attention, encoder])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"projected_length": 0}, ["projected_length is 0", "at least 1"]),
        ({"projected_length": math.nan}, ["projected_length is nan", "integer"]),
        ({"max_length": 0}, ["max_length is 0", "at least 1"]),
        ({"rescale": 1}, ["rescale is 1", "True or False"]),
        ({"projection": "dynamic", "rescale": True}, ["rescale=True", "projection='dynamic'", "drop rescale"]),
        ({"projection": "max", "rescale": True, "sharing": "layerwise"}, ["rescale=True", "projection='max'"]),
    ],
    ids=str,
)
def test_invalid_options_of_projected_layers_raise(build, options, parts):
    with raises(*parts):
        build(**options)


@pytest.mark.parametrize(
    ("options", "parts"),
    [({"block_length": 0}, ["block_length is 0", "at least 1"]), ({"slots": 0}, ["slots is 0", "at least 1"])],
    ids=str,
)
def test_invalid_options_of_the_causal_layer_raise(options, parts):
    with raises(*parts):
        causal(**options)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"depth": 0}, ["depth is 0", "at least 1"]),
        ({"feed_forward": "gleu"}, ["feed_forward is 'gleu'", "'gelu'", "did you mean 'gelu'"]),
        ({"feed_forward_dim": 0}, ["feed_forward_dim is 0", "at least 1"]),
        ({"feed_forward_dropout": math.nan}, ["feed_forward_dropout is nan"]),
        ({"norm_first": 1}, ["norm_first is 1", "True or False"]),
        ({"gradient_checkpointing": None}, ["gradient_checkpointing is None"]),
        ({"projected_length": [3]}, ["projected_length has 1 numbers", "depth is 2", "one per layer"]),
        ({"projected_length": [3, 0]}, ["projected_length is 0", "at least 1"]),
        (
            {"projected_length": [3, 2], "sharing": "layerwise", "projection": "conv"},
            ["[3, 2]", "sharing='layerwise'", "sharing='kv'"],
        ),
        ({"projected_length": "32"}, ["projected_length", "32"]),
        ({"projected_length": [[3], [3]], "sharing": "layerwise"}, ["projected_length is [3]", "integer"]),
        (
            {"feed_forward": "none", "feed_forward_dim": 9},
            ["feed_forward_dim is 9", "feed_forward='none'", "drop one"],
        ),
    ],
    ids=str,
)
def test_invalid_options_of_the_encoder_raise(options, parts):
    with raises(*parts):
        encoder(**options)


def test_integer_features_raise_under_autocast_too():
    with torch.autocast("cpu", dtype=torch.bfloat16), raises("torch.int64", "torch.float32"):
        attention()(X.long())


def test_numpy_numbers_are_accepted():
    layer = LinformerAttention(np.int32(512), np.int64(8), max_length=np.int32(65536), projected_length=np.int32(32))
    assert type(layer.num_heads) is type(layer.embed_dim) is int
    assert layer.plan(np.int32(65536)) == layer.plan(65536)
    assert layer.plan(65536).multiply_adds == 19_360_907_264  # more than 32 bits hold
    assert attention(dropout=np.float32(0.5)).dropout == 0.5
    with raises("dropout is nan"):
        attention(dropout=np.float32("nan"))
    blocks = causal(block_length=np.int64(4), slots=np.int64(2))
    output, _ = blocks.step(X)
    assert torch.equal(output, blocks(X))
    for lengths in (np.array([3, 2]), torch.tensor([3, 2])):
        assert [layer.attention.projection.projected_length for layer in encoder(projected_length=lengths).layers] == [
            3,
            2,
        ]


def test_queries_of_another_batch_than_the_context_raise():
    layer = attention()
    with raises("x has 1 examples", "the context has 2"):
        layer.attend(X[:1], layer.project(X))


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (attention, "LinformerAttention"),
        (causal, "CausalLinformerAttention"),
        (encoder, "LinformerEncoder"),
        (make_projection, "make_projection"),
    ],
)
def test_an_unknown_option_is_refused(build, name):
    with raises(f"{name} has no option 'shering'; it takes", "sharing", "did you mean 'sharing'?", error=TypeError):
        build(shering="kv")


def test_checked_options_keep_their_signature():
    assert list(inspect.signature(LinformerAttention).parameters)[:3] == ["embed_dim", "num_heads", "max_length"]


@pytest.mark.parametrize("build", [attention, causal, encoder])
@pytest.mark.parametrize(
    ("x", "error", "parts"),
    [
        (torch.zeros(6, 8), ValueError, ["(6, 8)", "3 dimensions", "unsqueeze"]),
        (torch.zeros(1, 2, 6, 8), ValueError, ["(1, 2, 6, 8)", "3 dimensions"]),
        (torch.zeros(2, 6, 9), ValueError, ["width 9", "embed_dim=8"]),
        (torch.zeros(2, 0, 8), ValueError, ["(2, 0, 8)", "at least one token"]),
        (torch.zeros(2, 6, 8, dtype=torch.float16), ValueError, ["torch.float16", "torch.float32", "autocast"]),
        (torch.zeros(2, 6, 8, dtype=torch.float64), ValueError, ["torch.float64", "torch.float32", ".to(dtype)"]),
        (torch.zeros(2, 6, 8, dtype=torch.int64), ValueError, ["torch.int64", "torch.float32"]),
        (torch.zeros(2, 6, 8, device="meta"), ValueError, ["meta", "cpu", ".to(device)"]),
        ([[1.0]], TypeError, ["list", "tensor"]),
    ],
    ids=["rank-2", "rank-4", "width", "empty", "float16", "float64", "integers", "device", "list"],
)
def test_invalid_inputs_raise(build, x, error, parts):
    with raises(*parts, error=error):
        build()(x)


@pytest.mark.parametrize("build", [attention, causal, encoder])
def test_autocast_does_not_convert_float64(build):
    for layer, x in ((build(), X.double()), (build().double(), X)):
        with torch.autocast("cpu", dtype=torch.bfloat16), raises(str(x.dtype), ".to(dtype)") as found:
            layer(x)
        assert "autocast" not in str(found.value)


@pytest.mark.parametrize("rows", [1, 6], ids=["folded", "per-head"])
@pytest.mark.parametrize("project_in_autocast", [True, False])
def test_attending_under_another_autocast_than_projecting_raises(rows, project_in_autocast):
    layer = attention(projected_length=rows)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=project_in_autocast):
        context = layer.project(X)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=not project_in_autocast),
        raises("projected to", "the same device, dtype and autocast"),
    ):
        layer.attend(X, context)


@pytest.mark.parametrize("build", [attention, causal, encoder])
@pytest.mark.parametrize(
    ("mask", "error", "parts"),
    [
        (torch.ones(2, 5, dtype=torch.bool), ValueError, ["(2, 5)", "(2, 6)"]),
        (torch.ones(2, 6, 6, dtype=torch.bool), ValueError, ["(2, 6, 6)", "(2, 6)"]),
        (torch.ones(6, dtype=torch.bool), ValueError, ["(6,)", "(2, 6)"]),
        (torch.ones(2, 6), ValueError, ["torch.float32", "boolean", "mask.bool()"]),
        (torch.full((2, 6), 2), ValueError, ["2 to 2", "0 (padding)", "1"]),
        (torch.full((2, 6), -1), ValueError, ["-1 to -1"]),
        (torch.ones(2, 6, dtype=torch.bool, device="meta"), ValueError, ["meta", "cpu"]),
        ([[True] * 6] * 2, TypeError, ["list", "tensor"]),
    ],
    ids=["length", "rank-3", "rank-1", "floats", "twos", "negative", "device", "list"],
)
def test_invalid_masks_raise(build, mask, error, parts):
    with raises(*parts, error=error):
        build()(X, mask=mask)


def test_a_mask_of_the_queries_is_not_a_mask_of_the_context():
    with raises("(2, 6)", "(2, 4)"):
        attention()(X, torch.zeros(2, 4, 8), mask=torch.ones(2, 6, dtype=torch.bool))


@pytest.mark.parametrize(
    ("context", "parts"),
    [
        (torch.zeros(3, 6, 8), ["x has 2 examples", "the context has 3"]),
        (torch.zeros(6, 8), ["context has shape (6, 8)"]),
        (torch.zeros(2, 6, 7), ["context has width 7", "embed_dim=8"]),
        (torch.zeros(2, 7, 8), ["7 tokens", "max_length is 6", "truncate", "projection='dynamic'"]),
        (torch.zeros(2, 6, 8, dtype=torch.float64), ["context is torch.float64"]),
        (torch.zeros(2, 6, 8, device="meta"), ["context is on meta", "cpu"]),
    ],
    ids=["batch", "rank", "width", "length", "dtype", "device"],
)
def test_invalid_contexts_raise(context, parts):
    with raises(*parts):
        attention()(X, context)


@pytest.mark.parametrize("projection", ["linear", "random"])
def test_inputs_longer_than_max_length_raise(projection):
    for build in (attention, encoder):
        with raises("7 tokens", "max_length is 6", "truncate"):
            build(projection=projection)(torch.zeros(2, 7, 8))


@pytest.mark.parametrize("build", [attention, causal])
def test_a_layer_without_a_projection_needs_one(build):
    with raises("sharing='layerwise' needs the shared projection", "None", "make_projection"):
        build(sharing="layerwise")(X)


@pytest.mark.parametrize(("build", "length", "rows"), [(attention, 6, 3), (causal, 4, 2)])
@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        ({"projection": "dynamic", "embed_dim": 4}, ["embed_dim=4", "embed_dim=8"]),
        ({"projected_length": 1}, ["projected_length=1", "projected_length=", "at least"]),
        ({"projection": "conv", "projected_length": 4}, ["'conv'", "projected_length=4", "kernel", "'linear'"]),
        ({"sharing": "none", "num_kv_heads": 3}, ["6 matrices", "num_kv_heads=2", "1 (E = F), 2 (E and F) or 4"]),
    ],
    ids=str,
)
def test_a_given_projection_that_does_not_fit_raises(build, length, rows, wrong, parts):
    options = {"embed_dim": 8, "max_length": length, "projected_length": rows}
    with raises(*parts):
        build()(X, projection=make_projection(**{**options, **wrong}))
    with raises("torch.float64", "torch.float32", ".to("):
        build()(X, projection=make_projection(**options).double())
    with raises("projection is a str", "make_projection", error=TypeError):
        build()(X, projection="linear")


def test_a_given_projection_of_a_causal_layer_has_the_length_of_its_blocks():
    with raises("max_length=6", "max_length=4", "block_length"):
        causal()(X, projection=make_projection("linear", embed_dim=8, max_length=6, projected_length=2))


def test_each_key_has_a_value():
    with raises("value has shape (2, 5, 8)", "(2, 6, 8)", "one value for each key"):
        attention()(X, value=X[:, :5])
    with raises("value has width 7", "embed_dim=8"):
        attention()(X, value=torch.zeros(2, 6, 7))


def test_self_attention_needs_a_context_of_the_width_of_x():
    with raises("context is missing", "embed_dim=8", "context_dim=5", "pass a context of width 5"):
        attention(context_dim=5)(X)
    with raises("context has width 8", "context_dim=5"):
        attention(context_dim=5)(X, X)


@pytest.mark.parametrize(("build", "length", "rows"), [(attention, 6, 3), (causal, 4, 2)])
@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        ({"sharing": "headwise"}, ["sharing='headwise'", "sharing='layerwise'"]),
        ({"projection": "mean"}, ["projection='mean'", "projection='linear'"]),
        ({"embed_dim": 4}, ["embed_dim=4", "embed_dim=8"]),
        ({"max_length": 99}, ["max_length=99", "max_length="]),
        ({"projected_length": 1}, ["projected_length=1", "projected_length="]),
        ({"rescale": True}, ["rescale=True", "rescale=False"]),
    ],
    ids=str,
)
def test_the_shared_projection_must_be_made_for_the_layer(build, length, rows, wrong, parts):
    options = {
        "projection": "linear",
        "embed_dim": 8,
        "max_length": length,
        "projected_length": rows,
        "sharing": "layerwise",
    }
    layer = build(sharing="layerwise")
    assert layer(X, projection=make_projection(**options)).shape == X.shape
    with raises(*parts):
        layer(X, projection=make_projection(**{**options, **wrong}))
    with raises("torch.float64", "torch.float32", ".to("):
        layer(X, projection=make_projection(**options).double())
    with raises("meta", "cpu"):
        layer(X, projection=make_projection(**options).to("meta"))


def test_the_cache_of_another_batch_raises():
    layer = causal()
    _, cache = layer.step(X)
    with raises("x has 1 examples", "the cache has 2"):
        layer.step(X[:1], cache)


def test_the_cache_of_another_dtype_raises():
    _, cache = causal().double().step(X.double())
    with raises("torch.float64 on cpu", "torch.float32 on cpu", "the same device, dtype"):
        causal().step(X, cache)


@pytest.mark.parametrize("other", [{"block_length": 2}, {"slots": 1}, {"head_dim": 3}, {"num_kv_heads": 1}], ids=str)
def test_the_cache_of_another_layer_raises(other):
    (name, size), *_ = other.items()
    _, cache = causal().step(X)
    with raises("made by a layer with", f"{name}=", f"{name}={size}", "its own cache"):
        causal(**other).step(X, cache)


def test_an_invalid_cache_raises():
    with raises("cache is a dict", "CausalCache", error=TypeError):
        causal().step(X, {})


def test_plans_of_impossible_lengths_raise():
    with raises("length is 0"):
        attention().plan(0)
    with raises("batch is -1"):
        attention().plan(4, batch=-1)
    with raises("7 tokens", "max_length is 6"):
        attention().plan(7)
