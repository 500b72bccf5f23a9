"""The tables of what models learn: which configuration, and what is set beside it for each variant."""

from dataclasses import dataclass, field, replace

KEYS = ("variant", "seed")
VALUES = (
    *("settings", "fingerprint", "parameters", "steps", "best_step", "tokens", "validation"),
    *("test_loss", "test_perplexity", "test_accuracy", "test_bleu", "test_chrf", "test_bleu_beam4", "test_chrf_beam4"),
    *("tokens_per_second", "seconds_per_epoch", "peak_mib"),
)
FULL = "full attention"


@dataclass(frozen=True)
class LearningTable:
    """Runs that differ in nothing but what their variants set, and in their seeds."""

    name: str
    title: str
    config: str  # a shipped one
    metric: str  # perplexity (lower is better), accuracy or bleu
    variants: dict[str, tuple[str, ...]]
    recommended: str  # the variant to set beside full attention where there is room for one
    data: str | None = None  # the folder in --data; None: made by our own code
    settings: tuple[str, ...] = ()  # of all variants
    seeds: int = 1
    repeated: dict[str, int] = field(default_factory=dict)  # variants with another number of seeds
    # variants to be set beside another one than full attention, or beside none, since more than the attention differs
    beside: dict[str, str | None] = field(default_factory=dict)
    beams: tuple[int, ...] = (1,)
    is_on_hub: bool = True  # the configuration names a source that needs no local copy
    sentences: int = 1  # joined into one; to train on, as many as that and fewer
    # the table, and the variant (None: the same one), whose run with the same seed each run goes on from
    starts_from: tuple[str, str | None] | None = None

    def seeds_of(self, variant: str) -> int:
        return self.repeated.get(variant, self.seeds)

    def baseline_of(self, variant: str) -> str | None:
        """What a variant is to be compared with."""
        return None if variant == FULL else self.beside.get(variant, FULL)


# masked LM

# of every step, whatever the length
TOKENS = 2048


def at(length: int, *settings: str) -> tuple[str, ...]:
    """Inputs of this length; K = 128 and a learned E, as in the paper, if nothing else is said."""
    paper = "model.projection=linear"
    return (f"model.max_position_embeddings={length}", f"training.batch_size={TOKENS // length}", paper, *settings)


MASKED_LM = LearningTable(
    name="masked_lm",
    title="Masked LM, WikiText-2, N = 512",
    config="wikitext2_mlm",
    metric="perplexity",
    recommended="dynamic",
    data="wikitext-2",
    settings=("training.epochs=null", "training.steps=2000", "training.evaluate_every=200"),
    variants={
        FULL: at(512, "model.attention=full"),
        "K=128": at(512),
        "K=32": at(512, "model.projected_length=32"),
        "K=64": at(512, "model.projected_length=64"),
        "K=256": at(512, "model.projected_length=256"),
        "dynamic": at(512, "model.projection=dynamic"),
        "conv": at(512, "model.projection=conv"),
        "mean": at(512, "model.projection=mean"),
        "random": at(512, "model.projection=random"),
        "sharing none": at(512, "model.sharing=none"),
        "sharing kv": at(512, "model.sharing=kv"),
        "sharing layerwise": at(512, "model.sharing=layerwise"),
        "N=256": at(256),
        "N=1024": at(1024),
        "N=2048": at(2048),
        "K=128, projection_rate=1": at(512, "training.projection_rate=1"),
        "full attention, local_width=0": at(512, "model.attention=full", "model.local_width=0"),
        "K=128, local_width=0": at(512, "model.local_width=0"),
    },
    repeated={FULL: 3, "K=128": 3, "dynamic": 3},
    beside={
        **dict.fromkeys(("N=256", "N=1024", "N=2048", "full attention, local_width=0")),
        "K=128, local_width=0": "full attention, local_width=0",
    },
)

# classification

NO_ATTENTION_DROPOUT = "model.attention_probs_dropout_prob=0.0"  # which keeps attention from being fused

IMDB = LearningTable(
    name="imdb",
    title="Sentiment, IMDB, N = 1,024",
    config="imdb",
    metric="accuracy",
    recommended="dynamic",
    data="imdb",
    settings=(
        *(NO_ATTENTION_DROPOUT, "training.epochs=1", "training.batch_size=16", "training.learning_rate=5e-4"),
        "training.evaluate_every=371",
    ),
    variants={
        FULL: ("model.attention=full",),
        "dynamic": (),
        "linear": ("model.projection=linear",),
        "dynamic, sharing none": ("model.sharing=none",),
    },
    seeds=3,
    repeated={"linear": 2, "dynamic, sharing none": 1},
)

