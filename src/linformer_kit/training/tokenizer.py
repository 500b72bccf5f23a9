"""Trains or loads tokenizers."""

import re
from collections.abc import Iterable, Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..errors import NEEDS_CODE, UserError, needs_code
from .config import TokenizerConfig

PAD, UNKNOWN, START, END, MASK = "<pad>", "<unk>", "<s>", "</s>", "<mask>"
SPECIAL = [PAD, UNKNOWN, START, END, MASK]

# longer words are split: training BPE on them would take hours
LONGEST_WORD = 200


def load_tokenizer(source: str, key: str = "tokenizer.from") -> PreTrainedTokenizerFast:
    """Load a tokenizer from a directory or from the Hub; `key` is the configuration key, for errors."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # from the Hub, the file system or a parser
        if needs_code(error):
            raise UserError(f"{key} is {source!r}, which {NEEDS_CODE}") from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{key} is {source!r}, which is not a directory with a tokenizer and could not be loaded from the Hub "
            f"({reason}){'; set tokenizer.from to its tokenizer' if key == 'model.from' else ''}"
        ) from None
    if tokenizer.eos_token_id is None and tokenizer.sep_token_id is None:
        raise UserError(
            f"the tokenizer {source!r} has no end token (eos or sep); add one, or remove {key} to train a tokenizer"
        )
    if tokenizer.pad_token is None:
        # any token will do, because padding is masked
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token
    return tokenizer


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer on `texts`.

    >>> tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), [])
    >>> tokenizer("é")["input_ids"], len(tokenizer)
    ([2, 132, 107, 3], 261)
    """
    tokenizer = {"bpe": train_bpe, "bytes": byte_tokenizer, "words": train_words}[config.kind](config, texts)
    if config.lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}",
        pair=f"{START} $A {END} $B:1 {END}:1",
        special_tokens=[(token, SPECIAL.index(token)) for token in (START, END)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=START,
        eos_token=END,
        cls_token=START,
        sep_token=END,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
    )


def train_bpe(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE, which encodes any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + len(SPECIAL)
    if config.vocab_size < least:
        raise UserError(
            f"tokenizer.vocab_size is {config.vocab_size}; byte-level BPE needs at least {least} (bytes and {SPECIAL})"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # a word includes the space before it, and so does the mask that replaces a word
    mask = AddedToken(MASK, lstrip=True, normalized=False, special=True)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=[*SPECIAL[:-1], mask],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(maybe_lowercase(config, split_long_words(texts)), trainer)
    return tokenizer


def byte_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """One token per byte, as in the byte-level tasks of the Long Range Arena: BPE without merges; needs no training."""
    vocabulary = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    # a text is a single word here, so caching words is useless
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, [], cache_capacity=0))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def train_words(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """One token per whitespace-separated word; rare words are unknown."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(
        vocab_size=config.vocab_size, min_frequency=config.min_frequency, special_tokens=SPECIAL, show_progress=False
    )
    # words that equal a special token would be added to the vocabulary a second time
    plain = (" ".join(word for word in text.split() if word not in SPECIAL) for text in maybe_lowercase(config, texts))
    tokenizer.train_from_iterator(plain, trainer)
    return tokenizer


def end_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id of the token at the end of a text."""
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id


def start_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id of the first token of a decoder."""
    candidates = (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id)
    return next(token for token in candidates if token is not None)


def maybe_lowercase(config: TokenizerConfig, texts: Iterable[str]) -> Iterator[str]:
    return (text.lower() if config.lowercase else text for text in texts)


def split_long_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts, with spaces inserted into words longer than `LONGEST_WORD`."""
    too_long = re.compile(rf"\S{{{LONGEST_WORD}}}(?=\S)")
    return (too_long.sub(r"\g<0> ", text) for text in texts)
