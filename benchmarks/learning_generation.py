"""How fast trained causal LMs generate, and how large their caches are: results/learning/causal_lm_generation.csv."""

from functools import partial
from pathlib import Path

import torch
from transformers import AutoTokenizer

from linformer_kit import LinformerForCausalLM
from linformer_kit.bench.generation import go_on, read
from linformer_kit.bench.measure import time_interleaved
from linformer_kit.csv_tables import write_rows

GENERATION = "causal_lm_generation.csv"
TOKENS = 256
# a beginning for them to go on with, repeated until it is long enough; what it says does not matter for the time
BEGINNING = "The history of the town begins in the twelfth century , when a bridge was built over the river . "
PROMPTS = (256, 767)


def measure_generation(models: dict[str, Path], folder: Path, seconds: float = 20.0) -> None:
    """Read a prompt, then go on token by token, batch 1, the models taking turns; medians."""
    loaded = {name: LinformerForCausalLM.from_pretrained(path).eval() for name, path in models.items()}
    ids = AutoTokenizer.from_pretrained(next(iter(models.values())))(BEGINNING * 100)["input_ids"]
    rows = []
    for length in PROMPTS:
        prompt_BN = torch.tensor([ids[:length]])
        started = {name: read(model, prompt_BN) for name, model in loaded.items()}
        calls = {name: partial(go_on, model, started[name], TOKENS) for name, model in loaded.items()}
        timings = time_interleaved(calls, budget_seconds=seconds, least_rounds=3, most_rounds=9)
        for name, model in loaded.items():
            cache = go_on(model, started[name], TOKENS)
            rows.append(
                {
                    "variant": name,
                    "prompt": str(length),
                    "new tokens": str(TOKENS),
                    "measured tokens per second": f"{TOKENS / (timings[name].median or 1):.0f}",
                    "cache in KiB at the end": f"{cache.nbytes / 1024:,.0f}",
                }
            )
    write_rows(folder / GENERATION, rows)
