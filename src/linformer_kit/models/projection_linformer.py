"""What E and F are: one class per projection.

A projection turns the N tokens of an example into K rows, along the sequence. Some are matrices that can also be
applied to keys and values ("dense": linear, random, dynamic), the others pool the tokens themselves (conv, mean, max).

Shapes: B batch, N length, K projected length, M matrices, W window, G key-value heads, C model size.
Padding never arrives here as a mask: the real tokens of every example come first (`real_tokens_first`), zeros after them,
and `lengths_B` says how many there are (None: all N are real).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .options_linformer import check_projection_options, checked_options, positive_integer


class Projected(NamedTuple):
    """The K rows that stand for the N tokens."""

    rows_BMKC: Tensor
    present_BK: Tensor | None  # False at rows that stand for no real token; None when all take part in the softmax


class Matrices(NamedTuple):
    """E and F themselves."""

    E: Tensor  # (N, M, K), or (B, N, M, K) where they depend on the input
    scale: Tensor | None  # (M, K) or (B, M, K), what `rescale` multiplies the columns by; float32 or wider


def real_tokens_first(x_BNC: Tensor, mask_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move the real tokens of every example to the front, in order, and zeros behind them.

    A token's place is its rank among the real ones, so padding on the left, on the right or in between all give what the
    example gives alone. Returns the tokens, how many are real (B,), and the place each was moved to (B, N).
    """
    lengths_B, rank_BN = mask_BN.sum(dim=1), mask_BN.cumsum(dim=1)
    behind_BN = lengths_B[:, None] + torch.arange(x_BNC.shape[1], device=x_BNC.device) - rank_BN
    place_BN = torch.where(mask_BN, rank_BN - 1, behind_BN)
    batch_B1 = torch.arange(x_BNC.shape[0], device=x_BNC.device)[:, None]
    # filled, not multiplied: padding may hold anything, and 0 * nan is nan
    real_BNC = x_BNC.masked_fill(~mask_BN[..., None], 0)
    return torch.empty_like(real_BNC).index_put_((batch_B1, place_BN), real_BNC), lengths_B, place_BN


def is_number(size: int) -> bool:
    """False while a graph is exported for many lengths: then sizes are symbols, and it must not depend on what they stand for."""
    return isinstance(size, int)


