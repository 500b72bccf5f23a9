"""The gate of the benchmarks: what is right passes and can be called, what is wrong is refused."""

import functools
import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("linformer", reason='needs pip install "linformer-kit[bench]"')

from linformer_kit.bench import encoders, generators, implementations, keras_layers, layers, point, training_loop
from linformer_kit.bench.checks import WrongImplementation
from linformer_kit.bench.implementations import IMPLEMENTATIONS, SUBJECT_KINDS, VARIANTS, can_do, check, make_workload
from linformer_kit.bench.isolated import measure_isolated
from linformer_kit.bench.measure import Phases, time_interleaved
from linformer_kit.bench.point import Point
from linformer_kit.bench.workload import counted_multiply_adds
from linformer_kit.errors import UserError
from linformer_kit.models import attention_linformer, causal_linformer, tiling_linformer, window_linformer
from linformer_kit.models.window_linformer import WindowAttention

SIZES = {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "target_length": 8}
LINFORMERS = ["linformer-kit", "full-attention", "linformer", "linformer-pytorch"]
SEES_THE_FUTURE = ("linformer-pytorch", "encoder-decoder")
ALL = [
    (name, subject)
    for name, implementation in IMPLEMENTATIONS.items()
    for subject in implementation.builds
    if subject not in point.TRAINING_SUBJECTS
]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(layers, "GEMM_SHAPE", (64, 64, 64))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # next to other tests, threads that wait for each other take many times as long
    yield
    torch.set_num_threads(threads)


def point_of(name, subject, step="forward", length=128, **more):
    projects = implementations.projects(name, subject)
    is_causal = subject in ("causal-layer", "causal-lm") and projects
    rows = {
        "projected_length": (4 if is_causal else 16) if projects else None,
        "block_length": 16 if is_causal else None,
    }
    return Point(
        **{
            "subject": subject,
            "step": step,
            "implementation": name,
            "length": length,
            "batch": 2,
            **rows,
            **SIZES,
            **more,
        }
    )


@pytest.mark.parametrize(("name", "subject"), [pair for pair in ALL if pair != SEES_THE_FUTURE], ids=str)
def test_a_right_implementation_passes_and_can_be_called(name, subject):
    check(point_of(name, subject))
    for step in SUBJECT_KINDS[subject].steps:
        if can_do(name, subject, step):
            make_workload(point_of(name, subject, step)).call()


def test_the_names_that_a_shell_completes_are_those_of_the_registry():
    assert tuple(IMPLEMENTATIONS) == point.NAMES
    assert set(SUBJECT_KINDS) == set(point.SUBJECTS)
    assert set().union(*(kind.steps for kind in SUBJECT_KINDS.values())) == set(point.STEPS)


@pytest.mark.parametrize("length", [97, 1500], ids="N{}".format)
@pytest.mark.parametrize("name", LINFORMERS)
def test_layers_are_checked_at_their_own_length(name, length):
    check(point_of(name, "layer", length=length))


@pytest.mark.parametrize("variant", ["linear", "dynamic", "conv", "mean", "max", "random"])
def test_every_projection_passes_the_check(variant):
    check(point_of("linformer-kit", "layer", variant=variant))


@pytest.mark.parametrize("sharing", ["kv", "layerwise"])
def test_every_sharing_passes_the_check(sharing):
    check(point_of("linformer-kit", "encoder", sharing=sharing))


# a window


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("window 16", {"projection": "linear", "window_length": 16}),
        ("mean, window 128", {"projection": "mean", "window_length": 128}),
        ("mean", {"projection": "mean"}),
        ("dynamic, no attention dropout", {"projection": "dynamic"}),
    ],
)
def test_a_variant_names_projection_and_window(variant, options):
    found = point_of("linformer-kit", "layer", variant=variant).projection_options
    assert found == {"sharing": "headwise", "projected_length": 16, **options}


@pytest.mark.parametrize(
    "variant",
    ["window", "window 0", "window 1.5", "mean, windw 8", "mean,window 8", "window 8, mean", "window 8, window 9"],
)
def test_a_malformed_variant_is_refused(variant):
    with pytest.raises(UserError, match=rf"^the variant of linformer-kit is '{variant}'; it must be a projection, a "):
        point_of("linformer-kit", "layer", variant=variant)


WINDOWS = {"window 16": 16, "mean, window 16": 16, "window only": 0}


