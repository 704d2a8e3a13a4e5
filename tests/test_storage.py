"""Files on disk: everything comes back bit for bit, and anything wrong with a file is one clear error."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import fairpruner as fp
from fairpruner.core import sealed as storage
from fairpruner.core.arrays import decode_runs, encode_runs
from fairpruner.core.cost_model import CostModel, Factor, Term
from fairpruner.core.costs import predict
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.core.sealed import digest, readable
from fairpruner.core.spaces import Spaces
from fairpruner.core.trials import Trial
from fairpruner.core.units import Count, Norm, Replacement, Slice, UnitSpace
from fairpruner.files import folders


def build() -> nn.Module:
    """A net with a convolution that is shared, batch norm, a tied pair of Linears and a non-persistent
    buffer.
    """
    return Net()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 5, 3)
        self.tie1 = nn.Linear(5, 5)
        self.tie2 = nn.Linear(5, 5)
        self.tie2.weight = self.tie1.weight
        self.head = nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(torch.relu(self.bn1(self.conv1(x)))).mean((2, 3))
        return self.head(self.tie2(torch.relu(self.tie1(x)))) * self.scale


EXAMPLE = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pruned() -> tuple[nn.Module, Plan]:
    model = build().eval()
    for buffer in model.buffers():
        if buffer.ndim:
            nn.init.uniform_(buffer, 0.5, 1.5)
    plan = Plan.removing(fp.discover(model, EXAMPLE), {"conv1": (4, 1, 2)})
    return fp.cut(model, plan), plan


@pytest.fixture
def folder(pruned: tuple[nn.Module, Plan], tmp_path: Path) -> Path:
    fp.save(*pruned, tmp_path / "small")
    return tmp_path / "small"


def hand_made_scores() -> Scores:
    """Two spaces with every field filled in, among them numbers that decimal text would lose."""
    spaces = Spaces(
        items=(
            UnitSpace(
                "a.conv",
                "channel",
                3,
                (
                    Slice("a.weight", 0, np.array([0, 1, 2, -1, -1]), "write"),
                    Slice("b.weight", 1, np.array([0, 0, 1, 1, 2, 2]), "read"),
                ),
            ),
            UnitSpace(
                "heads",
                "head",
                2,
                (Slice("q", 0, np.array([0, 0, 1, 1]), "write"),),
                (Count("attention", "num_heads", np.array([0, 1])),),
                min_keep=2,
                replaced=(Replacement("attention", (0, 1), "zeros", "hidden_states", outputs=2),),
                norms=(Norm("norm", "eps", 1),),
            ),
        ),
        left_out={"stem": "its output is the model's output — “wide”"},
        costs=CostModel(
            (Factor(5, {"a.conv": np.array([1, 1, 1]), "heads": np.array([2, 0])}), Factor(7, {})),
            (Term(9, (0, 1)), Term(2**60, ())),
            (Term(3, (0,)),),
            more={"cache_bytes": (Term(4, (1,)),)},
        ),
        fingerprint="abc",
    )
    tricky = np.array([0.1, np.nextafter(1.0, 2.0), 5e-324])
    removals = {
        "wasserstein": {"a.conv": tricky, "heads": np.array([-0.0, 1e300])},
        "l1": {"a.conv": tricky[::-1], "heads": np.array([1.0, 2.0])},
    }
    protections = {"taylor": {"a.conv": tricky * 3, "heads": np.array([1 / 3, 2 / 3])}}
    halves = {"taylor": {"a.conv": np.stack([tricky, tricky])}}
    return Scores(
        spaces,
        removals,
        protections,
        samples=17,
        halves=halves,
        settings={"seed": 3, "groups": None, "rate": 0.1, "names": ["x"]},
    )


def same_arrays(first: Any, second: Any) -> bool:
    return list(first) == list(second) and all(
        list(first[s]) == list(second[s])
        and all(
            first[s][n].tobytes() == second[s][n].tobytes() and first[s][n].dtype == second[s][n].dtype
            for n in first[s]
        )
        for s in first
    )


# Runs


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=40))
def test_any_vector_comes_back_from_its_runs(values: list[int]) -> None:
    assert decode_runs(encode_runs(np.array(values))).tolist() == values


@pytest.mark.parametrize(
    ("vector", "runs"),
    [
        (np.arange(512), [[0, 512, 1]]),
        (np.repeat(np.arange(512), 49), [[0, 512, 49]]),  # channels flattened into a Linear
        (
            np.concatenate([np.full(64, -1), np.arange(32)]),
            [[-1, 1, 64], [0, 32, 1]],
        ),  # the second part of a concatenation
        (np.array([7]), [[7, 1, 1]]),
    ],
)
def test_common_owner_vectors_are_few_runs(vector: np.ndarray, runs: list[list[int]]) -> None:
    assert encode_runs(vector) == runs


@pytest.mark.parametrize(
    "runs", [[], [[0, 1]], [[0.5, 1, 1]], [[0, 0, 1]], [[0, 1, -1]], "text", [[0, 1, 1], [2]]]
)
def test_bad_runs_are_refused(runs: Any) -> None:
    with pytest.raises(ValueError, match=r"expected runs|inhomogeneous"):
        decode_runs(runs)


# Scores


def test_scores_come_back_bit_for_bit(tmp_path: Path) -> None:
    scores = hand_made_scores()
    scores.save(tmp_path / "scores.safetensors")
    again = Scores.load(tmp_path / "scores.safetensors")
    for group in ("removals", "protections", "halves"):
        assert same_arrays(getattr(scores, group), getattr(again, group)), group
    assert again.active == ("wasserstein", "taylor")
    assert (again.samples, dict(again.settings)) == (17, dict(scores.settings))
    assert again.spaces.to_json() == scores.spaces.to_json()
    assert again.spaces["heads"].counts[0].owner.dtype == np.int64


def test_signal_order_survives(tmp_path: Path) -> None:
    hand_made_scores().using(removal="l1").save(tmp_path / "s.safetensors")
    assert Scores.load(tmp_path / "s.safetensors").active == ("l1", "taylor")


def test_settings_that_json_cannot_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(fp.FairprunerError, match="JSON"):
        replace(hand_made_scores(), settings={"when": object()}).save(tmp_path / "s.safetensors")
    assert os.listdir(tmp_path) == []


# Plans


def hand_made_plan() -> Plan:
    spaces = hand_made_scores().spaces
    return Plan(
        spaces,
        {"a.conv": (2, 0), "heads": ()},
        alpha=0.1 + 0.2,
        rule="tod",
        exact=True,
        predicted=predict(spaces, {"a.conv": (2, 0)}),
        original=predict(spaces, {}),
        tried=(Trial("l1", "tod", "all", "none", samples=10, kept=0.5, distance=0.1, chosen=True),),
    )


def test_plan_comes_back_exactly(tmp_path: Path) -> None:
    plan = hand_made_plan()
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.to_json() == plan.to_json()
    assert (again.alpha, again.removed) == (0.1 + 0.2, {"a.conv": (2, 0), "heads": ()})


@pytest.mark.parametrize("distance", [math.inf, 1e30])
def test_a_trial_without_a_comparable_distance_comes_back(distance: float, tmp_path: Path) -> None:
    plan = hand_made_plan()
    failed = replace(plan.tried[0], distance=distance, chosen=False)
    replace(plan, tried=(*plan.tried, failed)).save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert [trial["distance"] for trial in content["tried"]] == [0.1, None]
    assert Plan.load(tmp_path / "plan.json").tried == (*plan.tried, replace(failed, distance=math.inf))


def test_every_field_is_stored() -> None:
    plan = hand_made_plan().to_json()
    space = plan["spaces"]["items"][1]
    stored = {
        Plan: plan,
        Spaces: plan["spaces"],
        UnitSpace: space,
        Slice: space["slices"][0],
        Count: space["counts"][0],
        CostModel: plan["spaces"]["costs"],
    }
    expected = {kind.__name__: {f.name for f in fields(kind)} - {"from_file"} for kind in stored}
    expected["CostModel"] ^= {"more", "cache_bytes"}  # further metrics stand beside the others
    assert {kind.__name__: set(content) for kind, content in stored.items()} == expected


def test_a_saved_plan_is_enough_for_cut(pruned: tuple[nn.Module, Plan], tmp_path: Path) -> None:
    model, plan = build(), pruned[1]
    plan.save(tmp_path / "plan.json")
    torch.testing.assert_close(
        fp.cut(model, Plan.load(tmp_path / "plan.json")).state_dict(),
        fp.cut(model, plan).state_dict(),
        rtol=0,
        atol=0,
    )


def test_plan_file_is_readable(tmp_path: Path) -> None:
    hand_made_plan().save(tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text(encoding="utf-8").splitlines()
    assert '  "removed": {"a.conv": [2, 0], "heads": []},' in lines
    assert lines[1] == '  "format": "fairpruner plan",'


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=40,
    )
)
def test_readable_json_says_the_same(value: Any) -> None:
    assert json.loads(readable(value)) == value


def test_a_plan_without_digest_is_accepted_and_its_costs_follow_the_edit(
    pruned: tuple[nn.Module, Plan], tmp_path: Path
) -> None:
    plan, path = pruned[1], tmp_path / "plan.json"
    plan.save(path)
    content = json.loads(path.read_text())
    del content["digest"], content["predicted"], content["original"]
    content["removed"]["conv1"] = [0]
    path.write_text(json.dumps(content))
    edited = Plan.load(path)
    assert edited.removed["conv1"] == (0,)
    assert edited.predicted["params"] == fp.count_params(fp.cut(build(), edited))
    assert dict(edited.original) == dict(plan.original)


# Folders


def test_a_saved_model_comes_back_bit_for_bit(pruned: tuple[nn.Module, Plan], folder: Path) -> None:
    small = pruned[0]
    again = fp.load(folder, build=build)
    assert sorted(os.listdir(folder)) == ["README.md", "model.safetensors", "plan.json", "report.json"]
    assert {n: t.shape for n, t in again.state_dict().items()} == {
        n: t.shape for n, t in small.state_dict().items()
    }
    assert all(torch.equal(t, small.state_dict()[n]) for n, t in again.state_dict().items())
    assert torch.equal(again(EXAMPLE), small(EXAMPLE))


def test_load_gives_eval_mode_and_keeps_ties(folder: Path) -> None:
    again = fp.load(folder, build=build)
    assert not any(module.training for module in again.modules())
    assert again.tie1.weight is again.tie2.weight
    assert again.conv1.out_channels == 3


def test_a_loaded_model_has_the_memory_order_of_the_saved_one(tmp_path: Path) -> None:
    """The last bits of a product depend on it."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        model[0].weight = nn.Parameter(torch.randn(4, 6).t())  # a matrix that lies by columns
        return model

    model = build()
    plan = Plan.removing(fp.discover(model, torch.zeros(1, 4)), {"0": (1, 5)})
    small = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "folder")
    loaded = fp.load(tmp_path / "folder", build=build)
    assert loaded[0].weight.stride() == small[0].weight.stride() == (1, 4)
    assert torch.equal(loaded[0].weight, small[0].weight)


