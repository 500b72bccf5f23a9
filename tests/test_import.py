"""`linformer import`: outputs equal those of the original packages, whose weights are converted; the rest is refused."""

import pytest
import torch
from linformer import Linformer as PyPILinformer
from linformer import LinformerLM as PyPILinformerLM
from linformer import LinformerSelfAttention
from linformer_pytorch import Linformer as LinformerPytorch
from linformer_pytorch import LinformerEncDec, Padder
from linformer_pytorch import LinformerLM as LinformerPytorchLM
from linformer_pytorch import MHAttention
from oracle import randomize
from torch import nn
from torch.testing import assert_close

from linformer_kit import LinformerForMaskedLM, LinformerModel, import_model, load_imported

pytestmark = pytest.mark.usefixtures("float64")

SHARINGS = ("none", "headwise", "kv", "layerwise")


def same_outputs(ours, theirs, *inputs):
    """Ours equals theirs; logits and hidden states are compared, not the outputs around them."""
    output = ours(*inputs)
    output = output.get("logits", output.get("last_hidden_state")) if isinstance(output, dict) else output
    assert_close(output, theirs.eval()(*inputs))


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

    def test_full_attention_and_wrappers(self):
        theirs = randomize(LinformerPytorch(20, 12, 5, dim_ff=7, nhead=3, depth=2, full_attention=True))
        wrapped = nn.DataParallel(Padder(theirs)).state_dict()
        same_outputs(import_model(wrapped, "linformer-pytorch", full_attention=True), theirs, torch.randn(2, 20, 12))
