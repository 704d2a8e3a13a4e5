"""Fine-tuning: against training loops written out by hand, and against every way to be stopped."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import recovery_job
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from recovery_job import PROCESSES, killed_at, run, two_ranks
from safetensors.torch import load_file
from scipy.special import softmax
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import fairpruner as fp
import fairpruner.recovery.launch
import fairpruner.recovery.training
from fairpruner.inputs.activations import BlockOutputs
from fairpruner.inputs.batches import Batch
from fairpruner.recovery import recover
from fairpruner.recovery.averaging import ema_of
from fairpruner.recovery.checkpoints import FILE
from fairpruner.recovery.data import shard, steps_of
from fairpruner.recovery.history import Epoch
from fairpruner.recovery.loss import training_loss
from fairpruner.recovery.recipe import SCHEDULES, Recipe

Batches = list[tuple[Tensor, Tensor]]


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def some_data(batches: int = 4, size: int = 8) -> Batches:
    return [(torch.randn(size, 4), torch.randint(0, 3, (size,))) for _ in range(batches)]


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same(a: nn.Module, b: nn.Module) -> bool:
    return equal(a.state_dict(), b.state_dict())


def by_hand(model: nn.Module, data: Batches, epochs: int) -> Iterator[nn.Module]:
    """The paper's fine-tuning, written out: the model after each step."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.005, momentum=0.9)
    steps = len(data) * epochs
    for step, (x, y) in enumerate(data * epochs):
        optimizer.param_groups[0]["lr"] = 0.005 * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield model


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts() -> Iterator[None]:
    """As in a terminal; a job in the background ignores it."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.fixture
def _no_accelerator() -> Iterator[None]:
    """As in a process in which no accelerator was made."""
    states = (AcceleratorState, GradientState, PartialState)
    kept = [dict(state._shared_state) for state in states]
    for state in states:
        state._shared_state.clear()
    yield
    for state, values in zip(states, kept, strict=True):
        state._shared_state.clear()
        state._shared_state.update(values)


# ── the recipe ──────────────────────────────────────────────────────────────────────────────────


def test_the_default_is_the_papers_recipe() -> None:
    net, data = small_net(), some_data()
    *_, expected = by_hand(net, data, epochs=3)
    assert same(recover(net, data, epochs=3), expected)


def test_ema_is_the_running_average_of_the_weights() -> None:
    net, data = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), some_data()
    average = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for model in by_hand(net, data, epochs=2):
        for name, tensor in model.state_dict().items():
            average[name] = (
                0.9 * average[name] + 0.1 * tensor if tensor.is_floating_point() else tensor.clone()
            )
    found = recover(net, data, epochs=2, recipe=Recipe(ema=0.9)).state_dict()
    for name in average:
        torch.testing.assert_close(found[name], average[name])
    assert found["1.num_batches_tracked"] == 8


def test_ema_copies_integer_buffers() -> None:
    """torch averages integers too and truncates: with this decay, 280 of 1,000 constants would change."""
    net = nn.Linear(1, 1)
    net.register_buffer("index", torch.arange(1000))
    average = ema_of(net, decay=0.9)
    average.update_parameters(net)
    assert torch.equal(average.module.index, net.index)


def test_label_smoothing_is_torchs_own() -> None:
    logits, labels = torch.randn(5, 3), torch.randint(0, 3, (5,))
    loss = training_loss(
        Recipe(label_smoothing=0.2), logits, Batch(torch.zeros(5, 4), labels, 0), teacher=None
    )
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, label_smoothing=0.2))


def test_label_smoothing_by_hand() -> None:
    logits = torch.tensor([[math.log(0.7), math.log(0.2), math.log(0.1)]])
    loss = training_loss(
        Recipe(label_smoothing=0.3), logits, Batch(torch.zeros(1, 4), torch.tensor([0]), 0), teacher=None
    )
    assert float(loss) == pytest.approx(-(0.8 * math.log(0.7) + 0.1 * math.log(0.2) + 0.1 * math.log(0.1)))


def test_distillation_by_hand() -> None:
    student, wanted, labels = (
        torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 1.0]]),
        torch.tensor([[1.0, 1.0, 0.0], [0.0, 3.0, 0.0]]),
        torch.tensor([0, 1]),
    )

    class Teacher(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return wanted

    loss = training_loss(
        Recipe(distillation=0.25, temperature=2.0), student, Batch(torch.zeros(2, 4), labels, 0), Teacher()
    )
    p, q = softmax(wanted.numpy() / 2, axis=1), softmax(student.numpy() / 2, axis=1)  # [2, 3]
    divergence = (p * np.log(p / q)).sum(1).mean()
    assert float(loss) == pytest.approx(
        0.75 * float(F.cross_entropy(student, labels)) + 0.25 * 4 * divergence, rel=1e-5
    )


def test_a_model_distilled_from_itself_alone_stays_as_it_is() -> None:
    net, data = small_net(), some_data()
    found = recover(net, data, epochs=2, teacher=net, recipe=Recipe(distillation=1.0, learning_rate=0.5))
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor)


def test_distillation_leads_to_the_teacher() -> None:
    net, teacher = small_net(), small_net()
    data = [(torch.randn(32, 4), torch.zeros(32, dtype=torch.long)) for _ in range(20)]
    before = copy.deepcopy(teacher.state_dict())
    found = recover(
        net,
        data,
        epochs=20,
        teacher=teacher,
        recipe=Recipe(distillation=1.0, learning_rate=1.0, temperature=1.0),
    )

    def distance(model: nn.Module) -> float:
        x = data[0][0]
        return (model(x).softmax(1) - teacher(x).softmax(1)).abs().mean().item()

    assert distance(found) < 0.1 * distance(net)
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())


@pytest.mark.parametrize(
    ("name", "done", "factor"),
    [("cosine", 0.5, 0.5), ("cosine", 1 / 3, 0.75), ("linear", 0.25, 0.75), ("constant", 0.9, 1.0)],
)
def test_schedules(name: str, done: float, factor: float) -> None:
    assert SCHEDULES[name](done) == pytest.approx(factor)


def test_own_optimizer_loss_and_schedule() -> None:
    net, data = small_net(), [(x, x.sum(1, keepdim=True)) for x, _ in some_data()]

    def own_optimizer(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": parameters[:2], "lr": 0.0}, {"params": parameters[2:]}], recipe.learning_rate
        )

    def own_loss(output: Tensor, label: Tensor) -> Tensor:
        return (output.mean(1, keepdim=True) - label).square().mean()

    recipe = Recipe(
        optimizer=own_optimizer, learning_rate=0.1, schedule=lambda done: float(done == 0), loss=own_loss
    )
    history: list[Epoch] = []
    found = recover(net, data, epochs=2, recipe=recipe, on_epoch=history.append)
    own_loss(net(data[0][0]), data[0][1]).backward()  # the only step that moves anything
    assert torch.equal(found[0].weight, net[0].weight)
    torch.testing.assert_close(found[2].weight, net[2].weight - 0.1 * net[2].weight.grad)
    assert history[0].accuracy is None
    assert history[0].learning_rate == 0


def test_data_of_unknown_length_changes_the_rate_between_epochs() -> None:
    class Unsized:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter(some_data(3))

    history: list[Epoch] = []
    recover(
        small_net(),
        Unsized(),
        epochs=4,
        recipe=Recipe(schedule="linear", learning_rate=0.4),
        on_epoch=history.append,
    )
    assert [epoch.learning_rate for epoch in history] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_accumulated_batches_are_one_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    net, data = small_net(), some_data(6, size=4)
    large = [
        (torch.cat([a, c]), torch.cat([b, d])) for (a, b), (c, d) in zip(data[::2], data[1::2], strict=True)
    ]
    expected = recover(net, large, epochs=2, recipe=Recipe(schedule="constant", ema=0.5))
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    found = recover(net, data, epochs=2, recipe=Recipe(schedule="constant", ema=0.5))
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor)


# ── what is kept, and what is left alone ────────────────────────────────────────────────────────


def test_the_best_epoch_by_validation_is_kept() -> None:
    net, data = small_net(), some_data()
    history: list[Epoch] = []
    worse = Recipe(
        schedule=lambda done: 5.0 if done < 0.5 else -50.0, learning_rate=0.05
    )  # uphill in the second half
    found = recover(net, data, epochs=4, validation=data, recipe=worse, on_epoch=history.append)
    losses = [epoch.validation_loss for epoch in history]
    best = max(range(4), key=lambda i: (history[i].validation_accuracy, -losses[i]))
    assert best in (0, 1)
    assert losses[3] > 2 * losses[best]
    with torch.no_grad():
        loss = float(sum(F.cross_entropy(found(x), y) for x, y in data) / len(data))
        accuracy = float(torch.cat([found(x).argmax(1) == y for x, y in data]).double().mean())
    assert loss == pytest.approx(losses[best])
    assert accuracy == pytest.approx(history[best].validation_accuracy)


def test_numbers_of_an_epoch_weigh_samples_not_batches() -> None:
    net = small_net()
    data = [some_data(1, size)[0] for size in (8, 3)]
    history: list[Epoch] = []
    recover(net, data, epochs=1, validation=data, recipe=Recipe(learning_rate=1e-12), on_epoch=history.append)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    assert history[0].loss == pytest.approx(F.cross_entropy(net(x), y).item(), rel=1e-5)
    assert history[0].validation_loss == pytest.approx(history[0].loss, rel=1e-5)
    assert history[0].validation_accuracy == pytest.approx(float((net(x).argmax(1) == y).double().mean()))


def test_everything_given_is_left_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).eval()
    net[0].requires_grad_(False)
    before, data = copy.deepcopy(net), some_data()
    handler, python, array, state = (
        signal.getsignal(signal.SIGINT),
        random.getstate(),
        np.random.get_state()[1].copy(),  # noqa: NPY002
        torch.get_rng_state(),
    )
    found = recover(net, data, epochs=1, teacher=net)
    assert same(net, before)
    assert all(p.grad is None for p in net.parameters())
    assert signal.getsignal(signal.SIGINT) is handler
    assert random.getstate() == python
    assert (np.random.get_state()[1] == array).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), state)
    assert [(type(m), m.training) for m in found.modules()] == [(type(m), m.training) for m in net.modules()]
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in net.parameters()]
    assert torch.equal(found[0].weight, net[0].weight)
    assert not torch.equal(found[3].weight, net[3].weight)


def test_the_seed_decides_the_order_of_the_data() -> None:
    net = small_net()
    x, y = (torch.cat(parts) for parts in zip(*some_data(), strict=True))

    def trained(seed: int, generator: torch.Generator | None = None) -> nn.Module:
        loader = DataLoader(TensorDataset(x, y), 8, shuffle=True, generator=generator)
        torch.manual_seed(random.randrange(1000))  # the state outside must not matter
        return recover(net, loader, epochs=2, recipe=Recipe(seed=seed))

    assert same(trained(1), trained(1))
    assert not same(trained(1), trained(2))
    assert same(trained(1, torch.Generator().manual_seed(3)), trained(1, torch.Generator().manual_seed(4)))


def test_generators_of_a_loader_are_left_alone() -> None:
    x, y = (torch.cat(parts) for parts in zip(*some_data(), strict=True))
    of_loader, of_sampler = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    shuffled = RandomSampler(x, generator=of_sampler)
    loader = DataLoader(TensorDataset(x, y), 8, sampler=shuffled, generator=of_loader)
    before = [generator.get_state() for generator in (of_loader, of_sampler)]
    recover(small_net(), loader, epochs=2, validation=loader)
    with pytest.raises(fp.FairprunerError, match="does not fit the model"):
        recover(nn.Linear(5, 3), loader, epochs=1)
    for generator, state in zip((of_loader, of_sampler), before, strict=True):
        assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_computed_where_the_caller_needs_none(mode: Callable[[], Any]) -> None:
    net, data = small_net(), some_data()
    expected = recover(net, data, epochs=1, validation=data)
    with mode():
        found = recover(net, data, epochs=1, validation=data)
        assert not torch.is_grad_enabled()
    assert same(found, expected)
    F.cross_entropy(found(data[0][0]), data[0][1]).backward()  # the result is no inference tensor


def test_dict_batches_and_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.second(self.first(x).tanh())}

    found = recover(Tied(), [{"x": x, "labels": y} for x, y in some_data()], epochs=1)
    assert isinstance(found, Tied)
    assert found.first.weight is found.second.weight


def test_a_cut_model_is_recovered_and_saved(tmp_path: Path) -> None:
    net = small_net()
    plan = fp.Plan.removing(fp.discover(net, torch.zeros(1, 4)), {"0": (1, 2)})
    found = recover(fp.cut(net, plan), some_data(), epochs=1)
    fp.save(found, plan, tmp_path / "model")
    assert same(fp.load(tmp_path / "model", build=small_net), found)


# ── stopped and gone on ─────────────────────────────────────────────────────────────────────────

MOMENTS = [
    ("step", 2),
    ("step", 9),
    ("step", 10),
    ("step", 17),
    ("average", 5),
    ("validation", 1),
    ("validation", 4),
    ("save", 4),
    ("write", 1),
    ("write", 5),
    ("rename", 4),
]


@pytest.fixture(scope="module")
def unbroken() -> dict[str, Tensor]:
    torch.set_num_threads(1)
    return run(None)


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "number"), MOMENTS, ids=lambda value: str(value))
def test_a_killed_run_goes_on_bit_for_bit(
    moment: str, number: int, unbroken: dict[str, Tensor], tmp_path: Path
) -> None:
    assert killed_at(tmp_path, moment, number) == -signal.SIGKILL
    assert killed_at(tmp_path, None) == 0
    assert equal(load_file(tmp_path / "result.safetensors"), unbroken)
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE, "result.safetensors"]


@pytest.mark.slow
def test_a_run_killed_again_and_again_at_any_time(unbroken: dict[str, Tensor], tmp_path: Path) -> None:
    rng, kills = random.Random(0), 0
    for attempt in range(40):
        process = PROCESSES.Process(target=recovery_job._job, args=(tmp_path, None, 0))
        process.start()
        process.join(
            rng.uniform(0.05, 0.1) * 1.2**attempt
        )  # longer and longer, so that a busy machine gets there too
        if process.exitcode is None:
            process.kill()
            kills += 1
        process.join()
        if process.exitcode == 0:
            break
    assert kills
    assert equal(load_file(tmp_path / "result.safetensors"), unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("workers", [0, 1])
def test_ctrl_c_saves_and_says_how_to_go_on(
    optimizer: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(optimizer=optimizer, learning_rate=0.01, checkpoint_every=1000)
    expected = run(None, recipe=recipe, workers=workers)
    with monkeypatch.context() as patch:
        patch.setattr(
            fairpruner.recovery.training, "training_loss", fairpruner.recovery.training.training_loss
        )  # so that it is put back
        recovery_job.before("step", 13, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(
            KeyboardInterrupt,
            match=(
                r"Stopped in epoch 2 of 2, 4 batches into it, and saved as .*checkpoint.safetensors: run the"
                r" same again to resume\."
            ),
        ):
            run(tmp_path, recipe=recipe, workers=workers)
    assert equal(run(tmp_path, recipe=recipe, workers=workers), expected)


def test_ctrl_c_without_a_folder() -> None:
    def interrupting(output: Tensor, label: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        return F.cross_entropy(output, label)

    with pytest.raises(KeyboardInterrupt, match="nothing was saved, because no folder was given"):
        recover(small_net(), some_data(), epochs=1, recipe=Recipe(loss=interrupting))


def test_a_second_ctrl_c_stops_at_once() -> None:
    def interrupting(output: Tensor, label: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("still here")

    with pytest.raises(KeyboardInterrupt) as stopped:
        recover(small_net(), some_data(), epochs=1, recipe=Recipe(loss=interrupting))
    assert "Stopped" not in str(stopped.value)


def test_where_ctrl_c_is_ignored_it_stays_so() -> None:
    def interrupting(output: Tensor, label: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        return F.cross_entropy(output, label)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    recover(small_net(), some_data(), epochs=1, recipe=Recipe(loss=interrupting))
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_finished_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, data = small_net(), some_data()
    first: list[Epoch] = []
    again: list[Epoch] = []
    found = recover(net, data, epochs=3, validation=data, folder=tmp_path, on_epoch=first.append)
    # no step can be made any more
    monkeypatch.setattr(fairpruner.recovery.training, "training_loss", None)
    assert same(recover(net, data, epochs=3, validation=data, folder=tmp_path, on_epoch=again.append), found)
    assert first == again
    assert [epoch.number for epoch in first] == [1, 2, 3]


def test_the_best_epoch_so_far_is_gone_on_with(tmp_path: Path) -> None:
    net, data = small_net(), some_data()
    worse = Recipe(schedule=lambda done: 5.0 if done < 0.5 else -50.0, learning_rate=0.05)
    history: list[Epoch] = []

    def interrupt(epoch: Epoch) -> None:
        history.append(epoch)
        if len(history) == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="Stopped in epoch 4 of 4, 0 batches into it"):
        recover(net, data, epochs=4, validation=data, recipe=worse, folder=tmp_path, on_epoch=interrupt)
    assert history[2].validation_loss > history[1].validation_loss
    assert same(
        recover(net, data, epochs=4, validation=data, recipe=worse, folder=tmp_path),
        recover(net, data, epochs=4, validation=data, recipe=worse),
    )


def test_resuming_with_accumulated_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    net, data = small_net(), some_data(5)  # accumulation runs over the end of an epoch
    calls = itertools.count(1)

    def loss(output: Tensor, label: Tensor) -> Tensor:
        if next(calls) == 7:
            signal.raise_signal(signal.SIGINT)
        return F.cross_entropy(output, label)

    with pytest.raises(KeyboardInterrupt, match="epoch 2 of 3, 3 batches into it"):
        recover(net, data, epochs=3, recipe=Recipe(loss=loss), folder=tmp_path)
    found = recover(net, data, epochs=3, recipe=Recipe(loss=loss), folder=tmp_path)
    assert same(found, recover(net, data, epochs=3, recipe=Recipe(loss=loss)))


@pytest.mark.parametrize(("accumulated", "positions"), [(1, [0, 2, 4, 6, 0]), (3, [0, 3, 6, 0])])
def test_a_checkpoint_every_few_steps(
    accumulated: int, positions: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str(accumulated))
    saved: list[int] = []
    monkeypatch.setattr(
        fairpruner.recovery.training,
        "save_checkpoint",
        lambda checkpoint, folder, settings: saved.append(checkpoint.content["position"]),
    )
    recover(small_net(), some_data(7), epochs=1, recipe=Recipe(checkpoint_every=2), folder=tmp_path)
    assert saved == positions  # the first at the start, the last at the end


def test_no_pickle_is_written(tmp_path: Path) -> None:
    recover(small_net(), some_data(), epochs=1, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    content = json.loads(header["__metadata__"]["fairpruner"])["content"]
    assert content["epoch"] == 1
    assert {name.partition("/")[0] for name in header} == {"__metadata__", "model", "best", "optimizer"}


# ── more than one process, and other precisions ─────────────────────────────────────────────────


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = two_ranks(tmp_path, port)
    for again in two_ranks(tmp_path, port):  # resumed, although each process reads other batches
        assert equal(again, first | {"draw": again["draw"]})
    draws = [rank.pop("draw").item() for rank in (first, second)]
    assert equal(first, second)
    assert not torch.equal(first["0.weight"], recovery_job.net().state_dict()["0.weight"])
    assert (tmp_path / "checkpoints" / FILE).exists()
    assert draws[0] != draws[1]
    data = recovery_job.plain_data()
    double = [
        (torch.cat([a, c]), torch.cat([b, d])) for (a, b), (c, d) in zip(data[:6:2], data[1:6:2], strict=True)
    ]
    for name, tensor in recover(recovery_job.plain_net(), double, epochs=2).named_parameters():
        torch.testing.assert_close(first[f"plain.{name}"], tensor.detach())


@pytest.mark.usefixtures("_no_accelerator")
def test_processes_that_would_train_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    Accelerator()  # accelerate has settled on one process
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(fp.FairprunerError, match="2 processes were launched, but accelerate joined 1"):
        recover(small_net(), some_data(), epochs=1)


@pytest.mark.usefixtures("_no_accelerator")
def test_an_accelerator_can_be_made_afterwards() -> None:
    recover(small_net(), some_data(), epochs=1)
    with pytest.raises(fp.FairprunerError, match="does not fit the model"):
        recover(small_net(), [(torch.zeros(8, 5), torch.zeros(8).long())], epochs=1)
    assert Accelerator(mixed_precision="bf16").mixed_precision == "bf16"


@pytest.mark.usefixtures("_no_accelerator")
def test_an_accelerator_of_the_caller_is_left_alone() -> None:
    mine = Accelerator(gradient_accumulation_steps=3)
    states = (AcceleratorState, GradientState, PartialState)
    before = [dict(state._shared_state) for state in states]
    recover(small_net(), some_data(), epochs=1)
    assert [dict(state._shared_state) for state in states] == before
    assert mine.gradient_accumulation_steps == 3


def test_processes_get_batches_in_turn() -> None:
    data = [1, 2, 3, 4, 5]
    assert [list(shard(data, rank, 2, even=True)) for rank in (0, 1)] == [[1, 3], [2, 4]]
    assert [list(shard(data, rank, 2, even=False)) for rank in (0, 1)] == [[1, 3, 5], [2, 4]]
    assert [steps_of(shard(data, rank, 2, even=even)) for even in (True, False) for rank in (0, 1)] == [
        2,
        2,
        3,
        2,
    ]
    loader = DataLoader(TensorDataset(torch.arange(10)), 2)
    parts = [[x.tolist() for (x,) in shard(loader, rank, 2, even=False)] for rank in (0, 1)]
    assert parts == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]
    assert [len(list(shard(loader, rank, 2, even=True))) for rank in (0, 1)] == [3, 3]


class Spy(nn.Linear):
    """Notes the types of its outputs."""

    seen: ClassVar[list[torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen.append(out.dtype)
        return out


@pytest.mark.usefixtures("_no_accelerator")
def test_mixed_precision_leaves_a_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Spy.seen
    seen.clear()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    found = recover(nn.Sequential(nn.Linear(4, 6), Spy(6, 3)), some_data(), epochs=1, teacher=small_net())
    assert set(seen) == {torch.bfloat16}
    assert "forward" not in vars(found)
    assert {p.dtype for p in found.parameters()} == {torch.float32}


def test_a_callers_autocast_does_not_train_with_the_weights_of_the_first_step() -> None:
    torch.manual_seed(0)
    net, data, recipe = small_net(), some_data(), Recipe(precision="bfloat16", learning_rate=0.5)
    expected = recover(net, data, epochs=2, recipe=recipe)
    with torch.autocast("cpu", torch.bfloat16):  # keeps the weights that it has cast
        found = recover(net, data, epochs=2, recipe=recipe)
    assert same(found, expected)


def test_the_short_recipe_is_in_bfloat16_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Spy.seen
    seen.clear()

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        assert output.dtype == torch.float32
        return F.cross_entropy(output, labels)

    net = nn.Sequential(nn.Linear(4, 6), Spy(6, 3))
    recipe = replace(Recipe.short_for(net), loss=loss)
    for faster, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(fairpruner.recovery.launch, "multiplies_bfloat16", lambda _, f=faster: f)
        found = recover(
            net, some_data(), epochs=1, validation=some_data(), teacher=small_net(), recipe=recipe
        )
        assert set(seen) == {dtype}
        assert {p.dtype for p in found.parameters()} == {torch.float32}
        seen.clear()
    recover(
        net.double(), [(x.double(), y) for x, y in some_data()], epochs=1, recipe=Recipe(precision="auto")
    )
    assert set(seen) == {torch.float64}


def test_the_short_recipe_suits_the_model() -> None:
    convolutional = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    transformer = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert Recipe.short_for(convolutional).optimizer == "sgd"
    assert Recipe.short_for(transformer).optimizer == "adamw"
    rates = [Recipe.short_for(net, near=True).learning_rate for net in (convolutional, transformer)]
    assert rates == [1e-3, 1e-4]


@pytest.mark.parametrize(("distillation", "matching"), [(0.9, 0.1), (0.7, 0.3), (0.0, 1.0), (1.0, 0.0)])
def test_shares_that_sum_to_one_leave_nothing_for_labels(distillation: float, matching: float) -> None:
    assert Recipe(distillation=distillation, matching=matching).label_weight == 0


# ── matching ────────────────────────────────────────────────────────────────────────────────────


class Nested(nn.Module):
    """A block, and the model around it: both outputs are matched."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.block(x)))


