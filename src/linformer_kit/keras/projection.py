"""Projections as Keras layers: one class each, with the weights of the PyTorch class of the same name.

Shapes: B batch, N length, K projected length, M matrices, W window, H heads, D head size, C model size.
The real tokens of every example come first, then zeros; `lengths_B` counts the real tokens (None: all are real).
"""

import math
from typing import Any, ClassVar, NamedTuple

import keras
from keras import ops

from ..models.options_linformer import ProjectionFacts
from .tokens import Tensor, at_least_float32, ceil_div, pad_to, real_positions, split_blocks, take_tokens


class Projected(NamedTuple):
    """The K rows that replace the N tokens."""

    rows_BMKC: Tensor
    present_BK: Tensor | None  # False at rows without real tokens; None if the softmax covers all rows


def segment_means(shape: tuple[int, int, int], dtype: str | None = None) -> Tensor:
    """Initializer of a learned E: row j is the mean of the j-th of K segments, plus a tenth of noise per matrix."""
    length, _, projected_length = shape
    column_N = ops.arange(length, dtype="int32") * projected_length // length
    in_segment_NK = ops.cast(column_N[:, None] == ops.arange(projected_length, dtype="int32"), dtype)
    means_NK = in_segment_NK / ops.maximum(ops.sum(in_segment_NK, axis=0), 1)
    noise = keras.initializers.RandomNormal(stddev=0.1 * math.sqrt(projected_length) / length)
    return noise(shape, dtype) + means_NK[:, None]


def window_means(shape: tuple[int, int, int, int], dtype: str | None = None) -> Tensor:
    """Initializer of `head_conv`: the mean of each window, plus a tenth of noise."""
    _, window, head_dim, _ = shape
    noise = keras.initializers.RandomNormal(stddev=0.1 / (window * math.sqrt(head_dim)))
    return noise(shape, dtype) + ops.eye(head_dim, dtype=dtype) / window


def sqrt_ratio(whole: Tensor, part: Tensor) -> Tensor:
    """√(whole / part), and 1 where `part` is zero, which keeps the gradient finite."""
    is_positive = part > 0
    return ops.sqrt(ops.where(is_positive, whole, 1.0)) / ops.sqrt(ops.where(is_positive, part, 1.0))


def apply_scale(rows: Tensor, scale: Tensor) -> Tensor:
    """`rows · scale` in the dtype of the rows, multiplied in at least float32: float16 may not hold the scale."""
    return ops.cast(at_least_float32(rows) * scale, rows.dtype)


def real_lengths(length: Any, lengths_B: Tensor | None) -> Tensor:
    """(B, 1): how many tokens are real; (1, 1) if all are."""
    return ops.reshape(ops.cast(length if lengths_B is None else lengths_B, "int32"), (-1, 1))


def real_tokens_in_windows(length: Any, window: int, lengths_B: Tensor | None) -> Tensor:
    """(B, K): how many tokens of each window are real; (1, K) if all tokens are."""
    first_K = ops.arange(ceil_div(length, window), dtype="int32") * window
    return ops.clip(real_lengths(length, lengths_B) - first_K, 0, window)