# 1,600 reviews are too few to learn to read from
MOVIE_REVIEWS = LearningTable(
    name="movie_reviews",
    title="Sentiment, long film reviews, N = 2,048",
    config="imdb",
    metric="accuracy",
    recommended="dynamic",
    data="movie-reviews",
    starts_from=("imdb", None),
    settings=(
        *(NO_ATTENTION_DROPOUT, "model.max_position_embeddings=2048"),
        *("training.epochs=3", "training.batch_size=8", "training.learning_rate=2e-4"),
    ),
    variants={variant: IMDB.variants[variant] for variant in (FULL, "dynamic", "linear")},
    is_on_hub=False,
)

IMDB_BYTES = LearningTable(
    name="imdb_bytes",
    title="Sentiment, IMDB as bytes, N = 2,048",
    config="imdb_bytes",
    metric="accuracy",
    recommended="dynamic, sharing none",
    data="imdb",
    settings=("training.epochs=1", "training.evaluate_every=371"),
    variants={
        FULL: ("model.attention=full",),
        "dynamic": ("model.sharing=headwise",),
        "dynamic, sharing none": (),
        "dynamic, 2 epochs": ("model.sharing=headwise", "training.epochs=2"),  # in the time of one with full attention
    },
    repeated={FULL: 2, "dynamic, sharing none": 2},
    beside={"dynamic, 2 epochs": None},
)

# a third of an epoch
LISTOPS = LearningTable(
    name="listops",
    title="ListOps, N = 2,000",
    config="listops",
    metric="accuracy",
    recommended="dynamic",
    settings=("training.steps=1000", "training.evaluate_every=250"),
    variants={FULL: ("model.attention=full",), "dynamic": ("model.projection=dynamic",), "linear": ()},
)

# causal LM

CAUSAL_LM = LearningTable(
    name="causal_lm",
    title="Causal LM, WikiText-2, N = 1,024",
    config="wikitext2_clm",
    metric="perplexity",
    recommended="block-causal",
    data="wikitext-2",
    variants={FULL: ("model.attention=full",), "block-causal": ()},
    seeds=3,
)

# translation


ENCODER, EVERYWHERE = "Linformer encoder and cross-attention", "Linformer everywhere"
WORDS = "Linformer encoder, a row per word for the decoder"


def joined_variants(rows: int, words: int) -> dict[str, tuple[str, ...]]:
    """What had full attention goes on as a Linformer; up to K tokens `mean` is full attention, so K is less than there are.

    The decoder attends to as many rows as the last layer of the encoder does.
    """
    few, many = f"model.projected_length={rows}", f"model.projected_length=[{rows}, {words}]"
    decoder = ("model.block_length=32", "model.slots=8", "model.projection=mean")
    return {
        FULL: ("model.attention=full",),
        WORDS: (*decoder, many, "model.decoder_attention=full"),
        ENCODER: (*decoder, few, "model.decoder_attention=full"),
        EVERYWHERE: (*decoder, few, "model.decoder_attention=causal"),
    }


TATOEBA = LearningTable(
    name="tatoeba",
    title="Translation, Tatoeba, sentences",
    config="tatoeba_en_de",
    metric="bleu",
    recommended=EVERYWHERE,
    data="tatoeba-en-de",
    is_on_hub=False,  # the copy on the hub has no test split
    variants={
        FULL: ("model.attention=full",),
        ENCODER: ("model.decoder_attention=full",),
        EVERYWHERE: (),
        f"{ENCODER}, dynamic": ("model.decoder_attention=full", "model.projection=dynamic"),
    },
    beams=(1, 4),
)

# what follows what is learnt on few sentences first
PASSAGES = LearningTable(
    name="passages",
    title="Translation, Tatoeba, 4 sentences",
    config="tatoeba_en_de",
    metric="bleu",
    recommended=WORDS,
    data="tatoeba-en-de",
    sentences=4,
    is_on_hub=False,
    starts_from=("tatoeba", FULL),
    settings=(
        *(
            "model.max_position_embeddings=512",
            "training.epochs=2",
            "training.batch_size=48",
            "training.learning_rate=1e-3",
        ),
        "training.evaluate_every=343",
    ),
    variants=joined_variants(rows=16, words=128),
    beams=(1, 4),
)

DOCUMENTS = replace(
    PASSAGES,
    name="documents",
    title="Translation, Tatoeba, 25 sentences",
    variants=joined_variants(rows=64, words=512),
    sentences=25,
    starts_from=("passages", None),
    settings=(
        "training.epochs=3",
        "training.batch_size=16",
        "training.learning_rate=1e-3",
        "training.evaluate_every=396",
    ),
)

TABLES = {
    table.name: table
    for table in (MASKED_LM, IMDB, IMDB_BYTES, MOVIE_REVIEWS, LISTOPS, CAUSAL_LM, TATOEBA, PASSAGES, DOCUMENTS)
}
