"""Every signal but Wasserstein: hand-computed numbers, autograd and real masking as oracles; own signals;
grouping of classes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from small_nets import NETS, batches, build, samples, space, spaces_of
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.core.arrays import Floats
from fairpruner.core.spaces import Spaces
from fairpruner.core.units import Slice, UnitSpace
from fairpruner.discovery import discover
from fairpruner.errors import FairprunerError
from fairpruner.scoring.score import score
from fairpruner.scoring.signals import (
    Taylor,
    Wasserstein,
    names,
    protection,
    protection_signal,
    removal_signal,
)
from fairpruner.scoring.signals.classes import kmeans
from fairpruner.scoring.signals.reconstruction import greedy_errors

# Weights


def test_norms_and_distances_by_hand() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 2))
    model[0].weight = nn.Parameter(torch.tensor([[3.0, -4.0], [0.0, 0.0], [0.0, 5.0]]))
    spaces = spaces_of(model, space("0", 3, ("0.weight", 0, "write"), ("2.weight", 1, "read")))
    data = [(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))]
    scores = score(model, data, spaces=spaces, removal=("l1", "l2", "fpgm"), protection="random")
    np.testing.assert_allclose(scores.removals["l1"]["0"], [7, 0, 5])
    np.testing.assert_allclose(scores.removals["l2"]["0"], [5, 0, 5])
    far = np.hypot(3, 9)  # from (3, -4) to (0, 5)
    np.testing.assert_allclose(scores.removals["fpgm"]["0"], [5 + far, 5 + 5, far + 5])
    assert not scores.halves
    assert scores.samples == 0  # no signal asked for data


def test_a_unit_that_owns_several_rows_is_measured_over_all_of_them() -> None:
    model, spaces = build("grouped")
    weight = model.get_parameter("0.weight").detach()  # [6, 2, 3]; unit u owns rows u and u + 3
    scores = score(
        model, batches("grouped", 6, 6), spaces=spaces, removal=("l1", "fpgm"), protection="random"
    )
    np.testing.assert_allclose(scores.removals["l1"]["0"], (weight[:3].abs() + weight[3:].abs()).sum((1, 2)))
    rows = torch.stack([weight[:3], weight[3:]], 1).flatten(1)
    np.testing.assert_allclose(
        scores.removals["fpgm"]["0"], (rows[:, None] - rows).norm(dim=2).sum(1), rtol=1e-9
    )


def test_random_is_fixed_by_seed_space_and_role() -> None:
    model, spaces = build("functional")  # two of its spaces have the same size
    data = batches("functional", 6, 6)
    one, again, other = (
        score(model, data, spaces=spaces, removal="random", protection="random", seed=seed)
        for seed in (1, 1, 2)
    )
    for name in spaces.names:
        np.testing.assert_array_equal(one.removal[name], again.removal[name])
        assert not np.array_equal(one.removal[name], other.removal[name])
        assert not np.array_equal(one.removal[name], one.protection[name])
    assert not np.array_equal(one.removal["left"], one.removal["middle"])


def test_activation_is_the_mean_absolute_value() -> None:
    model, spaces = build("convnet")
    inputs, labels = samples("convnet", 9)
    read = model[:3](inputs).detach()  # what the second convolution reads, [9, 4, 4, 4]
    scores = score(
        model, [(inputs[:4], labels[:4]), (inputs[4:], labels[4:])], spaces=spaces, removal="activation"
    )
    np.testing.assert_allclose(scores.removal["0"], read.abs().mean((0, 2, 3)), rtol=1e-9)
    np.testing.assert_allclose(
        scores.halves["activation"]["0"],
        torch.stack([read[h::2].abs().mean((0, 2, 3)) for h in (0, 1)]),
        rtol=1e-9,
    )


# Taylor


def taylor_by_brute_force(
    model: nn.Module, spaces: Spaces, inputs: Tensor, labels: Tensor
) -> dict[str, Floats]:
    """Algorithm 2 as written: a backward for each sample, the unit's own elements picked by a mask, each
    once.
    """
    parameters = dict(model.named_parameters())
    totals = {s.name: np.zeros(s.size) for s in spaces}
    for i in range(len(labels)):
        loss = F.cross_entropy(model(inputs[i : i + 1]), labels[i : i + 1])
        gradients = dict(
            zip(
                parameters,
                torch.autograd.grad(loss, list(parameters.values()), allow_unused=True),
                strict=True,
            )
        )
        for one in spaces:
            for unit in range(one.size):
                for name in {part.tensor for part in one.slices} & set(parameters):
                    gradient = gradients[name]
                    if gradient is not None:
                        own = owned(one, unit, name, parameters[name])
                        totals[one.name][unit] += (gradient * parameters[name])[own].sum().item()
    return {name: np.abs(total) / len(labels) for name, total in totals.items()}


def owned(one: UnitSpace, unit: int, tensor: str, like: Tensor) -> Tensor:
    """Which elements of a tensor a unit owns, through any of its slices."""
    own = torch.zeros_like(like, dtype=torch.bool)
    for part in one.slices:
        if part.tensor == tensor:
            own.movedim(part.dim, 0)[torch.from_numpy(part.owner == unit)] = True
    return own


def test_taylor_by_hand() -> None:
    """loss = mean of y * w2 * relu(w1 * x): gradient times weight is the same product for both weights,
    so R = 2 |mean of it|.
    """
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    model[0].weight = nn.Parameter(torch.tensor([[1.0], [2.0]]))
    model[2].weight = nn.Parameter(torch.tensor([[3.0, -1.0]]))
    spaces = spaces_of(model, space("0", 2, ("0.weight", 0, "write"), ("2.weight", 1, "read")))
    inputs, signs = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 1.0, -1.0])
    data = [(inputs[:2], signs[:2]), (inputs[2:], signs[2:])]
    scores = score(
        model, data, spaces=spaces, removal="l1", loss=lambda output, sign: (output[:, 0] * sign).mean()
    )
    mean = (1 + 2 - 4) / 3  # of sign * x: signed products cancel before the absolute value is taken
    np.testing.assert_allclose(scores.protection["0"], [2 * abs(mean) * 3, 2 * abs(mean) * 2], rtol=1e-6)
    np.testing.assert_allclose(
        scores.halves["taylor"]["0"], [[2 * 1.5 * 3, 2 * 1.5 * 2], [2 * 4 * 3, 2 * 4 * 2]], rtol=1e-6
    )


@pytest.mark.parametrize("net", sorted(NETS))
def test_taylor_against_brute_force(net: str) -> None:
    model, spaces = build(net)
    inputs, labels = samples(net, 11)
    expected = taylor_by_brute_force(model, spaces, inputs, labels)
    scores = score(model, batches(net, 11, 4), spaces=spaces, removal="l1")  # 4 + 4 + 3 samples
    for name in spaces.names:
        np.testing.assert_allclose(scores.protection[name], expected[name], rtol=1e-9, atol=1e-12)


def test_a_lone_batch_is_split_into_halves() -> None:
    model, spaces = build("mlp")
    inputs, labels = samples("mlp", 9)
    scores = score(model, [(inputs, labels)], spaces=spaces)
    for half, part in enumerate((slice(0, 5), slice(5, 9))):
        expected = taylor_by_brute_force(model, spaces, inputs[part], labels[part])
        np.testing.assert_allclose(scores.halves["taylor"]["0"][half], expected["0"], rtol=1e-9)
    assert (
        "taylor" not in score(model, [(inputs[:1], labels[:1])], spaces=spaces, removal="l1").halves
    )  # one sample has no halves


def test_batches_fall_into_the_halves_by_turns() -> None:
    model, spaces = build("mlp")
    inputs, labels = samples("mlp", 18)
    scores = score(model, batches("mlp", 18, 4), spaces=spaces)  # 4 + 4 + 4 + 4 + 2
    place = torch.arange(18) // 4 % 2
    for half in (0, 1):
        expected = taylor_by_brute_force(model, spaces, inputs[place == half], labels[place == half])
        np.testing.assert_allclose(scores.halves["taylor"]["0"][half], expected["0"], rtol=1e-9)


# Second order


class Gate(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value.reshape(-1, *[1] * (x.ndim - 2))


def gate_terms(run: Callable[[Tensor], Tensor], gate: Gate, inputs: Tensor, labels: Tensor) -> Tensor:
    """Each sample's derivative of its loss by an explicit gate, [N, J]."""
    rows = []
    for i in range(len(labels)):
        loss = F.cross_entropy(run(inputs[i : i + 1]), labels[i : i + 1])
        rows.append(torch.autograd.grad(loss, gate.value)[0])
    return torch.stack(rows)


