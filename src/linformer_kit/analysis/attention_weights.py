"""The inputs of a spectrum: a model and its tokenizer, pieces of the texts, and the attention weights on each piece."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from ..errors import NEEDS_CODE, UserError, needs_code
from ..models import auto_linformer  # noqa: F401 — registers our models with transformers
from ..training.config import CONFIG_NAME
from ..training.run import open_run


class Encoder(NamedTuple):
    """A model that returns its attention weights, with its name and tokenizer."""

    name: str
    model: Any
    tokenizer: Any


# model and tokenizer


def load_encoder(source: str) -> Encoder:
    """The model of a directory, a run, or a name on the Hub; of an encoder-decoder, its encoder."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every attempt to reach the Hub
    directory = open_run(Path(source))[0].model if Path(source, CONFIG_NAME).is_file() else source
    safe: dict[str, Any] = {"trust_remote_code": False}  # without asking
    try:
        config = transformers.AutoConfig.from_pretrained(directory, **safe)
        auto_class: Any = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModel
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **safe)
        options = {"attn_implementation": "eager", "output_attentions": True, "use_safetensors": True, **safe}
        model, loading_info = auto_class.from_pretrained(directory, output_loading_info=True, **options)
    except Exception as error:  # of the Hub, the file system or a parser
        if needs_code(error):
            raise UserError(f"MODEL is {source!r}, which {NEEDS_CODE}") from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"MODEL is {source!r}: not a run, not a directory with a model (safetensors) and its tokenizer, and it "
            f"cannot be loaded from the Hub ({reason})"
        ) from None
    encoder = (model.get_encoder() if config.is_encoder_decoder else model).eval()
    check_weights(source, model, encoder, loading_info)
    check_not_blockwise(source, encoder.config)
    return Encoder(display_name(source), encoder, tokenizer)


def display_name(source: str) -> str:
    """The last two parts of a directory's path, or the name on the Hub; a whole path would show the user's machine."""
    directory = Path(source)
    return "/".join(directory.resolve().parts[1:][-2:]) if directory.is_dir() else source


def check_not_blockwise(source: str, config: Any) -> None:
    """Reject a Linformer whose weights are not P: on a short text, those of a causal one look like full attention."""
    if config.model_type == "linformer" and config.is_decoder and config.decoder_attention != "full":
        raise UserError(
            f"MODEL is {source!r}, a causal Linformer, whose tokens attend to projected blocks of "
            f"{config.block_length} tokens; choose a model in which every token has a weight for every other"
        )
    if config.model_type == "linformer" and config.window_length:
        raise UserError(
            f"MODEL is {source!r}, a Linformer with window_length={config.window_length}, whose tokens have weights "
            "for their window and for rows; choose a model in which every token has a weight for every other"
        )


def check_weights(source: str, model: nn.Module, encoder: nn.Module, loading_info: dict[str, Any]) -> None:
    """Reject a model if its file lacks weights: randomly initialized attention would be measured."""
    fresh = {*loading_info["missing_keys"], *(name for name, *_ in loading_info["mismatched_keys"])}
    own = {id(parameter) for parameter in encoder.parameters()}
    names = [name for name, parameter in model.named_parameters() if name in fresh and id(parameter) in own]
    if random := [name for name in names if "pooler" not in name]:  # the pooler comes after all attention
        raise UserError(
            f"MODEL is {source!r}, whose file has no weights for {random[0]} and {len(random) - 1} more; "
            "save the complete model"
        )


def longest_input(model: Any) -> int | None:
    """The maximum input length in tokens; None if there is no limit."""
    for name, module in model.named_modules():
        # RoBERTa and its relatives count positions from behind the padding index
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    most = getattr(model.config, "max_position_embeddings", None)
    return most if most is not None and most > 0 else None  # XLNet has −1


# texts and their pieces


