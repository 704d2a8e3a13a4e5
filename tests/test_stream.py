"""The width of the residual stream under RMSNorm: removing channels is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.allocation.composition import compose, remaining
from fairpruner.discovery.stream import NONE

TOKENS = {"input_ids": torch.arange(10)[None] % 7}


class Layer(nn.Module):
    """A pre-norm layer with a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-2)  # large, so that a wrong epsilon shows
        self.gate, self.up, self.down = nn.Linear(width, 6), nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        out: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + out


def network() -> nn.Module:
    layers = [Layer(8), Layer(8)]
    model = nn.Sequential(nn.Linear(3, 8), *layers, nn.RMSNorm(8, eps=1e-2), nn.Linear(8, 4)).double()
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            nn.init.uniform_(module.weight, 0.5, 2)
    return model.eval()


def by_hand(model: nn.Module, x: Tensor, gone: list[int]) -> Tensor:
    """The full model with some channels of its stream set to zero wherever they are written."""
    assert isinstance(model, nn.Sequential)
    kept = torch.ones(8).double()
    kept[gone] = 0
    for number, module in enumerate(model):
        x = module(x) * kept if number < 3 else module(x)
    return x


def test_the_cut_model_is_the_full_one_with_zeroed_channels() -> None:
    model, x = network(), torch.randn(5, 3).double()
    spaces = fp.discover(model, x, kinds=["stream", "hidden"])
    assert (spaces["stream"].kind, spaces["stream"].size, len(spaces["stream"].norms)) == ("stream", 8, 3)
    for gone in ([3], [0, 5, 6], [1, 2, 3, 4, 5, 6]):
        plan = fp.Plan.removing(spaces, {"stream": gone})
        small = fp.cut(model, plan)
        torch.testing.assert_close(small(x), by_hand(model, x, gone), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(fp.mask(model, plan)(x), small(x), rtol=1e-10, atol=1e-10)
        assert fp.count_params(small) == plan.predicted["params"]
        assert fp.count_flops(small, x) == plan.predicted["flops"]
    norm, before = small.get_submodule("1.norm"), model.get_submodule("1.norm")
    assert isinstance(norm, nn.RMSNorm)
    assert isinstance(before, nn.RMSNorm)
    assert norm.eps == pytest.approx(1e-2 * 8 / 2)
    torch.testing.assert_close(norm.weight, before.weight[[0, 7]] * 2)
    assert before.eps == 1e-2  # the model given is untouched
    assert "forward" not in vars(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_stream_is_found_in_narrow_types(dtype: torch.dtype) -> None:
    """Their own rounding is larger than what tells an RMSNorm from a LayerNorm."""
    model, x = network().to(dtype), torch.randn(5, 3).to(dtype)
    assert fp.discover(model, x, kinds=["stream"])["stream"].size == 8
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.RMSNorm):
            layer_norm = nn.LayerNorm(8, eps=1e-2, bias=False, dtype=dtype)
            model.set_submodule(name, layer_norm)
    spaces = fp.discover(model.eval(), x, kinds=["stream", "hidden"])
    assert spaces.left_out["stream"] == NONE


def test_cuts_of_a_stream_compose(tmp_path: Path) -> None:
    model, x = network(), torch.randn(5, 3).double()
    spaces = fp.discover(model, x, kinds=["stream", "hidden", "block"])
    first = fp.Plan.removing(spaces, {"stream": [0, 5], "blocks": [0]})
    small = fp.cut(model, first)
    second = fp.Plan.removing(remaining(first, small), {"stream": [1]})  # channel 2 of the original
    both = compose(first, second)
    assert both.removed["stream"] == (0, 5, 2)
    both.save(tmp_path / "plan.json")
    again = fp.cut(model, fp.Plan.load(tmp_path / "plan.json"), example=x)
    torch.testing.assert_close(again(x), fp.cut(small, second)(x), rtol=1e-10, atol=1e-10)


def test_scores_plans_and_repairs_of_a_stream() -> None:
    model = network()
    data = [(torch.randn(16, 3).double(), torch.randn(16, 4).double()) for _ in range(2)]
    spaces = fp.discover(model, data[0][0], kinds=["stream", "hidden"])
    scores = fp.score(model, data, spaces=spaces, loss=F.mse_loss, removal="activation", protection="taylor")
    plan = fp.allocate(scores, keep=fp.Budget("params", 0.6), multiple_of=2)
    assert plan.depths["stream"] > 0
    assert (8 - plan.depths["stream"]) % 2 == 0
    repaired = fp.repair(fp.cut(model, plan), model, plan, data, loss=F.mse_loss)
    assert fp.count_params(repaired) == plan.predicted["params"]


def test_sequential_repairs_a_narrower_stream() -> None:
    model = network()
    data = [(inputs := torch.randn(128, 3).double(), model(inputs).detach()) for _ in range(2)]
    plan = fp.Plan.removing(fp.discover(model, inputs, kinds=["stream"]), {"stream": (1, 2, 6)})
    small = fp.cut(model, plan)
    repaired = fp.repair(small, model, plan, data, loss=F.mse_loss, method="sequential")
    unseen = torch.randn(128, 3).double()
    before, after = (F.mse_loss(one(unseen), model(unseen)) for one in (small, repaired))
    assert after < 0.5 * before


def test_a_layer_norm_is_named_as_the_obstacle() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    spaces = fp.discover(model, torch.randn(2, 3), kinds=["stream", "hidden"])
    assert spaces.left_out["stream"] == NONE
    assert "stream" not in fp.discover(model, torch.randn(2, 3)).names


@pytest.mark.parametrize(("family", "stock"), [("Llama", True), ("Qwen3", False), ("Gemma3", False)])
def test_folders_with_a_narrower_stream(family: str, stock: bool, tmp_path: Path) -> None:
    """Stock where one epsilon serves the stream alone; with code where norms of heads share it (Qwen3), or
    the width also scales the embedding (Gemma).
    """
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-2,
    }
    suffix = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, f"{family}{suffix}")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    plan = fp.Plan.removing(fp.discover(model, TOKENS, kinds=["stream"]), {"stream": [0, 3, 7, 8]})
    small = fp.cut(model, plan)
    logits = small(**TOKENS).logits
    torch.testing.assert_close(logits, fp.mask(model, plan)(**TOKENS).logits)
    assert fp.count_params(small) == plan.predicted["params"]
    fp.save(small, plan, tmp_path / "small")
    written = json.loads((tmp_path / "small" / "config.json").read_text())
    if stock:
        assert (written["hidden_size"], written["head_dim"]) == (12, 4)
        assert written["rms_norm_eps"] == pytest.approx(1e-2 * 16 / 12)
    assert ("auto_map" not in written) == stock
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", trust_remote_code=not stock)
    torch.testing.assert_close(again(**TOKENS).logits, logits, rtol=0, atol=0)
