"""Linear layers that multiply 8-bit integers, for inference, and `quantize`, which puts them into a model.

Shapes: R rows, I input features, O output features.
"""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from .multihead_linformer import MultiHeadLayer, is_plain_linear
from .validation_linformer import compute_dtype

Model = TypeVar("Model", bound=nn.Module)

LARGEST = 127  # of the integers; -128 is left out, so that they are symmetric
# rows per chunk: integers, sums and outputs of a chunk stay in the processor's cache
INT8_ROW_CHUNK = 256
# instructions whose sums of products of 8-bit integers are exact; older ones overflow
HAS_VNNI = torch.cpu._is_vnni_supported()


def quantize_rows(x_RI: Tensor) -> tuple[Tensor, Tensor]:
    """The integers and the scales (R, 1) with `x ≈ integers · scale`, for each row on its own.

    So a token does not depend on the other tokens, nor on padding and the other examples of the batch.
    """
    scale_R1 = x_RI.abs().amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(x_RI.dtype).tiny).div_(LARGEST)
    # a quotient by a subnormal scale may exceed the range
    return (x_RI / scale_R1).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scale_R1


def integer_product(integers_RI: Tensor, weight_OI: Tensor) -> Tensor:
    """`integers weightᵀ` as float32; computed in float32 where there are no instructions for integers."""
    can_multiply_integers = HAS_VNNI and weight_OI.device.type == "cpu" and not torch.compiler.is_exporting()
    # with one input feature, torch 2.13 returns wrong sums
    if can_multiply_integers and weight_OI.shape[1] > 1:
        # converted before it is scaled: products of mixed types are several times slower
        return torch._int_mm(integers_RI, weight_OI.t()).float()
    return functional.linear(integers_RI.float(), weight_OI.float())


class Int8Linear(nn.Module):
    """`x Wᵀ + b` with 8-bit integers: W in advance, one scale for each output; x in each call, one for each row.

    The sums of the products are exact; scales and bias are float32. There is no gradient.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(out_features))
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.reset_parameters()

    @classmethod
    def of(cls, linear: nn.Linear) -> "Int8Linear":
        """The layer with the quantized weights of `linear`."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None).to(linear.weight.device)
        with torch.no_grad():
            integers_OI, scale_O1 = quantize_rows(linear.weight.float())
            layer.weight.copy_(integers_OI)
            layer.scale.copy_(scale_O1[:, 0])
            if layer.bias is not None:
                layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        return layer.eval()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize so that a layer without the weights of a checkpoint returns nan."""
        self.weight.zero_()
        self.scale.fill_(torch.nan)
        if self.bias is not None:
            self.bias.zero_()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """(..., I) to (..., O), with the dtype of x or of autocast."""
        rows_RI = x.flatten(0, -2)
        is_whole = torch.compiler.is_compiling() or rows_RI.shape[0] <= INT8_ROW_CHUNK
        if is_whole:
            return self._rows(rows_RI).to(compute_dtype(x)).unflatten(0, x.shape[:-1])
        output_RO = x.new_empty(rows_RI.shape[0], self.out_features, dtype=compute_dtype(x))
        for first in range(0, rows_RI.shape[0], INT8_ROW_CHUNK):
            rows = slice(first, first + INT8_ROW_CHUNK)
            output_RO[rows] = self._rows(rows_RI[rows])
        return output_RO.unflatten(0, x.shape[:-1])

    def _rows(self, rows_RI: Tensor) -> Tensor:
        integers_RI, scale_R1 = quantize_rows(rows_RI.float())
        product_RO = integer_product(integers_RI, self.weight).mul_(scale_R1)
        scale_O = self.scale.float()
        return product_RO.mul_(scale_O) if self.bias is None else torch.addcmul(self.bias.float(), product_RO, scale_O)

    def train(self, mode: bool = True) -> "Int8Linear":
        """As in the base class; raises for training."""
        if mode:
            raise ValueError(
                "the model has 8-bit weights, which cannot be trained; train the original model, then call "
                "linformer_kit.quantize"
            )
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def replace_linears(model: nn.Module) -> None:
    """Replace, in place, the linear layers that take all tokens: those of attention and feed-forward.

    The rest stays float32: sums over thousands of tokens (E and F), softmax and norms, because 8 bits are too few; the
    head, because it takes little time and its errors would be those of the answer; embeddings, which are only read.
    """
    for module in list(model.modules()):
        if isinstance(module, MultiHeadLayer):
            # with matrices for each head, W_K and W_V are multiplied by parts (`_project_rows`)
            names = ["query", "output"] if module.sharing == "none" else ["query", "key", "value", "output"]
        elif isinstance(getattr(module, "inner", None), nn.Linear):
            names = ["inner", "outer"]
        else:
            continue
        for name in names:
            linear = getattr(module, name)
            if type(linear) is nn.Linear:
                setattr(module, name, Int8Linear.of(linear))


def quantize(model: Model) -> Model:
    """A copy of an encoder, classifier or masked LM that multiplies 8-bit integers, for inference on CPUs with VNNI.

    >>> from linformer_kit import LinformerConfig, LinformerForSequenceClassification
    >>> sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = LinformerForSequenceClassification(LinformerConfig(**sizes)).eval()
    >>> ids = torch.randint(1, 100, (2, 300))
    >>> torch.allclose(quantize(model)(ids).logits, model(ids).logits, atol=0.01)
    True

    `save_pretrained` and `from_pretrained` keep the integers. Other processors compute the same in float32.
    """
    config = getattr(model, "config", None)
    is_encoder = any(isinstance(module, MultiHeadLayer) for module in model.modules())
    if not is_encoder or getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"the model is a {type(model).__name__}, but int8 is only for encoders of linformer-kit: LinformerModel, "
            "LinformerEncoder, classifiers, question answering and masked LMs; use bfloat16 for others"
        )
    wrapped = [
        name
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadLayer)
        for linear in (module.query, module.key, module.value, module.output)
        if not isinstance(linear, Int8Linear) and not is_plain_linear(linear)
    ]
    if wrapped:
        raise ValueError(f"{wrapped[0]} has adapters or hooks; merge or remove them before quantize")
    quantized = copy.deepcopy(model).eval()
    replace_linears(quantized)
    for module in quantized.modules():
        if (config := getattr(module, "config", None)) is not None:
            config.quantization = "int8"
    return quantized
