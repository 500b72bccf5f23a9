"""`linformer plot`: figures show what was measured, trained or learned."""

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
import torch
import yaml
from torch import nn
from training_zoo import command, read_json, read_lines, refused

from linformer_kit import LinformerAttention, plot_heads
from linformer_kit.bench.result_table import COLUMNS
from linformer_kit.csv_tables import as_csv
from linformer_kit.errors import UserError
from linformer_kit.models.configuration_linformer import LinformerConfig
from linformer_kit.models.modeling_linformer import (
    LinformerForCausalLM,
    LinformerForMaskedLM,
    LinformerForSequenceClassification,
)
from linformer_kit.models.modeling_linformer_seq2seq import LinformerForConditionalGeneration
from linformer_kit.plots import style
from linformer_kit.plots.costs import draw_costs
from linformer_kit.plots.curves import learning_curves
from linformer_kit.report.inputs import read_inputs, short_names
from linformer_kit.report.plot import figures
from linformer_kit.training.config import TokenizerConfig
from linformer_kit.training.tokenizer import train_tokenizer

pytestmark = pytest.mark.usefixtures("restore_global_state")

LENGTHS = (512, 1024, 2048, 4096)
TEXT = "grüne Häuser am Fluss"


# tables


def row(implementation="linformer-kit", length=512, projected_length=64, seconds=1.0, mib=10.0, **others):
    facts = {"hidden_size": 64, "num_heads": 4, "num_layers": 2, "sharing": "headwise", "device": "cpu", "torch": "2.0"}
    machine = {"cpu": "Abacus", "cores": 2, "threads": 2, "memory_gib": 8, "system": "Linux", "date": "2026-01-02"}
    point = {"subject": "layer", "step": "forward", "implementation": implementation, "length": length, "batch": 1}
    found = {"status": "ok", "seconds_median": seconds, "memory_status": "ok", "peak_mib": mib}
    return {
        **dict.fromkeys(COLUMNS, ""),
        **facts,
        **machine,
        **point,
        **found,
        "projected_length": projected_length,
        **others,
    }


def power_law(implementation, projected_length, exponent, **others):
    """Time as N^exponent, memory as N."""
    return [
        row(implementation, length, projected_length, 0.5 * (length / 512) ** exponent, length / 16, **others)
        for length in LENGTHS
    ]


def write_table(path, rows):
    path.write_text(as_csv(COLUMNS, rows), encoding="utf-8")
    return path


def panel(figure, title):
    (found,) = [axes for axes in figure.axes if axes.get_title(loc="left").replace("\n", " ") == title]
    return found


def drawn(axes):
    """The points of each line, by label."""
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def costs(*paths):
    return figures(paths, "costs")["costs"]


def footnote(figure):
    return " ".join(figure.get_supxlabel().split())


def test_lines_show_the_table_and_legends_the_exponents(tmp_path):
    rows = [*power_law("linformer-kit", 64, 1.0), *power_law("linformer-kit", 128, 1.25), *power_law("bert", "", 2.0)]
    figure = costs(write_table(tmp_path / "points.csv", rows[::-1]))
    time, memory = panel(figure, "layer, forward: time"), panel(figure, "layer, forward: memory")
    assert drawn(time) == {
        "linformer-kit K=64  N^1.00": [(512, 0.5), (1024, 1), (2048, 2), (4096, 4)],
        "linformer-kit K=128  N^1.25": [(length, 0.5 * (length / 512) ** 1.25) for length in LENGTHS],
        "bert  N^2.00": [(512, 0.5), (1024, 2), (2048, 8), (4096, 32)],
    }
    assert all(points == [(length, length / 16) for length in LENGTHS] for points in drawn(memory).values())
    assert [text.get_text() for text in time.get_legend().get_texts()] == list(drawn(time))
    assert (time.get_xscale(), time.get_yscale()) == ("log", "log")


def test_missing_measurements_have_no_point_and_two_points_no_exponent(tmp_path):
    rows = power_law("linformer-kit", 64, 1.0)
    rows[2] |= {"status": "out of memory", "seconds_median": ""}
    rows[3] |= {
        "memory_status": "over the time limit",
        "peak_mib": "",
        "status": "over the time limit",
        "seconds_median": "",
    }
    figure = costs(write_table(tmp_path / "points.csv", rows))
    assert drawn(panel(figure, "layer, forward: time")) == {"linformer-kit K=64": [(512, 0.5), (1024, 1)]}
    assert drawn(panel(figure, "layer, forward: memory")) == {
        "linformer-kit K=64  N^1.00": [(512, 32), (1024, 64), (2048, 128)]
    }


