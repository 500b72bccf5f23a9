"""Single attention layers: ours and those of other packages with the same weights, and their checks.

Shapes: B batch, N length, P positions that are compared, M matrices, K projected length, D head size, C model size.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..models.attention_linformer import QUERY_CHUNK, LinformerAttention
from ..models.causal_linformer import TOKEN_CHUNK, CausalLinformerAttention
from ..models.multihead_linformer import MultiHeadLayer
from ..models.plain_linformer import plain_attention, plain_causal_attention, plain_window_attention
from ..models.projection_linformer import LinearProjection
from .checks import require_agreement, require_gradient_agreement
from .point import Point
from .workload import Build, Workload, torch_workload

Layer = TypeVar("Layer", bound=MultiHeadLayer)

# outputs compared per example; each depends on every token, so a few suffice
COMPARED_POSITIONS = 64
# up to this length gradients are compared too; they need the whole float64 pass
COMPARED_GRADIENTS_LENGTH = 1024
# causal layers are compared on at most this many tokens, with gradients, and without, where there are chunks; neither
# is a multiple of common block lengths
COMPARED_CAUSAL_LENGTH, COMPARED_CAUSAL_CHUNKS = 1000, TOKEN_CHUNK + 300
# rows × inner × columns; which product reaches the higher rate depends on the machine
GEMM_SHAPE = (2048, 2048, 2048)


def make_layer(point: Point) -> LinformerAttention:
    """A new `LinformerAttention` of the point's sizes; without projection, full attention."""
    options = {"head_dim": point.head_dim, "max_length": point.length, **point.projection_options}
    return LinformerAttention(point.hidden_size, point.num_heads, **options)


def our_layer(point: Point) -> LinformerAttention:
    return randomized(make_layer(point))


def our_causal_layer(point: Point) -> CausalLinformerAttention:
    sizes = (point.hidden_size, point.num_heads)
    return randomized(CausalLinformerAttention(*sizes, head_dim=point.head_dim, **point.projection_options))


@torch.no_grad()
def randomized(layer: Layer) -> Layer:
    """Sets random weights that reveal errors and exist in every package: the others have a bias on W_O only."""
    for linear in (layer.query, layer.key, layer.value):
        linear.bias.zero_()
    layer.output.bias.normal_(std=0.1)  # small compared with the output, or it would hide errors
    if isinstance(layer.projection, LinearProjection):
        # rows of unit variance; with the segment means of a new layer all scores are near 0
        layer.projection.weight.normal_(std=layer.projection.weight.shape[0] ** -0.5)
    return layer.eval()


# other packages


def linformer_layer(point: Point) -> nn.Module:
    """`LinformerSelfAttention` of the package `linformer`."""
    from linformer import LinformerSelfAttention

    ours = our_layer(point)  # built first, as in the check, so that the seed gives the same weights
    sizes = {"k": point.projected_length, "heads": point.num_heads, "dim_head": point.head_dim}
    peer = LinformerSelfAttention(point.hidden_size, point.length, **sizes)
    copy_to_linformer(ours, peer)
    return peer.eval()


def linformer_pytorch_layer(point: Point) -> nn.Module:
    """`MHAttention` of the package `linformer-pytorch`."""
    from linformer_pytorch.linformer_pytorch import MHAttention

    ours = our_layer(point)
    sizes = {
        "input_size": point.length,
        "dim": point.head_size,
        "channels": point.hidden_size,
        "dim_k": point.projected_length,
    }
    options = {"dropout": 0.0, "checkpoint_level": "C0", "parameter_sharing": "headwise", "full_attention": False}
    peer = MHAttention(**sizes, nhead=point.num_heads, **options, E_proj=None, F_proj=None, causal_mask=None)
    copy_to_linformer_pytorch(ours, peer)
    return peer.eval()


@torch.no_grad()
def copy_to_linformer(ours: Any, peer: Any) -> None:
    """Give a `LinformerSelfAttention` of the package `linformer` the weights of `ours`."""
    linears = ((peer.to_q, ours.query), (peer.to_k, ours.key), (peer.to_v, ours.value), (peer.to_out, ours.output))
    for theirs, our in linears:
        theirs.weight.copy_(our.weight)
    peer.to_out.bias.copy_(ours.output.bias)
    E_NMK = ours.get_parameter("projection.weight")
    peer.proj_k.copy_(E_NMK[:, 0])
    peer.proj_v.copy_(E_NMK[:, 1])


@torch.no_grad()
def copy_to_linformer_pytorch(ours: Any, peer: Any) -> None:
    """Give an `MHAttention` of the package `linformer-pytorch` the weights of `ours`."""
    for theirs, our in ((peer.to_q, ours.query), (peer.to_k, ours.key), (peer.to_v, ours.value)):
        for linear, weight_DC in zip(theirs, our.weight.split(ours.head_dim), strict=True):
            linear.weight.copy_(weight_DC)
    peer.w_o.load_state_dict(ours.output.state_dict())
    E_NMK, head = ours.get_parameter("projection.weight"), peer.heads[0]  # the heads share E and F
    for index, linear in enumerate((head.E, head.F)):
        linear.weight.copy_(E_NMK[:, index].T)
        linear.bias.zero_()


