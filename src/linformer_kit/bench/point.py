"""The point: one measurement, and the names it consists of. Imports no PyTorch, so that shell completion is fast."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Subject = Literal["layer", "causal-layer", "encoder", "encoder-decoder", "causal-lm", "trainer", "preparation"]
Step = Literal["forward", "training", "generation", "prefill", "decoding", "preparation"]
Backend = Literal["torch", "keras-torch", "keras-jax", "keras-tensorflow"]
SUBJECTS: tuple[str, ...] = get_args(Subject)
STEPS: tuple[str, ...] = get_args(Step)
BACKENDS: tuple[str, ...] = get_args(Backend)
LAYER_SUBJECTS = ("layer", "causal-layer")
TRAINING_SUBJECTS = ("trainer", "preparation")  # run linformer_kit.training
NO_ATTENTION_DROPOUT = "no attention dropout"  # a variant; fused attention is possible then

OURS = "linformer-kit"
OURS_REVERSIBLE = "linformer-kit-reversible"
OURS_CHECKPOINTING = "linformer-kit-checkpointing"  # with gradient checkpointing
FULL = "full-attention"
FULL_EAGER = "full-attention-eager"
LINFORMER = "linformer"
LINFORMER_PYTORCH = "linformer-pytorch"
BERT_EAGER = "bert-eager"
GEMM = "gemm"
NAMES = (
    *(OURS, FULL, FULL_EAGER, LINFORMER, LINFORMER_PYTORCH, "bert", BERT_EAGER, "modern-bert", "longformer"),
    *("big-bird", "nystromformer", "fnet", "led", "long-t5", GEMM, OURS_REVERSIBLE, OURS_CHECKPOINTING),
)
# the reference of ratios is the first of these that was measured: full attention, then other attention
BASELINES = (
    *(FULL, FULL_EAGER, "bert", BERT_EAGER, "modern-bert", "longformer", "big-bird", "nystromformer", "fnet"),
    *("led", "long-t5", LINFORMER, LINFORMER_PYTORCH),
)
# former names, by column; sweeps accept them with a warning
RENAMED = {"implementation": {"linformer-kit-none": FULL}, "step": {"reading": "prefill"}}

# input sizes of the check of a model: more rows than one chunk of queries or of the feed-forward
CHECKED_BATCH, CHECKED_LENGTH, CHECKED_ROWS = 18, 64, 32


@dataclass(frozen=True)
class Point:
    """One measurement."""

    subject: Subject
    step: Step
    implementation: str
    length: int
    projected_length: int | None  # K, or the slots of a block; None: no projection
    batch: int
    variant: str = ""  # the projection of a layer or encoder (default "linear"), the model of a trainer, the tokenizer
    backend: Backend = "torch"
    block_length: int | None = None  # of causal subjects
    hidden_size: int = 512
    num_heads: int = 8
    num_layers: int = 4
    sharing: str = "headwise"
    target_length: int = 64  # tokens that a decoder reads or generates
    device: str = "cpu"
    head_dim: int | None = None  # default: hidden_size / num_heads
    model: str | None = None  # directory of a saved model, whose configuration the encoder has

    @property
    def projection(self) -> str:
        return "none" if self.projected_length is None else self.variant.split(", ")[0] or "linear"

    @property
    def projection_options(self) -> dict[str, Any]:
        """The projection as options of a layer or a configuration; in a single layer, layerwise sharing is kv."""
        if self.projected_length is None:
            return {"projection": "none"}
        sharing = "kv" if self.sharing == "layerwise" and self.subject in LAYER_SUBJECTS else self.sharing
        sizes = {"slots": self.projected_length, "block_length": self.block_length}
        if self.block_length is None:
            sizes = {"projected_length": self.projected_length}
        return {"projection": self.projection, "sharing": sharing, **sizes}

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    def small(self) -> "Point":
        """The same point with few tokens, for checks."""
        rows = None if self.projected_length is None else min(self.projected_length, CHECKED_ROWS)
        return replace(self, length=CHECKED_LENGTH, target_length=CHECKED_LENGTH, projected_length=rows, batch=1)

    def key(self, phase: str = "") -> dict[str, Any]:
        """The key columns of its row."""
        return {**{name: getattr(self, name) for name in KEYS if name != "phase"}, "phase": phase}

    def __str__(self) -> str:
        words = [self.implementation, self.variant, "" if self.backend == "torch" else self.backend]
        words += [self.subject, self.step, *size_words(self.length, self.projected_length, self.block_length)]
        return ", ".join(word for word in [*words, f"B={self.batch:,}"] if word)


# the columns that identify a row; `phase` is empty for the whole call
KEYS = (
    *("subject", "step", "implementation", "variant", "backend"),
    *("length", "projected_length", "block_length", "batch", "phase"),
)


def current_name(column: str, value: str) -> str:
    """
    >>> current_name("step", "reading"), current_name("step", "forward"), current_name("phase", "reading")
    ('prefill', 'forward', 'reading')
    """
    return RENAMED.get(column, {}).get(value, value)


def size_words(length: int | None, projected_length: int | None, block_length: int | None) -> list[str]:
    """
    >>> size_words(4096, 128, None), size_words(4096, 4, 128)
    (['N=4,096', 'K=128'], ['N=4,096', 'blocks of 128', '4 slots'])
    """
    words = [] if length is None else [f"N={length:,}"]
    if projected_length is not None and block_length is not None:
        return [*words, f"blocks of {block_length}", f"{projected_length} slots"]
    return words if projected_length is None else [*words, f"K={projected_length:,}"]
