"""`linformer import`: outputs equal those of the original packages; what cannot be converted is refused."""

import re

import pytest
import torch
from linformer import Linformer as PyPILinformer
from linformer import LinformerLM as PyPILinformerLM
from linformer import LinformerSelfAttention
from linformer_pytorch import Linformer as LinformerPytorch
from linformer_pytorch import LinformerEncDec, MHAttention, Padder
from linformer_pytorch import LinformerLM as LinformerPytorchLM
from oracle import randomize
from safetensors.torch import save_model
from torch import nn
from torch.testing import assert_close
from training_zoo import command, refused, train_here
from transformers import AutoModelForMaskedLM, AutoTokenizer

from linformer_kit import LinformerAttention, LinformerForMaskedLM, LinformerModel, import_model, load_imported
from linformer_kit.errors import UserError
from linformer_kit.training.config import TokenizerConfig
from linformer_kit.training.tokenizer import train_tokenizer

pytestmark = pytest.mark.usefixtures("float64")

SHARINGS = ("none", "headwise", "kv", "layerwise")


def same_outputs(ours, theirs, *inputs):
    """Ours equals theirs; logits and hidden states are compared, not the outputs around them."""
    output = ours(*inputs)
    output = output.get("logits", output.get("last_hidden_state")) if isinstance(output, dict) else output
    assert_close(output, theirs.eval()(*inputs), atol=1e-10, rtol=1e-10)


class TestLinformer:
    """PyPI linformer 0.2.3."""

    @pytest.mark.parametrize("share_kv", [False, True], ids=["", "share-kv"])
    @pytest.mark.parametrize("one_kv_head", [False, True], ids=["kv-heads", "one-kv-head"])
    @pytest.mark.parametrize(("length", "context_length"), [(20, None), (11, None), (20, 17), (11, 20)])
    @pytest.mark.filterwarnings("ignore:the model has W_V = W_K")
    def test_the_layer(self, length, context_length, one_kv_head, share_kv):
        theirs = randomize(
            LinformerSelfAttention(12, 20, k=5, heads=3, dim_head=6, one_kv_head=one_kv_head, share_kv=share_kv)
        )
        ours = import_model(theirs.state_dict(), "linformer", heads=3)
        assert (ours.sharing, ours.num_kv_heads) == ("kv" if share_kv else "headwise", 1 if one_kv_head else 3)
        context = [] if context_length is None else [torch.randn(2, context_length, 12)]
        same_outputs(ours, theirs, torch.randn(2, length, 12), *context)

    @pytest.mark.parametrize("reversible", [False, True], ids=["", "reversible"])
    @pytest.mark.parametrize("options", [{}, {"one_kv_head": True}, {"share_kv": True}, {"dim_head": 5}], ids=str)
    @pytest.mark.filterwarnings("ignore:the model has W_V = W_K")
    def test_the_encoder_and_the_language_model(self, options, reversible):
        sizes = {"dim": 12, "seq_len": 20, "depth": 2, "k": 5, "heads": 3, "reversible": reversible, **options}
        theirs = randomize(PyPILinformer(**sizes))
        same_outputs(import_model(theirs.state_dict(), "linformer", heads=3), theirs, torch.randn(2, 20, 12))
        theirs = randomize(PyPILinformerLM(num_tokens=30, **sizes))
        ours = import_model(theirs.state_dict(), "linformer", heads=3)
        assert isinstance(ours, LinformerForMaskedLM)
        same_outputs(ours, theirs, torch.randint(30, (2, 13)))