class OtherNames(nn.Sequential):
    """Renames its parameters in its state dict, and leaves out biases."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        state = super().state_dict(*args, **kwargs)
        return {f"net.{name}": tensor for name, tensor in state.items() if "bias" not in name}


def test_every_parameter_is_saved_whatever_the_class_makes_of_its_state_dict(tmp_path: Path) -> None:
    """An empty file was written, and a model with the weights of `build` was loaded."""

    def build() -> nn.Module:
        return OtherNames(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

    model = build()
    plan = Plan.removing(fp.discover(model, torch.zeros(1, 4)), {"0": (1, 5)})
    small = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "folder")
    loaded = fp.load(tmp_path / "folder", build=build)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), small.parameters(), strict=True))


def test_shared_tensors_are_stored_once_and_non_persistent_buffers_not_at_all(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert names == set(build().state_dict()) - {"tie2.weight"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_of_the_file_wins(
    pruned: tuple[nn.Module, Plan], tmp_path: Path, dtype: torch.dtype
) -> None:
    small, plan = pruned
    fp.save(small.to(dtype), plan, tmp_path / "small")
    again = fp.load(tmp_path / "small", build=build)
    assert again.conv1.weight.dtype == dtype
    assert again.bn1.num_batches_tracked.dtype == torch.int64
    assert all(torch.equal(t, small.state_dict()[n]) for n, t in again.state_dict().items())


def test_parameters_that_share_memory_without_being_one_can_be_saved(
    pruned: tuple[nn.Module, Plan], tmp_path: Path
) -> None:
    small, plan = pruned
    small.tie2.bias = nn.Parameter(small.tie1.bias.data)
    fp.save(small, plan, tmp_path / "small")
    again = fp.load(tmp_path / "small", build=build)
    assert torch.equal(again.tie1.bias, small.tie1.bias)
    assert torch.equal(again.tie2.bias, small.tie1.bias)


def test_all_files_of_a_folder_can_be_read_by_the_same_people(folder: Path) -> None:
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1


def test_build_may_be_a_source(pruned: tuple[nn.Module, Plan], tmp_path: Path) -> None:
    fp.save(*pruned, tmp_path / "small", build=f"{__file__}:build")
    again = fp.load(tmp_path / "small", build=f"{__file__}:build")
    assert torch.equal(again(EXAMPLE), pruned[0](EXAMPLE))
    assert f"{__file__}:build" in (tmp_path / "small" / "README.md").read_text(encoding="utf-8")


def test_report_has_the_plans_numbers_and_the_measured_ones(
    pruned: tuple[nn.Module, Plan], folder: Path
) -> None:
    report = json.loads((folder / "report.json").read_text())
    assert report["measured"]["params"] == report["predicted"]["params"] == fp.count_params(pruned[0])
    assert {s["name"]: (s["kept"], s["size"]) for s in report["spaces"]}["conv1"] == (3, 6)


def test_a_type_that_safetensors_lacks_is_one_clear_error(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    net.register_buffer("turns", torch.ones(3, dtype=torch.complex128))
    plan = Plan.removing(fp.discover(net, torch.zeros(1, 4)), {"0": (1,)})
    with pytest.raises(fp.FairprunerError, match=r"'turns' is complex128.*make it complex64"):
        fp.save(fp.cut(net, plan), plan, tmp_path / "small")
    assert not any(tmp_path.iterdir())


def test_an_existing_empty_folder_is_filled_and_a_full_one_refused(
    pruned: tuple[nn.Module, Plan], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    fp.save(*pruned, tmp_path / "empty")
    before = {p.name: p.read_bytes() for p in (tmp_path / "empty").iterdir()}
    with pytest.raises(fp.FairprunerError, match="already exists and is not empty"):
        fp.save(*pruned, tmp_path / "empty")
    assert {p.name: p.read_bytes() for p in (tmp_path / "empty").iterdir()} == before
    assert os.listdir(tmp_path) == ["empty"]


def test_saving_another_model_than_the_plans_is_refused(
    pruned: tuple[nn.Module, Plan], tmp_path: Path
) -> None:
    with pytest.raises(fp.FairprunerError, match=r"has the shape \[6.*\], and the plan keeps 3 along dim 0"):
        fp.save(build(), pruned[1], tmp_path / "small")
    assert os.listdir(tmp_path) == []


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> str:
        return "not a tensor"

    def set_extra_state(self, state: str) -> None: ...


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), WithExtraState(6, 2))
    plan = Plan.removing(fp.discover(model, torch.zeros(1, 4)), {"0": (1,)})
    with pytest.raises(fp.FairprunerError, match="_extra_state"):
        fp.save(fp.cut(model, plan), plan, tmp_path / "small")
    assert os.listdir(tmp_path) == []


# Places that cannot be written


def below_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "below"


@pytest.mark.parametrize(
    "place", [below_a_file, lambda _: Path("/proc/fairpruner/x")], ids=["below-a-file", "proc"]
)
@pytest.mark.parametrize("what", ["scores", "plan", "model"])
def test_an_unwritable_place_is_one_clear_error(
    place: Callable[[Path], Path], what: str, pruned: tuple[nn.Module, Plan], tmp_path: Path
) -> None:
    path = place(tmp_path)
    writers: dict[str, Callable[[], None]] = {
        "scores": lambda: hand_made_scores().save(path),
        "plan": lambda: hand_made_plan().save(path),
        "model": lambda: fp.save(*pruned, path),
    }
    with pytest.raises(fp.FairprunerError, match=f"Cannot write {path}"):
        writers[what]()


@pytest.mark.parametrize("what", ["scores", "plan"])
def test_a_folder_in_the_way_is_one_clear_error(what: str, tmp_path: Path) -> None:
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    value = {"scores": hand_made_scores, "plan": hand_made_plan}[what]()
    with pytest.raises(fp.FairprunerError, match="Cannot write"):
        value.save(tmp_path / "taken")
    assert os.listdir(tmp_path) == ["taken"]


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full-disk", "interrupt"]
)
def test_nothing_is_left_behind_when_writing_fails(
    failure: BaseException, pruned: tuple[nn.Module, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(folders, "write_tensors", fail)  # the last of the four files
    with pytest.raises((fp.FairprunerError, KeyboardInterrupt), match=r"No space left on device|^$"):
        fp.save(*pruned, tmp_path / "small")
    assert os.listdir(tmp_path) == []


# Files that cannot be trusted


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def replace_by_text(path: Path) -> None:
    path.write_text("not one of ours " * 100)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the JSON of a plan, or in the metadata of a safetensors file."""
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
        return
    with safe_open(path, framework="pt") as file:
        content, tensors = (
            json.loads(file.metadata()["fairpruner"]),
            {k: file.get_tensor(k) for k in file.keys()},  # noqa: SIM118
        )
    change(content)
    save_file(tensors, path, metadata={"fairpruner": json.dumps(content)})