@pytest.mark.parametrize(("variant", "rows"), WINDOWS.items(), ids=WINDOWS)
def test_a_layer_with_a_window_passes_the_check(variant, rows):
    variant = "window 16" if variant == "window only" else variant
    for length in (200, 1500):
        place = point_of("linformer-kit", "layer", "training", length, variant=variant, projected_length=rows)
        check(place)
        assert implementations.build(place).window_length == 16
    make_workload(place).call()


@pytest.mark.parametrize("name", ["linformer-kit", "linformer-kit-reversible", "linformer-kit-checkpointing"])
def test_an_encoder_with_a_window_is_checked_where_its_input_does_not_fit_into_it(name):
    place = point_of(name, "encoder", length=2048, variant="window 512", num_layers=1)
    check(place)
    small = place.small()
    assert small.length > 4 * small.window_length >= tiling_linformer.TILE  # as many blocks per tile: one
    # at the default hidden size, several chunks of tiles
    columns = 3 * small.window_length + small.projected_length
    assert window_linformer.KEY_CHUNK // (columns * 512) < small.length / small.window_length


def sees_too_far(*args):
    """A window that is open: the blocks of a tile see all that the tile is compared with."""
    bias = tiling_linformer.column_bias(*args)
    return bias.masked_fill(bias < -1e30, 0)


def without_mass(*args):
    """Rows count fully, whatever lies in the window."""
    bias = tiling_linformer.column_bias(*args)
    return bias.masked_fill(bias > -1e30, 0)


@pytest.mark.parametrize("mistake", [sees_too_far, without_mass])
@pytest.mark.parametrize(("subject", "length"), [("layer", 128), ("layer", 1500), ("encoder", 128)])
def test_a_wrong_window_is_refused(monkeypatch, mistake, subject, length):
    monkeypatch.setattr(attention_linformer, "column_bias", mistake)
    with pytest.raises(WrongImplementation, match=r"^linformer-kit: its output"):
        check(point_of("linformer-kit", subject, length=length, variant="window 16", num_layers=1))


@pytest.mark.parametrize(("subject", "length"), [("layer", 128), ("layer", 1500), ("encoder", 128)])
def test_a_window_with_a_wrong_backward_pass_is_refused(monkeypatch, subject, length):
    gradient = WindowAttention._near_features
    monkeypatch.setattr(WindowAttention, "_near_features", lambda *args: 0 * gradient(*args))
    with pytest.raises(WrongImplementation, match="gradient"):
        check(point_of("linformer-kit", subject, length=length, variant="window 16", num_layers=1))


def test_longformer_has_the_window_of_its_variant():
    windows = [
        implementations.build(point_of("longformer", "encoder", variant=variant)).config.attention_window
        for variant in ("window 32", "")
    ]
    assert windows == [[32, 32], [256, 256]]


# mistakes


def with_a_mistake(monkeypatch, change):
    right = implementations.build

    def wrong(point):
        model = right(point)
        change(model)
        return model

    # the check builds its own twin with the same seed
    monkeypatch.setattr(implementations, "build", wrong)


def scale_first_output(model):
    ends = ("output.weight", "to_out.weight", "w_o.weight", "output.dense.weight")
    next(weight for name, weight in model.named_parameters() if name.endswith(ends)).data.mul_(1.01)


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        *((name, subject) for name in LINFORMERS for subject in ("layer", "encoder")),
        ("full-attention-eager", "encoder"),
        ("linformer-kit-reversible", "encoder"),
    ],
    ids=str,
)
def test_an_output_that_is_one_percent_too_large_is_refused(monkeypatch, name, subject):
    with_a_mistake(monkeypatch, scale_first_output)
    with pytest.raises(WrongImplementation, match=f"^{name}: its"):
        check(point_of(name, subject))


