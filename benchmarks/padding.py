"""Batches with padding: the models, which compute real tokens only, against masked computation (docs/log.md).

python benchmarks/padding.py [DATA]    # two minutes; DATA is a path to IMDB; writes results/padding.csv
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from linformer_kit.bench.measure import time_interleaved
from linformer_kit.csv_tables import write_rows
from linformer_kit.models.configuration_linformer import LinformerConfig
from linformer_kit.models.modeling_linformer import LinformerForSequenceClassification
from linformer_kit.models.packing_linformer import Packing
from linformer_kit.training.batches import Examples, LengthGroupedSampler, PaddingCollator, task_transform
from linformer_kit.training.config import load_config, resolve_model_config
from linformer_kit.training.prepare import prepare

RESULTS = Path(__file__).parent.parent / "results"
LONGEST = 2000
Batch = dict[str, Tensor]
SIZES = {"vocab_size": 8000, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
ENCODER = LinformerConfig(**SIZES, intermediate_size=2048, max_position_embeddings=LONGEST, projected_length=128)


def served(batch_size: int, shortest: int, number: int) -> list[Batch]:
    """Batches of mixed lengths, up to `LONGEST` tokens, in no order."""
    generator = torch.Generator().manual_seed(0)
    collate = PaddingCollator(pad=0)
    return [
        collate(
            [
                {"input_ids": torch.randint(5, 8000, (length,), generator=generator), "labels": length % 2}
                for length in torch.randint(shortest, LONGEST + 1, (batch_size,), generator=generator).tolist()
            ]
        )
        for _ in range(number)
    ]


def imdb_batches(data: str, number: int) -> list[Batch]:
    """Batches of `linformer train imdb`."""
    config = load_config("imdb", [f"data.path={data}"])
    prepared = prepare(config, Console())
    examples = Examples(prepared.splits["train"], task_transform(config, prepared.tokenizer), seed=0)
    sampler = LengthGroupedSampler(examples, config.training.batch_size)
    loader = torch.utils.data.DataLoader(
        examples,
        config.training.batch_size,
        sampler=sampler,
        collate_fn=PaddingCollator(prepared.tokenizer.pad_token_id),
    )
    return list(islice(loader, number))


def imdb_model(**changes: int) -> PreTrainedModel:
    options = load_config("imdb").model
    return LinformerForSequenceClassification(resolve_model_config(options | changes))


def forward(model: PreTrainedModel, batches: Iterable[Batch]) -> None:
    model.eval()
    with torch.no_grad():
        for batch in batches:
            model(**batch)


def train(model: PreTrainedModel, batches: Iterable[Batch]) -> None:
    model.train()
    for batch in batches:
        model.zero_grad()
        model(**batch).loss.backward()


def main(data: Annotated[str, typer.Argument()] = "stanfordnlp/imdb") -> None:
    """Write the table."""
    encoder, long_imdb = LinformerForSequenceClassification(ENCODER), imdb_model(max_position_embeddings=LONGEST)
    mixed, full = served(16, 50, 1), served(16, LONGEST, 1)
    of_training = imdb_batches(data, 8)
    workloads: dict[tuple[str, str], Callable[[], None]] = {
        ("4 × 512, K=128, 16 × 50–2,000 tokens", "forward"): partial(forward, encoder, mixed),
        ("imdb, 16 × 50–2,000 tokens", "forward"): partial(forward, long_imdb, mixed),
        ("imdb, batches of its training", "forward"): partial(forward, imdb_model(), of_training),
        ("imdb, batches of its training", "training"): partial(train, imdb_model(), of_training),
        ("imdb, 16 × 2,000 tokens", "forward"): partial(forward, long_imdb, full),
    }
    found = []
    for (name, step), call in workloads.items():
        masked = patch.object(Packing, "of", lambda *_: None)(call)
        timings = time_interleaved({"masked": masked, "packed": call}, budget_seconds=12)
        seconds = {way: timing.median or 0 for way, timing in timings.items()}
        found.append(
            {"workload": name, "step": step}
            | {f"milliseconds_{way}": round(1e3 * median) for way, median in seconds.items()}
            | {"speedup": f"{seconds['masked'] / seconds['packed']:.2f}"}
        )
        print(*found[-1].values(), sep=", ", flush=True)
    write_rows(RESULTS / "padding.csv", found)


if __name__ == "__main__":
    typer.run(main)
