"""The layers to compare, all with the same weights, and the check that all of them compute the same function.

Every peer takes its weights from one of our layers, so that outputs can be compared number by number before anything is timed.

Shapes: B batch, N length, P positions that are compared, K projected length, D head size, C model size.
"""

import copy
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.attention_linformer import LinformerAttention
from ..models.causal_linformer import CausalLinformerAttention
from ..models.multihead_linformer import MultiHeadLayer
from ..models.projection_linformer import LinearProjection
from .measure import is_out_of_memory

EMBED_DIM = 512
NUM_HEADS = 8

OURS = "linformer-kit"
LINFORMER = "linformer"
LINFORMER_PYTORCH = "linformer-pytorch"
FULL = "full attention"
LINFORMERS = (OURS, LINFORMER, LINFORMER_PYTORCH)
IMPLEMENTATIONS = (*LINFORMERS, FULL)

# largest error, in units of the root mean square of what is compared: float32 flatten_keys up to 2e-5, the mistakes of the tests 7e-2
TOLERANCE = 1e-4
# outputs compared per example; each depends on every token, so a few tell all
COMPARED_POSITIONS = 64
# up to this length gradients are compared too; they need the whole float64 pass
COMPARED_GRADIENTS_LENGTH = 1024


class MissingPeer(RuntimeError):
    """A package to compare with is not installed."""


class WrongImplementation(RuntimeError):
    """A layer does not compute what it should; its time would mean nothing."""


def peer_versions(*packages: str) -> dict[str, str]:
    """The installed versions of packages we compare with; of both, if none is named."""
    try:
        return {package: metadata.version(package) for package in packages or (LINFORMER, LINFORMER_PYTORCH)}
    except metadata.PackageNotFoundError as error:
        raise MissingPeer(f'{error.name} is not installed; run: pip install "linformer-kit[bench]"') from error


