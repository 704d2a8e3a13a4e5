"""Latency tables and budgets of latency: exact expectations from made-up tables; nothing here depends on
a clock.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_spaces import hand_spaces, random_scores
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import nn
from typer.testing import CliRunner

import fairpruner as fp
from fairpruner.allocation.allocator import Allocator
from fairpruner.cli import app
from fairpruner.core.cost_model import Factor, Term
from fairpruner.core.costs import Lengths
from fairpruner.core.latency import LatencyTable, TimedOp
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.demo import build
from fairpruner.discovery.trace import trace
from fairpruner.measuring import fitting, profiling


def table_of(spaces: Spaces, *, multiple: int = 4, fixed: float = 0.25, uneven: float = 0.5) -> LatencyTable:
    """One operation for each matrix of the chain: a millisecond for a thousand multiply-accumulates."""
    sizes = [factor.size for factor in spaces.costs.factors]
    ops = tuple(
        TimedOp(
            t.factors,
            fixed,
            t.coefficient * sizes[t.factors[0]] * sizes[t.factors[1]] / 1000,
            uneven,
            (0.1, 0.2),
        )
        for t in spaces.costs.flops
    )
    return LatencyTable(
        spaces.costs.factors,
        ops,
        1.25 * sum(op.fixed + op.work for op in ops),
        multiple,
        spaces.fingerprint,
        {"runtime": "made up"},
    )


def by_hand(table: LatencyTable, spaces: Spaces, plan: fp.Plan) -> float:
    """The rule, written once more and one length at a time."""
    lengths = [
        f.size - sum(int(owned[list(plan.removed[name])].sum()) for name, owned in f.owned.items())
        for f in spaces.costs.factors
    ]
    if all(length == factor.size for length, factor in zip(lengths, spaces.costs.factors, strict=True)):
        return table.original
    total = 0.0
    for op in table.ops:
        share, ragged = 1.0, False
        for f in op.factors:
            up, whole = (
                -(-length // table.multiple) * table.multiple
                for length in (lengths[f], spaces.costs.factors[f].size)
            )
            share, ragged = share * up / whole, ragged or lengths[f] % table.multiple > 0
            total += op.widths[op.factors.index(f)] * up / whole
        total += op.fixed + (op.work + op.uneven * ragged) * share
    return total


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.sampled_from([1, 3, 8]),
    st.floats(0, 0.99),
)
def test_predicted_latency_is_the_sum_over_operations(
    sizes: list[int], seed: int, multiple: int, alpha: float
) -> None:
    scores = random_scores(sizes, seed)
    table = table_of(scores.spaces, multiple=multiple)
    plan = fp.allocate(scores, alpha, latency=table)
    assert plan.predicted["latency_ms"] == pytest.approx(by_hand(table, scores.spaces, plan), rel=1e-12)
    assert plan.original["latency_ms"] == pytest.approx(
        by_hand(table, scores.spaces, fp.Plan.removing(scores.spaces, {})), rel=1e-12
    )
    assert {name: value for name, value in plan.predicted.items() if name != "latency_ms"} == fp.allocate(
        scores, alpha
    ).predicted


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=3),
    st.integers(0, 10**6),
    st.floats(0.3, 1.0),
    st.booleans(),
    st.floats(0, 3),
)
def test_a_budget_takes_the_first_plan_within_it_or_the_one_before(
    sizes: list[int], seed: int, share: float, in_ms: bool, uneven: float
) -> None:
    scores = random_scores(sizes, seed)
    table = table_of(scores.spaces, uneven=uneven)
    target = share * table.original
    budget = fp.Budget("latency_ms", target) if in_ms else fp.Budget("latency", share)
    plans = every_plan(scores)
    kept = [by_hand(table, scores.spaces, plan) for plan in plans]
    within = [step for step, ms in enumerate(kept) if ms <= target]
    if not within:
        with pytest.raises(fp.FairprunerError, match="out of reach"):
            fp.allocate(scores, keep=budget, latency=table)
        return
    first = within[0]
    # Of the first within and the one before the nearer; and as early as one as near is met.
    nearer = (
        first
        if first == 0 or kept[first - 1] - target > target - kept[first]
        else min(s for s, ms in enumerate(kept) if ms <= kept[first - 1])
    )
    assert fp.allocate(scores, keep=budget, latency=table).depths == plans[nearer].depths


def every_plan(scores: Scores) -> list[fp.Plan]:
    """All plans of the rule, from the one that removes nothing on."""
    profiles = Allocator(scores, "tod", multiple_of=1, min_keep=1).profiles
    orders = {name: np.argsort(values, kind="stable") for name, values in scores.removal.items()}
    steps = map(profiles.depths, range(profiles.last + 1))
    depths = (dict(zip(scores.spaces.names, step, strict=True)) for step in steps)
    return [
        fp.Plan.removing(scores.spaces, {name: order[: depth[name]] for name, order in orders.items()})
        for depth in depths
    ]


def test_latency_that_rises_where_widths_become_uneven_is_scanned() -> None:
    """One space of 8 units, multiple 4, that costs 1 ms per unit and 5 ms more when uneven: 8 -> 8, 7..5
    -> 13, 4 -> 4, 3..1 -> 6.5 ms.
    """
    scores = one_space()
    table = LatencyTable(
        scores.spaces.costs.factors,
        (TimedOp((1,), 0.0, 8.0, 5.0, (0.0,)),),
        8.0,
        4,
        scores.spaces.fingerprint,
    )
    kept = {depth: table.milliseconds(np.array([[3], [8 - depth], [10]]))[0] for depth in range(8)}
    assert kept == {0: 8, 1: 13, 2: 13, 3: 13, 4: 4, 5: 6.5, 6: 6.5, 7: 6.5}
    assert fp.allocate(scores, keep=fp.Budget("latency_ms", 4), latency=table).depths == {"s0": 4}
    assert fp.allocate(scores, keep=fp.Budget("latency", 0.85), latency=table).depths == {
        "s0": 4
    }  # 6.8: nearer to 4 than to 13, though 6.5 comes later
    assert fp.allocate(scores, keep=fp.Budget("latency_ms", 7.9), latency=table).depths == {"s0": 4}
    assert fp.allocate(scores, keep=fp.Budget("latency", 1.0), latency=table).depths == {"s0": 0}
    with pytest.raises(
        fp.FairprunerError, match=r"latency_ms keep=3 is out of reach: the smallest plan keeps 4 "
    ):
        fp.allocate(scores, keep=fp.Budget("latency_ms", 3), latency=table)


def one_space() -> Scores:
    """A space of 8 units whose rankings agree, so that every depth up to 7 is some step of the dial."""
    values = {"s0": np.arange(8.0)}
    return Scores(hand_spaces([8]), {"u": values}, {"r": values}, samples=1)


def test_exact_budgets_of_latency_go_between_two_steps() -> None:
    scores = random_scores([12, 20, 9], seed=3)
    table = table_of(scores.spaces, multiple=1, uneven=0)
    target = 0.7 * fp.allocate(scores, 0.0, latency=table).original["latency_ms"]
    plain, exact = (
        fp.allocate(scores, keep=fp.Budget("latency", 0.7), exact=exact, latency=table)
        for exact in (False, True)
    )
    assert abs(exact.predicted["latency_ms"] - target) <= abs(plain.predicted["latency_ms"] - target)


def test_auto_takes_the_multiple_of_the_table() -> None:
    scores = random_scores([40, 64], seed=0)
    table = table_of(scores.spaces, multiple=8)
    plan = fp.allocate(scores, keep=fp.Budget("flops", 0.5), multiple_of="auto", latency=table)
    assert plan.removed == fp.allocate(scores, keep=fp.Budget("flops", 0.5), multiple_of=8).removed
    assert all((space.size - plan.depths[space.name]) % 8 == 0 for space in scores.spaces)


def test_sweep_knows_latency() -> None:
    scores = random_scores([12, 20], seed=1)
    table = table_of(scores.spaces)
    plans = fp.sweep(scores, "latency", [0.95, 0.8], latency=table)
    assert [p.removed for p in plans] == [
        fp.allocate(scores, keep=fp.Budget("latency", a), latency=table).removed for a in (0.95, 0.8)
    ]


def test_spaces_that_were_left_out_stay_whole() -> None:
    scores = random_scores([12, 20], seed=1)
    table = table_of(scores.spaces)
    plan = fp.allocate(scores.only(skip=["s1"]), 0.3, latency=table)
    whole = fp.Plan.removing(scores.spaces, {"s0": plan.removed["s0"]})
    assert plan.predicted["latency_ms"] == pytest.approx(by_hand(table, scores.spaces, whole))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda s, t: fp.Budget("latency", 3), "not a share"),
        (lambda s, t: fp.Budget("latency", 1.5), "not a share"),
        (lambda s, t: fp.Budget("latency_ms", 0), "above 0"),
        (lambda s, t: fp.Budget("latency_ms", float("nan")), "above 0"),
        (lambda s, t: fp.allocate(s, keep=fp.Budget("latency", 0.5)), "no latency was measured"),
        (
            lambda s, t: fp.allocate(s, keep=fp.Budget("latency_ms", 1e6), latency=t),
            "more than the model has",
        ),
        (lambda s, t: fp.allocate(s, 0.1, multiple_of="auto"), "give latency="),
        (
            lambda s, t: fp.allocate(s, 0.1, latency=replace(t, fingerprint="other")),
            "belongs to another model",
        ),
        (lambda s, t: replace(t, multiple=0), "multiple of at least 1"),
        (lambda s, t: replace(t, original=0.0), "a time above 0"),
        (lambda s, t: TimedOp((0,), -1.0, 0.0, 0.0, (1.0,)), "times that are not negative"),
        (lambda s, t: TimedOp((0,), 1.0, 0.0, 0.0, ()), "one width time per axis"),
        (lambda s, t: replace(t, ops=(TimedOp((9,), 1.0, 0.0, 0.0, (0.0,)),)), "its own 4 axes"),
    ],
)
def test_wrong_input_gets_one_clear_sentence(call: Any, sentence: str) -> None:
    scores = random_scores([12, 20], seed=1)
    with pytest.raises(fp.FairprunerError, match=sentence):
        call(scores, table_of(scores.spaces))


def test_a_table_and_a_timed_plan_survive_their_files(tmp_path: Path) -> None:
    scores = random_scores([12, 20], seed=1, owned={"s0": [1, 2, 3] * 4})
    table = replace(table_of(scores.spaces), trials=((2.0, 2.1), (1.0, 0.9)))
    table.save(tmp_path / "latency.json")
    again = LatencyTable.load(tmp_path / "latency.json")
    plan = fp.allocate(scores, 0.2, latency=table)
    assert fp.allocate(scores, 0.2, latency=again).predicted == plan.predicted
    assert (again.ops, again.trials, again.setting, again.multiple) == (
        table.ops,
        table.trials,
        table.setting,
        table.multiple,
    )
    np.testing.assert_allclose(again.misses, [0.05, -0.1])
    plan.save(tmp_path / "plan.json")
    assert fp.Plan.load(tmp_path / "plan.json").predicted == plan.predicted
    content = json.loads((tmp_path / "latency.json").read_text(encoding="utf-8"))
    content["ops"][0][1] += 1
    (tmp_path / "latency.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(fp.FairprunerError, match="altered"):
        LatencyTable.load(tmp_path / "latency.json")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 8, 16]))
def test_the_fit_of_an_operation_is_scipys_nonnegative_least_squares(seed: int, multiple: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, sizes, times = rng.integers(1, 65, (2, 14)), np.array([64, 64]), rng.random(14)
    op, misses = fitting.fit_operation(Term(1, (0, 1)), lengths, sizes, multiple=multiple, times=times)
    padded = -(-lengths // multiple) * multiple / 64
    share, ragged = padded.prod(axis=0), (lengths % multiple > 0).any(axis=0)
    columns = np.stack([np.ones(14), share, share * ragged, *padded], axis=1)
    parts, rest = nnls(columns, times)
    left = columns @ [op.fixed, op.work, op.uneven, *op.widths] - times
    assert (np.linalg.norm(left), np.abs(left).sum() / times.sum()) == (
        pytest.approx(rest),
        pytest.approx(misses),
    )
    if np.linalg.matrix_rank(columns) == 5:
        np.testing.assert_allclose([op.fixed, op.work, op.uneven, *op.widths], parts, atol=1e-6)


def test_a_clear_multiple_is_found_and_an_unclear_one_is_not_believed() -> None:
    rng = np.random.default_rng(0)
    lengths, sizes = rng.integers(20, 257, (3, 14)), np.array([256, 256, 256])
    lengths[:, ::2] -= lengths[:, ::2] % 16
    terms = [Term(1, (0, 1)), Term(1, (1, 2))]
    truth = LatencyTable(
        tuple(Factor(256, {}) for _ in range(3)),
        tuple(TimedOp(t.factors, 0.1, 5.0, 1.0, (0.3, 0.0)) for t in terms),
        10.0,
        16,
        "",
    )
    each = np.stack([replace(truth, ops=(op,)).milliseconds(lengths) for op in truth.ops], axis=1)
    ops, multiple = fitting.fit_operations(terms, lengths, sizes, each)
    assert multiple == 16
    np.testing.assert_allclose(
        [(op.fixed, op.work, op.uneven, *op.widths) for op in ops], [(0.1, 5.0, 1.0, 0.3, 0.0)] * 2, atol=1e-6
    )
    smooth = np.stack(
        [0.1 + lengths[list(t.factors)].prod(axis=0) / 256**2 for t in terms], axis=1
    ) + 0.01 * rng.random((14, 2))
    assert fitting.fit_operations(terms, lengths, sizes, smooth)[1] == 1


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that follow the work exactly, in place of a clock's."""

    def times(models: list[nn.Module], *_: Any, **__: Any) -> tuple[np.ndarray, np.ndarray]:
        flops = np.array([[float(n) for n in work_of(net)] for net in models])
        whole = flops.sum(axis=1) / 1e5
        whole[0] *= 1.1  # page faults, say
        return whole, 2 * flops / 1e5  # looking at operations took twice as long

    monkeypatch.setattr(profiling, "_times", times)


