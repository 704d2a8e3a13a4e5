"""The search behind `prune`: what is tried, on which samples, how it is judged, and what is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import fairpruner as fp
from fairpruner.demo import Digits, train
from fairpruner.inputs.batches import read_batches
from fairpruner.pipeline.search import Search, make_candidates, useful_removals
from fairpruner.pipeline.search.candidates import is_stream
from fairpruner.pipeline.search.judging import Judge
from fairpruner.pipeline.search.samples import split
from fairpruner.repair import METHODS, Note, targets
from fairpruner.repair.job import Job
from fairpruner.repair.targets import Targets
from fairpruner.repair.tuning import tune

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, inner, 3, padding=1), nn.Conv2d(inner, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.two(torch.relu(self.one(x))))


class Stream(nn.Module):
    """Three residual blocks on one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(8, 12) for _ in range(3)))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """A trained residual net, calibration batches, and batches that neither training nor search sees."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    known, test = Digits.load()
    model = Stream()
    train(model, known, epochs=4)
    unseen = list(zip(test.x.split(100), test.y.split(100), strict=True))
    return model.eval(), list(zip(known.x[:400].split(80), known.y[:400].split(80), strict=True)), unseen


def numbered(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Batches of these sizes whose inputs are the samples' numbers."""
    return [(part[:, None].float(), part) for part in torch.arange(sum(sizes)).split(sizes)]


def seen(part: Any) -> list[int]:
    return [int(number) for _, labels in part for number in labels]


@given(st.lists(st.integers(1, 17), min_size=1, max_size=8))
def test_the_parts_are_apart_and_the_same_each_time(sizes: list[int]) -> None:
    fitting, judging = split(numbered(sizes), nn.Identity())
    total = sum(sizes)
    if total < 5:
        assert fitting is judging
        return
    assert sorted(seen(fitting) + seen(judging)) == list(range(total))
    assert seen(fitting) == seen(fitting)
    assert (fitting.samples, judging.samples) == (len(seen(fitting)), len(seen(judging)))
    few = fitting.share(1)
    assert set(seen(few)) <= set(seen(fitting))
    assert few.samples == len(seen(few)) >= 1


class Shuffled:
    """Batches in an order of their own generator."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in torch.from_numpy(self.generator.permutation(60)).split(7):
            yield part[:, None].float(), part


class Doubled(DataLoader[Any]):
    """A loader that changes what it yields."""

    def __iter__(self) -> Any:
        return ((2 * inputs, labels) for inputs, labels in super().__iter__())


def loader(kind: type[DataLoader[Any]] = DataLoader, **options: Any) -> DataLoader[Any]:
    numbers = torch.arange(60)
    return kind(TensorDataset(numbers[:, None].float(), numbers), **options)


SHUFFLING: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: loader(batch_size=7, shuffle=True),
    "generator": lambda: loader(batch_size=7, shuffle=True, generator=torch.Generator()),
    "subset": lambda: loader(batch_size=7, sampler=SubsetRandomSampler(range(60))),
    "weighted": lambda: loader(
        batch_size=7, sampler=WeightedRandomSampler([1.0] * 60, 60, replacement=False)
    ),
    "batch_sampler": lambda: loader(batch_sampler=BatchSampler(RandomSampler(range(60)), 7, False)),
    "subclass": lambda: loader(Doubled, batch_size=7, shuffle=True),
    "workers": lambda: loader(batch_size=7, shuffle=True, num_workers=1),
    "own": Shuffled,
}


@pytest.mark.parametrize("held", [2**30, 0], ids=["in memory", "read again"])
@pytest.mark.parametrize("kind", list(SHUFFLING))
def test_data_that_shuffles_has_the_same_parts_in_every_pass(
    kind: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairpruner.pipeline.search.samples.MOST_HELD", held)
    data = SHUFFLING[kind]()
    before = torch.get_rng_state()
    fitting, judging = split(data, nn.Identity())
    assert seen(judging) == seen(judging)
    assert seen(fitting) == seen(fitting)
    assert sorted(seen(judging) + seen(fitting)) == list(range(60))
    assert torch.equal(torch.get_rng_state(), before)
    if kind == "subclass":
        assert all(torch.equal(inputs, 2 * labels[:, None]) for inputs, labels in judging)


class Counted:
    """Batches that count how often they are read; `refilled`: all in one tensor, one after the other."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]], *, refilled: bool = False) -> None:
        self.batches, self.passes = batches, 0
        self.tensor = torch.empty_like(batches[0][0]) if refilled else None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        for inputs, labels in self.batches:
            yield inputs if self.tensor is None else self.tensor.copy_(inputs), labels