def read(path: Path) -> Any:
    return {
        "scores.safetensors": Scores.load,
        "plan.json": Plan.load,
        "model.safetensors": lambda p: fp.load(p.parent, build=build),
    }[path.name](path)


@pytest.fixture(params=["scores.safetensors", "plan.json", "model.safetensors"])
def path(request: pytest.FixtureRequest, folder: Path) -> Path:
    if request.param == "scores.safetensors":
        hand_made_scores().save(folder / request.param)
    return folder / str(request.param)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "is not a complete"),
        (replace_by_text, r"is not a complete (safetensors|JSON) file"),
        (lambda p: p.unlink(), "Cannot read"),
        (
            lambda p: edit(p, lambda c: c.update(version=2)),
            "format version 2, this fairpruner reads up to version 1",
        ),
        (lambda p: edit(p, lambda c: c.update(version="new")), "format version new"),
        (
            lambda p: edit(p, lambda c: c.update(format="fairpruner atlas")),
            "holds fairpruner atlas, expected a fairpruner",
        ),
        (lambda p: edit(p, lambda c: c.clear()), "holds nothing that fairpruner wrote"),
        (lambda p: edit(p, lambda c: c.update(more=1)), "was altered"),
    ],
    ids=["truncated", "other-text", "missing", "newer", "bad-version", "other-kind", "not-ours", "altered"],
)
def test_a_damaged_file_is_one_clear_error(path: Path, damage: Callable[[Path], None], message: str) -> None:
    read(path)
    damage(path)
    with pytest.raises(fp.FairprunerError, match=message) as caught:
        read(path)
    assert path.name in str(caught.value)