def test_there_is_a_panel_for_each_subject_and_step_and_none_is_empty(tmp_path):
    rows = [
        *power_law("linformer-kit", 64, 1.0, subject="encoder", step="training"),
        *power_law("linformer-kit", 64, 1.0, subject="encoder", step="forward", memory_status="", peak_mib=""),
        *power_law(
            "bert", "", 2.0, status="out of memory", seconds_median="", memory_status="out of memory", peak_mib=""
        ),
    ]
    titles = [axes.get_title(loc="left") for axes in costs(write_table(tmp_path / "points.csv", rows)).axes]
    assert titles == ["encoder, forward: time", "encoder, training: time", "encoder, training: memory"]


def test_implementations_differ_in_color_or_style_and_lengths_in_markers(tmp_path):
    names = [
        "linformer-kit",
        "full-attention",
        "linformer",
        "linformer-pytorch",
        "bert",
        "bert-eager",
        "longformer",
        "big-bird",
    ]
    names += ["nystromformer", "fnet", "modern-bert", "led", "long-t5", "somebody's", "another", "third"]
    rows = [point for name in names for K in (64, 128) for point in power_law(name, K, 1.0)]
    lines = panel(costs(write_table(tmp_path / "points.csv", rows)), "layer, forward: time").lines
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}
    assert len(looks) == len(lines) == 2 * len(names)
    assert len({look[:2] for look in looks}) == len(names)
    assert len({look[2] for look in looks}) == 2


