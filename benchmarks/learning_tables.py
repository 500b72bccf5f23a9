"""The tables of what models learn: which configuration, and what is set beside it for each variant."""

from dataclasses import dataclass, field

KEYS = ("variant", "seed")
VALUES = (
    *("settings", "fingerprint", "parameters", "steps", "best_step", "tokens", "validation"),
    *("test_loss", "test_perplexity", "test_accuracy", "test_bleu", "test_chrf", "test_bleu_beam4", "test_chrf_beam4"),
    *("tokens_per_second", "seconds_per_epoch", "peak_mib"),
)
FULL = "full attention"
# so many pairs of sentences make a document
DOCUMENTS = 25


@dataclass(frozen=True)
class LearningTable:
    """Runs that differ in nothing but what their variants set, and in their seeds."""

    name: str
    title: str
    config: str  # a shipped one
    metric: str  # perplexity (lower is better), accuracy or bleu
    variants: dict[str, tuple[str, ...]]
    data: str | None = None  # the folder in --data; None: made by our own code
    settings: tuple[str, ...] = ()  # of all variants
    seeds: int = 1
    repeated: dict[str, int] = field(default_factory=dict)  # variants with another number of seeds
    beams: tuple[int, ...] = (1,)
    is_on_hub: bool = True  # the configuration names a source that needs no local copy
    is_joined: bool = False  # sentences joined into documents

    def seeds_of(self, variant: str) -> int:
        return self.repeated.get(variant, self.seeds)


NO_ATTENTION_DROPOUT = "model.attention_probs_dropout_prob=0"  # which keeps attention from being fused
PROJECTIONS = ("linear", "dynamic", "conv", "mean", "random")

IMDB = LearningTable(
    name="imdb",
    title="IMDB, BPE, N = 1,024, K = 128",
    config="imdb",
    metric="accuracy",
    data="imdb",
    settings=(NO_ATTENTION_DROPOUT, "training.epochs=2", "training.evaluate_every=371"),
    variants={
        FULL: ("model.attention=full",),
        "dynamic": (),
        "linear": ("model.projection=linear",),
        "conv": ("model.projection=conv",),
        "mean": ("model.projection=mean",),
    },
    repeated={FULL: 3, "dynamic": 3, "linear": 3},
)

TABLES = {table.name: table for table in (IMDB,)}
