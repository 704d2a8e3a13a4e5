"""A call that only looks at a model leaves all state of it, and the example, as they were."""

from __future__ import annotations

import copy
import random
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fairpruner as fp
from fairpruner.models import preserving
from fairpruner.models.calling import copied, evaluating

SIZE = 5


class Anchored(nn.Module):
    """Keeps anchors for the last shape of its input, as Ultralytics' detection head does."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: tuple[int, ...] | None = None
        self.anchors = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.shape != tuple(x.shape):
            self.shape, self.anchors = tuple(x.shape), torch.arange(float(x.shape[0]), dtype=x.dtype)
        return x + self.anchors[:, None].to(x)


class Slotted:
    """An object without a dict of attributes."""

    __slots__ = ("__hidden", "calls", "kept", "late")

    def __init__(self) -> None:
        self.calls, self.kept, self.__hidden = 0, torch.zeros(1), [0]

    def count(self) -> None:
        self.calls += 1
        self.kept += 1
        self.__hidden.append(self.calls)
        self.late = self.calls


class Counting(nn.Module):
    """Writes into a buffer, tensors, an array, a number, containers and objects of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))
        self.kept = torch.zeros(2)
        self.calls = 0
        self.by_name: dict[str, Any] = {"mean": [0.0], "last": torch.zeros(1)}
        self.recent: deque[int] = deque(maxlen=2)
        self.seen: set[int] = set()
        self.own = SimpleNamespace(calls=0, cache=[])
        self.array, self.slotted = np.zeros(2), Slotted()

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.kept.add_(1)
        self.calls += 1
        self.by_name["mean"].append(float(x.detach().mean()))
        self.by_name["last"].fill_(7)
        self.by_name[f"call {self.calls}"] = x.detach().clone()
        self.recent.append(self.calls)
        self.seen.add(self.calls)
        self.own.calls += 1
        self.array += 1
        self.slotted.count()
        self.own.cache.append(x.detach())
        self.new_attribute = x.detach()
        return x


class Activation:
    """An object that a module calls as a function; it counts its calls, three objects deep."""

    def __init__(self) -> None:
        self.log = SimpleNamespace(inner=SimpleNamespace(calls=0))

    def __call__(self, x: Tensor) -> Tensor:
        self.log.inner.calls += 1
        return x


class Calling(nn.Module):
    """Holds objects of own classes and of the standard library, and a tensor that is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = Activation()
        self.by_shape: UserDict[Any, Tensor] = UserDict()
        self.register_buffer("unset", torch.full((1,), float("nan")).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        self.by_shape[len(self.by_shape)] = x.detach()
        return self.activation(x)


class Shared(nn.Module):
    """Its class holds caches, which copies of the model share."""

    tables: ClassVar[dict[int, Tensor]] = {}
    table: Tensor | None = None

    @cache  # noqa: B019 (which is what is tested)
    def ramp(self, length: int) -> Tensor:
        return torch.arange(float(length))

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        if width not in self.tables:
            self.tables[width] = torch.ones(width, dtype=x.dtype)
        if Shared.table is None:
            Shared.table = torch.ones(1, dtype=x.dtype)
        return x * self.tables[width] * Shared.table + 0 * self.ramp(width).to(x)


class Writing(nn.Module):
    """Writes into its parameters, one of them an embedding that shortens its rows as it reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6, max_norm=0.1)
        self.centre = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.centre.lerp_(x.detach().mean(0).to(self.centre), 0.5)
        with torch.no_grad():
            found: Tensor = self.table(torch.arange(len(x)) % 4)
        return x + found.to(x)


class Drawing(nn.Module):
    """Draws random numbers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)
        self.rng = np.random.default_rng(2)
        self.python = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        own = torch.rand(1, generator=self.generator)
        noise = random.random() + np.random.rand() + self.rng.random() + self.python.random()  # noqa: NPY002
        return x + 0 * (torch.rand(1) + own + noise).to(x)


class Hooking(nn.Module):
    """Registers hooks on itself and freezes a weight while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.inner.register_forward_hook(lambda *_: None)
        self.inner.training = True
        x = x + self.scale * self.inner(x)
        self.scale.requires_grad_(False)
        return x


