"""The weights that `sequential` refits: their targets, their sums over rows, and their solutions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fairpruner.models.precision import forget_casts, without_autocast
from fairpruner.models.torch_private import multiplied
from fairpruner.repair.products import Product, Rows
from fairpruner.repair.regression import Fit, Halves, JudgedFit, float64, judged_fit
from fairpruner.repair.weight_uses import WeightUse

MOST_NUMBERS = 2**27  # in the sums of one half of the samples that are held at once, or one weight's
MOST_OF_ONE = 2**28  # in the sums of a single weight
TOO_LARGE = f"its sums hold more than {MOST_OF_ONE} numbers"
FEWER_ROWS = "it is applied to each unit of a space separately, and some of them were removed"


@dataclass(frozen=True, eq=False)
class RefitTarget:
    """The original's values in chosen rows of one weight's output, or of the sum that it is added into."""

    rows: Rows
    values: Tensor  # [rows, kept outputs]
    places: tuple[int, ...]  # of the weight's input in the original
    weights: Tensor | None = None  # of the rows' squared errors, [rows]; None: all the same


class Refit:
    """One weight of the cut model: its value after the cut, the sums so far, and its change so far."""

    def __init__(self, small: Mapping[str, Tensor], product: Product, use: WeightUse) -> None:
        self._product, self._offset = product.without_input(), use.offset
        matrix = product.matrix(float64(product.weight.detach()))  # [G, c, taps, q]
        self._channels, self._taps = matrix.shape[1:3]
        self._before = Fit(
            matrix.transpose(1, 2).flatten(1, 2),  # [G, taps c, q]
            torch.zeros(len(matrix), matrix.shape[3], dtype=torch.float64, device="cpu")
            if product.bias is None
            else float64(product.bias.detach()).view(len(matrix), -1),
        )
        self._constant = None if use.offset is None else small[use.offset.tensor]
        self._constant_before = None if self._constant is None else float64(self._constant.detach())
        self._nothing = Fit(torch.zeros_like(self._before.slope), torch.zeros_like(self._before.offset))
        self._change = self._nothing
        self._halves: Halves | None = None
        self.found: JudgedFit | None = None
        groups, features, outputs = self._before.slope.shape
        self.numbers = groups * features * max(features, outputs)  # in its sums
        self.obstacle = TOO_LARGE if self.numbers > MOST_OF_ONE else ""

    def before(self, features: Tensor) -> Tensor:
        """The output of the unchanged weight for features [G, rows, p]: [rows, outputs]."""
        return _applied(self._before, features)

    def change(self, features: Tensor) -> Tensor:
        """What the change so far adds to this output."""
        return _applied(self._change, features)

    @property
    def hidden_offset(self) -> Tensor:
        """The part of the change that a running mean behind the output adds, [outputs]."""
        hidden = self._offset is not None and self._offset.sign < 0
        return (self._change if hidden else self._nothing).offset.flatten()

    def add(self, features: Tensor, missing: Tensor, target: RefitTarget) -> None:
        """Add rows: features [G, rows, p], and the error of the unchanged weight, [rows, outputs]."""
        by_group = missing.unflatten(1, (len(features), -1)).transpose(0, 1)  # [G, rows, q]
        new = Halves.of(features, by_group, target.rows.fitted, target.weights)
        if self._halves is None:
            self._halves = new
        else:
            self._halves += new

    def solve(self, last: bool) -> None:
        """Put the best weight so far into the model; only the first and the last time try all dampings."""
        assert self._halves is not None
        near = None if last or self.found is None else self.found.damping
        self.found = judged_fit(self._halves, self._offset is not None, near=near)
        self._change = self.found.fit or self._nothing
        slope = self._before.slope + self._change.slope
        matrix = slope.unflatten(1, (self._taps, self._channels)).transpose(1, 2)  # [G, c, taps, q]
        weight = self._product.weight
        with torch.no_grad():
            weight.copy_(self._product.stored(matrix, like=weight))
            if self._offset is not None and self._constant is not None and self._constant_before is not None:
                self._constant.copy_(
                    self._constant_before + self._offset.sign * self._change.offset.flatten()
                )
        forget_casts()


def _applied(fit: Fit, features: Tensor) -> Tensor:
    """A fit applied to features [G, rows, p]: [rows, outputs]."""
    with without_autocast(features.device):
        given = multiplied(features, fit.slope.to(features))  # [G, rows, q]
        given += fit.offset[:, None].to(features)
    return given.transpose(0, 1).flatten(1)


class RefitGroup:
    """The weights that are refitted in one sweep; the first batch adds them until there is no more room."""

    def __init__(self) -> None:
        self.refits: dict[str, Refit] = {}
        self.complete = False
        self._room = MOST_NUMBERS

    def refit_of(
        self, product: Product, small: Mapping[str, Tensor], use: WeightUse, target: RefitTarget
    ) -> Refit | None:
        """The refit of the weight that is called now; None if it is not refitted in this sweep."""
        if not self.complete and product.name not in self.refits:
            new = Refit(small, product, use)
            if product.places != target.places:
                new.obstacle = FEWER_ROWS
            if new.obstacle:  # no sweep refits it; it only gets a note
                self.refits[product.name] = new
            elif new.numbers > self._room and self._room < MOST_NUMBERS:
                self.complete = True
            else:
                self.refits[product.name] = new
                self._room -= new.numbers
        found = self.refits.get(product.name)
        return found if found is not None and not found.obstacle else None