def read_text_file(path: Path) -> str:
    """The text of a UTF-8 file; raises if it is not text, or empty."""
    if path.is_dir():
        raise UserError(f"--text is {path}, a directory; pass a file in it")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"--text is {path}, which cannot be read ({error.strerror}); pass a UTF-8 text file") from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(f"--text is {path}, which is not UTF-8 text; pass a plain text file")
    if not text.strip():
        raise UserError(f"--text is {path}, which is empty; pass a file with text")
    return text


def cut_pieces(encoder: Encoder, texts: list[str], length: int, pieces: int) -> list[list[int]]:
    """Up to `pieces` pieces of `length` tokens, spread evenly over the texts; a shorter text is one piece."""
    most = longest_input(encoder.model)
    if most is not None and length > most:
        raise UserError(
            f"--length is {length}, but {encoder.name} accepts at most {most} tokens; pass --length {most} or less"
        )
    before, after = special_tokens(encoder.tokenizer)
    own = length - len(before) - len(after)
    if own < 1:
        special = length - own
        raise UserError(
            f"--length is {length}, of which {special} are special tokens; pass --length {special + 1} or more"
        )
    tokens = [token for text in texts for token in plain_tokens(encoder.tokenizer, text)]
    if not tokens:
        raise UserError(f"the tokenizer of {encoder.name} finds no token in the text; pass another text")
    return [[*before, *tokens[start : start + own], *after] for start in piece_starts(len(tokens), own, pieces)]


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    """All tokens of a text, regardless of the truncation and padding stored with the tokenizer."""
    options = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
    return tokenizer(text, split_special_tokens=True, **options)["input_ids"]  # "</s>" in a text is part of the text


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer adds before and after a text."""
    plain = plain_tokens(tokenizer, "a")
    whole = tokenizer("a", truncation=False, padding=False)["input_ids"]
    place = next(place for place in range(len(whole) + 1) if whole[place : place + len(plain)] == plain)
    return whole[:place], whole[place + len(plain) :]


def piece_starts(tokens: int, own: int, pieces: int) -> list[int]:
    """The starts of pieces of `own` tokens: without overlap, including the beginning and the end of the text.

    >>> piece_starts(100, 10, 4), piece_starts(25, 10, 4), piece_starts(5, 10, 4)
    ([0, 30, 60, 90], [0, 15], [0])
    """
    count = max(1, min(pieces, tokens // own))
    return [0] if count == 1 else [number * (tokens - own) // (count - 1) for number in range(count)]


# attention


@torch.inference_mode()
def attention_on(encoder: Encoder, piece: list[int]) -> list[Tensor]:
    """The attention weights of every layer on a piece: (H, N, N), or (H, N, K) for a Linformer."""
    try:
        output = encoder.model(input_ids=torch.tensor([piece]))
    except Exception as error:  # differs from model to model
        raise UserError(f"{encoder.name} cannot be run on text alone: {' '.join(str(error).split())}") from error
    layers = getattr(output, "attentions", None)
    if not layers or any(layer is None for layer in layers):
        raise UserError(
            f"{encoder.name}, a {type(encoder.model).__name__}, returns no attention weights; "
            "choose a model with softmax attention in every layer"
        )
    for number, layer in enumerate(layers, start=1):
        check_shape(encoder, number, tuple(layer.shape), len(piece))
        if not layer.isfinite().all():
            raise UserError(
                f"{encoder.name} has attention weights in layer {number} that are not finite; its file is damaged"
            )
    return [layer[0] for layer in layers]


def check_shape(encoder: Encoder, number: int, shape: tuple[int, ...], length: int) -> None:
    """Reject weights over windows or blocks, which look like a matrix but are not the matrix P."""
    is_projected = encoder.model.config.model_type == "linformer"
    if len(shape) != 4 or shape[2] != length or (shape[3] != length and not is_projected):
        raise UserError(
            f"{encoder.name}, a {type(encoder.model).__name__}, has attention weights of shape {shape} in layer "
            f"{number}, not {length} × {length} per head; choose a model in which every token has a weight for every "
            "other"
        )