class Normalising(nn.Module):
    """Normalises its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(1).div_(2)


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "cached anchors": Anchored,
    "counters and containers": Counting,
    "objects": Calling,
    "parameters": Writing,
    "random numbers": Drawing,
    "hooks and modes": Hooking,
}


def model_with(part: nn.Module) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 6), part, nn.ReLU(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    model.train()
    model[3].eval()
    model[0].weight.grad = torch.full_like(model[0].weight, 3.0)
    return model


def state_of(value: Any) -> Any:
    """All that a model holds, as values that can be compared."""
    if isinstance(value, Tensor):
        grad = value.grad if value.is_leaf else None
        return (
            str(value.tolist()),  # as text, in which nan equals nan
            value.dtype,
            value.requires_grad,
            value.data_ptr(),
            None if grad is None else (id(grad), grad.tolist()),
        )
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, Mapping):
        return [(key, state_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [state_of(item) for item in value]
    if isinstance(value, (nn.Module, SimpleNamespace, Activation)):
        return [type(value), state_of(vars(value))]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Slotted):
        names = ("_Slotted__hidden", "calls", "kept", "late")
        return [state_of(getattr(value, name, "unset")) for name in names]
    return value if isinstance(value, (int, float, str, set, type(None))) else id(value)


def everything(model: nn.Module) -> Any:
    drawn = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002
    return copy.deepcopy((state_of(model), drawn, torch.backends.mha.get_fastpath_enabled()))


def data() -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(SIZE, 4) + number, torch.arange(SIZE) % 2) for number in range(2)]


def failing(*_: Any) -> Tensor:
    raise ValueError("a loss that fails")


def calls(model: nn.Module, example: Tensor, batches: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every call that only looks, by name."""
    yield "discover", lambda: fp.discover(model, example)
    spaces = fp.discover(model, example)
    plan = fp.Plan.removing(spaces, {"3": (1, 5)})
    yield "score", lambda: fp.score(model, batches, spaces=spaces)
    yield "score by deletion", lambda: fp.score(model, batches, spaces=spaces, protection="deletion")
    yield "score in groups", lambda: fp.score(model, batches, spaces=spaces, groups=2)
    yield "count_params", lambda: fp.count_params(model)
    yield "count_flops", lambda: fp.count_flops(model, example)
    yield "measure", lambda: fp.measure(model, example, batch_sizes=[1], repeats=1, memory=False)
    yield "latency_table", lambda: fp.latency_table(model, example, spaces, repeats=1)
    yield "cut", lambda: fp.cut(model, plan)
    yield "mask", lambda: fp.mask(model, plan)
    methods = ["mean", "least_squares", "sequential", "batchnorm"]
    yield "repair", lambda: fp.repair(fp.cut(model, plan), model, plan, batches, method=methods)
    yield "repair of it", lambda: fp.repair(model, model, fp.Plan.removing(spaces, {}), batches)
    yield "prune", lambda: fp.prune(model, batches, alpha=0.2)


def after_each(part: nn.Module, check: Callable[[str], None], model: nn.Module, example: Tensor) -> None:
    batches = data()
    for name, act in calls(model, example, batches):
        act()
        check(name)


@pytest.mark.parametrize("name", STATEFUL)
def test_looking_leaves_every_state_as_it_was(name: str) -> None:
    model, example = model_with(STATEFUL[name]()), torch.ones(SIZE, 4)
    model(torch.ones(3, 4))  # caches are filled, for a shape of its own
    before = everything(model)

    def check(called: str) -> None:
        assert everything(model) == before, called

    after_each(model[1], check, model, example)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_failing_call_leaves_every_state_as_it_was(name: str) -> None:
    model, example = model_with(STATEFUL[name]()), torch.ones(SIZE, 4)
    spaces = fp.discover(model, example)
    plan = fp.Plan.removing(spaces, {"3": (1, 5)})
    small, before = fp.cut(model, plan), everything(model)
    wrong = torch.ones(SIZE, 3)
    for act in (
        lambda: fp.discover(model, wrong),
        lambda: fp.count_flops(model, wrong),
        lambda: fp.measure(model, wrong, memory=False),
        lambda: fp.score(model, [*data(), (wrong, torch.zeros(SIZE))], spaces=spaces),
        lambda: fp.repair(small, model, plan, [*data(), (wrong, torch.zeros(SIZE))]),
    ):
        with pytest.raises(fp.FairprunerError):
            act()
        assert everything(model) == before
    for act in (
        lambda: fp.score(model, data(), spaces=spaces, loss=failing),
        lambda: fp.repair(small, model, plan, data(), loss=failing),
    ):
        with pytest.raises((ValueError, fp.FairprunerError)):
            act()
        assert everything(model) == before


def test_caches_of_a_class_are_as_before_although_copies_of_the_model_share_them() -> None:
    """In float64, verification would leave tables with which the model fails in float32."""
    model, example = model_with(Shared()), torch.ones(SIZE, 4)
    model.eval()
    for name, act in calls(model, example, data()):
        act()
        assert (Shared.tables, Shared.table) == ({}, None), name
        assert Shared.ramp.cache_info().currsize == 0, name  # holds no copy of the model
    assert model(example).dtype == torch.float32
    assert set(Shared.tables) == {6}


def test_hooks_stay_and_keep_what_they_recorded() -> None:
    """A hook is a way to watch what a call does."""
    model, recorded = model_with(nn.Identity()), []
    model[1].register_forward_hook(lambda *_: recorded.append(1))
    before = everything(model)
    fp.count_flops(model, torch.ones(SIZE, 4))
    assert recorded == [1]
    assert everything(model) == before


