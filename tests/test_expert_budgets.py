"""Budgets of experts and bytes, router groups, and their files: what `allocate` does with spaces of
routed experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from checks import difference
from hypothesis import given
from hypothesis import strategies as st
from moe_zoo import TOP_K, moe, plain_example, plain_moe, tokens
from torch import nn

import fairpruner as fp
from fairpruner.allocation import shuffled, sweep
from fairpruner.allocation.composition import remaining
from fairpruner.core.cost_model import CostModel
from fairpruner.core.scores import Scores
from fairpruner.models.experts import expert_blocks


def held_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def routed(blocks: int, size: int, top_k: int = 4, groups: int = 1, seed: int = 0) -> Scores:
    items = tuple(
        fp.UnitSpace(f"layers.{n}.mlp", "expert", size, slices=(), min_keep=top_k, groups=groups)
        for n in range(blocks)
    )
    hidden = fp.UnitSpace("layers.0.mlp.experts", "hidden", 16, slices=())
    rng = np.random.default_rng(seed)
    spaces = fp.Spaces((*items, hidden), {}, CostModel((), (), ()), fingerprint="")
    removal, protection = ({s.name: rng.random(s.size) for s in spaces} for _ in range(2))
    return Scores(spaces, {"soft_activation": removal}, {"routed_taylor": protection}, samples=1)


@pytest.mark.parametrize("rule", ["tod", "uniform", "global"])
@pytest.mark.parametrize("seed", range(6))
def test_exactly_720_of_1440(rule: str, seed: int) -> None:
    scores = routed(24, 60, seed=seed)
    plan = fp.allocate(scores, keep=fp.Budget("experts", 720), rule=rule, exact=True)
    assert plan.predicted["experts"] == 720
    assert plan.original["experts"] == 1440
    assert (plan.predicted["units"], plan.original["units"]) == (736, 1456)
    assert plan.exact
    assert plan.removed["layers.0.mlp.experts"] == ()  # a budget of experts leaves other units alone
    assert all(len(units) <= 56 for units in plan.removed.values())
    assert fp.allocate(scores, keep=fp.Budget("experts", 0.5), rule=rule, exact=True).removed == plan.removed


def test_a_sweep_over_experts_is_the_same_as_single_plans() -> None:
    scores = routed(4, 60)
    for plan, amount in zip(sweep(scores, "experts", [0.75, 0.5, 40]), [0.75, 0.5, 40], strict=True):
        assert plan.removed == fp.allocate(scores, keep=fp.Budget("experts", amount)).removed
        assert plan.removed["layers.0.mlp.experts"] == ()


def test_other_budgets_move_all_kinds() -> None:
    plan = fp.allocate(routed(4, 60), keep=fp.Budget("units", 0.4), rule="uniform")
    assert len(plan.removed["layers.0.mlp.experts"]) > 0


def test_budgets_that_cannot_be_met_say_why() -> None:
    scores = routed(2, 12)
    with pytest.raises(
        fp.FairprunerError,
        match=r"^Budget experts keep=0.5 cannot be met: the scores hold no space of routed experts\.",
    ):
        fp.allocate(scores.only(kinds=["hidden"]), keep=fp.Budget("experts", 0.5))
    with pytest.raises(fp.FairprunerError, match="did not count bytes"):
        fp.allocate(scores, keep=fp.Budget("bytes", 0.5))
    with pytest.raises(fp.FairprunerError, match="out of reach: the smallest plan keeps 8"):
        fp.allocate(scores, keep=fp.Budget("experts", 7), rule="uniform")
    with pytest.raises(fp.FairprunerError, match="Unknown metric 'expert': did you mean 'experts'"):
        fp.Budget("expert", 0.5)  # type: ignore[arg-type]


@given(
    groups=st.sampled_from([1, 2, 3, 4]),
    per_group=st.integers(2, 6),
    seed=st.integers(0, 10**6),
    alpha=st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 0.99]),
)
def test_router_groups_stay_balanced_at_the_largest_feasible_depth(
    groups: int, per_group: int, seed: int, alpha: float
) -> None:
    """The paper's rule over the depths that leave all groups equal, against a search by brute force."""
    size = groups * per_group
    scores = routed(2, size, top_k=2, groups=groups, seed=seed)
    plan = fp.allocate(scores, alpha=alpha)
    for name in ("layers.0.mlp", "layers.1.mlp"):
        removal, protection = scores.removal[name], scores.protection[name]
        by_group = [
            sorted(range(g * per_group, (g + 1) * per_group), key=lambda j: removal[j]) for g in range(groups)
        ]
        protected = sorted(range(size), key=lambda j: -protection[j])

        gone = {
            m: {unit for order in by_group for unit in order[: m // groups]} for m in range(0, size, groups)
        }
        feasible = [m for m in gone if size - m >= 2 and len(gone[m] & set(protected[:m])) <= alpha * m]
        assert set(plan.removed[name]) == gone[max(feasible)]


@pytest.mark.parametrize("rule", ["tod", "uniform", "global"])
def test_budgets_keep_groups_balanced_and_enough_for_top_k(rule: str) -> None:
    scores = routed(5, 16, top_k=6, groups=4)
    for amount in range(40, 80, 4):
        plan = fp.allocate(scores, keep=fp.Budget("experts", amount), rule=rule, exact=True)
        assert plan.predicted["experts"] == amount
        for removed in (plan.removed, shuffled(plan, seed=1).removed):
            for units in (removed[f"layers.{n}.mlp"] for n in range(5)):
                assert [sum(u // 4 == group for u in units) for group in range(4)] == [len(units) // 4] * 4
                assert 16 - len(units) >= 8  # six experts from four groups: two of each
    with pytest.raises(
        fp.FairprunerError, match=r"removes \[2, 0, 0, 0\] units from the groups of space 'layers.0.mlp'"
    ):
        fp.Plan.removing(scores.spaces, {"layers.0.mlp": (0, 1)})


def test_groups_leave_enough_for_the_groups_that_are_chosen() -> None:
    """DeepSeek takes three experts from one group of two: each group keeps three."""
    model = moe("deepseek_v3")
    assert {(b.top_k, b.groups, b.min_keep) for b in expert_blocks(model)} == {(3, 2, 6)}
    plan = fp.allocate(scores_of(fp.discover(model, tokens(), kinds=["expert"])), alpha=0.99)
    assert all(12 - len(units) == 6 for units in plan.removed.values())
    assert difference(fp.cut(model, plan), fp.mask(model, plan), tokens()) < 1e-6


def scores_of(spaces: fp.Spaces, seed: int = 0) -> Scores:
    rng = np.random.default_rng(seed)
    return Scores(
        spaces,
        {"a": {s.name: rng.random(s.size) for s in spaces}},
        {"b": {s.name: rng.random(s.size) for s in spaces}},
        samples=1,
    )


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu().to(self.dtype)


def test_bytes_follow_the_types_of_the_parameters() -> None:
    net = nn.Sequential(
        nn.Linear(6, 16),
        Cast(torch.float64),
        nn.Linear(16, 16).double(),
        Cast(torch.bfloat16),
        nn.Linear(16, 2).bfloat16(),
    )
    plan = fp.allocate(
        scores_of(fp.discover(net, torch.randn(4, 6))), keep=fp.Budget("bytes", 0.6), rule="uniform"
    )
    assert plan.original["bytes"] == held_bytes(net) == 4 * 7 * 16 + 8 * 17 * 16 + 2 * 17 * 2
    assert plan.predicted["bytes"] == held_bytes(fp.cut(net, plan))
    assert abs(plan.share("bytes") - 0.6) < 0.1


def test_spaces_and_plans_of_experts_survive_a_file_and_old_files_are_read() -> None:
    spaces = fp.discover(moe("deepseek_v3"), tokens())
    plan = fp.allocate(scores_of(spaces), keep=fp.Budget("experts", 16), exact=True)
    content = plan.to_json()
    again = fp.Plan.from_json(content)
    assert again.removed == plan.removed
    assert again.predicted == plan.predicted
    assert [s.groups for s in again.spaces] == [s.groups for s in spaces]
    old = fp.discover(plain_moe(), plain_example()).to_json()
    del old["costs"]["bytes"]
    for item in old["items"]:
        del item["groups"]
    loaded = fp.Spaces.from_json(old)
    assert {s.groups for s in loaded} == {1}
    assert "bytes" not in fp.Plan.removing(loaded, {}).predicted


def test_a_diagnosis_of_grouped_experts() -> None:
    scores = routed(3, 16, top_k=6, groups=4)
    plan = fp.allocate(scores, keep=fp.Budget("experts", 32), exact=True)
    diagnosis = fp.diagnose(scores, plan)
    assert diagnosis.kept["experts"] == 32 / 48
    for row in diagnosis.spaces[:3]:
        curve = fp.conflict_curve(scores.removal[row.space], scores.protection[row.space], groups=4)
        assert row.tod == curve.tod[row.depth]


def test_hidden_units_inside_experts_go_by_widths_that_grouped_kernels_take() -> None:
    model = moe("qwen2_moe", torch.float32)
    spaces = fp.discover(model, tokens(), kinds=["hidden"])
    inside = [space for space in spaces if space.name.endswith("experts")]
    assert [space.multiple for space in inside] == [
        4,
        4,
    ]  # of 20 units: the largest divisor that is no more than 8
    rng = np.random.default_rng(0)
    values = {space.name: rng.random(space.size) for space in spaces}
    plan = fp.allocate(fp.Scores(spaces, {"own": values}, {"other": values}, samples=1), alpha=0.4)
    assert all(
        plan.depths[space.name] > 0 and (space.size - plan.depths[space.name]) % 4 == 0 for space in inside
    )
    small: Any = fp.cut(model, plan)
    found = {}
    for implementation in ("eager", "grouped_mm"):
        small.set_experts_implementation(implementation)
        with torch.no_grad():
            found[implementation] = small(**tokens()).logits
    torch.testing.assert_close(found["grouped_mm"], found["eager"])
    assert [space.multiple for space in remaining(plan, small) if space.name.endswith("experts")] == [4, 4]
    again = fp.Spaces.from_json(spaces.to_json())
    assert [space.multiple for space in again] == [space.multiple for space in spaces]


@pytest.mark.parametrize("metric", ["params", "active_params"])
@pytest.mark.parametrize("rule", ["tod", "uniform", "global"])
def test_experts_and_the_hidden_units_inside_them_share_one_budget(metric: Any, rule: Any) -> None:
    """A removed expert takes its hidden units with it: the predicted costs of both together are exact."""
    model = moe("qwen2_moe", torch.float32, moe_intermediate_size=64)
    spaces = fp.discover(model, tokens(), kinds=["expert", "hidden"])
    spaces = spaces.without({s.name: "beside" for s in spaces if "shared" in s.name})
    rng = np.random.default_rng(0)
    removal, protection = ({s.name: rng.random(s.size) for s in spaces} for _ in range(2))
    scores = fp.Scores(spaces, {"own": removal}, {"other": protection}, samples=1)
    plan = fp.allocate(scores, keep=fp.Budget(metric, 0.7), rule=rule)
    small: Any = fp.cut(model, plan)
    for block in expert_blocks(model):
        (inside,) = (s.name for s in spaces if s.kind == "hidden" and s.name.startswith(block.experts))
        assert plan.removed[inside], plan  # of all experts of the block
        kept = plan.kept[block.name], plan.kept[inside]
        experts = small.get_submodule(block.experts)
        assert experts.down_proj.shape == (kept[0], 32, kept[1])
        assert experts.gate_up_proj.shape == (kept[0], 2 * kept[1], 32)
    assert any(plan.removed[block.name] for block in expert_blocks(model))
    assert plan.predicted["params"] == fp.count_params(small)
    unused = sum(
        (block.size - TOP_K) * 3 * 32 * small.get_submodule(block.experts).down_proj.shape[2]
        for block in expert_blocks(small)
    )
    assert plan.predicted["active_params"] == fp.count_params(small) - unused
    assert plan.share(metric) == pytest.approx(0.7, abs=0.06)