MATCHING = Recipe(optimizer="adamw", learning_rate=0.01, distillation=0.0, matching=1.0)


def test_matching_by_hand() -> None:
    net, teacher = Nested().eval(), Nested().eval()
    batch = Batch(torch.randn(8, 4), torch.zeros(8).long(), 0)
    with BlockOutputs(net, ["", "block"]) as outputs:
        output = net(batch.inputs)
    recipe = Recipe(distillation=0.0, matching=0.75)
    loss = training_loss(recipe, output, batch, teacher, outputs.taken()).detach()
    pairs = (
        (output, teacher(batch.inputs)),
        (net.block(batch.inputs), teacher.block(batch.inputs)),
    )
    errors = torch.stack([(mine - theirs).square().sum() / theirs.square().sum() for mine, theirs in pairs])
    expected = 0.25 * F.cross_entropy(output, batch.labels) + 0.75 * errors.mean()
    torch.testing.assert_close(loss, expected.detach())


def test_matching_leads_to_the_teachers_blocks_and_needs_no_labels() -> None:
    net, teacher = Nested(), Nested()
    with torch.no_grad():
        net.block[1].running_mean.uniform_(-1, 1)
    inputs = torch.randn(320, 4)
    found = recover(net, list(inputs.split(32)), epochs=40, teacher=teacher, recipe=MATCHING)

    @torch.no_grad()
    def distance(model: nn.Module) -> float:
        mine, theirs = model.eval().block(inputs), teacher.eval().block(inputs)
        return float((mine - theirs).square().mean())

    assert distance(found) < 0.02 * distance(net)
    for name in ("running_mean", "running_var", "num_batches_tracked"):  # the statistics are kept
        assert torch.equal(getattr(found.block[1], name), getattr(net.block[1], name)), name


