"""Blocks that lost experts are refitted to what they gave before: by hand, in every family, and never for
the worse.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from checks import some_units
from moe_zoo import FAMILIES, PlainMoE, PlainMoENet, moe, plain_example, plain_moe
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.inputs.batches import read_batches
from fairpruner.models.experts import expert_blocks
from fairpruner.repair import block_calls, experts, merging, regression
from fairpruner.repair.job import Job

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
    hook = model.get_submodule(path).register_forward_pre_hook(
        lambda _, args: seen.append(args[0].flatten(0, -2))
    )
    outputs(model, data)
    hook.remove()
    return torch.cat(seen)


@pytest.fixture
def undamped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "DAMPINGS", (1e-13,))


# Six kept experts with 20 features each, and a shared one with 28: most features at once -> what is
# fitted
# together.
PARTS = {
    8192: [range(148)],
    50: [range(40), range(40, 80), range(80, 120), range(120, 148)],
    1: [*(range(start, start + 20) for start in range(0, 120, 20)), range(120, 148)],
}


@pytest.mark.slow
@pytest.mark.usefixtures("undamped")
@pytest.mark.parametrize("most", PARTS)
def test_the_first_block_against_numpy(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "MOST_FEATURES", most)
    model, data = moe("qwen2_moe"), texts(8, 32)
    plan = half_gone(model)
    small, name = fp.cut(model, plan), expert_blocks(model)[0].name
    repaired, notes = fp.repair_with_notes(
        small, model, plan, with_targets(model, data), method="experts", loss=squared
    )
    assert [note.outcome for note in notes] == ["repaired", "repaired"]

    block: nn.Module = small.get_submodule(name)
    x = inputs_of(model, name, data)
    with torch.no_grad():
        _, weights, chosen = block.gate(x)
        routed, shared = block.experts, block.shared_expert
        rows = []
        for token, (own, names) in enumerate(zip(weights, chosen.tolist(), strict=True)):
            row = np.zeros(routed.num_experts * 20)
            for weight, number in zip(own, names, strict=True):
                gate, up = (routed.gate_up_proj[number] @ x[token]).chunk(2)
                row[number * 20 : (number + 1) * 20] = weight * F.silu(gate) * up
            rows.append(row)
        beside = torch.sigmoid(block.shared_expert_gate(x)) * (
            F.silu(shared.gate_proj(x)) * shared.up_proj(x)
        )
        features = np.column_stack([np.stack(rows), beside.numpy()])
        error = (model.get_submodule(name)(x[None]) - block(x[None]))[0].numpy()
    solution = np.zeros((148, 32))
    for part in PARTS[most]:  # each fits what those before it left over
        solution[part] = np.linalg.lstsq(features[:, part], error - features @ solution, rcond=None)[0]
    expected = routed.down_proj.detach().numpy() + solution[:120].reshape(-1, 20, 32).transpose(0, 2, 1)
    mended: nn.Module = repaired.get_submodule(name)
    np.testing.assert_allclose(mended.experts.down_proj.detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    expected = shared.down_proj.weight.detach().numpy() + solution[120:].T
    np.testing.assert_allclose(
        mended.shared_expert.down_proj.weight.detach().numpy(), expected, rtol=1e-5, atol=1e-6
    )


def test_a_block_should_give_what_brings_the_stream_back() -> None:
    model, data = moe("qwen2_moe"), texts(1)
    plan, streams = half_gone(model), list[Tensor]()
    small, block = fp.cut(model, plan), expert_blocks(model)[1]
    with torch.no_grad():
        job = Job(small, model, plan, lambda: read_batches(data, torch.device("cpu")))
        (call,) = block_calls.BlockCalls(job, block)
        for net in (model, small):
            net.get_submodule("model.layers.1").register_forward_hook(
                lambda _, args, out: streams.append(out)
            )
            outputs(net, data)
        given = small.get_submodule(block.name)(*call.args)
    torch.testing.assert_close(
        call.target - given.flatten(0, 1), (streams[0] - streams[1]).flatten(0, 1), rtol=1e-9, atol=1e-12
    )
    assert (streams[0] - streams[1]).abs().max() > 0.1


def test_what_reaches_a_block_is_run_once_if_it_can_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "MOST_FEATURES", 50)
    model, data = moe("qwen2_moe"), texts(3)
    plan = half_gone(model)
    small, seen = fp.cut(model, plan), list[int]()
    model.get_submodule(expert_blocks(model)[1].name).register_forward_pre_hook(lambda *_: seen.append(1))
    states, counts = [], []
    for most in (
        block_calls.MOST_HELD,
        0,
        16 * LENGTH * 32 * 8 * 2,
    ):  # all, nothing, the input and the target of one batch
        monkeypatch.setattr(block_calls, "MOST_HELD", most)
        seen.clear()
        states.append(
            fp.repair(
                small,
                model,
                plan,
                with_targets(small, data),
                method="experts",
                loss=lambda *_: torch.zeros(()),
            ).state_dict()
        )
        counts.append(len(seen))
    assert counts[0] == 3  # each batch
    assert counts[1] == 1 + 4 * 3  # a first look, and each batch for each of four parts
    assert counts[2] == 1 + 4 * 2
    for state in states[1:]:
        for name, tensor in states[0].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_in_every_family_the_output_comes_nearer(family: str) -> None:
    model, data = moe(family), texts()
    plan = half_gone(model)
    small = fp.cut(model, plan)
    before = {name: tensor.clone() for name, tensor in small.state_dict().items()}
    repaired, notes = fp.repair_with_notes(
        small, model, plan, with_targets(model, data), method="experts", loss=squared
    )
    assert all(torch.equal(tensor, small.state_dict()[name]) for name, tensor in before.items())
    assert [note.outcome for note in notes if note.outcome != "repaired"] == [], notes
    target = outputs(model, data)
    share = (
        1.0 if family == "llama4" else 0.9
    )  # its experts are not seen, and its shared expert alone can do little
    assert (outputs(repaired, data) - target).square().mean() < share * (
        outputs(small, data) - target
    ).square().mean()
    notes = fp.repair_with_notes(
        small, model, plan, with_targets(model, data[:1]), method="merge", loss=squared
    ).notes
    assert "skipped" not in {note.outcome for note in notes}


def test_padding_teaches_nothing() -> None:
    model, data = moe("qwen2_moe"), texts()
    plan = half_gone(model)
    small, widths = fp.cut(model, plan), (0, 5)
    padded = [
        [
            {
                "input_ids": F.pad(b["input_ids"], (0, w)),
                "attention_mask": F.pad(torch.ones_like(b["input_ids"]), (0, w)),
            }
            for b in data
        ]
        for w in widths
    ]
    without, with_padding = (
        fp.repair(
            small, model, plan, with_targets(model, batches), method="experts", loss=squared
        ).state_dict()
        for batches in padded
    )
    assert not torch.equal(
        without["model.layers.0.mlp.experts.down_proj"],
        small.state_dict()["model.layers.0.mlp.experts.down_proj"],
    )
    for name, tensor in without.items():
        torch.testing.assert_close(with_padding[name], tensor, rtol=1e-6, atol=1e-8)


def test_experts_in_a_list_are_left_alone_with_a_reason() -> None:
    model, inputs = plain_moe(), torch.cat([plain_example() for _ in range(4)])
    spaces = fp.discover(model, inputs[:1], kinds=["expert"])
    plan = fp.Plan.removing(spaces, some_units(spaces, 0.5, seed=0))
    small = fp.cut(model, plan)
    data = [(inputs, model(inputs).detach())]
    repaired, notes = fp.repair_with_notes(
        small,
        model,
        plan,
        data,
        method="experts",
        loss=lambda output, target: (output - target).square().mean(),
    )
    assert {note.outcome for note in notes} == {"skipped"}
    assert all(
        torch.equal(a, b)
        for a, b in zip(small.state_dict().values(), repaired.state_dict().values(), strict=True)
    )
    with pytest.raises(fp.FairprunerError, match="not the cut of this plan"):
        fp.repair(model, model, plan, data, method="experts")


def test_a_layer_that_caches_keys_is_run_again_with_padding() -> None:
    model, data = moe("gemma4"), texts()
    plan = half_gone(model)
    small, mask = fp.cut(model, plan), torch.ones(16, LENGTH, dtype=torch.int64)
    mask[::2, -3:] = 0
    padded = [{**batch, "attention_mask": mask} for batch in data]
    notes = fp.repair_with_notes(
        small,
        model,
        plan,
        with_targets(model, padded),
        method=["merge", "experts"],
        loss=squared,
    ).notes
    assert {note.outcome for note in notes} <= {"repaired", "kept"}


@pytest.mark.parametrize("method", ["experts", "merge"])
def test_autocast_reaches_the_blocks_but_not_the_sums(method: str) -> None:
    model, data = moe("qwen2_moe").float(), texts(3, 8)
    plan, targets = half_gone(model), with_targets(model, data)
    small = fp.cut(model, plan)
    exact = fp.repair(small, model, plan, targets, method=method, loss=squared)
    with torch.autocast("cpu", torch.bfloat16):
        rough = fp.repair(small, model, plan, targets, method=method, loss=squared)
        found = outputs(rough, data)
        torch.clear_autocast_cache()
        assert torch.equal(found, outputs(rough, data))  # not those of weights that were cast before
    wanted = outputs(model, data)
    error, least = ((outputs(repaired, data) - wanted).square().mean() for repaired in (rough, exact))
    assert error < 1.2 * least


def test_sums_over_tokens_are_not_cast() -> None:
    rows, values, tails = torch.arange(20), torch.randn(20, 3), torch.randn(20, 2)
    features = experts._Features(rows, rows % 2, values, 2, tails)
    with torch.autocast("cpu", torch.bfloat16):
        found = features.equations(rows, torch.ones(20, 4))
    whole = torch.cat([values * (rows % 2 == 0)[:, None], values * (rows % 2)[:, None], tails], 1).double()
    torch.testing.assert_close(found.gram[0], whole.T @ whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.cross[0], whole.T @ torch.ones(20, 4).double(), rtol=1e-5, atol=1e-5)


def test_means_by_hand() -> None:
    rows = torch.tensor(
        [[200.0, 0.0], [0.0, 1.0], [9.0, 1.0], [1.0, 9.0], [0.1, 5.0]]
    )  # 2 points as 0 does, 3 and 4 as 1
    near = merging.nearest(rows, torch.tensor([2, 3, 4]))
    assert near.tolist() == [0, 1, 1]
    kept, removed = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 8.0], [6.0, 7.0], [0.0, 1.0]])
    assert merging.mean_with(kept, removed, near).tolist() == [[3.0, 5.0], [3.0, 4.0]]
    assert merging.mean_with(kept, removed[:1], near[:1]).tolist() == [
        [3.0, 5.0],
        [3.0, 4.0],
    ]  # who takes in no one stays


def test_merging_goes_as_far_as_it_helps() -> None:
    model, data = moe("qwen2_moe"), texts()
    plan = half_gone(model)
    small, block = fp.cut(model, plan), expert_blocks(model)[0]
    repaired, notes = fp.repair_with_notes(
        small, model, plan, with_targets(model, data), method="merge", loss=squared
    )
    removed = list(plan.removed[block.name])
    kept = [unit for unit in range(block.size) if unit not in removed]
    x, theirs = inputs_of(model, block.name, data), model.get_submodule(block.name)
    angles = F.cosine_similarity(theirs.gate.weight[removed][:, None], theirs.gate.weight[kept][None], dim=2)
    groups = [
        [
            unit,
            *(
                gone
                for gone, place in zip(removed, angles.argmax(1).tolist(), strict=True)
                if place == number
            ),
        ]
        for number, unit in enumerate(kept)
    ]
    trial, errors, weights = fp.cut(model, plan).get_submodule(block.name), {}, {}
    with torch.no_grad():
        for share in merging.SHARES:
            for name, stack in theirs.experts.named_parameters():
                mixed = torch.stack(
                    [(1 - share) * stack[group[0]] + share * stack[group].mean(0) for group in groups]
                )
                trial.experts.get_parameter(name).copy_(mixed)
                weights[share, name] = mixed
            errors[share] = float((trial(x[None]) - theirs(x[None])).square().sum())
        best = min(errors, key=errors.__getitem__)
        assert 0 < best < 1, errors
        assert notes[0].error == pytest.approx(errors[best] / errors[0.0], rel=1e-9)
        for name, tensor in repaired.get_submodule(block.experts).named_parameters():
            torch.testing.assert_close(tensor, weights[best, name], rtol=1e-12, atol=1e-14)


def test_merging_with_an_equal_changes_nothing() -> None:
    model, data = moe("mixtral"), texts()
    spaces = fp.discover(model, {"input_ids": data[0]["input_ids"][:1]}, kinds=["expert"])
    block = expert_blocks(model)[0]
    with torch.no_grad():
        model.get_submodule(block.router).weight[4] = 1.5 * model.get_submodule(block.router).weight[7]
        for tensor in model.get_submodule(block.experts).parameters():
            tensor[4] = tensor[7]
    plan = fp.Plan.removing(spaces, {block.name: (4,)})
    small = fp.cut(model, plan)
    repaired, notes = fp.repair_with_notes(
        small, model, plan, with_targets(model, data), method="merge", loss=squared
    )
    assert [(note.subject, note.outcome) for note in notes] == [(block.name, "kept")]
    assert all(
        torch.equal(a, b)
        for a, b in zip(small.state_dict().values(), repaired.state_dict().values(), strict=True)
    )


def test_listed_experts_are_merged_too_even_where_the_block_is_the_model() -> None:
    torch.manual_seed(0)
    model, inputs = PlainMoE().double().eval(), torch.randn(24, 10, 16, dtype=torch.float64)
    spaces = fp.discover(model, inputs[:1], kinds=["expert"])
    plan = fp.Plan.removing(spaces, some_units(spaces, 0.5, seed=0))
    small, target = fp.cut(model, plan), model(inputs).detach()
    repaired, notes = fp.repair_with_notes(
        small, model, plan, [(inputs, target)], method="merge", loss=F.mse_loss
    )
    assert [note.outcome for note in notes] == ["repaired"]
    with torch.no_grad():
        before, after = (F.mse_loss(net(inputs), target) for net in (small, repaired))
    assert notes[0].error == pytest.approx(float(after / before), rel=1e-9)


class InPlace(PlainMoENet):
    """The same net, its residual sums written over the output of the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h).add_(h)
        return self.head(self.norm(h))


