"""What the selected signals need to observe, and the parts of the model that are observed for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fairpruner.core.spaces import Spaces
from fairpruner.core.units import Kind, UnitSpace
from fairpruner.models.experts import ExpertBlock, expert_blocks, expert_lists
from fairpruner.models.reads import Read, observed_parts, reads_of
from fairpruner.scoring.signals.base import Observation
from fairpruner.scoring.signals.selection import Selection


class Demand:
    """Which observations the selected signals need, and on which spaces."""

    def __init__(self, spaces: Spaces, selections: Sequence[Selection]) -> None:
        self._spaces = spaces
        self._kinds: dict[Observation, set[Kind]] = {}
        for selection in selections:
            for kind, signal in selection.by_kind.items():
                for need in signal.needs:
                    self._kinds.setdefault(need, set()).add(kind)
        # The names of the signals that compare classes.
        self.comparing = tuple(
            signal.name for selection in selections for signal in selection.signals if signal.compares_classes
        )

    @property
    def needs_data(self) -> bool:
        """Whether any signal needs more than the weights."""
        return bool(self._kinds)

    @property
    def needs_backward(self) -> bool:
        """Whether each batch takes a backward pass from its mean loss."""
        return self.any_of("gradients", "slopes", "gates", "routed_gradients")

    def any_of(self, *observations: Observation) -> bool:
        """Whether a signal needs one of the observations."""
        return any(observation in self._kinds for observation in observations)

    def spaces(self, *observations: Observation) -> list[UnitSpace]:
        """The spaces on which a signal needs one of the observations."""
        kinds = set().union(*(self._kinds.get(observation, set()) for observation in observations))
        return [space for space in self._spaces if space.kind in kinds]


@dataclass(frozen=True, eq=False)
class Watched:
    """The parts of the model that are observed."""

    reads: tuple[Read, ...]
    observed: frozenset[Read]  # those that activation signals see; the others only serve gates and deletions
    blocks: tuple[ExpertBlock, ...]
    fused: tuple[ExpertBlock, ...]  # those of the blocks whose experts are stacks of matrices
    weights: dict[str, nn.Parameter]  # the parameters that get gradients, by name

    @staticmethod
    def of(model: nn.Module, demand: Demand) -> Watched:
        """What must be observed in this model."""
        lists = expert_lists(model)
        reads = reads_of(
            model,
            [s for s in demand.spaces("activations", "slopes", "gates", "deletions") if s.kind != "block"],
            observed_only=not demand.any_of("gates", "deletions"),
            lists=lists,
        )
        for_activations = demand.spaces("activations", "slopes")
        observed = frozenset(
            read
            for read in reads
            if read.space in for_activations and read.part in observed_parts(read.space, lists)
        )
        blocks = _blocks(model, demand, reads)
        fused = tuple(block for block in blocks if block.experts not in lists)
        return Watched(reads, observed, blocks, fused, _weights(model, demand))

    def spaces_of(self, name: str) -> set[str]:
        """The spaces that depend on the space or block of experts of this name."""
        experts = tuple(f"{block.experts}." for block in self.blocks if block.name == name)
        return {name, *(read.space.name for read in self.reads if read.part.tensor.startswith(experts))}


def _blocks(model: nn.Module, demand: Demand, reads: Sequence[Read]) -> tuple[ExpertBlock, ...]:
    """The blocks of experts whose routing is observed: those that are scored, and those that hold a read."""
    scored = {space.name for space in demand.spaces("routing", "routed_gradients", "routed_losses")}
    # The routing assigns the rows that an expert's weights read to samples.
    holders = {read.expert[0] if read.expert else read.part.tensor.rpartition(".")[0] for read in reads}
    return tuple(block for block in expert_blocks(model) if block.name in scored or block.experts in holders)


def _weights(model: nn.Module, demand: Demand) -> dict[str, nn.Parameter]:
    """The parameters of which scored units own slices, if a signal needs their gradients."""
    owned = {part.tensor for space in demand.spaces("gradients", "slopes", "gates") for part in space.slices}
    return {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in owned and parameter.is_floating_point()
    }
