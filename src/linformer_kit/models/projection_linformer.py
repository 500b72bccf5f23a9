"""The projections E and F, one class for each kind.

A projection turns the N tokens of an example into K rows, along the sequence. Dense projections (linear, affine,
random, dynamic) are matrices, which can be applied to tokens or to their keys and values. The others (conv, head_conv,
mean, max) work on windows of tokens.

Shapes: B batch, N length, K projected length, M matrices, W window, G key-value heads, D head size, C model size.
There are no masks here: the real tokens of each example come first (`real_tokens_first`), then zeros. `lengths_B` is
the number of real tokens; None means that all N are real.
"""

import math
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from .options_linformer import ProjectionFacts, checked_options, list_names
from .validation_linformer import compute_dtype


class Projected(NamedTuple):
    """The K rows that represent the N tokens, to be multiplied by W_K and W_V. Those of `head_conv` are all tokens."""

    rows_BMKC: Tensor
    present_BK: Tensor | None  # False at rows without a real token, which the softmax skips; None: no such rows


class Blocks(NamedTuple):
    """The tokens in blocks, of which the first `skipped` tokens are left out."""

    number: int
    size: int
    skipped: int = 0


class Matrices(NamedTuple):
    """E and F."""

    E: Tensor  # (N, M, K), or (B, N, M, K) if they depend on the input
    scale: Tensor | None  # (M, K) or (B, M, K): the factors of `rescale` for the columns; float32 or wider

    def part(self, matrices: slice) -> "Matrices":
        """Only E, or only F."""
        return Matrices(self.E[..., matrices, :], None if self.scale is None else self.scale[..., matrices, :])


