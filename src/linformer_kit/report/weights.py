"""What a model looks at: attention weights on a text, and the slots of E."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..models.auto_linformer import MODELS
from ..models.configuration_linformer import LinformerConfig
from ..models.modeling_linformer import LinformerForCausalLM, LinformerForMaskedLM, LinformerModel
from ..models.modeling_linformer_seq2seq import LinformerForConditionalGeneration
from ..models.projection_linformer import DynamicProjection, LinearProjection, MeanProjection, Projection
from ..plots import style
from ..plots.style import PALETTE
from .texts import read_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..training.config import RunConfig

COLOUR_MAP = "cividis"
MOST_TOKENS = 1024  # beyond, a row of a heat map is thinner than a pixel, and full attention does not fit into memory
MOST_LABELS = 64
LONGEST_LABEL = 14
INCHES_PER_LABEL = 0.125
INCHES_PER_SLOT = 0.13
TALLEST = 16.0  # inches of all heat maps of a head, one below the other
TALLEST_SLOTS = 24.0
MOST_SLOTS = 32
MOST_HEADS = 3  # of matrices for each head
FONT = "DejaVu Sans"  # which comes with matplotlib
SUFFIX = re.compile(r"\.[A-Za-z]\w{0,4}")
BEGINNING = 60  # characters of the text in a footnote


@dataclass(frozen=True)
class Loaded:
    """A model to look into."""

    name: str
    whole: Any
    stack: LinformerModel  # its encoder; of a causal LM the decoder
    folder: Path
    config: "RunConfig | None"  # of a run


@dataclass(frozen=True)
class Tokens:
    """A text as the model reads it."""

    inputs: dict[str, Tensor]
    labels: list[str]
    left_out: int


def load(folder: Path, config: "RunConfig | None") -> Loaded:
    """The model of a run, or one that was saved alone."""
    from ..training.train import quiet_libraries

    quiet_libraries()
    name = folder.resolve().name
    if config is not None:
        from ..training.run import open_run

        folder = open_run(folder)[0].model
    architecture = (LinformerConfig.from_pretrained(folder).architectures or [LinformerModel.__name__])[0]
    classes: dict[str, Any] = {each.__name__: each for each in MODELS.values()}
    if architecture not in classes:
        raise UserError(f"{folder} holds a {architecture}; known are {', '.join(classes)}")
    try:
        whole = classes[architecture].from_pretrained(folder).eval()
    except Exception as error:  # safetensors, JSON and transformers each have errors of their own
        raise UserError(f"{folder} cannot be loaded: {' '.join(str(error).split())}") from error
    seq2seq = isinstance(whole, LinformerForConditionalGeneration)
    stack = whole.encoder if seq2seq else whole if isinstance(whole, LinformerModel) else whole.model
    return Loaded(name, whole, stack, folder, config)


# a text


def text_of(given: str | None, why: str) -> str:
    """A text, or that of a file."""
    from ..training.predict import is_there

    if given is None:
        raise UserError(f"{why}; give --text, a text or a file with one")
    path = Path(given)
    if given.strip() and is_there(path.exists):
        return read_text(path)
    if not re.search(r"\s", given) and ("/" in given or SUFFIX.fullmatch(path.suffix)):  # hardly a text
        raise UserError(
            f"--text is {given!r}: there is no such file; a text of one word has neither / nor an ending like .md"
        )
    return given


def tokenized(model: Loaded, text: str) -> Tokens:
    """(1, N) ids as in training, cut to what the model takes."""
    from transformers import AutoTokenizer

    from ..training.predict import needed_pair, split_pair
    from ..training.tokens import classified_texts, ended

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.folder)
    except Exception as error:  # transformers raises whatever the file system or the parser raised
        raise UserError(
            f"{model.folder} has no tokenizer that could be loaded: {' '.join(str(error).split())}"
        ) from None
    longest = min(model.stack.config.max_position_embeddings, MOST_TOKENS)
    encoded: dict[str, list]
    if isinstance(model.whole, LinformerForCausalLM | LinformerForMaskedLM | LinformerForConditionalGeneration):
        ids, lengths = ended(tokenizer, [text], longest)
        encoded = {"input_ids": ids, "length": lengths}
    else:
        pairs = None
        if model.config is not None and model.config.data.columns.pair:
            both = split_pair(text.rstrip("\n"), model.config)
            text, pairs = both.text, [needed_pair(both)]
        encoded = classified_texts(tokenizer, [text], pairs, longest)
    (ids,), (length,) = encoded["input_ids"], encoded.pop("length")
    if not ids:
        raise UserError("--text has no token at all; give a longer one")
    inputs = {name: torch.tensor(rows) for name, rows in encoded.items()}
    return Tokens(inputs, labels_of(tokenizer, ids), length - len(ids))


def labels_of(tokenizer: Any, ids: list[int]) -> list[str]:
    """Each token in characters that can be seen; a byte that is only a part of one as a number."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}

    def label(token: int) -> str:
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if "\ufffd" in text:
            raw = tokenizer.convert_ids_to_tokens(token)
            text = "".join(f"\\x{bytes_of[character]:02x}" for character in raw if character in bytes_of) or text
        text = drawable(text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥"))
        return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"

    return [label(token) for token in ids]


def drawable(text: str) -> str:
    """A text with boxes for what the font does not have."""
    from matplotlib.font_manager import findfont, get_font

    has = get_font(findfont(FONT)).get_charmap()
    return "".join(character if character.isprintable() and ord(character) in has else "□" for character in text)


# heads


def draw_heads(model: Loaded, text: str | None) -> "Figure":
    """Attention weights on a text: a grid of layers × heads, of heat maps with a row for each token and a column for each slot."""
    from matplotlib.colors import PowerNorm

    text = text_of(text, "heads show attention on a text")
    tokens = tokenized(model, text)
    layers = attention_weights(model.stack, tokens)
    count, heads = len(layers), layers[0].shape[0]
    width = max(5.0, min(9.5, 1.6 + 2.2 * heads))
    height = max(1.1, min(INCHES_PER_LABEL * min(len(tokens.labels), MOST_LABELS), TALLEST / count))
    # beside the panels themselves, titles, numbers and footnote need room
    figure, grid = style.new_figure(count, heads, width=width, height=height + 0.12 + 0.9 / count)
    lowest, highest = min(float(weights.min()) for weights in layers), max(float(weights.max()) for weights in layers)
    scale = PowerNorm(0.5, lowest, highest)  # one for all, in which a single weight near 1 does not blacken the others
    for place, axes in enumerate(grid):
        layer, head = divmod(place, heads)
        image = axes.imshow(layers[layer][head], COLOUR_MAP, aspect="auto", norm=scale)
        if (slots := slots_before_tokens(model.stack.config, layers[layer])) > 0:
            axes.axvline(slots - 0.5, color="white", linewidth=1)
        if layer == 0:
            axes.set_title(f"head {head + 1}", fontsize=10)
        label_columns(axes, layers[layer].shape[-1], is_last=layer == count - 1)
        axes.set_yticks([])
        if head == 0:
            axes.set_ylabel(f"layer {layer + 1}", fontsize=10)
            label_rows(axes, tokens.labels, height)
    bar = figure.colorbar(
        image, ax=grid, shrink=min(1.0, 3.5 / (height * count)), anchor=(0.0, 1.0), pad=0.01, aspect=30
    )
    bar.outline.set_visible(False)
    said = f"{what_columns_are(model, tokens, layers[0])} Text: “{beginning_of(text)}”."
    style.footnote(figure, textwrap.fill(said, int(13 * width)))
    return figure


def beginning_of(text: str) -> str:
    shown = drawable(" ".join(text.split()))
    return shown if len(shown) <= BEGINNING else f"{shown[:BEGINNING].rstrip()}…"


def attention_weights(stack: LinformerModel, tokens: Tokens) -> list[np.ndarray]:
    """(H, N, K) for each layer."""
    with torch.no_grad():
        output = stack(**tokens.inputs, output_attentions=True, use_cache=False)
    return [weights[0].float().numpy() for weights in output.attentions]


def label_rows(axes: "Axes", labels: list[str], height: float) -> None:
    """Every token, or every so many, as there is room."""
    step = -(-len(labels) // max(1, int(height / INCHES_PER_LABEL + 0.01)))
    shown = range(0, len(labels), step)
    axes.set_yticks(shown, [labels[place] for place in shown], fontsize=8, family=FONT, parse_math=False)
    axes.tick_params(axis="y", length=2, pad=2)


def label_columns(axes: "Axes", count: int, is_last: bool) -> None:
    """The first and the last column, below the last row of panels."""
    axes.set_xticks(
        [0, count - 1] if is_last and count > 1 else [],
        ["1", f"{count:,}"] if is_last and count > 1 else [],
        fontsize=8,
    )
    axes.tick_params(axis="x", length=2, pad=2)


def slots_before_tokens(config: LinformerConfig, weights_HNK: np.ndarray) -> int:
    """How many columns are slots of finished blocks, which in a decoder stand before those of the tokens."""
    return weights_HNK.shape[2] - weights_HNK.shape[1] if config.is_decoder else 0


def what_columns_are(model: Loaded, tokens: Tokens, weights_HNK: np.ndarray) -> str:
    config, count = model.stack.config, len(tokens.labels)
    if (slots := slots_before_tokens(config, weights_HNK)) > 0:
        columns = f"the {slots:,} slots of finished blocks, a line, the {count:,} tokens"
    elif config.is_decoder or config.projection == "none":
        columns = f"the {count:,} tokens attended to"
    else:
        columns = "the slots that stand for all tokens"
    which = " of the encoder" if isinstance(model.whole, LinformerForConditionalGeneration) else ""
    cut = f" Only the first {count:,} of {count + tokens.left_out:,} tokens." if tokens.left_out > 0 else ""
    return f"Attention weights{which}: each row, a token, sums to 1. Columns: {columns}.{cut}"


# slots


def draw_slots(model: Loaded, text: str | None) -> "Figure":
    """The columns of E as curves over the positions, one above the other: what each slot is made of."""
    panels = matrices(model, text)
    per_head = panels[0][1].shape[1] > 1
    columns = min(MOST_HEADS, panels[0][1].shape[1]) if per_head else min(3, len(panels))
    rows = len(panels) if per_head else -(-len(panels) // columns)
    # of many layers fewer slots each
    most = min(MOST_SLOTS, max(8, int((TALLEST_SLOTS / rows - 0.8) / INCHES_PER_SLOT)))
    height = INCHES_PER_SLOT * min(most, max(E.shape[-1] for _, E in panels)) + 0.8 + 0.3 / rows
    figure, grid = style.new_figure(rows, columns, width=6.0 if columns == 1 else 9.5, height=max(2.0, height))
    places = [(title, E, head) for title, E in panels for head in range(min(columns, E.shape[1]) if per_head else 1)]
    for axes, (title, E_NGK, head) in zip(grid, places, strict=False):
        named = f"{title}, head {head + 1}" if per_head else title
        draw_ridges(axes, named, E_NGK[:, head], most)
    for axes in grid[len(places) :]:
        axes.remove()
    for place, axes in enumerate(figure.axes):
        if place % columns == 0:
            axes.set_ylabel("slot")
        axes.set_xlabel("position in the block" if model.stack.config.is_decoder else "position")
    style.footnote(figure, what_curves_are(model, panels[0][1].shape[1]))
    return figure


def what_curves_are(model: Loaded, heads: int) -> str:
    which = "E (keys) of the encoder" if isinstance(model.whole, LinformerForConditionalGeneration) else "E (keys)"
    of_text = ", as computed for the text" if model.stack.config.projection == "dynamic" else ""
    some = f" The first {MOST_HEADS} of {heads} heads." if heads > MOST_HEADS else ""
    return f"Each curve is a column of {which}{of_text}: how much each position adds to the slot.{some}"


def draw_ridges(axes: "Axes", title: str, E_NK: np.ndarray, most: int) -> None:
    """One curve per slot, slot 1 on top; all in one scale, the distance being two thirds of the highest."""
    E_NK, count = E_NK.astype(float), E_NK.shape[1]
    slots = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
    distance = float(np.abs(E_NK[:, slots]).max()) / 1.5 or 1.0
    positions = np.arange(1, len(E_NK) + 1)
    for rank, slot in enumerate(slots):
        base, colour = -rank * distance, PALETTE[rank % 2]  # two colours in turn tell neighbours apart
        axes.fill_between(positions, base, E_NK[:, slot] + base, step="mid", color=colour, alpha=0.25, linewidth=0)
        axes.plot(positions, E_NK[:, slot] + base, drawstyle="steps-mid", color=colour, linewidth=0.8)
    how_many = f"K={count}" if len(slots) == count else f"{len(slots)} of K={count}"
    axes.set_title(f"{title} ({how_many})", loc="left", fontsize=10, fontweight="bold")
    axes.set_yticks([-rank * distance for rank in range(len(slots))], [str(slot + 1) for slot in slots], fontsize=7)
    axes.margins(x=0.01, y=0.03)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.7)


def matrices(model: Loaded, text: str | None) -> list[tuple[str, np.ndarray]]:
    """E of each layer with its title, (N, G, K): G is 1 where all heads share it; one E for all layers if they do."""
    projections = projections_of(model.stack)
    kind = model.stack.config.projection
    if model.stack.config.is_decoder and model.stack.config.decoder_attention == "full":
        kind = "none"
    if kind == "none":
        raise UserError(f"{model.name} has full attention: there are no slots to draw; --what heads draws its weights")
    if kind == "dynamic":
        found = dynamic_matrices(model, projections, text)
    else:
        found = [matrix_of(projection, model.stack.config) for projection in projections]
    if kind == "mean" and len({E.shape for E in found}) == 1:
        found = found[:1]  # there is nothing to learn that could make layers differ
    if len(found) < len(model.stack.layers):
        return [("all layers", found[0])]
    return [(f"layer {number}", E) for number, E in enumerate(found, start=1)]


def projections_of(stack: LinformerModel) -> list[Projection]:
    """Those of the layers, or the one that they share."""
    if stack.projection is not None and stack.config.projection != "dynamic":
        return [stack.projection]
    layers: Any = stack.layers
    return [stack.projection or layer.attention.projection for layer in layers]


def matrix_of(projection: Projection, config: LinformerConfig) -> np.ndarray:
    """(N, G, K) of a projection whose E does not depend on the input."""
    with torch.no_grad():
        if isinstance(projection, LinearProjection):
            return projection.weight[:, projection.of_keys()].float().numpy()
        if isinstance(projection, MeanProjection):
            length = config.block_length if config.is_decoder else config.max_position_embeddings
            return projection(torch.eye(length)[None]).rows_BMKC[0].permute(2, 0, 1).numpy()  # Eᵀ I is Eᵀ
    why = (
        "takes the largest value of each channel"
        if config.projection == "max"
        else "has its own weights for each channel"
    )
    raise UserError(
        f"projection={config.projection} has no E: it {why} in windows; slots can be drawn of linear, random, dynamic "
        "and mean, heads of all"
    )


def dynamic_matrices(model: Loaded, projections: list[Projection], text: str | None) -> list[np.ndarray]:
    """(N, G, K) of each layer for a text."""
    if model.stack.config.is_decoder:
        raise UserError(
            "projection=dynamic of a decoder computes E for each block anew; slots cannot be drawn of it, but heads can"
        )
    tokens = tokenized(model, text_of(text, "projection=dynamic computes E from the input"))
    found: list[np.ndarray] = []

    def keep(projection: Projection, x_BNC: Tensor) -> None:
        assert isinstance(projection, DynamicProjection)
        found.append(projection.matrices_for(x_BNC).E[0][:, projection.of_keys()].float().numpy())

    layers: Any = model.stack.layers
    hooks = [
        layer.attention.register_forward_pre_hook(lambda _, inputs, projection=projection: keep(projection, inputs[0]))
        for layer, projection in zip(layers, projections, strict=True)
    ]
    with torch.no_grad():
        model.stack(**tokens.inputs)
    for hook in hooks:
        hook.remove()
    return found
