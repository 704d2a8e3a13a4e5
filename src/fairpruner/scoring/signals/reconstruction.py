"""The removal signal `reconstruction`: Optimal Brain Surgeon, applied to units.

It orders units by the error that is left if the kept units compensate for the removed ones, as repair does.

**The error of one removal.** Let C be the covariance of what consumers read and W the weights that read it.
Without unit j, the best weights of the others are W_k - A_kj A_jj^-1 W_j with A = C^-1, and the squared error
of the consumers' outputs grows by tr(W_j' A_jj^-1 W_j) = tr(G_jj A_jj^-1) with G = W W'.

**The next removal.** The inverse covariance and the weights of the remaining units are

    A <- A - A_:j A_jj^-1 A_j:         the block inverse without j
    W <- W + g W_j                     with the gain g = -A_:j A_jj^-1, and -1 for j itself
    G <- G + g h' + h g'               with h = G_:j + g G_jj / 2

Example: C = [[2, 1], [1, 2]] and W = [1, 1]'. A = [[2, -1], [-1, 2]] / 3, so either removal costs
1 / (2/3) = 1.5. Without unit 1 the gain of unit 0 is 1/2: its weight becomes 1.5, and A becomes
2/3 - 1/6 = 1/2, the inverse of its variance. Removing it, too, costs 1.5^2 / (1/2) = 4.5. The total, 6, is
the variance of the output, W' C W.

**Blocks.** Each removal changes all of A and G, so J removals would read J times J^2 numbers. Instead only
the diagonals are kept up to date. The columns U = A_:j A_jj^-1/2, g and h of the last removals are kept, and
the columns that the next removal needs are computed from them. After some removals one matrix product
updates A and G and drops the rows of the units that are gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fairpruner.core.arrays import Floats
from fairpruner.core.costs import unit_savings
from fairpruner.core.units import UnitSpace
from fairpruner.models.gram import gram_matrix
from fairpruner.models.precision import in_float32
from fairpruner.models.reads import positions_of
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.signals.base import Accumulator, Context, Observation, Result, Signal

# This share of the mean variance is added to every variance. Without it, redundant units would make the
# covariance singular.
DAMPING = 1e-6
MOST_RAISES = 16  # of the damping, tenfold each; only a covariance that is not finite needs more
MOST_NUMBERS = 2**26  # in the moments that are held at once; each pass over the data fills as many
BLOCK_ROWS = 64  # rows that are removed between two updates of the matrices


@dataclass(frozen=True)
class Reconstruction(Signal):
    """Greedy removal by the least squares error of what consumers compute, if the kept units compensate.

    A unit's score is the error summed up to its removal, divided by the FLOPs that one unit of the space
    costs. Sorting within a space gives the greedy order. The rule `global`, which compares spaces, removes
    units where an error saves the most FLOPs. With `halves` the scores of two halves of the data are
    computed, too, at three times the cost.
    """

    name: str = "reconstruction"
    halves: bool = False
    needs: ClassVar[frozenset[Observation]] = frozenset({"activations"})

    def start(self, context: Context) -> Accumulator:
        return _ReconstructionAccumulator(context, parts=2 if self.halves else 1)


class _ReconstructionAccumulator(Accumulator):
    """Scores spaces one group after the other; the moments of a group are held during one pass."""

    def __init__(self, context: Context, parts: int) -> None:
        self._context, self._parts = context, parts
        self._groups = groups_within(MOST_NUMBERS, context.spaces, matrices=parts, context=context)
        self._savings = unit_savings(context.spaces, "flops")
        self._result = Result({}, {})
        self._begin()

    def _begin(self) -> None:
        """Take the next group of spaces."""
        self._moments = {space.name: CovarianceSums(space, self._parts) for space in self._groups[0]}

    def see_activation(self, space: UnitSpace, activation: Tensor, labels: Tensor | None) -> None:
        if space.name in self._moments:
            self._moments[space.name].update(activation)

    def join(self, processes: Processes) -> None:
        for moments in self._moments.values():
            moments.join(processes)

    def asks_again(self) -> bool:
        if len(self._groups) < 2:
            return False
        self._score_group()
        self._begin()
        return True

    def result(self) -> Result:
        self._score_group()
        return self._result

    def _score_group(self) -> None:
        scores, halves = dict(self._result.scores), dict(self._result.halves)
        for space in self._groups.pop(0):
            moments = self._moments.pop(space.name)  # freed once the space is scored
            weights = reading_gram(space, self._context.model, moments.width)
            weights /= float(self._savings[space.name]["flops"][0])
            if self._parts == 2:
                halves[space.name] = np.stack(
                    [greedy_errors(moments.covariance((part,)), weights, space.size) for part in (0, 1)]
                )
            scores[space.name] = greedy_errors(moments.covariance(range(self._parts)), weights, space.size)
        self._result = Result(scores, halves)


def groups_within(
    most: int, spaces: Iterable[UnitSpace], *, matrices: int, context: Context
) -> list[list[UnitSpace]]:
    """The spaces in order, in groups whose moments hold at most so many numbers, or a single space.

    A space has so many `matrices` of moments. All spaces are one group if the data cannot be shown again.
    """
    groups: list[list[UnitSpace]] = [[]]
    held = 0
    for space in spaces:
        numbers = matrices * (space.size * unit_width(space)) ** 2
        if groups[-1] and held + numbers > most and context.rereadable:
            groups.append([])
            held = 0
        groups[-1].append(space)
        held += numbers
    return groups


class CovarianceSums:
    """Sums of what consumers read and of its products, over all samples, or over the even and the odd ones.

    A unit with D features, such as a head, fills D rows. The positions of a channel's map are
    further samples of one row.
    """

    def __init__(self, space: UnitSpace, parts: int) -> None:
        self.width = unit_width(space)  # D
        size = space.size * self.width
        self._products = torch.zeros(parts, size, size, dtype=torch.float64, device="cpu")
        self._sums = torch.zeros(parts, size, dtype=torch.float64, device="cpu")
        self._rows = np.zeros(parts)
        self._samples = 0

    def update(self, activation: Tensor) -> None:
        rows = in_float32(activation.unflatten(2, (self.width, -1)).flatten(1, 2))  # [N, J D, positions]
        parts = len(self._rows)
        for part in range(parts):
            own = rows[(part - self._samples) % parts :: parts].transpose(0, 1).flatten(1)  # [J D, rows]
            if not own.shape[1]:
                continue
            # Products in float32 of rows far from zero would hide how they vary, so their mean is taken off
            # first. It is added in float64, on the CPU, since not all devices have it.
            mean = own.mean(1)
            centred = own - mean[:, None]
            rest, mean = centred.sum(1).cpu().double(), mean.cpu().double()  # the mean was rounded
            sums = mean * own.shape[1] + rest
            self._products[part] += gram_matrix(centred.T).cpu()
            self._products[part].addr_(mean, sums).addr_(rest, mean)
            self._sums[part] += sums
            self._rows[part] += own.shape[1]
        self._samples += len(activation)

    def join(self, processes: Processes) -> None:
        self._products, self._sums = processes.summed(self._products), processes.summed(self._sums)
        self._rows = np.sum(processes.gathered(self._rows), axis=0)

    @property
    def rows(self) -> float:
        return float(self._rows.sum())

    def second(self) -> Tensor:
        """The mean products, not centred, [J D, J D]."""
        return self._products.sum(0) / max(self.rows, 1.0)

    def covariance(self, parts: range | tuple[int, ...]) -> Tensor:
        """[J D, J D], of all or some parts of the samples; zero if there were none."""
        chosen = list(parts)
        rows = max(self._rows[chosen].sum(), 1)
        mean = self._sums[chosen].sum(0) / rows
        return torch.addr(self._products[chosen].sum(0).div_(rows), mean, mean, alpha=-1)


def unit_width(space: UnitSpace) -> int:
    """The number of rows of a unit where it is observed: a head has its size, other units have one."""
    if space.kind != "head":
        return 1
    owner = space.observed.owner
    return int(np.bincount(owner[owner >= 0]).max())


def reading_gram(space: UnitSpace, model: nn.Module, width: int) -> Tensor:
    """W W' of the weights that read the units, summed over all consumers, float64 [J D, J D]."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    gram = torch.zeros(space.size * width, space.size * width, dtype=torch.float64, device="cpu")
    for part in space.slices_of("read"):
        rows = in_float32(tensors[part.tensor].detach()).movedim(part.dim, 0).flatten(1).cpu()  # [indices, R]
        table = positions_of(part.owner, space.size)  # [J, indices of a unit]
        if table.shape[1] % width:
            continue  # reads the units in another form than the one observed
        for own in table.reshape(space.size, width, -1).transpose(2, 0, 1).reshape(-1, space.size * width):
            values = rows[own] * torch.from_numpy(own >= 0).to(rows)[:, None]  # [J D, R]
            gram += gram_matrix(values.T)
    return gram


