"""Discovery finds the right units in the right slices, and refuses what it cannot cut."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import SMALL, CifarResNet, FixedSize, TwoInputs

import fairpruner as fp
from fairpruner.discovery.lively import lively_weights


def found(spaces: fp.Spaces) -> dict[str, tuple[str, int]]:
    return {s.name: (s.kind, s.size) for s in spaces}


def test_an_mlp_has_its_two_hidden_spaces() -> None:
    build, shape = SMALL["mlp"]
    spaces = fp.discover(build(), torch.randn(shape))
    assert found(spaces) == {"0": ("hidden", 16), "2": ("hidden", 12)}
    assert dict(spaces.left_out) == {"4": "reaches the model's output"}
    assert [(s.tensor, s.dim, s.role) for s in spaces["0"].slices] == [
        ("0.weight", 0, "write"),
        ("0.bias", 0, "carry"),
        ("2.weight", 1, "read"),
    ]
    assert all(np.array_equal(s.owner, np.arange(16)) for s in spaces["0"].slices)


def test_a_flattened_map_gives_each_channel_its_columns() -> None:
    build, shape = SMALL["conv_flatten"]
    spaces = fp.discover(build(), torch.randn(shape))
    columns = next(s for s in spaces["2"].slices if s.tensor == "5.weight")
    assert np.array_equal(columns.owner, np.repeat(np.arange(8), 16))
    assert (columns.dim, columns.role) == (1, "read")


def test_a_residual_stage_is_one_space_with_all_its_slices() -> None:
    spaces = fp.discover(CifarResNet(2, "B"), torch.randn(1, 3, 32, 32))
    stage = spaces["conv1"]
    assert stage.size == 16
    assert {s.tensor for s in stage.slices if s.role == "write"} == {
        "conv1.weight",
        "layer1.0.conv2.weight",
        "layer1.1.conv2.weight",
    }
    reads = {s.tensor for s in stage.slices if s.role == "read"}
    assert reads == {
        "layer1.0.conv1.weight",
        "layer1.1.conv1.weight",
        "layer2.0.conv1.weight",
        "layer2.0.project.0.weight",
    }


def test_padded_shortcuts_couple_the_padded_positions_and_name_what_the_code_fixes() -> None:
    spaces = fp.discover(CifarResNet(1, "A"), torch.randn(1, 3, 32, 32))
    stage2 = next(s for s in spaces["conv1"].slices if s.tensor == "layer2.0.conv2.weight" and s.dim == 0)
    assert np.array_equal(stage2.owner, [-1] * 8 + list(range(16)) + [-1] * 8)
    assert set(spaces.left_out) == {"layer2.0.conv2", "layer3.0.conv2", "linear"}
    assert "cannot run" in spaces.left_out["layer2.0.conv2"]


def test_concatenation_is_exact_and_halves_that_code_splits_are_coupled() -> None:
    """`tensor_split` gives equal halves only while both lose the same number: unit j is the j-th of each
    half.
    """
    build, shape = SMALL["split_concat"]
    spaces = fp.discover(build(), torch.randn(shape))
    assert found(spaces) == {"enter.0": ("channel", 6), "inner.0": ("channel", 6), "leave.0": ("channel", 12)}
    owners = {
        s.name: next(p.owner for p in s.slices if p.tensor == "leave.0.weight" and p.dim == 1)
        for s in spaces
        if s.name != "leave.0"
    }
    assert np.array_equal(owners["enter.0"], [*range(6), *range(6), *[-1] * 6])
    assert np.array_equal(owners["inner.0"], [*[-1] * 12, *range(6)])


class Exchanged(nn.Module):
    """Two halves of the channels change places, [batch, 3, size, size] -> [batch, 3]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.mix, self.head = nn.Conv2d(3, width, 1), nn.Conv2d(width, 6, 1), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.stem(x).tensor_split(2, 1)
        return self.head(torch.relu(self.mix(torch.cat([two.flip(1), one], 1))).mean((2, 3)))


@pytest.mark.parametrize("width", [4, 6, 8, 10, 12, 16])
def test_halves_that_lose_equally_many_by_chance_do_not_pass(width: int) -> None:
    """A split into halves shifts if one half loses more, so single channels are no units here."""
    spaces = fp.discover(Exchanged(width), torch.randn(2, 3, 4, 4))
    assert set(spaces.names) == {"mix"}
    assert "mask and cut differ" in spaces.left_out["stem"]


def test_grouped_convolutions_keep_their_groups_equal() -> None:
    build, shape = SMALL["grouped"]
    spaces = fp.discover(build(), torch.randn(shape))
    assert np.array_equal(
        next(s.owner for s in spaces["0"].slices if s.tensor == "0.weight"), np.tile(np.arange(12), 2)
    )  # two wide groups: positions
    assert np.array_equal(
        next(s.owner for s in spaces["4"].slices if s.tensor == "6.weight"), np.repeat(np.arange(12), 4)
    )  # twelve narrow groups: groups
    assert [(c.module, c.attribute) for c in spaces["4"].counts] == [("6", "groups")]


