"""Methods of others for language models, written as their papers describe them.

All but SliceGPT and ShortGPT remove hidden units of MLPs and groups of heads that share a key.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from nets.llm_setting import WIDTH, WINDOW, Setting
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.core.units import UnitSpace
from fairpruner.scoring.signals.base import Accumulator, BatchInfo, Context, Observation, Result, Signal


def magnitude(space: UnitSpace, model: nn.Module) -> Tensor:
    """The squared weights of each unit."""
    tensors, total = dict(model.named_parameters(remove_duplicate=False)), torch.zeros(space.size)
    for part in space.slices:
        squares = tensors[part.tensor].detach().square().movedim(part.dim, 0).flatten(1).sum(1)
        owned = torch.from_numpy(part.owner)
        total.index_add_(0, owned[owned >= 0], squares[owned >= 0])
    return total


@dataclass(frozen=True)
class ElementTaylor(Signal):
    """LLM-Pruner's first order: |weight x gradient|, summed over all weights of a unit."""

    name: str = "element_taylor"
    needs: ClassVar[frozenset[Observation]] = frozenset({"gradients"})

    def start(self, context: Context) -> Accumulator:
        return _ElementTaylor(context)


class _ElementTaylor(Accumulator):
    def __init__(self, context: Context) -> None:
        self._context = context
        self._sums: dict[str, Tensor] = {}

    def see_gradients(self, gradients: Mapping[str, Tensor], info: BatchInfo) -> None:
        for name, gradient in gradients.items():
            self._sums[name] = self._sums.get(name, torch.zeros(())) + gradient * info.samples

    def result(self) -> Result:
        tensors = dict(self._context.model.named_parameters(remove_duplicate=False))
        scores = {}
        for space in self._context.spaces:
            total = np.zeros(space.size)
            for part in space.slices:
                if part.tensor in self._sums:
                    terms = (tensors[part.tensor].detach() * self._sums[part.tensor]).abs()
                    sums = terms.movedim(part.dim, 0).flatten(1).sum(1).double().numpy()
                    np.add.at(total, part.owner[part.owner >= 0], sums[part.owner >= 0])
            scores[space.name] = total
        return Result(scores)


class Fluctuation:
    """FLAP's metric: the variance of each channel over tokens, times the squared weights that read it."""

    squares: ClassVar[dict[str, Tensor]] = {}  # space -> squared weights of every channel, [J, F]

    def __init__(self, space: UnitSpace) -> None:
        self._space, self._count = space, 0
        self._sum: Any = 0
        self._square: Any = 0

    def update(self, activation: Tensor, labels: Tensor | None) -> None:
        self._count += len(activation)
        self._sum = self._sum + activation.double().sum(0)
        self._square = self._square + activation.double().square().sum(0)

    def compute(self) -> Tensor:
        variance = self._square / self._count - (self._sum / self._count).square()  # [J, F]
        metric = variance * self.squares[self._space.name]
        standard: Tensor = (metric - metric.mean()) / metric.std()
        return standard.mean(1)


def register(setting: Setting) -> None:
    """Make the signals of others known under their names."""
    weights = dict(setting.model.named_parameters())
    for space in setting.spaces.only(kinds=WIDTH):
        part = space.observed
        squares = weights[part.tensor].detach().double().square().sum(0)  # [channels], in the order of units
        Fluctuation.squares[space.name] = squares.view(space.size, -1)
    fp.signals.removal_signal("magnitude")(magnitude)
    fp.signals.removal_signal("flap")(Fluctuation)


def flap(setting: Setting, share: float) -> nn.Module:
    """FLAP, with the mean of what was removed as a bias of its consumer."""
    scores = setting.scores(["flap"])
    plan = fp.allocate(scores, keep=setting.budget(share), rule="global")
    small = fp.cut(setting.model, plan)
    means = _input_means(setting, {space.observed.tensor for space in plan.spaces})
    weights = dict(setting.model.named_parameters())
    for space in plan.spaces:
        part = space.observed
        gone = torch.from_numpy(np.isin(part.owner, plan.removed[space.name]))
        lost = weights[part.tensor].detach()[:, gone] @ means[part.tensor][gone]  # [outputs]
        small.get_submodule(part.tensor.rpartition(".")[0]).bias = nn.Parameter(lost)
    return small


