"""With copied weights, our layers give what other packages give, where their semantics are the paper's."""

import pytest
import torch
from linformer import Linformer as PyPILinformer
from linformer import LinformerSelfAttention
from linformer_pytorch import Linformer as LinformerPytorch
from linformer_pytorch import MHAttention
from oracle import randomize
from torch import nn
from torch.testing import assert_close

from linformer_kit import LinformerAttention, LinformerEncoder

pytestmark = pytest.mark.usefixtures("float64")


def without_input_biases(layer):
    """Both packages have a bias on W_O only."""
    for linear in (layer.query, layer.key, layer.value):
        nn.init.zeros_(linear.bias)
    return layer


@torch.no_grad()
def copy_linformer(theirs, ours):
    """`linformer` 0.2.3 to ours."""
    for our, their in (
        (ours.query, theirs.to_q),
        (ours.key, theirs.to_k),
        (ours.value, theirs.to_v),
        (ours.output, theirs.to_out),
    ):
        our.weight.copy_(their.weight)
    ours.output.bias.copy_(theirs.to_out.bias)
    ours.projection.weight.copy_(torch.stack([theirs.proj_k, theirs.proj_v], dim=1))
    return without_input_biases(ours)


@torch.no_grad()
def copy_linformer_pytorch(theirs, ours, shared=None):
    """`linformer-pytorch` 0.19.3 to ours; its E has a bias, unlike that of the paper."""
    for our, their in ((ours.query, theirs.to_q), (ours.key, theirs.to_k), (ours.value, theirs.to_v)):
        our.weight.copy_(torch.cat([linear.weight for linear in their]))
    ours.output.weight.copy_(theirs.w_o.weight)
    ours.output.bias.copy_(theirs.w_o.bias)
    without_input_biases(ours)
    projection = ours.projection or shared
    per_matrix = {1: [theirs.heads[0].E], 2: [theirs.heads[0].E, theirs.heads[0].F]}.get(
        projection.matrices, [head.E for head in theirs.heads] + [head.F for head in theirs.heads]
    )
    for number, matrix in enumerate(per_matrix):
        if isinstance(matrix, nn.Conv1d):  # theirs also mixes the channels of a head: keep the taps only
            taps = torch.randn(matrix.kernel_size)
            matrix.weight.copy_(torch.eye(matrix.in_channels)[..., None] * taps)
            projection.weight[number].copy_(taps[:, None].expand(-1, ours.embed_dim))
            matrix.bias.zero_()
        elif isinstance(matrix, nn.Linear):
            projection.weight[:, number].copy_(matrix.weight.T)
            matrix.bias.zero_()
        else:
            projection.weight[:, number].copy_(matrix)
    return ours


@pytest.mark.parametrize("one_kv_head", [False, True], ids=["kv-heads", "one-kv-head"])
@pytest.mark.parametrize("length", [20, 11])
@pytest.mark.parametrize("context_length", [None, 17])
def test_the_layer_equals_that_of_linformer_0_2_3(length, context_length, one_kv_head):
    theirs = LinformerSelfAttention(12, 20, k=5, heads=3, dim_head=6, one_kv_head=one_kv_head)
    ours = LinformerAttention(
        12,
        3,
        head_dim=6,
        num_kv_heads=1 if one_kv_head else None,
        max_length=20,
        projected_length=5,
        sharing="headwise",
    )
    copy_linformer(theirs, ours)
    x = torch.randn(2, length, 12)
    context = None if context_length is None else torch.randn(2, context_length, 12)
    assert_close(ours(x, context), theirs(x, context))


def test_the_encoder_equals_that_of_linformer_0_2_3():
    theirs = randomize(PyPILinformer(12, 20, depth=2, k=5, heads=3))
    ours = LinformerEncoder(12, 3, depth=2, max_length=20, projected_length=5)
    for our, (attention, feed_forward) in zip(ours.layers, theirs.net.layers, strict=True):
        copy_linformer(attention.fn, our.attention)
        our.attention_norm.load_state_dict(attention.norm.state_dict())
        our.feed_forward_norm.load_state_dict(feed_forward.norm.state_dict())
        our.feed_forward.inner.load_state_dict(feed_forward.fn.w1.state_dict())
        our.feed_forward.outer.load_state_dict(feed_forward.fn.w2.state_dict())
    ours.norm = None  # theirs does not end with a norm
    x = torch.randn(2, 20, 12)
    assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("method", "projection"),
    [("learnable", "linear"), ("no_params", "random"), ("convolution", "conv")],
    ids=lambda value: value,
)
@pytest.mark.parametrize("sharing", ["none", "headwise", "kv"])
def test_the_layer_equals_that_of_linformer_pytorch_0_19_3(sharing, method, projection):
    theirs = MHAttention(20, 6, 12, 5, 3, 0.0, "C0", sharing, None, None, False, None, method=method)
    ours = LinformerAttention(
        12, 3, head_dim=6, max_length=20, projected_length=5, projection=projection, sharing=sharing
    )
    copy_linformer_pytorch(theirs, ours)
    x = torch.randn(2, 20, 12)
    assert_close(ours(x), theirs(x))
    mask = torch.rand(2, 20) > 0.3
    mask = mask.sort(
        dim=1, descending=True
    ).values  # rows of E go by rank here, by place there: equal for padding on the right
    if projection != "conv":  # theirs lets empty windows take part in the softmax
        assert_close(ours(x, mask=mask)[mask], theirs(x, input_mask=mask)[mask])


def test_linformer_pytorch_without_projection_is_full_attention():
    theirs = MHAttention(20, 6, 12, 5, 3, 0.0, "C0", "headwise", None, None, True, None)
    ours = LinformerAttention(12, 3, head_dim=6, projection="none")
    with torch.no_grad():
        for our, their in ((ours.query, theirs.to_q), (ours.key, theirs.to_k), (ours.value, theirs.to_v)):
            our.weight.copy_(torch.cat([linear.weight for linear in their]))
    ours.output.load_state_dict(theirs.w_o.state_dict())
    x = torch.randn(2, 20, 12)
    assert_close(without_input_biases(ours)(x), theirs(x))


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("sharing", ["none", "headwise", "kv", "layerwise"])
def test_the_encoder_equals_that_of_linformer_pytorch_0_19_3(sharing, activation):
    theirs = LinformerPytorch(
        20, 12, 5, dim_ff=7, nhead=3, depth=2, dropout=0, dropout_ff=0, activation=activation, parameter_sharing=sharing
    )
    randomize(theirs)
    ours = LinformerEncoder(
        12,
        3,
        depth=2,
        max_length=20,
        projected_length=5,
        sharing=sharing,
        norm_first=False,
        feed_forward=activation,
        feed_forward_dim=7,
    )
    for our, attention, feed_forward in zip(ours.layers, theirs.seq[::2], theirs.seq[1::2], strict=True):
        copy_linformer_pytorch(attention.fn, our.attention, ours.projection)
        our.attention_norm.load_state_dict(attention.norm.state_dict())
        our.feed_forward_norm.load_state_dict(feed_forward.norm.state_dict())
        our.feed_forward.inner.load_state_dict(feed_forward.fn.w_1.state_dict())
        our.feed_forward.outer.load_state_dict(feed_forward.fn.w_2.state_dict())
    x = torch.randn(2, 20, 12)
    assert_close(ours(x), theirs(x))