def test_matching_leaves_out_blocks_of_another_width() -> None:
    net, teacher = Nested(), Nested()
    teacher.block, teacher.head = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9)), nn.Linear(9, 3)
    found = recover(net, some_data(), epochs=30, teacher=teacher, recipe=MATCHING)
    x = torch.cat([x for x, _ in some_data()])
    before, after = ((model.eval()(x) - teacher.eval()(x)).square().mean() for model in (net, found))
    assert after < 0.2 * before
    with pytest.raises(fp.FairprunerError, match="No block of the teacher gives tensors of the same shape"):
        recover(net, some_data(), epochs=1, teacher=nn.Linear(4, 5), recipe=MATCHING)


# ── wrong input ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"optimizer": "sdg"}, "Unknown optimizer 'sdg': did you mean 'sgd'"),
        ({"schedule": "cosinus"}, "did you mean 'cosine'"),
        ({"precision": "fp16"}, "Unknown precision 'fp16'"),
        ({"learning_rate": 0}, "learning_rate=0, expected a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"weight_decay": -1}, "weight_decay=-1"),
        ({"label_smoothing": 1.0}, r"label_smoothing=1.0, expected a share in \[0, 1\)"),
        ({"ema": 1.0}, "ema=1.0, expected a decay"),
        ({"distillation": "half"}, "distillation='half'"),
        ({"distillation": 0.5, "matching": 0.75}, "expected a sum of at most 1"),
        ({"matching": -0.1}, "matching=-0.1, expected a share"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"seed": 0.5}, "seed=0.5, expected a whole number"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
        ({"checkpoint_every": True}, "checkpoint_every=True"),
        ({"loss": F.cross_entropy, "label_smoothing": 0.1}, "give one of the two"),
    ],
)
def test_a_wrong_recipe(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fp.FairprunerError, match=sentence):
        Recipe(**settings)


