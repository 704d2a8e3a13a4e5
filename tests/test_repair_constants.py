"""Removed experts leave their mean outputs behind: the router stays, and the model is saved and loaded."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_zoo import FAMILIES, moe, plain_example, plain_moe
from test_moe_files import equal_state
from test_repair_experts import Data, half_gone, outputs, squared, texts, with_targets
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.models.experts import expert_blocks
from fairpruner.repair import regression

transformers = pytest.importorskip("transformers")
UNSEEN = {"llama4"}  # its experts all see all tokens


def repaired(model: nn.Module, plan: fp.Plan, data: Data, *methods: str) -> Any:
    """Repaired whatever the loss does."""
    return fp.repair(
        fp.cut(model, plan),
        model,
        plan,
        with_targets(model, data),
        method=methods or ["constants"],
        loss=lambda *_: torch.zeros(()),
    )


def replacing_outputs(model: nn.Module, plan: fp.Plan, constants: dict[str, dict[int, Tensor]]) -> nn.Module:
    """A copy of the whole model in which the outputs of some experts are constants."""
    model = copy.deepcopy(model)
    for block in expert_blocks(model):
        experts: Any = model.get_submodule(block.experts)
        own, run = constants[block.name], experts.forward

        def forward(x: Tensor, chosen: Tensor, weights: Tensor, own: Any = own, run: Any = run) -> Tensor:
            weights, added = weights.clone(), torch.zeros_like(x)
            for token in range(len(x)):
                for place, expert in enumerate(chosen[token].tolist()):
                    if expert in own:
                        added[token] += weights[token, place] * own[expert]
                        weights[token, place] = 0
            return run(x, chosen, weights) + added

        experts.forward = forward
    return model


def constants_in(small: nn.Module, plan: fp.Plan) -> dict[str, dict[int, Tensor]]:
    found = {}
    for space in plan.spaces:
        values: Any = small.get_submodule(space.name).experts.constants.values.detach()
        found[space.name] = dict(zip(plan.removed[space.name], values, strict=True))
    return found


def check_equals_replaced_outputs(family: str) -> None:
    model, data = moe(family), texts(2, 4)
    plan = half_gone(model)
    small = repaired(model, plan, data)
    expected = outputs(replacing_outputs(model, plan, constants_in(small, plan)), data)
    torch.testing.assert_close(outputs(small, data), expected, rtol=1e-9, atol=1e-10)
    assert (expected - outputs(model, data)).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_the_model_is_the_original_with_constants_for_the_outputs_of_removed_experts(family: str) -> None:
    check_equals_replaced_outputs(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - UNSEEN))
def test_so_in_every_family(family: str) -> None:
    check_equals_replaced_outputs(family)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])  # gpt_oss: biases, and transposed matrices
def test_a_constant_is_the_mean_output_weighted_by_the_squared_router_weight(family: str) -> None:
    model, (batch,) = moe(family), texts(1, 6)
    mask = torch.ones_like(batch["input_ids"])
    mask[::2, -4:] = 0  # padding teaches nothing
    plan, calls = half_gone(model), list[Any]()
    constants = constants_in(repaired(model, plan, [{**batch, "attention_mask": mask}]), plan)
    block = expert_blocks(model)[0]
    experts: Any = model.get_submodule(block.experts)
    experts.register_forward_pre_hook(lambda _, args: calls.append(args))
    outputs(model, [{**batch, "attention_mask": mask}])
    x, chosen, weights = calls[0]
    used = 0
    for expert, constant in constants[block.name].items():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        real = mask.flatten()[rows] == 1
        share = weights[rows[real], places[real]].square()
        if not len(share):
            assert not constant.any()
            continue
        alone = torch.full((len(share), 1), expert), torch.ones(len(share), 1, dtype=torch.float64)
        with torch.no_grad():
            output = experts.forward(x[rows[real]], *alone)
        torch.testing.assert_close(constant, share @ output / share.sum(), rtol=1e-9, atol=1e-12)
        used += 1
    assert used > 3


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_it_is_saved_and_loaded_here_and_by_transformers_alone(family: str, tmp_path: Path) -> None:
    model, data = moe(family, torch.float32), texts(1, 4)
    plan = half_gone(model)
    small = repaired(model, plan, data)
    fp.save(small, plan, tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert len(config["pruned"]["constants"]) == 2
    readme = (tmp_path / "small" / "README.md").read_text()
    assert "left constants behind" in readme
    assert "trust_remote_code=True" in readme
    foreign = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", trust_remote_code=True)
    for again in (fp.load(tmp_path / "small"), foreign):
        assert equal_state(small, again)
        for implementation in ("eager", "batched_mm", "grouped_mm"):
            for net in (small, again):
                net.set_experts_implementation(implementation)
            torch.testing.assert_close(outputs(again, data), outputs(small, data), rtol=1e-4, atol=1e-5)
    tokens = data[0]["input_ids"][:1]
    made = [net.generate(tokens, max_new_tokens=4, do_sample=False) for net in (small, foreign)]
    assert torch.equal(*made)
    stock = getattr(transformers, FAMILIES[family][0])
    with pytest.raises(RuntimeError):  # never with random experts
        stock.from_pretrained(tmp_path / "small")


def test_what_was_replaced_is_not_pruned_again() -> None:
    model, data = moe("qwen2_moe"), texts(1, 4)
    plan = half_gone(model)
    small = repaired(model, plan, data)
    spaces = fp.discover(small, {"input_ids": data[0]["input_ids"][:1]})
    assert "expert" not in {space.kind for space in spaces}
    for space in plan.spaces:
        assert "left constants behind" in spaces.left_out[space.name]
    added = sum(tensor.numel() for name, tensor in small.named_parameters() if "constants" in name)
    rows = sum(32 * len(units) for units in plan.removed.values())  # of routers
    assert fp.count_params(small) == plan.predicted["params"] + added + rows


def test_experts_of_other_sizes_and_a_narrower_stream_are_replaced_too() -> None:
    model, data = moe("qwen2_moe"), texts(1, 4)
    spaces = fp.discover(model, {"input_ids": data[0]["input_ids"][:1]}, kinds=["expert", "hidden", "stream"])
    block = expert_blocks(model)[1].name
    inside = next(s.name for s in spaces if s.kind == "hidden" and s.name.startswith(f"{block}.experts"))
    stream = next(s.name for s in spaces if s.kind == "stream")
    everything = fp.Plan.removing(spaces, {block: (0, 3, 7), inside: range(8), stream: (1, 2)})
    without = fp.Plan.removing(spaces, {inside: range(8), stream: (1, 2)})
    small, whole = repaired(model, everything, data), fp.cut(model, without)
    values: Any = small.get_submodule(block).experts.constants.values.detach()
    assert values.shape == (3, 30)
    own = {expert_blocks(whole)[0].name: {}, block: dict(zip((0, 3, 7), values, strict=True))}
    expected = outputs(replacing_outputs(whole, everything, own), data)
    torch.testing.assert_close(outputs(small, data), expected, rtol=1e-9, atol=1e-10)


def test_kept_experts_are_refitted_beside_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "DAMPINGS", (1e-13,))
    model, data = moe("qwen2_moe"), texts(8, 32)
    plan, block, calls = half_gone(model), expert_blocks(model)[0], list[Any]()
    small = repaired(model, plan, data, "constants", "experts")
    # In the first block, what is left of the error is orthogonal to the features of every kept expert.
    for net in (model, small):
        net.get_submodule(block.name).register_forward_hook(lambda _, args, out: calls.append((args, out)))
        outputs(net, data)
    count = len(data)
    left = torch.cat([a[1] - b[1] for a, b in zip(calls[:count], calls[count:], strict=True)]).flatten(0, 1)
    x = torch.cat([args[0] for args, _ in calls[count:]]).flatten(0, 1)
    ours: Any = small.get_submodule(block.name)
    with torch.no_grad():
        _, weights, chosen = ours.gate(x)
        number = ours.experts.constants.number[chosen]
        for expert in range(ours.experts.num_experts):
            rows, places = (number == expert).nonzero(as_tuple=True)
            gate, up = (x[rows] @ ours.experts.gate_up_proj[expert].T).chunk(2, -1)
            features = weights[rows, places][:, None] * F.silu(gate) * up
            assert (features.T @ left[rows]).abs().max() < 1e-6 * features.norm() * left.norm()


def test_a_second_repair_leaves_constants_as_they_are() -> None:
    model, data = moe("qwen2_moe"), texts(1, 4)
    plan = half_gone(model)
    small = repaired(model, plan, data)
    again, notes = fp.repair_with_notes(
        small, model, plan, with_targets(model, data), method="constants", loss=squared
    )
    assert {note.outcome for note in notes} == {"kept"}
    assert equal_state(small, again)


def test_what_cannot_be_replaced_says_so() -> None:
    model, data = moe("llama4"), texts(1, 4)
    nothing = fp.Plan.removing(half_gone(model).spaces, {})
    listed, inputs = plain_moe(), plain_example()
    spaces = fp.discover(listed, inputs[:1], kinds=["expert"])
    labelled: Any = [(inputs, listed(inputs).detach())]
    cases: list[tuple[Any, fp.Plan, Any, Any, str]] = [
        (model, half_gone(model), with_targets(model, data), squared, "only fused experts"),
        (model, nothing, with_targets(model, data), squared, "removes no routed expert"),
        (
            listed,
            fp.Plan.removing(spaces, {spaces[0].name: (0,)}),
            labelled,
            F.mse_loss,
            "only fused experts",
        ),
    ]
    for net, plan, given, loss, reason in cases:
        small = fp.cut(net, plan)
        same, notes = fp.repair_with_notes(small, net, plan, given, method="constants", loss=loss)
        assert {note.outcome for note in notes} == {"skipped"}
        assert reason in notes[0].reason
        assert equal_state(small, same)