class TestLinformerPytorch:
    """linformer-pytorch 0.19.3, whose E and F have biases."""

    @pytest.mark.parametrize("w_o", [None, 7], ids=["", "w-o-intermediate"])
    @pytest.mark.parametrize("sharing", ["none", "headwise", "kv"])
    def test_the_layer(self, sharing, w_o):
        theirs = randomize(MHAttention(20, 6, 12, 5, 3, 0.0, "C0", sharing, None, None, False, None, w_o))
        ours = import_model(theirs.state_dict(), "linformer-pytorch")
        assert (ours.sharing, ours.projection.kind) == (sharing, "affine")
        x = torch.randn(2, 20, 12)
        same_outputs(ours, theirs, x)
        # a row of E goes with the rank of a token here, with its position there: equal for padding on the right
        mask = torch.arange(20) < torch.tensor([[20], [9]])
        assert_close(ours(x, mask=mask)[mask], theirs(x, input_mask=mask)[mask])

    @pytest.mark.parametrize("options", [{}, {"activation": "relu"}, {"include_ff": False}], ids=str)
    @pytest.mark.parametrize("k_reduce", [0, 2], ids=["", "k-reduce"])
    @pytest.mark.parametrize("sharing", SHARINGS)
    def test_the_encoder(self, sharing, k_reduce, options):
        theirs = randomize(
            LinformerPytorch(
                20, 12, 5, dim_ff=7, nhead=3, depth=3, parameter_sharing=sharing, k_reduce_by_layer=k_reduce, **options
            )
        )
        activation = options.get("activation")
        ours = import_model(theirs.state_dict(), "linformer-pytorch", activation=activation)
        attention = ours.layers[1].attention
        # under layerwise sharing, linformer-pytorch ignores k_reduce_by_layer
        rows = 5 if sharing == "layerwise" else 5 - k_reduce
        assert (attention.sharing, (attention.projection or ours.projection).projected_length) == (sharing, rows)
        same_outputs(ours, theirs, torch.randn(2, 20, 12))

    @pytest.mark.parametrize("options", [{}, {"emb_dim": 8}, {"dim_d": 5}, {"return_emb": True}], ids=str)
    def test_the_language_model(self, options):
        theirs = randomize(LinformerPytorchLM(30, 20, 12, dim_k=5, dim_ff=7, nhead=3, depth=2, **options))
        ours = import_model(theirs.state_dict(), "linformer-pytorch")
        assert isinstance(ours, LinformerModel if "return_emb" in options else LinformerForMaskedLM)
        same_outputs(ours, theirs, torch.randint(30, (2, 20)))

    @pytest.mark.parametrize("sharing", ["none", "headwise", "kv"])
    def test_a_layer_with_convolution(self, sharing):
        theirs = randomize(
            MHAttention(20, 6, 12, 5, 3, 0.0, "C0", sharing, None, None, False, None, method="convolution")
        )
        ours = import_model(theirs.state_dict(), "linformer-pytorch", max_length=20)
        assert (ours.sharing, ours.projection.kind, ours.projected_length) == (sharing, "head_conv", 5)
        x = torch.randn(2, 20, 12)
        same_outputs(ours, theirs, x)
        same_outputs(ours, theirs, x[:, :12])  # whole windows; theirs leaves out the rest

    @pytest.mark.parametrize("k_reduce", [0, 2], ids=["", "k-reduce"])
    @pytest.mark.parametrize("sharing", SHARINGS)
    def test_an_encoder_with_convolution(self, sharing, k_reduce):
        sizes = {"input_size": 24, "channels": 12, "dim_k": 6, "dim_ff": 7, "nhead": 3, "depth": 3}
        theirs = LinformerPytorch(**sizes, parameter_sharing=sharing, k_reduce_by_layer=k_reduce, method="convolution")
        ours = import_model(randomize(theirs).state_dict(), "linformer-pytorch", max_length=24)
        attention = ours.layers[1].attention
        rows = 6 if sharing == "layerwise" else 6 - k_reduce
        assert (attention.sharing, (attention.projection or ours.projection).projected_length) == (sharing, rows)
        same_outputs(ours, theirs, torch.randn(2, 24, 12))

    def test_a_language_model_whose_windows_leave_tokens_out(self):
        theirs = randomize(LinformerPytorchLM(30, 22, 12, dim_k=5, dim_ff=7, nhead=3, depth=2, method="convolution"))
        with pytest.warns(UserWarning, match="the first 20 of 22 tokens; the converted model is for 20 tokens"):
            ours = import_model(theirs.state_dict(), "linformer-pytorch", max_length=22)
        ids = torch.randint(30, (2, 22))
        assert ours.config.max_position_embeddings == 20
        assert_close(ours(ids[:, :20]).logits, theirs.eval()(ids)[:, :20], atol=1e-10, rtol=1e-10)

    @pytest.mark.parametrize("sharing", ["none", "headwise", "kv"])
    @torch.no_grad()
    def test_no_params_equals_ours_with_the_same_matrices(self, sharing):
        """It cannot be imported, because E is not saved; with the same E, the outputs are the same."""
        built = [12, 5, 3, 0.0, "C0", sharing, None, None, False, None]
        theirs, twin = (MHAttention(20, 6, *built, method=each) for each in ("no_params", "learnable"))
        ours = LinformerAttention(
            12, 3, head_dim=6, max_length=20, projected_length=5, projection="random", sharing=sharing
        )
        linears = {name: tensor for name, tensor in theirs.state_dict().items() if not name.startswith("heads")}
        twin.load_state_dict(linears, strict=False)
        imported = import_model(twin.state_dict(), "linformer-pytorch").state_dict()
        ours.load_state_dict({**imported, "projection.weight": ours.projection.weight}, strict=False)
        for number in range(ours.projection.matrices):
            head, part = number % 3 if sharing == "none" else 0, "F" if number >= ours.projection.matrices / 2 else "E"
            matrix = getattr(theirs.heads[head], part if ours.projection.matrices > 1 else "E")
            ours.projection.weight[:, number] = matrix
        same_outputs(ours, theirs, torch.randn(2, 20, 12))

    def test_full_attention_and_wrappers(self):
        theirs = randomize(LinformerPytorch(20, 12, 5, dim_ff=7, nhead=3, depth=2, full_attention=True))
        wrapped = nn.DataParallel(Padder(theirs)).state_dict()
        same_outputs(import_model(wrapped, "linformer-pytorch", full_attention=True), theirs, torch.randn(2, 20, 12))

    def test_full_attention_does_not_use_the_kernels_of_a_convolution(self):
        options = {"dim_k": 5, "nhead": 3, "k_reduce_by_layer": 2, "parameter_sharing": "kv", "depth": 2}
        theirs = randomize(LinformerPytorchLM(30, 22, 12, method="convolution", full_attention=True, **options))
        ours = import_model(theirs.state_dict(), "linformer-pytorch", full_attention=True, max_length=22)
        same_outputs(ours, theirs, torch.randint(30, (2, 22)))