def greedy_errors(covariance: Floats | Tensor, weights: Floats | Tensor, units: int) -> Floats:
    """The error of the consumers' outputs, summed up to the removal of each unit in the greedy order, [J].

    `covariance` is C and `weights` is G = W W', [J D, J D] each.

    >>> greedy_errors(np.array([[2.0, 1.0], [1.0, 2.0]]), np.ones((2, 2)), 2).round(4).tolist()
    [1.5, 6.0]
    """
    covariance, weights = (torch.as_tensor(matrix, device="cpu") for matrix in (covariance, weights))
    remaining = _Remaining(_damped_inverse(covariance), weights, units)
    scores, total = np.zeros(units), 0.0
    while remaining.units:
        unit, error = remaining.remove_next()
        # A removal without error still raises the total by its last bit, so that sorting gives the order.
        total = max(total + max(error, 0.0), float(np.nextafter(total, np.inf)))
        scores[unit] = total
    return scores


def _damped_inverse(covariance: Tensor) -> Tensor:
    """The inverse covariance, with as little damping as makes it positive definite."""
    variance = float(covariance.diagonal().mean())
    damping = DAMPING * (variance if variance > 0 else 1.0)
    damped = covariance.clone()
    for _ in range(MOST_RAISES):
        damped.diagonal().add_(damping)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            break
        # Rounding made the covariance of redundant or constant units indefinite.
        damping *= 10
    return torch.cholesky_inverse(factor, out=damped)  # over the old one, since wide spaces take gigabytes