def _input_means(setting: Setting, tensors: set[str]) -> dict[str, Tensor]:
    """The mean over tokens of what each of these weights reads, [channels]."""
    sums: dict[str, Tensor] = {}
    handles = []
    for name in tensors:

        def seen(module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            sums[name] = sums.get(name, torch.zeros(())) + args[0].flatten(0, -2).sum(0)

        handles.append(setting.model.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(seen))
    with torch.no_grad():
        for window in setting.data:
            setting.model(**window)
    for handle in handles:
        handle.remove()
    return {name: total / (len(setting.data) * WINDOW) for name, total in sums.items()}


def shortgpt(setting: Setting, share: float) -> nn.Module:
    """Whole layers with the least block influence, until the share is reached."""
    layers = setting.model.model.layers
    turned = np.zeros(len(layers))
    handles = []
    for number, layer in enumerate(layers):

        def seen(module: nn.Module, args: Any, output: Any, number: int = number) -> None:
            after = output[0] if isinstance(output, tuple) else output
            turned[number] += float(1 - F.cosine_similarity(args[0], after, dim=-1).mean())

        handles.append(layer.register_forward_hook(seen))
    with torch.no_grad():
        for window in setting.data:
            setting.model(**window)
    for handle in handles:
        handle.remove()
    gone = np.argsort(turned)[: round(share * len(layers))]
    paths = {f"model.layers.{number}" for number in gone}
    spaces = setting.spaces.only(kinds=["block"])
    units = [u for part in spaces["blocks"].replaced if part.module in paths for u in part.units]
    return fp.cut(setting.model, fp.Plan.removing(spaces, {"blocks": units}))


class SlicedLayer(nn.Module):
    """A layer of Llama whose stream lies in one subspace before its attention, in another before its MLP."""

    def __init__(self, layer: Any, before: Tensor, between: Tensor) -> None:
        super().__init__()
        self.layer, self.before, self.between = layer, before, between  # projections, [C, C] each

    def forward(self, stream: Tensor, **options: Any) -> Tensor:
        stream = stream @ self.before
        added = self.layer.self_attn(hidden_states=self.layer.input_layernorm(stream), **options)[0]
        stream = (stream + added) @ self.between
        return stream + self.layer.mlp(self.layer.post_attention_layernorm(stream))


def slicegpt(setting: Setting, share: float) -> nn.Module:
    """SliceGPT: the stream keeps its first principal components, before every norm in another basis.

    The model computed here has the full width, and its stream is projected: this is what the narrow model
    computes. The matrices on the skip path, two for each layer, count as parameters.
    """
    layers, width = setting.model.model.layers, setting.model.config.hidden_size
    sizes = sum(p.numel() for p in layers[0].parameters() if p.ndim > 1)
    # K channels: sizes K / C + 2 K^2 = (1 - share) sizes.
    slope = sizes / width
    kept = int((np.sqrt(slope**2 + 8 * (1 - share) * sizes) - slope) / 4)
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    sums = [torch.zeros(width, width, dtype=torch.float64) for _ in [*norms, None]]
    handles = []
    for total, norm in zip(sums, [*norms, setting.model.model.norm], strict=True):

        def seen(module: nn.Module, args: tuple[Tensor, ...], total: Tensor = total) -> None:
            rows = args[0].flatten(0, -2)
            rows = rows / rows.square().mean(1, keepdim=True).sqrt()  # as the norm reads them
            total += (rows.T @ rows).double()

        handles.append(norm.register_forward_pre_hook(seen))
    with torch.no_grad():
        for window in setting.data:
            setting.model(**window)
    for handle in handles:
        handle.remove()
    bases = [torch.linalg.eigh(total).eigenvectors[:, -kept:] for total in sums]
    projections = [(basis @ basis.T).float() for basis in bases]
    small = copy.deepcopy(setting.model)
    for number, layer in enumerate(small.model.layers):
        small.model.layers[number] = SlicedLayer(layer, *projections[2 * number : 2 * number + 2])
    last = projections[-1]
    small.model.norm.register_forward_pre_hook(lambda module, args: (args[0] @ last,))
    return small