MISTAKES = {
    "linformer-kit": lambda layer: layer.key.weight.data[0].zero_(),
    "linformer": lambda layer: layer.proj_k.data[0].zero_(),
    "linformer-pytorch": lambda layer: layer.heads[0].F.bias.data.add_(0.01),
    "full-attention": lambda layer: layer.query.weight.data.mul_(1.01),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("compares_gradients", [True, False], ids=["short", "long"])
def test_a_wrong_weight_is_refused(monkeypatch, name, compares_gradients):
    if not compares_gradients:
        monkeypatch.setattr(layers, "COMPARED_GRADIENTS_LENGTH", 0)
    with_a_mistake(monkeypatch, MISTAKES[name])
    with pytest.raises(WrongImplementation, match=f"^{name}: "):
        check(point_of(name, "layer"))


def test_nan_is_refused(monkeypatch):
    with_a_mistake(monkeypatch, lambda layer: layer.to_out.bias.data.fill_(torch.nan))
    with pytest.raises(WrongImplementation):
        check(point_of("linformer", "layer"))


@pytest.mark.parametrize("subject", ["layer", "causal-layer"])
def test_a_wrong_gradient_is_refused(monkeypatch, subject):
    def detach(layer):
        right = layer.forward
        layer.forward = lambda x: right(x.detach()) + 0 * x

    with_a_mistake(monkeypatch, detach)
    with pytest.raises(WrongImplementation, match="gradient"):
        check(point_of("linformer-kit", subject))


@pytest.mark.parametrize("name", ["linformer-kit", "full-attention", "bert"])
def test_an_encoder_whose_attention_is_wrong_is_refused(monkeypatch, name):
    def distort(model):
        attention = model.encoder.layer[1].attention.self if name == "bert" else model.layers[1].attention
        right = attention.forward
        attention.forward = lambda x, *args, **options: right(1.01 * x, *args, **options)

    with_a_mistake(monkeypatch, distort)
    with pytest.raises(WrongImplementation, match=f"^{name}: its"):
        check(point_of(name, "encoder"))


def test_an_encoder_that_trains_wrongly_is_refused(monkeypatch):
    def detach(model):
        right = model.layers[1].attention.forward
        model.layers[1].attention.forward = lambda x, *args, **options: right(x.detach(), *args, **options)

    with_a_mistake(monkeypatch, detach)
    with pytest.raises(WrongImplementation, match="gradient"):
        check(point_of("linformer-kit", "encoder"))


def too_sharp(right):
    return lambda query, *rest, **options: right(1.01 * query, *rest, **options)


@pytest.mark.parametrize("name", ["linformer-kit", "full-attention"])
@pytest.mark.parametrize("subject", ["layer", "causal-layer", "encoder", "encoder-decoder", "causal-lm"])
def test_a_softmax_that_is_too_sharp_is_refused(monkeypatch, name, subject):
    """Ours is compared with the equation, not with itself."""
    for module, function in (
        (attention_linformer, "softmax_attention"),
        (causal_linformer, "softmax_attention"),
        (torch.nn.functional, "scaled_dot_product_attention"),
    ):
        monkeypatch.setattr(module, function, too_sharp(getattr(module, function)))
    with pytest.raises(WrongImplementation, match=f"^{name}: its"):
        check(point_of(name, subject))


@pytest.mark.parametrize("length", [128, 1500], ids="N{}".format)
def test_what_is_computed_in_chunks_without_gradients_is_checked(monkeypatch, length):
    """Layers are timed without gradients and with more queries than a chunk."""
    right = attention_linformer.in_chunks

    def too_loud(*args):
        outputs, weights = right(*args)
        return outputs.mul_(1.01), weights

    monkeypatch.setattr(attention_linformer, "in_chunks", too_loud)
    with pytest.raises(WrongImplementation, match="its output without gradients"):
        check(point_of("linformer-kit", "layer", length=length, batch=16))


def test_what_a_causal_layer_computes_without_gradients_is_checked(monkeypatch):
    right = causal_linformer.CausalLinformerAttention._in_chunks
    monkeypatch.setattr(causal_linformer.CausalLinformerAttention, "_in_chunks", lambda *args: right(*args).mul_(1.01))
    with pytest.raises(WrongImplementation, match="its output without gradients"):
        check(point_of("linformer-kit", "causal-layer"))


def test_an_encoder_decoder_that_sees_the_future_is_refused():
    with pytest.raises(WrongImplementation, match=r"linformer-pytorch: another last token .* it sees the future"):
        check(point_of(*SEES_THE_FUTURE))


@pytest.mark.parametrize("name", ["linformer-kit", "full-attention"])
@pytest.mark.parametrize("subject", ["encoder-decoder", "causal-lm"])
def test_a_cache_with_earlier_tokens_is_refused(monkeypatch, name, subject):
    monkeypatch.setattr(generators, "copy_cache", lambda cache: cache)
    with pytest.raises(WrongImplementation, match=f"{name}: its logits from the cache"):
        check(point_of(name, subject))


# other columns


@pytest.mark.parametrize(("rows", "variant"), [(16, ""), (96, ""), (None, ""), (16, "window 64"), (0, "window 64")])
def test_multiply_adds_are_those_of_the_products(rows, variant):
    model = encoders.our_encoder(
        point_of("linformer-kit", "encoder", projected_length=rows, length=256, variant=variant)
    ).eval()
    ids = encoders.random_ids(3, 256)
    multiply_adds = encoders.encoder_multiply_adds(model, 256, batch=3)
    if rows and model.layers[0].attention.plan(256).queries == "folded":  # b_Q keysᵀ, as much as one vector
        multiply_adds += 3 * 2 * 32 * rows
    assert counted_multiply_adds(torch.no_grad()(lambda: model(ids))) == multiply_adds


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("name", ["bert", "bert-eager"])
def test_multiply_adds_of_other_encoders_are_counted(name):
    full_attention = make_workload(point_of("full-attention", "encoder"))
    found = measure_isolated(point_of(name, "encoder"), 60.0)
    assert found.columns[""]["multiply_adds"] == full_attention.columns[""]["multiply_adds"] > 0


def test_a_training_step_has_three_times_the_multiply_adds_of_a_forward_pass():
    for name, times in (("linformer-kit", 3), ("full-attention", 3), ("gemm", 1)):
        forward, training = (
            make_workload(point_of(name, "layer", step)).columns[""]["multiply_adds"]
            for step in ("forward", "training")
        )
        assert training == times * forward > 0
    assert make_workload(point_of("linformer", "layer", "training")).columns[""]["multiply_adds"] is None


def test_the_cache_is_that_of_all_tokens():
    workload = make_workload(point_of("full-attention", "causal-lm", "decoding", length=112, target_length=16, batch=1))
    keys_and_values = 2 * 128 * 32 * 4
    assert workload.columns[""]["cache_bytes"] == 2 * keys_and_values
    assert workload.call().get_seq_length() == 128
    assert workload.call().get_seq_length() == 128  # each call starts after the prompt


@pytest.mark.parametrize(("sharing", "matrices"), [("headwise", 2), ("kv", 1), ("layerwise", 1)])
@pytest.mark.parametrize("subject", ["layer", "causal-layer"])
def test_layers_have_the_sharing_of_the_sweep(subject, sharing, matrices):
    place = point_of("linformer-kit", subject, sharing=sharing)
    check(place)
    assert implementations.build(place).projection.matrices == matrices


# Keras: the backend of this process; test_compare.py runs the others in their own


@pytest.mark.parametrize("name", ["linformer-kit", "full-attention"])
def test_a_keras_layer_passes_predicts_and_trains(monkeypatch, name):
    place = point_of(name, "layer", length=48, backend="keras-torch")
    check(place)
    check(replace(place, sharing="layerwise"))
    layer = keras_layers.make_layer(place)
    monkeypatch.setattr(keras_layers, "make_layer", lambda place: layer)
    before = layer.get_weights()
    make_workload(place).call()
    assert all(np.array_equal(one, other) for one, other in zip(before, layer.get_weights(), strict=True))
    make_workload(replace(place, step="training")).call()
    changed = [not np.array_equal(one, other) for one, other in zip(before, layer.get_weights(), strict=True)]
    # softmax ignores what all keys have in common, so b_K has no gradient
    assert sum(changed) >= len(changed) - 1


@pytest.mark.parametrize("name", ["linformer-kit", "full-attention"])
def test_a_wrong_keras_layer_is_refused(monkeypatch, name):
    right = keras_layers.make_layer

    def wrong(place):
        layer = right(place)
        layer.set_weights([1.01 * weight for weight in layer.get_weights()])
        return layer

    monkeypatch.setattr(keras_layers, "make_layer", wrong)
    with pytest.raises(WrongImplementation, match=f"{name}: its output"):
        check(point_of(name, "layer", backend="keras-torch"))


def test_keras_without_projection_must_not_differ_in_one_bit(monkeypatch):
    from linformer_kit.keras import LinearMultiHeadAttention

    right = LinearMultiHeadAttention.call

    @functools.wraps(right)
    def wrong(self, *args, **options):
        return right(self, *args, **options) * (1 + 1e-6)

    monkeypatch.setattr(LinearMultiHeadAttention, "call", wrong)
    with pytest.raises(WrongImplementation, match="bit for bit"):
        check(point_of("full-attention", "layer", backend="keras-torch"))


# training


@pytest.mark.parametrize("name", ["linformer-kit", "full-attention", "linformer"])
def test_the_models_of_the_trainer_are_checked(monkeypatch, name):
    check(point_of(name, "trainer", "training"))
    if name == "linformer":
        right = encoders.linformer_stack

        def wrong(model):
            stack = right(model)
            stack.net.layers[1][0].fn.proj_v.data.mul_(1.01)
            return stack

        monkeypatch.setattr(encoders, "linformer_stack", wrong)
        with pytest.raises(WrongImplementation, match=r"^linformer: "):
            check(point_of(name, "trainer", "training"))


@pytest.fixture(scope="module")
def loops():
    variants = {name: VARIANTS["trainer", name][-1] for name in ("linformer-kit", "full-attention")}
    points = [point_of(name, "trainer", "training", 32, variant=variant) for name, variant in variants.items()]
    points.append(point_of("linformer", "trainer", "training", 32))
    return {place.implementation: training_loop.make_loop(place) for place in points}


@pytest.mark.parametrize("name", ["linformer-kit", "full-attention", "linformer"])
def test_the_phases_of_a_training_step_add_up(loops, name):
    timing = time_interleaved({name: loops[name]}, least_rounds=1, most_rounds=1)[name]
    assert set(timing.phases) == {"forward", "backward", "clipping and optimizer", "overhead"}
    assert sum(phase.median for phase in timing.phases.values()) == pytest.approx(timing.median)
    assert sum(phase.share for phase in timing.phases.values()) == pytest.approx(1)
    assert all(phase.median > 0 for phase in timing.phases.values())


def test_the_models_of_the_trainer_differ_in_their_attention_only(loops):
    models = {name: loop.trainer.model for name, loop in loops.items()}
    outside = [
        {key: value.shape for key, value in model.state_dict().items() if ".layers." not in key}
        for model in models.values()
    ]
    assert outside[0] == outside[1] == outside[2]
    assert [models[name].config.projection for name in ("linformer-kit", "linformer")] == ["dynamic", "linear"]
    assert models["linformer-kit"].config.attention_probs_dropout_prob == 0
    assert models["linformer"].config.attention_probs_dropout_prob > 0
    for loop in loops.values():
        batch = next(iter(loop.trainer.get_train_dataloader()))
        assert batch["input_ids"].shape == (2, 32)
        assert "attention_mask" not in batch or bool(batch["attention_mask"].all())


@pytest.mark.parametrize("phase", ["forward", "overhead"])
def test_time_is_attributed_to_the_phase_that_spends_it(monkeypatch, loops, phase):
    import time

    loop = loops["linformer-kit"]
    where = loop.trainer.model.model if phase == "forward" else loop.trainer
    name = "forward" if phase == "forward" else "get_batch_samples"
    right = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *args, **options: (time.sleep(0.3), right(*args, **options))[1])
    found = loop()
    assert max((key for key in found if key), key=found.get) == phase
    assert found[phase] > 0.3


