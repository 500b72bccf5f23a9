"""Conventions of transformers that its own model tests check: gradients of recorded outputs, base models, shards."""

import inspect
import json

import pytest
import torch
from torch.testing import assert_close
from zoo import MODELS, build, ids, labels_for, run

from linformer_kit import LinformerForCausalLM, LinformerForConditionalGeneration

HEADS = MODELS[1:]
RECORDED = ("hidden_states", "attentions", "cross_attentions")
RECORDED += tuple(f"{stack}_{name}" for stack in ("encoder", "decoder") for name in RECORDED[:2])


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("projected_length", [2, 30], ids=["folded", "per head"])
@pytest.mark.parametrize("model_class", MODELS)
def test_recorded_outputs_have_gradients(model_class, projected_length, padded):
    """Attribution methods differentiate with respect to hidden states and attention weights."""
    model, input_ids = build(model_class, projected_length=projected_length), ids()
    mask = torch.ones_like(input_ids)
    mask[1, :5] = 0
    kwargs = {"attention_mask": mask} if padded else {}
    if model_class is LinformerForConditionalGeneration:
        kwargs["decoder_input_ids"] = ids(2, 9)
    output = model(input_ids, **kwargs, output_attentions=True, output_hidden_states=True)
    answer = output.start_logits + output.end_logits if "start_logits" in output else output[0]
    names = [name for name in RECORDED if torch.is_tensor((output.get(name) or [None])[0])]
    assert len(names) == (5 if model_class is LinformerForConditionalGeneration else 2)
    for name in names:
        gradients = torch.autograd.grad(answer.square().sum(), output[name], retain_graph=True)
        assert all(gradient.abs().sum() > 0 for gradient in gradients), name


@pytest.mark.parametrize("model_class", HEADS)
def test_a_head_and_its_base_model_load_each_others_checkpoints(model_class, tmp_path):
    model, input_ids = build(model_class), ids()
    base = model.base_model
    assert base is getattr(model, model.base_model_prefix)
    assert type(base) is not type(model)
    base.save_pretrained(tmp_path / "base")
    loaded, report = model_class.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not any(name.startswith(f"{model.base_model_prefix}.") for name in report["missing_keys"])
    model.save_pretrained(tmp_path / "head")
    alone, report = type(base).from_pretrained(tmp_path / "head", output_loading_info=True)
    assert not report["missing_keys"]
    kwargs = {"decoder_input_ids": ids(2, 9)} if model_class is LinformerForConditionalGeneration else {}
    expected = base(input_ids, **kwargs).last_hidden_state
    for other in (alone, loaded.base_model):
        assert_close(other.eval()(input_ids, **kwargs).last_hidden_state, expected)


@pytest.mark.parametrize("model_class", [LinformerForCausalLM, LinformerForConditionalGeneration])
def test_a_checkpoint_of_several_files_is_loaded_without_the_tied_weights(model_class, tmp_path):
    model, input_ids = build(model_class), ids()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert "lm_head.weight" not in index["weight_map"]
    again = model_class.from_pretrained(tmp_path).eval()
    assert_close(run(again, input_ids), run(model, input_ids))
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight


@pytest.mark.parametrize("model_class", MODELS)
def test_forward_has_the_argument_names_of_transformers(model_class):
    names = list(inspect.signature(model_class.forward).parameters)
    assert names[1:3] == ["input_ids", "attention_mask"]
    assert "kwargs" in names
    assert model_class.main_input_name == "input_ids"
    model, input_ids = build(model_class), ids()
    labels = labels_for(model, input_ids)
    assert set(labels) <= set(names)
    if labels:
        assert torch.isfinite(model(input_ids, **labels, return_dict=False)[0])