def second_order(terms: Tensor) -> Floats:
    return (-terms.mean(0) + terms.square().mean(0) / 2).abs().numpy()


def test_taylor2_against_an_explicit_gate() -> None:
    model, spaces = build("convnet")
    inputs, labels = samples("convnet", 10)
    gate = Gate(4)
    terms = gate_terms(lambda x: model[3:](gate(model[:3](x))), gate, inputs, labels)
    scores = score(model, batches("convnet", 10, 4), spaces=spaces, removal="l1", protection="taylor2")
    np.testing.assert_allclose(scores.protection["0"], second_order(terms), rtol=1e-9)
    first_half = torch.cat([terms[:4], terms[8:]])
    np.testing.assert_allclose(
        scores.halves["taylor2"]["0"], [second_order(first_half), second_order(terms[4:8])], rtol=1e-9
    )


def test_taylor2_gates_every_read_and_nothing_else() -> None:
    """The stream of the residual net is gated where the block and the head read it, not where it is
    added.
    """
    model, spaces = build("residual")
    inputs, labels = samples("residual", 6)
    gate = Gate(4)

    def run(x: Tensor) -> Tensor:
        x = model.stem(x)
        x = x + model.block(gate(x)).tanh()
        return model.head(gate(x.mean((2, 3))))

    expected = second_order(gate_terms(run, gate, inputs, labels))
    np.testing.assert_allclose(
        score(model, batches("residual", 6, 4), spaces=spaces, removal="l1", protection="taylor2").protection[
            "stem"
        ],
        expected,
        rtol=1e-9,
    )