@pytest.mark.parametrize("variant", ["bpe", "bytes"])
def test_preparation_starts_anew_and_its_phases_add_up(variant):
    workload = make_workload(point_of("linformer-kit", "preparation", "preparation", variant=variant, batch=40))
    for _ in range(2):
        found = workload.call()
        assert isinstance(found, Phases)
        assert found["tokenizing"] > 0
        assert sum(seconds for phase, seconds in found.items() if phase) == pytest.approx(found[""])
    megabytes = {phase: columns["megabytes"] for phase, columns in workload.columns.items()}
    assert megabytes[""] == megabytes["tokenizing"] > megabytes["training the tokenizer"] > 0


def test_synthetic_reviews_are_as_long_as_real_ones(tmp_path):
    training_loop.write_reviews(tmp_path, 2000)
    for split in ("train", "test"):
        with gzip.open(tmp_path / f"{split}.jsonl.gz", "rt") as file:
            rows = [json.loads(line) for line in file]
        words = [len(row["text"].split()) for row in rows]
        assert len(rows) == 2000
        assert {row["label"] for row in rows} == {0, 1}
        assert np.mean(words) == pytest.approx(231, rel=0.05)  # IMDB: 234 and 228
        assert np.mean([len(row["text"].encode()) for row in rows]) == pytest.approx(1310, rel=0.05)  # 1325 and 1294