def real_tokens_first(x_BNC: Tensor, mask_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move the real tokens of each example to the front, in order, followed by zeros.

    The position of a token becomes its rank among the real tokens, so padding on either side or in between does not
    change the result. Returns the tokens, the number of real ones (B,), and the new position of each token (B, N).
    """
    lengths_B, rank_BN = mask_BN.sum(dim=1), mask_BN.cumsum(dim=1)
    behind_BN = lengths_B[:, None] + torch.arange(x_BNC.shape[1], device=x_BNC.device) - rank_BN
    place_BN = torch.where(mask_BN, rank_BN - 1, behind_BN)
    batch_B1 = torch.arange(x_BNC.shape[0], device=x_BNC.device)[:, None]
    # filled, not multiplied: padding may hold anything, and 0 * nan is nan
    real_BNC = x_BNC.masked_fill(~mask_BN[..., None], 0)
    return torch.empty_like(real_BNC).index_put_((batch_B1, place_BN), real_BNC), lengths_B, place_BN


def is_static(size: int) -> bool:
    """Whether a size is a plain number, and not a symbol as in an export with dynamic shapes."""
    return isinstance(size, int)


def windows(length: int, window: int) -> int:
    """The number of windows for `length` tokens; up to two more if it is symbolic, where no dimension may become 1."""
    return -(-length // window) if is_static(length) else length // window + 2


def padded_to_windows(x_BNC: Tensor, window: int) -> Tensor:
    """(B, N, C) to (B, K·W, C): zeros fill the last window."""
    length = x_BNC.shape[1]
    return nn.functional.pad(x_BNC, (0, 0, 0, windows(length, window) * window - length))


def split_windows(x: Tensor, window: int) -> Tensor:
    """(..., K·W, C) to (..., K, W, C)."""
    if is_static(x.shape[-2]):
        return x.unflatten(-2, (-1, window))
    # the same view; its gradient is slower, but the exporter can prove that the shape is valid
    return x.unfold(-2, window, window).transpose(-1, -2)


def real_tokens_in_windows(length: int, window: int, lengths_B: Tensor | None, device: torch.device) -> Tensor:
    """(B, K): how many tokens of each window are real; (1, K) if all tokens are."""
    first_K = torch.arange(windows(length, window), device=device) * window
    real_B1 = torch.full((1, 1), length, device=device) if lengths_B is None else lengths_B[:, None]
    return (real_B1 - first_K).clamp(min=0, max=window)


def real_positions(length: int, lengths_B: Tensor) -> Tensor:
    """(B, N), True at the first `lengths_B` positions."""
    return torch.arange(length, device=lengths_B.device) < lengths_B[:, None]


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 or wider, where squares and long sums neither vanish nor overflow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sqrt_ratio(whole: Tensor, part: Tensor) -> Tensor:
    """√(whole / part), and 1 where the part is zero, which keeps the gradient finite."""
    some = part > 0
    return torch.where(some, whole, 1).sqrt() / torch.where(some, part, 1).sqrt()  # the ratio itself may overflow


def repeated_rows(rows: Tensor, count: int) -> Tensor:
    """The first `count` rows; past the end, they repeat from the first."""
    return rows.detach()[torch.arange(count, device=rows.device) % rows.shape[0]]


def neighbor_means(columns: Tensor, count: int) -> Tensor:
    """(..., K) to (..., count): the means of groups of neighbors, whose sizes differ by at most one."""
    size, larger = divmod(columns.shape[-1], count)
    first, rest = columns.tensor_split([larger * (size + 1)], dim=-1)
    means = [group.unflatten(-1, (-1, n)).mean(dim=-1) for group, n in ((first, size + 1), (rest, size))]
    return torch.cat(means, dim=-1) if larger else means[1]


def scaled(rows: Tensor, scale: Tensor) -> Tensor:
    """`rows · scale`, computed in the dtype of the scale, which float16 may not hold, and cast to that of the rows."""
    return (rows * scale).to(rows.dtype)


class Projection(ProjectionFacts, nn.Module):
    """The interface of all projections.

    A subclass registers itself with `class FirstTokens(Projection, kind="first")` and states its facts as class
    attributes (see `ProjectionFacts`). The parameters of its constructor are named after the options they receive:
    any of `embed_dim`, `head_dim`, `max_length`, `projected_length`, `matrices` and `rescale`.
    """

    kinds: ClassVar[dict[str, type["Projection"]]] = {}
    matrix_axis: ClassVar[int] = -2  # the axis of the weights that counts the matrices
    matrices: int = 1  # 1: E = F; 2: E and F; 2G: E and F for each key-value head
    max_length: int | None = None  # None: any length
    projected_length: int | None = None  # None: one row for each token
    options: dict[str, Any] | None = None  # those of `make_projection`, if it built this projection

    def check_length(self, length: int) -> None:
        """Raise if there are more tokens than E has rows."""
        if self.max_length is not None and length > self.max_length:
            others = [name for name in self.kind_names("takes_any_length") if name != NoProjection.kind]
            raise ValueError(
                f"input has {length} tokens but max_length is {self.max_length}; truncate it, "
                f"or use projection={list_names(others)}, which take any length"
            )

    def rows(self, length: int) -> int:
        """The number of rows for `length` tokens."""
        raise NotImplementedError

    def multiply_adds_per_channel(self, length: int) -> int:
        """The multiply-adds of `Eᵀ X` for one example of C channels, divided by C."""
        raise NotImplementedError

    def own_multiply_adds_per_channel(self, length: int) -> int:
        """The part of it that computes E from the input; it does not depend on the order of the products."""
        return 0

    def forward(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Projected:
        """(B, N, C) tokens, the real ones first, to (B, M, K, C) rows: `Eᵀ X`."""
        raise NotImplementedError

    def finish(self, keys_BGKD: Tensor, values_BGKD: Tensor) -> tuple[Tensor, Tensor]:
        """What follows W_K and W_V: the bias of `affine`, the kernel of `head_conv`; nothing for other kinds."""
        return keys_BGKD, values_BGKD

    def finish_multiply_adds(self, length: int, features: int) -> int:
        """The multiply-adds of `finish` for one example; `features` is G·D."""
        return 0

    def rows_of_features(self, length: int) -> int:
        """The number of rows that are multiplied by W_K and W_V."""
        return self.rows(length)

    def mass_in_blocks(
        self, x_BNC: Tensor, lengths_B: Tensor | None, blocks: Blocks, E: Tensor | None = None
    ) -> Tensor:
        """How much of each row lies in each block: (B or 1, 1 or G, n, K), without gradient.

        For `mean` the number of tokens, for the others the share of the row. A layer with a window weights its rows by
        what lies outside (see `window_linformer.py`). `E` is that of the keys, (N, M, K) or (B, N, M, K), if it is
        known already.
        """
        raise NotImplementedError(
            f"projection={self.kind!r} does not define how much of each row lies in each block, so a layer "
            "with it cannot have a window; define `mass_in_blocks` in its class, or use window_length=0"
        )

    def key_matrix(self, x_1NC: Tensor) -> Tensor:
        """E for the keys of one example, (N, G, K); for kinds whose `matrix_depends_on` is "length", only N matters."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialize the weights, in place."""

    def resized(self, max_length: int) -> "Projection":
        """A copy of this projection for inputs of up to `max_length` tokens.

        E loses its last rows, or grows by repeating its rows from the first, so inputs of the old length keep their
        keys and values (`rescale` changes them slightly: it compares with the longer columns). The taps of `conv` and
        `head_conv` are stretched to the new window, with the same sum. Other projections do not depend on `max_length`.
        """
        assert self.options is not None
        options = {**self.options, "num_kv_heads": max(1, self.matrices // 2), "max_length": max_length}
        built = make_projection(**options)
        for old, new in zip(self.tensors(), built.tensors(), strict=True):
            with torch.no_grad():
                new.data = self.resized_weight(old, max_length).to(device=old.device, dtype=old.dtype)
            new.requires_grad_(old.requires_grad)
        return built.train(self.training)

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers."""
        return [*self.parameters(), *self.buffers()]

    def resized_weight(self, weight: Tensor, max_length: int) -> Tensor:
        """A weight of this projection, converted for `resized`."""
        return weight.detach().clone()

    def up_to(self, length: int) -> "Projection":
        """This projection for several calls with at most `length` tokens: the gradient of each is then as short."""
        return self

    def cut(self, projected_length: int) -> "Projection":
        """This projection with `projected_length` rows, to be used in one call. Gradients reach the whole weights.

        >>> shared = make_projection("linear", embed_dim=8, max_length=12, projected_length=6, sharing="layerwise")
        >>> shared.cut(3)(torch.zeros(2, 12, 8)).rows_BMKC.shape
        torch.Size([2, 1, 3, 8])
        """
        if self.projected_length is None or projected_length == self.projected_length:
            return self
        tensors = {
            name: self.cut_weight(tensor, projected_length)
            for name, tensor in (*self.named_parameters(), *self.named_buffers())
        }
        return self._view(tensors, projected_length=projected_length)

    def cut_weight(self, weight: Tensor, projected_length: int) -> Tensor:
        """A weight of this projection, computed for `cut`."""
        raise ValueError(
            f"a projection {self.kind!r} with projected_length={self.projected_length} cannot be cut to "
            f"{projected_length} rows; build it with projected_length={projected_length}"
        )

    def part(self, matrices: slice) -> Self:
        """This projection with some of its matrices, only E (`key_slice`) or only F (`value_slice`), for one call."""
        chosen = range(self.matrices)[matrices]
        if len(chosen) == self.matrices:
            return self
        tensors = {
            name: tensor.narrow(self.matrix_axis, chosen.start, len(chosen))
            for name, tensor in (*self.named_parameters(), *self.named_buffers())
        }
        return self._view(tensors, matrices=len(chosen))

    def _view(self, tensors: dict[str, Tensor], **attributes: Any) -> Self:
        """This projection with other tensors, which are no parameters: an optimizer still sees only the original."""
        view = type(self).__new__(type(self))  # copy.copy cannot be compiled
        view.__dict__.update({**self.__dict__, "_parameters": {}, "_buffers": {}, **tensors, **attributes})
        return view

    def split_rows(self, rows_BMKC: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the keys and those of the values; for each, M is 1 or G."""
        return rows_BMKC[:, self.key_slice()], rows_BMKC[:, self.value_slice()]

    def key_slice(self) -> slice:
        """The matrices, out of M, that are E."""
        return slice(0, max(1, self.matrices // 2))

    def value_slice(self) -> slice:
        """The matrices that are F: the second half of M, or the only one."""
        return slice(self.matrices // 2, None)


class DenseProjection(Projection):
    """`Eᵀ X` as a matrix product."""

    is_dense = True
    projected_length: int

    def __init__(self, projected_length: int, matrices: int):
        super().__init__()
        self.projected_length = projected_length
        self.matrices = matrices

    def rows(self, length: int) -> int:
        return self.projected_length

    def multiply_adds_per_channel(self, length: int) -> int:
        return self.matrices * length * self.projected_length + self.own_multiply_adds_per_channel(length)

    def matrices_for(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Matrices:
        """E and F for these tokens."""
        raise NotImplementedError

    def mass_in_blocks(
        self, x_BNC: Tensor, lengths_B: Tensor | None, blocks: Blocks, E: Tensor | None = None
    ) -> Tensor:
        """The sum of the absolute values of a column of E in the block, relative to that of the whole column."""
        length = x_BNC.shape[1]
        if E is None:
            E = self.matrices_for(x_BNC, lengths_B).part(self.key_slice()).E
        size_BNMK = at_least_float32(E.detach()).abs()
        size_BNMK = size_BNMK if E.dim() == 4 else size_BNMK[None]
        position_N = torch.arange(length, device=E.device)
        is_counted_BN = (position_N >= blocks.skipped)[None]
        if lengths_B is not None:
            is_counted_BN = is_counted_BN & (position_N < lengths_B[:, None])
        if lengths_B is not None or blocks.skipped:
            size_BNMK = size_BNMK.masked_fill(~is_counted_BN[..., None, None], 0)
        size_BNF = nn.functional.pad(size_BNMK.flatten(2), (0, 0, 0, blocks.number * blocks.size - length))
        size_BnMK = split_windows(size_BNF, blocks.size).sum(dim=2).unflatten(-1, E.shape[-2:])
        return (size_BnMK / self._column_size()).transpose(1, 2)

    def _column_size(self) -> Tensor | float:
        """The sum of the absolute values of each column of E for keys, (M, K), or of any column."""
        raise NotImplementedError

    def key_matrix(self, x_1NC: Tensor) -> Tensor:
        E = self.matrices_for(x_1NC).E
        return (E if E.dim() == 3 else E[0])[:, self.key_slice()]

    def forward(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Projected:
        return Projected(self.apply_matrices(self.matrices_for(x_BNC, lengths_B), x_BNC), None)

    def apply_matrices(self, matrices: Matrices, x_BNC: Tensor) -> Tensor:
        """`Eᵀ X`, (B, M, K, C)."""
        E, scale = matrices
        # E and F in one product, so that X is read once; bmm, because matmul would copy X to fold the batch into it
        # in the dtype of the product: autocast would convert E once for each example
        E_BFN = E.to(compute_dtype(x_BNC)).flatten(-2).transpose(-1, -2).expand(x_BNC.shape[0], -1, -1)
        rows_BMKC = torch.bmm(E_BFN, x_BNC).unflatten(1, (self.matrices, self.projected_length))
        return rows_BMKC if scale is None else scaled(rows_BMKC, scale[..., None])


class LinearProjection(DenseProjection, kind="linear"):
    """A learned `max_length × K` matrix; shorter inputs use its first N rows."""

    takes_any_length = False
    can_rescale = True
    sized_by_max_length = True
    has_own_learning_rate = True
    matrix_depends_on = "length"

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
        """Segment means plus noise: row j starts as the mean of the j-th of K segments.

        With pure noise, a model first has to learn which tokens each row represents. With means, the rows summarize
        the whole sequence from the start. The noise, a tenth of the signal, breaks the symmetry between matrices.
        """
        length, _, projected_length = self.weight.shape
        column_N = torch.arange(length, device=self.weight.device) * projected_length // length
        in_segment_NK = (column_N[:, None] == torch.arange(projected_length, device=self.weight.device)).to(
            self.weight.dtype
        )
        means_NK = in_segment_NK / in_segment_NK.sum(dim=0).clamp(min=1)
        with torch.no_grad():
            self.weight.normal_(std=0.1 * math.sqrt(projected_length) / length).add_(means_NK[:, None])

    def resized_weight(self, weight: Tensor, max_length: int) -> Tensor:
        return repeated_rows(weight, max_length)

    def up_to(self, length: int) -> Projection:
        if self.rescale:  # compares with the whole columns
            return self
        tensors = dict((*self.named_parameters(), *self.named_buffers()))
        return self._view(tensors | {"weight": self.weight[:length]})

    def cut_weight(self, weight: Tensor, projected_length: int) -> Tensor:
        """Averages neighboring columns: at first, each row is the mean of a segment, and no token is left out."""
        return neighbor_means(weight, projected_length)

    def matrices_for(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Matrices:
        length = x_BNC.shape[1]
        return Matrices(self.weight[:length], self._column_scale(length, lengths_B) if self.rescale else None)

    def _column_size(self) -> Tensor:
        # of all rows of E: a column that belongs to tokens beyond a short input counts little
        sums_MK = at_least_float32(self.weight[:, self.key_slice()].detach()).abs().sum(dim=0)
        return sums_MK.clamp(min=torch.finfo(sums_MK.dtype).tiny)

    def _column_scale(self, length: int, lengths_B: Tensor | None) -> Tensor:
        """‖E[:, j]‖ / ‖E[real rows, j]‖: gives the keys of short inputs the norm of those of full inputs."""
        squares_NMK = at_least_float32(self.weight).square()
        if lengths_B is None:
            real = squares_NMK[:length].sum(dim=0)
        else:
            real = squares_NMK[:length].cumsum(dim=0)[lengths_B.clamp(min=1) - 1]
        return sqrt_ratio(squares_NMK.sum(dim=0), real)

    def extra_repr(self) -> str:
        sizes = f"max_length={self.max_length}, projected_length={self.projected_length}"
        return f"{sizes}, matrices={self.matrices}, rescale={self.rescale}"


class AffineProjection(LinearProjection, kind="affine"):
    """A learned matrix and a learned bias for each row, which is added to all features of its key and value.

    `Eᵀ (X W_K) + b`, which is `nn.Linear(max_length, K)` along the sequence, as in `linformer-pytorch`.
    """

    def _register(self, weight: Tensor) -> None:
        super()._register(weight)
        self.bias = nn.Parameter(weight.new_empty(weight.shape[1:]))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.bias)

    def resized_weight(self, weight: Tensor, max_length: int) -> Tensor:
        return weight.detach().clone() if weight is self.bias else super().resized_weight(weight, max_length)

    def finish(self, keys_BGKD: Tensor, values_BGKD: Tensor) -> tuple[Tensor, Tensor]:
        # under autocast, the sum would have the precision of the bias
        bias_MK1 = self.bias[..., None].to(keys_BGKD.dtype)
        return keys_BGKD + bias_MK1[self.key_slice()], values_BGKD + bias_MK1[self.value_slice()]


class RandomProjection(LinearProjection, kind="random"):
    """A fixed Gaussian matrix N(0, 1/K), R in the paper's Theorem 1: a buffer, saved with the model but not trained."""

    has_own_learning_rate = False

    def _register(self, weight: Tensor) -> None:
        self.register_buffer("weight", weight)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_(std=1 / math.sqrt(self.projected_length))

    def cut_weight(self, weight: Tensor, projected_length: int) -> Tensor:
        """The first columns, scaled to N(0, 1/K) for the smaller K."""
        return weight[..., :projected_length] * math.sqrt(self.projected_length / projected_length)


class DynamicProjection(DenseProjection, kind="dynamic"):
    """E computed from the input: the softmax over positions of `X W_p` (Transformer-LS)."""

    sized_by_width = True
    matrix_depends_on = "input"

    def __init__(self, embed_dim: int, projected_length: int, matrices: int):
        super().__init__(projected_length, matrices)
        self.weight = nn.Parameter(torch.empty(embed_dim, matrices, projected_length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # logits of variance 1 for normalized tokens, so that the K rows start as different averages
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight.shape[0]))

    def own_multiply_adds_per_channel(self, length: int) -> int:
        return self.matrices * length * self.projected_length

    def cut_weight(self, weight: Tensor, projected_length: int) -> Tensor:
        """The first columns: each of them looks at all tokens."""
        return weight[..., :projected_length]

    def matrices_for(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Matrices:
        logits_BNF = x_BNC @ self.weight.flatten(1)
        if lengths_B is not None:
            # an example without real tokens keeps its first token, a zero: an empty softmax would be nan
            behind_BN = ~real_positions(x_BNC.shape[1], lengths_B.clamp(min=1))
            logits_BNF = logits_BNF.masked_fill(behind_BN[..., None], -torch.inf)
        E_BNMK = logits_BNF.softmax(dim=1).unflatten(-1, (self.matrices, self.projected_length))
        return Matrices(E_BNMK.to(x_BNC.dtype), None)

    def _column_size(self) -> float:
        return 1.0  # a softmax

    def extra_repr(self) -> str:
        return f"embed_dim={self.weight.shape[0]}, projected_length={self.projected_length}, matrices={self.matrices}"


class SegmentProjection(Projection):
    """Each row is made from the tokens of one segment."""

    # beside a window, a row counts as many times as it has tokens outside, not as one token at most
    counts_tokens: ClassVar[bool] = False

    def segments(self, length: int, lengths_B: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """The first token of each segment and the one after its last, (B, K) or (1, K); segments may be empty."""
        raise NotImplementedError

    def mass_in_blocks(
        self, x_BNC: Tensor, lengths_B: Tensor | None, blocks: Blocks, E: Tensor | None = None
    ) -> Tensor:
        """The number of tokens that each segment and each block have in common, or their share of the segment."""
        first_BK, after_BK = self.segments(x_BNC.shape[1], lengths_B, x_BNC.device)
        start_n1 = torch.arange(blocks.number, device=x_BNC.device)[:, None] * blocks.size
        first_BnK = first_BK[:, None].maximum(start_n1.clamp(min=blocks.skipped))
        after_BnK = after_BK[:, None].minimum(start_n1 + blocks.size)
        tokens_BnK = (after_BnK - first_BnK).clamp(min=0).to(torch.promote_types(x_BNC.dtype, torch.float32))
        if self.counts_tokens:
            return tokens_BnK[:, None]
        return (tokens_BnK / (after_BK - first_BK).clamp(min=1)[:, None])[:, None]


class KernelProjection(SegmentProjection):
    """A convolution along the sequence with kernel = stride = max_length / K, rounded up.

    The kernel size is fixed when the layer is built. Since it is rounded up, there may be fewer than K rows. Inputs
    shorter than `max_length` have fewer rows, longer ones may have more.
    """

    sized_by_max_length = True
    can_be_cut = False

    def __init__(self, max_length: int, projected_length: int, matrices: int):
        super().__init__()
        self.projected_length = projected_length
        self.window = windows(max_length, projected_length)
        self.matrices = matrices

    def rows(self, length: int) -> int:
        return windows(length, self.window)

    def segments(self, length: int, lengths_B: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        first_1K = torch.arange(windows(length, self.window), device=device)[None] * self.window
        return first_1K, first_1K + real_tokens_in_windows(length, self.window, lengths_B, device)

    def resized_taps(self, taps_MWC: Tensor, max_length: int) -> Tensor:
        """(M, W, C) taps for the window of another `max_length`: stretched, with the same sum."""
        assert self.options is not None
        window = windows(max_length, self.options["projected_length"])
        old_W1, new_V1 = (torch.arange(size + 1, dtype=torch.float64) / size for size in (self.window, window))
        # the share of each old tap that lies in each new one
        first_VW, after_VW = new_V1[:-1, None].maximum(old_W1[:-1]), new_V1[1:, None].minimum(old_W1[1:])
        shares_VW = (after_VW - first_VW).clamp(min=0) * self.window
        return torch.einsum("vw,mwc->mvc", shares_VW.to(taps_MWC), taps_MWC.detach())

    def cut_weight(self, weight: Tensor, projected_length: int) -> Tensor:
        raise ValueError(
            f"projection={self.kind!r} with projected_length={self.projected_length} cannot be cut to "
            f"{projected_length} rows: its kernel of max_length / projected_length = {self.window} taps fixes the "
            f"number of rows; build it with projected_length={projected_length}, or use projection='linear', "
            "'dynamic' or 'mean'"
        )


class ConvProjection(KernelProjection, kind="conv"):
    """A depthwise convolution of the tokens: each channel has its own taps."""

    can_rescale = True
    sized_by_width = True
    matrix_axis = -3
    why_no_matrix = "has its own weights for each channel in windows"

    def __init__(self, embed_dim: int, max_length: int, projected_length: int, matrices: int, rescale: bool = False):
        super().__init__(max_length, projected_length, matrices)
        self.rescale = rescale
        self.weight = nn.Parameter(torch.empty(matrices, self.window, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # means plus noise, as in LinearProjection
        with torch.no_grad():
            self.weight.normal_(std=0.1 / self.window).add_(1 / self.window)

    def resized_weight(self, weight: Tensor, max_length: int) -> Tensor:
        return self.resized_taps(weight, max_length)

    def multiply_adds_per_channel(self, length: int) -> int:
        return self.matrices * self.rows(length) * self.window

    def forward(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Projected:
        windows_BKWC = split_windows(padded_to_windows(x_BNC, self.window), self.window)
        # one pass over X for each matrix: einsum would compute C small products, which is many times slower
        rows_BMKC = torch.stack([(windows_BKWC * taps_WC).sum(dim=2) for taps_WC in self.weight], dim=1)
        real_BK = real_tokens_in_windows(x_BNC.shape[1], self.window, lengths_B, x_BNC.device)
        if self.rescale:
            rows_BMKC = scaled(rows_BMKC, self._column_scale(real_BK))
        return Projected(rows_BMKC, None if lengths_B is None else real_BK > 0)

    def _column_scale(self, real_BK: Tensor) -> Tensor:
        """‖taps‖ / ‖taps of real tokens‖, per window and channel: (B, M, K, C); real tokens come first in a window."""
        squares_MWC = at_least_float32(self.weight).square()
        real_BMKC = squares_MWC.cumsum(dim=1)[:, real_BK.clamp(min=1) - 1].transpose(0, 1)
        return sqrt_ratio(squares_MWC.sum(dim=1)[:, None], real_BMKC)

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.weight.shape[2]}, window={self.window}, matrices={self.matrices}, rescale={self.rescale}"
        )


class HeadConvProjection(KernelProjection, kind="head_conv"):
    """A convolution of the keys and values of each head, which mixes their features.

    `key_k = Σ_w (x_{kW+w} W_K + b_K) B_w + b`, where x is zero past the end: `nn.Conv1d(D, D, W, stride=W)` after W_K,
    as in `linformer-pytorch`. W_K and W_V are applied to all N tokens, and only `finish` leaves K rows.
    """

    is_features_first = True
    sized_by_head = True
    matrix_axis = 0
    why_no_matrix = "mixes the features of each head in windows"

    def __init__(self, head_dim: int, max_length: int, projected_length: int, matrices: int):
        super().__init__(max_length, projected_length, matrices)
        self.weight = nn.Parameter(torch.empty(matrices, self.window, head_dim, head_dim))
        self.bias = nn.Parameter(torch.empty(matrices, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # means plus noise, as in LinearProjection
        _, window, head_dim, _ = self.weight.shape
        identity_DD = torch.eye(head_dim, device=self.weight.device, dtype=self.weight.dtype)
        with torch.no_grad():
            self.weight.normal_(std=0.1 / (window * math.sqrt(head_dim))).add_(identity_DD / window)
        nn.init.zeros_(self.bias)

    def resized_weight(self, weight: Tensor, max_length: int) -> Tensor:
        if weight is self.bias:
            return weight.detach().clone()
        return self.resized_taps(weight.flatten(2), max_length).unflatten(2, weight.shape[2:])

    def rows_of_features(self, length: int) -> int:
        return self.rows(length) * self.window

    def multiply_adds_per_channel(self, length: int) -> int:
        return 0

    def finish_multiply_adds(self, length: int, features: int) -> int:
        return 2 * self.rows_of_features(length) * features * self.weight.shape[-1]

    def forward(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Projected:
        """The tokens, (B, 1, K·W, C), for all matrices; `present_BK` is about the rows that `finish` leaves."""
        tokens_B1NC = padded_to_windows(x_BNC, self.window)[:, None]
        if lengths_B is None:
            return Projected(tokens_B1NC, None)
        return Projected(tokens_B1NC, real_tokens_in_windows(x_BNC.shape[1], self.window, lengths_B, x_BNC.device) > 0)

    def split_rows(self, rows_BMKC: Tensor) -> tuple[Tensor, Tensor]:
        return rows_BMKC, rows_BMKC

    def finish(self, keys_BGND: Tensor, values_BGND: Tensor) -> tuple[Tensor, Tensor]:
        return self._convolve(keys_BGND, self.key_slice()), self._convolve(values_BGND, self.value_slice())

    def _convolve(self, features_BGND: Tensor, matrices: slice) -> Tensor:
        """(B, G, K·W, D) to (B, G, K, D)."""
        windows_BGKF = split_windows(features_BGND, self.window).flatten(-2)
        weight_MFD, bias_M1D = self.weight[matrices].flatten(1, 2), self.bias[matrices][:, None]
        rows_BGKD = windows_BGKF @ weight_MFD
        # under autocast, the sum would have the precision of the bias
        return rows_BGKD + bias_M1D.to(rows_BGKD.dtype)

    def extra_repr(self) -> str:
        return f"head_dim={self.weight.shape[-1]}, window={self.window}, matrices={self.matrices}"


class PoolingProjection(SegmentProjection):
    """Pools the real tokens of each example in K windows, whose sizes differ by at most one.

    With at most K tokens, each is a window, and the layer computes full attention.
    """

    has_matrices = False
    projected_length: int

    def __init__(self, projected_length: int):
        super().__init__()
        self.projected_length = projected_length

    def rows(self, length: int) -> int:
        # not `min`, which stays unresolved in graphs of torch.compile for many lengths
        return length if is_static(length) and length < self.projected_length else self.projected_length

    def multiply_adds_per_channel(self, length: int) -> int:
        return length

    def pool(self, windows_BKWC: Tensor, is_real_BKW1: Tensor | None) -> Tensor:
        """(B, K, W, C) windows to (B, K, C) rows; `is_real_BKW1` is None if all tokens are real."""
        raise NotImplementedError

    def forward(self, x_BNC: Tensor, lengths_B: Tensor | None = None) -> Projected:
        length, rows = x_BNC.shape[1], self.rows(x_BNC.shape[1])
        width = windows(length, rows)
        if lengths_B is None and width * rows == length:  # equal windows: a view, no copy
            return Projected(self.pool(x_BNC.unflatten(1, (rows, width)), None)[:, None], None)

        first_BK, after_BK = self.segments(length, lengths_B, x_BNC.device)
        position_BKW = first_BK[..., None] + torch.arange(width, device=x_BNC.device)
        is_real_BKW = position_BKW < after_BK[..., None]
        index_BX = position_BKW.clamp(max=length - 1).flatten(1)
        batch_B1 = torch.arange(x_BNC.shape[0], device=x_BNC.device)[:, None]
        windows_BKWC = x_BNC[batch_B1, index_BX].unflatten(1, (rows, width))
        rows_BKC = self.pool(windows_BKWC, is_real_BKW[..., None])
        return Projected(rows_BKC[:, None], None if lengths_B is None else first_BK < after_BK)

    def segments(self, length: int, lengths_B: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        row_K = torch.arange(self.rows(length), device=device)
        real_B1 = torch.full((1, 1), length, device=device) if lengths_B is None else lengths_B[:, None]
        used_B1 = real_B1.clamp(min=1, max=row_K.shape[0])
        first_BK, after_BK = (edge_K * real_B1 // used_B1 for edge_K in (row_K, row_K + 1))
        return first_BK, after_BK.minimum(real_B1)

    def extra_repr(self) -> str:
        return f"projected_length={self.projected_length}"


class MeanProjection(PoolingProjection, kind="mean"):
    """The mean of each window."""

    matrix_depends_on = "length"
    # without weights to train, a row approximates exact attention to each of its tokens
    counts_tokens = True

    def key_matrix(self, x_1NC: Tensor) -> Tensor:
        identity_1NN = torch.eye(x_1NC.shape[1], device=x_1NC.device)[None]
        return self(identity_1NN).rows_BMKC[0].permute(2, 0, 1)

    def pool(self, windows_BKWC: Tensor, is_real_BKW1: Tensor | None) -> Tensor:
        if is_real_BKW1 is None:
            return windows_BKWC.mean(dim=2)
        sums_BKC = at_least_float32(windows_BKWC.masked_fill(~is_real_BKW1, 0)).sum(dim=2)
        return (sums_BKC / is_real_BKW1.sum(dim=2).clamp(min=1)).to(windows_BKWC.dtype)


class MaxProjection(PoolingProjection, kind="max"):
    """The largest value of each channel in each window."""

    why_no_matrix = "takes the largest value of each channel in windows"

    def pool(self, windows_BKWC: Tensor, is_real_BKW1: Tensor | None) -> Tensor:
        if is_real_BKW1 is None:
            return windows_BKWC.amax(dim=2)
        lowest = torch.finfo(windows_BKWC.dtype).min
        largest_BKC = windows_BKWC.masked_fill(~is_real_BKW1, lowest).amax(dim=2)
        return largest_BKC.masked_fill(~is_real_BKW1.any(dim=2), 0)


class NoProjection(Projection, kind="none"):
    """Each token is its own row: full attention, computed by the same code; the baseline of all comparisons."""

    has_matrices = False
    can_have_window = False
    why_no_matrix = "has full attention"

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
    head_dim: int | None = None,
) -> Projection:
    """Build the projection of one layer, or with `sharing="layerwise"` the one that all layers of a model share.

    `embed_dim` is the width of the tokens, `head_dim` that of the heads (default: one head as wide as the tokens).

    >>> shared = make_projection("linear", embed_dim=64, max_length=1024, projected_length=32, sharing="layerwise")
    >>> shared(torch.zeros(2, 1000, 64)).rows_BMKC.shape
    torch.Size([2, 1, 32, 64])
    """
    return Projection.make(
        projection,
        embed_dim=embed_dim,
        max_length=max_length,
        projected_length=projected_length,
        sharing=sharing,
        num_kv_heads=num_kv_heads,
        rescale=rescale,
        head_dim=head_dim,
    )
