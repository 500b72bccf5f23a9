"""Metrics; each example and each token counts once, for any division into batches."""

import math
from typing import Any

import numpy as np
import sacrebleu
import torch
from torch import Tensor
from torch.nn import functional

from .batches import IGNORE_INDEX


def token_sums(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """(B, 3) in float64: summed loss, number of labeled tokens and number of correct predictions per example.

    The logits may also be (S, V), for the S labeled tokens only.
    """
    counted_BT = labels_BT != IGNORE_INDEX
    if logits_BTV.dim() == 2:
        losses_S = functional.cross_entropy(logits_BTV.float(), labels_BT[counted_BT], reduction="none")
        losses_BT = losses_S.new_zeros(labels_BT.shape).masked_scatter(counted_BT, losses_S)
        guesses_BT = labels_BT.masked_scatter(counted_BT, logits_BTV.argmax(dim=-1))
    else:
        losses_BT = functional.cross_entropy(
            logits_BTV.transpose(1, 2).float(), labels_BT, ignore_index=IGNORE_INDEX, reduction="none"
        )
        guesses_BT = logits_BTV.argmax(dim=-1)
    right_BT = (guesses_BT == labels_BT) & counted_BT
    return torch.stack([losses_BT.double().sum(1), counted_BT.double().sum(1), right_BT.double().sum(1)], dim=1)


def token_metrics(sums: np.ndarray) -> dict[str, float]:
    """Loss, perplexity and accuracy per token of the corpus, from `token_sums` of all examples.

    >>> token_metrics(np.array([[2.0, 2, 1], [0.0, 2, 2]]))
    {'loss': 0.5, 'perplexity': 1.6487212707001282, 'accuracy': 0.75, 'tokens': 4}
    """
    loss, tokens, right = (float(number) for number in sums.sum(axis=0))
    mean = loss / max(tokens, 1.0)
    perplexity = math.exp(mean) if mean < 700 else math.inf
    return {"loss": mean, "perplexity": perplexity, "accuracy": right / max(tokens, 1.0), "tokens": int(tokens)}


def class_metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Loss, accuracy and macro F1.

    >>> class_metrics(np.array([[2.0, 0], [0, 2], [2, 0]]), np.array([0, 1, 1]))
    {'loss': 0.7935946777096393, 'accuracy': 0.6666666666666666, 'macro_f1': 0.6666666666666666, 'examples': 3}
    """
    highest = logits.max(axis=1, keepdims=True).astype(np.float64)
    log_sums = highest[:, 0] + np.log(np.exp(logits - highest).sum(axis=1))
    losses = log_sums - logits[np.arange(len(labels)), labels]
    matrix = confusion(logits.argmax(axis=1), labels, logits.shape[1])
    return {
        "loss": float(losses.mean()),
        "accuracy": float(np.trace(matrix) / max(1, matrix.sum())),
        "macro_f1": macro_f1(matrix),
        "examples": len(labels),
    }


def confusion(predictions: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Confusion matrix (classes, classes): true class per row, predicted class per column."""
    matrix = np.zeros((classes, classes), np.int64)
    np.add.at(matrix, (labels, predictions), 1)
    return matrix


def macro_f1(matrix: np.ndarray) -> float:
    """The mean F1 of the classes that occur among labels or predictions."""
    totals = matrix.sum(axis=0) + matrix.sum(axis=1)
    return float((2 * np.diag(matrix)[totals > 0] / totals[totals > 0]).mean())


def translation_metrics(hypotheses: list[str], references: list[str]) -> dict[str, Any]:
    """BLEU and chrF of the corpus, with the signatures of sacrebleu.

    >>> translation_metrics(["the cat sat on the mat"], ["the cat sat on the mat"])["bleu"]
    100.00000000000004
    """
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    # one list per set of references, not per sentence
    scores = bleu.corpus_score(hypotheses, [references]), chrf.corpus_score(hypotheses, [references])
    return {
        "bleu": scores[0].score,
        "chrf": scores[1].score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
        "sentences": len(hypotheses),
    }


def task_metrics(metrics: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The metrics of the task from those that `Trainer` reports.

    >>> task_metrics({"eval_loss": 0.5, "eval_runtime": 3.0, "epoch": 1.0}, "eval_")
    {'loss': 0.5}
    """
    speed_metrics = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    found = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    return {name: value for name, value in found.items() if name not in speed_metrics}