@pytest.mark.parametrize("refilled", [False, True])
def test_the_parts_read_data_once_unless_a_tensor_is_filled_again(refilled: bool) -> None:
    data = Counted(numbered([7, 7, 7]), refilled=refilled)
    fitting, judging = split(data, nn.Identity())
    for part in (fitting, judging):
        for inputs, labels in part:
            assert torch.equal(inputs[:, 0].long(), labels)
    assert data.passes == (3 if refilled else 1)


def test_data_larger_than_the_room_is_read_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairpruner.pipeline.search.samples.MOST_HELD", 100)  # 12 bytes of each sample
    data = Counted(numbered([7, 7, 7]))
    fitting, judging = split(data, nn.Identity())
    assert sorted(seen(fitting) + seen(judging)) == list(range(21))
    assert data.passes == 3


def test_a_search_reads_its_data_a_few_times() -> None:
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
    data = Counted([(torch.randn(20, 4), torch.arange(20) % 3) for _ in range(3)])
    _, plan = fp.prune(model, data, keep=fp.Budget("params", 0.5))
    assert len(plan.tried) > 3
    assert data.passes <= 6  # however many plans are tried


def test_a_sampler_of_few_samples_stays_one() -> None:
    numbers = TensorDataset(torch.arange(500)[:, None].float(), torch.arange(500))
    data = DataLoader(numbers, 8, sampler=RandomSampler(numbers, num_samples=40))
    fitting, judging = split(data, nn.Identity())
    assert fitting.samples + judging.samples == 40


def test_a_generator_of_the_caller_goes_on_as_if_nothing_had_read_the_data() -> None:
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    fitting, _ = split(loader(batch_size=7, shuffle=True, generator=generator), nn.Identity())
    seen(fitting)
    assert torch.equal(generator.get_state(), state)


def test_the_original_is_compared_with_itself_on_batches_that_change() -> None:
    model, changing = nn.Linear(1, 4), Shuffled()
    judge = Judge(model, changing, task="classification")
    assert [judge.distance(model) for _ in range(3)] == [0.0] * 3


def test_the_distance_is_the_divergence_of_the_predictions() -> None:
    model, other = nn.Linear(3, 4), nn.Linear(3, 4)
    data = [(torch.randn(size, 3), torch.zeros(size, dtype=torch.long)) for size in (5, 2)]
    rows = torch.cat([inputs for inputs, _ in data])
    wanted, found = (net(rows).detach().double().softmax(1).numpy() for net in (model, other))
    expected = np.mean([entropy(p, q) for p, q in zip(wanted, found, strict=True)])
    assert Judge(model, data, task="classification").distance(other) == pytest.approx(expected, rel=1e-6)
    assert Judge(model, data, task="classification").distance(model) == 0.0
    mine, theirs = (net(rows).detach() for net in (other, model))
    error = float((mine - theirs).square().sum() / theirs.square().sum())
    assert Judge(model, data, task=None).distance(other) == pytest.approx(error, rel=1e-6)


def test_the_original_runs_once_for_all_that_are_judged() -> None:
    model, other = nn.Linear(3, 4), nn.Linear(3, 4)
    runs: list[int] = []
    model.register_forward_pre_hook(lambda module, args: runs.append(len(args[0])))
    judge = Judge(
        model, [(torch.randn(size, 3), torch.zeros(size)) for size in (5, 2)], task="classification"
    )
    assert judge.distance(other) == judge.distance(copy.deepcopy(other)) > 0
    assert runs == [5, 2]


def test_a_model_that_gives_nan_is_infinitely_far() -> None:
    model, broken = nn.Linear(3, 4), nn.Linear(3, 4)
    nn.init.constant_(broken.bias, torch.nan)
    judge = Judge(model, [(torch.randn(5, 3), torch.zeros(5))], task="classification")
    assert judge.distance(broken) == np.inf


