"""Arguments of a wrong type or size are refused in one sentence, in every stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fairpruner as fp
from fairpruner.errors import FairprunerError


class Given:
    """A net, its data, and what every stage makes of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5)).eval()
        self.data: list[tuple[Tensor, Any]] = [(torch.randn(64, 6), torch.arange(64) % 5)]
        self.spaces = fp.discover(self.net, self.data[0][0][:1])
        self.scores = fp.score(self.net, self.data, spaces=self.spaces)
        self.plan = fp.Plan.removing(self.spaces, {"0": (0, 1)})
        self.small = fp.cut(self.net, self.plan)

    def score(self, **options: Any) -> Any:
        return fp.score(self.net, self.data, **options)

    def allocate(self, **options: Any) -> Any:
        return fp.allocate(self.scores, **options)

    @property
    def statistics(self) -> fp.RepairStatistics:
        return fp.RepairStatistics(self.net, self.spaces, self.data)


@cache
def given() -> Given:
    return Given()


WRONG: list[tuple[Callable[[Given], Any], str]] = [
    (lambda g: g.score(groups="3"), "groups='3', expected a whole number"),
    (lambda g: g.score(groups=2.5), "groups=2.5, expected a whole number"),
    (lambda g: g.score(removal={}), "removal= holds {}, expected the name of a signal"),
    (lambda g: g.score(removal=5), "removal= holds 5, expected the name of a signal"),
    (lambda g: g.score(removal=[None]), "removal= holds None, expected the name of a signal"),
    (lambda g: g.score(removal=fp.signals.Wasserstein), "expected the name of a signal"),
    (lambda g: g.score(spaces=list(g.spaces)), "spaces is .*, expected what discover returned"),
    (lambda g: fp.signals.Wasserstein(projections="3"), "projections='3', expected a whole number"),
    (lambda g: fp.signals.Wasserstein(projections=1.5), "projections=1.5, expected a whole number"),
    (lambda g: fp.allocate(None, alpha=0.1), "The scores are a NoneType, expected Scores"),
    (lambda g: fp.sweep([1], "flops", [0.5]), "The scores are a list, expected Scores"),
    (lambda g: g.allocate(alpha=0.1, latency=5), "latency is a int, expected a LatencyTable"),
    (lambda g: g.allocate(alpha=torch.tensor([0.1, 0.2])), "Alpha must be a number"),
    (lambda g: g.allocate(alpha=Fraction(10) ** 400), "Alpha must be a number"),
    (lambda g: g.allocate(alpha=0.1, rule=["tod"]), r"Unknown rule \"\['tod'\]\""),
    (lambda g: g.allocate(alpha=0.1, multiple_of=np.array([1, 2])), "multiple_of=array.*whole number"),
    (lambda g: g.allocate(alpha=0.1, multiple_of="8"), "multiple_of='8', expected a whole number or 'auto'"),
    (lambda g: fp.conflict_curve([1, 2], [1, 2], groups=3), "groups=3, expected a divisor of the 2 units"),
    (lambda g: fp.conflict_curve([1, 2], [1, 2], groups=0), "groups=0, expected a divisor"),
    (lambda g: fp.conflict_curve([10**400, 2], [1, 2]), "Removal scores must be numbers"),
    (lambda g: fp.repair(g.small, g.net, g.plan, g.data, method=5), "Unknown repair method '5'"),
    (lambda g: fp.repair(g.small, g.net, g.plan, g.data, method=None), "Unknown repair method 'None'"),
    (lambda g: g.statistics.repair(g.net, g.plan), "The model to repair is not the cut of this plan"),
    (lambda g: g.statistics.repair(g.small, {"0": [1]}), "The plan is a dict, expected a Plan"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_one_sentence(call: Callable[[Given], Any], message: str) -> None:
    with pytest.raises(FairprunerError, match=message):
        call(given())


def test_spaces_of_an_edited_file(tmp_path: Path) -> None:
    found = given()
    found.plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    del content["digest"]
    (tmp_path / "edited.json").write_text(json.dumps(content).replace('"2.weight"', '"3.weight"'))
    spaces = fp.Plan.load(tmp_path / "edited.json").spaces
    for use in (found.score, lambda spaces: fp.RepairStatistics(found.net, spaces, found.data)):
        with pytest.raises(FairprunerError, match=r"owns '3.weight': no such tensor"):
            use(spaces=spaces)


def test_labels_of_any_whole_type() -> None:
    found = given()
    (inputs, labels), scores = found.data[0], found.scores
    for kind in (np.uint16, np.int8):
        again = fp.score(found.net, [(inputs, labels.numpy().astype(kind))], spaces=found.spaces)
        np.testing.assert_array_equal(again.protection["0"], scores.protection["0"])
