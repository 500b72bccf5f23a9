"""`linformer import`: state dicts of other Linformers to our layers, encoders and models."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import NEEDS_CODE, UserError, needs_code
from ..files import atomic_directory, check_new_directory, read_json, write_text
from ..models.attention_linformer import LinformerAttention
from ..models.encoder_linformer import LinformerEncoder
from ..models.modeling_linformer import LinformerForMaskedLM, LinformerModel
from ..models.options_linformer import choice, positive_integer
from .packages import PACKAGES, Options, read_weights
from .tensor_files import read_tensors, state_dict_of
from .weights import Weights

# layers and encoders have no configuration of transformers: their class and options are in this file
MODULE_FILE, WEIGHTS_FILE = "module.json", "model.safetensors"
MODULES: dict[str, Any] = {"LinformerAttention": LinformerAttention, "LinformerEncoder": LinformerEncoder}
MODELS: dict[str, Any] = {"LinformerForMaskedLM": LinformerForMaskedLM, "LinformerModel": LinformerModel}
ACTIVATIONS = ("gelu", "relu")
# what the file does not tell and cannot be set, because it is not converted
ASSUMPTIONS = {
    "linformer": "",
    "linformer-pytorch": "causal=False, decoder_mode=False (they leave no trace in it, and are not converted)",
    "fairseq": "no padding (fairseq lets padding take part in attention)",
}


def import_model(
    weights: str | Path | Mapping[str, Tensor],
    source: str,
    output: str | Path | None = None,
    *,
    heads: int | None = None,
    activation: str | None = None,
    full_attention: bool | None = None,
    max_length: int | None = None,
    tokenizer: str | Path | None = None,
) -> nn.Module:
    """Convert a state dict, or a file with one, of another Linformer. The outputs are those of the original.

    >>> import torch
    >>> from linformer import Linformer
    >>> original = Linformer(dim=32, seq_len=64, depth=2, k=8, heads=4)
    >>> encoder = import_model(original.state_dict(), "linformer", heads=4)
    >>> x = torch.randn(1, 64, 32)
    >>> type(encoder).__name__, torch.allclose(encoder(x), original(x), atol=1e-5)
    ('LinformerEncoder', True)

    - `source`: "linformer" (PyPI), "linformer-pytorch" or "fairseq" (its examples/linformer).
    - `heads`: their number, which files of "linformer" and "fairseq" do not tell.
    - `activation`: "gelu" (default) or "relu". `full_attention`: whether a model of "linformer-pytorch" had it.
    - `max_length`: the `input_size` of a model of "linformer-pytorch" with `method="convolution"`.
    - `output`: directory to save the result in. `load_imported` loads it; models are also loaded by `from_pretrained`.
    - `tokenizer`: directory of a tokenizer of transformers, which is saved with a model.

    Returns a LinformerAttention, LinformerEncoder, LinformerForMaskedLM or, without output layer, a LinformerModel, in
    evaluation mode. docs/switching.md lists what is converted, and what is refused and why.
    """
    return convert(weights, source, output, Options(heads, activation, full_attention, max_length), tokenizer)[0]


def convert(
    weights: str | Path | Mapping[str, Tensor],
    package: str,
    output: str | Path | None,
    options: Options,
    tokenizer: str | Path | None,
) -> tuple[nn.Module, Weights]:
    """`import_model`, with the weights that it converted."""
    try:
        choice("source", package, PACKAGES)
        if options.activation is not None:
            choice("activation", options.activation, ACTIVATIONS)
        if options.max_length is not None:
            positive_integer("max_length", options.max_length)
    except ValueError as error:
        raise UserError(str(error)) from None
    if output is not None:
        check_new_directory(Path(output), "choose another --output")
    if isinstance(weights, Mapping):
        tensors = state_dict_of(dict(weights), "the state dict")
    elif isinstance(weights, str | Path):
        tensors = read_tensors(Path(weights))
    else:
        raise UserError(
            f"the weights are a {type(weights).__name__}; pass a state dict (model.state_dict()), or a file"
        )
    found = read_weights(tensors, package, options)
    words = load_tokenizer(tokenizer, found) if tokenizer is not None else None
    if words is not None and words.pad_token_id is not None:
        found.config["pad_token_id"] = words.pad_token_id
    module = found.build()
    if output is not None:
        with atomic_directory(Path(output).absolute()) as unfinished:  # "." has no name
            save(module, found, unfinished)
            if words is not None:
                words.save_pretrained(unfinished)
    return module, found


def load_tokenizer(folder: str | Path, weights: Weights) -> PreTrainedTokenizerBase:
    """A tokenizer that fits the vocabulary of the model."""
    if not weights.outside:
        raise UserError("a tokenizer was given, but the file has no embeddings of tokens; leave it out")
    if not Path(folder).is_dir():
        raise UserError(f"the tokenizer {folder} is no directory; pass one written by save_pretrained")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        if needs_code(error):
            raise UserError(f"the tokenizer in {folder} {NEEDS_CODE}") from None
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {' '.join(str(error).split())}") from None
    size = weights.outside["model.embeddings.word_embeddings.weight"].shape[0]
    if len(tokenizer) > size:
        raise UserError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens but the model {size}; pass the tokenizer that the "
            "model was trained with"
        )
    return tokenizer


def save(module: nn.Module, weights: Weights, folder: Path) -> None:
    """A model in the format of transformers; a layer or encoder as its options and tensors."""
    if isinstance(module, PreTrainedModel):
        module.save_pretrained(folder)
        return
    options = weights.encoder_options() if weights.depth else weights.attention_options()
    description = {"class": type(module).__name__, "options": options}
    write_text(folder / MODULE_FILE, json.dumps(description, indent=1))
    save_file(module.state_dict(), folder / WEIGHTS_FILE)


def load_imported(folder: str | Path) -> nn.Module:
    """The layer, encoder or model that `linformer import` or `import_model` saved, in evaluation mode.

    >>> import tempfile
    >>> from linformer import LinformerSelfAttention
    >>> folder = Path(tempfile.mkdtemp(), "layer")
    >>> _ = import_model(LinformerSelfAttention(dim=32, seq_len=64, k=8).state_dict(), "linformer", folder, heads=8)
    >>> load_imported(folder).num_heads
    8
    """
    folder = Path(folder)
    description = read_json(folder / MODULE_FILE)
    if description:
        module = MODULES[choice("class", description.get("class"), MODULES)](**description["options"])
        module.load_state_dict(load_file(folder / WEIGHTS_FILE))
        return module.eval()
    names = read_json(folder / "config.json").get("architectures") or [None]
    if names[0] not in MODELS:
        raise UserError(f"{folder} was not written by `linformer import`: it has no {MODULE_FILE} and no model")
    return MODELS[names[0]].from_pretrained(folder).eval()


def describe(module: nn.Module, weights: Weights, package: str, output: Path) -> str:
    """What was made, what was assumed, and what to do next."""
    options = weights.encoder_options() if weights.depth else weights.attention_options()
    attention = ["full attention"]
    if weights.matrices:
        attention = [f"K = {options['projected_length']}", f"projection {options['projection']}"]
        attention.append(f"sharing {options['sharing']}")
    parts = [
        f"{weights.depth} layers" if weights.depth else "1 attention layer",
        f"{options['embed_dim']} wide",
        f"{weights.heads} heads",
        f"N = {weights.max_length}",
        *attention,
        *(["reversible"] if weights.reversible else []),
        f"{sum(parameter.numel() for parameter in module.parameters()):,} parameters",
    ]
    lines = [f"{type(module).__name__} in {output}: {', '.join(parts)}"]
    assumed = [f"activation {weights.activation}"] if package != "linformer" and weights.depth else []
    assumed += [ASSUMPTIONS[package]] if ASSUMPTIONS[package] else []
    if assumed:
        lines.append(f"Not in the file, so assumed: {'; '.join(assumed)}")
    if not isinstance(module, PreTrainedModel):
        lines.append(f'Load it in Python: linformer_kit.load_imported("{output}")')
    else:
        tokenizer = "" if (output / "tokenizer_config.json").is_file() else " tokenizer.from=TOKENIZER"
        # in place of the whole section `model`, whose sizes a saved model determines
        lines.append(f'Fine-tune it: linformer train CONFIG "model={{from: {output}}}"{tokenizer}')
    return "\n".join(lines)
