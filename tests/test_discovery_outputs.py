"""What a model returns decides what may be removed, whatever form it is returned in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fairpruner as fp
from fairpruner.discovery.comparing import compare


@dataclass
class Record:
    logits: torch.Tensor
    feature: torch.Tensor


class Pair(NamedTuple):
    logits: torch.Tensor
    feature: torch.Tensor


class Slotted:
    __slots__ = ("feature", "logits")

    def __init__(self, logits: torch.Tensor, feature: torch.Tensor) -> None:
        self.logits, self.feature = logits, feature

    def get(self) -> torch.Tensor:
        return self.feature


class Own:
    def __init__(self, logits: torch.Tensor, feature: torch.Tensor) -> None:
        self.inside = {"logits": logits, "rest": [SimpleNamespace(feature=feature)]}
        self.itself = self  # a cycle


def as_distribution(logits: torch.Tensor, feature: torch.Tensor) -> torch.distributions.Distribution:
    return torch.distributions.Normal(feature, 1.0, validate_args=False)


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tuple": lambda logits, feature: (logits, feature),
    "dict": lambda logits, feature: {"logits": logits, "feature": feature},
    "dataclass": Record,
    "named tuple": Pair,
    "namespace": lambda logits, feature: SimpleNamespace(logits=logits, feature=feature),
    "slots": Slotted,
    "own class": Own,
    "distribution": as_distribution,
    "queue": lambda logits, feature: (logits, deque([feature])),
    "keys": lambda logits, feature: (logits, {feature: 1}),
    "function": lambda logits, feature: (logits, lambda: feature),
    "method": lambda logits, feature: (logits, Slotted(logits, feature).get),
    "partial": lambda logits, feature: (logits, partial(print, feature)),
}


class Returning(nn.Module):
    """An MLP [batch, 4] -> what `form` makes of the logits [batch, 2] and the second hidden layer."""

    def __init__(self, form: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.form = form
        self.one, self.two, self.three = nn.Linear(4, 9), nn.Linear(9, 7), nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> Any:
        feature = torch.relu(self.two(torch.relu(self.one(x))))
        return self.form(self.three(feature), feature)


@pytest.mark.parametrize("form", FORMS)
def test_a_feature_returned_beside_the_logits_stays_whole(form: str) -> None:
    spaces = fp.discover(Returning(FORMS[form]), torch.randn(3, 4))
    assert spaces.names == ("one",)
    assert spaces.left_out["two"] == "reaches the model's output"


@pytest.mark.parametrize(
    ("form", "found"),
    [
        (lambda logits, feature: None, "NoneType"),
        (lambda logits, feature: logits.numpy(), "ndarray"),
        (lambda logits, feature: float(logits.sum()), "float"),
        (lambda logits, feature: SimpleNamespace(a=1), "SimpleNamespace"),
    ],
)
def test_an_output_without_a_tensor_is_refused(form: Callable[..., Any], found: str) -> None:
    with pytest.raises(fp.FairprunerError, match=f"holds no tensor: found {found}.*let the model return"):
        fp.discover(Returning(form), torch.randn(3, 4))


@pytest.mark.parametrize("form", [lambda y, _: y.argmax(1), lambda y, _: y[y > 1e9]])
def test_an_output_of_whole_numbers_or_of_none_proves_nothing(form: Callable[..., Any]) -> None:
    with pytest.raises(fp.FairprunerError, match="holds no real numbers, so a cut cannot be checked"):
        fp.discover(Returning(form), torch.randn(3, 4))


def test_an_output_of_zeros_proves_nothing() -> None:
    with pytest.raises(fp.FairprunerError, match="output on the example is zero, so a cut cannot be checked"):
        fp.discover(Returning(lambda logits, _: logits * 0), torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_beside_the_logits_is_compared_part_by_part() -> None:
    model = Returning(lambda logits, feature: (logits, torch.nested.nested_tensor([feature[0], feature[1]])))
    spaces = fp.discover(model, torch.randn(3, 4))
    assert spaces.names == ("one",)
    assert "no rule" in spaces.left_out["two"]


def test_a_sparse_output_is_compared() -> None:
    assert fp.discover(Returning(lambda y, _: y.to_sparse()), torch.randn(3, 4)).names == ("one", "two")


READS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a number": lambda logits, feature: logits * (1 + float(feature[0, 2])),
    "a branch": lambda logits, feature: logits if feature[0, 2] > 0.3 else 2 * logits,
    "an array": lambda logits, feature: logits * (1 + float(feature.numpy()[0, 2])),
    "a list": lambda logits, feature: logits * (1 + feature.tolist()[0][2]),
    "an array beside the logits": lambda logits, feature: (logits, feature.numpy()),
}


@pytest.mark.parametrize("form", READS)
def test_a_unit_whose_numbers_python_code_reads_stays(form: str) -> None:
    """It is read by its place, so the units beside it stay too. Verification would see some of this only."""
    spaces = fp.discover(Returning(READS[form]), torch.randn(3, 4))
    assert spaces.names == ("one",)
    assert spaces.left_out["two"] == "is read as a number by Python code"


class TwoBranches(nn.Module):
    """Short inputs go through `short`, long ones through `long`, [batch, 4 or 6] -> [batch, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(4, 8), nn.Linear(6, 8)
        self.middle, self.extra, self.head = nn.Linear(8, 10), nn.Linear(10, 10), nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 4:
            return self.head(torch.relu(self.middle(torch.relu(self.short(x)))))
        return self.head(torch.relu(self.extra(torch.relu(self.middle(torch.relu(self.long(x)))))))


def test_a_branch_that_the_example_does_not_take_is_named() -> None:
    spaces = fp.discover(TwoBranches(), torch.randn(3, 4))
    assert {name for name, reason in spaces.left_out.items() if "does not use it" in reason} == {
        "long",
        "extra",
    }
    assert "more_examples" in spaces.left_out["long"]
    assert "only runs in training mode" in spaces.left_out["long"]


def test_several_examples_show_every_branch() -> None:
    model, short, long = TwoBranches(), torch.randn(3, 4), torch.randn(5, 6)
    spaces = fp.discover(model, short, more_examples=[long])
    assert spaces.names == ("short", "middle")
    assert {s.tensor for s in spaces["short"].slices} == {
        *("short.weight", "short.bias", "long.weight", "long.bias", "middle.weight"),
    }
    assert {s.tensor for s in spaces["middle"].slices if s.role == "write"} == {
        *("middle.weight", "extra.weight"),
    }
    plan = fp.Plan.removing(spaces, {"short": (0, 3, 4), "middle": (9,)})
    small, full = fp.cut(model, plan), fp.mask(model, plan)
    for example in (short, long):
        torch.testing.assert_close(small(example), full(example))
    assert plan.predicted["flops"] == fp.count_flops(small, short)  # costs are those of the first example


class Noisy(nn.Module):
    """Adds noise also in eval mode, in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.noise, self.two = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.nn.functional.dropout(self.noise(self.one(x)), 0.5, training=True))


def test_a_model_that_is_random_in_eval_mode_says_where() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Noisy())
    with pytest.raises(fp.FairprunerError, match=r"random in eval mode \(bernoulli_ in 2\)"):
        fp.discover(model, torch.randn(2, 3)[:, :3], kinds=["hidden"], skip=["0"])


class Detector(nn.Module):
    """Returns what it finds, and finds nothing with most random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU())
        self.boxes, self.score = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 1, 1)
        self.limit = nn.Parameter(torch.tensor(0.5))  # random weights are between 0.5 and 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.features(x)
        found = self.score(seen).sigmoid().flatten(1)[0] > self.limit
        return self.boxes(seen).flatten(2)[0].T[found]


