"""The task of the demo, the two models that learn it, and the layers to be timed.

The task needs attention and little else. Among random digits some are marked, all of them the same digit, and the label is
that digit. The answer is read off the first token, which knows nothing by itself: attention has to bring it there.
It shows that the layer learns and what it costs. It is a toy, and says nothing about quality on real text.

Shapes: B batch, N length, M marked tokens, C model size, D digits.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bench.measure import make_call, time_interleaved
from ..models.attention_linformer import LinformerAttention
from ..models.encoder_linformer import LinformerEncoder

# tokens 0-9 are plain digits, 10-19 marked ones
DIGITS, START, PADDING, VOCABULARY = 10, 20, 21, 22

# the one value in which the two models differ, and what we call them
PROJECTIONS = {"Linformer": "linear", "full attention": "none"}


@dataclass(frozen=True)
class Settings:
    """Everything the demo can be told; the defaults take about a minute and a half on two cores."""

    length: int = 2048  # N; examples are from half as long up to this
    marked: int = 64  # M
    projected_length: int = 64  # K
    width: int = 64
    heads: int = 4
    depth: int = 1
    batch: int = 8
    steps: int = 100
    learning_rate: float = 5e-3
    held_out: int = 512  # fresh examples for the final accuracy
    layer_lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    layer_width: int = 256
    layer_rounds: int = 7
    seed: int = 0


class Batch(NamedTuple):
    """Examples of the task."""

    tokens_BN: Tensor
    mask_BN: Tensor  # True at real tokens
    labels_B: Tensor


def make_batch(settings: Settings, size: int, generator: torch.Generator) -> Batch:
    """`size` new examples: random digits, M of them marked and equal to the label, the first token `START`, padding last."""
    shape = (size, settings.length)
    tokens_BN = torch.randint(DIGITS, shape, generator=generator)
    labels_B = torch.randint(DIGITS, (size,), generator=generator)
    lengths_B = torch.randint(settings.length // 2, settings.length + 1, (size,), generator=generator)
    mask_BN = torch.arange(settings.length) < lengths_B[:, None]
    # the M largest of one random number per real token: M different places, each as likely as any other
    lottery_BN = torch.rand(shape, generator=generator).masked_fill(~mask_BN, -1)
    lottery_BN[:, 0] = -1
    places_BM = lottery_BN.topk(settings.marked, dim=1).indices
    tokens_BN.scatter_(1, places_BM, (DIGITS + labels_B)[:, None].expand_as(places_BM))
    tokens_BN[:, 0] = START
    return Batch(tokens_BN.masked_fill(~mask_BN, PADDING), mask_BN, labels_B)


class Classifier(nn.Module):
    """Embedding, encoder, and a linear layer on the first token."""

    def __init__(self, settings: Settings, projection: str):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, settings.width)
        self.position = nn.Parameter(0.02 * torch.randn(settings.length, settings.width))
        self.encoder = LinformerEncoder(
            settings.width,
            settings.heads,
            depth=settings.depth,
            max_length=settings.length,
            projected_length=settings.projected_length,
            projection=projection,
        )
        self.head = nn.Linear(settings.width, DIGITS)

    def forward(self, tokens_BN: Tensor, mask_BN: Tensor) -> Tensor:
        """(B, N) tokens and their mask to (B, 10) logits."""
        x_BNC = self.embedding(tokens_BN) + self.position[: tokens_BN.shape[1]]
        return self.head(self.encoder(x_BNC, mask_BN)[:, 0])


def make_models(settings: Settings) -> dict[str, Classifier]:
    """The two models, with the same initial weights wherever both have them: all but E and F."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        models = {name: Classifier(settings, projection) for name, projection in PROJECTIONS.items()}
    models["Linformer"].load_state_dict(models["full attention"].state_dict(), strict=False)
    return models


@dataclass
class Learner:
    """A model in training, and the record of each of its steps."""

    model: Classifier
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    losses: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)  # share of the batch answered correctly before learning from it
    seconds: list[float] = field(default_factory=list)

    def learn(self, batch: Batch) -> None:
        """One step of training."""
        start = time.perf_counter()
        logits_BD = self.model(batch.tokens_BN, batch.mask_BN)
        loss = F.cross_entropy(logits_BD, batch.labels_B)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.hits.append((logits_BD.argmax(dim=1) == batch.labels_B).float().mean().item())


def make_learner(model: Classifier, settings: Settings) -> Learner:
    """Adam, its rate rising over a tenth of the steps and falling over the last third."""
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / (0.1 * settings.steps), (settings.steps - step) / (0.3 * settings.steps))

    return Learner(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate))


def train(models: dict[str, Classifier], settings: Settings) -> Iterator[dict[str, Learner]]:
    """Train the models side by side on the same batches; yields their records after every step.

    They take turns, so that whatever else the computer does slows all of them alike.
    """
    learners = {name: make_learner(model, settings) for name, model in models.items()}
    generator = torch.Generator().manual_seed(settings.seed + 1)
    for _ in range(settings.steps):
        batch = make_batch(settings, settings.batch, generator)
        for learner in learners.values():
            learner.learn(batch)
        yield learners


@torch.no_grad()
def accuracy(model: Classifier, settings: Settings) -> float:
    """The share of `settings.held_out` examples, none of them seen in training, that `model` gets right."""
    # a stream of its own, the same for every model
    generator = torch.Generator().manual_seed(settings.seed + 2)
    right = 0
    for start in range(0, settings.held_out, settings.batch):
        batch = make_batch(settings, min(settings.batch, settings.held_out - start), generator)
        right += int((model(batch.tokens_BN, batch.mask_BN).argmax(dim=1) == batch.labels_B).sum())
    return right / settings.held_out


def time_layers(settings: Settings) -> Iterator[tuple[int, dict[str, float]]]:
    """For each length the median seconds of one attention layer, forward, one example; the layers take turns."""
    for length in settings.layer_lengths:
        layers = {
            name: LinformerAttention(
                settings.layer_width,
                settings.heads,
                max_length=length,
                projected_length=settings.projected_length,
                projection=projection,
            )
            for name, projection in PROJECTIONS.items()
        }
        calls = {name: make_call(layer, torch.randn(1, length, settings.layer_width), "forward") for name, layer in layers.items()}
        timings = time_interleaved(calls, least_rounds=settings.layer_rounds, most_rounds=settings.layer_rounds)
        yield length, {name: timing.median for name, timing in timings.items() if timing.median}
