"""Measuring: what is counted is exact, what is timed is timed in turn, and what cannot be had says why.
No test depends on how long anything takes.
"""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretend_device import devices, spread
from torch import nn
from transformers_zoo import hugging_face, tokens
from typer.testing import CliRunner

import fairpruner as fp
from fairpruner.cli import app
from fairpruner.demo import build
from fairpruner.measuring import (
    Measurement,
    Quantity,
    Spread,
    Timing,
    energy,
    generation,
    runtimes,
    stored_bytes,
)
from fairpruner.measuring.memory import peak_gpu, peak_resident
from fairpruner.measuring.timing import WARM_UP, batched, interleaved

EXAMPLE = torch.rand(1, 1, 8, 8)


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    """A net, and the same without some of its channels."""
    torch.manual_seed(0)
    model = build().eval()
    spaces = fp.discover(model, EXAMPLE)
    return model, fp.cut(
        model, fp.Plan.removing(spaces, {spaces[0].name: range(5), spaces[1].name: range(9)})
    )


def test_counts_are_exact_and_both_models_stand_side_by_side(pair: tuple[nn.Module, nn.Module]) -> None:
    model, small = pair
    found = fp.measure(small, EXAMPLE, against=model, batch_sizes=[1, 3], repeats=2, memory=False)
    numbers = {q.name: (q.model, q.against) for q in found.quantities}
    assert numbers["params"] == (fp.count_params(small), fp.count_params(model))
    assert numbers["flops"] == (fp.count_flops(small, EXAMPLE), fp.count_flops(model, EXAMPLE))
    assert numbers["bytes"] == (stored_bytes(small), stored_bytes(model))
    assert [(t.runtime, t.what, t.batch_size) for t in found.timings] == [
        ("eager", "forward", 1),
        ("eager", "forward", 3),
    ]
    assert all(
        t.model and t.against and t.speedup and t.model.low <= t.model.median <= t.model.high
        for t in found.timings
    )


def test_flops_are_of_one_sample_whatever_the_example_holds(pair: tuple[nn.Module, nn.Module]) -> None:
    found = fp.measure(pair[0], torch.rand(5, 1, 8, 8), batch_sizes=[2], repeats=1, memory=False)
    assert found.quantities[1].model == fp.count_flops(pair[0], EXAMPLE)


