"""Every stage on devices that this machine does not have: one, two, and one without float64.

`pretend_device` refuses what a GPU refuses. What is computed is computed on the CPU, so that the results of
a model on pretended devices must be those of the same model on the CPU.
"""

from __future__ import annotations

import copy
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretend_device import devices, spread
from torch import Tensor, nn

import fairpruner as fp
from fairpruner.evaluation.perplexity import perplexity

ROOT = Path(__file__).parents[1]

CLASSES = 3
REMOVAL = (
    "wasserstein",
    "wasserstein_pooled",
    "activation",
    "reconstruction",
    "l1",
    "l2",
    "fpgm",
    "random",
    "saliency",
    "surgeon",
)
PROTECTION = ("taylor", "taylor2", "deletion")
METHODS = ("mean", "least_squares", "sequential", "batchnorm", "tune")
ONE, TWO = {"": "pretend:0"}, {"": "pretend:0", "body": "pretend:1", "head": "pretend:1"}


class Net(nn.Module):
    """A residual block, a stage and a head: spaces that lie on one device, and one that crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(8, 6, 3), nn.ReLU())
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv2(self.bn1(self.conv1(x)).relu())
        return self.head(self.body(x).mean((2, 3)))


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return Net().to(dtype).eval()


def data(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(2, 12, 3, 8, 8, generator=generator).to(dtype)
    return [(batch, torch.arange(12) % CLASSES) for batch in images]


Placed = tuple[nn.Module, Tensor, list[tuple[Tensor, Tensor]]]  # model, example, data on the CPU


def placed(places: dict[str, str], dtype: torch.dtype) -> Placed:
    model = spread(net(dtype), places)
    batches = data(dtype)
    return model, batches[0][0][:2].to(next(model.parameters()).device), batches


@pytest.fixture(
    params=[
        pytest.param((ONE, torch.float32, True), id="one"),
        pytest.param((TWO, torch.float32, True), id="two"),
        pytest.param((ONE, torch.float32, False), id="without float64"),
        pytest.param((ONE, torch.bfloat16, True), id="bf16"),
        pytest.param((TWO, torch.float16, True), id="fp16 on two"),
    ]
)
def on_devices(request: pytest.FixtureRequest) -> Iterator[tuple[Placed, torch.dtype]]:
    places, dtype, float64 = request.param
    with devices(float64=float64):
        yield placed(places, dtype), dtype


def test_labels_in_float64_go_to_a_device_without_it() -> None:
    rng = np.random.default_rng(0)
    batches: list[Any] = [(rng.normal(size=(9, 4)), rng.normal(size=(9, 1)))]
    batches += [(torch.randn(9, 4), torch.randn(9, 1, dtype=torch.float64))]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    expected = fp.score(model, batches, removal="l2")
    with devices(float64=False):
        found = fp.score(model.to("pretend:0"), batches, removal="l2")
    assert found.protection["0"] == pytest.approx(expected.protection["0"], rel=1e-4)


def near(dtype: torch.dtype) -> float:
    return 1e-4 if dtype == torch.float32 else 2e-2


@pytest.mark.slow
def test_every_signal_scores_as_on_the_cpu(on_devices: tuple[Placed, torch.dtype]) -> None:
    (model, example, batches), dtype = on_devices
    before = {name: tensor.device for name, tensor in model.state_dict().items()}
    spaces = fp.discover(model, example)
    asked: dict[str, Any] = {"removal": REMOVAL, "protection": PROTECTION}
    found = fp.score(model, batches, spaces=spaces, **asked)
    plain = net(dtype)
    expected = fp.score(plain, batches, spaces=fp.discover(plain, batches[0][0][:2]), **asked)
    assert spaces.names == expected.spaces.names
    assert spaces.left_out == expected.spaces.left_out
    for ours, theirs in ((found.removals, expected.removals), (found.protections, expected.protections)):
        for signal in theirs:
            for name in spaces.names:
                scale = abs(theirs[signal][name]).max()
                difference = abs(ours[signal][name] - theirs[signal][name]).max()
                assert difference <= near(dtype) * scale, (signal, name)
    assert {name: tensor.device for name, tensor in model.state_dict().items()} == before
    fp.score(model, batches, spaces=spaces, groups=2)


@pytest.mark.slow
def test_every_stage_after_scoring(on_devices: tuple[Placed, torch.dtype], tmp_path: Path) -> None:
    (model, example, batches), dtype = on_devices
    places = {name: tensor.device for name, tensor in model.state_dict().items()}
    spaces = fp.discover(model, example)
    plan = fp.Plan.removing(spaces, {space.name: (0, 2) for space in spaces})
    small, masked = fp.cut(model, plan), fp.mask(model, plan)
    with torch.no_grad():
        ours, theirs = small(example), masked(example)
    assert float((ours - theirs).abs().max()) <= near(dtype) * float(theirs.abs().max())
    assert plan.predicted["flops"] == fp.count_flops(small, example)
    plan.save(tmp_path / "plan.json")
    assert fp.count_params(fp.cut(model, fp.Plan.load(tmp_path / "plan.json"))) == plan.predicted["params"]
    for method in METHODS:
        repaired = fp.repair(small, model, plan, batches, method=method)
        assert {name: tensor.device for name, tensor in repaired.state_dict().items()} == places
    recovered = fp.recover(small, batches, epochs=1, validation=batches)
    assert {name: tensor.device for name, tensor in recovered.state_dict().items()} == places
    found = fp.measure(small, example, against=model, batch_sizes=[1], repeats=1, memory=False)
    assert found.quantities[0].model == plan.predicted["params"]
    assert len(fp.latency_table(model, example, spaces, repeats=1).ops) == 5
    fp.save(small, plan, tmp_path / "folder")
    loaded = fp.load(tmp_path / "folder", build=lambda: net(dtype))
    for name, tensor in small.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.cpu()), name


def test_the_documented_signals_of_ones_own_run_on_a_device() -> None:
    """The code of docs/signals.md and of the example, taken as it stands."""
    page = (ROOT / "docs" / "signals.md").read_text()
    documented: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.partition("## Write your own signal")[2], re.DOTALL)[
        :2
    ]:
        exec(block, documented)
    example = runpy.run_path(str(ROOT / "examples" / "own_signal.py"))
    with devices():
        model = example["Net"]().to("pretend:0").eval()
        batches = [(torch.randn(12, 8), torch.arange(12) % 3)]
        for signal in ("norm_scale", "silence"):
            fp.score(model, batches, removal=signal, protection="loudest")
        plain = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).to("pretend:0")
        scores = fp.score(plain, batches, removal="bias_size", protection="loudest")
    assert scores.removal["0"] == pytest.approx(plain[0].bias.detach().numbers.abs().numpy())


TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
ROUTED = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
HALVES = {
    "": "pretend:0",
    "model.layers.1": "pretend:1",
    "model.norm": "pretend:1",
    "lm_head": "pretend:1",
}


@pytest.mark.slow
@pytest.mark.parametrize(("places", "float64"), [(TWO, True), (ONE, False)], ids=["two", "without float64"])
def test_the_default_search_leaves_every_tensor_on_its_device(places: dict[str, str], float64: bool) -> None:
    with devices(float64=float64):
        model, _, batches = placed(places, torch.float32)
        small, plan = fp.prune(model, batches, keep=fp.Budget("flops", 0.6), effort=20)
        assert plan.tried
        before = {name: tensor.device for name, tensor in model.state_dict().items()}
        assert {name: tensor.device for name, tensor in small.state_dict().items()} == before


SIGNALS = {
    "block": ("surgeon", "influence"),
    "stream": ("activation", "l2"),
    "expert": ("reap", "frequency", "soft_activation"),
}
REPAIRS = {
    "block": ("sequential",),
    "stream": ("least_squares",),
    "expert": ("experts", "merge", "renormalise", "constants", ["constants", "experts"]),
}


def agree(ours: Any, theirs: Any, what: object) -> None:
    """Numbers of a device and of the CPU, to a share of the largest."""
    assert float(abs(ours - theirs).max()) <= 1e-3 * float(abs(theirs).max()), what


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(SIGNALS))
@pytest.mark.parametrize(
    ("places", "float64"), [(HALVES, True), (ONE, False)], ids=["two", "without float64"]
)
def test_blocks_streams_and_experts_as_on_the_cpu(places: dict[str, str], float64: bool, kind: str) -> None:
    """Cut equals mask for every kind of unit; scores and repaired models are those of the CPU."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    plain = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**TEXT, **ROUTED)).eval()
    texts = [{"input_ids": torch.randint(3, 90, (4, 9))} for _ in range(2)]
    first = {"input_ids": texts[0]["input_ids"][:1]}
    known = fp.discover(plain, first, kinds=[kind])
    expected = fp.score(plain, texts, spaces=known, removal=SIGNALS[kind])
    plan = fp.Plan.removing(known, {s.name: range(s.multiple) for s in known})
    whole = fp.cut(plain, plan)
    with devices(float64=float64):
        model = spread(copy.deepcopy(plain), places)
        example = {name: tensor.to("pretend:0") for name, tensor in first.items()}
        spaces = fp.discover(model, example, kinds=[kind])
        assert spaces.names == known.names
        found = fp.score(model, texts, spaces=spaces, removal=SIGNALS[kind])
        for signals, answers in (
            (found.removals, expected.removals),
            (found.protections, expected.protections),
        ):
            for signal, by_space in answers.items():
                for name, values in by_space.items():
                    agree(signals[signal][name], values, (signal, name))
        small = fp.cut(model, plan)
        with torch.no_grad():
            ours, theirs = small(**example).logits, fp.mask(model, plan)(**example).logits
        assert float((ours - theirs).abs().max()) < 1e-4
        for method in REPAIRS[kind]:
            repaired = fp.repair(small, model, plan, texts, method=method)
            answer = fp.repair(whole, plain, plan, texts, method=method)
            with torch.no_grad():
                logits = repaired(**example).logits.cpu()
                agree(logits, answer(**first).logits, method)


