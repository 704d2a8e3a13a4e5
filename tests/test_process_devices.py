"""Which device and which backend the processes of a job use."""

from __future__ import annotations

import pytest
import torch

from fairpruner.models.devices import device_of_process
from fairpruner.scoring import processes
from fairpruner.scoring.processes import Processes, backend_of


@pytest.mark.parametrize(
    ("asked", "rank", "expected"),
    [
        ("cuda", "1", "cuda:1"),
        ("cuda", None, "cuda"),
        ("cuda:3", "1", "cuda:3"),
        ("xpu", "0", "xpu:0"),
        ("cpu", "1", "cpu"),
        ("mps", "1", "mps"),
    ],
)
def test_a_process_takes_the_device_of_its_local_rank(
    asked: str, rank: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert device_of_process(asked) == torch.device(expected)


def test_nccl_is_for_cuda_models_alone() -> None:
    assert [backend_of(torch.device(d)) for d in ("cuda:1", "cpu", "mps", "xpu")] == [
        "nccl",
        "gloo",
        "gloo",
        "gloo",
    ]


def test_what_connects_the_processes_disconnects_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of a job of two is enough to see what is asked of torch.distributed."""
    asked: list[object] = []
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    connected = False

    def connect(backend: str) -> None:
        nonlocal connected
        connected = True
        asked.append(backend)

    monkeypatch.setattr(processes.dist, "is_initialized", lambda: connected)
    monkeypatch.setattr(processes.dist, "init_process_group", connect)
    monkeypatch.setattr(processes.dist, "destroy_process_group", lambda: asked.append("destroyed"))
    monkeypatch.setattr(processes.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(processes.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(processes.atexit, "register", asked.append)
    assert Processes.current(torch.device("cpu")) == Processes(1, 2)
    assert Processes.current(torch.device("cpu")) == Processes(1, 2)  # connected already: nothing is asked
    backend, at_exit = asked
    assert backend == "gloo"
    at_exit()  # type: ignore[operator]
    assert asked[-1] == "destroyed"