class Gemm(nn.Module):
    """A large matrix product as a reference rate. Ignores its input."""

    a: Tensor
    b: Tensor

    def __init__(self, point: Point):
        super().__init__()
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[point.precision]
        a, b = (torch.randn(*sizes, device=point.device, dtype=dtype) for sizes in (GEMM_SHAPE[:2], GEMM_SHAPE[1:]))
        self.register_buffer("a", a)
        self.register_buffer("b", b)

    def forward(self, x: Tensor) -> Tensor:
        return self.a @ self.b


# check and call


def check_layer(point: Point, build: Build) -> None:
    """Compare outputs, and up to 1,024 tokens also gradients, with the plain form in float64.

    The backward pass with a window depends on the length, and the layer accepts fewer tokens: those are compared.
    """
    layer = build(point)
    if isinstance(layer, Gemm):
        return
    torch.manual_seed(0)  # the same weights as in `layer`, for which our layer was built first
    exact = partial(plain_outputs, our_layer(point).double())
    x_BNC = torch.randn(checked_examples(point.batch, point.length), point.length, point.hidden_size)
    if point.length <= COMPARED_GRADIENTS_LENGTH or point.window_length:
        require_gradient_agreement(point.implementation, layer, exact, x_BNC[:, :COMPARED_GRADIENTS_LENGTH])
    with torch.no_grad():  # may use another code path
        require_output_agreement(point.implementation, layer(x_BNC), exact, x_BNC)


def plain_outputs(layer: LinformerAttention, x_BNC: Tensor, position_P: Tensor | None = None) -> Tensor:
    """Self-attention in its plain form, (B, P, C), at `position_P`, by default everywhere."""
    if layer.window_length:
        return plain_window_attention(layer, x_BNC, position_P)
    return plain_attention(layer, x_BNC if position_P is None else x_BNC[:, position_P], x_BNC)


def require_output_agreement(name: str, output_BNC: Tensor, exact: Callable[..., Tensor], x_BNC: Tensor) -> None:
    """Compare the output at some positions."""
    position_P = torch.linspace(0, x_BNC.shape[1] - 1, COMPARED_POSITIONS).long()
    expected_BPC = exact(x_BNC.double(), position_P)
    require_agreement(name, "output without gradients", output_BNC[:, position_P], expected_BPC)


def check_causal_layer(point: Point, build: Build) -> None:
    """Compare outputs, with and without gradients, and gradients with the plain form in float64."""
    layer = build(point)
    torch.manual_seed(0)
    exact = partial(plain_causal_attention, our_causal_layer(point).double())
    x_BNC = torch.randn(1, min(point.length, COMPARED_CAUSAL_LENGTH), point.hidden_size)
    require_gradient_agreement(point.implementation, layer, exact, x_BNC)
    x_BNC = torch.randn(1, min(point.length, COMPARED_CAUSAL_CHUNKS), point.hidden_size)
    with torch.no_grad():  # another code path
        require_agreement(point.implementation, "output without gradients", layer(x_BNC), exact(x_BNC.double()))


def checked_examples(batch: int, length: int) -> int:
    """The number of examples in a check: enough for more than one chunk of queries, as in the timed call.

    >>> checked_examples(8, 512), checked_examples(1, 512), checked_examples(8, 4096)
    (4, 1, 2)
    """
    return min(batch, QUERY_CHUNK // length + 2)


def layer_call(layer: nn.Module, x: Tensor, step: str) -> Callable[[], object]:
    """Inference without gradients, or forward and backward, including the gradient of the input."""
    if step == "forward" or isinstance(layer, Gemm):
        return torch.no_grad()(lambda: layer(x))
    leaf = x.detach().requires_grad_()

    def training() -> None:
        layer.zero_grad(set_to_none=True)
        output = layer(leaf)
        output.backward(x.to(output.dtype))  # any upstream gradient will do
        leaf.grad = None  # frees memory for the calls of other points

    return training


@torch.no_grad()
def output(point: Point, layer: nn.Module) -> Tensor:
    """The output for random tokens."""
    return layer(torch.randn(2, point.length, point.hidden_size, device=point.device))


def layer_workload(point: Point, build: Build) -> Workload:
    layer = build(point)
    x_BNC = torch.randn(point.batch, point.length, point.hidden_size, device=point.device)
    multiply_adds = layer_multiply_adds(point, layer)
    return torch_workload(point, layer, layer_call(layer, x_BNC, point.step), multiply_adds=multiply_adds)


def layer_multiply_adds(point: Point, layer: nn.Module) -> int | None:
    """Multiply-adds of a call; None if unknown. In the backward pass, each product becomes two."""
    if isinstance(layer, Gemm):
        return math.prod(GEMM_SHAPE)
    if not isinstance(layer, LinformerAttention):
        return None
    return (3 if point.step == "training" else 1) * layer.plan(point.length, point.batch).multiply_adds
