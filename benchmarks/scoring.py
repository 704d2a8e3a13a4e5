"""The cost of scoring beside a plain forward and backward pass and beside other libraries.

*time*: processor time of `fp.score` (Wasserstein with 32 projections, and Taylor, all spaces) as a multiple
of a plain forward and backward pass over the same images and batches: the median of interleaved rounds, as
the number of images, of classes and the depth grow. The weights are random, which does not change the time.
The images are CIFAR-10 (VGG16-BN and ResNets) or ImageNet (DeiT-S at 224 px). An image's label is its number
modulo the classes.
*memory*: peak memory of a process that only scores, and of one that only makes the plain passes.
*peer*: processor time of other libraries as a multiple of fairpruner's for the same, in one process, as the
number of images, of classes and the depth grow. network-pruner 2.16 computes its metrics (once: it takes
minutes). Torch-Pruning 1.6.1 adds up Taylor gradients and prunes globally to half of the MACs; `fp.discover`,
`score`, `allocate` and `cut` do the same. Both change the model they are given, so they get copies.
"""

from __future__ import annotations

import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import pages, runs
from harness.torchvision_shim import torchvision
from nets.cifar_models import CifarResNet
from nets.images import cifar10, imagenet_sample
from peers import PEERS, network_pruner_scores, with_packages
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp

HERE = Path(__file__).parent
ROUNDS = 3
Row = dict[str, Any]
Batches = list[tuple[Tensor, Tensor]]
AXES = {
    "images": "images (VGG16-BN)",
    "classes": "classes (VGG16-BN)",
    "depth": "depth (ResNets)",
}
PEER_AXES = {**AXES, "depth": "depth (VGGs with batch norms)"}
FIRST = {"model": "VGG16-BN", "images": 1000, "classes": 10}
FIRST_OF_PEERS = {**FIRST, "images": 128}


def cases(quick: bool) -> Iterator[Row]:
    """Time, then memory, then the other libraries."""
    if quick:
        yield {"part": "time", "model": "ResNet-20", "images": 100, "classes": 10}
        yield {"part": "memory", "model": "ResNet-20", "images": 100}
        quickly = {"model": "ResNet-20", "images": 64, "classes": 10}
        yield {"part": "peer", "library": "Torch-Pruning 1.6.1", **quickly}
        return
    yield {"part": "time", **FIRST}
    for images in (250, 4000):
        yield {"part": "time", **FIRST, "images": images}
    for classes in (2, 100):
        yield {"part": "time", **FIRST, "classes": classes}
    for model in ("ResNet-20", "ResNet-56", "ResNet-110"):
        yield {"part": "time", **FIRST, "model": model}
    yield {"part": "time", "model": "DeiT-S", "images": 256, "classes": 8}
    for images in (1000, 10_000):
        yield {"part": "memory", "model": "VGG16-BN", "images": images}
    others: tuple[Row, ...] = (
        *({"images": images} for images in (256, 128, 64)),
        *({"classes": classes} for classes in (2, 5)),
        *({"model": model} for model in ("VGG11-BN", "VGG13-BN", "VGG19-BN")),
    )
    for library in ("Torch-Pruning 1.6.1", "network-pruner 2.16"):
        for other in others:
            yield {"part": "peer", "library": library, **FIRST_OF_PEERS, **other}


def measure(case: Row, shared: Path) -> Row:
    parts = {"time": by_time, "memory": by_memory, "peer": by_peer}
    return parts[case["part"]](case, shared)


def net_of(name: str) -> nn.Module:
    """A model with random weights."""
    torch.manual_seed(0)
    if name == "DeiT-S":
        from fairpruner.inputs.sources import load_model

        return load_model("timm:deit_small_patch16_224").eval()
    if name.startswith("VGG"):  # with one linear map on its 512 features
        features = torchvision.models.get_model(name.lower().replace("-", "_"), weights=None).features
        return nn.Sequential(*features, nn.Flatten(), nn.Linear(512, 10)).eval()
    return CifarResNet(int(name.rpartition("-")[2])).eval()


