"""What a training takes of memory: `python learning_memory.py FILE CONFIG [key=value …]` writes it to FILE as JSON.

It is not read off the run itself: batches of many lengths leave holes in the memory of a process, several times what is needed,
and how many depends on the order of the batches and on how long the run has been going on.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from linformer_kit.bench.measure import peak_memory
from linformer_kit.files import write_atomically
from linformer_kit.training.announce import probe_batches
from linformer_kit.training.config import RunConfig, load_config
from linformer_kit.training.prepare import Prepared, prepare
from linformer_kit.training.run import RunFolder
from linformer_kit.training.train import make_trainer


def steps_on_longest_batch(config: RunConfig, prepared: Prepared) -> None:
    """Weights, gradients, AdamW, and what the longest batch needs; the second step has all of them at once."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = make_trainer(config, prepared, RunFolder(Path(folder)))
    longest, _ = probe_batches(trainer)
    model, optimizer = trainer.model.train(), trainer.create_optimizer()
    for _ in range(2):
        optimizer.zero_grad()
        trainer.compute_loss(model, longest, num_items_in_batch=torch.tensor(1)).backward()
        optimizer.step()


def main(path: str, name: str, *overrides: str) -> None:
    config = load_config(name, list(overrides))
    prepared = prepare(config, Console(quiet=True))
    peak_mib = peak_memory(lambda: steps_on_longest_batch(config, prepared)) / 2**20
    write_atomically(Path(path), lambda part: part.write_text(json.dumps({"peak_mib": peak_mib}), "utf-8"))


if __name__ == "__main__":
    main(*sys.argv[1:])
