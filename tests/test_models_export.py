"""Compiled and exported models and ONNX Runtime give the outputs of eager PyTorch."""

from unittest.mock import patch

import onnxruntime
import pytest
import torch
from oracle import PROJECTIONS as ALL_PROJECTIONS
from torch.export import Dim
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode
from zoo import CAUSAL_VARIANTS, LENGTH, MODELS, VARIANTS, build, ids, labels_for

from linformer_kit import (
    LinformerAttention,
    LinformerForCausalLM,
    LinformerForConditionalGeneration,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)

# the variants "affine" and "random" are exported with a mask; without one, the graph of "affine" only differs from that
# of `linear` by an addition, and that of "random" not at all
PROJECTIONS = [projection for projection in ALL_PROJECTIONS if projection not in ("affine", "random")]
HEADS = [LinformerForMaskedLM, LinformerForTokenClassification, LinformerForQuestionAnswering]
WITH_WINDOW = ("dynamic", "conv")
WINDOW = {"window_length": 3, "global_tokens": 2, "distance_bias": True}
DECODERS = [LinformerForCausalLM, LinformerForConditionalGeneration]
ONLY_OF_ENCODERS = ("rescale", "K per layer", "post-norm", *(VARIANTS.keys() - set(CAUSAL_VARIANTS)))
LONGEST = 32  # max_position_embeddings of the models here
# other sizes than those of the example: fewer tokens than rows, one block and several, the longest
SIZES = [(1, 1), (1, 4), (2, 5), (4, 9), (3, 17), (2, LONGEST)]


def padded(batch, length, side):
    """Ids and mask of texts of different lengths, the first without padding."""
    lengths = torch.randint(1, length + 1, (batch, 1))
    lengths[0] = length
    places = torch.arange(length)
    mask = {"right": places < lengths, "left": places >= length - lengths, "none": (places >= 0).expand(batch, -1)}[
        side
    ]
    return {"input_ids": ids(batch, length), "attention_mask": mask.long()}


def every_padding(sizes=SIZES):
    return [padded(batch, length, side) for batch, length in sizes for side in ("right", "left", "none")]


def small(model_class, variant="default", **changes):
    """A model of one layer, which is enough for what a graph can hold, unless the variant is about several."""
    has_several = "layer" in variant or isinstance(VARIANTS[variant].get("projected_length"), list)
    layers = {} if has_several else {"num_hidden_layers": 1}
    return build(model_class, **{**layers, **VARIANTS[variant], **changes})


def names(values):
    """Readable names of parametrised tests."""
    if isinstance(values, dict):
        return "window" if values else ""
    return values.__name__ if isinstance(values, type) else values


# --- torch.compile ---


def answers_and_gradients(function, model, inputs):
    """All outputs, and the gradients of the loss, which for the bare model is the mean square of its output."""
    output = function(**inputs)
    loss = output.loss if "loss" in output else output.last_hidden_state.square().mean()
    return [*output.to_tuple(), *torch.autograd.grad(loss, list(model.parameters()))]