def test_sums_in_place_are_seen_before_they_happen() -> None:
    inputs, states = (
        torch.randn(24, 15, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        [],
    )
    for kind in (PlainMoENet, InPlace):
        torch.manual_seed(0)
        model = kind().double().eval()
        spaces = fp.discover(model, inputs[:1], kinds=["expert"])
        plan = fp.Plan.removing(spaces, some_units(spaces, 0.5, seed=0))
        repaired, notes = fp.repair_with_notes(
            fp.cut(model, plan),
            model,
            plan,
            [(inputs, model(inputs).detach())],
            method="merge",
            loss=F.mse_loss,
        )
        assert {note.outcome for note in notes} == {"repaired"}
        states.append(repaired.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-9, atol=1e-12)


def test_merging_then_refitting_is_better_than_either() -> None:
    model, data = moe("jamba"), texts()
    plan = half_gone(model)
    small, target = fp.cut(model, plan), outputs(model, data)
    methods: list[list[str]] = [["merge"], ["experts"], ["merge", "experts"]]
    errors = [
        (
            outputs(fp.repair(small, model, plan, with_targets(model, data), method=m, loss=squared), data)
            - target
        )
        .square()
        .mean()
        for m in methods
    ]
    assert errors[2] < min(errors[:2])


def test_what_cannot_be_merged_says_so() -> None:
    model, data = moe("qwen2_moe"), texts()
    spaces = fp.discover(model, {"input_ids": data[0]["input_ids"][:1]})
    inside = next(space.name for space in spaces if space.kind == "hidden" and "experts" in space.name)
    block = expert_blocks(model)[0]
    both = fp.Plan.removing(spaces, {block.name: (0, 1), inside: tuple(range(4))})
    neither = fp.Plan.removing(spaces, {})
    for plan, reason in ((both, "lost more than their number"), (neither, "removes no routed expert")):
        notes = fp.repair_with_notes(
            fp.cut(model, plan),
            model,
            plan,
            with_targets(model, data),
            method="merge",
            loss=squared,
        ).notes
        assert notes[-1].outcome == "skipped"
        assert reason in notes[-1].reason
