"""Tokenizers: trained here, or loaded."""

import re
from collections.abc import Iterable, Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..errors import UserError
from .config import TokenizerConfig

PAD, UNKNOWN, START, END, MASK = "<pad>", "<unk>", "<s>", "</s>", "<mask>"
SPECIAL = [PAD, UNKNOWN, START, END, MASK]

# a run of this many characters without a space is no word; left whole, a BPE trainer would take hours over it
LONGEST_WORD = 200


def load_tokenizer(source: str, key: str = "tokenizer.from") -> PreTrainedTokenizerFast:
    """The tokenizer in a folder, or of that name on the hub; `key` is where the configuration names it."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # transformers raises whatever the hub, the file system or the parser raised
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{key} is {source!r}: neither a folder with a tokenizer nor one that could be loaded from the hub ({reason})"
        ) from None
    if tokenizer.eos_token_id is None and tokenizer.sep_token_id is None:
        raise UserError(
            f"the tokenizer {source!r} has no token that ends a text (eos or sep); add one, or train a tokenizer here"
        )
    if tokenizer.pad_token is None:
        # behind the mask it does not matter which token stands
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token
    return tokenizer


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of the wanted kind, learnt from `texts`.

    >>> tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), [])
    >>> tokenizer("é")["input_ids"], len(tokenizer)
    ([2, 132, 107, 3], 261)
    """
    tokenizer = {"bpe": train_bpe, "bytes": make_bytes, "words": train_words}[config.kind](config, texts)
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
    """Pairs of bytes, merged the more often they occur; knows every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + len(SPECIAL)
    if config.vocab_size < least:
        raise UserError(
            f"tokenizer.vocab_size is {config.vocab_size}; a byte-level BPE has at least {least} (the bytes and {SPECIAL})"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # a word holds the space before it, and so does the mask that stands for a word
    mask = AddedToken(MASK, lstrip=True, normalized=False, special=True)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=[*SPECIAL[:-1], mask],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(lowercase_if(config, with_short_words(texts)), trainer)
    return tokenizer


def make_bytes(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """One token per byte, as in the byte-level tasks of the Long Range Arena: a BPE without merges. Nothing to learn."""
    vocabulary = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    # a text is one word here: nothing would be gained by remembering it
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, [], cache_capacity=0))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def train_words(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """One token per word between spaces; the rarer ones are unknown."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(
        vocab_size=config.vocab_size, min_frequency=config.min_frequency, special_tokens=SPECIAL, show_progress=False
    )
    # a word that is written like a special token is that token; the trainer would count it a second time
    plain = (" ".join(word for word in text.split() if word not in SPECIAL) for text in lowercase_if(config, texts))
    tokenizer.train_from_iterator(plain, trainer)
    return tokenizer


def end_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token that ends a text."""
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id


def start_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token a decoder begins with."""
    candidates = (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id)
    return next(token for token in candidates if token is not None)


def lowercase_if(config: TokenizerConfig, texts: Iterable[str]) -> Iterator[str]:
    return (text.lower() if config.lowercase else text for text in texts)


def with_short_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts, with a space put into every run of characters that is too long to be a word."""
    too_long = re.compile(rf"\S{{{LONGEST_WORD}}}(?=\S)")
    return (too_long.sub(r"\g<0> ", text) for text in texts)
