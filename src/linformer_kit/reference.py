"""The paper's equation in NumPy float64, with loops: the oracle of the tests.

It is slow and plain on purpose. An example is the array of its real tokens; there is no padding. Keys are computed in
the order of docs/mathematics.md, `Eᵀ X · W_K + b_K`, one row, one head and one query at a time.

    >>> import numpy as np
    >>> tokens = np.arange(12.0).reshape(6, 2)
    >>> mean_rows(tokens, 3)
    array([[ 1.,  2.],
           [ 5.,  6.],
           [ 9., 10.]])
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

Array = np.ndarray
Rows = Callable[[Array], Array]  # (N, C) tokens to (K, C) rows


class Affine(NamedTuple):
    """`x Wᵀ + b` in the layout of PyTorch: weight (out, in), bias (out,) or None."""

    weight: Array
    bias: Array | None

    def __call__(self, x: Array) -> Array:
        return self.weight @ x if self.bias is None else self.weight @ x + self.bias


class Kernel(NamedTuple):
    """The kernel of `head_conv` for one key-value head: taps (W, D, D), bias (D,)."""

    taps: Array
    bias: Array


def softmax(scores: Array) -> Array:
    """Weights that sum to one."""
    exponentials = np.exp(scores - scores.max())
    return exponentials / exponentials.sum()


def matrix_rows(tokens: Array, E: Array, rescale: bool = False) -> Array:
    """`Eᵀ X` with a stored (max_length, K) matrix: linear, affine and random."""
    length, projected_length = len(tokens), E.shape[1]
    rows = np.zeros((projected_length, tokens.shape[1]))
    for j in range(projected_length):
        for i in range(length):
            rows[j] += E[i, j] * tokens[i]
        if rescale and length:
            rows[j] *= np.linalg.norm(E[:, j]) / np.linalg.norm(E[:length, j])
    return rows


def dynamic_rows(tokens: Array, weight: Array) -> Array:
    """E computed from the tokens: for each row, the softmax over positions of `X W_p`; weight (C, K)."""
    rows = np.zeros((weight.shape[1], tokens.shape[1]))
    for j in range(weight.shape[1]):
        column = softmax(np.array([token @ weight[:, j] for token in tokens]))
        for i, token in enumerate(tokens):
            rows[j] += column[i] * token
    return rows


def conv_rows(tokens: Array, taps: Array, rescale: bool = False) -> Array:
    """A convolution with kernel = stride = W and taps (W, C); the last window may be shorter."""
    window = len(taps)
    rows = []
    for start in range(0, len(tokens), window):
        row, used = np.zeros(tokens.shape[1]), np.zeros(tokens.shape[1])
        for offset, token in enumerate(tokens[start : start + window]):
            row += taps[offset] * token
            used += taps[offset] ** 2
        rows.append(row * np.sqrt((taps**2).sum(axis=0) / used) if rescale else row)
    return np.array(rows)


def head_conv_rows(tokens: Array, window: int) -> Array:
    """The tokens in windows, (K, W, C), filled with zeros; W_K and W_V come before the kernel: see `Layer.features`."""
    rows = np.zeros((-(-len(tokens) // window), window, tokens.shape[1]))
    for position, token in enumerate(tokens):
        rows[position // window, position % window] = token
    return rows


def windows(tokens: Array, count: int) -> list[Array]:
    """The tokens in `count` windows, whose sizes differ by at most one; fewer windows if there are fewer tokens."""
    count = min(count, len(tokens))
    return [tokens[j * len(tokens) // count : (j + 1) * len(tokens) // count] for j in range(count)]


def mean_rows(tokens: Array, projected_length: int) -> Array:
    """The mean of each window."""
    return np.array([window.sum(axis=0) / len(window) for window in windows(tokens, projected_length)])


def max_rows(tokens: Array, projected_length: int) -> Array:
    """The largest value of each channel in each window."""
    return np.array([window.max(axis=0) for window in windows(tokens, projected_length)])


# The rows of each kind of projection, (K, C), from tokens and the options weight, matrix, projected_length and rescale.
# The weight has the layout of PyTorch and holds M matrices, of which `matrix` is one.
ROWS: dict[str, Callable[..., Array]] = {
    "linear": lambda tokens, *, weight, matrix, rescale, **_: matrix_rows(tokens, weight[:, matrix], rescale),
    "affine": lambda tokens, *, weight, matrix, rescale, **_: matrix_rows(tokens, weight[:, matrix], rescale),
    "random": lambda tokens, *, weight, matrix, rescale, **_: matrix_rows(tokens, weight[:, matrix], rescale),
    "dynamic": lambda tokens, *, weight, matrix, **_: dynamic_rows(tokens, weight[:, matrix]),
    "conv": lambda tokens, *, weight, matrix, rescale, **_: conv_rows(tokens, weight[matrix], rescale),
    "head_conv": lambda tokens, *, weight, **_: head_conv_rows(tokens, weight.shape[1]),
    "mean": lambda tokens, *, projected_length, **_: mean_rows(tokens, projected_length),
    "max": lambda tokens, *, projected_length, **_: max_rows(tokens, projected_length),
    "none": lambda tokens, **_: tokens,
}


# How much of each row lies at each position, (N, K), with the same options: tokens for `mean`, shares for the others.
ROW_MASS: dict[str, Callable[..., Array]] = {
    "linear": lambda tokens, *, weight, matrix, **_: matrix_mass(tokens, weight[:, matrix]),
    "affine": lambda tokens, *, weight, matrix, **_: matrix_mass(tokens, weight[:, matrix]),
    "random": lambda tokens, *, weight, matrix, **_: matrix_mass(tokens, weight[:, matrix]),
    "dynamic": lambda tokens, *, weight, matrix, **_: dynamic_mass(tokens, weight[:, matrix]),
    "conv": lambda tokens, *, weight, **_: segment_share(split(tokens, weight.shape[1])),
    "head_conv": lambda tokens, *, weight, **_: segment_share(split(tokens, weight.shape[1])),
    "mean": lambda tokens, *, projected_length, **_: segment_tokens(windows(tokens, projected_length)),
    "max": lambda tokens, *, projected_length, **_: segment_share(windows(tokens, projected_length)),
}


def matrix_mass(tokens: Array, E: Array) -> Array:
    """The share of a column of a stored (max_length, K) matrix, by absolute values."""
    return (np.abs(E) / np.abs(E).sum(axis=0))[: len(tokens)]


def dynamic_mass(tokens: Array, weight: Array) -> Array:
    """The columns of the softmax."""
    return np.array([softmax(np.array([token @ column for token in tokens])) for column in weight.T]).T


def segment_tokens(segments: Sequence[Array]) -> Array:
    """One for each token of the segment of a row."""
    counts = np.zeros((sum(map(len, segments)), len(segments)))
    start = 0
    for row, segment in enumerate(segments):
        counts[start : start + len(segment), row] = 1
        start += len(segment)
    return counts


def segment_share(segments: Sequence[Array]) -> Array:
    """The same, so that each row has one in total."""
    return segment_tokens(segments) / [len(segment) for segment in segments]


def split(tokens: Array, window: int) -> list[Array]:
    """The tokens in windows of `window`; the last may be shorter."""
    return [tokens[start : start + window] for start in range(0, len(tokens), window)]


def neighbor_means(weight: Array, count: int) -> Array:
    """(..., K) to (..., count): the means of neighboring columns; the first groups have one column more if needed."""
    size, larger = divmod(weight.shape[-1], count)
    means, start = [], 0
    for j in range(count):
        after = start + size + (1 if j < larger else 0)
        means.append(sum(weight[..., column] for column in range(start, after)) / (after - start))
        start = after
    return np.stack(means, axis=-1)


# How the weight of a projection with K columns serves a layer with fewer, `count`.
CUTS: dict[str, Callable[[Array, int], Array]] = {
    "linear": neighbor_means,
    "affine": neighbor_means,
    "random": lambda weight, count: weight[..., :count] * np.sqrt(weight.shape[-1] / count),
    "dynamic": lambda weight, count: weight[..., :count],
}


def head_slice(head: int, head_dim: int) -> slice:
    """The features of one head among those of all heads."""
    return slice(head * head_dim, (head + 1) * head_dim)


def attend_to_rows(
    token: Array,
    key_rows: Iterable[Array],
    value_rows: Iterable[Array],
    layer: "Layer",
    head: int,
    blocks: int = 1,
    bias: Array | float = 0.0,
) -> tuple[Array, Array]:
    """`softmax(q keysᵀ / √D + bias) values` for one query and one head, and the weights.

    The first rows are those of `blocks` projections, with their biases; the others have none.
    """
    query, kv_head = layer.query(token)[head_slice(head, layer.head_dim)], layer.kv_head(head)
    keys = [layer.features(layer.key, row, kv_head, layer.key_kernels) for row in key_rows]
    values = [layer.features(layer.value, row, kv_head, layer.value_kernels) for row in value_rows]
    for rows, biases in ((keys, layer.key_bias), (values, layer.value_bias)):
        for number, row_bias in enumerate([*biases[kv_head]] * blocks if biases else []):
            rows[number] = rows[number] + row_bias
    weights = softmax(np.array([query @ key for key in keys]) / np.sqrt(layer.head_dim) + bias)
    return sum(
        (weight * value for weight, value in zip(weights, values, strict=True)), np.zeros(layer.head_dim)
    ), weights


class Layer(NamedTuple):
    """The weights of one attention layer; `key_rows` and `value_rows` apply E and F of each key-value head.

    `key_bias` and `value_bias` of `affine` are (K,) for each key-value head, added to all features of a row.
    `key_kernels` and `value_kernels` are those of `head_conv`.
    """

    query: Affine
    key: Affine
    value: Affine
    output: Affine
    num_heads: int
    head_dim: int
    key_rows: Sequence[Rows]
    value_rows: Sequence[Rows]
    key_bias: Sequence[Array] = ()
    value_bias: Sequence[Array] = ()
    key_kernels: Sequence[Kernel] = ()
    value_kernels: Sequence[Kernel] = ()
    row_mass: Sequence[Rows] = ()  # for each key-value head: (N, C) tokens to (N, K), see `ROW_MASS`

    def kv_head(self, head: int) -> int:
        """The key-value head that this head uses."""
        return head * len(self.key_rows) // self.num_heads

    def features(self, linear: Affine, row: Array, kv_head: int, kernels: Sequence[Kernel]) -> Array:
        """`row · W + b` for one head, (D,). A row of `head_conv` is a window: `Σ_w (x_w · W + b) B_w` plus its bias."""
        own = head_slice(kv_head, self.head_dim)
        if row.ndim == 1:
            return linear(row)[own]
        taps, bias = kernels[kv_head]
        return bias + sum(linear(token)[own] @ tap for token, tap in zip(row, taps, strict=True))


def linformer_attention(
    queries: Array, context: Array, layer: Layer, value: Array | None = None
) -> tuple[Array, Array | None]:
    """(L, C) queries and (N, C) real tokens to (L, C) outputs and (H, L, K) weights.

    `value` (N, C) holds the tokens of the values, if they differ from those of the keys.
    """
    if len(context) == 0:  # nothing to attend to
        nothing = layer.output(np.zeros(layer.num_heads * layer.head_dim))
        return np.array([nothing for _ in queries]), None
    outputs, weights = [], []
    key_rows = [project(context) for project in layer.key_rows]
    value_rows = [project(context if value is None else value) for project in layer.value_rows]
    for token in queries:
        heads = [
            attend_to_rows(token, key_rows[layer.kv_head(head)], value_rows[layer.kv_head(head)], layer, head)
            for head in range(layer.num_heads)
        ]
        outputs.append(layer.output(np.concatenate([output for output, _ in heads])))
        weights.append([head_weights for _, head_weights in heads])
    return np.array(outputs), np.array(weights).swapaxes(0, 1)


def causal_linformer_attention(tokens: Array, layer: Layer, block_length: int) -> Array:
    """(N, C) to (N, C): each token attends to its own block up to itself, and to the summaries of earlier blocks."""
    outputs = []
    for position, token in enumerate(tokens):
        first = position // block_length * block_length
        own = list(tokens[first : position + 1])
        heads = []
        for head in range(layer.num_heads):
            key_rows, value_rows = [], []
            for start in range(0, first, block_length):
                block = tokens[start : start + block_length]
                key_rows += list(layer.key_rows[layer.kv_head(head)](block))
                value_rows += list(layer.value_rows[layer.kv_head(head)](block))
            blocks = first // block_length
            heads.append(attend_to_rows(token, key_rows + own, value_rows + own, layer, head, blocks)[0])
        outputs.append(layer.output(np.concatenate(heads)))
    return np.array(outputs)


def windowed_linformer_attention(
    tokens: Array, layer: Layer, window_length: int, global_tokens: int = 0, distance_bias: Array | None = None
) -> tuple[Array, Array]:
    """(N, C) to (N, C): exact attention to the window of each token, and to rows for the tokens outside.

    `distance_bias` (4 window_length - 1, H) is added to the scores of the tokens in the same and neighboring blocks;
    its middle row is that of distance 0. Also returns the (H, N, N + K) weights on tokens and rows.
    """
    outputs, weights = [], []
    key_rows, value_rows = ([list(rows(tokens)) for rows in side] for side in (layer.key_rows, layer.value_rows))
    row_mass = [count(tokens) for count in layer.row_mass]
    for position, token in enumerate(tokens):
        block = position // window_length
        seen = [
            other for other in range(len(tokens)) if abs(other // window_length - block) <= 1 or other < global_tokens
        ]
        near, unseen = [tokens[other] for other in seen], [o for o in range(len(tokens)) if o not in seen]
        heads, head_weights = [], []
        for head in range(layer.num_heads):
            kv_head = layer.kv_head(head)
            rows = len(key_rows[kv_head])
            with np.errstate(divide="ignore"):  # log(0): the weight is zero
                bias = [*np.log(row_mass[kv_head][unseen].sum(axis=0)), *np.zeros(len(near))]
            for number, other in enumerate(seen):
                if distance_bias is not None and abs(other // window_length - block) <= 1:
                    bias[rows + number] = distance_bias[2 * window_length - 1 + other - position, head]
            output, on_both = attend_to_rows(
                token, key_rows[kv_head] + near, value_rows[kv_head] + near, layer, head, bias=np.array(bias)
            )
            on_tokens = np.zeros(len(tokens))
            on_tokens[seen] = on_both[rows:]
            heads.append(output)
            head_weights.append(np.concatenate([on_tokens, on_both[:rows]]))
        outputs.append(layer.output(np.concatenate(heads)))
        weights.append(head_weights)
    return np.array(outputs), np.array(weights).swapaxes(0, 1)