class Projection(ProjectionFacts, keras.layers.Layer):
    """Base class of all projections. With `sharing="layerwise"` a model owns one and passes it to its layers."""

    kinds: ClassVar[dict[str, type["Projection"]]] = {}
    matrix_axis: ClassVar[int] = -2  # the axis of the weights that counts the matrices
    max_length: int | None = None  # None: any length
    options: dict[str, Any]  # the options of `make_projection`

    def __init__(self, matrices: int = 1, **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.matrices = matrices

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError(
            "a functional model cannot save a projection that several layers share: each layer would get a copy; write "
            "the model as a subclass of keras.Model, which saves its weights once"
        )

    def compute_mask(self, *_: Any, **__: Any) -> None:
        """None: the mask of the tokens does not apply to the rows."""

    def slice_of(self, part: str) -> slice:
        """The matrices of "keys" (E), "values" (F) or "all"; a single matrix serves as both."""
        half = self.matrices // 2
        return {"all": slice(None), "keys": slice(0, max(1, half)), "values": slice(half, None)}[part]

    def rows(self, length: Any) -> Any:
        """The number of rows for `length` tokens."""
        raise NotImplementedError

    def rows_of(self, part: str, rows_BMKC: Tensor) -> Tensor:
        """The rows of "keys" or "values"; M is 1 or H."""
        return rows_BMKC[:, self.slice_of(part)]

    def finish(self, features_BKHD: Tensor, part: str) -> Tensor:
        """What follows W_K or W_V: the bias of `affine`, the kernel of `head_conv`; nothing for other kinds."""
        return features_BKHD

    def mass_in_blocks(self, x_BNC: Tensor, lengths_B: Tensor | None, block: int, skipped: int = 0) -> Tensor:
        """How much of each row lies in each block of `block` tokens: (B or 1, 1 or H, n, K).

        For `mean` the number of tokens, for the others the share of the row. A layer with a window weights its rows by
        what lies outside (see window.py). The first `skipped` tokens are left out.
        """
        raise NotImplementedError(
            f"projection={self.kind!r} does not define how much of each row lies in each block, so a layer "
            "with it cannot have a window; define `mass_in_blocks` in its class, or use window_length=0"
        )

    def call(self, x_BNC: Tensor, lengths_B: Tensor | None = None, part: str = "all") -> Projected:
        """(B, N, C) tokens, the real ones first, to (B, M, K, C) rows: `Eᵀ X`."""
        raise NotImplementedError


class DenseProjection(Projection):
    """`Eᵀ X` as a matrix product."""

    def __init__(self, projected_length: int, matrices: int, **kwargs: Any):
        super().__init__(matrices, **kwargs)
        self.projected_length = projected_length

    def rows(self, length: Any) -> Any:
        return self.projected_length

    def matrices_for(self, x_BNC: Tensor, lengths_B: Tensor | None, part: str) -> Tensor:
        """E and F side by side, (B or 1, M·K, N)."""
        raise NotImplementedError

    def mass_in_blocks(self, x_BNC: Tensor, lengths_B: Tensor | None, block: int, skipped: int = 0) -> Tensor:
        """The sum of the absolute values of a column of E in the block, relative to that of the whole column."""
        length, E_BFN = ops.shape(x_BNC)[1], self.matrices_for(x_BNC, lengths_B, "keys")
        position_N = ops.arange(length, dtype="int32")
        is_counted_BN = ops.logical_and(position_N >= skipped, position_N < real_lengths(length, lengths_B))
        size_BFN = ops.where(is_counted_BN[:, None], ops.abs(at_least_float32(E_BFN)), 0.0)
        size_BnF = ops.sum(split_blocks(ops.transpose(size_BFN, (0, 2, 1)), block), axis=2)
        shape = (-1, ceil_div(length, block), E_BFN.shape[1] // self.projected_length, self.projected_length)
        return ops.transpose(ops.reshape(size_BnF, shape), (0, 2, 1, 3)) / self._column_size()

    def _column_size(self) -> Tensor | float:
        """The sum of the absolute values of each column of E for keys, (M, 1, K), or of any column."""
        raise NotImplementedError

    def call(self, x_BNC: Tensor, lengths_B: Tensor | None = None, part: str = "all") -> Projected:
        # E and F side by side: X is read once
        E_BFN = self.matrices_for(x_BNC, lengths_B, part)
        shape = (-1, E_BFN.shape[1] // self.projected_length, self.projected_length, x_BNC.shape[-1])
        return Projected(ops.reshape(ops.matmul(E_BFN, x_BNC), shape), None)


class LinearProjection(DenseProjection, kind="linear"):
    """A learned `max_length × K` matrix. Shorter inputs use its first N rows."""

    takes_any_length = False
    can_rescale = True
    sized_by_max_length = True

    def __init__(self, max_length: int, projected_length: int, matrices: int, rescale: bool, **kwargs: Any):
        super().__init__(projected_length, matrices, **kwargs)
        self.max_length = max_length
        self.rescale = rescale

    def build(self, _: Any = None) -> None:
        self._add_matrix(segment_means)

    def _add_matrix(self, initializer: Any, trainable: bool = True) -> None:
        shape = (self.max_length, self.matrices, self.projected_length)
        self.weight = self.add_weight(shape=shape, initializer=initializer, trainable=trainable, name="weight")
        self.built = True

    def matrices_for(self, x_BNC: Tensor, lengths_B: Tensor | None, part: str) -> Tensor:
        # in two steps: with a symbolic length, TensorFlow would not know how many matrices there are
        E_NMK = self.weight[: ops.shape(x_BNC)[1]][:, self.slice_of(part)]
        return ops.transpose(ops.reshape(E_NMK, (-1, E_NMK.shape[1] * self.projected_length)))[None]

    def _column_size(self) -> Tensor:
        # of all rows of E: a column that belongs to tokens beyond a short input counts little
        size_MK = ops.sum(ops.abs(at_least_float32(self.weight[:, self.slice_of("keys")])), axis=0)
        return ops.maximum(size_MK[:, None], 1e-37)

    def call(self, x_BNC: Tensor, lengths_B: Tensor | None = None, part: str = "all") -> Projected:
        rows_BMKC, _ = super().call(x_BNC, lengths_B, part)
        if self.rescale:
            scale = self._column_scale(ops.shape(x_BNC)[1], lengths_B)[..., self.slice_of(part), :, None]
            rows_BMKC = apply_scale(rows_BMKC, scale)
        return Projected(rows_BMKC, None)

    def _column_scale(self, length: Any, lengths_B: Tensor | None) -> Tensor:
        """‖E[:, j]‖ / ‖E[real rows, j]‖: gives keys of short inputs the norm of those of full ones."""
        squares_NMK = ops.square(at_least_float32(ops.convert_to_tensor(self.weight)))
        if lengths_B is None:
            real = ops.sum(squares_NMK[:length], axis=0)
        else:
            real = ops.take(ops.cumsum(squares_NMK, axis=0), ops.maximum(lengths_B, 1) - 1, axis=0)
        return sqrt_ratio(ops.sum(squares_NMK, axis=0), real)


class AffineProjection(LinearProjection, kind="affine"):
    """A learned matrix and a learned bias for each row, which is added to all features of its key and value."""

    def build(self, _: Any = None) -> None:
        super().build()
        shape = (self.matrices, self.projected_length)
        self.bias = self.add_weight(shape=shape, initializer="zeros", name="bias")

    def finish(self, features_BKHD: Tensor, part: str) -> Tensor:
        bias_KM = ops.transpose(ops.cast(self.bias[self.slice_of(part)], features_BKHD.dtype))
        return features_BKHD + bias_KM[..., None]


class RandomProjection(LinearProjection, kind="random"):
    """A fixed Gaussian matrix N(0, 1/K), the R of the paper's Theorem 1. Saved with the model, not trained."""

    def build(self, _: Any = None) -> None:
        stddev = 1 / math.sqrt(self.projected_length)
        self._add_matrix(keras.initializers.RandomNormal(stddev=stddev), trainable=False)


class DynamicProjection(DenseProjection, kind="dynamic"):
    """E computed from the input: the softmax over positions of `X W_p` (Transformer-LS)."""

    sized_by_width = True

    def __init__(self, embed_dim: int, projected_length: int, matrices: int, **kwargs: Any):
        super().__init__(projected_length, matrices, **kwargs)
        self.embed_dim = embed_dim

    def build(self, _: Any = None) -> None:
        # logits of variance 1 for normalized tokens: the K rows start as different averages
        self.weight = self.add_weight(
            shape=(self.embed_dim, self.matrices, self.projected_length),
            initializer=keras.initializers.RandomNormal(stddev=1 / math.sqrt(self.embed_dim)),
            name="weight",
        )
        self.built = True

    def matrices_for(self, x_BNC: Tensor, lengths_B: Tensor | None, part: str) -> Tensor:
        weight_CF = ops.reshape(self.weight[:, self.slice_of(part)], (self.embed_dim, -1))
        logits_BFN = at_least_float32(ops.einsum("cf,bnc->bfn", weight_CF, x_BNC))
        if lengths_B is not None:
            # an example without real tokens keeps its first position, a zero, so that the softmax is defined
            real_BN = real_positions(ops.shape(x_BNC)[1], ops.maximum(lengths_B, 1))
            logits_BFN = ops.where(real_BN[:, None], logits_BFN, -float("inf"))
        return ops.cast(ops.softmax(logits_BFN, axis=-1), x_BNC.dtype)

    def _column_size(self) -> float:
        return 1.0  # a softmax


class SegmentProjection(Projection):
    """Each row is made from the tokens of one segment."""

    counts_tokens: ClassVar[bool] = False  # as in PyTorch

    def segments(self, length: Any, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """The first token of each segment and the one after its last, (B or 1, K); empty: a row that is skipped."""
        raise NotImplementedError

    def mass_in_blocks(self, x_BNC: Tensor, lengths_B: Tensor | None, block: int, skipped: int = 0) -> Tensor:
        """The number of tokens that each segment and each block have in common, or their share of the segment."""
        length = ops.shape(x_BNC)[1]
        first_BK, after_BK = self.segments(length, lengths_B)
        start_n1 = ops.arange(ceil_div(length, block), dtype="int32")[:, None] * block
        first_BnK = ops.maximum(first_BK[:, None], ops.maximum(start_n1, skipped))
        after_BnK = ops.minimum(after_BK[:, None], start_n1 + block)
        tokens_BnK = ops.cast(ops.maximum(after_BnK - first_BnK, 0), "float32")
        if self.counts_tokens:
            return tokens_BnK[:, None]
        segment_BK = ops.cast(ops.maximum(after_BK - first_BK, 1), "float32")
        return (tokens_BnK / segment_BK[:, None])[:, None]


class KernelProjection(SegmentProjection):
    """A convolution along the sequence, kernel = stride = max_length / K, rounded up."""

    sized_by_max_length = True

    def __init__(self, max_length: int, projected_length: int, matrices: int, **kwargs: Any):
        super().__init__(matrices, **kwargs)
        self.window = ceil_div(max_length, projected_length)

    def rows(self, length: Any) -> Any:
        return ceil_div(length, self.window)

    def segments(self, length: Any, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        first_1K = ops.arange(self.rows(length), dtype="int32")[None] * self.window
        return first_1K, first_1K + real_tokens_in_windows(length, self.window, lengths_B)


class ConvProjection(KernelProjection, kind="conv"):
    """A depthwise convolution of the tokens: each channel has its own taps."""

    can_rescale = True
    sized_by_width = True
    matrix_axis = -3

    def __init__(
        self, embed_dim: int, max_length: int, projected_length: int, matrices: int, rescale: bool, **kwargs: Any
    ):
        super().__init__(max_length, projected_length, matrices, **kwargs)
        self.embed_dim = embed_dim
        self.rescale = rescale

    def build(self, _: Any = None) -> None:
        # means plus a tenth of noise, as in LinearProjection
        self.weight = self.add_weight(
            shape=(self.matrices, self.window, self.embed_dim),
            initializer=keras.initializers.RandomNormal(mean=1 / self.window, stddev=0.1 / self.window),
            name="weight",
        )
        self.built = True

    def call(self, x_BNC: Tensor, lengths_B: Tensor | None = None, part: str = "all") -> Projected:
        length, weight_MWC = ops.shape(x_BNC)[1], self.weight[self.slice_of(part)]
        windows_BKWC = split_blocks(x_BNC, self.window)
        # one pass over X per matrix: an einsum would compute C small products
        each_BKC = [ops.sum(windows_BKWC * weight_MWC[number], axis=2) for number in range(weight_MWC.shape[0])]
        rows_BMKC = ops.stack(each_BKC, axis=1)
        real_BK = real_tokens_in_windows(length, self.window, lengths_B)
        if self.rescale:
            rows_BMKC = apply_scale(rows_BMKC, self._column_scale(weight_MWC, real_BK))
        return Projected(rows_BMKC, None if lengths_B is None else real_BK > 0)

    def _column_scale(self, weight_MWC: Tensor, real_BK: Tensor) -> Tensor:
        """‖taps‖ / ‖taps of real tokens‖ per window and channel, (B, M, K, C); real tokens come first in a window."""
        squares_MWC = ops.square(at_least_float32(weight_MWC))
        real_MBKC = ops.take(ops.cumsum(squares_MWC, axis=1), ops.maximum(real_BK, 1) - 1, axis=1)
        return sqrt_ratio(ops.sum(squares_MWC, axis=1)[:, None], ops.transpose(real_MBKC, (1, 0, 2, 3)))


class HeadConvProjection(KernelProjection, kind="head_conv"):
    """A convolution along the keys and values of each head, which mixes its features; kernel and stride as in `conv`.

    W_K and W_V are applied to all N tokens, and only `finish` leaves K rows.
    """

    sized_by_head = True
    matrix_axis = 0

    def __init__(self, head_dim: int, max_length: int, projected_length: int, matrices: int, **kwargs: Any):
        super().__init__(max_length, projected_length, matrices, **kwargs)
        self.head_dim = head_dim

    def build(self, _: Any = None) -> None:
        shape = (self.matrices, self.window, self.head_dim, self.head_dim)
        self.weight = self.add_weight(shape=shape, initializer=window_means, name="weight")
        self.bias = self.add_weight(shape=(self.matrices, self.head_dim), initializer="zeros", name="bias")
        self.built = True

    def call(self, x_BNC: Tensor, lengths_B: Tensor | None = None, part: str = "all") -> Projected:
        """The tokens, (B, 1, K·W, C), for all matrices; `present_BK` is about the rows that `finish` leaves."""
        length = ops.shape(x_BNC)[1]
        tokens_BNC = pad_to(x_BNC, self.rows(length) * self.window)
        real_BK = real_tokens_in_windows(length, self.window, lengths_B)
        return Projected(tokens_BNC[:, None], None if lengths_B is None else real_BK > 0)

    def rows_of(self, part: str, rows_BMKC: Tensor) -> Tensor:
        return rows_BMKC

    def finish(self, features_BKHD: Tensor, part: str) -> Tensor:
        heads, part_M = features_BKHD.shape[2], self.slice_of(part)
        windows_BKWHD = ops.reshape(
            features_BKHD, (-1, ops.shape(features_BKHD)[1] // self.window, self.window, heads, self.head_dim)
        )
        weight_MWDE, bias_ME = (ops.cast(each[part_M], features_BKHD.dtype) for each in (self.weight, self.bias))
        if weight_MWDE.shape[0] == 1:
            return ops.einsum("bkwhd,wde->bkhe", windows_BKWHD, weight_MWDE[0]) + bias_ME
        return ops.einsum("bkwhd,hwde->bkhe", windows_BKWHD, weight_MWDE) + bias_ME


class PoolingProjection(SegmentProjection):
    """Pools the real tokens of each example in K windows whose sizes differ by at most one."""

    has_matrices = False

    def __init__(self, projected_length: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.projected_length = projected_length

    def build(self, _: Any = None) -> None:
        self.built = True

    def rows(self, length: Any) -> Any:
        minimum = min if isinstance(length, int) else ops.minimum
        return minimum(self.projected_length, length)

    def pool(self, windows_BKWC: Tensor, is_real_BKW1: Tensor | None) -> Tensor:
        """(B, K, W, C) windows to (B, K, C) rows; `is_real_BKW1` is None if every window is full."""
        raise NotImplementedError

    def call(self, x_BNC: Tensor, lengths_B: Tensor | None = None, part: str = "all") -> Projected:
        length, channels = ops.shape(x_BNC)[1], x_BNC.shape[-1]
        rows = self.rows(length)
        width = ceil_div(length, rows)
        if lengths_B is None and isinstance(length, int) and width * rows == length:  # equal windows: a view, no copy
            return Projected(self.pool(ops.reshape(x_BNC, (-1, rows, width, channels)), None)[:, None], None)

        first_BK, after_BK = self.segments(length, lengths_B)
        position_BKW = first_BK[..., None] + ops.arange(width, dtype="int32")
        is_real_BKW = position_BKW < after_BK[..., None]
        index_BX = ops.reshape(ops.minimum(position_BKW, ops.cast(length, "int32") - 1), (-1, rows * width))
        windows_BKWC = ops.reshape(take_tokens(x_BNC, index_BX), (-1, rows, width, channels))
        rows_BKC = self.pool(windows_BKWC, is_real_BKW[..., None])
        return Projected(rows_BKC[:, None], None if lengths_B is None else first_BK < after_BK)

    def segments(self, length: Any, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, real_B1 = self.rows(length), real_lengths(length, lengths_B)
        row_K, used_B1 = ops.arange(rows, dtype="int32"), ops.clip(real_B1, 1, rows)
        first_BK, after_BK = (edge_K * real_B1 // used_B1 for edge_K in (row_K, row_K + 1))
        return first_BK, ops.minimum(after_BK, real_B1)


class MeanProjection(PoolingProjection, kind="mean"):
    """The mean of each window."""

    counts_tokens = True

    def pool(self, windows_BKWC: Tensor, is_real_BKW1: Tensor | None) -> Tensor:
        if is_real_BKW1 is None:
            return ops.mean(windows_BKWC, axis=2)
        real_BKWC = at_least_float32(ops.where(is_real_BKW1, windows_BKWC, ops.zeros_like(windows_BKWC)))
        count_BK1 = ops.maximum(ops.sum(ops.cast(is_real_BKW1, real_BKWC.dtype), axis=2), 1)
        return ops.cast(ops.sum(real_BKWC, axis=2) / count_BK1, windows_BKWC.dtype)


class MaxProjection(PoolingProjection, kind="max"):
    """The maximum of each channel in each window."""

    def pool(self, windows_BKWC: Tensor, is_real_BKW1: Tensor | None) -> Tensor:
        if is_real_BKW1 is None:
            return ops.max(windows_BKWC, axis=2)
        largest_BKC = ops.max(ops.where(is_real_BKW1, windows_BKWC, -float("inf")), axis=2)
        return ops.where(ops.any(is_real_BKW1, axis=2), largest_BKC, ops.zeros_like(largest_BKC))


def make_projection(
    projection: str = "linear",
    *,
    embed_dim: int,
    max_length: int = 512,
    projected_length: int = 128,
    sharing: str = "headwise",
    num_heads: int = 1,
    rescale: bool = False,
    head_dim: int | None = None,
    **kwargs: Any,
) -> Projection:
    """Create the projection of a layer or, with `sharing="layerwise"`, one that a model passes to its layers.

    `embed_dim` is the width of the tokens, `head_dim` that of the heads (default: one head as wide as the tokens).

    >>> shared = make_projection("linear", embed_dim=64, max_length=1024, projected_length=32, sharing="layerwise")
    >>> tuple(shared(ops.zeros((2, 1000, 64))).rows_BMKC.shape)
    (2, 1, 32, 64)
    """
    if projection == "none":
        raise ValueError("projection is 'none'; full attention has no projection")
    return Projection.make(
        projection,
        embed_dim=embed_dim,
        max_length=max_length,
        projected_length=projected_length,
        sharing=sharing,
        num_kv_heads=num_heads,
        rescale=rescale,
        head_dim=head_dim,
        **kwargs,
    )
