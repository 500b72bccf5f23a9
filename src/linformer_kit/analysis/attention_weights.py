"""What a spectrum is made of: texts, a model and its tokenizer, pieces of the texts, and the attention weights on each."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from ..errors import UserError
from ..models import auto_linformer  # noqa: F401 — lets transformers load our models
from ..training.config import CONFIG_NAME
from ..training.run import open_run


class Encoder(NamedTuple):
    """A model that gives its attention weights, and what goes with it."""

    name: str
    model: Any
    tokenizer: Any


# model and tokenizer


def load_encoder(source: str) -> Encoder:
    """The model in a folder, of a run, or of that name on the hub; of an encoder-decoder its encoder."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # which tells of every attempt to reach the hub
    folder = open_run(Path(source))[0].model if Path(source, CONFIG_NAME).is_file() else source
    safely: dict[str, Any] = {"trust_remote_code": False}  # and no question about it
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **safely)
        kind: Any = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModel
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **safely)
        options = {"attn_implementation": "eager", "output_attentions": True, "use_safetensors": True, **safely}
        model, found = kind.from_pretrained(folder, output_loading_info=True, **options)
    except Exception as error:  # transformers raises whatever the hub, the file system or the parser raised
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"MODEL is {source!r}: no run, no folder with a model (safetensors) and its tokenizer, and none that could be loaded "
            f"from the hub ({reason})"
        ) from None
    encoder = (model.get_encoder() if config.is_encoder_decoder else model).eval()
    check_weights(source, model, encoder, found)
    check_blocks(source, encoder.config)
    return Encoder(name_of(source), encoder, tokenizer)


def name_of(source: str) -> str:
    """The end of the path of a folder, which says enough, and not whose machine it is; else the name on the hub."""
    folder = Path(source)
    return "/".join(folder.resolve().parts[1:][-2:]) if folder.is_dir() else source


def check_blocks(source: str, config: Any) -> None:
    """Refuse a causal Linformer: on a text that is shorter than a block, its weights would look like those of full attention."""
    if config.model_type == "linformer" and config.is_decoder and config.decoder_attention != "full":
        raise UserError(
            f"MODEL is {source!r}, a causal Linformer, whose tokens attend to shortened blocks of {config.block_length} tokens; "
            "choose a model in which every token has a weight for every other"
        )


def check_weights(source: str, model: nn.Module, encoder: nn.Module, found: dict[str, Any]) -> None:
    """Refuse a model of which some weights are not from its file: what it attends to would be chance."""
    fresh = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    own = {id(parameter) for parameter in encoder.parameters()}
    names = [name for name, parameter in model.named_parameters() if name in fresh and id(parameter) in own]
    if chance := [name for name in names if "pooler" not in name]:  # which comes after all attention
        raise UserError(
            f"MODEL is {source!r}, whose file has no weights for {chance[0]} and {len(chance) - 1} more; save it whole"
        )


def longest_input(model: Any) -> int | None:
    """How many tokens a model takes; None if there is no limit."""
    for name, module in model.named_modules():
        # in the family of RoBERTa the positions are counted from behind that of the padding
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    most = getattr(model.config, "max_position_embeddings", None)
    return most if most is not None and most > 0 else None  # XLNet says −1


# pieces


def cut_pieces(encoder: Encoder, texts: list[str], length: int, pieces: int) -> list[list[int]]:
    """Up to `pieces` pieces of `length` tokens, spread evenly over the texts, which follow each other; one shorter one of a text
    that is shorter."""
    most = longest_input(encoder.model)
    if most is not None and length > most:
        raise UserError(
            f"--length is {length}, but {encoder.name} takes at most {most} tokens; give --length {most} or less"
        )
    before, after = special_tokens(encoder.tokenizer)
    own = length - len(before) - len(after)
    if own < 1:
        special = length - own
        raise UserError(
            f"--length is {length}, of which {special} are special tokens; give --length {special + 1} or more"
        )
    tokens = [token for text in texts for token in plain_tokens(encoder.tokenizer, text)]
    if not tokens:
        raise UserError(f"the tokenizer of {encoder.name} finds no token in the text; give another text")
    return [[*before, *tokens[start : start + own], *after] for start in starts(len(tokens), own, pieces)]


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text: all of them, whatever truncation and padding are stored with the tokenizer."""
    plainly = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
    return tokenizer(text, split_special_tokens=True, **plainly)["input_ids"]  # "</s>" in a text is a part of the text


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    plain = plain_tokens(tokenizer, "a")
    whole = tokenizer("a", truncation=False, padding=False)["input_ids"]
    place = next(place for place in range(len(whole) + 1) if whole[place : place + len(plain)] == plain)
    return whole[:place], whole[place + len(plain) :]


def starts(tokens: int, own: int, pieces: int) -> list[int]:
    """Where pieces of `own` tokens begin, so that none overlap and the first and the last ones of the text are in.

    >>> starts(100, 10, 4), starts(25, 10, 4), starts(5, 10, 4)
    ([0, 30, 60, 90], [0, 15], [0])
    """
    count = max(1, min(pieces, tokens // own))
    return [0] if count == 1 else [number * (tokens - own) // (count - 1) for number in range(count)]


# attention


@torch.inference_mode()
def attention_on(encoder: Encoder, piece: list[int]) -> list[Tensor]:
    """The attention weights of every layer on a piece: (H, N, N), of a Linformer (H, N, K)."""
    try:
        output = encoder.model(input_ids=torch.tensor([piece]))
    except Exception as error:  # each of the models of transformers has errors of its own
        raise UserError(f"{encoder.name} cannot be run on text alone: {' '.join(str(error).split())}") from error
    layers = getattr(output, "attentions", None)
    if not layers or any(layer is None for layer in layers):
        raise UserError(
            f"{encoder.name}, a {type(encoder.model).__name__}, gives no attention weights, so they have no spectrum; "
            "choose a model with softmax attention in every layer"
        )
    for number, layer in enumerate(layers, start=1):
        check_shape(encoder, number, tuple(layer.shape), len(piece))
        if not layer.isfinite().all():
            raise UserError(
                f"{encoder.name} gives attention weights in layer {number} that are no numbers; its weights are damaged"
            )
    return [layer[0] for layer in layers]


def check_shape(encoder: Encoder, number: int, shape: tuple[int, ...], length: int) -> None:
    """Refuse weights over windows, blocks or shortened texts, which look like a matrix but are not the matrix P."""
    config = encoder.model.config
    is_projected = config.model_type == "linformer"
    if len(shape) != 4 or shape[2] != length or (shape[3] != length and not is_projected):
        raise UserError(
            f"{encoder.name}, a {type(encoder.model).__name__}, gives attention weights of the shape {shape} in layer {number}, "
            f"which are not {length} × {length} for each head; choose a model in which every token has a weight for every other"
        )