def windows(length: int, window: int) -> int:
    """How many windows hold `length` tokens; in exported graphs, where no dimension may turn out to be 1, some to spare."""
    return -(-length // window) if is_number(length) else length // window + 2


def real_positions(length: int, lengths_B: Tensor) -> Tensor:
    """(B, N), True at the first `lengths_B` positions."""
    return torch.arange(length, device=lengths_B.device) < lengths_B[:, None]


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in a precision in which squares and long sums neither vanish nor overflow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def root_of_ratio(whole: Tensor, part: Tensor) -> Tensor:
    """√(whole / part), and 1 where the part is zero: what is scaled by it is zero too, and its gradient stays finite."""
    some = part > 0
    return torch.where(some, whole, 1).sqrt() / torch.where(some, part, 1).sqrt()  # the ratio itself may be too large


def repeated_rows(rows: Tensor, count: int) -> Tensor:
    """The first `count` rows, beginning again from the first when there are no more."""
    return rows.detach()[torch.arange(count, device=rows.device) % rows.shape[0]]


def scaled(rows: Tensor, scale: Tensor) -> Tensor:
    """`rows · scale` in the dtype of the rows, but multiplied in that of the scale: float16 may not hold it."""
    return (rows * scale).to(rows.dtype)


class Projection(nn.Module):
    """The interface of all projections; also what a model owns and hands down under `sharing="layerwise"`."""

    matrices: int = 1  # 1: E = F; 2: E and F; 2G: E and F per key-value head
    max_length: int | None = None  # None: any length
    made_with: dict[str, Any] | None = None  # the options of `make_projection`; None for one that was built otherwise

    def check_length(self, length: int) -> None:
        """Refuse more tokens than there are rows in E."""
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"input has {length} tokens but max_length is {self.max_length}; truncate it, "
                "or use projection='dynamic', 'conv', 'mean' or 'max', which take any length"
            )

    def rows(self, length: int) -> int:
        """How many rows `length` tokens become."""
        raise NotImplementedError

    def multiply_adds_per_channel(self, length: int) -> int:
        """The multiply-adds of `Eᵀ X` for one example of C channels, divided by C."""
        raise NotImplementedError

    def forward(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Projected:
        """(B, N, C) tokens, the real ones first, to (B, M, K, C) rows: `Eᵀ X`."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Fresh numbers, in place."""

    def resized(self, max_length: int) -> "Projection":
        """The same projection for inputs of up to `max_length` tokens.

        E loses its last rows, or grows by repeating its rows from the first: inputs of the old length keep their keys and
        values, unless `rescale` measures them by the longer columns. Windows of `conv` are stretched or shrunk, their means
        kept. What takes any length stays as it is.
        """
        assert self.made_with is not None
        built = make_projection(
            **{**self.made_with, "num_kv_heads": max(1, self.matrices // 2), "max_length": max_length}
        )
        for old, new in zip(self.tensors(), built.tensors(), strict=True):
            with torch.no_grad():
                new.data = self.stretched(old, max_length).to(device=old.device, dtype=old.dtype)
            new.requires_grad_(old.requires_grad)
        return built.train(self.training)

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers."""
        return [*self.parameters(), *self.buffers()]

    def stretched(self, weight: Tensor, max_length: int) -> Tensor:
        """A parameter as it is after `resized`."""
        return weight.detach().clone()

    def of_keys(self) -> slice:
        """Which of the M matrices are E."""
        return slice(0, max(1, self.matrices // 2))

    def of_values(self) -> slice:
        """Which of the M matrices are F: the other half, or the same one."""
        return slice(self.matrices // 2, None)


class DenseProjection(Projection):
    """`Eᵀ X` as a matrix product."""

    def __init__(self, projected_length: int, matrices: int):
        super().__init__()
        self.projected_length = projected_length
        self.matrices = matrices

    def rows(self, length: int) -> int:
        return self.projected_length

    def multiply_adds_per_channel(self, length: int) -> int:
        return self.matrices * length * self.projected_length + self.own_multiply_adds_per_channel(length)

    def own_multiply_adds_per_channel(self, length: int) -> int:
        """What computing E itself adds, in every order of the products."""
        return 0

    def matrices_for(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Matrices:
        """E and F for these tokens."""
        raise NotImplementedError

    def forward(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Projected:
        E, scale = self.matrices_for(x_BNC, lengths_B)
        # E and F side by side, so that X is read once; bmm, because matmul would copy X to fold the batch into it
        E_BFN = E.flatten(-2).transpose(-1, -2).expand(x_BNC.shape[0], -1, -1)
        rows_BMKC = torch.bmm(E_BFN, x_BNC).unflatten(1, (self.matrices, self.projected_length))
        return Projected(rows_BMKC if scale is None else scaled(rows_BMKC, scale[..., None]), None)


class LinearProjection(DenseProjection):
    """A learned `max_length × K` matrix; shorter inputs use its first N rows."""

    weight: Tensor

    def __init__(self, max_length: int, projected_length: int, matrices: int, rescale: bool = False):
        super().__init__(projected_length, matrices)
        self.max_length = max_length
        self.rescale = rescale
        self._register(torch.empty(max_length, matrices, projected_length))
        self.reset_parameters()

    def _register(self, weight: Tensor) -> None:
        self.weight = nn.Parameter(weight)

    def reset_parameters(self) -> None:
        """Segment means plus a little noise: row j starts as the mean of the j-th of K segments.

        From pure noise a model first has to find out which tokens a row stands for; from means it starts with a blurred
        picture of the whole sequence. The noise, a tenth of the signal, tells the matrices apart.
        """
        length, _, projected_length = self.weight.shape
        column_N = torch.arange(length, device=self.weight.device) * projected_length // length
        in_segment_NK = (column_N[:, None] == torch.arange(projected_length, device=self.weight.device)).to(
            self.weight.dtype
        )
        means_NK = in_segment_NK / in_segment_NK.sum(dim=0).clamp(min=1)
        with torch.no_grad():
            self.weight.normal_(std=0.1 * math.sqrt(projected_length) / length).add_(means_NK[:, None])

    def stretched(self, weight: Tensor, max_length: int) -> Tensor:
        return repeated_rows(weight, max_length)

    def matrices_for(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Matrices:
        length = x_BNC.shape[1]
        return Matrices(self.weight[:length], self._column_scale(length, lengths_B) if self.rescale else None)

    def _column_scale(self, length: int, lengths_B: Tensor | None) -> Tensor:
        """‖E[:, j]‖ / ‖E[real rows, j]‖: keys of short inputs are as long as those of full ones."""
        squares_NMK = at_least_float32(self.weight).square()
        if lengths_B is None:
            real = squares_NMK[:length].sum(dim=0)
        else:
            real = squares_NMK[:length].cumsum(dim=0)[lengths_B.clamp(min=1) - 1]
        return root_of_ratio(squares_NMK.sum(dim=0), real)

    def extra_repr(self) -> str:
        sizes = f"max_length={self.max_length}, projected_length={self.projected_length}"
        return f"{sizes}, matrices={self.matrices}, rescale={self.rescale}"


class RandomProjection(LinearProjection):
    """A fixed Gaussian matrix N(0, 1/K), the R of the paper's Theorem 1; a buffer, so it is saved with the model."""

    def _register(self, weight: Tensor) -> None:
        self.register_buffer("weight", weight)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_(std=1 / math.sqrt(self.projected_length))


class DynamicProjection(DenseProjection):
    """E computed from the input: the softmax over positions of `X W_p` (Transformer-LS)."""

    def __init__(self, embed_dim: int, projected_length: int, matrices: int):
        super().__init__(projected_length, matrices)
        self.weight = nn.Parameter(torch.empty(embed_dim, matrices, projected_length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # logits of variance 1 for normalised tokens, so that the K rows start as different averages
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight.shape[0]))

    def own_multiply_adds_per_channel(self, length: int) -> int:
        return self.matrices * length * self.projected_length

    def matrices_for(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Matrices:
        logits_BNF = x_BNC @ self.weight.flatten(1)
        if lengths_B is not None:
            # an example without real tokens keeps its first, a zero, so that the softmax has something to sum to 1
            behind_BN = ~real_positions(x_BNC.shape[1], lengths_B.clamp(min=1))
            logits_BNF = logits_BNF.masked_fill(behind_BN[..., None], -torch.inf)
        E_BNMK = logits_BNF.softmax(dim=1).unflatten(-1, (self.matrices, self.projected_length))
        return Matrices(E_BNMK.to(x_BNC.dtype), None)

    def extra_repr(self) -> str:
        return f"embed_dim={self.weight.shape[0]}, projected_length={self.projected_length}, matrices={self.matrices}"


class ConvProjection(Projection):
    """A convolution along the sequence, each channel with its own taps, kernel = stride = max_length / K, rounded up.

    The kernel is fixed when the layer is built. Because it is rounded up there may be fewer than K rows; a short input has
    fewer, and one beyond `max_length` perhaps more.
    """

    def __init__(self, embed_dim: int, max_length: int, projected_length: int, matrices: int, rescale: bool = False):
        super().__init__()
        self.window = -(-max_length // projected_length)
        self.matrices = matrices
        self.rescale = rescale
        self.weight = nn.Parameter(torch.empty(matrices, self.window, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # means plus a little noise, as in LinearProjection
        with torch.no_grad():
            self.weight.normal_(std=0.1 / self.window).add_(1 / self.window)

    def stretched(self, weight: Tensor, max_length: int) -> Tensor:
        assert self.made_with is not None
        window = -(-max_length // self.made_with["projected_length"])
        taps_MCW = nn.functional.interpolate(
            weight.detach().transpose(1, 2), size=window, mode="linear", align_corners=False
        )
        return taps_MCW.transpose(1, 2) * (self.window / window)

    def rows(self, length: int) -> int:
        return windows(length, self.window)

    def multiply_adds_per_channel(self, length: int) -> int:
        return self.matrices * self.rows(length) * self.window

    def forward(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Projected:
        length, rows = x_BNC.shape[1], self.rows(x_BNC.shape[1])
        padded_BNC = nn.functional.pad(x_BNC, (0, 0, 0, rows * self.window - length))
        if is_number(length):
            windows_BKWC = padded_BNC.unflatten(1, (rows, self.window))
        else:  # the same view, slower to differentiate, but an exporter can tell that it exists
            windows_BKWC = padded_BNC.unfold(1, self.window, self.window).movedim(-1, 2)
        # one pass over X for each matrix: an einsum would make of it C small products, many times slower
        rows_BMKC = torch.stack([(windows_BKWC * taps_WC).sum(dim=2) for taps_WC in self.weight], dim=1)
        row_K1, tap_W = torch.arange(rows, device=x_BNC.device)[:, None], torch.arange(self.window, device=x_BNC.device)
        position_KW = row_K1 * self.window + tap_W
        if lengths_B is None:
            is_real_BKW, present_BK = (position_KW < length)[None], None
        else:
            is_real_BKW = position_KW < lengths_B[:, None, None]
            present_BK = is_real_BKW.any(dim=-1)
        if self.rescale:
            rows_BMKC = scaled(rows_BMKC, self._column_scale(is_real_BKW))
        return Projected(rows_BMKC, present_BK)

    def _column_scale(self, is_real_BKW: Tensor) -> Tensor:
        """‖taps‖ / ‖taps of real tokens‖, per window and channel: (B, M, K, C)."""
        squares_MWC = at_least_float32(self.weight).square()
        real_BK = is_real_BKW.sum(dim=-1).clamp(min=1)  # they come first in every window
        real_BMKC = squares_MWC.cumsum(dim=1)[:, real_BK - 1].transpose(0, 1)
        return root_of_ratio(squares_MWC.sum(dim=1)[:, None], real_BMKC)

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.weight.shape[2]}, window={self.window}, matrices={self.matrices}, rescale={self.rescale}"
        )


class PoolingProjection(Projection):
    """The real tokens of each example, however many, cut into K windows whose sizes differ by at most one.

    With no more tokens than K each has a window of its own, and the layer is ordinary attention.
    """

    def __init__(self, projected_length: int):
        super().__init__()
        self.projected_length = projected_length

    def rows(self, length: int) -> int:
        return min(self.projected_length, length) if is_number(length) else self.projected_length

    def multiply_adds_per_channel(self, length: int) -> int:
        return length

    def pool(self, windows_BKWC: Tensor, is_real_BKW1: Tensor | None) -> Tensor:
        """(B, K, W, C) windows to (B, K, C) rows; `is_real_BKW1` is None when every place is taken."""
        raise NotImplementedError

    def forward(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Projected:
        length, rows = x_BNC.shape[1], self.rows(x_BNC.shape[1])
        width = windows(length, rows)
        if lengths_B is None and width * rows == length:  # equal windows: a view, no copy
            return Projected(self.pool(x_BNC.unflatten(1, (rows, width)), None)[:, None], None)

        row_K = torch.arange(rows, device=x_BNC.device)
        real_B1 = torch.full((1, 1), length, device=x_BNC.device) if lengths_B is None else lengths_B[:, None]
        used_B1 = real_B1.clamp(max=rows)
        first_BK = row_K * real_B1 // used_B1.clamp(min=1)
        after_BK = (row_K + 1) * real_B1 // used_B1.clamp(min=1)
        present_BK = row_K < used_B1
        position_BKW = first_BK[..., None] + torch.arange(width, device=x_BNC.device)
        is_real_BKW = (position_BKW < after_BK[..., None]) & present_BK[..., None]
        index_BX = position_BKW.clamp(max=length - 1).flatten(1)
        batch_B1 = torch.arange(x_BNC.shape[0], device=x_BNC.device)[:, None]
        windows_BKWC = x_BNC[batch_B1, index_BX].unflatten(1, (rows, width))
        rows_BKC = self.pool(windows_BKWC, is_real_BKW[..., None])
        return Projected(rows_BKC[:, None], None if lengths_B is None else present_BK)

    def extra_repr(self) -> str:
        return f"projected_length={self.projected_length}"


class MeanProjection(PoolingProjection):
    """The mean of each window."""

    def pool(self, windows_BKWC: Tensor, is_real_BKW1: Tensor | None) -> Tensor:
        if is_real_BKW1 is None:
            return windows_BKWC.mean(dim=2)
        sums_BKC = at_least_float32(windows_BKWC.masked_fill(~is_real_BKW1, 0)).sum(dim=2)
        return (sums_BKC / is_real_BKW1.sum(dim=2).clamp(min=1)).to(windows_BKWC.dtype)


class MaxProjection(PoolingProjection):
    """The largest value of each channel in each window."""

    def pool(self, windows_BKWC: Tensor, is_real_BKW1: Tensor | None) -> Tensor:
        if is_real_BKW1 is None:
            return windows_BKWC.amax(dim=2)
        lowest = torch.finfo(windows_BKWC.dtype).min
        largest_BKC = windows_BKWC.masked_fill(~is_real_BKW1, lowest).amax(dim=2)
        return largest_BKC.masked_fill(~is_real_BKW1.any(dim=2), 0)


class NoProjection(Projection):
    """Every token is its own row: ordinary softmax attention through the same code, the baseline of every comparison."""

    def rows(self, length: int) -> int:
        return length

    def multiply_adds_per_channel(self, length: int) -> int:
        return 0

    def forward(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Projected:
        return Projected(x_BNC[:, None], None if lengths_B is None else real_positions(x_BNC.shape[1], lengths_B))


@checked_options
def make_projection(
    projection: str = "linear",
    *,
    embed_dim: int,
    max_length: int = 512,
    projected_length: int = 128,
    sharing: str = "headwise",
    num_kv_heads: int = 1,
    rescale: bool = False,
) -> Projection:
    """Build the projection of one layer, or, with `sharing="layerwise"`, the one that a model owns and hands to its layers.

    >>> shared = make_projection("linear", embed_dim=64, max_length=1024, projected_length=32, sharing="layerwise")
    >>> shared(torch.zeros(2, 1000, 64)).rows_BMKC.shape
    torch.Size([2, 1, 32, 64])
    """
    check_projection_options(projection, max_length, projected_length, sharing, rescale)
    positive_integer("embed_dim", embed_dim)
    positive_integer("num_kv_heads", num_kv_heads)
    matrices = {"none": 2 * num_kv_heads, "headwise": 2, "kv": 1, "layerwise": 1}[sharing]
    built: Projection
    match projection:
        case "linear":
            built = LinearProjection(max_length, projected_length, matrices, rescale)
        case "random":
            built = RandomProjection(max_length, projected_length, matrices, rescale)
        case "dynamic":
            built = DynamicProjection(embed_dim, projected_length, matrices)
        case "conv":
            built = ConvProjection(embed_dim, max_length, projected_length, matrices, rescale)
        case "mean":
            built = MeanProjection(projected_length)
        case "max":
            built = MaxProjection(projected_length)
        case _:
            built = NoProjection()
    built.made_with = {
        "projection": projection,
        "embed_dim": embed_dim,
        "max_length": max_length,
        "projected_length": projected_length,
        "sharing": sharing,
        "rescale": rescale,
    }
    return built