def test_group_norm_makes_a_group_a_unit_and_layer_norm_leaves_nothing() -> None:
    group = nn.Sequential(nn.Conv2d(3, 12, 1), nn.GroupNorm(4, 12), nn.Conv2d(12, 2, 1))
    assert found(fp.discover(group, torch.randn(1, 3, 4, 4))) == {"0": ("channel", 4)}
    layer = nn.Sequential(nn.Linear(3, 12), nn.LayerNorm(12), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 2))
    spaces = fp.discover(layer, torch.randn(4, 3))
    assert found(spaces) == {"2": ("hidden", 9)}
    assert "can only be removed together" in spaces.left_out["0"]


def test_what_the_code_fixes_is_left_out_with_its_reason() -> None:
    spaces = fp.discover(FixedSize(), torch.randn(4, 5))
    assert found(spaces) == {"two": ("hidden", 8)}
    assert "shape '[-1, 12]' is invalid" in spaces.left_out["one"]


def test_an_operation_without_a_rule_locks_what_it_touches() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.three(torch.relu(self.two(self.one(x).sort(1).values)))

    spaces = fp.discover(Sorted(), torch.randn(3, 4))
    assert found(spaces) == {"two": ("hidden", 6)}
    assert spaces.left_out["one"] == "passes through sort, which fairpruner has no rule for"


def test_a_convolution_over_the_channel_axis_ties_all_channels() -> None:
    class EfficientChannelAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.mix, self.head = (
                nn.Conv2d(3, 8, 3),
                nn.Conv1d(1, 1, 3, padding=1, bias=False),
                nn.Linear(8, 2),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x)
            gate = self.mix(x.mean((2, 3)).unsqueeze(1)).squeeze(1)
            return self.head((x * gate.sigmoid()[:, :, None, None]).mean((2, 3)))

    with pytest.raises(fp.FairprunerError, match="nothing to prune"):
        fp.discover(EfficientChannelAttention(), torch.randn(1, 3, 8, 8))


def test_several_inputs_as_tuple_and_as_dict() -> None:
    left, right = torch.randn(2, 6), torch.randn(2, 4)
    for example in ((left, right), {"left": left, "right": right, "flip": True}):
        spaces = fp.discover(TwoInputs(), example)
        assert found(spaces) == {"left": ("hidden", 9)}
        assert {s.tensor for s in spaces["left"].slices} == {
            "left.weight",
            "left.bias",
            "right.weight",
            "right.bias",
            "head.weight",
        }