def test_bytes_on_disk_are_those_of_the_file(pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(pair[0].state_dict(), tmp_path / "net.safetensors")
    header = int.from_bytes((tmp_path / "net.safetensors").read_bytes()[:8], "little") + 8
    assert stored_bytes(pair[0]) == (tmp_path / "net.safetensors").stat().st_size - header
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert stored_bytes(tied) == 64


def test_runs_take_turns_and_none_always_comes_first() -> None:
    order: list[str] = []
    ticks = itertools.count()
    times = interleaved(
        [lambda: order.append("a"), lambda: order.append("b")], 3, clock=lambda: next(ticks) * 0.001
    )
    assert order == [*"a" * (WARM_UP + 1), *"b" * (WARM_UP + 1), *"bbaa", *"aabb"]
    assert times.shape == (2, 3)
    np.testing.assert_allclose(times, 1.0)


def test_a_speedup_is_the_median_of_the_rounds_own_quotients() -> None:
    timing = Timing.of(
        "eager", "forward", 1, np.array([[1.0, 10.0, 2.0], [2.0, 20.0, 6.0]])
    )  # the second round was ten times slower for both
    assert timing.speedup == Spread(2.0, 2.0, 2.5)
    assert (timing.model, timing.against) == (Spread(2.0, 1.5, 6.0), Spread(6.0, 4.0, 13.0))


def test_examples_of_any_form_are_repeated_along_their_batch() -> None:
    example = {"x": torch.arange(6.0).view(2, 3), "more": (torch.zeros(2), 7)}
    grown = batched(example, 4)
    assert grown["x"].tolist() == [[0, 1, 2]] * 4
    assert (grown["more"][0].shape, grown["more"][1]) == ((4,), 7)
    assert batched([torch.zeros(1, 2)], 3)[0].shape == (3, 2)


def test_the_models_are_left_as_they_were(pair: tuple[nn.Module, nn.Module]) -> None:
    model = build().train()
    before, threads = (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        torch.get_num_threads(),
    )
    fast = torch.backends.mha.get_fastpath_enabled()
    fp.measure(model, EXAMPLE, batch_sizes=[2], threads=1, repeats=1, memory=False)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert (torch.get_num_threads(), torch.backends.mha.get_fastpath_enabled()) == (threads, fast)
    with pytest.raises(
        fp.FairprunerError, match=r"The example does not fit the model: .* called with float32\[1, 3\]"
    ):
        fp.measure(model, torch.rand(1, 3), threads=1)
    assert all(module.training for module in model.modules())
    assert torch.get_num_threads() == threads


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["compile", "onnxruntime", "openvino"])
def test_every_runtime_computes_what_eager_computes(pair: tuple[nn.Module, nn.Module], runtime: str) -> None:
    if runtime != "compile":
        pytest.importorskip(runtime, reason=f"{runtime} is not installed")
    with torch.no_grad():
        expected = pair[1](EXAMPLE)
        run = runtimes.prepared(runtime, pair[1], EXAMPLE, 1)
        found = run()
    found = found if isinstance(found, torch.Tensor) else torch.from_numpy(np.array(found[0]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_runtimes_of_the_cpu_run_a_model_that_lies_on_a_device(runtime: str) -> None:
    pytest.importorskip(runtime, reason=f"{runtime} is not installed")
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    example = torch.randn(2, 4)
    with torch.no_grad():
        expected = model(example)
    with devices():
        placed = spread(model, {"": "pretend:0"})
        found = runtimes.prepared(runtime, placed, example.to("pretend:0"), 1)()
        assert {p.device for p in placed.parameters()} == {torch.device("pretend:0")}
    np.testing.assert_allclose(np.array(found[0]), expected, rtol=1e-4, atol=1e-5)


def test_the_memory_of_a_gpu_is_that_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model of 1,000 bytes lies beside it, and the forward pass allocates 64 bytes."""
    model = nn.Linear(4, 2)  # 40 bytes
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1040)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1104)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    assert peak_gpu(model, torch.ones(1, 4)) == 40 + 64


def test_a_runtime_that_is_missing_is_a_row_that_says_so(
    pair: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def without(name: str, *rest: Any) -> Any:
        if name in ("onnxruntime", "openvino"):
            raise ModuleNotFoundError(name=name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    found = fp.measure(
        pair[1],
        EXAMPLE,
        batch_sizes=[1],
        runtimes=["eager", "onnxruntime", "openvino"],
        repeats=1,
        memory=False,
    )
    assert [t.model is None for t in found.timings] == [False, True, True]
    assert "openvino needs a package that is not installed: pip install openvino." in repr(found)


class Branching(nn.Module):
    """What no exporter follows: a path that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if float(x.sum()) > 0 else self.linear(-x)


def test_a_model_that_cannot_be_exported_is_measured_but_for_that() -> None:
    found = fp.measure(Branching(), torch.ones(1, 4), batch_sizes=[1], runtimes=["eager"], repeats=1)
    memory = next(q for q in found.quantities if q.name == "peak memory")
    assert memory.model is None
    assert "torch.export cannot export Branching" in memory.note
    assert "cannot export Branching" in repr(found)
    assert "peak_memory" not in found.numbers()["model"]


@pytest.mark.slow
def test_peak_memory_is_that_of_a_process_that_holds_the_model_once() -> None:
    wide = nn.Sequential(nn.Linear(4000, 4000), nn.Linear(4000, 4000))  # 128 MB
    small, large = (peak_resident(net, torch.zeros(1, 4000), 1) for net in (nn.Linear(4000, 10), wide))
    assert 0 < large["idle"] < large["peak"]
    assert stored_bytes(wide) * 0.9 < large["peak"] - small["peak"] < stored_bytes(wide) * 2.5


def test_energy_is_of_one_call_and_called_an_estimate(
    pair: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fp.measuring, "energy_of", lambda run, country: energy.Energy(0.5, 0.1, counted=country == "DEU")
    )
    for country, note in (("DEU", False), ("FRA", True)):
        found = fp.measure(pair[1], EXAMPLE, batch_sizes=[1], repeats=1, memory=False, energy=country)
        joules = next(q for q in found.quantities if q.name == "energy")
        assert (joules.model, joules.unit, "estimate" in joules.note) == (0.5, "J", note)


def test_energy_divides_what_codecarbon_says_by_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tracker:
        _hardware = ()

        def start(self) -> None: ...

        def stop(self) -> float:
            return 2e-6  # kg

        class final_emissions_data:
            energy_consumed = 1e-6  # kWh

    monkeypatch.setattr(energy, "_tracker", lambda country: Tracker())
    monkeypatch.setattr(energy, "SECONDS", 0.0)
    ticks = itertools.count(
        0.0, -1.0
    )  # so that the loop's own clock lets exactly as many calls through as the list below is long
    calls: list[int] = []
    monkeypatch.setattr(energy.time, "perf_counter", lambda: next(ticks) if len(calls) < 4 else 1e9)
    found = energy.energy_of(lambda: calls.append(1), "DEU")
    assert len(calls) == 4
    assert found == energy.Energy(pytest.approx(3.6 / 4), pytest.approx(2 / 4), counted=False)


def test_a_country_that_codecarbon_does_not_know_is_refused() -> None:
    pytest.importorskip("codecarbon")
    with pytest.raises(fp.FairprunerError, match="refuses the country 'XX': it is not in the list of countr"):
        energy.energy_of(lambda: None, "XX")


def test_codecarbon_is_asked_for_by_name_when_it_is_missing(
    pair: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "codecarbon", None)
    with pytest.raises(fp.FairprunerError, match=r"pip install 'fairpruner\[energy\]'"):
        fp.measure(pair[1], EXAMPLE, batch_sizes=[1], repeats=1, memory=False, energy="DEU")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"batch_sizes": []}, r"batch_sizes is \[\], expected whole numbers"),
        ({"batch_sizes": [0]}, r"batch_sizes is \[0\]"),
        ({"batch_sizes": 4}, "batch_sizes is 4"),
        ({"runtimes": ["onxruntime"]}, "Unknown runtime 'onxruntime': did you mean 'onnxruntime'"),
        ({"runtimes": "eager"}, "runtimes is 'eager', expected a list"),
        ({"runtimes": []}, r"runtimes is \[\]"),
        ({"threads": 0}, "threads=0"),
        ({"repeats": 0}, "repeats=0"),
    ],
)
def test_wrong_input_gets_one_clear_sentence(
    pair: tuple[nn.Module, nn.Module], arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(fp.FairprunerError, match=sentence):
        fp.measure(pair[1], EXAMPLE, **arguments)


def test_a_measurement_is_a_table_json_and_numbers_for_a_report() -> None:
    found = Measurement(
        (
            Quantity("params", "", 50, 100),
            Quantity("bytes", "B", 2_000_000, 4_000_000),
            Quantity("peak memory", "B", None, note="no /proc"),
        ),
        (
            Timing(
                "eager", "forward", 1, Spread(1.0, 0.9, 1.1), Spread(2.0, 1.9, 2.3), Spread(2.0, 1.8, 2.1)
            ),
            Timing("openvino", "forward", 1, None, note="missing"),
        ),
        {"threads": 1},
    )
    table = repr(found)
    for text in ("50.0%", "2 MB", "4 MB", "peak memory: no /proc", "2 (1.8–2.1)", "missing", "threads 1"):
        assert text in table
    assert json.loads(json.dumps(found.to_json()))["timings"][0]["speedup"]["median"] == 2.0
    assert found.numbers() == {
        "original": {"params": 100, "bytes": 4_000_000, "latency_ms": 2.0},
        "pruned": {"params": 50, "bytes": 2_000_000, "latency_ms": 1.0},
    }
    assert "times faster" in table


CALLS: list[tuple[int, int, int]] = []  # outside of `Talker`: what a forward changes in the model is undone


class Talker(nn.Module):
    """A language model of no wit that counts how it was called: logits [N, T, 5], and a cache that says
    how much it has read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 5)
        self.config = type("Config", (), {"use_cache": True})

    def generate(self) -> None: ...

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: int = 0,
        use_cache: bool = False,
    ) -> Any:
        read = past_key_values + input_ids.shape[1]
        assert attention_mask is None or attention_mask.shape[1] == read
        CALLS.append((input_ids.shape[0], input_ids.shape[1], past_key_values))
        logits = self.linear(torch.zeros(*input_ids.shape, 2))
        return type("Output", (), {"logits": logits, "past_key_values": read})


def test_prefill_and_decode_are_timed_apart() -> None:
    talker = Talker()
    prompt = {
        "input_ids": torch.zeros(1, 7, dtype=torch.long),
        "attention_mask": torch.ones(1, 7, dtype=torch.long),
    }
    found = fp.measure(talker, prompt, batch_sizes=[2], repeats=2, memory=False)
    assert [t.what for t in found.timings] == ["forward", "prefill", "decode"]
    one = [(2, 7, 0), *((2, 1, 7 + i) for i in range(generation.TOKENS))]
    assert CALLS[-2 * len(one) :] == one * 2
    ticks = iter([0.0, 0.005, 0.005 + 0.001 * generation.TOKENS])
    assert generation._once(talker, prompt, lambda: next(ticks)) == (pytest.approx(5.0), pytest.approx(1.0))


def test_a_real_language_model_keeps_its_cache() -> None:
    found = fp.measure(hugging_face("llama"), tokens(), batch_sizes=[1], repeats=1, memory=False)
    assert [t.what for t in found.timings] == ["forward", "prefill", "decode"]


def test_the_command_compares_a_folder_with_its_original(
    pair: tuple[nn.Module, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = build().eval()
    spaces = fp.discover(model, EXAMPLE)
    plan = fp.Plan.removing(spaces, {spaces[0].name: range(5)})
    fp.save(fp.cut(model, plan), plan, "small")
    arguments = [
        "--pruned",
        "small",
        "--shape",
        "1,8,8",
        "--batch-sizes",
        "1,2",
        "--repeats",
        "1",
        "--threads",
        "1",
        "--no-memory",
    ]
    done = CliRunner().invoke(app, ["measure", "fairpruner.demo:build", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["quantities"][0] == {
        "name": "params",
        "unit": "",
        "model": plan.predicted["params"],
        "against": plan.original["params"],
        "note": "",
    }
    assert [t["batch_size"] for t in found["timings"]] == [1, 2]
    Path("measured.json").write_text(done.stdout)
    drawn = CliRunner().invoke(app, ["report", "small", "--measured", "measured.json", "--json"])
    assert drawn.exit_code == 0, drawn.output
    assert json.loads(drawn.stdout)["measured"]["original"]["params"] == plan.original["params"]
    shown = CliRunner().invoke(app, ["measure", "fairpruner.demo:build", *arguments])
    assert "times faster" in shown.stdout
    refused = CliRunner().invoke(app, ["measure", "fairpruner.demo:build"])
    assert refused.exit_code == 1
    assert "give --shape" in refused.stderr


class Tired(nn.Module):
    """A model that raises after some calls; copies of it count too."""

    calls_left = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Tired.calls_left -= 1
        if Tired.calls_left < 0:
            raise LookupError("no calls are left")
        found: torch.Tensor = self.inner(x)
        return found


@pytest.mark.parametrize("stage", ["measure", "latency_table"])
def test_a_model_that_raises_while_it_is_timed_is_one_sentence_with_its_cause(stage: str) -> None:
    Tired.calls_left = 1000
    model, example = Tired(), torch.zeros(1, 4)
    spaces = fp.discover(model, example)
    Tired.calls_left = 5
    act = {
        "measure": lambda: fp.measure(model, example, batch_sizes=[1], repeats=9, memory=False),
        "latency_table": lambda: fp.latency_table(model, example, spaces, repeats=2),
    }[stage]
    with pytest.raises(fp.FairprunerError, match=r"Tired failed while .* LookupError: no calls") as caught:
        act()
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_model_that_raises_while_its_cuts_are_checked_is_one_sentence_with_its_cause() -> None:
    Tired.calls_left = 1
    with pytest.raises(fp.FairprunerError, match=r"A copy of Tired .* cannot run") as caught:
        fp.discover(Tired(), torch.zeros(1, 4))
    assert isinstance(caught.value.__cause__, LookupError)