def test_a_detector_that_finds_nothing_with_some_random_weights_is_checked_with_others() -> None:
    spaces = fp.discover(Detector(), torch.linspace(-2, 2, 192).view(1, 3, 8, 8))
    assert {space.name: space.size for space in spaces} == {"features.0": 8, "features.2": 6}


class RootOfConstant(nn.Module):
    """Takes the root of a constant, which random numbers would make negative."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", torch.rand(1, 8) + 0.5)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) / self.variance.sqrt())


def test_a_constant_of_which_the_model_takes_the_root_stays_positive_in_the_check() -> None:
    spaces = fp.discover(RootOfConstant(), torch.randn(3, 4))
    assert [(space.name, space.size) for space in spaces] == [("first", 8)]
    assert "variance" in [part.tensor for part in spaces["first"].slices]


class Unscaled(nn.Module):
    """Divides a hidden layer by the root of its width, which a cut changes; `form` joins what the rest of the
    model and this branch return, both [batch, 4].
    """

    def __init__(self, form: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.form = form
        self.one, self.two, self.wide, self.last = (nn.Linear(*s) for s in ((4, 9), (9, 4), (4, 16), (16, 4)))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.relu(self.wide(x))
        return self.form(self.two(torch.relu(self.one(x))), self.last(hidden * hidden.shape[-1] ** -0.5))


@pytest.mark.parametrize(
    "form",
    [
        lambda rest, branch: (rest, torch.view_as_complex(branch.unflatten(-1, (2, 2)))),
        lambda rest, branch: torch.view_as_complex((rest + branch).unflatten(-1, (2, 2))).conj(),
        lambda rest, branch: torch.cat([rest * 1e6, branch.sigmoid()], -1),
    ],
    ids=["complex beside real", "complex alone", "small beside large"],
)
def test_a_wrong_cut_does_not_hide_in_a_part_of_the_output(form: Callable[..., Any]) -> None:
    spaces = fp.discover(Unscaled(form), torch.randn(20, 4))
    assert spaces.names == ("one",)
    assert "differ" in spaces.left_out["wide"]


def test_logits_of_minus_infinity_are_compared_by_their_places() -> None:
    legal = torch.tensor([True, False])
    model = Returning(lambda logits, _: logits.masked_fill(~legal, float("-inf")))
    spaces = fp.discover(model, torch.randn(3, 4))
    assert spaces.names == ("one", "two")
    plan = fp.Plan.removing(spaces, {"one": (0, 4), "two": (2,)})
    assert torch.allclose(fp.cut(model, plan)(torch.ones(1, 4)), fp.mask(model, plan)(torch.ones(1, 4)))
    with pytest.raises(fp.FairprunerError, match="the output on the example is not finite"):
        fp.discover(Returning(lambda logits, _: logits / 0), torch.randn(3, 4))
    there, elsewhere = torch.tensor([float("inf"), 1.0]), torch.tensor([1.0, float("inf")])
    assert "differ where the output is infinite" in compare([there], [elsewhere], 1e-4, final=True)
