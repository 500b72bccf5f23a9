"""Generates texts with an encoder-decoder."""

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

from .config import RunConfig
from .encoding import pad_rows


def batch_size_of(config: RunConfig) -> int:
    """Texts per process and batch: `training.evaluation_batch_size`, or as in training."""
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
    """(translations, references) of tokenized rows, in their order; processes share the work."""
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
    """Stops each row at its own number of new tokens, so that the result does not depend on the rest of the batch."""

    def __init__(self, limits: torch.Tensor):
        self.limits = limits

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        beams = len(input_ids) // len(self.limits)
        return input_ids.shape[1] > self.limits.repeat_interleave(beams)  # the start token is not counted


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, sources: list[list[int]], beams: int = 1
) -> list[str]:
    """Generate one text per source, of at most twice its length plus 20 tokens."""
    lengths = torch.tensor([len(source) for source in sources], device=model.device)
    limits = (2 * lengths + 20).clamp(max=model.config.max_position_embeddings - 1)
    mask = (torch.arange(int(lengths.max()), device=model.device) < lengths[:, None]).long()
    model.eval()
    with torch.no_grad():
        output = model.generate(
            pad_rows(sources, tokenizer.pad_token_id).to(model.device),
            attention_mask=mask,
            num_beams=beams,
            do_sample=False,
            max_new_tokens=int(limits.max()),
            stopping_criteria=StoppingCriteriaList([RowLimits(limits)]),
        )
    return [text.strip() for text in tokenizer.batch_decode(output, skip_special_tokens=True)]