class FairseqAttention(nn.Module):
    """The equations of `MultiheadLinearAttention` in fairseq's examples/linformer, batch first, without dropout."""

    def __init__(self, width, heads, length, rows, shared_kv=False, compress_layer=None):
        super().__init__()
        self.heads = heads
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self.compress_k = compress_layer or nn.Linear(length, rows, bias=False)
        if not shared_kv:
            self.compress_v = compress_layer or nn.Linear(length, rows, bias=False)

    def forward(self, x):
        compress_v = self.compress_v if hasattr(self, "compress_v") else self.compress_k
        # the input is projected along the sequence, then by k_proj; the bias of a shared compressor is not used
        keys, values = (
            linear((x.mT @ compressor.weight[:, : x.shape[1]].T).mT)
            for linear, compressor in ((self.k_proj, self.compress_k), (self.v_proj, compress_v))
        )
        query, keys, values = (
            features.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for features in (self.q_proj(x) * (x.shape[-1] // self.heads) ** -0.5, keys, values)
        )
        return self.out_proj(((query @ keys.mT).softmax(dim=-1) @ values).transpose(1, 2).flatten(2))


class FairseqLayer(nn.Module):
    def __init__(self, width, inner, attention, normalize_before):
        super().__init__()
        self.self_attn, self.normalize_before = attention, normalize_before
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.register_buffer("version", torch.tensor(2))

    def forward(self, x):
        def feed_forward(x):
            return self.fc2(nn.functional.gelu(self.fc1(x)))

        if self.normalize_before:
            x = x + self.self_attn(self.self_attn_layer_norm(x))
            return x + feed_forward(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self.self_attn(x))
        return self.final_layer_norm(x + feed_forward(x))


class FairseqSentenceEncoder(nn.Module):
    def __init__(self, sharing, normalize_before):
        super().__init__()
        width, length, rows = 12, 20, 5
        self.compress_layer = nn.Linear(length, rows) if sharing == "layer" else None
        self.embed_tokens = nn.Embedding(30, width, padding_idx=1)
        self.embed_positions = nn.Embedding(length + 2, width, padding_idx=1)
        self.layernorm_embedding = nn.LayerNorm(width)
        attentions = [FairseqAttention(width, 3, length, rows, sharing == "kv", self.compress_layer) for _ in range(2)]
        self.layers = nn.ModuleList(FairseqLayer(width, 7, attention, normalize_before) for attention in attentions)
        self.layer_norm = nn.LayerNorm(width) if normalize_before else None

    def forward(self, ids):
        positions = ids.ne(1).cumsum(dim=1) * ids.ne(1) + 1  # the first is 2
        x = self.layernorm_embedding(self.embed_tokens(ids) + self.embed_positions(positions))
        for layer in self.layers:
            x = layer(x)
        return x if self.layer_norm is None else self.layer_norm(x)


class FairseqHead(nn.Module):
    def __init__(self, width, weight):
        super().__init__()
        self.dense, self.layer_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.weight, self.bias = weight, nn.Parameter(torch.zeros(len(weight)))

    def forward(self, x):
        return self.layer_norm(nn.functional.gelu(self.dense(x))) @ self.weight.T + self.bias


class FairseqRoberta(nn.Module):
    """`linformer_roberta`: RoBERTa's encoder and output layer over the layers above; padding has the id 1."""

    def __init__(self, sharing="none", tied=True, normalize_before=False):
        super().__init__()
        self.encoder = nn.ModuleDict({"sentence_encoder": FairseqSentenceEncoder(sharing, normalize_before)})
        words = self.encoder.sentence_encoder.embed_tokens.weight
        self.encoder["lm_head"] = FairseqHead(12, words if tied else nn.Parameter(torch.randn_like(words)))

    def forward(self, ids):
        return self.encoder["lm_head"](self.encoder["sentence_encoder"](ids))


class TestFairseq:
    """examples/linformer of fairseq, which cannot be installed: against its equations."""

    @pytest.mark.parametrize("length", [20, 11])
    @pytest.mark.parametrize("shared_kv", [False, True], ids=["", "shared-kv"])
    def test_the_layer(self, shared_kv, length):
        theirs = randomize(FairseqAttention(12, 3, 20, 5, shared_kv))
        ours = import_model(theirs.state_dict(), "fairseq", heads=3)
        assert ours.sharing == ("kv" if shared_kv else "headwise")
        same_outputs(ours, theirs, torch.randn(2, length, 12))

    @pytest.mark.parametrize("options", [{}, {"tied": False}, {"normalize_before": True}], ids=str)
    @pytest.mark.parametrize(("sharing", "ours"), [("none", "headwise"), ("kv", "kv"), ("layer", "layerwise")])
    def test_the_language_model(self, sharing, ours, options):
        theirs = randomize(FairseqRoberta(sharing, **options))
        model = import_model(theirs.state_dict(), "fairseq", heads=3)
        assert (model.config.sharing, model.config.pad_token_id) == (ours, 1)
        assert model.config.tie_word_embeddings is options.get("tied", True)
        same_outputs(model, theirs, torch.randint(2, 30, (2, 13)))

    def test_without_the_output_layer_it_is_a_bare_model(self):
        theirs = randomize(FairseqRoberta())
        tensors = {name: tensor for name, tensor in theirs.state_dict().items() if "lm_head" not in name}
        model = import_model(tensors, "fairseq", heads=3)
        assert isinstance(model, LinformerModel)
        same_outputs(model, theirs.encoder["sentence_encoder"], torch.randint(2, 30, (2, 20)))

    def test_names_of_older_versions(self):
        theirs = randomize(FairseqRoberta("layer"))
        older = {
            name.replace("encoder.", "decoder.", 1).replace("layernorm_embedding", "emb_layer_norm"): tensor
            for name, tensor in theirs.state_dict().items()
        }
        older |= {"classification_heads.sst.dense.weight": torch.zeros(2, 2)}
        with pytest.warns(UserWarning, match="classification heads are left out: classification_heads.sst"):
            model = import_model({"model": older}, "fairseq", heads=3)
        same_outputs(model, theirs, torch.randint(2, 30, (2, 20)))


# files, directories and mistakes


def saved(folder, module, name="theirs.pt"):
    torch.save(module.state_dict(), folder / name)
    return folder / name


def small_model(**options):
    return randomize(PyPILinformerLM(300, 12, 20, depth=2, k=5, heads=3, **options))


def test_a_model_is_loaded_by_transformers_and_starts_a_run(tmp_path, quick, restore_global_state):
    torch.set_default_dtype(torch.float32)
    theirs, ours = randomize(LinformerPytorchLM(300, 20, 12, dim_k=5, dim_ff=7, nhead=3).eval()), tmp_path / "ours"
    train_tokenizer(TokenizerConfig(kind="bytes"), []).save_pretrained(tmp_path / "tokenizer")
    options = ["--from", "linformer-pytorch", "--tokenizer", tmp_path / "tokenizer", "--output", ours]
    said = command("import", saved(tmp_path, theirs), *options).stdout
    made, assumed, following = said.splitlines()
    assert made == (
        f"LinformerForMaskedLM in {ours}: 2 layers, 12 wide, 3 heads, N = 20, K = 5, projection affine, "
        "sharing layerwise, 9,563 parameters"
    )
    assert assumed.startswith("Not in the file, so assumed: activation gelu; causal=False, decoder_mode=False")
    assert following == f'Fine-tune it: linformer train CONFIG "model={{from: {ours}}}"'
    ids = torch.randint(300, (2, 20))
    for model in (AutoModelForMaskedLM.from_pretrained(ours), load_imported(ours)):
        assert_close(model(ids).logits, theirs(ids), atol=1e-5, rtol=1e-5)
    run = quick("masked-lm", tmp_path, **{"model": {"from": str(ours)}, "tokenizer": None})
    _, result, _ = train_here(run)
    assert (result["steps"], len(AutoTokenizer.from_pretrained(tmp_path / "run" / "model"))) == (4, 261)


@pytest.mark.parametrize("name", ["theirs.pt", "theirs.safetensors"])
@pytest.mark.parametrize("kind", ["encoder", "layer"])
def test_layers_and_encoders_are_loaded_in_python(tmp_path, kind, name):
    sizes = {"dim_k": 5, "nhead": 3, "channels": 12, "input_size": 20, "parameter_sharing": "kv"}
    theirs = randomize(LinformerPytorch(**sizes, dim_ff=7, depth=2).eval())
    theirs = theirs if kind == "encoder" else theirs.seq[0].fn
    file = tmp_path / name
    # save_model stores shared matrices once
    save_model(theirs, file) if file.suffix == ".safetensors" else torch.save(theirs.state_dict(), file)
    said = command("import", file, "--from", "linformer-pytorch", "--output", tmp_path / "ours").stdout
    assert "projection affine, sharing kv" in said
    assert "Not in the file, so assumed: " in said
    assert f'linformer_kit.load_imported("{tmp_path / "ours"}")' in said
    same_outputs(load_imported(tmp_path / "ours"), theirs, torch.randn(2, 20, 12))


ORIGINALS = {
    "linformer": lambda: PyPILinformer(12, 20, 1, k=5, heads=3),
    "linformer-pytorch": lambda: LinformerPytorch(20, 12, 5, nhead=3),
    "fairseq": lambda: FairseqAttention(12, 3, 20, 5),
    "linformer-kit": lambda: LinformerAttention(12, 3),
}


def with_convolution():
    return LinformerPytorch(20, 12, 5, nhead=3, method="convolution")


CUT_DIFFERENTLY = {"parameter_sharing": "kv", "k_reduce_by_layer": 2}


@pytest.mark.parametrize("package", ["linformer", "linformer-pytorch", "fairseq"])
@pytest.mark.parametrize("original", ORIGINALS)
def test_a_file_of_another_package_is_named(original, package):
    if original == package:
        assert import_model(ORIGINALS[original]().state_dict(), package, heads=None if "-" in package else 3)
        return
    wanted = f"looks like {original}, not {package}" if original != "linformer-kit" else "of linformer-kit itself"
    with pytest.raises(UserError, match=wanted):
        import_model(ORIGINALS[original]().state_dict(), package)


@pytest.mark.parametrize(
    ("build", "package", "options", "message"),
    [
        (ORIGINALS["linformer"], "linformer", {}, "number of heads is missing.*12 features; pass --heads.*heads=8"),
        (ORIGINALS["linformer"], "linformer", {"heads": 5}, "heads is 5, but the queries have 12 features"),
        (ORIGINALS["fairseq"], "fairseq", {}, "number of heads is missing.*encoder_attention_heads"),
        (
            ORIGINALS["linformer"],
            "linformer",
            {"heads": 3, "activation": "relu"},
            "activation is 'relu', but files of linformer need only heads",
        ),
        (
            ORIGINALS["linformer-pytorch"],
            "linformer-pytorch",
            {"heads": 3},
            "heads is 3, but files of linformer-pytorch",
        ),
        (ORIGINALS["linformer-pytorch"], "linformer-pytorch", {"activation": "tanh"}, "must be one of 'gelu', 'relu'"),
        (ORIGINALS["linformer-pytorch"], "linformer_pytorch", {}, "did you mean 'linformer-pytorch'"),
        (
            lambda: LinformerSelfAttention(12, 20, k=5, heads=3, one_kv_head=True),
            "linformer",
            {"heads": 4},
            r"heads is 4, but the file has 3 \(one_kv_head=True\)",
        ),
        (
            lambda: LinformerPytorch(20, 12, 5, nhead=3, method="no_params"),
            "linformer-pytorch",
            {},
            "method='no_params', linformer-pytorch does not save E",
        ),
        (with_convolution, "linformer-pytorch", {}, "maximum length is missing.*only tell input_size / dim_k = 4;"),
        (
            with_convolution,
            "linformer-pytorch",
            {"max_length": 3},
            "max_length is 3, but the kernels have 4 taps; pass the input_size",
        ),
        (
            lambda: LinformerPytorch(20, 12, 6, nhead=3, method="convolution", depth=2, **CUT_DIFFERENTLY),
            "linformer-pytorch",
            {"max_length": 20},
            "max_length is 20, but the kernels have 3 and 5 taps: each layer leaves out other tokens",
        ),
        (with_convolution, "linformer-pytorch", {"max_length": "20"}, "max_length is '20'; it must be an integer"),
        (
            ORIGINALS["linformer-pytorch"],
            "linformer-pytorch",
            {"max_length": 30},
            "max_length is 30, but the file is for 20 tokens",
        ),
        (
            lambda: LinformerPytorch(20, 12, 5, nhead=3, depth=2, ff_intermediate=8, parameter_sharing="kv"),
            "linformer-pytorch",
            {},
            "ff_intermediate, which changes the width",
        ),
        (
            lambda: LinformerEncDec(30, 20, 12, 30, 20, 12, enc_nhead=3, dec_nhead=3),
            "linformer-pytorch",
            {},
            "LinformerEncDec, whose decoder sees the tokens",
        ),
        (
            lambda: LinformerPytorchLM(30, 20, 12, nhead=3, emb_dim=8, return_emb=True),
            "linformer-pytorch",
            {},
            "return_emb=True and emb_dim",
        ),
        (
            lambda: nn.ModuleDict({"net": nn.ModuleDict(), "vit": ORIGINALS["linformer"]()}),
            "linformer",
            {"heads": 3},
            "keep only its own names, without the prefix",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2)),
            "fairseq",
            {"heads": 3},
            "has no model of fairseq .*its tensors are 0.weight, 0.bias",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_converted_is_refused(build, package, options, message):
    with pytest.raises(UserError, match=message):
        import_model(build().state_dict(), package, **options)


def test_incomplete_and_foreign_tensors_are_named():
    tensors = ORIGINALS["linformer"]().state_dict()
    with pytest.raises(UserError, match=r"has 1 tensors that are no part of such a model: classifier.weight;"):
        import_model({**tensors, "classifier.weight": torch.zeros(2, 2)}, "linformer", heads=3)
    del tensors["net.layers.0.1.fn.w2.weight"]
    with pytest.raises(UserError, match=r"has no net.layers.0.1.fn.w2.weight; it is incomplete"):
        import_model(tensors, "linformer", heads=3)
    attention = ORIGINALS["fairseq"]().state_dict()
    with pytest.raises(UserError, match=r"(?s)do not fit together.*output.weight"):
        import_model({**attention, "out_proj.weight": torch.zeros(12, 11)}, "fairseq", heads=3)


def test_half_precision_becomes_float32():
    torch.set_default_dtype(torch.float32)
    theirs = randomize(MHAttention(20, 6, 12, 5, 3, 0.0, "C0", "kv", None, None, False, None, 7)).half()
    ours = import_model(theirs.state_dict(), "linformer-pytorch")
    x = torch.randn(2, 20, 12)
    assert_close(ours(x), theirs.float()(x), atol=1e-5, rtol=1e-5)


def test_tied_weights_are_named():
    with pytest.warns(UserWarning, match=r"W_V = W_K \(share_kv=True\)"):
        import_model(small_model(share_kv=True).state_dict(), "linformer", heads=3)


class Hyperparameters:
    """An object in a checkpoint, as those of fairseq have."""


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is a directory"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_text("not a model"), "is not a file of torch.save, or damaged"),
        (lambda path: path.write_text("hello"), "is not a file of torch.save, or damaged"),  # begins like a pickle
        (lambda path: path.write_bytes(saved(path.parent, small_model()).read_bytes()[:2000]), "is damaged"),
        (lambda path: torch.save([1, 2], path), "holds no state dict"),
        (
            lambda path: torch.save({"model": small_model().state_dict(), "args": Hyperparameters()}, path),
            r"holds more than tensors \((tests\.)?test_import.Hyperparameters\).*weights_only=False\)\['model'\]",
        ),
    ],
    ids=["missing", "directory", "empty", "text", "word", "cut", "list", "objects"],
)
def test_files_that_hold_no_state_dict(tmp_path, write, message):
    path = tmp_path / "weights.pt"
    write(path)
    assert re.search(message, refused("import", path, "--from", "linformer", "--output", tmp_path / "ours"))
    assert not (tmp_path / "ours").exists()


def test_a_module_instead_of_its_state_dict():
    with pytest.raises(UserError, match=r"the weights are a Linformer.*; pass a state dict"):
        import_model(small_model(), "linformer", heads=3)


def test_a_damaged_safetensors_file(tmp_path):
    (tmp_path / "weights.safetensors").write_text("not a model")
    said = refused("import", tmp_path / "weights.safetensors", "--from", "fairseq", "--output", tmp_path / "ours")
    assert "is not a valid safetensors file" in said


def test_the_output_and_the_tokenizer_are_checked(tmp_path):
    file = saved(tmp_path, small_model())
    options = ["--from", "linformer", "--heads", 3, "--output"]
    assert "exists and is not empty" in refused("import", file, *options, tmp_path)
    ours = [*options, tmp_path / "ours", "--tokenizer"]
    assert "is no directory" in refused("import", file, *ours, tmp_path / "nothing")
    train_tokenizer(TokenizerConfig(kind="bytes"), []).save_pretrained(tmp_path / "tokenizer")
    small = saved(tmp_path, PyPILinformerLM(30, 12, 20, depth=1, k=5, heads=3), "small.pt")
    assert "has 261 tokens but the model 30" in refused("import", small, *ours, tmp_path / "tokenizer")
    layer = saved(tmp_path, ORIGINALS["linformer"](), "layer.pt")
    assert "has no embeddings of tokens" in refused("import", layer, *ours, tmp_path / "tokenizer")
    with pytest.raises(UserError, match="was not written by `linformer import`"):
        load_imported(tmp_path)
