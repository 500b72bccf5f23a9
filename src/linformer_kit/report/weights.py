"""What a model attends to: loads a model, tokenizes a text, and computes attention weights and E."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..analysis.attention_weights import read_text_file
from ..errors import NEEDS_CODE, UserError, needs_code
from ..models.auto_linformer import MODELS
from ..models.configuration_linformer import LinformerConfig
from ..models.modeling_linformer import LinformerForCausalLM, LinformerForMaskedLM, LinformerModel
from ..models.modeling_linformer_seq2seq import LinformerForConditionalGeneration
from ..models.projection_linformer import Projection
from ..models.window_linformer import weights_on_tokens
from ..plots import attention
from ..plots.attention import drawable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..training.config import RunConfig

MAX_TOKENS = 1024  # with more, a row is thinner than a pixel, and full attention does not fit into memory
MAX_LABEL = 14  # characters of a token
MAX_EXCERPT = 60  # characters of the text in a footnote
SUFFIX = re.compile(r"\.[A-Za-z]\w{0,4}")


@dataclass(frozen=True)
class LoadedModel:
    """A model, and the stack of layers that is shown: its encoder, or the decoder of a causal LM."""

    name: str
    model: Any
    folder: Path
    config: "RunConfig | None"  # of a run

    @property
    def is_seq2seq(self) -> bool:
        return isinstance(self.model, LinformerForConditionalGeneration)

    @property
    def stack(self) -> LinformerModel:
        return self.model.encoder if self.is_seq2seq else self.model.base_model


@dataclass(frozen=True)
class Tokens:
    """A tokenized text."""

    inputs: dict[str, Tensor]
    labels: list[str]
    truncated: int  # tokens that do not fit


def load_model(folder: Path, config: "RunConfig | None") -> LoadedModel:
    """The model of a run, or a saved model."""
    from ..training.load import quiet_libraries

    quiet_libraries()
    name = folder.resolve().name
    if config is not None:
        from ..training.run import open_run

        folder = open_run(folder)[0].model
    architecture = (LinformerConfig.from_pretrained(folder).architectures or [LinformerModel.__name__])[0]
    classes: dict[str, Any] = {each.__name__: each for each in MODELS.values()}
    if architecture not in classes:
        raise UserError(f"{folder} contains a {architecture}; known architectures are {', '.join(classes)}")
    try:
        model = classes[architecture].from_pretrained(folder, trust_remote_code=False, use_safetensors=True).eval()
    except Exception as error:  # of safetensors, JSON or transformers
        raise UserError(f"{folder} cannot be loaded: {' '.join(str(error).split())}") from error
    return LoadedModel(name, model, folder, config)


# text


def read_text(text: str | None, reason: str) -> str:
    """The value of --text, or the text of the file it names."""
    from ..training.predict import path_exists

    if text is None:
        raise UserError(f"{reason}; pass --text, a text or a text file")
    path = Path(text)
    if text.strip() and path_exists(path.exists):
        return read_text_file(path)
    if not re.search(r"\s", text) and ("/" in text or SUFFIX.fullmatch(path.suffix)):  # probably a path
        raise UserError(f"--text is {text!r}: there is no such file; a single word without / and suffix is a text")
    return text


def tokenize(model: LoadedModel, text: str) -> Tokens:
    """(1, N) ids as in training, truncated to what the model takes."""
    from transformers import AutoTokenizer

    from ..training.encoding import classified_texts, tokenize_with_end
    from ..training.predict import require_pair, split_pair

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.folder, trust_remote_code=False)
    except Exception as error:  # of the file system or a parser
        if needs_code(error):
            raise UserError(f"the tokenizer in {model.folder} {NEEDS_CODE}") from None
        raise UserError(f"the tokenizer in {model.folder} cannot be loaded: {' '.join(str(error).split())}") from None
    longest = min(model.stack.config.max_position_embeddings, MAX_TOKENS)
    encoded: dict[str, list]
    if isinstance(model.model, LinformerForCausalLM | LinformerForMaskedLM | LinformerForConditionalGeneration):
        ids, lengths = tokenize_with_end(tokenizer, [text], longest)
        encoded = {"input_ids": ids, "length": lengths}
    else:
        pairs = None
        if model.config is not None and model.config.data.columns.pair:
            both = split_pair(text.rstrip("\n"), model.config)
            text, pairs = both.text, [require_pair(both)]
        encoded = classified_texts(tokenizer, [text], pairs, longest)
    (ids,), (length,) = encoded["input_ids"], encoded.pop("length")
    if not ids:
        raise UserError("--text has no tokens; pass a longer text")
    inputs = {name: torch.tensor(rows) for name, rows in encoded.items()}
    return Tokens(inputs, token_labels(tokenizer, ids), length - len(ids))


def token_labels(tokenizer: Any, ids: list[int]) -> list[str]:
    """Each token in visible characters; a byte that is only part of a character as a number."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}

    def label(token: int) -> str:
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if "\ufffd" in text:
            raw = tokenizer.convert_ids_to_tokens(token)
            text = "".join(f"\\x{bytes_of[character]:02x}" for character in raw if character in bytes_of) or text
        text = drawable(text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥"))
        return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"

    return [label(token) for token in ids]


def excerpt(text: str) -> str:
    shown = drawable(" ".join(text.split()))
    return shown if len(shown) <= MAX_EXCERPT else f"{shown[:MAX_EXCERPT].rstrip()}…"


# heads


def draw_heads(model: LoadedModel, text: str | None) -> "Figure":
    """The attention weights of every head on a text."""
    text = read_text(text, "heads show attention on a text")
    tokens = tokenize(model, text)
    with torch.no_grad():
        output = model.stack(**tokens.inputs, output_attentions=True, use_cache=False)
    config, attentions = model.stack.config, output.attentions
    if config.window_length:
        attentions = [weights_on_tokens(each, config.window_length, config.global_tokens) for each in attentions]
    layers_HNK = [weights[0].float().numpy() for weights in attentions]
    # in a decoder, the slots of finished blocks come before the tokens, and so do the rows beside a window
    sees_tokens = config.is_decoder or config.window_length > 0
    slots = [weights.shape[2] - weights.shape[1] if sees_tokens else 0 for weights in layers_HNK]
    note = f"{describe_columns(model, tokens, slots)} Text: “{excerpt(text)}”."
    return attention.draw_heads(layers_HNK, tokens.labels, slots, note)


def describe_columns(model: LoadedModel, tokens: Tokens, slots: list[int]) -> str:
    config, count = model.stack.config, len(tokens.labels)
    fewest, most = min(slots), max(slots)
    number = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    if config.window_length:
        rows = f"the {number} slots that stand for the tokens outside of the window, a line, " if most else ""
        columns = f"{rows}the {count:,} tokens"
    elif most > 0:
        columns = f"the {number} slots of finished blocks, a line, the {count:,} tokens"
    elif config.is_decoder or config.projection == "none":
        columns = f"the {count:,} tokens attended to"
    else:
        columns = "the K slots that all tokens are projected to"
    which = " of the encoder" if model.is_seq2seq else ""
    cut = f" Only the first {count:,} of {count + tokens.truncated:,} tokens." if tokens.truncated > 0 else ""
    return f"Attention weights{which}: each row, a token, sums to 1. Columns: {columns}.{cut}"


# slots


def draw_slots(model: LoadedModel, text: str | None) -> "Figure":
    """The columns of E: what each slot is made of."""
    config = model.stack.config
    which = "E (keys) of the encoder" if model.is_seq2seq else "E (keys)"
    of_text = ", as computed for the text" if depends_on_input(config) else ""
    note = f"Each curve is a column of {which}{of_text}: how much each position adds to the slot."
    xlabel = "position in the block" if config.is_decoder else "position"
    return attention.draw_slots(titled_matrices(model, text), xlabel, note)


def depends_on_input(config: LinformerConfig) -> bool:
    return Projection.kinds[config.projection].matrix_depends_on == "input"


def titled_matrices(model: LoadedModel, text: str | None) -> list[tuple[str, np.ndarray]]:
    """E of each layer with a title, (N, G, K): G is 1 where heads share it; one E where all layers have the same."""
    config, kind = model.stack.config, Projection.kinds[model.stack.config.projection]
    if config.projection == "none" or (config.is_decoder and config.decoder_attention == "full"):
        raise UserError(f"{model.name} has full attention and no slots to draw; draw its weights with --what heads")
    if 0 in config.projected_lengths:
        raise UserError(
            f"{model.name} has projected_length={config.projected_length}: layers with a window only have no slots to "
            "draw; draw their weights with --what heads"
        )
    if kind.matrix_depends_on is None:
        names = ", ".join(Projection.kind_names("matrix_depends_on"))
        raise UserError(
            f"projection={config.projection} has no E: it {kind.why_no_matrix}; slots can be drawn for {names}, "
            "heads for all"
        )
    matrices = input_matrices(model, text) if depends_on_input(config) else fixed_matrices(model.stack)
    if len(matrices) == 1 or all(np.array_equal(E, matrices[0]) for E in matrices):
        return [("all layers" if len(model.stack.layers) > 1 else "layer 1", matrices[0])]
    return [(f"layer {number}", E) for number, E in enumerate(matrices, start=1)]


def fixed_matrices(stack: LinformerModel) -> list[np.ndarray]:
    """(N, G, K) of each layer, where E does not depend on the input."""
    layers: Any = [layer.attention for layer in stack.layers]
    projections = [(stack.projection or layer.projection).cut(layer.projected_length) for layer in layers]
    length = stack.config.block_length if stack.config.is_decoder else stack.config.max_position_embeddings
    with torch.no_grad():
        return [projection.key_matrix(torch.zeros(1, length, 1)).float().numpy() for projection in projections]


def input_matrices(model: LoadedModel, text: str | None) -> list[np.ndarray]:
    """(N, G, K) of each layer for a text."""
    stack, name = model.stack, model.stack.config.projection
    if stack.config.is_decoder:
        raise UserError(
            f"projection={name} in a decoder computes E for each block, so slots cannot be drawn; use --what heads"
        )
    tokens = tokenize(model, read_text(text, f"projection={name} computes E from the input"))
    found: list[np.ndarray] = []

    def keep(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        projection = (stack.projection or layer.projection).cut(layer.projected_length)
        found.append(projection.key_matrix(inputs[0]).float().numpy())

    layers: Any = stack.layers
    for layer in layers:
        layer.attention.register_forward_pre_hook(keep)
    with torch.no_grad():
        stack(**tokens.inputs)
    return found
