"""The check before every measurement: an implementation must agree with the plain form of the equation in float64.

Shapes: B batch, N length, T target length, V vocabulary, C model size.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.causal_linformer import CausalLinformerAttention
from ..models.plain_linformer import plain_attention, plain_causal_attention, plain_window_attention

# largest error, relative to the root mean square of the expected values: float32 stays below 2e-5
TOLERANCE = 1e-4
# largest root mean square error of lower precisions, relative to that of the float32 output, over all layers of a model
PRECISION_TOLERANCE = {"bfloat16": 0.03, "int8": 0.06}


class WrongImplementation(RuntimeError):
    """An implementation computes something else, so its time is meaningless."""


def require_agreement(name: str, what: str, actual: Tensor, expected: Tensor) -> None:
    """Raise `WrongImplementation` if values differ by more than float32 explains."""
    error = float((actual.double() - expected).abs().max() / expected.square().mean().sqrt())
    if not error <= TOLERANCE:  # also rejects nan
        raise WrongImplementation(
            f"{name}: its {what} differs from the float64 result by a relative error of {error:.1e}, "
            f"above the tolerance of {TOLERANCE:.0e}, so it was not timed"
        )


def require_precision(name: str, precision: str, lower: Tensor, exact: Tensor) -> None:
    """Raise `WrongImplementation` if the output in a lower precision differs by more than its rounding explains."""
    error = float((lower.double() - exact.double()).square().mean().sqrt() / exact.double().square().mean().sqrt())
    if not error <= PRECISION_TOLERANCE[precision]:
        raise WrongImplementation(
            f"{name}: its output in {precision} differs from that in float32 by a relative error of {error:.1e}, above "
            f"the tolerance of {PRECISION_TOLERANCE[precision]:.0e}, so it was not timed"
        )


def require_gradient_agreement(
    name: str, layer: Callable[..., Tensor], exact: Callable[..., Tensor], x: Tensor
) -> None:
    """Compare output and input gradient of a layer with those of its float64 counterpart."""
    upstream, results = torch.randn_like(x), []
    for module, dtype in ((layer, x.dtype), (exact, torch.float64)):
        leaf = x.detach().to(dtype).requires_grad_()
        output = module(leaf)
        results.append((output.detach(), *torch.autograd.grad(output, leaf, upstream.to(dtype))))
    for what, actual, expected in zip(("output", "gradient"), *results, strict=True):
        require_agreement(name, what, actual, expected)


def require_model_agreement(name: str, model: nn.Module, exact: Any, ids_BN: Tensor) -> None:
    """Compare hidden states, with and without gradients, and the gradient of the embeddings with the plain form."""
    model.eval()
    exact_words, words = (one.get_parameter("embeddings.word_embeddings.weight") for one in (exact, model))
    expected_BNC, hidden_BNC = plain_hidden_states(exact, ids_BN), model(ids_BN).last_hidden_state
    upstream_BNC = torch.randn_like(hidden_BNC)
    (expected_VC,) = torch.autograd.grad(expected_BNC, exact_words, upstream_BNC.double())
    (gradient_VC,) = torch.autograd.grad(hidden_BNC, words, upstream_BNC)
    with torch.no_grad():
        require_agreement(name, "output", model(ids_BN).last_hidden_state, expected_BNC)
        require_agreement(name, "output with gradients", hidden_BNC, expected_BNC)
        require_agreement(name, "gradient", gradient_VC[ids_BN], expected_VC[ids_BN])


# the models in their plain form: nothing reordered, fused or chunked


def plain_hidden_states(model: Any, ids_BN: Tensor, source_BNC: Tensor | None = None) -> Tensor:
    """The last hidden states of a `LinformerModel`: (B, N, C)."""
    x_BNC = plain_embeddings(model.embeddings, ids_BN)
    other_BNC = x_BNC  # of reversible layers, which alternate between two streams
    for layer in model.layers:
        for residual, function in plain_sublayers(model, layer, source_BNC):
            if model.config.reversible:
                x_BNC, other_BNC = other_BNC + function(residual.norm(x_BNC)), x_BNC
            else:
                x_BNC = plain_residual(residual, x_BNC, function)
    x_BNC = x_BNC + other_BNC if model.config.reversible else x_BNC
    return x_BNC if model.norm is None else model.norm(x_BNC)


def plain_sublayers(
    model: Any, layer: Any, source_BNC: Tensor | None
) -> Iterator[tuple[Any, Callable[[Tensor], Tensor]]]:
    """The residuals of a layer and their functions."""
    plain: Callable[..., Tensor] = plain_attention
    if isinstance(layer.attention, CausalLinformerAttention):
        plain = plain_causal_attention
    elif layer.attention.window_length:
        plain = plain_window_attention
    attend = partial(plain, layer.attention, projection=model.projection)
    yield layer.attention_residual, partial(plain_mixing, layer.local, attend)
    if source_BNC is not None:
        source = {"context_BNC": source_BNC, "projection": model.source_projection}
        yield layer.cross_attention_residual, partial(plain_attention, layer.cross_attention, **source)
    if (parts := layer.feed_forward) is not None:
        yield layer.feed_forward_residual, nn.Sequential(parts.inner, parts.activation, parts.outer)


def plain_embeddings(embeddings: Any, ids_BN: Tensor) -> Tensor:
    x_BNC = F.embedding(ids_BN, embeddings.word_embeddings.weight)
    if embeddings.position_embeddings is not None:
        x_BNC = x_BNC + embeddings.position_embeddings(torch.arange(ids_BN.shape[1])).to(x_BNC.dtype)
    if embeddings.token_type_embeddings is not None:
        x_BNC = x_BNC + embeddings.token_type_embeddings.weight[0]
    return embeddings.dense(x_BNC if embeddings.norm is None else embeddings.norm(x_BNC))


def plain_mixing(local: Any, attend: Callable[[Tensor], Tensor], x_BNC: Tensor) -> Tensor:
    """Attention, plus the local convolution of an encoder layer that has one."""
    return attend(x_BNC) if local is None else attend(x_BNC) + local(x_BNC, None)


def plain_residual(residual: Any, x_BNC: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return x_BNC + function(residual.norm(x_BNC)) if residual.norm_first else residual.norm(x_BNC + function(x_BNC))


def plain_logits(model: Any, ids_BN: Tensor, target_BT: Tensor) -> Tensor:
    """Logits of a target after a source, or of the last T tokens after a prompt: (B, T, V)."""
    if hasattr(model, "encoder"):
        hidden_BTC = plain_hidden_states(model.decoder, target_BT, plain_hidden_states(model.encoder, ids_BN))
    else:
        hidden_BTC = plain_hidden_states(model.model, torch.cat([ids_BN, target_BT], dim=1))[:, ids_BN.shape[1] :]
    return model.lm_head(model.head(hidden_BTC))