@pytest.mark.slow
def test_a_language_model_over_two_devices() -> None:
    """Padded texts, heads and hidden units: discovery, scores, repair, recovery, timing and perplexity."""
    transformers: Any = pytest.importorskip("transformers")
    with devices():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).eval()
        spread(model, HALVES)
        mask = torch.ones(4, 9, dtype=torch.long)
        mask[1, 6:] = 0
        texts = [{"input_ids": torch.randint(3, 90, (4, 9)), "attention_mask": mask} for _ in range(2)]
        example = {name: tensor[:1].to("pretend:0") for name, tensor in texts[0].items()}
        spaces = fp.discover(model, example)
        assert {space.kind for space in spaces} == {"head", "hidden"}
        scores = fp.score(model, texts, spaces=spaces, protection=["taylor", "deletion"])
        plan = fp.Plan.removing(spaces, {space.name: (0,) for space in scores.spaces})
        small = fp.cut(model, plan)
        with torch.no_grad():
            ours, theirs = small(**example).logits, fp.mask(model, plan)(**example).logits
        assert float((ours - theirs).abs().max()) < 1e-4
        for method in ("least_squares", "sequential"):
            fp.repair(small, model, plan, texts, method=method)
        fp.recover(small, texts, epochs=1)
        fp.measure(small, example, batch_sizes=[1], repeats=1, memory=False)
        assert perplexity(small, torch.randint(3, 90, (40,)), length=8).value > 1
