"""Blocks that lost experts are refitted to what they gave before: by hand, in every family, and never for the worse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from checks import some_units
from moe_zoo import FAMILIES, moe, plain_example, plain_moe
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.experts import expert_blocks
from fairpruner.repair import Note, regression

Data = list[dict[str, Tensor]]
LENGTH = 12  # of a text, without padding


def texts(batches: int = 3, size: int = 16, length: int = LENGTH) -> Data:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 99, (size, length), generator=generator)} for _ in range(batches)]


def half_gone(model: nn.Module) -> fp.Plan:
    spaces = fp.discover(model, {"input_ids": texts(1, 1)[0]["input_ids"]}, kinds=["expert"])
    return fp.Plan.removing(spaces, some_units(spaces, 0.5, seed=0))


def outputs(model: nn.Module, data: Data) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(**batch).logits for batch in data])


def squared(output: Any, target: Tensor) -> Tensor:
    return (output.logits - target)[:, :LENGTH].square().mean()


def with_targets(model: nn.Module, data: Data) -> Data:
    """The batches, with what the model gives for them as labels."""
    return [{**batch, "labels": outputs(model, [batch])} for batch in data]


def inputs_of(model: nn.Module, path: str, data: Data) -> Tensor:
    """What a module is called with, [tokens, H]."""
    seen: list[Tensor] = []
    hook = model.get_submodule(path).register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    outputs(model, data)
    hook.remove()
    return torch.cat(seen)


@pytest.fixture
def undamped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "DAMPINGS", (1e-13,))


@pytest.mark.usefixtures("undamped")
def test_the_first_block_against_numpy() -> None:
    model, data = moe("qwen2_moe"), texts(8, 32)
    plan = half_gone(model)
    small, name = fp.cut(model, plan), expert_blocks(model)[0].name
    notes: list[Note] = []
    repaired = fp.repair(small, model, plan, with_targets(model, data), method="experts", loss=squared, notes=notes)
    assert [note.outcome for note in notes] == ["repaired", "repaired"]

    block: nn.Module = small.get_submodule(name)
    x = inputs_of(model, name, data)
    with torch.no_grad():
        _, weights, chosen = block.gate(x)
        experts, shared = block.experts, block.shared_expert
        rows = []
        for token, (own, names) in enumerate(zip(weights, chosen.tolist(), strict=True)):
            row = np.zeros(experts.num_experts * 20)
            for weight, number in zip(own, names, strict=True):
                gate, up = (experts.gate_up_proj[number] @ x[token]).chunk(2)
                row[number * 20 : (number + 1) * 20] = weight * F.silu(gate) * up
            rows.append(row)
        beside = torch.sigmoid(block.shared_expert_gate(x)) * (F.silu(shared.gate_proj(x)) * shared.up_proj(x))
        features = np.column_stack([np.stack(rows), beside.numpy()])
        error = (model.get_submodule(name)(x[None]) - block(x[None]))[0].numpy()
    solution = np.linalg.lstsq(features, error, rcond=None)[0]
    inside = experts.num_experts * 20
    expected = experts.down_proj.detach().numpy() + solution[:inside].reshape(-1, 20, 32).transpose(0, 2, 1)
    mended: nn.Module = repaired.get_submodule(name)
    np.testing.assert_allclose(mended.experts.down_proj.detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    expected = shared.down_proj.weight.detach().numpy() + solution[inside:].T
    np.testing.assert_allclose(mended.shared_expert.down_proj.weight.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_every_family_the_output_comes_nearer(family: str) -> None:
    model, data = moe(family), texts()
    plan = half_gone(model)
    small, notes = fp.cut(model, plan), list[Note]()
    before = {name: tensor.clone() for name, tensor in small.state_dict().items()}
    repaired = fp.repair(small, model, plan, with_targets(model, data), method="experts", loss=squared, notes=notes)
    assert all(torch.equal(tensor, small.state_dict()[name]) for name, tensor in before.items())
    assert [note.outcome for note in notes if note.outcome != "repaired"] == [], notes
    target = outputs(model, data)
    share = 1.0 if family == "llama4" else 0.9  # its experts are not seen, and its shared expert alone can do little
    assert (outputs(repaired, data) - target).square().mean() < share * (outputs(small, data) - target).square().mean()


def test_padding_teaches_nothing() -> None:
    model, data = moe("qwen2_moe"), texts()
    plan = half_gone(model)
    small, widths = fp.cut(model, plan), (0, 5)
    padded = [[{"input_ids": F.pad(b["input_ids"], (0, w)), "attention_mask": F.pad(torch.ones_like(b["input_ids"]), (0, w))} for b in data] for w in widths]
    without, with_padding = (fp.repair(small, model, plan, with_targets(model, batches), method="experts", loss=squared).state_dict() for batches in padded)
    assert not torch.equal(without["model.layers.0.mlp.experts.down_proj"], small.state_dict()["model.layers.0.mlp.experts.down_proj"])
    for name, tensor in without.items():
        torch.testing.assert_close(with_padding[name], tensor, rtol=1e-6, atol=1e-8)


def test_experts_in_a_list_are_left_alone_with_a_reason() -> None:
    model, inputs = plain_moe(), torch.cat([plain_example() for _ in range(4)])
    spaces = fp.discover(model, inputs[:1], kinds=["expert"])
    plan, notes = fp.Plan.removing(spaces, some_units(spaces, 0.5, seed=0)), list[Note]()
    small = fp.cut(model, plan)
    data = [(inputs, model(inputs).detach())]
    repaired = fp.repair(small, model, plan, data, method="experts", loss=lambda output, target: (output - target).square().mean(), notes=notes)
    assert {note.outcome for note in notes} == {"skipped"}
    assert all(torch.equal(a, b) for a, b in zip(small.state_dict().values(), repaired.state_dict().values(), strict=True))
    with pytest.raises(fp.FairprunerError, match="not the cut of this plan"):
        fp.repair(model, model, plan, data, method="experts")