class _Remaining:
    """The units that are left, with A and G as they were at the last update, and what has changed since."""

    def __init__(self, inverse: Tensor, gram: Tensor, units: int) -> None:
        self._width = len(inverse) // units
        self._inverse, self._gram = inverse, gram  # A and G, [R, R] for R = remaining units * D
        self._names = np.arange(units)
        self._begin()

    def _begin(self) -> None:
        """Start a block of removals from the present A and G."""
        rows, capacity = len(self._inverse), max(BLOCK_ROWS, self._width)
        self._alive = torch.ones(rows // self._width, dtype=torch.bool, device="cpu")
        self._diagonal = _diagonal_blocks(self._inverse, self._width)  # [units, D, D], of A
        self._weight = _diagonal_blocks(self._gram, self._width)  # of G
        # U, g and h of the removals since the last update, of which the first `_used` columns are filled
        self._scaled, self._gains, self._carried = (self._inverse.new_zeros(rows, capacity) for _ in range(3))
        self._used = 0

    @property
    def units(self) -> int:
        return int(self._alive.sum())

    def remove_next(self) -> tuple[int, float]:
        """Remove the unit with the least error: its number and that error."""
        errors = self._errors().masked_fill(~self._alive, torch.inf)
        position = int(errors.argmin())
        self._alive[position] = False
        self._eliminate(slice(position * self._width, (position + 1) * self._width))
        self._diagonal[position] = torch.eye(
            self._width, device="cpu"
        )  # zero after the removal; `_errors` inverts it
        unit = int(self._names[position])
        if self._used + self._width > self._gains.shape[1]:
            self._update()
        return unit, float(errors[position])

    def _errors(self) -> Tensor:
        """tr(G_jj A_jj^-1) of each unit."""
        if self._width == 1:
            return (self._weight / self._diagonal).flatten()
        inverses: Tensor = torch.linalg.inv(self._diagonal)
        return (inverses * self._weight.mT).sum((1, 2))

    def _eliminate(self, gone: slice) -> None:
        """Update the diagonals of A and G for the removal of the rows `gone`, and keep its U, g and h."""
        used = self._used
        scaled, gains, carried = (t[:, :used] for t in (self._scaled, self._gains, self._carried))
        column = self._inverse[:, gone] - scaled @ scaled[gone].T  # A_:j as it is now, [R, D]
        read = self._gram[:, gone] + gains @ carried[gone].T + carried @ gains[gone].T  # G_:j as it is now
        factor, _ = torch.linalg.cholesky_ex(column[gone])  # A_jj = L L'
        new_scaled = torch.linalg.solve_triangular(factor.mT, column, upper=True, left=False)  # A_:j L^-T
        gain = -torch.linalg.solve_triangular(factor, new_scaled, upper=False, left=False)  # -A_:j A_jj^-1
        gain[gone] = -torch.eye(self._width, dtype=gain.dtype, device="cpu")
        new_carried = read + gain @ read[gone] / 2
        self._diagonal -= _products(new_scaled, new_scaled, self._width)
        mixed = _products(gain, new_carried, self._width)
        self._weight += mixed + mixed.mT
        self._scaled[:, used : used + self._width] = new_scaled
        self._gains[:, used : used + self._width] = gain
        self._carried[:, used : used + self._width] = new_carried
        self._used += self._width

    def _update(self) -> None:
        """Apply the removals to A and G and drop the rows of the units that are gone."""
        rows = self._alive.repeat_interleave(self._width).nonzero().flatten()
        scaled, gains, carried = (
            t[rows][:, : self._used] for t in (self._scaled, self._gains, self._carried)
        )
        self._inverse = self._inverse[rows][:, rows].addmm_(scaled, scaled.T, alpha=-1)
        self._gram = self._gram[rows][:, rows].addmm_(gains, carried.T).addmm_(carried, gains.T)
        self._names = self._names[self._alive.numpy()]
        self._begin()


def _diagonal_blocks(matrix: Tensor, width: int) -> Tensor:
    """The blocks on the diagonal, [R, R] -> [units, D, D]."""
    blocks: Tensor = matrix.unflatten(1, (-1, width)).unflatten(0, (-1, width)).diagonal(dim1=0, dim2=2)
    return blocks.movedim(-1, 0).clone()


def _products(left: Tensor, right: Tensor, width: int) -> Tensor:
    """left_i right_i' of each unit i, from [R, D] each: [units, D, D]."""
    blocks: Tensor = left.unflatten(0, (-1, width)) @ right.unflatten(0, (-1, width)).mT
    return blocks
