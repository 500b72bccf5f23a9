"""Small bugs, and whether the tests notice them: `make mutations`, or `python tests/mutations.py`.

Each mutation replaces one snippet of the source in a copy of the package and runs the tests that should fail. Use it
after removing or merging tests: as many mutations must be caught afterwards as before.

    python tests/mutations.py                        # all of them
    python tests/mutations.py 3 17 40-45             # some of them
    python tests/mutations.py --list                 # what they are, and whether their snippets are found
    python tests/mutations.py --root /path/checkout  # the source and the tests of another checkout

The targets first run on the unchanged copy: a test that fails there proves nothing. A snippet that does not occur
exactly once is reported as "not applied"; update it when the line changes. After a run of all tests, `--trust` saves
half of the time.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src", "linformer_kit")
COPIED = ("src", "tests")
SECONDS = 900  # for the targets of one mutation

# where files were before the directories were renamed; --root may point to such a checkout
OLD_PATHS = {
    "analysis/singular_values.py": "show/spectrum_math.py",
    "bench/checks.py": "bench/peers.py",
    "csv_tables.py": "bench/table.py",
    "plots/curves.py": "training/curves.py",
    "plots/quality.py": "show/learning.py",
    "report/measurements.py": "show/report.py",
    "report/series.py": "show/learning.py",
    "schema.py": "typed.py",
    "yaml_loader.py": "plain_yaml.py",
}


class Mutation(NamedTuple):
    """A snippet of `file`, what replaces it, and the tests that should fail."""

    bug: str
    file: str
    snippet: str | tuple[str, ...]  # the first that occurs is replaced
    replacement: str | tuple[str, ...]
    tests: str  # separated by spaces
    only: str = ""  # for -k
    backend: str = ""  # KERAS_BACKEND


ATTENTION, PADDING = "tests/test_attention.py", "tests/test_padding.py"
CAUSAL, MODELS = "tests/test_causal.py", "tests/test_models.py"
PROJECTION, GENERATION = "tests/test_projection.py", "tests/test_generation.py"
REVERSIBLE, WINDOW = "tests/test_reversible.py", "tests/test_window.py"
PARTS, COMPARE = "tests/test_training_parts.py", "tests/test_compare.py"
CHECKPOINTS, DEVICES = "tests/test_training_checkpoints.py", "tests/test_models_devices.py"
BENCH = "tests/test_measure.py tests/test_bench.py"  # those of them that exist
SPECTRUM, PLOT, REPORT, DEMO = (f"tests/test_{name}.py" for name in ("spectrum", "plot", "report", "demo"))
KERAS, IMPORT = "tests/on_each_backend", "tests/test_import.py"

MUTATIONS = [
    # models
    Mutation(
        "gradients of keys and values are added in bfloat16",
        "models/multihead_linformer.py",
        "if not (is_half and is_static(length) and length > HALF_PRECISION_CHUNK):",
        "if True:",
        "tests/test_precision.py",
        "fused_kernel",
    ),
    Mutation(
        "a model computes in float32 if bfloat16 is asked for",
        "precision.py",
        "model.forward = torch.autocast(device, torch.bfloat16)(model.forward)",
        "pass",
        "tests/test_precision.py",
        "asked_for",
    ),
    Mutation(
        "auto is float32 on a CPU with bfloat16",
        "precision.py",
        'if kind == "cpu":',
        'if kind == "no":',
        "tests/test_training_parts.py",
        "resolved_to_a_device",
    ),
    Mutation(
        "chunks for the cache of a CPU on an accelerator",
        "models/validation_linformer.py",
        'return x.device.type == "cpu" and not (torch.is_grad_enabled()',
        "return not (torch.is_grad_enabled()",
        DEVICES,
        "accelerator and LinformerModel",
    ),
    Mutation(
        "chunks of tiles on an accelerator",
        "models/window_linformer.py",
        'if context.near_keys_BPF.device.type != "cpu":',
        "if False:",
        DEVICES,
        "accelerator and window",
    ),
    Mutation(
        "values are read on an accelerator",
        "models/validation_linformer.py",
        'return tensor.device.type == "cpu" and has_values(tensor)',
        'return tensor.device.type in ("cpu", "lazy")',
        DEVICES,
        "accelerator and LinformerModel",
    ),
    Mutation(
        "where no values are read, the cache grows by a block of summaries for each token",
        "models/causal_linformer.py",
        "bound = None if columns is None else columns // self.block_length",
        "bound = summaries.keys_BSF.shape[1]",
        DEVICES,
        "prompts",
    ),
    Mutation(
        "folded scores divided by the root of the model size",
        "models/attention_linformer.py",
        "self._for_every_head(context.keys_BGKD) / math.sqrt(self.head_dim)",
        "self._for_every_head(context.keys_BGKD) / math.sqrt(self.embed_dim)",
        ATTENTION,
        "order or orders",
    ),
    Mutation(
        "values projected with E instead of F",
        "models/projection_linformer.py",
        "return rows_BMKC[:, self.key_slice()], rows_BMKC[:, self.value_slice()]",
        "return rows_BMKC[:, self.key_slice()], rows_BMKC[:, self.key_slice()]",
        ATTENTION,
        "reference",
    ),
    Mutation(
        "absent rows take part in the softmax of the folded order",
        "models/attention_linformer.py",
        "masked_fill(~context.present_BK[:, None], -torch.inf)",
        "masked_fill(~context.present_BK[:, None], 0.0)",
        f"{ATTENTION} {PADDING}",
        "pooled_keys or padded_batch or alone",
    ),
    Mutation(
        "the last query of a chunk of one is never computed",
        "models/attention_linformer.py",
        "for query in range(0, length, queries):",
        "for query in range(0, max(1, length - 1), queries):",
        ATTENTION,
        "chunk",
    ),
    Mutation(
        "the output bias is added twice when dropout is active",
        "models/attention_linformer.py",
        "if bias is not None and bias_is_folded:",
        "if bias is not None:",
        ATTENTION,
        "dropout",
    ),
    Mutation(
        "separate values are projected with E instead of F",
        "models/attention_linformer.py",
        "projection.part(projection.value_slice())(value_BNC, lengths_B)",
        "projection.part(projection.key_slice())(value_BNC, lengths_B)",
        ATTENTION,
        "separate",
    ),
    Mutation(
        "a given projection is cut to its first columns, which see only the beginning",
        "models/projection_linformer.py",
        "return neighbor_means(weight, projected_length)",
        "return weight[..., :projected_length]",
        f"{ATTENTION} tests/test_projection.py",
        "given or cut",
    ),
    Mutation(
        "returned weights of the folded order are not those the output is computed from",
        "models/attention_linformer.py",
        "functional.dropout(weights_BHLK.transpose(1, 2), dropout)",
        "functional.dropout(weights_BLHK, dropout)",
        ATTENTION,
        "every_order",
    ),
    Mutation(
        "the cache of a graph loses the last token of an open block",
        "models/causal_linformer.py",
        "most = self.block_length - 1 if max_length is not None",
        "most = self.block_length - 2 if max_length is not None",
        CAUSAL,
        "fixed_size",
    ),
    Mutation(
        "padding is projected as it is instead of as zeros",
        "models/projection_linformer.py",
        "real_BNC = x_BNC.masked_fill(~mask_BN[..., None], 0)",
        "real_BNC = x_BNC",
        PADDING,
    ),
    Mutation(
        "packed texts of different lengths are mixed up",
        "models/packing_linformer.py",
        "place_T = place_BN[order_B][mask_BN[order_B]]",
        "place_T = place_BN[mask_BN]",
        PADDING,
        "packed",
    ),
    Mutation(
        "no batch is packed",
        "models/packing_linformer.py",
        "if tokens and padding and is_faster else None",
        "if tokens and padding and not is_faster else None",
        f"{PADDING} {MODELS}",
        "packed",
    ),
    Mutation(
        "in a packed batch, rescaling measures the columns of E up to the longest text",
        "models/projection_linformer.py",
        "        if self.rescale:  # compares with the whole columns\n            return self\n",
        "",
        MODELS,
        "packed and rescale",
    ),
    Mutation(
        "rescaling measures one row of E too few",
        "models/projection_linformer.py",
        "[lengths_B.clamp(min=1) - 1]",
        "[(lengths_B - 2).clamp(min=0)]",
        f"{ATTENTION} {PADDING}",
        "rescale",
    ),
    Mutation(
        "pooling windows of unequal size overlap",
        "models/projection_linformer.py",
        "is_real_BKW = position_BKW < after_BK[..., None]",
        "is_real_BKW = position_BKW < first_BK[..., None] + width",
        ATTENTION,
        "reference and mean",
    ),
    Mutation(
        "padding counts in the mean of a window",
        "models/projection_linformer.py",
        "is_real_BKW1.sum(dim=2).clamp(min=1)",
        "windows_BKWC.shape[2]",
        f"{ATTENTION} {PADDING}",
        "mean or alone",
    ),
    Mutation(
        "the dynamic projection does not mask padding",
        "models/projection_linformer.py",
        "masked_fill(behind_BN[..., None], -torch.inf)",
        "masked_fill(behind_BN[..., None], 0.0)",
        PADDING,
    ),
    Mutation(
        "the maximum of a window includes a zero for padding",
        "models/projection_linformer.py",
        "lowest = torch.finfo(windows_BKWC.dtype).min",
        "lowest = 0.0",
        f"{ATTENTION} {PADDING}",
        "max or alone",
    ),
    Mutation(
        "queries see the summary of their own block, and so the future",
        "models/causal_linformer.py",
        "finished = summary_S < query_XQ1 // block_length",
        "finished = summary_S <= query_XQ1 // block_length",
        CAUSAL,
        "later or reference",
    ),
    Mutation(
        "a chunk of several blocks has the mask of another chunk",
        "models/causal_linformer.py",
        "whole_11QK[..., whole_11QK.shape[-1] - chunk - before :]",
        "whole_11QK[..., : chunk + before]",
        CAUSAL,
        "plain or later",
    ),
    Mutation(
        "without gradients, the tokens of a chunk stay behind as summaries",
        "models/causal_linformer.py",
        "buffer_BKF[:, done:count] = summaries_BSF[:, done:count]",
        "buffer_BKF[:, done + 1 : count] = summaries_BSF[:, done + 1 : count]",
        CAUSAL,
        "without_gradients",
    ),
    Mutation(
        "in large calls, queries are not aligned with an open block",
        "models/causal_linformer.py",
        "for rows_BPF, before in ((query_BTF, opened),",
        "for rows_BPF, before in ((query_BTF, 0),",
        CAUSAL,
        "large_calls",
    ),
    Mutation(
        "the open block is cut at the wrong place once blocks were finished before",
        "models/causal_linformer.py",
        "first_open = (blocks - seen_before // self.block_length) * self.block_length",
        "first_open = blocks * self.block_length",
        CAUSAL,
        "step",
    ),
    Mutation(
        "beam search does not reorder the numbers of tokens seen",
        "models/causal_linformer.py",
        "self.seen[index_B]",
        "self.seen",
        f"{CAUSAL} {GENERATION}",
        "reorder or beams",
    ),
    Mutation(
        "key-value heads serve the wrong heads",
        "models/multihead_linformer.py",
        ("features_BGKD.repeat_interleave(group, dim=1)", "features_BGKD.repeat_interleave(served, dim=1)"),
        ("features_BGKD.repeat(1, group, 1, 1)", "features_BGKD.repeat(1, served, 1, 1)"),
        ATTENTION,
        "key_value_heads or kv_heads",
    ),
    Mutation(
        "a linear layer with a backward pre-hook is bypassed",
        "models/multihead_linformer.py",
        "linear._backward_hooks, linear._backward_pre_hooks)",
        "linear._backward_hooks)",
        ATTENTION,
        "backward_hooks",
    ),
    Mutation(
        "padding counts in the positions of tokens",
        "models/modeling_linformer.py",
        "(mask_BN.long().cumsum(dim=1) - 1)",
        "(torch.ones_like(mask_BN).long().cumsum(dim=1) - 1)",
        MODELS,
        "padded_batch",
    ),
    Mutation(
        "padding counts in the mean that a classifier reads",
        "models/modeling_linformer.py",
        "(sums_BC / real_BN1.sum(dim=1))",
        "(sums_BC / real_BN1.shape[1])",
        MODELS,
        "pooling",
    ),
    Mutation(
        "accumulated batches each count as the whole step",
        "models/modeling_linformer.py",
        "loss if items is None else loss * targets.numel() / items",
        "loss",
        MODELS,
        "loss_of_several_batches",
    ),
    Mutation(
        "cross-attention takes the projected length of the first layer",
        "models/modeling_linformer_seq2seq.py",
        '"projected_length": config.projected_lengths[-1]',
        '"projected_length": config.projected_lengths[0]',
        MODELS,
        "(formulas or parameters) and ConditionalGeneration",
    ),
    # Keras
    Mutation(
        "Keras: values projected with E instead of F",
        "keras/projection.py",
        ('"values": slice(half, None)', "slice(self.matrices // 2, None)"),
        ('"values": slice(0, max(1, half))', "slice(0, max(1, self.matrices // 2))"),
        f"{KERAS}/test_attention.py",
        "reference and not gradients",
        "torch",
    ),
    Mutation(
        "Keras: folded scores lack the bias of the queries",
        "keras/attention.py",
        "scores_BTHK = scores_BTHK + at_least_float32(",
        "scores_BTHK = scores_BTHK + 0 * at_least_float32(",
        f"{KERAS}/test_attention.py",
        "reference and not gradients",
        "torch",
    ),
    Mutation(
        "Keras: the gradient of a frequent token is summed in half precision",
        "keras/models.py",
        "dtype=keras.config.dtype_policy().variable_dtype,",
        "",
        f"{KERAS}/test_precision.py",
        "frequent",
        "jax",
    ),
    Mutation(
        "Keras: positions counted in bfloat16",
        "keras/layers.py",
        'angles = ops.cast(position, "float32")',
        'angles = ops.cast(ops.cast(position, "bfloat16"), "float32")',
        f"{KERAS}/test_precision.py",
        "models",
        "torch",
    ),
    Mutation(
        "Keras: padding counts in the mean of a window",
        "keras/projection.py",
        "count_BK1 = ops.maximum(ops.sum(ops.cast(is_real_BKW1, real_BKWC.dtype), axis=2), 1)",
        "count_BK1 = windows_BKWC.shape[2]",
        f"{KERAS}/test_attention.py",
        "reference and mean",
        "torch",
    ),
    Mutation(
        "Keras: rescaling measures one row of E too few",
        "keras/projection.py",
        "ops.maximum(lengths_B, 1) - 1, axis=0",
        "ops.maximum(lengths_B - 1, 1) - 1, axis=0",
        f"{KERAS}/test_attention.py",
        "rescale",
        "torch",
    ),
    Mutation(
        "Keras: a token is real if any of the masks says so",
        "keras/attention.py",
        'mask_BN = ops.logical_and(mask_BN, ops.cast(mask, "bool"))',
        'mask_BN = ops.logical_or(mask_BN, ops.cast(mask, "bool"))',
        f"{KERAS}/test_attention.py",
        "mask",
        "torch",
    ),
    Mutation(
        "Keras: queries see the summary of their own block",
        "keras/causal.py",
        "sees_summary=(block_X[:, None] > block_X)",
        "sees_summary=(block_X[:, None] >= block_X)",
        f"{KERAS}/test_models.py",
        "future",
        "torch",
    ),
    Mutation(
        "Keras: a block is summarized one token too early",
        "keras/causal.py",
        "(place_B == block_length - 1)",
        "(place_B == block_length - 2)",
        f"{KERAS}/test_generation.py",
        "enough or cache",
        "torch",
    ),
    Mutation(
        "Keras: generation goes on behind the end",
        "keras/generation.py",
        "next_B1 = ops.where(is_over_B1, ops.full_like(next_B1, padding), next_B1)",
        "next_B1 = next_B1 + 0",
        f"{KERAS}/test_generation.py",
        "end",
        "torch",
    ),
    Mutation(
        "Keras: a temperature below 1 flattens instead of sharpening",
        "keras/generation.py",
        "logits_BV / temperature_B1",
        "logits_BV * temperature_B1",
        f"{KERAS}/test_generation.py",
        "probabilities or drawn or sampl",
        "torch",
    ),
    # training
    Mutation(
        "tokens without a label count as guessed",
        "training/metrics.py",
        "right_BT = (guesses_BT == labels_BT) & counted_BT",
        "right_BT = guesses_BT == labels_BT",
        PARTS,
        "token_metrics",
    ),
    Mutation(
        "every epoch masks the same tokens",
        "training/batches.py",
        "np.random.default_rng((self.seed, self.epoch, index))",
        "np.random.default_rng((self.seed, 0, index))",
        PARTS,
        "seed_epoch or drawn",
    ),
    Mutation(
        "every epoch has the order of the data",
        "training/batches.py",
        "order = generator.permutation(len(self.lengths))[: len(self)]",
        "order = np.arange(len(self.lengths))[: len(self)]",
        PARTS,
        "epoch",
    ),
    Mutation(
        "twice as many tokens are replaced by random ones as BERT's rule says",
        "training/batches.py",
        "chosen & (fate >= 0.8) & (fate < 0.9)",
        "chosen & (fate >= 0.8)",
        PARTS,
        "berts_rule or bert",
    ),
    Mutation(
        "padding is a label to learn",
        "training/batches.py",
        ("pad_rows(labels, IGNORE_INDEX)", "stacked(labels, IGNORED)"),
        ("pad_rows(labels, 0)", "stacked(labels, 0)"),
        PARTS,
        "padding",
    ),
    Mutation(
        "a checkpoint with damaged files is taken for a whole one",
        "training/checkpoint.py",
        "if checksum(folder / name) != expected:",
        "if not (folder / name).exists():",
        PARTS,
        "checkpoint or intact",
    ),
    Mutation(
        "resuming does not restore the generator of Python",
        "training/training_state.py",
        "random.setstate((version, tuple(numbers), gauss))",
        "pass",
        PARTS,
        "chance or random or rng",
    ),
    Mutation(
        "the graph of the estimate stays in memory",
        "training/estimate.py",
        "return tensor.detach()",
        "return tensor",
        PARTS,
        "the_estimate",
    ),
    Mutation(
        "freed memory is never returned",
        "training/trainer.py",
        "self.free_memory.check()",
        "pass",
        PARTS,
        "freed_memory",
    ),
    Mutation(
        "freed memory is returned after every step",
        "process_memory.py",
        "resident > self.start + self.allowed",
        "resident",
        PARTS,
        "freed_memory",
    ),
    Mutation(
        "an evaluation changes what training draws afterwards",
        "training/trainer.py",
        ("with preserve_rng_state():", "with chance_untouched():"),
        ("with torch.no_grad():", "with torch.no_grad():"),
        PARTS,
        "evaluat",
    ),
    Mutation(
        "a causal model is measured on the token it has just read",
        "training/trainer.py",
        "(logits[:, :-1], labels[:, 1:])",
        "(logits[:, 1:], labels[:, 1:])",
        "tests/test_training_commands.py",
        "plain_loop and causal",
    ),
    Mutation(
        "E moves as fast as the other weights",
        "training/trainer.py",
        ('"lr": group["lr"] * rate', '"lr": group["lr"] * self.config.training.projection_rate'),
        ('"lr": group["lr"]', '"lr": group["lr"]'),
        PARTS,
        "learned_E",
    ),
    Mutation(
        "patience counts from the last of several best evaluations",
        "training/trainer.py",
        ("choose(evaluations, key", "return len(values) - 1 - values.index(best)"),
        ("choose(evaluations[::-1], key", "return values[::-1].index(best)"),
        PARTS,
        "patience",
    ),
    Mutation(
        "the end of a running text is lost",
        "training/tokens.py",
        "if len(rest) > 1:",
        "if len(rest) > length:",
        PARTS,
        "pack",
    ),
    Mutation(
        "the setting for gradient clipping does not reach the trainer",
        "training/arguments.py",
        "max_grad_norm=training.clip",
        "max_grad_norm=1.0",
        PARTS,
        "settings_reach",
    ),
    Mutation(
        "validation examples are trained on, too",
        "training/data.py",
        "return rows.select(range(len(rows) - size)), rows.select(range(len(rows) - size, len(rows)))",
        "return rows, rows.select(range(len(rows) - size, len(rows)))",
        "tests/test_training_data.py tests/test_training_commands.py",
        "an_example_is_a_line or split",
    ),
    # benchmarks
    Mutation(
        "implementations are timed in the same order in every round",
        "bench/measure.py",
        "shuffler.shuffle(order)",
        "order.sort(key=str)",
        BENCH,
        "interleaved",
    ),
    Mutation(
        "an implementation that ran out of memory keeps its timing",
        "bench/measure.py",
        ("                del found[name]\n", "                del seconds[name]\n"),
        ("", ""),
        BENCH,
        "memory and round",
    ),
    Mutation(
        "the peak of memory is that since the process started",
        "bench/measure.py",
        "    _reset_peak()\n    before = _peak()",
        "    before = _peak()",
        BENCH,
        "peak_memory or known_allocation",
    ),
    Mutation(
        "what was too much for short examples is tried again with longer ones",
        "bench/compare.py",
        "is_smaller = length < point.length and tokens <= point.length * point.batch",
        "is_smaller = length < point.length and tokens < point.length * point.batch",
        COMPARE,
        "too_much or not_tried or longer_inputs_are_skipped",
    ),
    Mutation(
        "who joins later does not take turns with those who were timed before",
        "bench/compare.py",
        (
            "[*points, *(point for point in earlier if (point.length, point.batch) in sizes)]",
            "[*self.points(group), *earlier]",
        ),
        ("points", "self.points(group)"),
        COMPARE,
        "joins or turns or earlier_ones",
    ),
    Mutation(
        "an implementation with wrong results is timed",
        "bench/checks.py",
        "def require_agreement(",
        "def require_agreement(*_: object) -> None: ...\n\n\ndef unused_require_agreement(",
        "tests/test_implementations.py tests/test_bench.py",
        "wrong",
    ),
    # analysis, plots, report, demo
    Mutation(
        "one singular value too few is needed",
        "analysis/singular_values.py",
        "argmax(axis=-1) + 1",
        "argmax(axis=-1)",
        SPECTRUM,
        "suggestion or keeps",
    ),
    Mutation(
        "the spectrum is of squared singular values",
        "analysis/singular_values.py",
        ".double().cumsum(dim=-1)",
        ".double().square().cumsum(dim=-1)",
        SPECTRUM,
        "curves or numpy",
    ),
    Mutation(
        "the upper whisker is as long as the lower one",
        "plots/quality.py",
        "max(values) - fmean(values)",
        "fmean(values) - min(values)",
        PLOT,
        "sharing_has or averages_seeds or bar",
    ),
    Mutation(
        "the metric on another split is taken for that on the test split",
        "report/series.py",
        'run.evaluation.get(metric) if run.evaluation.get("split") == "test" else None',
        "run.evaluation.get(metric)",
        f"{PLOT} {REPORT}",
        "test_metric or validation_split",
    ),
    Mutation(
        "ratios in a report are upside down",
        "report/measurements.py",
        "return other / own",
        "return own / other",
        REPORT,
        "ratios",
    ),
    Mutation(
        "curves of metrics are one step late",
        "plots/curves.py",
        '(line["step"], line[metric]) for line in lines',
        '(line["step"] + 1, line[metric]) for line in lines',
        PLOT,
        "learning_draws or learning_of",
    ),
    Mutation(
        "copies of training examples are drawn for the test split",
        "training/file_kinds.py",
        ("> MAX_COPIED * len(lines)", "> COPIED * len(lines)"),
        ("> len(lines)", "> len(lines)"),
        DEMO,
        "copy or copies",
    ),
    Mutation(
        "the last window of a file may reach behind its end",
        "training/file_kinds.py",
        "offset = chance.randint(0, rest)",
        "offset = chance.randint(0, rest + 1)",
        DEMO,
        "windows_lie",
    ),
    # shared modules
    Mutation(
        "a failed write leaves its temporary file",
        "files.py",
        ("            os.unlink(name)", "        unfinished.unlink(missing_ok=True)"),
        ("            pass", "        pass"),
        "tests/test_files.py tests/test_bench.py",
        "failed_write or file_is_replaced",
    ),
    Mutation(
        "numbers in tables lose their digits",
        "csv_tables.py",
        "{value:.6g}",
        "{value:.1g}",
        BENCH,
        "table_comes_back or read_as_it_was_written",
    ),
    Mutation(
        "true counts as the number 1 in a configuration",
        "schema.py",
        "isinstance(value, int | float) and not isinstance(value, bool) and",
        "isinstance(value, int | float) and",
        "tests/test_training_parts.py",
        "wrong_is_named or named or errors_name",
    ),
    Mutation(
        "the code of a tokenizer in a model directory runs",
        "training/load.py",
        "AutoTokenizer.from_pretrained(trained.tokenizer, trust_remote_code=False)",
        "AutoTokenizer.from_pretrained(trained.tokenizer, trust_remote_code=True)",
        CHECKPOINTS,
        "needs_its_code",
    ),
    Mutation(
        "predict imports what only training needs",
        "training/load.py",
        "from .run import TrainedModel",
        "from .run import TrainedModel\nfrom .tokens import tokenize",
        "tests/test_cli.py",
        "nothing_that_only_training_needs",
    ),
    Mutation(
        "the modules of torch and transformers are traversed by every garbage collection",
        "cli.py",
        "        gc.freeze()",
        "        pass",
        "tests/test_cli.py",
        "nothing_that_only_training_needs",
    ),
    Mutation(
        "the results of a checkpoint replace those of the finished model",
        "training/run.py",
        'return path.with_stem(f"{path.stem}-{self.name}") if self.name else path',
        "return path",
        CHECKPOINTS,
        "evaluated_and_predicts",
    ),
    Mutation(
        "files that the manifest does not list are accepted",
        "training/checkpoint.py",
        "if str(path) not in listed",
        "if False",
        CHECKPOINTS,
        "manifest_does_not_list",
    ),
    Mutation(
        "an artifact refers to files of a checkpoint that is removed later",
        "training/wandb_report.py",
        'policy="mutable"',
        'policy="immutable"',
        CHECKPOINTS,
        "are_artifacts",
    ),
    Mutation(
        "a configuration inherits the run directory of its base",
        "training/config.py",
        'inherited.pop("run", None)',
        'inherited.get("run", None)',
        PARTS,
        "keys_of_its_base",
    ),
    Mutation(
        "ratios refer to the first implementation by name",
        "bench/result_table.py",
        "for name in BASELINES if name in found",
        "for name in sorted(found)",
        COMPARE,
        "baseline_that_is_there",
    ),
    Mutation(
        "a key that stands twice in YAML is accepted",
        "yaml_loader.py",
        "if keys.count(key) > 1:",
        "if keys.count(key) > 2:",
        "tests/test_training_parts.py",
        "means_nothing or twice or file_that or invalid",
    ),
    Mutation(
        "dropout of reversible layers is not replayed",
        "models/reversible_linformer.py",
        "            with random.restored():\n",
        "            with torch.no_grad():\n",
        REVERSIBLE,
        "gradients_of_models",
    ),
    Mutation(
        "the gradient of a shared projection is that of one layer",
        "models/reversible_linformer.py",
        "gradient if known is None else known + gradient",
        "gradient",
        REVERSIBLE,
        "gradients_are",
    ),
    Mutation(
        "hooks of parameters run inside of the reversible backward pass, too",
        "models/reversible_linformer.py",
        "        one.clear()\n",
        "        pass\n",
        REVERSIBLE,
        "adapters",
    ),
    Mutation(
        "a shared projection has the rows of the first layer",
        "models/multihead_linformer.py",
        "max(attentions, key=lambda attention: attention.projected_length)",
        "next(iter(attentions))",
        "tests/test_encoder.py",
        "parts_of_a_shared",
    ),
    Mutation(
        "a decoder with its own vocabulary is tied to the encoder",
        "models/modeling_linformer_seq2seq.py",
        "self.config.decoder_vocab_size is None and len(widths) == 1",
        "len(widths) == 1",
        "tests/test_seq2seq.py",
        "tied",
    ),
    Mutation(
        "a loaded encoder makes the encoder-decoder save the names of the encoder",
        "models/modeling_linformer_seq2seq.py",
        "        if is_mapped:  # otherwise",
        "        if False:  # otherwise",
        "tests/test_seq2seq.py",
        "checkpoint",
    ),
    # convert
    Mutation(
        "the values of head_conv have the kernel of the keys",
        "models/projection_linformer.py",
        "self._convolve(values_BGND, self.value_slice())",
        "self._convolve(values_BGND, self.key_slice())",
        IMPORT,
        "with_convolution",
    ),
    Mutation(
        "the matrices of a convolution are transposed",
        "convert/packages.py",
        "weight.permute(*reversed(range(weight.dim())))",
        "weight.T if weight.dim() == 2 else weight.permute(2, 0, 1)",
        IMPORT,
        "with_convolution",
    ),
    Mutation(
        "a window of nothing but padding takes part in the attention of head_conv",
        "models/projection_linformer.py",
        "real_tokens_in_windows(x_BNC.shape[1], self.window, lengths_B, x_BNC.device) > 0)",
        "real_tokens_in_windows(x_BNC.shape[1], self.window, lengths_B, x_BNC.device) >= 0)",
        ATTENTION,
        "reference and head_conv",
    ),
    Mutation(
        "tokens past the last whole window of a convolution are read",
        "convert/packages.py",
        "lengths = {given - given % window for window in windows}",
        "lengths = {given for window in windows}",
        IMPORT,
        "windows or convert",
    ),
    Mutation(
        "Keras: the kernels of head_conv lose their bias",
        "keras/projection.py",
        "weight_MWDE[0]) + bias_ME",
        "weight_MWDE[0])",
        f"{KERAS}/test_attention.py",
        "reference and head_conv",
        "torch",
    ),
    Mutation(
        "values with the bias of E instead of F",
        "models/projection_linformer.py",
        "values_BGKD + bias_MK1[self.value_slice()]",
        "values_BGKD + bias_MK1[self.key_slice()]",
        IMPORT,
        "test_the_layer",
    ),
    Mutation(
        "the inner bias of w_o_intermediate_dim is lost",
        "convert/packages.py",
        'second[".weight"] @ first[".bias"] + second[".bias"]',
        'second[".bias"]',
        IMPORT,
        "test_the_layer",
    ),
    Mutation(
        "fairseq's position table without its last rows instead of its first",
        "convert/packages.py",
        "positions[unused:]",
        "positions[:-unused]",
        IMPORT,
        "test_the_language_model",
    ),
    Mutation(
        "each layer gets its own copy of a matrix that all layers share",
        "convert/weights.py",
        'return "layerwise" if len(layers) > 1',
        'return "kv" if len(layers) > 1',
        IMPORT,
        "language_model",
    ),
    Mutation(
        "files are unpickled",
        "convert/tensor_files.py",
        "weights_only=True)",
        "weights_only=False)",
        IMPORT,
        "files_that_hold",
    ),
    Mutation(
        "a row counts for the neighboring block, too",
        "models/tiling_linformer.py",
        "before, after = padded.cumsum(dim=2)[:, :, :blocks]",
        "before, after = padded.cumsum(dim=2)[:, :, 1 : blocks + 1]",
        WINDOW,
        "reference or stand",
    ),
    Mutation(
        "a global token in the window counts twice",
        "models/tiling_linformer.py",
        "(global_nS // window - block_n1).abs() > 1]",
        "(global_nS // window - block_n1).abs() >= 0]",
        WINDOW,
        "reference",
    ),
    Mutation(
        "rows count for global tokens, too",
        "models/projection_linformer.py",
        "first_BnK = first_BK[:, None].maximum(start_n1.clamp(min=blocks.skipped))",
        "first_BnK = first_BK[:, None].maximum(start_n1)",
        WINDOW,
        "reference or stand",
    ),
    Mutation(
        "the gradient of the block to the right is lost",
        "models/tiling_linformer.py",
        "split_windows(near_BPF[:, 2 * window :], size)[:, :, size - window :] += right",
        "pass",
        WINDOW,
        "gradients",
    ),
    Mutation(
        "dropout draws other numbers in the backward pass of a window",
        "models/window_linformer.py",
        "RandomState(query_BNF.device) if attention.dropout else None",
        "None",
        WINDOW,
        "dropout",
    ),
    Mutation(
        "blocks are counted with padding",
        "models/attention_linformer.py",
        'x_BNC, lengths_B, place_BN = real_tokens_first(x_BNC, boolean_mask("mask", mask, x_BNC))',
        'lengths_B = boolean_mask("mask", mask, x_BNC).sum(dim=1)',
        WINDOW,
        "reference or fits",
    ),
    Mutation(
        "short inputs do not skip the rows of a signed E",
        "models/tiling_linformer.py",
        "before, after = padded.cumsum(dim=2)[:, :, :blocks], padded.flip(2).cumsum(dim=2).flip(2)[:, :, 4:]",
        "before, after = mass_BMnK.sum(dim=2, keepdim=True) - mass_BMnK, 1e-3",
        WINDOW,
        "fits",
    ),
    Mutation(
        "the distance bias is that of the opposite distance",
        "models/window_linformer.py",
        "distance_QP = near_P - torch.arange(tiling.size, device=device)[:, None]",
        "distance_QP = torch.arange(tiling.size, device=device)[:, None] - near_P",
        WINDOW,
        "reference or band",
    ),
    Mutation(
        "the distance bias has the gradient of the last chunk",
        "models/window_linformer.py",
        "grad_bias_HQP += grad_piece.distance_bias_HQP",
        "grad_bias_HQP = grad_piece.distance_bias_HQP",
        WINDOW,
        "gradients",
    ),
    Mutation(
        "near tokens of a piece are one token off in the backward pass",
        "models/tiling_linformer.py",
        "return tokens, slice(tokens.start - first, tokens.stop - first)",
        "return tokens, slice(0, tokens.stop - tokens.start)",
        WINDOW,
        "reference",
    ),
    Mutation(
        "the gradient of scores forgets that weights sum to one",
        "models/window_linformer.py",
        "keepdim=True), value=-1)",
        "keepdim=True), value=0)",
        WINDOW,
        "gradients",
    ),
    Mutation(
        "short inputs have no distance bias",
        "models/attention_linformer.py",
        "length <= 2 * self.window_length and self.distance_bias is None",
        "length <= 2 * self.window_length",
        WINDOW,
        "reference",
    ),
    Mutation(
        "a new distance bias changes a trained model",
        "models/window_linformer.py",
        "return torch.zeros_like(self.weight)",
        "return self.weight",
        "tests/test_training_parts.py",
        "continues_with_a_window",
    ),
    Mutation(
        "compiled queries see the rows that fill up those of a short input",
        "models/window_linformer.py",
        "(0, missing), value=hidden",
        "(0, missing), value=0.0",
        "tests/test_torch.py",
        "compiled_window",
    ),
    Mutation(
        "one scale for all rows of 8-bit activations",
        "models/int8_linformer.py",
        "x_RI.abs().amax(dim=-1, keepdim=True)",
        "x_RI.abs().amax().expand(x_RI.shape[0], 1).clone()",
        "tests/test_int8.py",
        "layer or rows",
    ),
    Mutation(
        "8-bit layers are chunked with the rows of the first chunk",
        "models/int8_linformer.py",
        "output_RO[rows] = self._rows(rows_RI[rows])",
        "output_RO[rows] = self._rows(rows_RI[: len(output_RO[rows])])",
        "tests/test_int8.py",
        "rows",
    ),
    Mutation(
        "float32 weights are loaded as 8-bit weights of scale 1",
        "models/int8_linformer.py",
        "self.scale.fill_(torch.nan)",
        "self.scale.fill_(1)",
        "tests/test_int8.py",
        "another_precision",
    ),
]


def path_in(root: Path, mutation: Mutation) -> Path:
    """The file of a mutation in a checkout of this or of the old layout."""
    path = root / PACKAGE / mutation.file
    return path if path.exists() else root / PACKAGE / OLD_PATHS.get(mutation.file, mutation.file)


def mutated(root: Path, mutation: Mutation) -> tuple[Path, str] | None:
    """The file and its text with the bug; None if no snippet occurs exactly once."""
    path = path_in(root, mutation)
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    snippets, replacements = (
        (value,) if isinstance(value, str) else value for value in (mutation.snippet, mutation.replacement)
    )
    for snippet, replacement in zip(snippets, replacements, strict=True):
        if text.count(snippet) == 1:
            return path, text.replace(snippet, replacement)
    return None


def copied(root: Path, folder: Path) -> Path:
    """A checkout with its own source and tests, and links to everything else."""
    for entry in root.iterdir():
        if entry.name in COPIED:
            shutil.copytree(entry, folder / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not entry.name.startswith(".") and entry.name != "pytest.ini":
            (folder / entry.name).symlink_to(entry)
    return folder


def run_tests(root: Path, mutation: Mutation) -> int:
    """The exit code of pytest: 0 passed, 1 failed, 5 no test was selected."""
    quiet = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--hypothesis-seed=0"]
    only = ["-k", mutation.only] if mutation.only else []
    environment = {
        **os.environ,
        **{"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        **({"KERAS_BACKEND": mutation.backend} if mutation.backend else {}),
    }
    tests = [test for test in mutation.tests.split() if (root / test).exists()]
    if not tests:
        return 5
    if mutation.backend:
        quiet.remove("--hypothesis-seed=0")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *quiet, *only, *tests],
            cwd=root,
            env=environment,
            capture_output=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 1
    return done.returncode


def outcome(root: Path, mutation: Mutation, baselines: dict[tuple[str, str], int], trust: bool) -> str:
    """Whether the tests notice the bug: "caught", "survived", or why that is not known."""
    found = mutated(root, mutation)
    if found is None:
        return "not applied"
    key = (mutation.tests, mutation.only)
    if key not in baselines and not trust:
        baselines[key] = run_tests(root, mutation)
    if baselines.get(key):
        return "no such test" if baselines[key] == 5 else "fails without the bug"
    path, text = found
    before = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    try:
        code = run_tests(root, mutation)
        return {0: "survived", 5: "no such test"}.get(code, "caught")
    finally:
        path.write_text(before, encoding="utf-8")


def numbers(given: list[str]) -> list[int]:
    """1 2 5-7 as numbers; all of them if nothing is given.

    >>> numbers(["3", "5-7"])
    [3, 5, 6, 7]
    """
    ends = [(part.split("-")[0], part.split("-")[-1]) for part in given]
    chosen = [number for first, last in ends for number in range(int(first), int(last) + 1)]
    return chosen or list(range(1, len(MUTATIONS) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("numbers", nargs="*", help="which mutations, such as 3 or 10-20; all by default")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose source and tests are used")
    parser.add_argument("--output", type=Path, help="a file that gets the lines, too")
    parser.add_argument("--list", action="store_true", help="only show them, and whether their snippets are found")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without the bugs first")
    options = parser.parse_args()
    counts: dict[str, int] = {}
    baselines: dict[tuple[str, str], int] = {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root = copied(options.root.resolve(), Path(folder))
        for number in numbers(options.numbers):
            mutation, start = MUTATIONS[number - 1], time.monotonic()
            if options.list:
                result = "applies" if mutated(root, mutation) else "not applied"
            else:
                result = outcome(root, mutation, baselines, options.trust)
            counts[result] = counts.get(result, 0) + 1
            line = f"{number:3}  {result:21}  {time.monotonic() - start:4.0f} s  {mutation.file}: {mutation.bug}"
            print(line, flush=True)
            if options.output:
                with options.output.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
    print(", ".join(f"{count} {result}" for result, count in counts.items()))


if __name__ == "__main__":
    main()
