"""The point: one measurement, and the names it consists of. Imports no PyTorch, so that shell completion is fast."""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ..errors import UserError

Subject = Literal["layer", "causal-layer", "encoder", "encoder-decoder", "causal-lm", "trainer", "preparation"]
Step = Literal["forward", "training", "generation", "prefill", "decoding", "preparation"]
Backend = Literal["torch", "keras-torch", "keras-jax", "keras-tensorflow"]
Precision = Literal["float32", "bfloat16", "int8"]
SUBJECTS: tuple[str, ...] = get_args(Subject)
STEPS: tuple[str, ...] = get_args(Step)
BACKENDS: tuple[str, ...] = get_args(Backend)
PRECISIONS: tuple[str, ...] = get_args(Precision)
LAYER_SUBJECTS = ("layer", "causal-layer")
TRAINING_SUBJECTS = ("trainer", "preparation")  # run linformer_kit.training
NO_ATTENTION_DROPOUT = "no attention dropout"  # a variant; fused attention is possible then
# what a variant consists of, in this order, separated by ", "
VARIANT = re.compile(
    rf"(?P<name>(?!window)\w+)?(?:(?:^|, )window (?P<window>[1-9]\d*))?(?:(?:^|, ){NO_ATTENTION_DROPOUT})?", re.ASCII
)

OURS = "linformer-kit"
OURS_REVERSIBLE = "linformer-kit-reversible"
OURS_CHECKPOINTING = "linformer-kit-checkpointing"  # with gradient checkpointing
FULL = "full-attention"
FULL_EAGER = "full-attention-eager"
LINFORMER = "linformer"
LINFORMER_PYTORCH = "linformer-pytorch"
LONGFORMER = "longformer"
BERT_EAGER = "bert-eager"
GEMM = "gemm"
NAMES = (
    *(OURS, FULL, FULL_EAGER, LINFORMER, LINFORMER_PYTORCH, "bert", BERT_EAGER, "modern-bert", LONGFORMER),
    *("big-bird", "nystromformer", "fnet", "led", "long-t5", GEMM, OURS_REVERSIBLE, OURS_CHECKPOINTING),
)
# the reference of ratios is the first of these that was measured: full attention, then other attention
BASELINES = (
    *(FULL, FULL_EAGER, "bert", BERT_EAGER, "modern-bert", LONGFORMER, "big-bird", "nystromformer", "fnet"),
    *("led", "long-t5", LINFORMER, LINFORMER_PYTORCH),
)
# former names, by column; sweeps accept them with a warning
RENAMED = {"implementation": {"linformer-kit-none": FULL}, "step": {"reading": "prefill"}}

# input sizes of the check of a model: more tokens than one chunk of queries or of the feed-forward
CHECKED_TOKENS, CHECKED_LENGTH, CHECKED_ROWS = 1152, 64, 32
# with a window: ten blocks, the last one not full, which are more queries than one chunk of window_linformer.py
CHECKED_WINDOW, CHECKED_WINDOW_LENGTH = 64, 600


