"""Models in the tools people use around transformers: tokenizers, pipelines, generation, PEFT and the Trainer."""

import copy
from itertools import pairwise

import peft
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.testing import assert_close
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)
from zoo import build, config, ids

from linformer_kit import (
    LinformerForCausalLM,
    LinformerForConditionalGeneration,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
)

TEXTS = [
    "the cat sleeps on the old mat near the kitchen door",
    "a dog runs",
    "rain",
    "in the garden a small bird sings all day long",
    "snow falls softly on the roof of the house",
]
TRANSLATIONS = [
    "le chat dort sur le vieux tapis",
    "un chien court",
    "la pluie",
    "un petit oiseau chante toute la journée dans le jardin",
    "la neige tombe",
]
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
}
PAD, _, CLS, SEP, _, BOS, EOS = range(len(SPECIAL))


@pytest.fixture
def tokenizer():
    """Byte-level BPE, trained on the texts."""
    bpe = Tokenizer(models.BPE(unk_token=SPECIAL["unk_token"]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS + TRANSLATIONS, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **SPECIAL)


def sizes(tokenizer):
    """What a model has to know of the tokenizer, and room for the texts."""
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "max_position_embeddings": 64,
        "hidden_size": 32,
    }


# --- tokenizers and pipelines ---


def assert_same(answer, expected):
    """Lists, dictionaries, words and numbers as `pipeline` gives them; scores may differ by rounding."""
    assert type(answer) is type(expected)
    if isinstance(expected, list):
        assert len(answer) == len(expected)
        for one, other in zip(answer, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert answer.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(answer[key], value)
    elif isinstance(expected, int | str):
        assert answer == expected
    else:
        assert answer == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("task", "model_class", "options"),
    [
        ("fill-mask", LinformerForMaskedLM, {}),
        ("text-classification", LinformerForSequenceClassification, {"top_k": None}),
        ("token-classification", LinformerForTokenClassification, {}),
        ("text-generation", LinformerForCausalLM, {"max_new_tokens": 8, "do_sample": False}),
    ],
)
def test_a_pipeline_from_a_directory_gives_each_text_in_a_batch_what_it_gets_alone(
    task, model_class, options, tokenizer, tmp_path
):
    texts = [f"{text} [MASK]" for text in TEXTS] if task == "fill-mask" else TEXTS
    tokenizer.padding_side = "left" if task == "text-generation" else "right"
    model = build(model_class, **sizes(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    answer = pipeline(task, model=str(tmp_path))
    assert type(answer.model) is model_class
    assert answer.tokenizer.padding_side == tokenizer.padding_side
    together = answer(texts, batch_size=2, **options)
    assert_same(together, answer(texts, batch_size=1, **options))
    assert len(together) == len(texts)
    assert all(one != other for one, other in pairwise(together))  # they do depend on the text


def test_a_pipeline_gives_what_tokenizer_and_model_give(tokenizer, tmp_path):
    model = build(LinformerForSequenceClassification, **sizes(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    answers = pipeline("text-classification", model=str(tmp_path))(TEXTS, batch_size=5)
    scores = model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits.softmax(dim=-1).max(dim=-1)
    assert [answer["label"] for answer in answers] == [f"LABEL_{label}" for label in scores.indices]
    assert [answer["score"] for answer in answers] == pytest.approx(scores.values.tolist(), rel=1e-4)


@pytest.mark.parametrize("side", ["right", "left"])
def test_an_answer_to_a_question_does_not_depend_on_the_batch(side, tokenizer, tmp_path):
    """Transformers 5 has no pipeline for questions any more: the tokenizer's pairs and the model."""
    build(LinformerForQuestionAnswering, **sizes(tokenizer)).save_pretrained(tmp_path)
    tokenizer.padding_side = side
    tokenizer.save_pretrained(tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForQuestionAnswering.from_pretrained(tmp_path)
    questions = ["who sleeps", "a dog", "snow or rain", "what sings in the garden", "where"]
    batch = tokenizer(questions, TEXTS, padding=True, return_tensors="pt", return_token_type_ids=True)
    together = model(**batch)
    for row, pair in enumerate(zip(questions, TEXTS, strict=True)):
        alone = model(**tokenizer(*pair, return_tensors="pt", return_token_type_ids=True))
        real = batch["attention_mask"][row].bool()
        assert_close(together.start_logits[row, real], alone.start_logits[0], rtol=1e-4, atol=1e-5)
        assert_close(together.end_logits[row, real], alone.end_logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_trained_translator_works_from_a_directory(side, tokenizer, tmp_path):
    tokenizer.padding_side = side
    model = LinformerForConditionalGeneration(config(**sizes(tokenizer)))
    source = tokenizer(TEXTS, padding=True, return_tensors="pt")
    endings = [f"{text}{SPECIAL['eos_token']}" for text in TRANSLATIONS]
    target = tokenizer(endings, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt")
    labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        optimizer.zero_grad()
        loss = model(**source, labels=labels).loss
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(model) is LinformerForConditionalGeneration
    for beams in (1, 3):
        for texts, translations in [
            (TEXTS, TRANSLATIONS),
            *(([a], [b]) for a, b in zip(TEXTS, TRANSLATIONS, strict=True)),
        ]:
            inputs = tokenizer(texts, padding=True, return_tensors="pt")
            written = model.generate(**inputs, max_new_tokens=40, do_sample=False, num_beams=beams)
            assert tokenizer.batch_decode(written, skip_special_tokens=True) == translations


# --- PEFT ---


def texts_and_classes():
    """64 padded texts of 4 to 20 tokens; the first token tells the class."""
    classes, mask = torch.arange(64) % 2, torch.arange(20) < torch.randint(4, 21, (64, 1))
    input_ids = ids(64, 20)
    input_ids[:, 0] = 3 + classes
    return {"input_ids": input_ids * mask, "attention_mask": mask.long(), "labels": classes}


def train(model, batch, steps=40):
    """The loss at each step."""
    optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def snapshot(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(
    params=[(["query", "value"], "headwise"), ("all-linear", "headwise"), ("all-linear", "none")],
    ids=["query and value", "all linear", "all linear, E per head"],
)
def adapted(request):
    """A base model, and a copy of it with LoRA on these layers; the classifier is trained too, as a separate copy."""
    target_modules, sharing = request.param
    base = build(LinformerForSequenceClassification, num_labels=2, hidden_size=32, sharing=sharing)
    options = peft.LoraConfig(task_type="SEQ_CLS", target_modules=target_modules, r=4)
    return base, peft.get_peft_model(copy.deepcopy(base), options)


def test_adapters_learn_and_the_adapted_weights_stay_frozen(adapted):
    base, model = adapted
    batch = texts_and_classes()
    before = snapshot(model)
    losses = train(model, batch)
    assert losses[-1] < 0.5 * losses[0]
    for name, parameter in model.named_parameters():
        is_trained = "lora_" in name or "modules_to_save" in name
        assert torch.equal(parameter, before[name]) is not is_trained, name
    with model.disable_adapter():
        assert_close(model(**batch).logits, base(**batch).logits, rtol=1e-4, atol=1e-5)


def test_every_adapter_takes_part_with_and_without_gradients(adapted):
    _, model = adapted
    batch = texts_and_classes()
    train(model, batch, steps=5)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
    assert {name.split(".")[-1] for name in layers} >= {"query", "value"}
    for gradients in (True, False):  # without them long batches take another way
        with torch.set_grad_enabled(gradients):
            whole = model(**batch).logits
            for name, layer in layers.items():
                layer.scale_layer(0)
                assert (model(**batch).logits - whole).abs().max() > 1e-3, name
                layer.unscale_layer()
            assert torch.equal(model(**batch).logits, whole)


def test_merged_adapters_give_the_same_output(adapted):
    """With adapters every layer is called; merged, the products are taken in the cheapest order."""
    _, model = adapted
    batch = texts_and_classes()
    train(model, batch)
    model.eval()
    answers = [model(**batch).logits]
    with torch.no_grad():
        answers.append(model(**batch).logits)
    merged = model.merge_and_unload()
    assert type(merged) is LinformerForSequenceClassification
    answers.append(merged(**batch).logits)
    with torch.no_grad():
        answers.append(merged(**batch).logits)
    for answer in answers[1:]:
        assert_close(answer, answers[0], rtol=1e-4, atol=1e-4)


def test_saved_adapters_give_the_same_output_on_a_loaded_base(adapted, tmp_path):
    base, model = adapted
    batch = texts_and_classes()
    train(model, batch, steps=5)
    base.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapters")
    loaded = peft.PeftModel.from_pretrained(
        LinformerForSequenceClassification.from_pretrained(tmp_path / "base"), tmp_path / "adapters"
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    # close, not equal: how a product is rounded depends on where in memory its matrix was loaded to
    assert_close(loaded(**batch).logits, model.eval()(**batch).logits)


# --- Trainer ---


class Texts(torch.utils.data.Dataset):
    """Texts of different lengths, not padded."""

    def __init__(self):
        self.batch = texts_and_classes()

    def __len__(self):
        return len(self.batch["labels"])

    def __getitem__(self, index):
        length = self.batch["attention_mask"][index].sum()
        return {
            "input_ids": self.batch["input_ids"][index, :length].tolist(),
            "labels": self.batch["labels"][index].item(),
        }


@pytest.mark.parametrize("activations", ["all kept", "computed again", "reversible"])
def test_the_trainer_resumes_from_a_checkpoint_exactly(activations, tokenizer, tmp_path):
    data, gradient_checkpointing = Texts(), activations == "computed again"
    settings = TrainingArguments(
        tmp_path,
        max_steps=30,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=10,
        gradient_checkpointing=gradient_checkpointing,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )

    def trainer():
        # with dropout, so that it matters where the random numbers go on
        model = LinformerForSequenceClassification(
            config(
                num_labels=2,
                hidden_dropout_prob=0.1,
                attention_probs_dropout_prob=0.1,
                reversible=activations == "reversible",
            )
        )
        return Trainer(model, settings, train_dataset=data, data_collator=DataCollatorWithPadding(tokenizer))

    whole = trainer()
    whole.train()
    assert whole.model.is_gradient_checkpointing is gradient_checkpointing
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-10", "checkpoint-20", "checkpoint-30"}

    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert resumed.state.global_step == 30
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, whole.model.get_parameter(name)), name


def test_smoothed_labels_of_a_causal_model_are_shifted(tmp_path):
    """Trainer smooths labels itself, and has to know that this model predicts the next token."""
    model = build(LinformerForCausalLM)
    input_ids = ids()
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=1e-9, report_to=[], use_cpu=True)
    loss = Trainer(model=model, args=arguments).compute_loss(model, {"input_ids": input_ids, "labels": input_ids})
    assert_close(loss, model(input_ids, labels=input_ids).loss, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sharing", ["headwise", "layerwise"])
def test_prompts_can_be_tuned_and_projections_trained_beside_adapters(sharing):
    model, input_ids = build(LinformerForCausalLM, sharing=sharing), ids()
    prompted = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    prompted(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), labels=input_ids).loss.backward()
    assert any(parameter.grad is not None for name, parameter in prompted.named_parameters() if "prompt" in name)
    options = {"target_modules": ["query"], "modules_to_save": ["projection"]}
    adapted = peft.get_peft_model(
        build(LinformerForSequenceClassification, sharing=sharing), peft.LoraConfig(task_type="SEQ_CLS", **options)
    )
    adapted(input_ids=input_ids, labels=torch.tensor([0, 1])).loss.backward()
    assert any(
        parameter.grad is not None
        for name, parameter in adapted.named_parameters()
        if "projection.modules_to_save" in name
    )