def test_taylor2_counts_every_call_of_a_shared_weight() -> None:
    model, spaces = build("shared")
    inputs, labels = samples("shared", 6)
    gate = Gate(4)

    def run(x: Tensor) -> Tensor:
        x = model.again(gate(model.inner(x).relu())).relu()
        return model.head(gate(model.again(gate(x)).relu()))

    expected = second_order(gate_terms(run, gate, inputs, labels))
    np.testing.assert_allclose(
        score(model, batches("shared", 6, 4), spaces=spaces, removal="l1", protection="taylor2").protection[
            "inner"
        ],
        expected,
        rtol=1e-9,
    )


# Deletion


@pytest.mark.parametrize("net", ["mlp", "convnet", "residual", "grouped", "functional", "shared"])
def test_deletion_is_the_loss_change_of_real_masking(net: str) -> None:
    model, spaces = build(net)
    inputs, labels = samples(net, 7)
    scores = score(model, batches(net, 7, 3), spaces=spaces, removal="l1", protection="deletion")
    whole = F.cross_entropy(model(inputs), labels).item()
    for one in spaces:
        for unit in range(one.size):
            masked = deepcopy(model)
            with torch.no_grad():
                for part in one.slices_of("read"):
                    masked.get_parameter(part.tensor).movedim(part.dim, 0)[
                        torch.from_numpy(part.owner == unit)
                    ] = 0
            change = F.cross_entropy(masked(inputs), labels).item() - whole
            assert scores.protection[one.name][unit] == pytest.approx(abs(change), rel=1e-9, abs=1e-12)


def test_deletion_sees_through_a_parametrization() -> None:
    """Masking the raw weight would change the norms of weight_norm: the unit is taken away from what is
    read.
    """
    model, spaces = build("parametrized")
    inputs, labels = samples("parametrized", 6)
    hidden = model[:2](inputs)
    hidden[:, 2] = 0
    change = F.cross_entropy(model[2](hidden), labels).item() - F.cross_entropy(model(inputs), labels).item()
    scores = score(model, [(inputs, labels)], spaces=spaces, removal="l1", protection="deletion")
    assert scores.protection["0"][2] == pytest.approx(abs(change), rel=1e-9)


# Own signals