DIVERGING = Recipe(learning_rate=1e10, loss=lambda output, label: output.square().mean())


class _Empty:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("train", "arguments", "sentence"),
    [
        (some_data(), {"epochs": 0}, "epochs=0, expected a whole number of at least 1"),
        (some_data(), {"epochs": True}, "epochs=True"),
        ([], {"epochs": 1}, "training data holds no samples"),
        (_Empty(), {"epochs": 1}, "training data holds no samples"),
        (some_data(), {"epochs": 1, "validation": []}, "validation data holds no samples"),
        (iter(some_data()), {"epochs": 1}, "training data is a list_iterator, which can be read once"),
        (some_data(), {"epochs": 1, "validation": iter([])}, "validation data is a list_iterator"),
        (
            [(torch.full((8, 4), torch.nan), torch.zeros(8).long())],
            {"epochs": 1},
            "epoch 1, at its batch 0 .* loss of batch 0 is nan",
        ),
        ([(torch.zeros(8, 5), torch.zeros(8).long())], {"epochs": 1}, "Batch 0 does not fit the model"),
        (
            [(torch.zeros(8, 4), torch.full((8,), 3))],
            {"epochs": 1},
            "label 3, expected class indices below the 3 logits",
        ),
        (
            some_data(),
            {"epochs": 1, "teacher": nn.Linear(4, 7)},
            r"teacher gives float32\[8, 7\], the model float32\[8, 3\]",
        ),
        (
            some_data(),
            {"epochs": 1, "recipe": DIVERGING},
            r"learning rate of 5e\+09.*The loss of batch 2 is inf, expected a finite number",
        ),
    ],
)
def test_wrong_input(train: Iterable[Any], arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fp.FairprunerError, match=sentence):
        recover(small_net(), train, **arguments)


