"""Which library cuts which model right: fairpruner, Torch-Pruning 1.6.1 and network-pruner 2.16.

Random weights, float64, CPU. Up to 12 groups of channels per model, from the largest on (a residual stream)
to the smallest. Of each group a random quarter is removed. "Right": the smaller model gives the output of
the original whose quarter is zeroed. "Wrong": it runs and gives another output. "Failed": an exception.
Groups that a LayerNorm or the output mixes are left out: removing is not zeroing there. network-pruner
chooses its channels itself, so only whether it runs, and whether the scored model keeps its weights and
statistics, is recorded.

The peers are installed into benchmarks/.peers. Each case runs in a process of its own, for at most two
minutes of processor time.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import pages, runs
from nets.peer_models import MODELS, build
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fairpruner as fp

HERE = Path(__file__).parent
PACKAGES = HERE / ".peers"
PEERS = ("torch-pruning==1.6.1", "network-pruner==2.16")
GROUPS, LIMIT, CLOSE = 12, 120, 1e-8
Row = dict[str, Any]


def with_packages(*requirements: str) -> None:
    """Make packages importable that are installed beside the benchmarks, without what they depend on."""
    names = (requirement.replace("==", "-").replace("-", "_") for requirement in requirements)
    installed = {path.name.replace("-", "_") for path in PACKAGES.glob("*.dist-info")}
    if any(f"{name}.dist_info" not in installed for name in names):
        install = ["install", "--quiet", "--no-deps", "--upgrade", "--target", str(PACKAGES), *requirements]
        subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    if str(PACKAGES) not in sys.path:
        sys.path.insert(0, str(PACKAGES))


def logits(model: nn.Module, example: Any) -> torch.Tensor:
    with torch.no_grad():
        output = model(example)
    return output if isinstance(output, torch.Tensor) else output.logits


def spread(items: list[Any], size: Callable[[Any], int]) -> list[Any]:
    """At most `GROUPS` of the items at even distances from the largest on, such as a residual stream."""
    items = sorted(items, key=size, reverse=True)
    step = max(1, len(items) / GROUPS)
    return [items[int(i * step)] for i in range(min(GROUPS, len(items)))]


def count(outcomes: Iterator[tuple[str, str]]) -> Row:
    """How often each outcome occurred, and the first error."""
    found, note = {"right": 0, "wrong": 0, "failed": 0}, ""
    for outcome, error in outcomes:
        found[outcome] += 1
        note = note or error
    return {**found, "note": note}


def compare(masked: Any, cut: Any) -> str:
    if masked.shape != cut.shape:
        return "wrong"
    return "right" if float((masked - cut).abs().max()) < CLOSE * (1 + float(masked.abs().max())) else "wrong"


def by_fairpruner(name: str) -> Row:
    """Every sampled space of the model, a random quarter of its units removed."""
    model, example = build(name)
    spaces = fp.discover(model, example)

    def outcomes() -> Iterator[tuple[str, str]]:
        for space in spread(list(spaces), lambda space: len(space.slices)):
            block = space.size // space.groups  # units of a group; each loses equally many
            lost = max(block // 4 // space.multiple, 1) * space.multiple
            if lost >= block or space.size - lost * space.groups < space.min_keep:
                continue
            units = [
                g * block + unit
                for g in range(space.groups)
                for unit in random.Random(g).sample(range(block), lost)
            ]
            plan = fp.Plan.removing(spaces, {space.name: units})
            smaller = logits(fp.cut(model, plan), example)
            yield compare(logits(fp.mask(model, plan), example), smaller), ""

    return {**count(outcomes()), "left out": len(spaces.left_out)}


def by_torch_pruning(name: str) -> Row:
    """Every sampled group of its dependency graph, a random quarter of the root's channels removed."""
    with_packages(*PEERS)
    import torch_pruning as tp

    model, example = build(name)
    paths = {module: path for path, module in model.named_modules()}
    graph = tp.DependencyGraph().build_dependency(model, example)
    groups = {paths[group[0].dep.target.module]: len(group) for group in graph.get_all_groups()}
    whole = logits(model, example)

    def outcomes() -> Iterator[tuple[str, str]]:
        for path in spread(list(groups), groups.__getitem__):
            cut, masked = copy.deepcopy(model), copy.deepcopy(model)
            try:
                graph = tp.DependencyGraph().build_dependency(cut, example)
                root = cut.get_submodule(path)
                pruner = graph.get_pruner_of_module(root)
                channels = pruner.get_out_channels(root)
                chosen = sorted(random.Random(0).sample(range(channels), max(1, channels // 4)))
                group = graph.get_pruning_group(root, pruner.prune_out_channels, chosen)
                names = {module: path for path, module in cut.named_modules()}
                if any(isinstance(dep.target.module, nn.LayerNorm) for dep, _ in group):
                    continue
                for dep, indices in group:
                    target = dep.target.module
                    if target in names and graph.is_out_channel_pruning_fn(dep.handler):
                        for part in masked.get_submodule(names[target]).parameters(recurse=False):
                            part.data[list(indices)] = 0
                group.prune()
                smaller = logits(cut, example)
            except Exception as error:
                yield "failed", f"{path}: {type(error).__name__}: {error}"[:200]
                continue
            if smaller.shape != whole.shape:  # the output layer itself
                continue
            yield compare(logits(masked, example), smaller), ""

    return count(outcomes())


def by_network_pruner(name: str) -> Row:
    """Its whole way on 16 images of two classes: scores, ratios, smaller model."""
    model, example = build(name)
    model = model.float()
    example = example.float() if example.is_floating_point() else example
    inputs = torch.cat([example] * 8)
    inputs = inputs + torch.randn_like(inputs) if inputs.is_floating_point() else inputs
    before = copy.deepcopy(model.state_dict())
    changed = None
    try:
        scores = network_pruner_scores(model, inputs, torch.arange(16) % 2, batch=8)
        changed = any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())
        logits(network_pruner_cut(model, scores, 0.1, example), example)
    except Exception as error:
        note = f"{type(error).__name__}: {error}"[:200]
        return {"runs": False, "changed by scoring": changed, "note": note}
    return {"runs": True, "changed by scoring": changed, "note": ""}


def network_pruner_scores(model: nn.Module, inputs: Any, labels: Any, batch: int = 128) -> Any:
    """What network-pruner makes its plans of. It changes the model."""
    with_packages(*PEERS)
    from Network_Pruner import FAIR_Pruner

    loader = DataLoader(TensorDataset(inputs, labels), batch_size=batch)
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "results.pkl")
        return FAIR_Pruner.get_metrics(model, loader, device=torch.device("cpu"), results_save_path=place)


def network_pruner_cut(model: nn.Module, scores: Any, tolerance: float, example: Any) -> nn.Module:
    """The smaller model of network-pruner."""
    from Network_Pruner import FAIR_Pruner

    ratios = FAIR_Pruner.get_ratios(model, scores, ToD_level=tolerance)
    skeleton = FAIR_Pruner.get_skeleton(model, ratios, example)
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "pruned.pt")
        small: nn.Module = FAIR_Pruner.prune(
            skeleton, model, scores, ratios, example_inputs=example, pruned_model_save_path=place
        )[0]
    return small