@removal_signal("test_bias")
def bias_size(one: UnitSpace, model: nn.Module) -> Tensor:
    return model.get_parameter(f"{one.name}.bias").abs()


@protection_signal("test_peak")
class Peak:
    """The largest value of a unit for class 1."""

    def __init__(self, one: UnitSpace) -> None:
        self.value = torch.full((one.size,), -torch.inf, dtype=torch.float64)

    def update(self, activation: Tensor, labels: Tensor) -> None:
        lowest = torch.full_like(activation[:1], -torch.inf)  # for a batch without that class
        self.value = self.value.maximum(torch.cat([activation[labels == 1], lowest]).amax((0, 2)))

    def compute(self) -> list[float]:
        return self.value.tolist()


def test_own_signals_by_name() -> None:
    model, spaces = build("convnet")
    inputs, labels = samples("convnet", 12)
    scores = score(
        model,
        batches("convnet", 12, 5),
        spaces=spaces,
        removal="test_bias",
        protection=["test_peak", "taylor"],
    )
    assert scores.active == ("test_bias", "test_peak")
    np.testing.assert_allclose(scores.removal["0"], model[0].bias.detach().abs())
    np.testing.assert_allclose(
        scores.protection["0"], model[:3](inputs)[labels == 1].amax((0, 2, 3)).detach(), rtol=1e-12
    )
    assert set(scores.halves) == {"taylor"}


def test_an_own_class_sees_flattened_maps_by_unit() -> None:
    model, spaces = build("convnet")
    inputs, labels = samples("convnet", 12)
    read = model[:5](inputs)  # [12, 5, 2, 2] before it is flattened into the linear map
    scores = score(model, [(inputs, labels)], spaces=spaces, removal="l1", protection="test_peak")
    np.testing.assert_allclose(scores.protection["3"], read[labels == 1].amax((0, 2, 3)).detach(), rtol=1e-12)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda one: np.zeros(one.size + 1), r"gave float64\[7\] for space '0', expected float64\[6\]"),
        (lambda one: np.full(one.size, np.nan), r"gave 6 of 6 values that are not finite for space '0'"),
        (lambda one: torch.zeros(one.size, 2), r"gave float64\[6, 2\] for space '0'"),
    ],
)
def test_own_signals_are_checked(values: Callable[[UnitSpace], Floats | Tensor], message: str) -> None:
    model, spaces = build("mlp")
    removal_signal("test_wrong")(lambda one, model: values(one))
    with pytest.raises(FairprunerError, match=f"'test_wrong' {message}"):
        score(model, batches("mlp", 6, 3), spaces=spaces, removal="test_wrong")


def test_a_failing_own_signal_is_blamed_by_name() -> None:
    @removal_signal("test_broken")
    class Broken:
        def __init__(self, one: UnitSpace) -> None: ...

        def update(self, activation: Tensor, labels: Tensor) -> None:
            raise ZeroDivisionError("no luck")

    model, spaces = build("mlp")
    with pytest.raises(
        FairprunerError, match="Signal 'test_broken' failed on space '0': ZeroDivisionError: no luck"
    ):
        score(model, batches("mlp", 6, 3), spaces=spaces, removal="test_broken")


def test_unknown_and_doubled_signals() -> None:
    model, spaces = build("mlp")
    data = batches("mlp", 6, 3)
    with pytest.raises(
        FairprunerError, match="Unknown removal signal 'waserstein': did you mean 'wasserstein'"
    ):
        score(model, data, spaces=spaces, removal="waserstein")
    with pytest.raises(FairprunerError, match="Unknown protection signal 'l1'"):
        score(model, data, spaces=spaces, protection="l1")
    with pytest.raises(FairprunerError, match="each name once"):
        score(model, data, spaces=spaces, removal=["wasserstein", Wasserstein(projections=4)])
    with pytest.raises(FairprunerError, match="at least one"):
        score(model, data, spaces=spaces, removal=[])
    with pytest.raises(FairprunerError, match="share a name"):
        score(model, data, spaces=spaces, removal=Wasserstein(name="taylor"))
    with pytest.raises(FairprunerError, match="'taylor' is built in"):
        protection_signal("taylor")
    with pytest.raises(FairprunerError, match="projections=0, expected a whole number of at least 1"):
        Wasserstein(projections=0)