def test_a_frozen_model() -> None:
    with pytest.raises(
        fp.FairprunerError, match="nothing to train in Sequential: all 4 parameters are frozen"
    ):
        recover(small_net().requires_grad_(False), some_data(), epochs=1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"small": nn.Linear(4, 3)}, "another run: its model is"),
        ({"small": small_net()}, "another run: its starting weights is"),
        ({"epochs": 3}, "its epochs is 2, this run's is 3"),
        ({"recipe": Recipe(learning_rate=0.1)}, "its learning_rate is 0.005, this run's is 0.1"),
        ({"train": some_data(3)}, "its batches in an epoch is 4, this run's is 3"),
        ({"teacher": small_net()}, "its teacher is None"),
        ({"train": some_data()}, "its first batch of the training data is [0-9a-f]{16}, this run's is"),
        ({"validation": some_data()}, "its first batch of the validation data is None, this run's is"),
    ],
)
def test_a_checkpoint_of_another_run(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"small": small_net(), "train": some_data(), "epochs": 2, "folder": tmp_path}
    recover(**arguments)
    with pytest.raises(fp.FairprunerError, match=f"{sentence}.*or another folder"):
        recover(**{**arguments, **change})


def test_other_augmentation_validation_data_or_labels_are_another_run(tmp_path: Path) -> None:
    net, (train, validation) = recovery_job.net(), recovery_job.loaders()
    found = recover(net, train, epochs=1, validation=validation, folder=tmp_path)
    assert same(recover(net, train, epochs=1, validation=validation, folder=tmp_path), found)
    noisier = DataLoader(recovery_job.Noisy(200, 0.3), 24, shuffle=True)
    relabelled = [(x, 9 - y) for x, y in validation]
    for other, name in (((noisier, validation), "training"), ((train, relabelled), "validation")):
        with pytest.raises(fp.FairprunerError, match=f"another run: its first batch of the {name} data is"):
            recover(net, other[0], epochs=1, validation=other[1], folder=tmp_path)