def example(model, masked):
    """A batch with labels, and with padding if it is masked."""
    inputs = padded(2, LENGTH, "right" if masked else "none")
    inputs |= labels_for(model, inputs["input_ids"])
    if isinstance(model, LinformerForCausalLM | LinformerForConditionalGeneration):
        inputs["use_cache"] = False
    if not masked:
        del inputs["attention_mask"]
    return inputs


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("model_class", "masked"),
    [
        *((model_class, "masked") for model_class in MODELS),
        # of the heads over encoders, one looks at the mask
        *((model_class, "whole") for model_class in (LinformerForSequenceClassification, *DECODERS)),
    ],
    ids=names,
)
def test_a_compiled_model_is_one_graph_with_the_same_outputs_and_gradients(model_class, masked):
    model, masked = build(model_class) if model_class in DECODERS else small(model_class), masked == "masked"
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = example(model, masked)
    assert_close(answers_and_gradients(compiled, model, inputs), answers_and_gradients(model, model, inputs))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_encoder_decoder_accepts_the_inputs_of_its_decoder():
    model = build(LinformerForConditionalGeneration, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = {**padded(2, LENGTH, "left"), "decoder_input_ids": ids(2, 9), "use_cache": False}
    assert_close(compiled(**inputs).to_tuple(), model(**inputs).to_tuple())


@pytest.mark.usefixtures("fresh_compiler")
def test_one_compiled_graph_serves_many_batches():
    model = build(LinformerForSequenceClassification)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    for inputs in every_padding([(2, 9), (3, 14), (4, 23), (5, LONGEST)]):
        with torch.no_grad():
            assert_close(compiled(**inputs).logits, model(**inputs).logits)
    assert len(graphs) <= 2  # at most one for each side of the point where another order of the products is cheaper


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
def test_a_model_compiled_to_machine_code_has_the_same_outputs_and_gradients():
    """A whole model; test_torch.py has the attention of encoders."""
    model = small(LinformerForCausalLM)
    compiled = torch.compile(model, fullgraph=True)
    inputs = example(model, masked=True)
    answers, exact = answers_and_gradients(compiled, model, inputs), answers_and_gradients(model, model, inputs)
    assert_close(answers, exact, rtol=1e-4, atol=1e-5)


# --- torch.export ---


def exported(model, **inputs):
    """The model as a graph for any number of texts, of any length."""
    batch = Dim("batch")
    sizes = {
        name: {0: batch, 1: Dim(f"{name.split('_')[0]}_length", min=1, max=LONGEST)} if torch.is_tensor(value) else None
        for name, value in inputs.items()
    }
    if "attention_mask" in sizes:
        sizes["attention_mask"] = sizes["input_ids"]
    return torch.export.export(model, (), inputs, dynamic_shapes=sizes).module()


@pytest.mark.parametrize(
    ("model_class", "variant"),
    [
        *((LinformerForSequenceClassification, variant) for variant in VARIANTS if variant != "full decoder"),
        *((LinformerForCausalLM, variant) for variant in VARIANTS if variant not in (*ONLY_OF_ENCODERS, "affine")),
        *((model, "default") for model in (LinformerModel, *HEADS)),
    ],
    ids=names,
)
def test_one_exported_graph_serves_every_batch_length_and_padding(model_class, variant):
    model = small(model_class, variant)
    graph = exported(model, **padded(2, LENGTH, "right"))
    for inputs in every_padding():
        with torch.no_grad():
            answers, expected = graph(**inputs), model(**inputs)
        assert type(answers) is type(expected)
        assert answers.keys() == expected.keys()
        for name in answers.keys() - {"past_key_values"}:  # the test below continues with the cache
            assert_close(answers[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("model_class", [LinformerModel, LinformerForCausalLM], ids=names)
def test_one_exported_graph_without_a_mask_serves_every_batch_and_length(model_class, projection):
    """Without padding, too, how many rows there are depends on the length, which the graph does not know."""
    model = small(model_class, projection=projection)
    graph = exported(model, input_ids=ids())
    for sizes in SIZES:
        input_ids = ids(*sizes)
        with torch.no_grad():
            assert_close(graph(input_ids=input_ids)[0], model(input_ids)[0], rtol=1e-4, atol=1e-5)


def test_one_exported_encoder_decoder_serves_every_source_and_target():
    model = build(LinformerForConditionalGeneration)
    graph = exported(model, **padded(2, LENGTH, "right"), decoder_input_ids=ids(2, 9))
    for inputs in every_padding([(1, 1), (3, 17), (2, LONGEST)]):
        for length in (1, 13, LONGEST):
            inputs = {**inputs, "decoder_input_ids": ids(len(inputs["input_ids"]), length)}
            with torch.no_grad():
                assert_close(graph(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)


def cache_of_a_graph(model, inputs):
    """The cache that an exported graph returns: the code for graphs, run without tracing it."""
    with patch.object(torch.compiler, "is_exporting", lambda: True), torch.no_grad():
        return model(**inputs).past_key_values


def one_step(model, inputs, cache):
    """The inputs of the step after `inputs`."""
    batch, mask = len(inputs["input_ids"]), inputs["attention_mask"]
    if isinstance(model, LinformerForConditionalGeneration):
        return {"decoder_input_ids": ids(batch, 1), "past_key_values": cache}
    mask = torch.cat([mask, mask.new_ones(batch, 1)], dim=1)
    return {"input_ids": ids(batch, 1), "attention_mask": mask, "past_key_values": cache}


def exported_step(model):
    """A graph for one token of any number of texts, at any position."""
    inputs = prompt(model, 2, LENGTH)
    step, shapes = one_step(model, inputs, cache_of_a_graph(model, inputs)), torch.export.ShapesCollection()
    batch, columns = Dim("batch"), Dim("columns", min=2, max=LONGEST)
    for tensor in tree_leaves(step):
        if tensor.dim():
            shapes[tensor] = {0: batch, 1: columns} if tensor is step.get("attention_mask") else {0: batch}
    return torch.export.export(model, (), step, dynamic_shapes=shapes.dynamic_shapes(model, (), step))


def prompt(model, batch, length):
    inputs = padded(batch, length, "left")
    is_pair = isinstance(model, LinformerForConditionalGeneration)
    return inputs | ({"decoder_input_ids": ids(batch, 3)} if is_pair else {})


def check_steps(model, run):
    """`run(inputs)` gives logits and cache of a step; compares them with PyTorch at every position of two blocks."""
    for batch, length in ((3, 6), (1, 1)):
        inputs = prompt(model, batch, length)
        with torch.no_grad():
            cache, graph_cache = model(**inputs).past_key_values, cache_of_a_graph(model, inputs)
            for _ in range(9):
                step = one_step(model, inputs, cache)
                expected = model(**step).logits
                logits, graph_cache = run({**step, "past_key_values": graph_cache})
                assert_close(logits, expected, rtol=1e-4, atol=1e-5)
                inputs["attention_mask"] = step.get("attention_mask", inputs["attention_mask"])
        assert graph_cache.get_seq_length() == cache.get_seq_length()


def run_program(program):
    """A function that runs an exported step: logits and cache."""
    graph = program.module()

    def run(step):
        output = graph(**step)
        return output.logits, output.past_key_values

    return run


def test_one_exported_step_continues_every_batch_from_every_position():
    """The encoder-decoder; the ONNX test below has the causal LM."""
    model = small(LinformerForConditionalGeneration)
    check_steps(model, run_program(exported_step(model)))


def test_the_cache_of_a_graph_has_room_for_the_longest_input():
    model = small(LinformerForCausalLM, position_embedding="none")
    with pytest.raises(ValueError, match=r"33 tokens but the cache of an exported model has room for .* = 32; export"):
        cache_of_a_graph(model, {"input_ids": ids(1, LONGEST + 1)})


@pytest.mark.parametrize(
    ("projected_length", "sharing", "keys", "queries"),
    [
        (2, "headwise", "sequence first", "folded"),
        (24, "headwise", "sequence first", "per head"),
        (24, "none", "features first", "per head"),
        (2, "none", "sequence first", "folded"),
    ],
)
def test_an_exported_graph_has_the_order_that_is_cheapest_for_long_inputs(projected_length, sharing, keys, queries):
    attention = LinformerAttention(32, 8, max_length=4096, projected_length=projected_length, sharing=sharing)
    plan = attention.plan(4096)
    assert (plan.keys, plan.queries) == (keys, queries)
    sizes = {0: Dim("batch"), 1: Dim("length", min=1, max=4096)}
    graph = torch.export.export(
        attention, (torch.randn(2, 2, 32),), dynamic_shapes=(sizes,)
    )  # where little is cheapest
    x, work = torch.randn(1, 4096, 32), []
    for function in (attention, graph.module()):
        with FlopCounterMode(display=False) as counter:
            function(x)
        work.append(counter.get_total_flops())
    assert work[0] == work[1] > 0


# --- ONNX ---


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
@pytest.mark.filterwarnings("ignore:# The axis name:UserWarning")
def test_an_exported_step_and_onnx_runtime_continue_with_the_cache(tmp_path):
    model = small(LinformerForCausalLM)
    program = exported_step(model)
    check_steps(model, run_program(program))
    torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "step.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx", providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(step):
        leaves, structure = tree_flatten(step["past_key_values"])
        inputs = {name: step[name].numpy() for name in ("input_ids", "attention_mask")}
        cached = (leaf.numpy() for leaf in leaves)
        inputs |= {name: next(cached) for name in names if name.startswith("past_key_values")}
        logits, *new_leaves = map(torch.from_numpy, session.run(None, inputs))
        return logits, tree_unflatten(new_leaves, structure)

    assert "past_key_values_layers_0_past_summary_keys" in names
    check_steps(model, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_class", "projection", "window"),
    [
        *((LinformerForSequenceClassification, projection, {}) for projection in PROJECTIONS),
        *((model, "linear", {}) for model in (LinformerModel, *HEADS)),
        # the number of rows of `conv` depends on the length
        *((LinformerForSequenceClassification, each, WINDOW) for each in WITH_WINDOW),
    ],
    ids=names,
)
# PyTorch's exporter copies trees of its own making through a class it calls deprecated
@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
# and says that an axis which two inputs have in common has one name
@pytest.mark.filterwarnings("ignore:# The axis name:UserWarning")
def test_onnx_runtime_gives_the_same_for_every_batch_length_and_padding(model_class, projection, window, tmp_path):
    model = small(model_class, projection=projection, **window)
    inputs = padded(2, LENGTH, "right")
    inputs["token_type_ids"] = torch.randint(2, inputs["input_ids"].shape)  # tokenizers give them too

    sizes = {0: "batch", 1: "length"}
    program = torch.onnx.export(
        model, kwargs=inputs, dynamic_shapes=dict.fromkeys(inputs, sizes), dynamo=True, verbose=False
    )
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])

    for inputs in every_padding():
        inputs["token_type_ids"] = torch.randint(2, inputs["input_ids"].shape)
        answers = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        with torch.no_grad():
            expected = model(**inputs).to_tuple()
        assert_close([torch.from_numpy(answer) for answer in answers], list(expected), rtol=1e-4, atol=1e-4)