@pytest.mark.parametrize("name", ["scores.safetensors", "model.safetensors"])
def test_one_flipped_bit_of_a_tensor_is_noticed(name: str, folder: Path) -> None:
    hand_made_scores().save(folder / "scores.safetensors")
    flip_last_bit(folder / name)
    with pytest.raises(fp.FairprunerError, match="altered"):
        read(folder / name)


def test_a_plan_with_one_other_unit_is_noticed(folder: Path) -> None:
    edit(folder / "plan.json", lambda c: c["removed"].update(conv1=[0, 1, 2]))
    with pytest.raises(fp.FairprunerError, match="altered"):
        Plan.load(folder / "plan.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("spaces"),
        lambda c: c["removed"].update(conv1=[0.5]),
        lambda c: c["removed"].update(conv1=[99]),
        lambda c: c["removed"].pop("conv1"),
        lambda c: c.update(removed=[1]),
        lambda c: c["spaces"]["items"][0].update(kind="chanel"),
        lambda c: c["spaces"]["items"][0]["slices"][0].update(owner=[[0, 1]]),
        lambda c: c["spaces"]["costs"].update(params=[[1, [99]]]),
    ],
)
def test_a_hand_written_plan_that_makes_no_sense_is_one_clear_error(
    folder: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    def without_digest(content: dict[str, Any]) -> None:
        change(content)
        del content["digest"]

    edit(folder / "plan.json", without_digest)
    with pytest.raises(fp.FairprunerError, match=r"plan.json is invalid"):
        Plan.load(folder / "plan.json")


def test_plan_and_weights_of_two_folders_are_told_apart(pruned: tuple[nn.Module, Plan], folder: Path) -> None:
    other = Plan.removing(pruned[1].spaces, {"conv1": (0, 1, 5)})
    other.save(folder / "plan.json")
    with pytest.raises(fp.FairprunerError, match="do not belong together"):
        fp.load(folder, build=build)


def test_a_folder_of_another_architecture_is_refused(folder: Path) -> None:
    with pytest.raises(fp.FairprunerError, match="another model"):
        fp.load(folder, build=lambda: nn.Linear(2, 2))
    with pytest.raises(fp.FairprunerError, match="build returned a dict"):
        fp.load(folder, build=dict)


def test_weights_that_lack_a_tensor_are_refused(folder: Path) -> None:
    content, tensors = storage.read_tensors(folder / "model.safetensors", "model")
    del tensors["head.bias"]
    body = {"plan": content["plan"]}
    save_file(
        tensors,
        folder / "model.safetensors",
        metadata={"fairpruner": json.dumps({**content, "digest": digest(body, tensors)})},
    )
    with pytest.raises(fp.FairprunerError, match=r"1 tensors \(head.bias\)"):
        fp.load(folder, build=build)


def test_no_pickle_is_written(folder: Path) -> None:
    hand_made_scores().save(folder / "scores.safetensors")
    for file in folder.iterdir():
        content = file.read_bytes()
        if file.suffix == ".safetensors":  # the length of its header, then the header as JSON
            json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        else:
            content.decode("utf-8")