def data_of(case: Row, shared: Path) -> Batches:
    """Batches of real images; the label of an image is its number modulo the classes."""
    if case["model"] == "DeiT-S":
        inputs, batch = imagenet_sample(shared)[0][: case["images"], :, 16:240, 16:240] / 127.5 - 1, 32
    else:
        inputs, batch = cifar10("train10k", shared)[0][: case["images"]], 128
    labels = torch.arange(len(inputs)) % case.get("classes", 10)
    return list(zip(inputs.split(batch), labels.split(batch), strict=True))


def plain(net: nn.Module, data: Batches) -> None:
    """One forward and backward pass over the data."""
    for inputs, labels in data:
        ten_logits(net(inputs), labels).backward()
        net.zero_grad(set_to_none=True)


def by_time(case: Row, shared: Path) -> Row:
    net, data = net_of(case["model"]), data_of(case, shared)
    spaces = fp.discover(net, data[0][0][:1])
    first = data[:1]
    plain(net, first)  # to warm up
    fp.score(net, first, spaces=spaces, loss=ten_logits)
    actions: tuple[Callable[[], object], ...] = (
        lambda: plain(net, data),
        lambda: fp.score(net, data, spaces=spaces, loss=ten_logits),
    )
    rounds = [[seconds(action) for action in actions] for _ in range(ROUNDS)]
    passes, scores = (statistics.median(times) for times in zip(*rounds, strict=True))
    return {"plain_s": round(passes, 2), "score_s": round(scores, 2), "ratio_cpu": round(scores / passes, 3)}


def ten_logits(output: Tensor, labels: Tensor) -> Tensor:
    """The loss of a model of ten logits, whatever the number of classes that the signals compare."""
    return F.cross_entropy(output, labels % 10)


def seconds(action: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    start = clock()
    action()
    return clock() - start


def by_memory(case: Row, shared: Path) -> Row:
    """Peak memory of fresh processes."""
    found = {}
    for what in ("plain", "score"):
        script = f"import scoring; scoring.print_peak({case!r}, {str(shared.resolve())!r}, {what!r})"
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True)
        found[f"{what}_mb"] = round(int(done.stdout.split()[-1]) / 1e6)
    return found


def print_peak(case: Row, shared: str, what: str) -> None:
    net, data = net_of(case["model"]), data_of(case, Path(shared))
    spaces = fp.discover(net, data[0][0][:1])
    plain(net, data) if what == "plain" else fp.score(net, data, spaces=spaces)
    # Not ru_maxrss: that begins with what the parent held when it forked.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) * 1024)


def by_peer(case: Row, shared: Path) -> Row:
    """Processor seconds of another library, and of fairpruner for the same."""
    with_packages(*PEERS)
    net, data = net_of(case["model"]), data_of(case, shared)
    spaces = fp.discover(net, data[0][0][:1])

    def whole_way() -> object:
        spaces = fp.discover(net, data[0][0][:1])
        scores = fp.score(net, data, spaces=spaces)
        return fp.cut(net, fp.allocate(scores, keep=fp.Budget("flops", 0.5)))

    if case["library"].startswith("Torch-Pruning"):
        ours, theirs, rounds = whole_way, by_torch_pruning, ROUNDS
        theirs(copy.deepcopy(net), data[:1])  # to warm up
    else:
        ours, theirs, rounds = (lambda: fp.score(net, data, spaces=spaces)), by_network_pruner, 1
    ours()
    own = statistics.median(seconds(ours) for _ in range(ROUNDS))
    copies = [copy.deepcopy(net) for _ in range(rounds)]
    other = statistics.median(seconds(lambda one=one: theirs(one, data)) for one in copies)
    return {"seconds": round(other, 2), "fairpruner_s": round(own, 2), "times": round(other / own, 2)}


def by_torch_pruning(net: nn.Module, data: Batches) -> None:
    """Taylor, globally, in steps until half of the MACs are left."""
    import torch_pruning as tp

    for inputs, labels in data:
        F.cross_entropy(net(inputs), labels).backward()
    example, last = data[0][0][:1], [m for m in net.modules() if isinstance(m, nn.Linear)][-1]
    stream = [m for path, m in net.named_modules() if path == "conv1" or path.endswith("conv2")]
    pruner = tp.pruner.BasePruner(
        net,
        example,
        importance=tp.importance.GroupTaylorImportance(),
        global_pruning=True,
        pruning_ratio=0.9,
        iterative_steps=20,
        ignored_layers=[last, *stream],
    )
    whole = tp.utils.count_ops_and_params(net, example)[0]
    while tp.utils.count_ops_and_params(net, example)[0] > whole / 2:
        pruner.step()