def test_the_names_of_the_built_in_signals() -> None:
    assert {"wasserstein", "wasserstein_pooled", "l1", "l2", "fpgm", "activation", "random"} <= set(
        names("removal")
    )
    assert {"taylor", "taylor2", "deletion", "random"} <= set(names("protection"))


def test_configured_signals_may_stand_side_by_side() -> None:
    model, spaces = build("convnet")
    signals = [Wasserstein(projections=4, name="few"), Wasserstein(projections=200, name="many")]
    scores = score(model, batches("convnet", 30, 10), spaces=spaces, removal=signals, protection=Taylor())
    assert scores.settings["few"]["projections"] == 4
    assert scores.settings["many"]["projections"] == 200
    assert np.corrcoef(scores.removals["few"]["3"], scores.removals["many"]["3"])[0, 1] > 0.5


# Where units do not lie in order


def test_scattered_and_uneven_units_are_gathered() -> None:
    """Unit 0 is channel 3, unit 1 channels 0 and 4, unit 2 channel 1; channel 2 belongs to none."""
    model = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3)).double()
    owner = [1, 2, -1, 0, 1]
    spaces = spaces_of(model, space("0", 3, ("0.weight", 0, "write", owner), ("1.weight", 1, "read", owner)))
    inputs, labels = torch.randn(8, 2, dtype=torch.float64), torch.arange(8) % 2
    seen: list[Tensor] = []

    @removal_signal("test_seen")
    class Seen:
        def __init__(self, one: UnitSpace) -> None:
            self.size = one.size

        def update(self, activation: Tensor, labels: Tensor) -> None:
            seen.append(activation)

        def compute(self) -> Floats:
            return np.zeros(self.size)

    scores = score(
        model,
        [(inputs[:4], labels[:4]), (inputs[4:], labels[4:])],
        spaces=spaces,
        removal=["test_seen", "l1", "fpgm"],
    )
    hidden = model[0](inputs).detach()
    expected = torch.stack(
        [
            torch.stack([hidden[:, 3], torch.zeros(8)], 1),
            hidden[:, [0, 4]],
            torch.stack([hidden[:, 1], torch.zeros(8)], 1),
        ],
        1,
    )
    torch.testing.assert_close(torch.cat(seen), expected)
    weight = model[0].weight.detach().abs().sum(1)
    np.testing.assert_allclose(scores.removals["l1"]["0"], [weight[3], weight[0] + weight[4], weight[1]])
    raw, none = model[0].weight.detach(), torch.zeros(2)
    rows = torch.stack([torch.cat([raw[3], none]), torch.cat([raw[0], raw[4]]), torch.cat([raw[1], none])])
    np.testing.assert_allclose(
        scores.removals["fpgm"]["0"], (rows[:, None] - rows).norm(dim=2).sum(1), rtol=1e-9
    )


def test_positions_tied_over_groups_are_gathered() -> None:
    model, spaces = build("grouped")
    inputs, labels = samples("grouped", 12)
    read = model[:2](inputs)  # [12, 6, 3]
    scores = score(model, [(inputs, labels)], spaces=spaces, removal="l1", protection="test_peak")
    expected = read[labels == 1].amax((0, 2)).reshape(2, 3).amax(0)
    np.testing.assert_allclose(scores.protection["0"], expected.detach(), rtol=1e-12)


def test_tokens_and_folded_windows_are_features_of_their_sample() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:  # [N, T, 3]
            folded = x.flatten(0, 1)  # [N * T, 3]
            return self.down(self.up(folded)).unflatten(0, (len(x), -1)).mean(1)

    model = Tokens().double()
    spaces = spaces_of(model, space("up", 4, ("up.weight", 0, "write"), ("down.weight", 1, "read")))
    inputs, labels = torch.randn(6, 5, 3, dtype=torch.float64), torch.arange(6) % 2
    scores = score(model, [(inputs, labels)], spaces=spaces, removal="l1", protection="test_peak")
    np.testing.assert_allclose(
        scores.protection["up"], model.up(inputs)[labels == 1].amax((0, 1)).detach(), rtol=1e-12
    )