def test_costs_are_per_example_where_the_batch_depends_on_the_length(tmp_path):
    rows = [row(length=length, batch=4096 // length, seconds=2.0, mib=64) for length in LENGTHS]
    figure = costs(write_table(tmp_path / "points.csv", rows))
    times = drawn(panel(figure, "layer, forward: time per example"))
    assert times == {"linformer-kit K=64  N^1.00": [(512, 0.25), (1024, 0.5), (2048, 1), (4096, 2)]}
    assert drawn(panel(figure, "layer, forward: memory per example"))["linformer-kit K=64  N^1.00"][0] == (512, 8)
    assert "batches of 1 to 8" in footnote(figure)


def test_several_tables_share_panels_unless_they_have_the_same_points(tmp_path):
    ours = write_table(tmp_path / "ours.csv", power_law("linformer-kit", 64, 1.0))
    theirs = write_table(tmp_path / "theirs.csv", power_law("bert", "", 2.0))
    again = write_table(tmp_path / "again.csv", power_law("linformer-kit", 64, 1.5))
    assert len(drawn(panel(costs(ours, theirs), "layer, forward: time"))) == 2
    figure = costs(ours, again)
    assert list(drawn(panel(figure, "layer, forward, ours.csv: time"))) == ["linformer-kit K=64  N^1.00"]
    assert list(drawn(panel(figure, "layer, forward, again.csv: time"))) == ["linformer-kit K=64  N^1.50"]


def test_titles_name_the_sizes_in_which_panels_differ(tmp_path):
    small, large = (
        write_table(tmp_path / f"{size}.csv", power_law("linformer-kit", 64, 1.0, hidden_size=size))
        for size in (64, 512)
    )
    titles = [axes.get_title(loc="left") for axes in costs(small, large).axes]
    assert "layer, forward, hidden size 512: time" in titles
    assert "hidden size" not in footnote(costs(small, large))
    assert "hidden size 64, 4 heads, sharing headwise, cpu" in footnote(costs(small))


def test_the_footnote_has_only_sizes_that_the_subjects_have(tmp_path):
    sizes = {"num_layers": 2, "target_length": 64}
    rows = {
        subject: power_law("linformer-kit", 64, 1.0, subject=subject, **sizes)
        for subject in ("layer", "encoder", "encoder-decoder")
    }
    layer, encoder, both = (
        footnote(costs(write_table(tmp_path / f"{place}.csv", each)))
        for place, each in enumerate((rows["layer"], rows["encoder"], [*rows["layer"], *rows["encoder-decoder"]]))
    )
    assert "4 heads, sharing headwise, cpu" in layer
    assert "4 heads, 2 layers, sharing headwise, cpu" in encoder
    assert "4 heads, 2 layers, sharing headwise, targets of 64, cpu" in both


@pytest.mark.parametrize(
    ("column", "said"), [("cpu", "different machines: cpu"), ("torch", "different versions: torch")]
)
def test_the_footnote_says_if_machines_or_versions_differ(tmp_path, column, said):
    ours = write_table(tmp_path / "ours.csv", power_law("linformer-kit", 64, 1.0))
    other = write_table(tmp_path / "other.csv", power_law("bert", "", 2.0, **{column: "3.0"}))
    assert "different" not in footnote(costs(ours))
    assert "Abacus, 2 cores" in footnote(costs(ours))
    found = footnote(costs(ours, other))
    assert re.search(rf"{said} (Abacus|2\.0|3\.0) / ", found), found
    assert found.count("different") == 1


def as_text(rows):
    return [{name: str(value) for name, value in each.items()} for each in rows]


def test_backends_have_their_own_panels_and_unknown_subjects_come_last_in_order_of_appearance():
    rows = [
        row(length=length, batch="", backend=backend, subject=subject)
        for subject, backend in (("second", ""), ("first", ""), ("layer", "torch"), ("layer", "keras-jax"))
        for length in LENGTHS[:2]
    ]
    figure = draw_costs({"new.csv": as_text(rows)})
    titles = [axes.get_title(loc="left") for axes in figure.axes if "time" in axes.get_title(loc="left")]
    assert titles == [
        *("layer, forward, keras-jax: time", "layer, forward, torch: time"),
        *("second, forward: time", "first, forward: time"),
    ]


def test_variants_and_blocks_have_their_own_lines_next_to_full_attention():
    lines = [
        ("linformer-kit", {"projected_length": 64, "variant": "mean"}),
        ("linformer-kit", {"projected_length": 64}),
        ("linformer-kit", {"projected_length": 4, "block_length": 128}),
        ("full-attention", {"projected_length": ""}),
    ]
    rows = [row(name, length, **others) for name, others in lines for length in LENGTHS[:2]]
    axes = panel(draw_costs({"new.csv": as_text(rows)}), "layer, forward: time")
    assert set(drawn(axes)) == {
        *("linformer-kit, mean K=64", "linformer-kit K=64"),
        *("linformer-kit 128→4", "full-attention"),
    }
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 4


# runs


@pytest.fixture(scope="module")
def finished(trained_run):
    return trained_run("classification").run


@pytest.fixture
def make_run(finished, tmp_path):
    """A finished run with known settings and metrics: a modified copy of a real one."""

    def make(name, metrics, evaluation=None, seed=0, task="classification", training=None, **model):
        folder = shutil.copytree(finished, tmp_path / name)
        tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        tree |= {"seed": seed, "task": task, "training": {**tree["training"], **(training or {})}}
        (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        config = read_json(folder / "model" / "config.json")
        (folder / "model" / "config.json").write_text(json.dumps({**config, **model}), encoding="utf-8")
        (folder / "result.json").write_text(json.dumps(metrics), encoding="utf-8")
        if evaluation:
            (folder / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
        return folder

    return make


def error_bars(axes):
    """(K, mean, lowest, highest) of each line with error bars."""
    found = {}
    for container in axes.containers:
        line, _, (bars,) = container
        ends = [segment[:, 1] for segment in bars.get_segments()]
        found[container.get_label()] = [
            (K, mean, low, high)
            for (K, mean), (low, high) in zip(zip(*line.get_data(), strict=True), ends, strict=True)
        ]
    return found


def test_learning_draws_the_metrics_of_each_run(finished, make_run):
    other = make_run("other", {})
    lines = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": float("nan")},
        {"step": 2, "validation_loss": 1.5, "validation_accuracy": 0.25},
    ]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    loss, accuracy = figures([finished, other])["learning"].axes
    measured = [line for line in read_lines(finished / "metrics.jsonl") if "validation_accuracy" in line]
    assert drawn(accuracy) == {
        "run": [(line["step"], line["validation_accuracy"]) for line in measured],
        "other": [(2, 0.25)],
    }
    assert accuracy.get_ylabel() == "validation accuracy"
    assert drawn(loss)["other, training"] == [(1, 2.0)]
    assert drawn(loss)["other, validation"] == [(2, 1.5)]
    assert len({line.get_color() for line in accuracy.lines}) == 2


def test_learning_of_language_models_shows_the_perplexity(trained_run):
    run = trained_run("causal-lm").run
    _, perplexity = figures([run])["learning"].axes
    (points,) = drawn(perplexity).values()
    assert points == [
        (line["step"], line["validation_perplexity"])
        for line in read_lines(run / "metrics.jsonl")
        if "validation_loss" in line
    ]


def test_quality_averages_seeds_and_shows_their_range(make_run):
    for seed, (short, long) in enumerate([(0.5, 0.75), (0.5, 0.875), (0.875, 1.0)]):
        make_run(f"short{seed}", {"validation_accuracy": short}, seed=seed, projected_length=4)
        last = make_run(f"long{seed}", {"validation_accuracy": long}, seed=seed, projected_length=8)
    make_run("mean", {"validation_accuracy": 0.25}, projection="mean", projected_length=8)
    for seed in (0, 1):
        make_run(f"full{seed}", {"validation_accuracy": 0.5 + seed / 4}, seed=seed, projection="none")
    figure = figures(sorted(last.parent.iterdir()), "quality")["quality"]
    (axes,) = figure.axes
    assert error_bars(axes) == {
        "linear": [(4, 0.625, 0.5, 0.875), (8, 0.875, 0.75, 1.0)],
        "mean": [(8, 0.25, 0.25, 0.25)],
    }
    assert {label: [y for _, y in points] for label, points in drawn(axes).items()}["full attention"] == [0.625, 0.625]
    assert axes.get_ylabel() == "validation accuracy"
    assert "1 to 3 seeds" in footnote(figure)


def test_one_k_per_layer_counts_as_their_mean(make_run):
    run = make_run("run", {"validation_accuracy": 0.5}, projected_length=[4, 8], num_hidden_layers=2)
    (axes,) = figures([run], "quality")["quality"].axes
    assert error_bars(axes)["linear"] == [(6, 0.5, 0.5, 0.5)]


def test_lists_of_k_of_the_same_mean_are_not_averaged(make_run):
    lengths = {"one": 8, "up": [4, 12], "down": [12, 4], "same": [8, 8]}
    for place, (name, K) in enumerate(lengths.items()):
        last = make_run(name, {"validation_accuracy": place / 4}, projected_length=K, num_hidden_layers=2)
    (axes,) = figures([last.parent / name for name in lengths], "quality")["quality"].axes
    assert error_bars(axes) == {
        "linear": [(8, 0.375, 0, 0.75)],  # 8 and [8, 8] are the same
        "linear, K_per_layer=[4, 12]": [(8, 0.25, 0.25, 0.25)],
        "linear, K_per_layer=[12, 4]": [(8, 0.5, 0.5, 0.5)],
    }


def test_a_run_without_its_model_is_rejected(make_run):
    run = make_run("run", {"validation_accuracy": 0.5})
    (run / "model" / "config.json").unlink()
    for what in ("quality", "sharing"):
        assert f"{run / 'model' / 'config.json'} is missing" in refused("plot", run, "--what", what)


def runs_with_curves(count, name="run"):
    lines = [{"step": step, "loss": 1.0, "validation_loss": 1.0, "validation_accuracy": 0.5} for step in (1, 2)]
    return {f"{name}{number}": lines for number in range(count)}


@pytest.mark.parametrize(("count", "name"), [(2, "run"), (40, "of a rather long name "), (8, "x" * 200)])
def test_panels_keep_their_size_and_all_names_fit_for_any_number_of_runs(count, name):
    figure = learning_curves(runs_with_curves(count, name), "validation_accuracy")
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert axes.get_window_extent().height / figure.dpi > 2.2
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.bbox.y1
    assert [text.get_text().replace("\n", "") for text in legend.get_texts()] == list(runs_with_curves(count, name))


def test_a_figure_without_room_for_its_panels_is_rejected(tmp_path):
    figure = learning_curves(
        runs_with_curves(400, "of a name that needs a line of its own " * 2), "validation_accuracy"
    )
    for name in ("picture.png", "picture.svg"):
        with pytest.raises(UserError, match="too many runs or too long names for one picture"):
            style.save(figure, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_damaged_lines_of_metrics_are_skipped(make_run):
    run = make_run("run", {})
    lines = [
        '{"step": 1, "loss": 2.0}',
        "[1]",
        "3",
        "null",
        '{"loss": 1.0}',
        '{"step": null, "loss": 1.0}',
        '{"step": 2, "lo',
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read_inputs([run]).runs[0].metrics == [{"step": 1, "loss": 2.0}]
    assert drawn(figures([run])["learning"].axes[0]) == {"training": [(1, 2.0)]}


def test_dollars_in_names_are_not_formulas(tmp_path):
    paths = [
        write_table(tmp_path / f"{name} $x^$.csv", power_law("a $\\frac$ b", 64, 1.0, cpu="$y^$"))
        for name in ("one", "two")
    ]
    written = command("plot", *paths, "--output", tmp_path / "x.svg").stdout
    assert written == f"{tmp_path / 'x.svg'}\n"


def test_runs_that_differ_in_more_than_the_seed_are_not_averaged(make_run):
    runs = [
        make_run(f"run{rate}", {"validation_accuracy": rate}, training={"learning_rate": rate}) for rate in (0.25, 0.5)
    ]
    (axes,) = figures(runs, "quality")["quality"].axes
    assert error_bars(axes) == {f"linear, learning_rate={rate}": [(8, rate, rate, rate)] for rate in (0.25, 0.5)}


def test_the_test_metric_is_preferred_where_all_runs_have_it(make_run):
    both = [
        make_run(f"run{K}", {"validation_accuracy": 0.5}, {"split": "test", "accuracy": 1 / K}, projected_length=K)
        for K in (4, 8)
    ]
    (axes,) = figures(both, "quality")["quality"].axes
    assert axes.get_ylabel() == "test accuracy"
    assert [mean for _, mean, _, _ in error_bars(axes)["linear"]] == [0.25, 0.125]
    of_file = make_run("file", {"validation_accuracy": 0.5}, {"split": None, "accuracy": 0.1}, projected_length=2)
    (axes,) = figures([*both, of_file], "quality")["quality"].axes
    assert axes.get_ylabel() == "validation accuracy"
    assert [mean for _, mean, _, _ in error_bars(axes)["linear"]] == [0.5, 0.5, 0.5]


def test_sharing_has_a_bar_for_each_mode_as_high_as_the_mean_of_its_seeds(make_run):
    accuracies = {"layerwise": [0.5, 0.75], "none": [0.875, 1.0], "kv": [0.25, 0.75], "headwise": [0.125, 0.25]}
    runs = [
        make_run(f"{mode}{seed}", {"validation_accuracy": value}, seed=seed, sharing=mode)
        for mode, values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    (axes,) = figures(runs, "sharing")["sharing"].axes
    modes = ["none", "headwise", "kv", "layerwise"]
    assert [label.get_text() for label in axes.get_xticklabels()] == modes
    by_place = sorted((bar.get_x(), bar.get_height()) for bar in axes.patches)
    assert [height for _, height in by_place] == [np.mean(accuracies[mode]) for mode in modes]
    ends = [tuple(segment[:, 1]) for lines in axes.collections for segment in lines.get_segments()]
    assert set(ends) == {tuple(values) for values in accuracies.values()}


# models


@pytest.fixture
def save(tmp_path):
    """A saved model with fresh weights and a tokenizer of bytes."""

    def save_model(kind=LinformerForMaskedLM, **changes):
        tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), [])
        sizes = {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "projected_length": 5,
            "max_position_embeddings": 40,
        }
        config = LinformerConfig(
            vocab_size=len(tokenizer),
            bos_token_id=2,
            eos_token_id=3,
            initializer_range=0.5,
            **sizes | changes,
        )
        model = kind(config).eval()
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return tmp_path / "model", model, tokenizer

    return save_model


def images(figure):
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.get_label() != "<colorbar>"]


def ids_of(tokenizer, text=TEXT):
    return torch.tensor([[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (LinformerForMaskedLM, {}),
        (LinformerForMaskedLM, {"projection": "none"}),
        (LinformerForMaskedLM, {"projection": "dynamic", "projected_length": [3, 6]}),
        (LinformerForCausalLM, {"block_length": 8, "slots": 2}),
        (LinformerForCausalLM, {"decoder_attention": "full"}),
        (LinformerForConditionalGeneration, {}),
    ],
)
def test_heads_are_the_attention_weights_of_the_model(save, kind, changes):
    folder, model, tokenizer = save(kind, **changes)
    stack = model.encoder if kind is LinformerForConditionalGeneration else model.model
    with torch.no_grad():
        expected = stack(ids_of(tokenizer), output_attentions=True).attentions
    found = images(figures([folder], "heads", TEXT)["heads"])
    assert len(found) == 4
    for image, weights in zip(found, [head for layer in expected for head in layer[0]], strict=True):
        np.testing.assert_array_equal(image, weights.numpy())
        np.testing.assert_allclose(image.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("kind", [LinformerForMaskedLM, LinformerForCausalLM])
def test_plot_heads_draws_what_a_model_returns(save, kind):
    _, model, tokenizer = save(kind, block_length=8, slots=2)
    ids = ids_of(tokenizer)
    model.train()
    found = images(plot_heads(model, ids, title="A title", size=(7, 5)))
    assert model.training
    with torch.no_grad():
        expected = model.eval()(ids, output_attentions=True).attentions
    for image, weights in zip(found, [head for layer in expected for head in layer[0]], strict=True):
        np.testing.assert_array_equal(image, weights.numpy())
    assert all("attend" not in vars(module) and "advance" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("changes", "slots"),
    [({"global_tokens": 1}, "the 5 slots"), ({"projected_length": [0, 3]}, "the 0 to 3 slots")],
    ids=str,
)
def test_heads_with_a_window_show_rows_and_tokens(save, changes, slots):
    """The rows, then all tokens, most of which a token outside of the window does not see."""
    folder, model, tokenizer = save(LinformerForMaskedLM, window_length=3, **changes)
    ids = ids_of(tokenizer)
    figure = figures([folder], "heads", TEXT)["heads"]
    assert f"{slots} that stand for the tokens outside of the window, a line, the" in footnote(figure)
    length, found = ids.shape[1], images(figure)
    ticks = figure.axes[len(found) - 1].get_xticklabels()
    rows = model.config.projected_lengths[-1]
    assert [(tick.get_position()[0], tick.get_text()) for tick in ticks] == [
        (rows, "1"),
        (rows + length - 1, f"{length}"),
    ]
    for image, again in zip(found, images(plot_heads(model, ids)), strict=True):
        np.testing.assert_array_equal(image, again)
        np.testing.assert_allclose(image.sum(axis=1), 1, rtol=1e-6)
    block = np.arange(length) // 3
    is_seen = abs(block[:, None] - block) <= 1
    is_seen[:, : changes.get("global_tokens", 0)] = True
    for number, image in enumerate(found):
        rows = model.config.projected_lengths[number // 2]
        assert image.shape == (length, rows + length)
        np.testing.assert_array_equal(image[:, rows:] > 0, is_seen)


def test_plot_heads_of_layers_in_any_module():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = LinformerAttention(16, 4, projected_length=5), LinformerAttention(16, 2)

        def forward(self, x, mask=None):
            return self.narrow(self.wide(x, mask=mask), mask=mask)

    module, x, mask = Both(), torch.randn(2, 9, 16), torch.arange(9) < torch.tensor([[9], [4]])
    figure = plot_heads(
        module, x, mask=mask, example=1, max_heads=3, title="Two layers", size=(7, 5), labels="abcdefghi"
    )
    assert figure.get_suptitle() == "Two layers"
    assert tuple(figure.get_size_inches()) == (7, 5)
    assert "first 3 of 4 heads" in footnote(figure)
    drawn = [axes for axes in figure.axes if axes.images]
    assert [axes.get_ylabel() for axes in drawn if axes.get_ylabel()] == ["wide", "narrow"]
    assert [label.get_text() for label in drawn[0].get_yticklabels()] == list("abcdefghi")
    with torch.no_grad():
        output, wide = module.wide(x, mask=mask, need_weights=True)
        _, narrow = module.narrow(output, mask=mask, need_weights=True)
    found = [np.asarray(axes.images[0].get_array()) for axes in drawn]
    for image, weights in zip(found, [*wide[1, :3], *narrow[1]], strict=True):
        np.testing.assert_array_equal(image, weights.numpy())


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (nn.Linear(16, 16), {}, "Linear computed no Linformer attention"),
        (LinformerAttention(16, 2), {"example": 2}, "example is 2 but the batch has 2; choose one of 0 … 1"),
        (LinformerAttention(16, 2), {"labels": ["a"]}, "labels has 1 names but the input has 9 tokens"),
        (LinformerAttention(16, 2), {"max_heads": 0}, "max_heads is 0"),
    ],
)
def test_plot_heads_rejects(module, options, message):
    with pytest.raises(ValueError, match=message):
        plot_heads(module, torch.randn(2, 9, 16), **options)


def test_heads_of_a_classifier_include_special_tokens(finished, tmp_path):
    (tmp_path / "text.txt").write_text("a lovely road", encoding="utf-8")
    figure = figures([finished], "heads", str(tmp_path / "text.txt"))["heads"]
    model = LinformerForSequenceClassification.from_pretrained(finished / "model").eval()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["<s>", "a", "lovely", "road", "</s>"]
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(finished / "model")(["a lovely road"], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        (expected,) = model(ids, output_attentions=True).attentions
    np.testing.assert_array_equal(np.stack(images(figure)), expected[0].numpy())


def test_bytes_have_visible_labels(save):
    folder, *_ = save()
    figure = figures([folder], "heads", "a $x$\nü_")["heads"]
    figure.draw_without_rendering()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["a", "␣", "$", "x", "$", "⏎", "\\xc3", "\\xbc", "_", "</s>"]


def test_a_long_text_is_truncated_and_only_some_tokens_are_labeled(save):
    folder, *_ = save(max_position_embeddings=200, num_hidden_layers=1)
    figure = figures([folder], "heads", "abcdefghij" * 30)["heads"]
    assert images(figure)[0].shape == (200, 5)
    assert "the first 200 of 301 tokens" in footnote(figure)
    ticks = figure.axes[0].get_yticks()
    assert 32 <= len(ticks) <= 64
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "abcdefghij"[place % 10] for place in ticks
    ]


def curves(axes):
    """The curves without their offsets, by slot."""
    ticks = zip(axes.get_yticks(), axes.get_yticklabels(), axes.lines, strict=True)
    return {int(label.get_text()): line.get_ydata() - offset for offset, label, line in ticks}


@pytest.mark.parametrize("sharing", ["headwise", "kv", "none", "layerwise"])
def test_slots_are_the_columns_of_e(save, sharing):
    folder, model, _ = save(sharing=sharing)
    panels = figures([folder], "slots")["slots"].axes
    E = (
        [model.model.projection]
        if sharing == "layerwise"
        else [layer.attention.projection for layer in model.model.layers]
    )
    matrices = [each.weight[:, head] for each in E for head in range(2 if sharing == "none" else 1)]
    assert len(panels) == len(matrices) == {"none": 4, "layerwise": 1}.get(sharing, 2)
    for axes, weight in zip(panels, matrices, strict=True):
        found = curves(axes)
        assert list(found) == [1, 2, 3, 4, 5]
        np.testing.assert_allclose(np.stack(list(found.values()), axis=1), weight.detach().numpy(), atol=1e-9)
    assert panels[0].get_title(loc="left") == {
        "none": "layer 1, head 1 (K=5)",
        "layerwise": "all layers (K=5)",
    }.get(sharing, "layer 1 (K=5)")


def test_slots_of_a_layer_with_a_smaller_k_are_those_of_its_part_of_a_shared_e(save):
    folder, model, _ = save(sharing="layerwise", projected_length=[6, 3])
    panels = figures([folder], "slots")["slots"].axes
    assert [axes.get_title(loc="left") for axes in panels] == ["layer 1 (K=6)", "layer 2 (K=3)"]
    pairs = model.model.projection.weight[:, 0].detach().unflatten(-1, (3, 2)).mean(dim=-1)
    np.testing.assert_allclose(np.stack(list(curves(panels[1]).values()), axis=1), pairs.numpy(), atol=1e-9)


def test_only_some_of_many_slots_are_shown_and_the_title_says_how_many(save):
    folder, model, _ = save(projected_length=39, num_hidden_layers=1)
    (axes,) = figures([folder], "slots")["slots"].axes
    found = curves(axes)
    assert axes.get_title(loc="left") == "layer 1 (32 of K=39)"
    assert (len(found), min(found), max(found)) == (32, 1, 39)
    weight = model.model.layers[0].attention.projection.weight.detach()[:, 0]
    for slot, curve in found.items():
        np.testing.assert_allclose(curve, weight[:, slot - 1].numpy(), atol=1e-9)


def test_slots_of_a_dynamic_projection_are_those_of_the_text(save):
    folder, model, tokenizer = save(projection="dynamic")
    panels = figures([folder], "slots", TEXT)["slots"].axes
    with torch.no_grad():
        hidden = model.model(ids_of(tokenizer), output_hidden_states=True).hidden_states
    for axes, layer, x in zip(panels, model.model.layers, hidden, strict=False):
        logits = layer.attention_residual.norm(x[0]) @ layer.attention.projection.weight[:, 0]
        expected = logits.softmax(dim=0).detach().numpy()
        np.testing.assert_allclose(np.stack(list(curves(axes).values()), axis=1), expected, atol=1e-6)


def test_slots_of_means_are_windows(save):
    folder, *_ = save(projection="mean", projected_length=4)
    (axes,) = figures([folder], "slots")["slots"].axes
    windows = np.repeat(np.eye(4), 10, axis=1) / 10
    np.testing.assert_allclose(np.stack(list(curves(axes).values())), windows, atol=1e-7)


# files


def test_every_figure_is_written_as_png_and_svg(finished, tmp_path):
    table = write_table(tmp_path / "points.csv", power_law("linformer-kit", 64, 1.0))
    output = tmp_path / "new" / "plots"
    printed = command("plot", table, finished, "--output", output).stdout
    names = ["costs.png", "costs.svg", "learning.png", "learning.svg"]
    assert printed.splitlines() == [str(output / name) for name in names]
    assert sorted(path.name for path in output.iterdir()) == names
    for name in ("costs", "learning"):
        assert matplotlib.image.imread(output / f"{name}.png").shape[1] == 1425
        assert ElementTree.parse(output / f"{name}.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("name", ["picture.png", "picture.svg"])
def test_the_output_may_be_one_file(tmp_path, name):
    table = write_table(tmp_path / "points.csv", power_law("linformer-kit", 64, 1.0))
    command("plot", table, "--output", tmp_path / "out" / name)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[name[-3:]]
    assert (tmp_path / "out" / name).read_bytes().startswith(start)


def test_runs_of_the_same_name_are_named_by_their_parent_directories():
    paths = [Path("/home/me/a/run"), Path("/home/me/b/run")]
    assert short_names(paths) == ["a/run", "b/run"]


def test_duplicate_inputs_are_read_once(tmp_path):
    table = write_table(tmp_path / "points.csv", power_law("linformer-kit", 64, 1.0))
    assert list(read_inputs([table, tmp_path / "." / "points.csv"]).tables) == ["points.csv"]


# errors


def test_unsuitable_inputs_are_rejected(tmp_path, finished):
    table = write_table(tmp_path / "points.csv", [row()])
    assert "none.csv does not exist" in refused("plot", tmp_path / "none.csv")
    assert "is neither a run" in refused("plot", tmp_path)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert "lacks the column subject" in refused("plot", tmp_path / "other.csv")
    (tmp_path / "empty.csv").touch()
    assert "empty.csv is not a table of this version: it is empty; choose" in refused("plot", tmp_path / "empty.csv")
    assert "choose its figure with --what heads or --what slots" in refused("plot", finished / "model")
    (tmp_path / "cut.csv").write_text(table.read_text()[:-40])
    assert "row 1 has more or fewer values" in refused("plot", tmp_path / "cut.csv")
    assert "peak_mib is 'much'" in refused("plot", write_table(tmp_path / "damaged.csv", [row(mib="much")]))
    assert "no point of bad.csv was measured" in refused(
        "plot", write_table(tmp_path / "bad.csv", [row(status="out of memory", memory_status="out of memory")])
    )
    free = refused("plot", write_table(tmp_path / "free.csv", [row(seconds=0, mib=0)]))
    assert (
        free == "no point of free.csv was measured: all times and memories are 0, which is below what can be measured"
    )
    assert "run is a run; omit it" in refused("plot", finished, "--what", "costs")
    assert "requires a run, but points.csv is a table" in refused("plot", table, "--what", "learning")
    assert "--text requires --what heads" in refused("plot", finished, "--text", "a")
    assert "but 2 were given" in refused("plot", finished, finished / "model", "--what", "slots")
    assert "--what heads or --what slots" in refused("plot", finished / "model")
    assert "--what heads or --what slots" in refused("plot", finished, finished / "model", "--output", tmp_path / "out")
    assert "model is a saved model; omit it" in refused("plot", finished / "model", "--what", "quality")


def test_unwritable_outputs_are_rejected_before_any_work(tmp_path, finished):
    table = write_table(tmp_path / "points.csv", power_law("linformer-kit", 64, 1.0))
    assert "points.csv is a file" in refused("plot", tmp_path / "is not read", "--output", table)
    assert "points.csv is a file" in refused("plot", tmp_path / "is not read", "--output", table / "plots" / "x.png")
    assert "pass a .png or .svg file" in refused("plot", tmp_path / "is not read", "--output", tmp_path / "x.pdf")
    assert "2 figures: costs, learning" in refused("plot", table, finished, "--output", tmp_path / "x.png")
    assert "cannot write to /proc" in refused("plot", tmp_path / "is not read", "--output", "/proc/plots")
    assert [path.name for path in tmp_path.iterdir()] == ["points.csv"]


def test_runs_that_cannot_be_compared_are_named(make_run):
    first = make_run("first", {"validation_accuracy": 0.5})
    other = make_run("other", {"validation_perplexity": 2.0}, task="masked-lm")
    for what in ("learning", "quality", "sharing"):
        message = refused("plot", first, other, "--what", what)
        assert "first is classification" in message
        assert "other is masked-lm" in message


def test_for_runs_without_a_metric_the_error_names_the_command(make_run):
    without = make_run("without", {"validation_loss": 0.5})
    assert f"`linformer evaluate {without}`" in refused("plot", without, "--what", "quality")
    (without / "result.json").unlink()
    assert f"`linformer train {without / 'config.yaml'}`" in refused("plot", without, "--what", "quality")
    (without / "metrics.jsonl").unlink()
    assert "without has no metrics yet" in refused("plot", without)
    full = make_run("full", {"validation_accuracy": 0.5}, projection="none")
    assert "none of the runs has a projected length K" in refused("plot", full, "--what", "quality")
    assert "has matrices to share" in refused("plot", full, "--what", "sharing")


@pytest.mark.parametrize(
    ("projection", "what", "said"),
    [
        ("none", "slots", "has full attention"),
        ("max", "slots", "takes the largest value"),
        ("conv", "slots", "for each channel"),
        ("dynamic", "slots", "pass --text"),
        ("linear", "heads", "pass --text"),
    ],
)
def test_models_that_cannot_be_drawn_say_why(save, projection, what, said):
    folder, *_ = save(projection=projection)
    with pytest.raises(UserError, match=said):
        figures([folder], what)


def test_a_text_file_must_exist_and_contain_text(save, tmp_path):
    folder, *_ = save()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    for missing in ("missing.txt", "essay.md", "texts/essay"):
        assert "there is no such file" in refused("plot", folder, "--what", "heads", "--text", missing)
    assert "a directory; pass a file in it" in refused("plot", folder, "--what", "heads", "--text", tmp_path)
    assert "which is not UTF-8 text" in refused("plot", folder, "--what", "heads", "--text", tmp_path / "binary")


def test_a_single_word_is_a_text_and_the_footnote_has_an_excerpt(save, tmp_path):
    folder, *_ = save()
    assert "Text: “house”." in footnote(figures([folder], "heads", "house")["heads"])
    (tmp_path / "long.txt").write_text("\ufeffone  two $x$\n$y$ 字 " + "and so on " * 20, encoding="utf-8")
    figure = figures([folder], "heads", str(tmp_path / "long.txt"))["heads"]
    figure.draw_without_rendering()
    assert r"Text: “one two \$x\$ \$y\$ □ and so on" in footnote(figure)
    assert footnote(figure).endswith("…”.")
