"""The attention weights of the Linformer layers in any module."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..models.attention_linformer import LinformerAttention
from ..models.causal_linformer import CausalLinformerAttention
from ..models.multihead_linformer import MultiHeadLayer
from ..models.options_linformer import positive_integer
from ..models.window_linformer import weights_on_tokens
from . import attention

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_heads(
    module: nn.Module,
    *inputs: Any,
    title: str = "",
    size: tuple[float, float] | None = None,
    max_heads: int = 8,
    example: int = 0,
    labels: Sequence[str] = (),
    **keyword_inputs: Any,
) -> "Figure":
    """Draw the attention weights of every Linformer layer in `module` while it computes `module(*inputs)`.

    `module` is a layer, an encoder, a model, or any module that contains Linformer layers. Each layer is a row of heat
    maps, one per head: rows are queries, columns the K slots (with a window, the K slots, then the tokens; in a causal
    layer, the slots of finished blocks, then the tokens). Returns a matplotlib figure.

    - `size`: (width, height) of the figure in inches; by default it depends on the number of layers and heads.
    - `max_heads`: only the first heads of each layer are drawn.
    - `example`: which example of the batch is drawn.
    - `labels`: the names of the tokens.

    >>> from linformer_kit import LinformerAttention
    >>> layer = LinformerAttention(embed_dim=64, num_heads=4, max_length=100, projected_length=16)
    >>> figure = plot_heads(layer, torch.randn(1, 100, 64), title="An untrained layer", max_heads=2)
    >>> [axes.get_title() for axes in figure.axes]
    ['head 1', 'head 2', '']
    >>> figure.savefig("heads.png")  # doctest: +SKIP
    """
    positive_integer("max_heads", max_heads)
    with evaluating(module), recorded_weights(module) as records, torch.no_grad():
        module(*inputs, **keyword_inputs)
    if not records:
        raise ValueError(
            f"{type(module).__name__} computed no Linformer attention; pass a LinformerAttention, a "
            "CausalLinformerAttention, or a module that contains and calls one"
        )
    batch = records[0][2].shape[0]
    if not 0 <= example < batch:
        raise ValueError(f"example is {example} but the batch has {batch}; choose one of 0 … {batch - 1}")
    layers_HNK = [weights_BHNK[example, :max_heads].float().cpu().numpy() for _, _, weights_BHNK in records]
    queries = layers_HNK[0].shape[1]
    if labels and len(labels) != queries:
        raise ValueError(f"labels has {len(labels)} names but the input has {queries} tokens; pass one per token")
    # in a causal layer, the slots of finished blocks come before the tokens, and so do the rows beside a window
    slots = [
        weights_HNK.shape[2] - weights_HNK.shape[1] if sees_tokens(layer) else 0
        for (_, layer, _), weights_HNK in zip(records, layers_HNK, strict=True)
    ]
    most = max(layer.num_heads for _, layer, _ in records)
    some = f" The first {max_heads} of {most} heads." if most > max_heads else ""
    names = [name or f"layer {number}" for number, (name, _, _) in enumerate(records, start=1)]
    note = "Attention weights: each row, a query, sums to 1; columns are the slots or tokens attended to." + some
    shown = [attention.drawable(label) for label in labels]
    return attention.draw_heads(layers_HNK, shown, slots, note, names=names, title=title, size=size)


def sees_tokens(layer: MultiHeadLayer) -> bool:
    """Whether the weights are on slots and tokens."""
    return isinstance(layer, CausalLinformerAttention) or layer.window_length > 0


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout; afterwards every submodule has its own mode again."""
    training = [each for each in module.modules() if each.training]
    module.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True


@contextmanager
def recorded_weights(module: nn.Module) -> Iterator[list[tuple[str, MultiHeadLayer, Tensor]]]:
    """Collect name, layer and (B, H, N, K) weights of each call of a Linformer layer, in the order of the calls."""
    records: list[tuple[str, MultiHeadLayer, Tensor]] = []

    def recording(name: str, layer: MultiHeadLayer, function: Callable) -> Callable:
        signature = inspect.signature(function)

        def call(*args: Any, **kwargs: Any) -> tuple:
            arguments = signature.bind(*args, **kwargs)
            is_requested = arguments.arguments.get("need_weights", False)
            arguments.arguments["need_weights"] = True
            output, weights, *cache = function(*arguments.args, **arguments.kwargs)
            drawn = weights
            if isinstance(layer, LinformerAttention) and layer.window_length:
                mask = arguments.arguments["mask"]
                drawn = weights_on_tokens(weights, layer.window_length, layer.global_tokens, mask)
            records.append((name, layer, drawn))
            return output, weights if is_requested else None, *cache

        return call

    layers = [(name, each) for name, each in module.named_modules() if isinstance(each, MultiHeadLayer)]
    # models call these methods directly, so hooks on `forward` would miss them
    methods = [attending_method(layer) for _, layer in layers]
    try:
        for (name, layer), method in zip(layers, methods, strict=True):
            setattr(layer, method, recording(name, layer, getattr(layer, method)))
        yield records
    finally:
        for (_, layer), method in zip(layers, methods, strict=True):
            vars(layer).pop(method, None)


def attending_method(layer: MultiHeadLayer) -> str:
    """The method of a layer that returns its output and weights."""
    if isinstance(layer, CausalLinformerAttention):
        return "advance"
    return "near_and_far" if layer.window_length else "attend"