@dataclass(frozen=True)
class Point:
    """One measurement."""

    subject: Subject
    step: Step
    implementation: str
    length: int
    projected_length: int | None  # K, or the slots of a block; None: no projection; 0: only a window
    batch: int
    # projection (default "linear") and window of a layer or encoder, the model of a trainer, the tokenizer
    variant: str = ""
    backend: Backend = "torch"
    precision: Precision = "float32"
    block_length: int | None = None  # of causal subjects
    hidden_size: int = 512
    num_heads: int = 8
    num_layers: int = 4
    sharing: str = "headwise"
    target_length: int = 64  # tokens that a decoder reads or generates
    device: str = "cpu"
    head_dim: int | None = None  # default: hidden_size / num_heads
    model: str | None = None  # directory of a saved model, whose configuration the encoder has

    def __post_init__(self) -> None:
        if VARIANT.fullmatch(self.variant) is None:
            raise UserError(
                f"the variant of {self.implementation} is {self.variant!r}; it must be a projection, a window or both, "
                f"such as 'mean', 'window 128' or 'mean, window 128', and may end with {NO_ATTENTION_DROPOUT!r}"
            )

    @property
    def projection(self) -> str:
        return "none" if self.projected_length is None else self._in_variant("name") or "linear"

    @property
    def window_length(self) -> int:
        """The window that the variant names; 0: none.

        >>> point = Point("layer", "forward", OURS, 4096, 128, 1, variant="mean, window 64")
        >>> point.projection, point.window_length
        ('mean', 64)
        """
        return int(self._in_variant("window") or 0)

    def _in_variant(self, part: str) -> str | None:
        found = VARIANT.fullmatch(self.variant)
        return found and found[part]

    @property
    def projection_options(self) -> dict[str, Any]:
        """The projection as options of a layer or a configuration; in a single layer, layerwise sharing is kv."""
        if self.projected_length is None:
            return {"projection": "none"}
        sharing = "kv" if self.sharing == "layerwise" and self.subject in LAYER_SUBJECTS else self.sharing
        sizes = {"slots": self.projected_length, "block_length": self.block_length}
        if self.block_length is None:
            sizes = {"projected_length": self.projected_length}
        window = {"window_length": self.window_length} if self.window_length else {}
        return {"projection": self.projection, "sharing": sharing, **sizes, **window}

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    def small(self) -> "Point":
        """The same point with few tokens, for checks; they do not fit into its window."""
        rows = None if self.projected_length is None else min(self.projected_length, CHECKED_ROWS)
        small = replace(self, length=CHECKED_LENGTH, target_length=CHECKED_LENGTH, projected_length=rows, batch=1)
        if not self.window_length:
            return small
        window = window_variant(min(self.window_length, CHECKED_WINDOW), self._in_variant("name"))
        return replace(small, length=CHECKED_WINDOW_LENGTH, variant=window)

    def key(self, phase: str = "") -> dict[str, Any]:
        """The key columns of its row."""
        return {**{name: getattr(self, name) for name in KEYS if name != "phase"}, "phase": phase}

    def __str__(self) -> str:
        words = [self.implementation, self.variant, *special_words(self.backend, self.precision)]
        words += [self.subject, self.step, *size_words(self.length, self.projected_length, self.block_length)]
        return ", ".join(word for word in [*words, f"B={self.batch:,}"] if word)


# the columns that identify a row; `phase` is empty for the whole call
KEYS = (
    *("subject", "step", "implementation", "variant", "backend", "precision"),
    *("length", "projected_length", "block_length", "batch", "phase"),
)


def current_name(column: str, value: str) -> str:
    """
    >>> current_name("step", "reading"), current_name("step", "forward"), current_name("phase", "reading")
    ('prefill', 'forward', 'reading')
    """
    return RENAMED.get(column, {}).get(value, value)


def window_variant(window_length: int, projection: str | None = None) -> str:
    """
    >>> window_variant(128), window_variant(128, "mean"), window_variant(0)
    ('window 128', 'mean, window 128', '')
    """
    return ", ".join(filter(None, (projection, f"window {window_length}" if window_length else "")))


def special_words(backend: str, precision: str) -> list[str]:
    """
    >>> special_words("torch", "float32"), special_words("keras-jax", "float32"), special_words("torch", "bfloat16")
    ([], ['keras-jax'], ['bfloat16'])
    """
    return [word for word, usual in ((backend, "torch"), (precision, "float32")) if word != usual]


def size_words(length: int | None, projected_length: int | None, block_length: int | None) -> list[str]:
    """
    >>> size_words(4096, 128, None), size_words(4096, 4, 128)
    (['N=4,096', 'K=128'], ['N=4,096', 'blocks of 128', '4 slots'])
    """
    words = [] if length is None else [f"N={length:,}"]
    if projected_length is not None and block_length is not None:
        return [*words, f"blocks of {block_length}", f"{projected_length} slots"]
    return words if projected_length is None else [*words, f"K={projected_length:,}"]