# Grouping classes


def test_kmeans_finds_separated_groups_and_leaves_none_empty() -> None:
    rng = np.random.default_rng(0)
    centres = np.array([[0, 0], [20, 0], [0, 20], [20, 20.0]])
    truth = rng.permutation(np.repeat(np.arange(4), 6))
    points = centres[truth] + rng.normal(size=(24, 2))
    for seed in range(10):
        found = kmeans(points, 4, seed)
        assert len({(a, b) for a, b in zip(truth, found, strict=True)}) == 4
    assert sorted(kmeans(points, 24, 0)) == list(range(24))
    assert sorted(kmeans(np.zeros((5, 2)), 5, 0)) == list(range(5))  # no two points differ


def test_grouped_scores_are_those_of_the_group_labels() -> None:
    """Classes 0, 2, 4 and 1, 3, 5 have features on two sides: with two groups they count as two classes."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 6)).double()
    spaces = spaces_of(model, space("0", 4, ("0.weight", 0, "write"), ("2.weight", 1, "read")))
    labels = torch.arange(48) % 6
    inputs = torch.randn(48, 2, dtype=torch.float64) * 0.1 + 3 * (labels % 2)[:, None]
    data = list(zip(inputs.split(10), labels.split(10), strict=True))
    grouped = score(model, data, spaces=spaces, groups=2)
    merged = score(model, [(x, y % 2) for x, y in data], spaces=spaces)
    np.testing.assert_allclose(grouped.removal["0"], merged.removal["0"], rtol=1e-12)
    np.testing.assert_allclose(
        grouped.protection["0"], score(model, data, spaces=spaces).protection["0"], rtol=1e-12
    )  # the loss keeps its classes
    assert grouped.settings["groups"] == 2


def test_labels_that_are_a_strided_view_are_grouped_without_a_warning() -> None:
    model, spaces = build("mlp")
    inputs, labels = samples("mlp", 12)
    pairs = torch.stack([labels, labels], dim=1)
    found = score(model, [(inputs, pairs[:, 0])], spaces=spaces, groups=2)
    expected = score(model, [(inputs, labels)], spaces=spaces, groups=2)
    for name in spaces.names:
        np.testing.assert_array_equal(found.removal[name], expected.removal[name])


def test_a_huge_class_index_takes_no_memory() -> None:
    """A table of all indices up to the label would take 8 GB."""
    model, spaces = build("mlp")
    inputs, labels = samples("mlp", 9)
    huge = torch.where(labels == 2, 10**9, labels)
    with pytest.raises(FairprunerError, match="has the label 1000000000, expected class indices below the 3"):
        score(model, [(inputs, huge)], spaces=spaces, groups=2)

    def loss(output: Tensor, groups: Tensor) -> Tensor:
        return output.square().mean()

    found, expected = (
        score(model, [(inputs, own)], spaces=spaces, groups=2, loss=loss).removal for own in (huge, labels)
    )
    for name in spaces.names:
        np.testing.assert_array_equal(found[name], expected[name])


def test_grouping_refuses_what_it_cannot_do() -> None:
    model, spaces = build("mlp")
    data = batches("mlp", 12, 4)
    with pytest.raises(FairprunerError, match="can be read once"):
        score(model, iter(data), spaces=spaces, groups=2)
    for groups in (1, 4):
        with pytest.raises(FairprunerError, match=f"groups={groups} cannot group the 3 classes"):
            score(model, data, spaces=spaces, groups=groups)


def test_slices_of_constants_are_no_parameters() -> None:
    """Running statistics belong to a unit, but have no gradient and no place in its Taylor sum."""
    model, spaces = build("convnet")
    buffers = [part for part in spaces["0"].slices if isinstance(part, Slice) and "running" in part.tensor]
    assert len(buffers) == 2
    scores = score(model, batches("convnet", 6, 3), spaces=spaces)
    assert np.isfinite(scores.protection["0"]).all()


@pytest.mark.parametrize("most", [1, 7, 24, 1000])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("layout", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_products_of_large_tensors_are_summed_part_by_part(
    most: int, absolute: bool, layout: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protection, "MOST_PRODUCTS", most)
    gradient, weight = (torch.randn(5, 2, 3, dtype=torch.float64) for _ in range(2))
    gradient = gradient.permute(layout).contiguous().permute(*np.argsort(layout))
    product = (gradient * weight).abs() if absolute else gradient * weight
    found = protection.sums_of_products(gradient, weight, {0, 1, 2}, absolute=absolute)
    for dim, expected in {0: product.sum((1, 2)), 1: product.sum((0, 2)), 2: product.sum((0, 1))}.items():
        torch.testing.assert_close(found[dim], expected)


def test_saliency_sums_sizes_where_taylor_sums_signs() -> None:
    first, last = nn.Linear(4, 6), nn.Linear(6, 3)
    net = nn.Sequential(first, nn.ReLU(), last)
    data = [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(2)]
    found = score(net, data, spaces=discover(net, torch.zeros(1, 4)), removal="saliency").removal["0"]
    expected = torch.zeros(6)
    for x, y in data:
        own = [first.weight, first.bias, last.weight]
        slopes = torch.autograd.grad(F.cross_entropy(net(x), y), own)
        sizes = [(p.detach() * g).abs() for p, g in zip(own, slopes, strict=True)]
        expected += (sizes[0].sum(1) + sizes[1] + sizes[2].sum(0)) / len(data)
    np.testing.assert_allclose(found, expected.double().numpy() / (4 + 3), rtol=1e-5)  # MACs of a unit


@pytest.mark.parametrize("metric", ["params", "flops"])
def test_a_signal_per_flop_may_protect_under_any_budget(metric: str) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    data = [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(2)]
    for own in (fp.signals.Saliency(), fp.signals.Reconstruction(halves=True)):
        scores = score(net, data, removal="l1", protection=own)
        assert fp.allocate(scores, keep=fp.Budget(metric, 0.5)).share(metric) == pytest.approx(0.5, abs=0.1)


def test_small_gradients_of_half_precision_are_not_lost() -> None:
    """<activation, gradient> is a product of two small numbers, which in float16 alone would be 0."""
    wide = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    data = [(torch.rand(8, 4), torch.arange(8) % 3)]

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return 1e-4 * F.cross_entropy(output.float(), labels)

    spaces = discover(wide, torch.zeros(1, 4))
    asked: dict[str, Any] = {"spaces": spaces, "removal": "l1", "protection": "taylor2", "loss": loss}
    expected = score(wide, data, **asked).protection["0"]
    halved = [(x.half(), y) for x, y in data]
    found = score(deepcopy(wide).half(), halved, **asked).protection["0"]
    assert abs(found - expected).max() <= 0.02 * expected.max()


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return x + out


def test_surgeon_is_the_growth_of_the_loss_per_flop() -> None:
    """Units by their second moments and those of the gradients, blocks by the squared first-order change."""
    model = nn.Sequential(_Residual(), _Residual(), nn.Linear(3, 4)).double()
    inputs, labels = torch.randn(32, 3).double(), torch.arange(32) % 4
    spaces = discover(model, inputs[:1], kinds=["hidden", "block"])
    found = {
        batch: score(
            model,
            list(zip(inputs.split(batch), labels.split(batch), strict=True)),
            spaces=spaces,
            removal="surgeon",
            protection="taylor",
        ).removal
        for batch in (32, 4)
    }
    read: list[Tensor] = []
    for block in list(model)[:2]:
        block.get_submodule("down").register_forward_pre_hook(lambda module, args: read.append(args[0]))
    loss = F.cross_entropy(model(inputs), labels, reduction="sum")
    slopes = torch.autograd.grad(loss, read)
    for unit, (x, g) in enumerate(zip(read, slopes, strict=True)):
        totals = greedy_errors(x.detach().T @ x.detach() / 32, g.T @ g / 32, 5)
        name = f"{unit}.up"
        order = np.argsort(totals)
        grown = np.maximum.accumulate(np.diff(totals[order], prepend=0)) / (3 + 3)  # FLOPs of a unit
        change = float((x.detach() * g).sum(1).square().sum() / 32) / (5 * 6)
        for scores in found.values():
            np.testing.assert_allclose(scores[name][order], grown, rtol=1e-5)
            assert scores["blocks"][unit] == pytest.approx(change)
