"""Models with tensors, modules and examples of rare kinds are pruned, or refused in one sentence."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fairpruner as fp

X = torch.randn(3, 4)


class Plain(nn.Module):
    """[batch, 4] -> [batch, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Any) -> Tensor:
        return self.two(self.one(x).relu())


class RunningMean(Plain):
    """Writes into a buffer while gradients are on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).relu()
        self.mean.mul_(0.9).add_(0.1 * hidden.mean(0))
        return self.two(hidden + self.mean)


def test_a_buffer_with_a_history_is_one_sentence_and_the_model_is_as_before() -> None:
    model = RunningMean()
    with pytest.raises(fp.FairprunerError, match="The backward pass failed on batch 1"):
        fp.score(model, [(X, torch.tensor([0, 1, 0]))] * 2)
    assert model.mean.is_leaf
    assert not model.mean.requires_grad
    assert not model.mean.any()
    copy.deepcopy(model)


def test_a_view_with_a_history_is_one_sentence() -> None:
    model = RunningMean()
    model.mean = torch.zeros(2, 8)[0]
    with pytest.raises(fp.FairprunerError, match=r"into a tensor \[8\] that it holds.* a clone"):
        fp.score(model, [(X, torch.tensor([0, 1, 0]))] * 2)


class WithoutElements(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(1, 0, 8))
        self.register_buffer("bank", torch.empty(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.prompt.sum() + self.bank.sum()


class HalfComplex(Plain):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # complex32 is experimental
            self.register_buffer("phase", torch.zeros(3, dtype=torch.complex32))


class Mapped(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.vmap(self.one)(x).relu())


@pytest.mark.parametrize("kind", [WithoutElements, HalfComplex, Mapped])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_rare_tensors_are_no_obstacle(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    spaces = fp.discover(model, X)
    assert spaces.names == ("one",)
    plan = fp.Plan.removing(spaces, {"one": (0, 3)})
    assert torch.allclose(fp.cut(model, plan)(X), fp.mask(model, plan)(X), atol=1e-6)


class Graph(Plain):
    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        return self.two(torch.mm(neighbours, self.one(x)).relu())


def test_a_sparse_tensor_in_the_example_is_no_obstacle() -> None:
    model, example = Graph(), (X, torch.eye(3).to_sparse())
    plan = fp.Plan.removing(fp.discover(model, example), {"one": (0, 3)})
    assert torch.allclose(fp.cut(model, plan)(*example), fp.mask(model, plan)(*example), atol=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_in_the_example_is_one_sentence() -> None:
    with pytest.raises(fp.FairprunerError, match="Plain called with float32 nested raised"):
        fp.discover(Plain(), torch.nested.nested_tensor([X, X[:2]]))


class Dotted(dict[str, Any]):
    """A dict whose items are attributes too."""

    __getattr__ = dict.__getitem__


class FromDotted(Plain):
    def forward(self, x: Dotted) -> Tensor:
        return super().forward(x.image)


def test_a_mapping_in_the_example_keeps_its_class() -> None:
    assert fp.discover(FromDotted(), (Dotted(image=X),)).names == ("one",)


def test_a_default_device_is_not_that_of_the_model() -> None:
    model = Plain()
    torch.set_default_device("meta")
    try:
        plan = fp.Plan.removing(fp.discover(model, X), {"one": (0, 3)})
        small, full = fp.cut(model, plan), fp.mask(model, plan)
    finally:
        torch.set_default_device(None)
    assert torch.allclose(small(X), full(X), atol=1e-6)


class Sorted(nn.Module):
    """Takes the lengths of its sequences, the longest first."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.last = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.last(nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0])


def test_an_example_that_cannot_be_drawn_is_asked_for(tmp_path: Path) -> None:
    model, example = Sorted(), (torch.randn(3, 6, 4), torch.tensor([6, 4, 2]))
    plan = fp.Plan.removing(fp.discover(model, example), {"recurrent": (0, 3)})
    fp.save(fp.cut(model, plan), plan, tmp_path / "small")
    with pytest.raises(fp.FairprunerError, match="give one by example="):
        fp.load(tmp_path / "small", build=Sorted)
    fp.load(tmp_path / "small", build=Sorted, example=example)


class Adapter(nn.Module):
    """A layer with an addition of low rank, whose sizes are those of the layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    weight = property(lambda self: self.base.weight)
    in_features = property(lambda self: self.base.in_features)
    out_features = property(lambda self: self.base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Packed(Adapter):
    @property
    def weight(self) -> Tensor:
        raise NotImplementedError("the weight is packed")


@pytest.mark.parametrize("kind", [Adapter, Packed])
def test_layers_inside_of_a_wrapper_with_read_only_sizes_are_cut(kind: type[Adapter]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), kind(nn.Linear(8, 9)), nn.ReLU(), nn.Linear(9, 2))
    spaces = fp.discover(model, X)
    assert set(spaces.names) == {"0", "2.base", "2.down"}
    small = fp.cut(model, fp.Plan.removing(spaces, {"0": (1,), "2.base": (0, 8)}))
    assert (small[2].in_features, small[2].out_features) == (7, 7)
