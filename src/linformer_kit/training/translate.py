"""Texts out of an encoder-decoder."""

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

from .batches import stacked
from .config import RunConfig


def batch_size_of(config: RunConfig) -> int:
    """How many texts a process works on at a time: as many as in training, if nothing else is wanted."""
    training = config.training
    return training.evaluation_batch_size or max(
        1, training.batch_size // (training.accumulate * PartialState().num_processes)
    )


def translations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rows: Any,
    batch_size: int,
    console: Console,
    beams: int = 1,
) -> tuple[list[str], list[str]]:
    """(translations, references) of tokenized rows, in their order; several processes share the work."""
    state = PartialState()
    ids = rows["input_ids"]
    order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    mine = batches[state.process_index :: state.num_processes]
    found = []
    for indices in track(mine, "translating", console=console, disable=not console.is_terminal, transient=True):
        texts = generate(model, tokenizer, [ids[index] for index in indices], beams)
        found += list(zip(indices, texts, strict=True))
    by_index = dict(gather_object(found) if state.num_processes > 1 else found)
    return [by_index[index] for index in range(len(ids))], list(rows["target"])


class RowLimits(StoppingCriteria):
    """Ends each row at its own number of new tokens, so that it says the same whatever else is in its batch."""

    def __init__(self, limits: torch.Tensor):
        self.limits = limits

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        beams = len(input_ids) // len(self.limits)
        return input_ids.shape[1] > self.limits.repeat_interleave(beams)  # the start token is not counted


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, sources: list[list[int]], beams: int = 1
) -> list[str]:
    """One text for each source; it may be twice as long as its source, and a little more."""
    lengths = torch.tensor([len(source) for source in sources], device=model.device)
    limits = (2 * lengths + 20).clamp(max=model.config.max_position_embeddings - 1)
    mask = (torch.arange(int(lengths.max()), device=model.device) < lengths[:, None]).long()
    model.eval()
    with torch.no_grad():
        output = model.generate(
            stacked(sources, tokenizer.pad_token_id).to(model.device),
            attention_mask=mask,
            num_beams=beams,
            do_sample=False,
            max_new_tokens=int(limits.max()),
            stopping_criteria=StoppingCriteriaList([RowLimits(limits)]),
        )
    return [text.strip() for text in tokenizer.batch_decode(output, skip_special_tokens=True)]