def test_writing_into_part_of_a_tensor_is_not_trusted() -> None:
    class Pasted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(4, 8), nn.Linear(10, 6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            canvas = torch.zeros(x.shape[0], 10)
            canvas[:, :8] = self.one(x)
            return self.three(torch.relu(self.two(canvas)))

    assert found(fp.discover(Pasted(), torch.randn(3, 4))) == {"two": ("hidden", 6)}


def test_kinds_and_skip() -> None:
    build, shape = SMALL["conv_flatten"]
    example = torch.randn(shape)
    assert set(fp.discover(build(), example, kinds=["hidden"]).names) == {"5"}
    spaces = fp.discover(build(), example, skip=["2"])
    assert set(spaces.names) == {"0", "5"}
    assert spaces.left_out["2"] == "skipped by the caller"
    resnet = fp.discover(CifarResNet(1, "B"), torch.randn(1, 3, 32, 32), skip=["layer1", "*.conv1"])
    assert set(resnet.names) == {"conv1", "layer2.0.conv2", "layer3.0.conv2"}
    with pytest.raises(fp.FairprunerError, match="Unknown kind 'chanel': did you mean 'channel'"):
        fp.discover(build(), example, kinds=["chanel"])
    with pytest.raises(fp.FairprunerError, match="Unknown space to skip 'nothere'"):
        fp.discover(build(), example, skip=["nothere"])


def test_an_unknown_or_left_out_space_is_named() -> None:
    spaces = fp.discover(*_mlp())
    with pytest.raises(fp.FairprunerError, match="Space '4' was left out: reaches the model's output"):
        spaces["4"]
    with pytest.raises(fp.FairprunerError, match="Unknown space"):
        fp.Plan.removing(spaces, {"17": (0,)})


def _mlp() -> tuple[nn.Module, torch.Tensor]:
    build, shape = SMALL["mlp"]
    return build(), torch.randn(shape)


def test_an_example_that_does_not_fit_says_so() -> None:
    with pytest.raises(
        fp.FairprunerError,
        match=(
            r"The example does not fit the model: Sequential called with float32\[2, 7\] raised RuntimeError"
        ),
    ):
        fp.discover(_mlp()[0], torch.randn(2, 7))


def test_a_model_with_nothing_to_prune_says_so() -> None:
    with pytest.raises(fp.FairprunerError, match=r"nothing to prune in Linear: .*reaches the model's output"):
        fp.discover(nn.Linear(3, 2), torch.randn(1, 3))


def test_discovery_leaves_no_trace_in_the_model() -> None:
    model = CifarResNet(1, "A").train()
    model.layer1.eval()
    modes = [m.training for m in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    random_before = torch.get_rng_state()
    fp.discover(model, torch.ones(1, 3, 32, 32))
    assert torch.equal(random_before, torch.get_rng_state())
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not nn.modules.module._global_forward_pre_hooks
    assert not nn.modules.module._global_forward_hooks


def test_bf16_and_frozen_models_are_found_the_same() -> None:
    build, shape = SMALL["resnet8_b"]
    plain = found(fp.discover(build(), torch.randn(shape)))
    assert (
        found(fp.discover(build().bfloat16().requires_grad_(False), torch.randn(shape).bfloat16())) == plain
    )


def test_a_wrong_space_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two consumers' columns swapped in the trace: shapes still fit, values do not, and verification
    leaves the space out.
    """
    import fairpruner.discovery as discovery

    honest = discovery.assemble

    def crooked(*args: object) -> tuple[list[fp.UnitSpace], dict[str, str]]:
        spaces, left_out = honest(*args)
        read = next(s for s in spaces[0].slices if s.role == "read")
        read.owner[[0, 1]] = read.owner[[1, 0]]
        return spaces, left_out

    monkeypatch.setattr(discovery, "assemble", crooked)
    model, example = _mlp()
    spaces = fp.discover(model, example)
    assert "mask and cut differ" in spaces.left_out["0"]
    assert spaces.names == ("2",)


class Renormed(nn.Module):
    """An embedding that shortens its own rows in every forward pass, [batch, tokens] -> [batch, tokens,
    4].
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = (
            nn.Embedding(200, 32, max_norm=1.0),
            nn.Linear(32, 64),
            nn.Linear(64, 4),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.embed(tokens)).relu())


class Greedy(nn.Module):
    """Runs out of memory as soon as it is cut, [batch, 4] -> [batch, 2]."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.one, self.two = error, nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        if hidden.shape[1] < 8:
            raise self.error
        return self.two(hidden)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_lack_of_memory_is_no_answer(error: Exception) -> None:
    with pytest.raises(fp.FairprunerError, match="Memory ran out while cuts of Greedy were tried"):
        fp.discover(Greedy(error), torch.randn(3, 4))


def test_weights_that_the_model_writes_into_spoil_no_others() -> None:
    assert found(fp.discover(Renormed(), torch.arange(100)[None])) == {"up": ("hidden", 64)}


def test_the_weights_that_prove_a_cut_share_memory_and_yet_differ() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(9)))
    made = lively_weights(model, torch.float32)
    matrices = [made(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    assert len({matrix.untyped_storage().data_ptr() for matrix in matrices}) == 1
    assert not any((a == b).all(1).any() for a, b in combinations(matrices, 2))
    assert all(abs(float(matrix.var()) * 64 / 2 - 1) < 0.1 for matrix in matrices)  # variance 2 / fan-in


ONE_DISCOVERY = """
import torch
from moe_zoo import PlainMoE
import fairpruner as fp
from fairpruner.measuring.memory_process import resident

class Stream(torch.nn.Sequential):
    def forward(self, x):
        for block in self:
            x = x + block(x)
        return x

torch.set_num_threads(1)
torch.set_default_dtype(torch.bfloat16)
fp.discover(Stream(PlainMoE()), torch.randn(1, 5, 16))  # what this loads counts as torch's own
model = Stream(*(PlainMoE(512, 1024, experts=8) for _ in range(4)))
before = resident("VmRSS")
spaces = fp.discover(model, torch.randn(1, 20, 512))
assert len(spaces) == 8, spaces
print((resident("VmHWM") - before) / sum(p.numel() * p.element_size() for p in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_discovery_needs_the_memory_of_one_cut_in_float32() -> None:
    """A bfloat16 model takes twice its bytes in float32: what is cut stays about there, while two full
    copies would take four times.
    """
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }  # so that the memory of a freed tensor leaves the process at once
    command = [sys.executable, "-c", ONE_DISCOVERY]
    done = subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.5


class Attention(nn.Module):
    """Heads in plain matmuls, sizes read from the weights."""

    def __init__(self, width: int = 12, size: int = 4) -> None:
        super().__init__()
        self.size, self.qkv, self.out = size, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, -1, self.size).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


def test_the_heads_of_a_fused_projection_are_units() -> None:
    spaces = fp.discover(Attention(), torch.randn(2, 5, 12))
    assert found(spaces) == {"qkv": ("head", 3)}
    assert np.array_equal(
        next(s.owner for s in spaces["qkv"].slices if s.tensor == "qkv.weight"),
        np.tile(np.repeat(np.arange(3), 4), 3),
    )
