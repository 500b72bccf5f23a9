"""Reversible residual layers: inputs are recomputed from outputs, so memory for activations does not grow with depth.

Two streams start as the input. A sublayer s, such as attention or feed-forward with its layer norm, maps the streams
(a, b) to (b, a + s(b)), and its inputs follow from its outputs: a = (a + s(b)) − s(b). With attention f and
feed-forward g, a layer is

    y₁ = x₁ + f(x₂),   y₂ = x₂ + g(y₁)

as in RevNet (Gomez et al. 2017) and Reformer (Kitaev et al. 2020). The output of a stack is the sum of the streams.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Sublayer(NamedTuple):
    """A function, and the tensors with gradients that it uses besides its input; it need not use all of them."""

    function: Callable[[Tensor], Tensor]
    tensors: Iterable[Tensor]


def reversible(x: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
    """The sum of both streams after all sublayers; the backward pass computes their inputs again.

    >>> weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    >>> x = torch.randn(2, 4)
    >>> y = reversible(x, [Sublayer(lambda b, w=w: torch.tanh(b @ w), [w]) for w in weights])
    >>> a, b = x, x
    >>> for w in weights:
    ...     a, b = b, a + torch.tanh(b @ w)
    >>> torch.equal(y, a + b)
    True
    """
    # a tensor that several sublayers share is one input, which gets the sum of its gradients
    unique = {id(tensor): tensor for sublayer in sublayers for tensor in sublayer.tensors if tensor.requires_grad}
    first, second = _Reversible.apply(sublayers, x, *unique.values())
    return first + second


def can_recompute() -> bool:
    """Whether there will be a backward pass, and it can compute inputs again: compiled graphs keep them instead."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _Reversible(torch.autograd.Function):
    """Parameters are inputs of the function, so their gradients, hooks and frozen state are those of autograd."""

    @staticmethod
    def forward(ctx: Any, sublayers: Sequence[Sublayer], x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.sublayers, ctx.tensors = sublayers, tensors
        ctx.autocast, ctx.random = AutocastState(x.device), []
        a = b = x
        for sublayer in sublayers:
            ctx.random.append(RandomState(x.device))
            # without a name for the output, which would keep its graph
            a, b = b, a + evaluate(sublayer, b, ctx.autocast)[0].detach()
        ctx.save_for_backward(a, b)
        return a, b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        gradients: dict[int, Tensor] = {}
        for sublayer, random in zip(reversed(ctx.sublayers), reversed(ctx.random), strict=True):
            with random.restored():
                output, leaf = evaluate(sublayer, a, ctx.autocast)
            used = [tensor for tensor in sublayer.tensors if tensor.requires_grad]
            upstream = grad_b.to(output.dtype)
            with without_hooks(used):
                grad_input, *others = torch.autograd.grad(output, [leaf, *used], upstream, allow_unused=True)
            for tensor, gradient in zip(used, others, strict=True):
                if gradient is not None:
                    known = gradients.get(id(tensor))
                    gradients[id(tensor)] = gradient if known is None else known + gradient
            a, b = b - output.detach(), a
            grad_a, grad_b = grad_b, grad_a + grad_input
            del output, leaf, upstream, grad_input  # before the next sublayer needs memory
        return None, grad_a + grad_b, *(gradients.get(id(tensor)) for tensor in ctx.tensors)


def evaluate(sublayer: Sublayer, x: Tensor, autocast: "AutocastState") -> tuple[Tensor, Tensor]:
    """The output of a sublayer and its input, a leaf.

    The forward pass builds the graph too, although it drops it: without gradients, layers compute in another order and
    draw other random numbers.
    """
    leaf = x.detach().requires_grad_()
    with torch.enable_grad(), autocast.restored():
        return sublayer.function(leaf), leaf


@contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Disable the hooks of `tensors`: they run once, on the gradients that the backward pass returns."""
    hooks = [tensor._backward_hooks for tensor in tensors if tensor._backward_hooks]
    kept = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    try:
        yield
    finally:
        for one, entries in zip(hooks, kept, strict=True):
            one.update(entries)


class RandomState:
    """The state of the random number generators of the CPU and of a device, which dropout depends on."""

    def __init__(self, device: torch.device):
        self.device = None if device.type in ("cpu", "meta") else device
        self.cpu_state = torch.get_rng_state()
        self.device_state = None if self.device is None else self._module().get_rng_state(self.device)

    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu_state)
        if self.device is not None:
            self._module().set_rng_state(self.device_state, self.device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """This state inside of the context, and the present one after it."""
        present = RandomState(self.device or torch.device("cpu"))
        self.restore()
        try:
            yield
        finally:
            present.restore()


class AutocastState:
    """Whether autocast is on, for the CPU and for a device: a backward pass runs outside of its context."""

    def __init__(self, device: torch.device):
        kinds = [kind for kind in {"cpu", device.type} if torch.amp.is_autocast_available(kind)]
        self.states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, enabled, dtype in self.states:
                # weights that were cast for one graph have no gradient in another
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            yield
