"""Everybody whom `linformer compare` knows: how each is built, what of it is called, and the check that it computes what it should.

Shapes: B batch, N length, T length of the target, K projected length, C model size.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from ..models.attention_linformer import QUERY_CHUNK
from ..models.modeling_linformer_seq2seq import LinformerForConditionalGeneration
from . import peer_models, peers
from .generation import check_generator, encoder_decoder
from .measure import Mode, make_call
from .peer_models import Sizes, layers_of, make_model_call, our_encoder, plain_attention, require_model_agreement
from .peers import WrongImplementation, require_agreement, require_gradient_agreement

Subject = Literal["layer", "encoder", "encoder-decoder"]
Step = Literal["forward", "training", "generation"]
Sharing = Literal["headwise", "kv", "layerwise"]

LED_WINDOW = 256
# tokens on which models are compared
CHECKED_BATCH, CHECKED_LENGTH, CHECKED_ROWS = peer_models.COMPARED_BATCH, peer_models.COMPARED_LENGTH, 32


@dataclass(frozen=True)
class Point:
    """One thing to measure."""

    subject: Subject
    step: Step
    implementation: str
    length: int
    projected_length: int | None  # None: it projects nothing
    batch: int
    hidden_size: int = 512
    num_heads: int = 8
    num_layers: int = 4
    sharing: Sharing = "headwise"
    target_length: int = 64  # tokens that an encoder-decoder reads or generates
    device: str = "cpu"

    @property
    def sizes(self) -> Sizes:
        """Those of whole models."""
        return Sizes(self.hidden_size, self.num_layers, self.num_heads, 4 * self.hidden_size)

    @property
    def rows(self) -> int:
        """K, of an implementation that projects."""
        assert self.projected_length is not None
        return self.projected_length

    def __str__(self) -> str:
        rows = "" if self.projected_length is None else f", K={self.projected_length:,}"
        return f"{self.implementation}, {self.subject}, {self.step}, N={self.length:,}{rows}, B={self.batch:,}"


def small_of(point: Point) -> Point:
    """The same with few tokens."""
    rows = None if point.projected_length is None else min(point.projected_length, CHECKED_ROWS)
    return replace(point, length=CHECKED_LENGTH, projected_length=rows)


Build = Callable[[Point], nn.Module]


@dataclass(frozen=True)
class Implementation:
    """An implementation: the package it comes from, whether it has a K, and how each subject is built."""

    package: str
    projects: bool
    builds: Mapping[Subject, Build]


# layers


def our_layer(point: Point) -> peers.LinformerAttention:
    sharing = "kv" if point.sharing == "layerwise" else point.sharing  # which is the same for a layer by itself
    return peers.our_layer(point.length, point.rows, point.hidden_size, point.num_heads, sharing=sharing)


def unprojected_layer(point: Point) -> peers.LinformerAttention:
    return peers.our_layer(point.length, 1, point.hidden_size, point.num_heads, projection="none")


class PlainLayer(nn.Module):
    """What one of our layers computes, in the plainest way."""

    def __init__(self, ours: peers.LinformerAttention):
        super().__init__()
        self.ours = ours

    def forward(self, x_BLC: Tensor, context_BNC: Tensor | None = None) -> Tensor:
        return plain_attention(self.ours, x_BLC, context_BNC)


def check_layer(point: Point) -> None:
    """Outputs at the point's own length, up to 1,024 tokens gradients too, beside a plain float64 evaluation."""
    torch.manual_seed(0)
    layer = build(point)
    torch.manual_seed(0)  # the same weights: peers take over those of the layer of ours that is built first
    ours = unprojected_layer(point) if point.projected_length is None else our_layer(point)
    exact = PlainLayer(ours).double()
    x_BNC = torch.randn(checked_examples(point.batch, point.length), point.length, point.hidden_size)
    if point.length <= peers.COMPARED_GRADIENTS_LENGTH:
        require_gradient_agreement(point.implementation, layer, exact, x_BNC)
    position_P = torch.linspace(0, point.length - 1, peers.COMPARED_POSITIONS).long()
    with torch.no_grad():  # which may be computed in another way
        x64_BNC = x_BNC.double()
        expected_BPC = exact(x64_BNC[:, position_P], x64_BNC)
        require_agreement(point.implementation, "output without gradients", layer(x_BNC)[:, position_P], expected_BPC)


