"""The tables of what models learn: which configuration, and what is set beside it for each variant."""

from dataclasses import dataclass, field

KEYS = ("variant", "seed")
VALUES = (
    *("settings", "fingerprint", "parameters", "steps", "best_step", "tokens", "validation"),
    *("test_loss", "test_perplexity", "test_accuracy", "test_bleu", "test_chrf", "test_bleu_beam4", "test_chrf_beam4"),
    *("tokens_per_second", "seconds_per_epoch", "peak_mib"),
)
FULL = "full attention"
START = "START"
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
    start: str | None = None  # the configuration of a run that all others start from
    seeds: int = 1
    repeated: dict[str, int] = field(default_factory=dict)  # variants with another number of seeds
    beams: tuple[int, ...] = (1,)
    is_on_hub: bool = True  # the configuration names a source that needs no local copy
    is_joined: bool = False  # sentences joined into documents

    def seeds_of(self, variant: str) -> int:
        return self.repeated.get(variant, self.seeds)


# masked LM


def from_start(**model: object) -> tuple[str, ...]:
    """The model that all start from, with other attention."""
    settings = ", ".join(f"{name}: {value}" for name, value in model.items())
    return (f"model={{from: {START}, {settings}}}",)


def linformer_at(length: int, **model: object) -> tuple[str, ...]:
    """A Linformer of this length, from the common start; every step has 4,096 tokens."""
    tokens = 4096
    given = {"projection": "linear", "projected_length": 128, "sharing": "headwise", **model}
    return (*from_start(**given, max_position_embeddings=length), f"training.batch_size={tokens // length}")


def full_at(length: int) -> tuple[str, ...]:
    return (*from_start(attention="full", max_position_embeddings=length), f"training.batch_size={4096 // length}")


MASKED_LM = LearningTable(
    name="masked_lm",
    title="Masked LM on WikiText-2",
    config="wikitext2_mlm",
    metric="perplexity",
    data="wikitext-2",
    start="wikitext2_mlm_short",
    settings=("training.epochs=null", "training.steps=1000", "training.evaluate_every=100", "training.learning_rate=1e-3"),
    variants={
        FULL: full_at(512),
        "K=128": linformer_at(512),
        "K=32": linformer_at(512, projected_length=32),
        "K=64": linformer_at(512, projected_length=64),
        "K=256": linformer_at(512, projected_length=256),
        "sharing none": linformer_at(512, sharing="none"),
        "sharing kv": linformer_at(512, sharing="kv"),
        "sharing layerwise": linformer_at(512, sharing="layerwise"),
        "N=256": linformer_at(256),
        "N=1024": linformer_at(1024),
        "N=2048": linformer_at(2048),
        "dynamic": linformer_at(512, projection="dynamic"),
        "conv": linformer_at(512, projection="conv"),
        "mean": linformer_at(512, projection="mean"),
        "random": linformer_at(512, projection="random"),
    },
    repeated={FULL: 3, "K=128": 3},
)

# classification

NO_ATTENTION_DROPOUT = "model.attention_probs_dropout_prob=0.0"  # which keeps attention from being fused

IMDB = LearningTable(
    name="imdb",
    title="IMDB, BPE, N = 1,024, K = 128",
    config="imdb",
    metric="accuracy",
    data="imdb",
    settings=(
        *(NO_ATTENTION_DROPOUT, "training.epochs=1", "training.batch_size=16", "training.learning_rate=5e-4"),
        "training.evaluate_every=371",
    ),
    variants={
        FULL: ("model.attention=full",),
        "dynamic": (),
        "linear": ("model.projection=linear",),
        "conv": ("model.projection=conv",),
        "mean": ("model.projection=mean",),
    },
    repeated={FULL: 3, "dynamic": 3, "linear": 3},
)

# causal LM

CAUSAL_LM = LearningTable(
    name="causal_lm",
    title="Causal LM on WikiText-2, N = 1,024",
    config="wikitext2_clm",
    metric="perplexity",
    data="wikitext-2",
    variants={FULL: ("model.attention=full",), "block-causal": ()},
    seeds=3,
)

# translation

TATOEBA = LearningTable(
    name="tatoeba",
    title="Tatoeba, English to German, sentences, K = 32",
    config="tatoeba_en_de",
    metric="bleu",
    data="tatoeba-en-de",
    variants={
        FULL: ("model.attention=full",),
        "Linformer encoder and cross-attention": ("model.decoder_attention=full",),
        "Linformer everywhere": (),
    },
    seeds=3,
    beams=(1, 4),
)

TABLES = {table.name: table for table in (MASKED_LM, IMDB, CAUSAL_LM, TATOEBA)}
