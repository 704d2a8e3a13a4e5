"""What fairpruner relies on beyond the documented interfaces of torch, transformers and CodeCarbon.

When a new release fails here, the one file to change is named by the test.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _pop_mode_temporarily

import fairpruner as fp
from fairpruner.models import torch_private

SOURCE = Path(fp.__file__).parent
ADAPTERS = {"models/torch_private.py", "models/transformers_private.py"}
PRIVATE = re.compile(
    r"torch\._|torch\.utils\._|modules\.\w+\._|_overloadpacket|\._schema\b|\._base\b|\._version\b|(?<!self)\._(?:modules|parameters|buffers)\b|_non_persistent"
    r"|ALL_EXPERTS_FUNCTIONS|\._experts_implementation|_apply_gate|core_model_loading|conversion_mapping\b"
    r"|_weight_conversions|_model_mapping"
)


def test_private_parts_are_used_in_the_adapters_alone() -> None:
    found = {
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        if str(path.relative_to(SOURCE)) not in ADAPTERS
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if PRIVATE.search(line.partition("#")[0]) and "torch.__" not in line
    }
    assert not found


def test_torch_has_what_torch_private_uses() -> None:
    add, add_ = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
    assert torch_private.operation_name(add_) == "add_"
    assert (torch_private.is_in_place(add), torch_private.is_in_place(add_)) == (False, True)
    assert torch_private.flop_formula(torch.ops.aten.mm.default) is not None
    assert torch_private.flop_formula(add) is None
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert [torch_private.draws_random_numbers(attention, (0, 0, 0, p), {}) for p in (0.0, 0.1)] == [
        False,
        True,
    ]
    assert torch_private.draws_random_numbers(torch.ops.aten.bernoulli_.float, (), {})
    assert not torch_private.draws_random_numbers(add, (), {})
    weight = nn.Parameter(torch.ones(2, 3))
    assert torch_private.base_of(weight.t()) is weight
    assert torch_private.base_of(weight) is weight
    other = torch.ones(2, 3)
    assert torch_private.written_tensors(add_, (other, weight), {}) == [other]
    assert isinstance(torch_private.multiplies_bfloat16(torch.device("cpu")), bool)
    assert not torch_private.multiplies_bfloat16(torch.device("meta"))
    assert torch_private.written_tensors(add, (other, weight), {}) == []
    out = torch.ops.aten.add.out
    assert torch_private.written_tensors(out, (weight, weight), {"out": other}) == [other]
    assert not torch_private.is_compiled(nn.Linear(2, 2))
    assert not torch_private.is_compiled_in_place(nn.Linear(2, 2))
    seen: list[bool] = []
    torch.vmap(lambda row: seen.append(torch_private.is_transformed(row)) or row)(other)
    assert [*seen, torch_private.is_transformed(other)] == [True, False]
    layers = nn.Sequential(nn.Linear(2, 2))
    own, other_layer = layers[0], nn.ReLU()
    with torch_private.replaced_children(layers, {"0": other_layer}):
        assert list(layers.children()) == [other_layer]
    assert list(layers.children()) == [own]
    norm = nn.BatchNorm2d(3)
    assert torch_private.held_tensors(norm, "weight")["weight"] is norm.weight
    assert torch_private.held_tensors(norm, "running_mean")["running_mean"] is norm.running_mean
    norm.register_buffer("table", torch.ones(3), persistent=False)
    assert torch_private.unsaved_buffers(nn.Sequential(norm)) == {"0.table"}
    assert isinstance(norm, torch_private.AnyBatchNorm)
    for convolution in (nn.Conv1d(1, 1, 1), nn.Conv3d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1)):
        assert isinstance(convolution, torch_private.AnyConvolution)
    assert torch_private.tree_map_only(Tensor, lambda t: t + 1, {"a": [torch.ones(1), 2]})["a"][1] == 2


def test_no_trace_of_global_hooks_is_left() -> None:
    calls: list[str] = []
    with torch_private.hooked_modules(
        lambda module, args: calls.append("enter"), lambda module, args, kwargs, output: calls.append("leave")
    ):
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert calls == ["enter", "leave"]
    assert not any(held for name, held in vars(torch.nn.modules.module).items() if "_global_forward" in name)


def test_the_encoder_layer_of_torch_asks_attention_for_what_our_stand_in_answers() -> None:
    """models/attention.py: False keeps nn.TransformerEncoderLayer from its fused kernel."""
    assert "_qkv_same_embed_dim" in inspect.getsource(nn.TransformerEncoderLayer.forward)


def test_transformers_has_what_transformers_private_uses() -> None:
    transformers: Any = pytest.importorskip("transformers", minversion="5")
    moe = importlib.import_module("transformers.integrations.moe")
    before = set(moe.ALL_EXPERTS_FUNCTIONS.keys())
    assert "eager" in before or hasattr(transformers.Qwen2MoeConfig(), "_experts_implementation")
    assert "_apply_gate" in inspect.getsource(moe)
    loading = importlib.import_module("transformers.core_model_loading")
    for name in ("WeightRenaming", "WeightConverter", "rename_source_key", "revert_weight_conversion"):
        assert hasattr(loading, name), name
    assert hasattr(importlib.import_module("transformers.conversion_mapping"), "get_model_conversion_mapping")
    assert callable(transformers.PreTrainedModel._init_weights)
    assert "GPT2LMHeadModel" in transformers.AutoModelForCausalLM._model_mapping._model_mapping.values()


def test_codecarbon_has_what_energy_uses() -> None:
    """measuring/energy.py asks a tracker for its hardware, to say whether joules were counted."""
    tracker = pytest.importorskip("codecarbon").EmissionsTracker
    assert any("_hardware" in inspect.getsource(base) for base in tracker.__mro__[:-1])


class OnMps(nn.Module):
    """A transformer block whose operations reach a dispatch mode as those of MPS do."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 2)
        self.fused = True

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return _as_mps(torch.ops.aten.linear.default, x, layer.weight, layer.bias) if self.fused else layer(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.linear(layer, x).unflatten(2, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        if self.fused:
            y = _as_mps(torch.ops.aten._scaled_dot_product_attention_math_for_mps.default, q, k, v)[0]
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.linear(self.out, y.transpose(1, 2).flatten(2))
        x = x + self.linear(self.down, self.linear(self.up, x).relu())
        return self.linear(self.head, x.mean(1))


def _as_mps(func: Any, *args: Any) -> Any:
    """Show an operation whole to the mode that looks; the CPU computes it."""
    attention = "scaled_dot_product" in str(func)

    def compute(*inputs: Any, **kwargs: Any) -> Any:
        return (F.scaled_dot_product_attention(*inputs), inputs[0]) if attention else func(*inputs, **kwargs)

    if not torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        return compute(*args)
    with _pop_mode_temporarily() as mode:
        return mode.__torch_dispatch__(_Whole(func, compute), (), args, {})


class _Whole:
    """An operation as a mode sees it, computed in another way."""

    def __init__(self, func: Any, compute: Any) -> None:
        self._func, self._compute = func, compute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._func, name)


def test_the_fused_operations_of_mps_are_understood() -> None:
    """Spaces and costs are those of the same model on the CPU."""
    model, example = OnMps(), torch.randn(2, 5, 8)
    fused = fp.discover(model, example)
    model.fused = False
    plain = fp.discover(model, example)
    assert {space.name: (space.kind, space.size) for space in fused} == {
        space.name: (space.kind, space.size) for space in plain
    }
    assert {space.kind for space in fused} == {"head", "hidden"}
    whole = fp.Plan.removing(fused, {})
    assert whole.original["flops"] == fp.Plan.removing(plain, {}).original["flops"]
