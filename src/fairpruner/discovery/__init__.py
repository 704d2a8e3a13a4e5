"""Discover: model + example input -> every space of units, verified, and what every plan would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fairpruner.core.cost_model import CostModel, Factor, Term
from fairpruner.core.spaces import Spaces
from fairpruner.core.units import DEFAULT_KINDS, UnitSpace
from fairpruner.discovery.assemble import as_data_flows, assemble, module_of
from fairpruner.discovery.blocks import block_space
from fairpruner.discovery.check import Check
from fairpruner.discovery.costing import cost_model, operation_terms
from fairpruner.discovery.lively import with_pools
from fairpruner.discovery.routed import aligned, expert_space
from fairpruner.discovery.stream import as_scales, rms_norms, with_stream
from fairpruner.discovery.streamed import as_in_files, check_kinds, verify_by_layer
from fairpruner.discovery.trace import Trace, trace
from fairpruner.discovery.verify import verify
from fairpruner.errors import FairprunerError
from fairpruner.inputs.hugging_face import example_for
from fairpruner.inputs.streamed import Streamed
from fairpruner.models.caching import cached_layers
from fairpruner.models.experts import expert_blocks, plain_experts, unsupported_experts
from fairpruner.models.fingerprint import fingerprint
from fairpruner.models.recorded import record
from fairpruner.models.supported import check_has_numbers

UNUSED = (
    "the example does not use it in eval mode; to include it, discover with more_examples=[…] that do. If it"
    " only runs in training mode, as an auxiliary head does, a cut model may fail there"
)


def discover(
    model: nn.Module | Streamed,
    example: Any = None,
    *,
    more_examples: Sequence[Any] = (),
    kinds: Sequence[str] | None = None,
    skip: Sequence[str] = (),
) -> Spaces:
    """Find what can be removed from a model, by one forward pass over `example` and a check of every space.

    A model with several branches may need `more_examples` that reach them: spaces are found and checked on
    all examples, and costs are those of the first. `kinds` names the kinds to find. By default these are
    `channel`, `hidden`, `head` and `expert`. The kinds `block` (residual blocks) and `stream` (the width of
    the residual stream) are only found if you name them. `skip` names spaces, modules or patterns that are
    not pruned.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> spaces = discover(net, torch.zeros(1, 4))
    >>> [(space.name, space.kind, space.size) for space in spaces], spaces.left_out
    ([('0', 'hidden', 8)], {'2': "reaches the model's output"})
    """
    streamed = model if isinstance(model, Streamed) else None
    if isinstance(model, Streamed):
        check_kinds(kinds)
        example = example_for(model.model) if example is None else example
        model = with_pools(model.model)
    check_has_numbers(model)
    if example is None:
        raise FairprunerError(
            f"discover needs an example: an input that {type(model).__name__} is called with."
        )
    with plain_experts(model):
        kinds = DEFAULT_KINDS if kinds is None else kinds
        return _discover(model, [example, *more_examples], kinds, skip=skip, streamed=streamed)


def _discover(
    model: nn.Module,
    examples: Sequence[Any],
    kinds: Sequence[str],
    *,
    skip: Sequence[str],
    streamed: Streamed | None,
) -> Spaces:
    """`discover`; the random weights of `model` stand for those of a streamed model, if there is one."""
    found, seen = _found(model, examples, kinds, skip)
    chosen = found.only(kinds, skip)
    cached = cached_layers(model, examples[0])
    if streamed is None:
        sound, failed = _verified(model, examples, chosen)
    else:
        sound, failed = verify_by_layer(streamed, examples, chosen.items)
        cached = as_in_files(cached, streamed)
    left_out = {**chosen.left_out, **{name: _explained(reason, seen) for name, reason in failed.items()}}
    if not sound:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:5])
        raise FairprunerError(
            f"There is nothing to prune in {type(model).__name__}:"
            f" {reasons or 'no weight writes what another reads'}."
        )
    return replace(
        chosen,
        items=tuple(sound),
        left_out=left_out,
        costs=cost_model(seen, sound, model if streamed is None else streamed.model, cached),
        examples=record(list(examples)),
    )


def _found(
    model: nn.Module, examples: Sequence[Any], kinds: Sequence[str], skip: Sequence[str]
) -> tuple[Spaces, Trace]:
    """All spaces of the model before they are verified, still without costs, and the trace."""
    blocks = expert_blocks(model)
    experts = [expert_space(model, block, examples[0]) for block in blocks]
    removable = [space for space in experts if space.min_keep < space.size]
    whole = {
        space.name: f"routing needs all of its {space.size} experts"
        for space in experts
        if space not in removable
    }
    norms = rms_norms(model, examples[0]).values() if "stream" in kinds else ()
    with as_scales(model, norms):
        seen = trace(model, examples, removable)
    unused = {module_of(name): UNUSED for name in seen.unmet}
    traced, fixed = assemble(seen, model)
    left_out = {**unused, **fixed}
    last: list[UnitSpace] = []
    if "stream" in kinds:
        traced, stream, why = with_stream(traced, norms)
        last += [] if stream is None else [stream]
        left_out |= why
    left_out |= {**whole, **unsupported_experts(model)}
    fused = {block.experts for block in blocks}
    spaces = as_data_flows([*(aligned(space, fused) for space in traced), *removable], seen)
    last = [aligned(space, fused) for space in last]
    if "block" in kinds:
        residual, kept = block_space(model, examples, skip)
        last += [] if residual is None else [residual]
        left_out |= kept
    return Spaces((*spaces, *last), left_out, CostModel((), (), ()), fingerprint(model)), seen


def _verified(
    model: nn.Module, examples: Sequence[Any], chosen: Spaces
) -> tuple[list[UnitSpace], dict[str, str]]:
    """The spaces whose cut is correct, and name -> reason for the others.

    Each residual block was verified when it was found. Here the blocks are verified together with all other
    spaces.
    """
    blocks = [space for space in chosen if space.kind == "block"]
    sound, failed = verify(model, examples, [space for space in chosen if space.kind != "block"])
    for space in blocks:
        together = [*sound, space]
        wrong = Check(model, examples, together).failure(together)
        if wrong is None:
            sound = together
        else:
            failed[space.name] = wrong.reason
    return sound, failed


def _explained(reason: str, seen: Trace) -> str:
    """A reason; if the model draws random numbers in eval mode, this is named as the likely cause."""
    if not seen.random or "differ" not in reason:
        return reason
    return f"the model is random in eval mode ({', '.join(seen.random[:3])}), so a cut cannot be checked"


def operation_costs(model: nn.Module, example: Any, spaces: Spaces) -> tuple[list[Factor], list[Term]]:
    """Factors, and one term over them for the MACs of each operation, in the order of the forward pass.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> factors, terms = operation_costs(net, torch.zeros(1, 4), discover(net, torch.zeros(1, 4)))
    >>> [term.coefficient * factors[term.factors[0]].size for term in terms]
    [32, 16]
    """
    experts = [space for space in spaces if space.kind == "expert"]
    with as_scales(model, [norm for space in spaces for norm in space.norms]):
        seen = trace(model, [example], experts)
    return operation_terms(seen, spaces.items)