def by_network_pruner(net: nn.Module, data: Batches) -> None:
    """The metrics that its plans are made of."""
    network_pruner_scores(net, *(torch.cat(parts) for parts in zip(*data, strict=True)))


def page() -> str:
    """Three tables as Markdown."""
    stored = runs.stored("scoring")
    by_part = {part: [row for row in stored if row["part"] == part] for part in ("time", "memory", "peer")}
    tables = {
        "time": pages.table(
            ["model", "images", "classes", "score / plain pass, processor time"],
            [
                [r["model"], f"{r['images']:,}", f"{r['classes']}", f"{r['ratio_cpu']:.2f}"]
                for r in by_part["time"]
            ],
        ),
        "memory": pages.table(
            ["model", "images", "peak of plain passes, MB", "peak of scoring, MB"],
            [
                [r["model"], f"{r['images']:,}", f"{r['plain_mb']:,}", f"{r['score_mb']:,}"]
                for r in by_part["memory"]
            ],
        ),
        "peer": pages.table(
            ["library", "model", "images", "classes", "times as long as fairpruner"],
            [
                [r["library"], r["model"], f"{r['images']:,}", f"{r['classes']}", f"{r['times']:.1f}"]
                for r in by_part["peer"]
            ],
        ),
    }
    what = (
        "Above: scoring as a multiple of a plain pass, as the number of images, of classes and the depth"
        " grow. Below: the time of other libraries as a multiple of fairpruner's"
    )
    drawn = [pages.picture("scoring", what)] * all(len(growing(axis)) > 1 for axis in AXES)
    return "\n\n".join([*(tables[part] for part, rows in by_part.items() if rows), *drawn])


def growing(axis: str, library: str = "") -> list[tuple[float, float]]:
    """One axis, and the cost at each of its points: of scoring, or of another library beside it."""
    part, first, family, cost = (
        ("peer", FIRST_OF_PEERS, "VGG", "times") if library else ("time", FIRST, "ResNet", "ratio_cpu")
    )
    rows = [r for r in runs.stored("scoring") if r["part"] == part and r.get("library", "") == library]
    same = {name: first[name] for name in first if name != ("model" if axis == "depth" else axis)}
    rows = [row for row in rows if same.items() <= row.items()]
    if axis == "depth":
        named = [(row["model"], row[cost]) for row in rows if row["model"].startswith(family)]
        return sorted((int("".join(filter(str.isdigit, model))), value) for model, value in named)
    return sorted((row[axis], row[cost]) for row in rows)


def plot() -> Any:
    """One panel for each axis: scoring beside a plain pass, and other libraries beside scoring."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, len(AXES), sharey="row")
    libraries = dict.fromkeys(row["library"] for row in runs.stored("scoring") if "library" in row)
    for axes, (axis, title) in zip(above, AXES.items(), strict=True):
        draw(axes, [growing(axis)], color="#2a6f97")
        axes.set(xlabel=title, ylim=(0, None))
    above[0].set_ylabel("score / plain pass")
    for axes, (axis, title) in zip(below, PEER_AXES.items(), strict=True):
        draw(axes, [growing(axis, library) for library in libraries])
        axes.axhline(1, color="#2a6f97", linewidth=0.8)
        axes.set(yscale="log", xlabel=title)
    below[0].set_ylabel("other library / fairpruner")
    below[-1].legend(list(libraries), fontsize="small")
    return figure


def draw(axes: Any, lines: list[list[tuple[float, float]]], **style: Any) -> None:
    """Lines over a logarithmic axis whose ticks are the measured points."""
    axes.set_xscale("log")
    for points in lines:
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", **style)
    ticks = sorted({x for points in lines for x, _ in points})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
