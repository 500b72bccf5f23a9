"""`quantize` and `linformer export`: 8-bit weights give nearly the same answers, for each example on its own."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close
from training_zoo import QUESTIONS, answers, command, refused
from transformers import AutoModelForSequenceClassification
from zoo import LENGTH, VARIANTS, build, ids, run

from linformer_kit import (
    LinformerEncoder,
    LinformerForCausalLM,
    LinformerForConditionalGeneration,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
    quantize,
)
from linformer_kit.models import int8_linformer
from linformer_kit.models.encoder_linformer import ROW_CHUNK
from linformer_kit.models.int8_linformer import INT8_ROW_CHUNK, Int8Linear
from linformer_kit.precision import in_precision

ENCODERS = [
    LinformerModel,
    LinformerForMaskedLM,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerForQuestionAnswering,
]
OF_ENCODERS = [name for name in VARIANTS if name != "full decoder"]


def integers(model):
    return {name for name, module in model.named_modules() if isinstance(module, Int8Linear)}


# --- the layer ---


@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
def test_the_error_of_the_layer_is_that_of_rounding_to_8_bits(bias):
    linear, x_RI = nn.Linear(40, 30, bias=bias), torch.randn(7, 40) * torch.logspace(-3, 3, 7)[:, None]
    with torch.no_grad():
        linear.weight *= torch.logspace(-3, 3, 30)[:, None]
        exact, found = linear(x_RI), Int8Linear.of(linear)(x_RI)
    # each number is rounded by at most half a step, and the largest of a row has 127 steps
    step_R1, step_O = x_RI.abs().amax(1, keepdim=True) / 127, linear.weight.detach().abs().amax(1) / 127
    sum_R1, sum_O = x_RI.abs().sum(1, keepdim=True), linear.weight.detach().abs().sum(1)
    bound_RO = (sum_R1 * step_O + step_R1 * sum_O + 40 / 2 * step_R1 * step_O) / 2
    assert ((found - exact).abs() <= bound_RO + 1e-5 * exact.abs()).all()
    assert ((found - exact).abs() > 0).any()


@pytest.mark.parametrize("inputs", [1, 3, 512, 4096])
def test_sums_of_the_largest_integers_are_exact(inputs):
    linear = nn.Linear(inputs, 5, bias=False)
    nn.init.ones_(linear.weight)
    assert_close(Int8Linear.of(linear)(torch.ones(2, inputs)), torch.full((2, 5), float(inputs)))
    assert_close(Int8Linear.of(linear)(-torch.ones(2, inputs)), torch.full((2, 5), -float(inputs)))


def test_processors_without_instructions_for_integers_compute_the_same(monkeypatch):
    layer, x = Int8Linear.of(nn.Linear(40, 30)), torch.randn(7, 40)
    expected = layer(x)
    monkeypatch.setattr(int8_linformer, "HAS_VNNI", False)
    assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)


def test_rows_do_not_depend_on_each_other():
    layer, x = Int8Linear.of(nn.Linear(8, 6)), torch.randn(2, INT8_ROW_CHUNK + 3, 8)
    x[0, 1] *= 1000
    x[0, 2] = 0
    alone = torch.stack([layer(row) for row in x.flatten(0, 1)[:, None]])[:, 0].unflatten(0, x.shape[:2])
    assert_close(layer(x), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_has_the_dtype_of_the_input_or_of_autocast(dtype):
    layer, x = Int8Linear.of(nn.Linear(8, 6)), torch.randn(3, 8)
    assert layer(x.to(dtype)).dtype == dtype
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        assert layer(x).dtype == dtype


def test_training_is_refused():
    with pytest.raises(ValueError, match="8-bit weights, which cannot be trained; train the original"):
        quantize(build(LinformerModel)).train()


# --- models ---


@pytest.mark.parametrize(
    ("model_class", "variant"),
    [*((LinformerForSequenceClassification, each) for each in OF_ENCODERS), *((each, "default") for each in ENCODERS)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.filterwarnings("ignore:.*tied weights mapping")
def test_models_give_nearly_the_same_for_each_example_and_after_loading(model_class, variant, tmp_path):
    model = build(model_class, 0.1, **VARIANTS[variant])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantized, input_ids = quantize(model), ids()
    assert_close(dict(model.state_dict()), before)
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])
    with torch.no_grad():
        exact, found = run(model, input_ids, attention_mask=mask), run(quantized, input_ids, attention_mask=mask)
        alone = run(quantized, input_ids[1:, :9])
    real = slice(None) if model_class is LinformerForSequenceClassification else mask
    assert 0 < (found - exact)[real].norm() / exact[real].norm() < 0.05
    assert_close(found[1:, :9] if exact.dim() == 3 else found[1:], alone, rtol=1e-4, atol=1e-5)
    quantized.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    assert integers(loaded) == integers(quantized) != set()
    with torch.no_grad():
        assert torch.equal(run(loaded, input_ids, attention_mask=mask), found)


def test_what_is_quantized():
    model = quantize(build(LinformerForSequenceClassification, num_hidden_layers=1))
    names = {f"model.layers.0.attention.{name}" for name in ("query", "key", "value", "output")}
    assert integers(model) == names | {"model.layers.0.feed_forward.inner", "model.layers.0.feed_forward.outer"}
    heads = integers(quantize(build(LinformerForSequenceClassification, num_hidden_layers=1, sharing="none")))
    assert integers(model) - heads == {"model.layers.0.attention.key", "model.layers.0.attention.value"}


@pytest.mark.parametrize("feed_forward", ["gelu", "gated"])
def test_an_encoder_in_chunks_equals_one_in_a_graph(feed_forward):
    """With gradients enabled, the feed-forward is computed at once."""
    encoder = quantize(LinformerEncoder(16, 2, depth=2, max_length=900, feed_forward=feed_forward))
    x = torch.randn(2, ROW_CHUNK // 2 + 50, 16)
    with torch.no_grad():
        in_chunks = encoder(x)
    assert_close(in_chunks, encoder(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_and_exported_graphs_give_the_same():
    model = quantize(build(LinformerForSequenceClassification, 0.1))
    inputs = {"input_ids": ids(), "attention_mask": torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])}
    with torch.no_grad():
        expected = model(**inputs).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).logits
        exported = torch.export.export(model, (), inputs)
    assert_close(compiled, expected, rtol=1e-4, atol=1e-5)
    assert_close(exported.module()(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
    # ONNX has no such operator
    assert not any("int_mm" in str(node.target) for node in exported.graph.nodes)


def test_weights_of_another_precision_are_not_taken_for_integers(tmp_path):
    build(LinformerForSequenceClassification).save_pretrained(tmp_path)
    model = LinformerForSequenceClassification.from_pretrained(tmp_path, quantization="int8")
    assert model(ids()).logits.isnan().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: build(LinformerForCausalLM),
        lambda: build(LinformerForConditionalGeneration),
        lambda: nn.Linear(3, 3),
    ],
    ids=["causal LM", "encoder-decoder", "other"],
)
def test_other_models_are_refused(make):
    with pytest.raises(ValueError, match="int8 is only for encoders of linformer-kit"):
        quantize(make())


def test_adapters_are_refused():
    adapted = get_peft_model(build(LinformerModel), LoraConfig(target_modules=["query"]))
    with pytest.raises(ValueError, match=r"layers\.0\.attention has adapters or hooks; merge or remove them"):
        quantize(adapted)


# --- linformer export ---

pytestmark = pytest.mark.usefixtures("restore_global_state")


@pytest.mark.slow
def test_an_exported_classifier_opens_like_its_run(trained_run, tmp_path):
    trained = trained_run("classification")
    texts = [text for text, _ in QUESTIONS["classification"]]
    model, tokenizer = trained.load()
    for precision, expected in (("float32", model), ("int8", quantize(model))):
        folder = tmp_path / precision
        printed = command("export", trained.run, "--precision", precision, "--output", folder).stdout
        assert f"with {precision} weights in" in printed
        loaded, used = (AutoModelForSequenceClassification.from_pretrained(folder) for _ in range(2))
        used = in_precision(used, precision)  # for int8, other products are in bfloat16 where it is fast
        for text, answer in zip(texts, answers(folder, *texts), strict=True):
            inputs = tokenizer(text, return_tensors="pt")
            assert torch.equal(loaded(**inputs).logits, expected(**inputs).logits)
            expected_C = used(**inputs).logits[0].float().softmax(-1)
            assert_close(list(answer["probabilities"].values()), expected_C.tolist())
        command("evaluate", folder)
        metrics = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        assert metrics["rows"] > 0
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("int8", "float32")]
    assert sizes[0] < sizes[1]
    assert {each.dtype for each in load_file(tmp_path / "int8/model.safetensors").values()} == {
        torch.int8,
        torch.float32,
    }
    message = refused("export", tmp_path / "int8", "--precision", "float32", "--output", tmp_path / "back")
    assert "int8 weights, which cannot become float32" in message
    # without the run, for transformers only
    command("export", trained.run / "model", "--precision", "bfloat16", "--output", tmp_path / "model")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def test_what_cannot_be_exported(tmp_path):
    build(LinformerForCausalLM).save_pretrained(tmp_path / "causal")
    options = ("--precision", "int8", "--output")
    assert "int8 is only for encoders" in refused("export", tmp_path / "causal", *options, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert "is not empty" in refused("export", tmp_path / "causal", *options, tmp_path / "causal")
    assert "there is no directory" in refused("export", tmp_path / "nothing", *options, tmp_path / "new")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    assert "of type 'bert', not a Linformer" in refused("export", tmp_path / "other", *options, tmp_path / "new")