class FullAttention(nn.Module):
    """Ordinary multi-head attention through `scaled_dot_product_attention`, with the weights of one of our layers."""

    def __init__(self, ours: MultiHeadLayer, causal: bool = False):
        super().__init__()
        self.query, self.key, self.value, self.output = (
            copy.deepcopy(linear) for linear in (ours.query, ours.key, ours.value, ours.output)
        )
        self.num_heads = ours.num_heads
        self.causal = causal

    def forward(self, x_BNC: Tensor) -> Tensor:
        query, keys, values = (
            linear(x_BNC).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        heads_BHND = F.scaled_dot_product_attention(query, keys, values, is_causal=self.causal)
        return self.output(heads_BHND.transpose(1, 2).flatten(2))


@torch.no_grad()
def randomise_(layer: MultiHeadLayer) -> None:
    """Weights that make a mistake visible, and that every peer can hold: none of them has b_Q, b_K or b_V, all have b_O."""
    for linear in (layer.query, layer.key, layer.value):
        linear.bias.zero_()
    layer.output.bias.normal_(std=0.1)  # no larger than what it is added to, or it would hide errors
    if isinstance(layer.projection, LinearProjection):
        # rows of unit variance: with the segment means of a new layer all scores are near 0, whatever the keys
        layer.projection.weight.normal_(std=layer.projection.weight.shape[0] ** -0.5)


def our_layer(
    length: int, projected_length: int, embed_dim: int = EMBED_DIM, num_heads: int = NUM_HEADS, **options: Any
) -> LinformerAttention:
    """Our layer for `length` tokens, with weights that the peers can take over."""
    layer = LinformerAttention(embed_dim, num_heads, max_length=length, projected_length=projected_length, **options)
    randomise_(layer)
    return layer.eval()


def our_causal_layer(
    block_length: int, slots: int, embed_dim: int = EMBED_DIM, num_heads: int = NUM_HEADS, projection: str = "linear"
) -> CausalLinformerAttention:
    """Our block-causal layer, likewise."""
    layer = CausalLinformerAttention(
        embed_dim, num_heads, block_length=block_length, slots=slots, projection=projection
    )
    randomise_(layer)
    return layer.eval()


def linformer_layer(ours: LinformerAttention) -> nn.Module:
    """`LinformerSelfAttention` of the package `linformer`, with the weights of `ours`."""
    peer_versions(LINFORMER)
    from linformer import LinformerSelfAttention

    length, _, rows = _matrices(ours).shape
    peer = LinformerSelfAttention(ours.embed_dim, length, k=rows, heads=ours.num_heads)
    copy_to_linformer(ours, peer)
    return peer.eval()


@torch.no_grad()
def copy_to_linformer(ours: LinformerAttention, peer: Any) -> None:
    """Give a `LinformerSelfAttention` of the package `linformer` the weights of `ours`."""
    E_NMK = _matrices(ours)
    for theirs, our in (
        (peer.to_q, ours.query),
        (peer.to_k, ours.key),
        (peer.to_v, ours.value),
        (peer.to_out, ours.output),
    ):
        theirs.weight.copy_(our.weight)
    peer.to_out.bias.copy_(ours.output.bias)
    peer.proj_k.copy_(E_NMK[:, 0])
    peer.proj_v.copy_(E_NMK[:, 1])


def linformer_pytorch_layer(ours: LinformerAttention) -> nn.Module:
    """`MHAttention` of the package `linformer-pytorch`, with the weights of `ours`."""
    peer_versions(LINFORMER_PYTORCH)
    from linformer_pytorch.linformer_pytorch import MHAttention

    length, _, rows = _matrices(ours).shape
    peer = MHAttention(
        input_size=length,
        dim=ours.head_dim,
        channels=ours.embed_dim,
        dim_k=rows,
        nhead=ours.num_heads,
        dropout=0.0,
        checkpoint_level="C0",
        parameter_sharing="headwise",
        E_proj=None,
        F_proj=None,
        full_attention=False,
        causal_mask=None,
    )
    copy_to_linformer_pytorch(ours, peer)
    return peer.eval()


@torch.no_grad()
def copy_to_linformer_pytorch(ours: LinformerAttention, peer: Any) -> None:
    """Give an `MHAttention` of the package `linformer-pytorch` the weights of `ours`."""
    E_NMK = _matrices(ours)
    for theirs, our in ((peer.to_q, ours.query), (peer.to_k, ours.key), (peer.to_v, ours.value)):
        for linear, weight_DC in zip(theirs, our.weight.split(ours.head_dim), strict=True):
            linear.weight.copy_(weight_DC)
    peer.w_o.weight.copy_(ours.output.weight)
    peer.w_o.bias.copy_(ours.output.bias)
    head = peer.heads[0]  # E and F are shared by the heads
    for index, linear in enumerate((head.E, head.F)):
        linear.weight.copy_(E_NMK[:, index].T)
        linear.bias.zero_()


def _matrices(ours: LinformerAttention) -> Tensor:
    assert isinstance(ours.projection, LinearProjection)
    return ours.projection.weight


def build(implementation: str, ours: LinformerAttention) -> nn.Module:
    """The layer of this name, with the weights of `ours`."""
    match implementation:
        case "linformer-kit":
            return ours
        case "linformer":
            return linformer_layer(ours)
        case "linformer-pytorch":
            return linformer_pytorch_layer(ours)
        case "full attention":
            return FullAttention(ours).eval()
    raise ValueError(f"implementation is {implementation!r}; it must be one of {', '.join(map(repr, IMPLEMENTATIONS))}")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error, in units of the root mean square of what was expected."""
    return float((actual.double() - expected).abs().max() / expected.square().mean().sqrt())


def require_agreement(name: str, what: str, actual: Tensor, expected: Tensor) -> None:
    """Refuse a layer whose numbers are off by more than float32 explains."""
    error = relative_error(actual, expected)
    if not error <= TOLERANCE:  # also when it is nan
        raise WrongImplementation(
            f"{name}: its {what} differs from the float64 result by {error:.1e} of its size, but float32 explains no more than "
            f"{TOLERANCE:.0e}; it computes something else, so nothing was timed"
        )


def require_gradient_agreement(name: str, layer: nn.Module, exact: nn.Module, x: Tensor) -> None:
    """Compare output and input gradient of a layer with those of its float64 counterpart."""
    upstream = torch.randn_like(x)
    results = []
    for module, dtype in ((layer, x.dtype), (exact, torch.float64)):
        leaf = x.detach().to(dtype).requires_grad_()
        output = module(leaf)
        (gradient,) = torch.autograd.grad(output, leaf, upstream.to(dtype))
        results.append((output.detach(), gradient))
    (output, gradient), (exact_output, exact_gradient) = results
    require_agreement(name, "output", output, exact_output)
    require_agreement(name, "gradient", gradient, exact_gradient)


def check_layers(layers: Mapping[str, nn.Module], ours: LinformerAttention, x: Tensor) -> list[str]:
    """Raise `WrongImplementation` unless every layer gives what `ours` gives in float64.

    Full attention is compared with our layer without projection. Beyond `COMPARED_GRADIENTS_LENGTH` tokens only some outputs
    are compared, which makes the float64 side cheap at any length. Returns the names of layers that ran out of memory: what
    cannot be checked cannot be timed either.
    """
    projected = copy.deepcopy(ours).double()
    unprojected = LinformerAttention(ours.embed_dim, ours.num_heads, head_dim=ours.head_dim, projection="none").double()
    unprojected.load_state_dict(
        {name: weight for name, weight in ours.state_dict().items() if not name.startswith("projection.")}
    )
    position_P = torch.linspace(0, x.shape[1] - 1, COMPARED_POSITIONS).long()

    def check(name: str, layer: nn.Module) -> None:
        exact = unprojected if isinstance(layer, FullAttention) else projected
        if x.shape[1] <= COMPARED_GRADIENTS_LENGTH:
            require_gradient_agreement(name, layer, exact, x)
            return
        with torch.no_grad():
            x64 = x.double()
            require_agreement(name, "output", layer(x)[:, position_P], exact(x64[:, position_P], x64))

    too_large = []
    for name, layer in layers.items():
        try:
            check(name, layer)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            too_large.append(name)
    return too_large


class MaskedBlockCausal(nn.Module):
    """What `CausalLinformerAttention` computes, in one masked softmax over all summaries and all tokens: slow and plain.

    `projection` is that of all layers, if they share one. Without one, every token before is seen.
    """

    def __init__(self, ours: CausalLinformerAttention, projection: nn.Module | None = None):
        super().__init__()
        self.ours = ours
        self.projection = ours.projection if projection is None else projection

    def forward(self, x_BNC: Tensor) -> Tensor:
        ours, length = self.ours, x_BNC.shape[1]
        if isinstance(self.projection, LinearProjection):
            block, E_NMK = ours.block_length, self.projection.weight
        else:
            block, E_NMK = length + 1, x_BNC.new_zeros(0, 1, 0)  # one block that is never finished
        blocks, slots = length // block, max(1, E_NMK.shape[2])
        blocks_BXNC = x_BNC[:, : blocks * block].unflatten(1, (blocks, block))
        position_N1 = torch.arange(length)[:, None]
        summary_S, token_N = torch.arange(blocks * slots), torch.arange(length)
        is_visible = torch.cat(
            [
                summary_S // slots < position_N1 // block,
                (token_N <= position_N1) & (token_N // block == position_N1 // block),
            ],
            dim=1,
        )

        def heads(linear: nn.Linear, matrix: int | None) -> Tensor:
            rows = x_BNC
            if matrix is not None and blocks:
                E_NK = E_NMK[:, min(matrix, E_NMK.shape[1] - 1)]  # one matrix: E = F
                summaries_BXKC = torch.einsum("nk,bxnc->bxkc", E_NK, blocks_BXNC)
                rows = torch.cat([summaries_BXKC.flatten(1, 2), x_BNC], dim=1)
            return linear(rows).unflatten(-1, (ours.num_heads, ours.head_dim)).transpose(1, 2)

        heads_BHND = F.scaled_dot_product_attention(
            heads(ours.query, None), heads(ours.key, 0), heads(ours.value, 1), attn_mask=is_visible
        )
        return ours.output(heads_BHND.transpose(1, 2).flatten(2))


def check_causal_layers(layers: Mapping[str, CausalLinformerAttention | FullAttention], x: Tensor) -> None:
    """Raise `WrongImplementation` unless outputs and gradients are those of a plain float64 evaluation.

    Ours is compared with `MaskedBlockCausal`; causal full attention with our causal layer without projection.
    """
    for name, layer in layers.items():
        if isinstance(layer, CausalLinformerAttention):
            exact: nn.Module = MaskedBlockCausal(copy.deepcopy(layer))
        else:
            exact = our_causal_layer(64, 64, x.shape[-1], layer.num_heads, projection="none")
            exact.load_state_dict(layer.state_dict())
        require_gradient_agreement(name, layer, exact.double(), x)
