"""The models of the zoo by group: how each is built with random weights, and an example to call it with."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))

from harness.torchvision_shim import torchvision  # noqa: E402
from nets.zoo_topics import TOPICS  # noqa: E402
from nets.zoo_transformers import TRANSFORMERS  # noqa: E402

LIBRARIES = {
    "timm": ("timm",),
    "transformers": ("transformers", "transformers.modeling_utils"),
    "experts": ("transformers", "transformers.modeling_utils"),
}
Entry = tuple[Callable[[], nn.Module], Callable[[], Any]]
TOLERANCES = {"float64": 1e-8, "partly float32": 1e-6, "float32": 1e-4}
NAMES = ROOT / "benchmarks" / "results" / "zoo_timm.json"  # timm's module -> its smallest model


def find(group: str, name: str) -> Entry:
    """How to build a model of the zoo, and its example."""
    return GROUPS[group][1](name)


def image(size: int) -> Tensor:
    return torch.randn(1, 3, size, size)


# ── torchvision ─────────────────────────────────────────────────────────────────────────────────


def _torchvision_names(package: str) -> list[str]:
    module = getattr(torchvision.models, package) if package else torchvision.models
    names = torchvision.models.list_models(module=module)
    return [name for name in names if not name.startswith("quantized_")]


def _torchvision(name: str) -> Entry:
    fixed = {"inception_v3": 96, "alexnet": 80, "squeezenet1_0": 64, "squeezenet1_1": 64}
    build = torchvision.models.get_model_builder(name)
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    size = fixed.get(name, 64)
    if name.startswith("vit_"):
        options, size = {"image_size": 64 if "_14" not in name else 56}, 64 if "_14" not in name else 56
    if name.startswith("maxvit"):
        size = 224
    return functools.partial(build, weights=None, **options), lambda: image(size)


def _detection(name: str) -> Entry:
    _give_nms()
    build = torchvision.models.get_model_builder(name)
    options: dict[str, Any] = {"weights": None, "weights_backbone": None}
    if not name.startswith("ssd"):
        options |= {"min_size": 64, "max_size": 96}
    if "rcnn" in name:  # random weights find nothing that is likely, and no output proves nothing
        options |= {"box_score_thresh": 0.0, "box_detections_per_img": 10}
    return functools.partial(build, **options), lambda: ([torch.rand(3, 64, 80)],)


def _segmentation(name: str) -> Entry:
    build = torchvision.models.get_model_builder(name)
    return functools.partial(build, weights=None, weights_backbone=None), lambda: image(64)


def _video(name: str) -> Entry:
    build = torchvision.models.get_model_builder(name)
    fixed = {"mvit_v1_b": (16, 224), "mvit_v2_s": (16, 224), "s3d": (16, 224)}
    frames, size = fixed.get(name, (8, 64))
    return functools.partial(build, weights=None), lambda: torch.randn(1, 3, frames, size, size)


@functools.cache
def _give_nms() -> None:
    """A plain non-maximum suppression for builds of torchvision that came without the compiled one."""

    def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
        overlap = torchvision.ops.box_iou(boxes, boxes)
        left, kept = scores.argsort(descending=True, stable=True), list[Tensor]()
        while left.numel():
            kept.append(left[0])
            left = left[1:][overlap[left[0], left[1:]] <= threshold]
        return torch.stack(kept) if kept else left

    if not torchvision.extension._has_ops():
        torch.library.impl("torchvision::nms", "CPU", nms)
        torchvision.extension._has_ops = lambda: False
        torchvision.ops.boxes._assert_has_ops = lambda: None


# ── timm ────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _timm_smallest() -> dict[str, str]:
    """The smallest model of every module of timm, by parameters; computed once and kept in a file."""
    import timm
    from timm.models import list_modules

    if NAMES.exists():
        return json.loads(NAMES.read_text())
    smallest = {}
    for module in sorted(list_modules()):
        sizes = {name: _params(name) for name in timm.list_models(module=module) if name[:5] != "test_"}
        if sizes:
            smallest[module] = min(sizes, key=lambda name: (sizes[name], name))
    NAMES.write_text(json.dumps(smallest, indent=1) + "\n")
    return smallest


def _params(name: str) -> int:
    import timm

    try:
        with torch.device("meta"):
            model = timm.create_model(name)
    except (NotImplementedError, RuntimeError):  # its initialisation reads values
        model = timm.create_model(name)
    return sum(p.numel() for p in model.parameters())


def _timm(family: str) -> Entry:
    """The smallest model of a family on the smallest of these images that it takes."""
    import timm

    name = _timm_smallest()[family]
    given = timm.get_pretrained_cfg(name).input_size[-1]
    for size in sorted({64, 96, 128, 192, 224, 256, given}):
        for options in ({"img_size": size}, {}):
            if _takes(name, options, size):
                return functools.partial(timm.create_model, name, **options), lambda size=size: image(size)
    raise ValueError(f"{name} takes no image of up to {given} pixels")


def _takes(name: str, options: dict[str, Any], size: int) -> bool:
    """Whether a model of timm can be built with these options and takes an image of this size."""
    import timm

    for device in ("meta", "cpu"):  # no memory and no arithmetic, unless the model needs values
        try:
            with torch.device(device), torch.no_grad():
                timm.create_model(name, **options).eval()(image(size))
        except Exception as error:  # a model says in many ways that an image is too small
            if device == "meta" and "meta" in str(error):
                continue
            return False
        return True
    return False


# ── small networks, transformers, experts ───────────────────────────────────────────────────────


@functools.cache
def _small() -> dict[str, Any]:
    """The small networks of tests/zoo.py, which has the name of the benchmark."""
    spec = importlib.util.spec_from_file_location("small_networks", ROOT / "tests" / "zoo.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SMALL


def _topology(name: str) -> Entry:
    build, shape = _small()[name]
    return build, lambda: torch.randn(shape)


def _transformers(name: str) -> Entry:
    import transformers

    made = TRANSFORMERS[name]

    def build() -> nn.Module:
        config = getattr(transformers, made.config)(**made.options())
        model = getattr(transformers, made.model)(config)
        return model.eval()

    return build, made.example


def _moe_names() -> list[str]:
    from moe_zoo import FAMILIES, FURTHER

    return [*FAMILIES, *FURTHER, "own_list"]


def _moe(name: str) -> Entry:
    from moe_zoo import moe, plain_example, plain_moe, tokens

    if name == "own_list":
        return plain_moe, plain_example
    return lambda: moe(name).float(), tokens


# ── diffusion, YOLO, graphs ─────────────────────────────────────────────────────────────────────


def _diffusers(name: str) -> Entry:
    from nets.zoo_diffusers import DIFFUSERS

    return DIFFUSERS[name]


def _diffusers_names() -> list[str]:
    if importlib.util.find_spec("diffusers") is None:
        return []
    from nets.zoo_diffusers import DIFFUSERS

    return list(DIFFUSERS)


def _yolo_names() -> list[str]:
    found = importlib.util.find_spec("ultralytics") is not None
    return ["yolov5n", "yolov8n", "yolov8n-seg", "yolo11n", "yolo12n"] if found else []


def _yolo(name: str) -> Entry:
    from ultralytics.nn.tasks import DetectionModel, SegmentationModel

    kind = SegmentationModel if name.endswith("-seg") else DetectionModel

    def build() -> nn.Module:
        return kind(f"{name}.yaml", verbose=False).eval()

    return build, lambda: image(64)


def _graph_names() -> list[str]:
    if importlib.util.find_spec("torch_geometric") is None:
        return []
    from nets.zoo_graphs import GRAPHS

    return list(GRAPHS)


def _graph(name: str) -> Entry:
    from nets.zoo_graphs import GRAPHS

    return GRAPHS[name]


GROUPS: dict[str, tuple[Callable[[], list[str]], Callable[[str], Entry]]] = {
    "topologies": (lambda: list(_small()), _topology),
    "topics": (lambda: list(TOPICS), lambda name: TOPICS[name]),
    "torchvision": (functools.partial(_torchvision_names, ""), _torchvision),
    "torchvision-detection": (functools.partial(_torchvision_names, "detection"), _detection),
    "torchvision-segmentation": (functools.partial(_torchvision_names, "segmentation"), _segmentation),
    "torchvision-video": (functools.partial(_torchvision_names, "video"), _video),
    "timm": (lambda: list(_timm_smallest()), _timm),
    "transformers": (lambda: list(TRANSFORMERS), _transformers),
    "experts": (_moe_names, _moe),
    "diffusers": (_diffusers_names, _diffusers),
    "ultralytics": (_yolo_names, _yolo),
    "graphs": (_graph_names, _graph),
}