@pytest.mark.usefixtures("no_clock")
def test_a_table_predicts_cuts_it_has_never_seen() -> None:
    model, example = build().eval(), torch.rand(1, 1, 8, 8)
    spaces = fp.discover(model, example)
    table = fp.latency_table(model, example, spaces)
    assert np.abs(table.misses).max() < 1e-9
    assert table.multiple == 1
    rng = np.random.default_rng(1)
    plan = fp.Plan.removing(
        spaces, {space.name: rng.permutation(space.size)[: space.size // 3].tolist() for space in spaces}
    )
    timed = Lengths(
        table.factors,
        spaces,
        [
            np.concatenate([plan.removed[s.name], np.setdiff1d(np.arange(s.size), plan.removed[s.name])])
            for s in spaces
        ],
    )
    ms = table.milliseconds(timed.kept(np.array([[plan.depths[s.name]] for s in spaces])))[0]
    assert ms == pytest.approx(sum(work_of(fp.cut(model, plan))) / 1e5)


def work_of(net: nn.Module) -> list[int]:
    """MACs of every operation, in order."""
    return [cost.macs for cost in trace(net, [torch.rand(1, 1, 8, 8)]).costs]


def test_a_real_table_of_a_small_net_says_how_it_was_made(tmp_path: Path) -> None:
    model, example = build().eval(), torch.rand(3, 1, 8, 8)
    spaces, rounds = fp.discover(model, example), []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    threads = torch.get_num_threads()
    table = fp.latency_table(
        model,
        example,
        spaces,
        batch_size=2,
        threads=1,
        repeats=2,
        progress=lambda done, of: rounds.append((done, of)),
    )
    assert rounds == [(0, 2), (1, 2), (2, 2)]
    assert (table.setting["batch_size"], table.setting["threads"], table.setting["runtime"]) == (
        2,
        1,
        "eager",
    )
    assert torch.get_num_threads() == threads
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert len(table.trials) == 14
    assert all(measured > 0 for measured, _ in table.trials)
    with pytest.raises(fp.FairprunerError, match="another model"):
        fp.latency_table(nn.Linear(2, 2), torch.zeros(1, 2), spaces)
    with pytest.raises(fp.FairprunerError, match="Unknown runtime 'egaer': did you mean 'eager'"):
        fp.latency_table(model, example, spaces, runtime="egaer")
    with pytest.raises(fp.FairprunerError, match="repeats=0"):
        fp.latency_table(model, example, spaces, repeats=0)


class Undecided(nn.Module):
    """Does more or less, as its input says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        return self.second(hidden) + (self.second(hidden) if len(x) > 1 else 0)


def test_a_model_whose_operations_depend_on_its_input_is_refused() -> None:
    model = Undecided()
    with pytest.raises(
        fp.FairprunerError, match="ran 3 operations when it was timed and 2 when it was traced"
    ):
        fp.latency_table(
            model, torch.rand(1, 4), fp.discover(model, torch.rand(1, 4)), batch_size=2, repeats=1
        )


class OftenNarrow(nn.Module):
    """One more matrix product where the first layer is narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.wide(x).relu())
        return out + 0 * (x @ x.T).sum() if self.wide.weight.shape[0] < 10 else out


def test_a_model_whose_operations_depend_on_its_widths_is_refused() -> None:
    model, example = OftenNarrow(), torch.ones(1, 6)
    with pytest.raises(fp.FairprunerError, match="ran 2 to 3 operations at different widths"):
        fp.latency_table(model, example, fp.discover(model, example), repeats=1)


@pytest.mark.usefixtures("no_clock")
def test_the_command_line_plans_by_latency_without_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scores = fp.score(build().eval(), [(torch.rand(16, 1, 8, 8), torch.arange(16) % 10)] * 2, removal="l1")
    scores.save("scores.safetensors")
    run = CliRunner().invoke
    made = run(
        app,
        [
            "latency",
            "fairpruner.demo:build",
            "scores.safetensors",
            "--shape",
            "1,8,8",
            "--repeats",
            "1",
            "--threads",
            "1",
            "--json",
        ],
    )
    assert made.exit_code == 0, made.output
    table = LatencyTable.load("latency.json")
    done = run(
        app,
        [
            "plan",
            "scores.safetensors",
            "--keep",
            "latency=0.7",
            "--latency",
            "latency.json",
            "--multiple-of",
            "auto",
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    expected = fp.allocate(scores, keep=fp.Budget("latency", 0.7), latency=table, multiple_of="auto")
    assert json.loads(done.stdout)["predicted"] == dict(expected.predicted)
    assert fp.Plan.load("plan.json").predicted == expected.predicted
    swept = run(
        app,
        [
            "sweep",
            "scores.safetensors",
            "--metric",
            "latency",
            "--amounts",
            "0.9,0.7",
            "--latency",
            "latency.json",
        ],
    )
    assert swept.exit_code == 0, swept.output
    assert "latency_ms kept" in swept.stdout
    refused = run(app, ["plan", "scores.safetensors", "--keep", "latency=0.7", "--force"])
    assert refused.exit_code == 1
    assert "no latency was measured" in refused.stderr
    page = run(app, ["report", "scores.safetensors", "--latency", "latency.json", "--json"])
    assert page.exit_code == 0, page.output
    assert "latency_ms" in json.loads(page.stdout)["predicted"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_clock")
def test_pruning_in_one_call_takes_a_table() -> None:
    torch.manual_seed(0)
    model, data = build().eval(), [(torch.rand(16, 1, 8, 8), torch.arange(16) % 10)] * 2
    spaces = fp.discover(model, data[0][0][:1])
    table = fp.latency_table(model, data[0][0], spaces, repeats=1)
    options: dict[str, dict[str, Any]] = {"score": {"removal": "l1"}, "allocate": {"latency": table}}
    _, plan = fp.prune(model, data, keep=fp.Budget("latency", 0.8), options=options)
    assert plan.predicted["latency_ms"] < plan.original["latency_ms"]
    with pytest.raises(fp.FairprunerError, match="needs a single round"):
        fp.prune(model, data, keep=fp.Budget("latency", 0.8), rounds=2, options=options)