def checked_examples(batch: int, length: int) -> int:
    """So many that more queries than a chunk are attended to, if the batch has them: chunks are how layers are timed.

    >>> checked_examples(8, 512), checked_examples(1, 512), checked_examples(8, 4096)
    (4, 1, 2)
    """
    return min(batch, QUERY_CHUNK // length + 2)


# encoders


class PeerEncoder(nn.Module):
    """The stack of another package between embeddings and a last norm of ours."""

    def __init__(self, ours: peer_models.LinformerModel, stack: nn.Module):
        super().__init__()
        self.embeddings = copy.deepcopy(ours.embeddings)
        self.stack = stack
        self.norm = copy.deepcopy(ours.norm) or nn.Identity()

    def forward(self, ids_BN: Tensor) -> BaseModelOutput:
        position_1N = torch.arange(ids_BN.shape[1], device=ids_BN.device)[None]
        x_BNC = self.embeddings(self.embeddings.word_embeddings(ids_BN), position_1N, None)
        return BaseModelOutput(last_hidden_state=self.norm(self.stack(x_BNC)))


def twin_encoder(point: Point) -> peer_models.LinformerModel:
    """Our encoder as this implementation can hold its weights: norms last for linformer-pytorch, and their eps is PyTorch's."""
    options: dict[str, Any] = {} if point.projected_length is None else {"projected_length": point.projected_length}
    if point.implementation in (peers.LINFORMER, peers.LINFORMER_PYTORCH):
        options |= {"norm_first": point.implementation == peers.LINFORMER, "layer_norm_eps": 1e-5}
    elif point.projected_length is None:
        options |= {"projection": "none"}
    return our_encoder(point.length, point.sizes, sharing=point.sharing, **options)


@torch.no_grad()
def linformer_encoder(point: Point) -> nn.Module:
    """The stack of the package `linformer`, whose feed-forward is always four times as wide."""
    from linformer import Linformer

    ours = twin_encoder(point)
    stack = Linformer(point.hidden_size, point.length, point.num_layers, k=point.rows, heads=point.num_heads)
    for (layer, attention), (first, second) in zip(layers_of(ours), stack.net.layers, strict=True):
        peers.copy_to_linformer(attention, first.fn)
        copy_linears((layer.feed_forward.inner, second.fn.w1), (layer.feed_forward.outer, second.fn.w2))
        copy_linears((layer.attention_residual.norm, first.norm), (layer.feed_forward_residual.norm, second.norm))
    return PeerEncoder(ours, stack)


@torch.no_grad()
def linformer_pytorch_encoder(point: Point) -> nn.Module:
    """The stack of the package `linformer-pytorch`."""
    from linformer_pytorch import Linformer

    ours, sizes = twin_encoder(point), point.sizes
    options = {"dropout": 0.0, "dropout_ff": 0.0, "activation": "gelu", "parameter_sharing": "headwise"}
    stack = Linformer(
        *(point.length, point.hidden_size, point.rows),
        **{"dim_ff": sizes.intermediate, "nhead": sizes.heads, "depth": sizes.layers, **options},
    )
    for (layer, attention), first, second in zip(layers_of(ours), stack.seq[::2], stack.seq[1::2], strict=True):
        peers.copy_to_linformer_pytorch(attention, first.fn)
        copy_linears((layer.feed_forward.inner, second.fn.w_1), (layer.feed_forward.outer, second.fn.w_2))
        copy_linears((layer.attention_residual.norm, first.norm), (layer.feed_forward_residual.norm, second.norm))
    return PeerEncoder(ours, stack)


def copy_linears(*pairs: tuple[nn.Module, nn.Module]) -> None:
    for ours, theirs in pairs:
        theirs.load_state_dict(ours.state_dict())


def of_transformers(build_encoder: Callable[..., nn.Module], **options: Any) -> Build:
    return lambda point: build_encoder(point.length, point.sizes, **options)


def check_encoder(point: Point) -> None:
    """Outputs and gradients of a few texts beside a plain float64 evaluation, if we know the function: ours, Linformers, BERT."""
    small = small_of(point)
    torch.manual_seed(0)
    model = build(small)
    if isinstance(model, transformers.BertModel):
        exact = peer_models.as_linformer(model)
    elif isinstance(model, PeerEncoder | peer_models.LinformerModel):
        torch.manual_seed(0)  # the same weights, as in `check_layer`
        exact = twin_encoder(small)
    else:
        return
    require_model_agreement(
        point.implementation, model, exact.double(), small.sizes.random_ids(CHECKED_BATCH, CHECKED_LENGTH)
    )


# encoder-decoders


def our_encoder_decoder(point: Point) -> nn.Module:
    options = {"projection": "none"} if point.projected_length is None else {"projected_length": point.projected_length}
    return encoder_decoder(point.sizes, point.length, sharing=point.sharing, **options)


def led(point: Point) -> nn.Module:
    sizes, parts = point.sizes, ("encoder", "decoder")
    config = transformers.LEDConfig(
        vocab_size=sizes.vocabulary,
        d_model=sizes.hidden,
        **{f"{part}_layers": sizes.layers for part in parts},
        **{f"{part}_attention_heads": sizes.heads for part in parts},
        **{f"{part}_ffn_dim": sizes.intermediate for part in parts},
        max_encoder_position_embeddings=-(-point.length // LED_WINDOW) * LED_WINDOW,  # it pads to whole windows
        max_decoder_position_embeddings=point.target_length + 2,
        attention_window=LED_WINDOW,
        dropout=0.0,
    )
    return transformers.LEDForConditionalGeneration(config)


def long_t5(point: Point) -> nn.Module:
    sizes = point.sizes
    config = transformers.LongT5Config(
        vocab_size=sizes.vocabulary,
        d_model=sizes.hidden,
        d_kv=sizes.hidden // sizes.heads,
        d_ff=sizes.intermediate,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        encoder_attention_type="transient-global",
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.LongT5ForConditionalGeneration(config)


class LinformerPytorchEncoderDecoder(nn.Module):
    """`LinformerEncDec` of `linformer-pytorch`; source and target have to be of the same length."""

    def __init__(self, point: Point):
        super().__init__()
        from linformer_pytorch import LinformerEncDec

        sizes = point.sizes
        options = {"dim_k": point.rows, "dim_ff": sizes.intermediate, "nhead": sizes.heads, "depth": sizes.layers}
        dropout = {"dropout": 0.0, "dropout_ff": 0.0}
        both = {f"{part}_{name}": value for part in ("enc", "dec") for name, value in {**options, **dropout}.items()}
        self.model = LinformerEncDec(*(2 * (sizes.vocabulary, point.length, sizes.hidden)), **both)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Seq2SeqLMOutput:
        return Seq2SeqLMOutput(logits=self.model(input_ids, decoder_input_ids))


def check_encoder_decoder(point: Point) -> None:
    """No token of the target may see a later one. Ours give what a plain float64 evaluation gives, also from the cache."""
    small = replace(small_of(point), target_length=CHECKED_LENGTH)
    torch.manual_seed(0)
    model, ids_BN, target_BT = build(small).eval(), *small.sizes.random_ids(2, CHECKED_LENGTH).unsqueeze(1)
    with torch.no_grad():
        logits_BTV = model(input_ids=ids_BN, decoder_input_ids=target_BT).logits
        target_BT[:, -1] += 1
        changed_BTV = model(input_ids=ids_BN, decoder_input_ids=target_BT).logits
    moved = float((logits_BTV - changed_BTV)[:, :-1].abs().max() / logits_BTV.square().mean().sqrt())
    if not moved <= peers.TOLERANCE:
        raise WrongImplementation(
            f"{point.implementation}: another last token of the target changes what it says before it by {moved:.1e} of its size; "
            "it sees the future, so it was not timed"
        )
    if isinstance(model, LinformerForConditionalGeneration):
        # a block and a half: one is finished
        long_BT = small.sizes.random_ids(1, model.config.block_length * 3 // 2)
        with torch.no_grad():
            expected_BTV = peer_models.plain_logits(copy.deepcopy(model).double(), ids_BN, long_BT)
            require_agreement(
                point.implementation, "logits", model(ids_BN, decoder_input_ids=long_BT).logits, expected_BTV
            )
        check_generator(point.implementation, model, ids_BN, long_BT[:, : model.config.block_length + 4])


# all of them

OURS = "linformer-kit"
OURS_NONE = "linformer-kit-none"
BERT_EAGER = "bert-eager"
KIT, TRANSFORMERS = "linformer-kit", "transformers"
IMPLEMENTATIONS: dict[str, Implementation] = {
    OURS: Implementation(
        KIT, True, {"layer": our_layer, "encoder": twin_encoder, "encoder-decoder": our_encoder_decoder}
    ),
    OURS_NONE: Implementation(
        KIT, False, {"layer": unprojected_layer, "encoder": twin_encoder, "encoder-decoder": our_encoder_decoder}
    ),
    peers.LINFORMER: Implementation(
        peers.LINFORMER,
        True,
        {"layer": lambda point: peers.linformer_layer(our_layer(point)), "encoder": linformer_encoder},
    ),
    peers.LINFORMER_PYTORCH: Implementation(
        peers.LINFORMER_PYTORCH,
        True,
        {
            "layer": lambda point: peers.linformer_pytorch_layer(our_layer(point)),
            "encoder": linformer_pytorch_encoder,
            "encoder-decoder": LinformerPytorchEncoderDecoder,
        },
    ),
    "bert": Implementation(TRANSFORMERS, False, {"encoder": of_transformers(peer_models.bert)}),
    BERT_EAGER: Implementation(TRANSFORMERS, False, {"encoder": of_transformers(peer_models.bert, attention="eager")}),
    "modern-bert": Implementation(TRANSFORMERS, False, {"encoder": of_transformers(peer_models.modern_bert)}),
    "longformer": Implementation(TRANSFORMERS, False, {"encoder": of_transformers(peer_models.longformer)}),
    "big-bird": Implementation(TRANSFORMERS, False, {"encoder": of_transformers(peer_models.big_bird)}),
    "nystromformer": Implementation(TRANSFORMERS, False, {"encoder": of_transformers(peer_models.nystromformer)}),
    "fnet": Implementation(TRANSFORMERS, False, {"encoder": of_transformers(peer_models.fnet)}),
    "led": Implementation(TRANSFORMERS, False, {"encoder-decoder": led}),
    "long-t5": Implementation(TRANSFORMERS, False, {"encoder-decoder": long_t5}),
}
CHECKS: dict[Subject, Callable[[Point], None]] = {
    "layer": check_layer,
    "encoder": check_encoder,
    "encoder-decoder": check_encoder_decoder,
}
MODES: dict[Step, Mode] = {"forward": "forward", "training": "forward+backward"}


def build(point: Point) -> nn.Module:
    """The subject of a point, as its implementation makes it."""
    return IMPLEMENTATIONS[point.implementation].builds[point.subject](point)


def check(point: Point) -> None:
    """Raise `WrongImplementation` unless it computes what it should."""
    CHECKS[point.subject](point)


def call_of(point: Point) -> Callable[[], object]:
    """What is measured at a point; it returns when everything has been computed."""
    device = torch.device(point.device)
    model = build(point).to(device)
    if point.subject == "layer":
        x_BNC = torch.randn(point.batch, point.length, point.hidden_size, device=device)
        call = make_call(model, x_BNC, MODES[point.step])
    else:
        ids_BN = point.sizes.random_ids(point.batch, point.length).to(device)
        if point.subject == "encoder":
            call = make_model_call(model, ids_BN, MODES[point.step])
        else:
            target_BT = point.sizes.random_ids(point.batch, point.target_length).to(device)
            call = make_encoder_decoder_call(model, ids_BN, target_BT, point.step)
    return call if device.type == "cpu" else partial(call_and_wait, call, device)


def call_and_wait(call: Callable[[], object], device: torch.device) -> None:
    """A GPU works on while Python is done already."""
    call()
    torch.accelerator.synchronize(device)


def make_encoder_decoder_call(model: Any, source_BN: Tensor, target_BT: Tensor, step: Step) -> Callable[[], object]:
    """A pass over source and target, a training step but for the optimizer, or the target generated greedily from the source."""
    model.train(step == "training")

    def forward() -> object:
        with torch.no_grad():
            return model(input_ids=source_BN, decoder_input_ids=target_BT).logits

    def training() -> None:
        model(input_ids=source_BN, labels=target_BT).loss.backward()
        model.zero_grad(set_to_none=True)

    def generation() -> object:
        tokens = target_BT.shape[1] - 1  # the first is the mark of the beginning
        return model.generate(
            source_BN,
            attention_mask=torch.ones_like(source_BN),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )

    return {"forward": forward, "training": training, "generation": generation}[step]


def version_of(implementation: str) -> str | None:
    """The version of its package; None if that is not installed."""
    try:
        return metadata.version(IMPLEMENTATIONS[implementation].package)
    except metadata.PackageNotFoundError:
        return None