def test_a_model_that_normalises_in_place_overwrites_neither_example_nor_batches() -> None:
    model = nn.Sequential(
        Normalising(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)
    )
    example, batches = torch.ones(SIZE, 4), data()
    for name, act in calls(model, example, batches):
        act()
        assert torch.equal(example, torch.ones(SIZE, 4)), name
        assert all(torch.equal(x, y) for (x, _), (y, _) in zip(batches, data(), strict=True)), name
    fp.recover(model, batches, epochs=1)
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(batches, data(), strict=True))


def test_every_form_of_example_is_copied_whole() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys = [torch.zeros(2)]

    shared, cache = torch.zeros(3, 2)[:, 0], Cache()
    own = copied({"a": shared, "b": (shared, [1, "text"]), "cache": cache, "none": None})
    assert own["a"] is own["b"][0]  # one tensor stays one tensor
    assert own["b"][1] == [1, "text"]
    own["a"].add_(1)
    own["cache"].keys[0].add_(1)
    own["cache"].keys.append(1)
    assert not shared.any()
    assert len(cache.keys) == 1
    assert not cache.keys[0].any()


def test_a_write_into_parameters_too_large_to_copy_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is copied when an operation is about to write into it, and only then."""
    monkeypatch.setattr(preserving, "COPIED_PARAMETERS", 0)
    model = model_with(Writing())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    copied = []
    usual = preserving._values
    monkeypatch.setattr(preserving, "_values", lambda t: copied.append(t) or usual(t))
    with evaluating(model), torch.no_grad():
        model(torch.ones(3, 4))
        model[0].weight.data.view(-1)[:2] = 7.0
    with evaluating(model), torch.inference_mode():
        model[0].bias.mul_(2)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    untouched = model[3].weight
    assert any(t is model[0].weight for t in copied)
    assert not any(t is untouched for t in copied)


@pytest.mark.parametrize("removed", [{}, {"0": (1, 5)}])
def test_cut_and_mask_keep_the_memory_format_of_weights(removed: dict[str, tuple[int, ...]]) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3, groups=2)
    ).to(memory_format=torch.channels_last)
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(torch.randn(4, 4).t())  # a matrix that lies by columns
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear])
    plan = fp.Plan.removing(fp.discover(model, torch.zeros(1, 3, 8, 8)), removed)
    for made in (fp.cut(model, plan), fp.mask(model, plan)):
        for name, parameter in made.named_parameters():
            expected = torch.empty(parameter.shape)
            if expected.ndim == 4:
                expected = expected.to(memory_format=torch.channels_last)
            if name == "7.weight":
                expected = torch.empty(4, 4).t()
            assert parameter.stride() == expected.stride(), name


class KeepsItsLoss(nn.Module):
    """Keeps a tensor with a gradient history from its last call, as blocks of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        self.loss = x.square().mean()
        return x


def test_a_model_that_keeps_a_loss_with_its_history_can_be_cut_repaired_and_recovered() -> None:
    model = model_with(KeepsItsLoss())
    plan = fp.Plan.removing(fp.discover(model, torch.ones(SIZE, 4)), {"3": (1, 5)})
    model(torch.ones(SIZE, 4))
    small = fp.cut(model, plan)
    small(torch.ones(SIZE, 4))
    repaired = fp.repair(small, model, plan, data())
    repaired(torch.ones(SIZE, 4))
    fp.recover(repaired, data(), epochs=1, teacher=model)


class Resizing(nn.Module):
    """Resizes a buffer at its first call, as observers of quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))

    def forward(self, x: Tensor) -> Tensor:
        if not self.low.numel():
            self.low.resize_(x.shape[1]).copy_(x.detach().amin(0))
        return x


def test_a_buffer_that_was_resized_has_its_old_size_again() -> None:
    model = model_with(Resizing())
    fp.discover(model, torch.ones(SIZE, 4))
    fp.count_flops(model, torch.ones(SIZE, 4))
    assert model[1].low.shape == (0,)


def test_a_spectral_norm_in_train_mode_keeps_its_buffers() -> None:
    """Reading its weight would take a step of its power iteration."""
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), normed).train()
    before = copy.deepcopy(model.state_dict())
    spaces = fp.discover(model, torch.randn(2, 4))
    fp.cut(model, fp.Plan.removing(spaces, {spaces.names[0]: (0,)}))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_float_functionals_of_a_model_that_will_be_quantised_are_no_obstacle() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.out = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)
            self.sum = torch.ao.nn.quantized.FloatFunctional()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.sum.add(self.one(x), self.two(x)).relu())

    model, x = Summed().double().eval(), torch.randn(2, 4).double()
    spaces = fp.discover(model, x)
    plan = fp.Plan.removing(spaces, {spaces.names[0]: (0, 3)})
    torch.testing.assert_close(fp.cut(model, plan)(x), fp.mask(model, plan)(x))