def test_data_of_persistent_workers_is_recognised(tmp_path: Path) -> None:
    train, noisier = (
        DataLoader(recovery_job.Noisy(48, noise), 24, shuffle=True, num_workers=1, persistent_workers=True)
        for noise in (0.2, 0.3)
    )
    found = recover(recovery_job.net(), train, epochs=1, folder=tmp_path)
    assert same(recover(recovery_job.net(), train, epochs=1, folder=tmp_path), found)
    with pytest.raises(fp.FairprunerError, match=r"training data is [0-9a-f]{16}"):
        recover(recovery_job.net(), noisier, epochs=1, folder=tmp_path)


class OwnNoise:
    """Data that is different each time it is read, because it has its own random generator."""

    def __init__(self, data: Batches) -> None:
        self.data, self.noise = data, np.random.default_rng(0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((x + self.noise.random(), y) for x, y in self.data)

    def __len__(self) -> int:
        return len(self.data)


def test_data_with_its_own_generator_can_be_resumed(tmp_path: Path) -> None:
    net, train = small_net(), OwnNoise(some_data())
    before = train.noise.bit_generator.state
    found = recover(net, train, epochs=1, folder=tmp_path)
    assert train.noise.bit_generator.state == before
    train.noise.random()
    assert same(recover(net, train, epochs=1, folder=tmp_path), found)
    with pytest.raises(fp.FairprunerError, match="training data is different each time it is read, this run"):
        recover(net, train.data, epochs=1, folder=tmp_path)


def test_comparing_the_data_changes_no_random_number_of_the_training(tmp_path: Path) -> None:
    net, data = small_net(), some_data()
    assert same(
        recover(net, OwnNoise(data), epochs=2, folder=tmp_path), recover(net, OwnNoise(data), epochs=2)
    )


def test_a_checkpoint_that_does_not_know_its_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, data = small_net(), some_data()
    with monkeypatch.context() as earlier:
        earlier.setattr(fairpruner.recovery.training, "first_batch", lambda *_, **__: None)
        recover(net, data, epochs=1, folder=tmp_path)
    with pytest.raises(fp.FairprunerError, match="its first batch of the training data is None"):
        recover(net, data, epochs=1, folder=tmp_path)


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    net, data = small_net(), some_data()
    recover(net, data, epochs=1, folder=tmp_path)
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[:-10])
    with pytest.raises(fp.FairprunerError, match="is not a complete"):
        recover(net, data, epochs=1, folder=tmp_path)
    (tmp_path / FILE).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(fp.FairprunerError, match="was altered"):
        recover(net, data, epochs=1, folder=tmp_path)