def test_candidates_differ_keep_the_budget_and_predict_what_they_cost() -> None:
    model, example = Stream(), torch.rand(1, 1, 8, 8)
    spaces = fp.discover(model, example)
    assert [space.name for space in spaces if is_stream(space)] == ["stem"]
    data = [(torch.rand(20, 1, 8, 8), torch.arange(20) % 10) for _ in range(2)]
    scores = fp.score(model, data, spaces=spaces, removal=useful_removals(spaces, classes=True))
    found = make_candidates(scores, fp.Budget("flops", 0.5), exact=True)
    cuts = {tuple(tuple(sorted(c.plan.removed[name])) for name in spaces.names) for c in found}
    assert len(cuts) == len(found) > 6
    for candidate in found:
        plan = candidate.plan
        assert plan.share("flops") == pytest.approx(0.5, abs=0.06)
        assert plan.predicted["flops"] == fp.count_flops(fp.cut(model, plan), example)
        assert bool(plan.removed["stem"]) <= (candidate.spaces == "all")
    assert {candidate.spaces for candidate in found} == {"all", "without streams"}


def test_a_budget_of_units_counts_the_units_that_stay_whole_too() -> None:
    model = Stream()
    data = [(torch.rand(20, 1, 8, 8), torch.arange(20) % 10)]
    scores = fp.score(model, data, removal=["l1", "activation"])
    found = make_candidates(scores, fp.Budget("units", 0.5), exact=True)
    assert {candidate.spaces for candidate in found} == {"all", "without streams"}
    assert {candidate.plan.predicted["units"] for candidate in found} == {22}


class HeadsAndHidden(nn.Module):
    """Four heads and sixteen hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x.view(-1, 4, 16)).mean(1))


def test_candidates_that_miss_the_budget_are_not_compared() -> None:
    """Heads alone cannot bring 20 units down to 6."""
    model = HeadsAndHidden().eval()
    data = [(torch.rand(20, 1, 8, 8), torch.arange(20) % 10)]
    scores = fp.score(model, data, removal=["l1"])
    assert {space.kind: space.size for space in scores.spaces} == {"head": 4, "hidden": 16}
    found = make_candidates(scores, fp.Budget("units", 6), exact=True)
    assert {candidate.plan.predicted["units"] for candidate in found} == {6}
    assert "only head" not in {candidate.spaces for candidate in found}


@pytest.mark.parametrize("effort", [10, 15, 22])
def test_random_labels_do_not_move_the_choice_away_from_the_original(effort: int) -> None:
    """With random labels, the loss is no measure of the distance to the original."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))
    inputs = torch.randn(128, 8)
    data = list(zip(inputs.split(32), torch.randint(3, (128,)).split(32), strict=True))
    small, plan = fp.prune(model, data, keep=fp.Budget("flops", 0.5), effort=effort)
    judge = Judge(model, data, task="classification")
    chosen = next(trial for trial in plan.tried if trial.chosen)
    assert judge.distance(small) < 2 * chosen.distance


def test_a_budget_that_no_candidate_reaches_is_refused() -> None:
    data = [(torch.rand(20, 1, 8, 8), torch.arange(20) % 10)]
    with pytest.raises(fp.FairprunerError, match="out of reach"):
        fp.prune(Stream(), data, keep=fp.Budget("flops", 0.001))