TOOLS = {
    "fairpruner": by_fairpruner,
    "Torch-Pruning 1.6.1": by_torch_pruning,
    "network-pruner 2.16": by_network_pruner,
}


NO_CLASSIFIERS = ("PixelShuffle", "Llama", "Qwen2-MoE")  # network-pruner takes labels of whole inputs
SMALL = (
    "CIFAR ResNet-56, option A",
    "chunk and concatenation (C2f)",
    "channel shuffle",
    "PixelShuffle",
    "functional convolution",
    "convolution and LSTM",
)


def cases(quick: bool) -> Iterator[Row]:
    """Small models first."""
    others = (name for name in MODELS if name not in SMALL)
    for name in SMALL[:4] if quick else (*SMALL, *others):
        for tool in TOOLS:
            if not (name in NO_CLASSIFIERS and tool.startswith("network-pruner")):
                yield {"model": name, "library": tool}


def measure(case: Row, shared: Path) -> Row:
    """One case in a process of its own."""
    script = f"import peers; peers.print_case({case['library']!r}, {case['model']!r})"
    try:
        # Other work on the machine does not shorten the processor time, so the clock is only a last resort.
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=30 * LIMIT)
    except subprocess.TimeoutExpired:
        return {"note": f"stopped after {30 * LIMIT} s"}
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return {"note": f"stopped after {LIMIT} s of processor time"}
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == 0 and last.startswith("{"):
        found: Row = json.loads(last)
        return found
    return {"note": (done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")[:200]}


def print_case(tool: str, name: str) -> None:
    """What a library makes of a model, as the last line that is printed."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    print(json.dumps(TOOLS[tool](name)))


def words(row: Row) -> str:
    """A row of the results as a cell of the table."""
    if "runs" in row:
        changed = ", scoring changes the model" if row["changed by scoring"] else ""
        return ("runs" if row["runs"] else "fails") + changed
    if "right" not in row:
        return "hangs" if row["note"].startswith("stopped") else "fails"
    tried = row["right"] + row["wrong"] + row["failed"]
    parts = [f"**{row['wrong']} silently wrong**"] if row["wrong"] else []
    parts += [f"{row['failed']} failed"] if row["failed"] else []
    if not tried:
        return "nothing found"
    return f"{row['right']} of {tried} right" + "".join(f", {part}" for part in parts)


def page() -> str:
    """Models by libraries as Markdown."""
    found = {(name, "network-pruner 2.16"): "takes classifiers only" for name in NO_CLASSIFIERS}
    found |= {(row["model"], row["library"]): words(row) for row in runs.stored("peers")}
    measured = [name for name in MODELS if (name, "fairpruner") in found]
    lines = [[name, *(found.get((name, tool), "") for tool in TOOLS)] for name in measured]
    return pages.table(["model", *TOOLS], lines)