def test_a_folder_that_cannot_be_written_is_noticed_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def never(output: Tensor, label: Tensor) -> Tensor:
        raise AssertionError("trained")

    with pytest.raises(fp.FairprunerError, match=r"Cannot write .*checkpoint.safetensors"):
        recover(
            small_net(), some_data(), epochs=1, recipe=Recipe(loss=never), folder=tmp_path / "file" / "run"
        )


def test_less_data_than_the_checkpoint_has_seen(tmp_path: Path) -> None:
    class Shrinking:
        length = 5

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter(data[: self.length])

    data, net, train = some_data(5), small_net(), Shrinking()
    calls = itertools.count(1)

    def loss(output: Tensor, label: Tensor) -> Tensor:
        if next(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return F.cross_entropy(output, label)

    with pytest.raises(KeyboardInterrupt):
        recover(net, train, epochs=1, recipe=Recipe(loss=loss), folder=tmp_path)
    train.length = 2
    with pytest.raises(
        fp.FairprunerError, match="ended after 2 batches, but the checkpoint was made after 4"
    ):
        recover(net, train, epochs=1, recipe=Recipe(loss=loss), folder=tmp_path)


def test_an_optimizer_whose_memory_is_no_tensor(tmp_path: Path) -> None:
    class Hoarder(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["seen"] = [1, 2]

    recipe = Recipe(optimizer=lambda parameters, recipe: Hoarder(parameters, recipe.learning_rate))
    recover(small_net(), some_data(), epochs=1, recipe=recipe)
    with pytest.raises(fp.FairprunerError, match="Hoarder keeps a list as 'seen'"):
        recover(small_net(), some_data(), epochs=1, recipe=recipe, folder=tmp_path)


# ── what a person sees ──────────────────────────────────────────────────────────────────────────


def test_the_bar_shows_loss_accuracy_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")

    def slow(output: Tensor, label: Tensor) -> Tensor:
        time.sleep(0.06)
        return F.cross_entropy(output, label)

    recover(small_net(), some_data(), epochs=2, recipe=Recipe(loss=slow))
    shown = re.sub(r"\x1b\[[0-9;?]*\w", "", screen.getvalue())  # without colours
    assert "recovering, epoch 2 of 2" in shown
    assert "/8 batches, loss 1." in shown
    assert "accuracy" in shown
    assert "0:00:0" in shown


def test_nothing_is_printed_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    recover(small_net(), some_data(), epochs=2)
    assert capfd.readouterr() == ("", "")