@pytest.mark.slow
def test_the_nearest_to_the_original_is_kept(digits: Any, tmp_path: Path) -> None:
    model, data, unseen = digits
    before = copy.deepcopy(model.state_dict())
    small, plan = fp.prune(model, data, keep=fp.Budget("flops", 0.4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: tensor.shape for name, tensor in small.state_dict().items()} == {
        name: tensor.shape for name, tensor in fp.cut(model, plan).state_dict().items()
    }
    full = [trial for trial in plan.tried if trial.samples == 320]
    chosen = [trial for trial in plan.tried if trial.chosen]
    assert len(chosen) == 1
    assert chosen[0].distance == min(trial.distance for trial in full)
    assert chosen[0].rule == plan.rule
    assert [trial.repair for trial in full].count("sequential+tune") == 1
    assert len({trial.distance for trial in full}) == len(full)
    assert len({(trial.removal, trial.rule, trial.spaces) for trial in plan.tried}) > 6
    assert all(trial.kept == pytest.approx(0.4, abs=0.05) for trial in plan.tried)
    # What a search finds beats the paper's method, repaired or not, on samples that nothing has seen.
    paper, its_plan = fp.prune(model, data, keep=fp.Budget("flops", 0.4), preset="paper")
    mended = fp.repair(paper, model, its_plan, data, method="sequential")
    judge = Judge(model, unseen, task="classification")
    found, *others = (judge.distance(net) for net in (small, paper, mended))
    assert found < min(others)
    plan.save(tmp_path / "plan.json")
    assert fp.Plan.load(tmp_path / "plan.json").tried == plan.tried


def test_the_same_seed_gives_the_same_model(digits: Any) -> None:
    model, data, _ = digits
    first, second = (fp.prune(model, data[:2], keep=fp.Budget("flops", 0.5), effort=20) for _ in range(2))
    assert first[1].removed == second[1].removed
    assert first[1].tried == second[1].tried
    for one, other in zip(first[0].state_dict().values(), second[0].state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_what_is_said_is_not_searched(digits: Any) -> None:
    model, data, _ = digits
    options = {"score": {"removal": "l1"}, "allocate": {"rule": "uniform"}, "discover": {"skip": ["stem"]}}
    _, plan = fp.prune(model, data, keep=fp.Budget("flops", 0.5), repair="least_squares", options=options)
    (trial,) = plan.tried
    assert (trial.removal, trial.rule, trial.repair, plan.removed.get("stem")) == (
        "l1",
        "uniform",
        "least_squares",
        None,
    )


def test_a_method_that_moves_the_model_away_is_dropped(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, unseen = digits

    def wreck(job: Job) -> list[Note]:
        nn.init.normal_(job.small.head.weight)
        return []

    monkeypatch.setitem(METHODS, "mean", wreck)
    small, plan = fp.prune(
        model,
        data,
        keep=fp.Budget("flops", 0.5),
        repair=["mean", "least_squares"],
        options={"score": {"removal": "l1"}},
    )
    assert {trial.repair for trial in plan.tried} == {"least_squares"}
    judge = Judge(model, unseen, task="classification")
    assert judge.distance(small) < judge.distance(fp.cut(model, plan))


def test_little_effort_tries_the_most_promising_alone(digits: Any) -> None:
    model, data, _ = digits
    _, plan = fp.prune(model, data, keep=fp.Budget("flops", 0.5), effort=1)
    (trial,) = plan.tried
    assert (trial.removal, trial.rule, trial.spaces) == ("reconstruction", "global", "without streams")


def test_the_paper_is_refused_together_with_what_it_fixes(digits: Any) -> None:
    model, data, _ = digits
    with pytest.raises(fp.FairprunerError, match=r"'paper' fixes .* found score removal and repair mean"):
        fp.prune(model, data, alpha=0.1, preset="paper", repair="mean", options={"score": {"removal": "l1"}})
    with pytest.raises(fp.FairprunerError, match="Unknown preset"):
        fp.prune(model, data, alpha=0.1, preset="papper")


def test_experts_are_refitted_and_other_units_sequentially() -> None:
    from moe_zoo import moe, tokens

    model = moe("qwen2_moe", torch.float32)
    spaces = fp.discover(model, tokens())
    assert {removal["expert"] for removal in useful_removals(spaces, classes=False)} == {
        "reap",
        "soft_activation",
    }
    search = Search(fp.Budget("params", 0.5))
    experts = next(space.name for space in spaces if space.kind == "expert")
    others = next(space.name for space in spaces if space.kind != "expert")
    assert search.methods(fp.Plan.removing(spaces, {experts: (0,)})) == ("experts",)
    assert search.methods(fp.Plan.removing(spaces, {others: (0,)})) == ("sequential",)
    assert search.methods(fp.Plan.removing(spaces, {})) == ()


@pytest.fixture(scope="module")
def texts() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A small Llama of random weights, and five texts."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    return model, [{"input_ids": torch.randint(32, (1, 16))} for _ in range(5)]


def test_texts_are_screened_from_sums_and_the_best_gets_both_repairs(texts: Any) -> None:
    model, data = texts
    _, plan = fp.prune(model, data, keep=fp.Budget("inner_params", 0.8), effort=14)
    assert [trial.repair for trial in plan.tried].count("least_squares") == len(plan.tried) - 1 > 3
    assert not any("tune" in trial.repair for trial in plan.tried)
    methods = Search(fp.Budget("inner_params", 0.8), task="language").methods(plan)
    assert methods == ("least_squares", "sequential")


def test_little_effort_tries_all_kinds_of_a_text_model_together(texts: Any) -> None:
    """Each kind alone cannot be the only candidate: heads alone are far worse than heads and hidden units."""
    model, data = texts
    _, plan = fp.prune(model, data, keep=fp.Budget("inner_params", 0.8), effort=1)
    (trial,) = plan.tried
    assert (trial.removal, trial.rule, trial.spaces) == ("surgeon", "global", "all")


def test_the_first_candidates_change_one_choice_of_the_most_promising(texts: Any) -> None:
    model, data = texts
    scores = fp.score(model, data, removal=["surgeon", "reconstruction"])
    found = make_candidates(scores, fp.Budget("inner_params", 0.8), exact=True)
    first, *others = [(c.removal, c.rule, c.spaces) for c in found]
    assert first == ("surgeon", "global", "all")
    assert all(sum(one != same for one, same in zip(other, first, strict=True)) == 1 for other in others[:3])


def test_tuning_brings_unseen_samples_nearer_and_leaves_no_trace(digits: Any) -> None:
    model, data, unseen = digits
    spaces = fp.discover(model, data[0][0][:1])
    plan = fp.Plan.removing(spaces, {space.name: range(9) for space in spaces if space.name != "stem"})
    small = fp.repair(fp.cut(model, plan), model, plan, data, method="sequential").eval()
    tuned = copy.deepcopy(small)
    tuned.head.weight.requires_grad_(False)
    read = lambda: read_batches(data, CPU)  # noqa: E731
    tune(tuned, Targets(tuned, model, plan, read), read, epochs=4)
    judge = Judge(model, unseen, task="classification")
    assert judge.distance(tuned) < 0.8 * judge.distance(small)
    by_name = fp.repair(small, model, plan, data, method="tune")
    assert judge.distance(by_name) < 0.8 * judge.distance(small)
    assert [name for name, p in tuned.named_parameters() if not p.requires_grad] == ["head.weight"]
    assert all(p.grad is None for p in tuned.parameters())
    assert not any(module._forward_hooks for net in (model, tuned) for module in net.modules())


def test_tuning_leaves_out_modules_that_moved_up_in_their_list() -> None:
    from moe_zoo import plain_example, plain_moe

    model, example = plain_moe(torch.float32), plain_example(torch.float32)
    spaces = fp.discover(model, example, kinds=["expert"])
    plan = fp.Plan.removing(spaces, {spaces[0].name: (0,)})
    small = fp.cut(model, plan)
    inside = next(f"{part.tensor}." for part in spaces[0].slices if part.tensor.endswith("experts"))
    blocks, same = (Targets(net, model, plan, lambda: iter(())).blocks for net in (small, model))
    assert any(name.startswith(inside) for name in same)
    assert not any(name.startswith(inside) for name in blocks)


def test_tuning_skips_narrow_numbers_and_cleans_up_after_a_failure(digits: Any) -> None:
    model, data, _ = digits
    read, nothing = (lambda: read_batches(data, CPU)), (lambda: iter(()))
    plan = fp.Plan.removing(fp.discover(model, data[0][0][:1]), {})
    (note,) = tune(copy.deepcopy(model).bfloat16(), Targets(model, model, plan, nothing), read)
    assert note.outcome == "skipped"
    assert "bfloat16" in note.reason
    small = copy.deepcopy(model)
    wrong = lambda: read_batches([(torch.rand(4, 3), torch.arange(4))], CPU)  # noqa: E731
    with pytest.raises(fp.FairprunerError, match="does not fit the model"):
        tune(small, Targets(small, model, plan, nothing), wrong)
    with pytest.raises(fp.FairprunerError, match="does not fit the model"):
        Targets(small, model, plan, wrong)
    assert not any(module._forward_hooks for net in (model, small) for module in net.modules())


@pytest.mark.parametrize("room", [2**30, 200_000, 0])
def test_targets_are_what_the_original_gives_held_or_not(
    digits: Any, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data, _ = digits
    monkeypatch.setattr(targets, "MOST_HELD", room)
    spaces = fp.discover(model, data[0][0][:1])
    plan = fp.Plan.removing(spaces, {"stem": (2, 5), "blocks.0.one": (1, 2), "blocks.2.one": (0,)})
    kept = [unit for unit in range(8) if unit not in (2, 5)]  # of the stream
    found = Targets(fp.cut(model, plan), model, plan, lambda: read_batches(data[:3], CPU))
    assert (found.held == 1) == (room == 2**30)
    chosen = torch.tensor([70, 3, 66])
    shuffled = list(read_batches([data[1], data[0]], CPU))  # held for other samples at these places
    with torch.no_grad():
        for batch in (*read_batches(data[:3], CPU), *shuffled):
            given = found.of(batch, chosen)
            stem = model.stem(batch.inputs[chosen])
            torch.testing.assert_close(given["blocks.0"][0], model.blocks[0](stem)[:, kept])
            torch.testing.assert_close(given["blocks"][0], model.blocks(stem)[:, kept])
            torch.testing.assert_close(given[""][0], model(batch.inputs[chosen]))


class ThreeInputs(nn.Module):
    """Called with three tensors, and no labels are known."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(4, 12), nn.Linear(6, 12), nn.Linear(12, 5)

    def forward(self, left: Tensor, right: Tensor, share: Tensor) -> Tensor:
        return self.out(torch.relu(share * self.left(left) + self.right(right)))


@pytest.mark.parametrize("named", [False, True])
def test_a_model_with_several_inputs_and_no_labels_is_searched(named: bool) -> None:
    torch.manual_seed(0)
    model = ThreeInputs()
    calls = [(torch.randn(20, 4), torch.randn(20, 6), torch.rand(20, 1)) for _ in range(3)]
    data: list[Any] = [dict(zip(("left", "right", "share"), call, strict=True)) for call in calls]
    small, plan = fp.prune(model, data if named else calls, keep=fp.Budget("units", 0.5))
    assert small(*calls[0]).shape == (20, 5)
    chosen = min(plan.tried, key=lambda trial: trial.distance)
    assert chosen.chosen
    assert chosen.distance < max(trial.distance for trial in plan.tried)


def test_maps_of_logits_are_compared_pixel_by_pixel() -> None:
    model, other = nn.Conv2d(1, 3, 1), nn.Conv2d(1, 3, 1)
    images = torch.randn(2, 1, 4, 5)
    wanted, found = (net(images).detach().double().softmax(1) for net in (model, other))
    expected = (wanted * (wanted / found).log()).sum(1).mean()
    judge = Judge(model, [(images, torch.zeros(2, 4, 5, dtype=torch.long))], task="segmentation")
    assert judge.distance(other) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.slow
def test_a_language_model_with_blocks_as_units_is_searched(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    data = [{"input_ids": torch.randint(32, (1, 16))} for _ in range(6)]
    kinds = {"discover": {"kinds": ["hidden", "head", "block"]}}
    small, plan = fp.prune(model, data, keep=fp.Budget("inner_params", 0.6), effort=30, options=kinds)
    assert plan.share("inner_params") == pytest.approx(0.6, abs=0.1)
    assert {"hidden=surgeon", "head=surgeon", "block=surgeon", "surgeon"} & {t.removal for t in plan.tried}
    assert any(trial.spaces == "only block" for trial in plan.tried)
    fp.save(small, plan, tmp_path / "small")
    again = fp.load(tmp_path / "small", build=lambda: transformers.LlamaForCausalLM(config))
    torch.testing.assert_close(again(**data[0]).logits, small(**data[0]).logits)
