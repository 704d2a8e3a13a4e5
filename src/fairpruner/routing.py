"""Seeing what routers and experts do: which token went to which expert, with what weight, and what came of it.

Blocks call their experts in three ways, each with a watcher of its own. All of them hand over the same `Call`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, has_torch_function

from .calling import tensors_of
from .experts import ExpertBlock
from .observing import Unseen, consumed

IMPLEMENTATION = "fairpruner"  # the name under which transformers runs our experts during the pass


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a block: P pairs of a token and an expert; those of weight 0 were not chosen."""

    block: ExpertBlock
    tokens: int
    token: Tensor  # [P] of each pair
    expert: Tensor  # [P]
    weight: Tensor  # [P] router weights
    norm: Tensor  # [P] norms of what the pairs add to the block's output
    gates: tuple[Tensor, ...]  # ones, [P] together, whose gradients are each pair's part of <gradient, weights of the expert>; none if experts hide some
    logits: Tensor | None  # [tokens, E] of the router
    inner: Tensor | None = None  # [P, I] what the last products of the experts read, where each pair's output is just that times its weight

    def by_expert(self, values: Tensor) -> Tensor:
        """Values [P] summed over the pairs of each expert, [E]."""
        return self.by_group(values, torch.zeros_like(self.token), 1)[0]

    def by_group(self, values: Tensor, group: Tensor, groups: int) -> Tensor:
        """Values [P] summed over the pairs of each group, given for each pair, and expert: [groups, E], on the CPU, since blocks may lie on several devices."""
        sums = torch.zeros(groups * self.block.size, dtype=torch.float64)
        return sums.index_add_(0, (group * self.block.size + self.expert).cpu(), values.detach().to("cpu", torch.float64)).view(groups, -1)

    def tally(self, counted: Tensor) -> dict[str, Tensor]:
        """What the `counted` tokens, bool [tokens], sum up to for each expert."""
        counted = counted.to(self.token.device)
        ours = counted[self.token] & (self.weight != 0)  # [P]
        sums = {
            "tokens": counted.sum().to("cpu", torch.float64)[None],
            "selected": self.by_expert(ours),
            "weight": self.by_expert(ours * self.weight),
            "output": self.by_expert(ours * self.norm),
        }
        if self.logits is not None:
            sums["softmax"] = probabilities(self.logits.detach())[counted].sum(0).to("cpu", torch.float64)
        return sums


def probabilities(logits: Tensor) -> Tensor:
    """The softmax of a router's logits, [tokens, E]; some routers hand out probabilities already."""
    values = logits if logits.dtype == torch.float64 else logits.float()
    return values if bool((values >= 0).all()) and torch.allclose(values.sum(1), torch.ones_like(values[:, 0]), atol=1e-3) else values.softmax(1)


class Gated(torch.autograd.Function):
    """The identity on [P, …], through which a gate of ones [P] gets the gradient <dL/dvalue, value> of each row.

    Whatever is linear in its parameters jointly, as a product with a bias, has <dL/dparameters, parameters> = <dL/dvalue, value>.
    So the gates of an expert's products, summed, are its term in the paper's R-Score, and no weight ever gets a gradient.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(value, gate)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = ctx.saved_tensors
        width = value.numel() // max(1, len(gate))  # an expert may be called on no token at all
        rows, slopes = (t.reshape(len(gate), width).to(gate.dtype) for t in (value, gradients[0]))
        return gradients[0], torch.linalg.vecdot(rows, slopes)


def new_gate(rows: int, like: Tensor) -> Tensor:
    """Ones that can get a gradient, [rows], in at least float32."""
    return torch.ones(rows, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32, device=like.device, requires_grad=True)


def gated(value: Tensor, gate: Tensor) -> Tensor:
    output: Tensor = Gated.apply(value, gate)  # type: ignore[no-untyped-call]
    return output


def loss_position_terms(calls: Sequence[Call], losses: Tensor) -> list[Tensor]:
    """For each call the sum, [E], over all tokens of their router weight times <gradient of their own loss, weights of the expert>.

    `losses` [N, T] are those of the tokens; texts do not mix, so that one backward serves a position of all of them.
    """
    texts, length = losses.shape
    terms = [torch.zeros(call.block.size, dtype=torch.float64) for call in calls]
    weights = [call.by_group(call.weight, call.token, call.tokens).view(texts, length, -1) for call in calls]  # [N, T, E] each
    for position in range(length):
        if losses[:, position].any():
            found = torch.autograd.grad(losses[:, position].sum(), gates_of(calls), retain_graph=True, allow_unused=True)
            for term, weight, call, slopes in zip(terms, weights, calls, slopes_of(calls, found), strict=True):
                term += (weight[:, position] * call.by_group(slopes, call.token // length, texts)).sum(0)
    return terms


def gates_of(calls: Sequence[Call]) -> list[Tensor]:
    return [gate for call in calls for gate in call.gates]


def slopes_of(calls: Sequence[Call], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """For each call its pairs' parts of <gradient, weights of the expert>, [P], from the gradients of all gates."""
    slopes = [torch.zeros_like(gate) if gradient is None else gradient for gate, gradient in zip(gates_of(calls), gradients, strict=True)]
    starts = itertools.accumulate((len(call.gates) for call in calls), initial=0)
    return [torch.cat(slopes[start : start + len(call.gates)]) for start, call in zip(starts, calls, strict=False)]


Visit = Callable[[Call], None]
Heard = dict[str, list[Tensor]]  # block -> what its router gave for every token and expert, [tokens, E] each


@contextmanager
def watching_experts(model: nn.Module, blocks: Sequence[ExpertBlock], visit: Visit) -> Iterator[None]:
    """Inside, with gradients enabled, every forward shows `visit` what each block of experts did; afterwards the model is as it was."""
    heard: Heard = {}
    fused: dict[Any, ExpertBlock] = {}
    since = _Since()
    with ExitStack() as stack:
        if any(isinstance(model.get_submodule(block.experts), nn.ModuleList) for block in blocks):
            stack.enter_context(since)
        for block in blocks:
            experts, caller = model.get_submodule(block.experts), model.get_submodule(block.experts.rpartition(".")[0])
            if model.get_submodule(block.router) is not caller:
                stack.callback(model.get_submodule(block.router).register_forward_hook(_hear(heard, block)).remove)
            if isinstance(experts, nn.ModuleList):
                _Listed(block, heard, visit, experts, caller, since).attach(stack)
            elif hasattr(experts, "is_transposed"):
                fused[experts] = block
            else:
                dense = _Dense(block, heard, visit)
                dense.attach(stack, experts)
                stack.enter_context(dense)
        if fused:
            stack.enter_context(_running_fused(fused, heard, visit))
        yield


def _hear(heard: Heard, block: ExpertBlock) -> Callable[[nn.Module, Any, Any], None]:
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        heard[block.name] = [t.detach().reshape(-1, block.size) for t in tensors_of(output) if t.is_floating_point() and t.shape[-1] == block.size]

    return leave


def _logits(heard: Heard, block: ExpertBlock, tokens: int, position: int = 0) -> Tensor | None:
    found = heard.get(block.name)
    return found[position] if found and len(found[position]) == tokens else None


@contextmanager
def _running_fused(fused: Mapping[Any, ExpertBlock], heard: Heard, visit: Visit) -> Iterator[None]:
    """The fused experts of transformers, called with (hidden [T, H], chosen [T, k], weights [T, k]), are run by a function of ours."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def run(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.reshape(-1).argsort(stable=True)  # [P] pairs, those of one expert together
        expert, token, weight = chosen.reshape(-1)[order], order // chosen.shape[1], weights.reshape(-1)[order]
        counts = torch.bincount(expert, minlength=len(experts.down_proj)).tolist()
        gate = new_gate(len(order), hidden)
        up = gated(_products(experts, "gate_up_proj" if experts.has_gate else "up_proj", hidden[token], counts), gate)  # [P, I or 2 I]
        inner = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)  # [P, I]
        if has_torch_function((inner,)):  # whoever watches hidden units inside the experts sees them in the order of tokens
            inner = consumed(inner[order.argsort()], experts.down_proj.mT if experts.is_transposed else experts.down_proj)[order]
        output = gated(_products(experts, "down_proj", inner, counts), gate)  # [P, H]
        if experts.has_post_expert_norm:
            output = experts.post_expert_norm(output)
        output = output * weight[:, None]
        if experts in fused:
            block = fused[experts]
            visit(
                Call(
                    block,
                    len(hidden),
                    token,
                    expert,
                    weight.detach(),
                    _norms(output),
                    (gate,),
                    _logits(heard, block, len(hidden)),
                    None if experts.has_post_expert_norm else inner.detach(),
                )
            )
        return torch.zeros_like(hidden).index_add(0, token, output.to(hidden.dtype))

    configs = {id(config): config for config in (experts.config for experts in fused)}
    before = [(config, config._experts_implementation) for config in configs.values()]
    try:
        ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = run
        for config, _ in before:
            config._experts_implementation = IMPLEMENTATION
        yield
    finally:
        for config, implementation in before:
            config._experts_implementation = implementation
        del ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION]


def _products(experts: Any, name: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """What the experts' matrices make of their rows, [P, in] -> [P, out], the first `counts[0]` rows being those of expert 0."""
    weights: Tensor = getattr(experts, name)  # [E, out, in], or the other way round
    biases = getattr(experts, f"{name}_bias") if experts.has_bias else [None] * len(weights)
    parts = zip(rows.to(weights.dtype).split(counts), weights.mT if experts.is_transposed else weights, biases, strict=True)
    return torch.cat([F.linear(own, weight, bias) for own, weight, bias in parts if len(own)])


def _norms(output: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(output.detach().flatten(1), dim=1, dtype=torch.float64 if output.dtype == torch.float64 else torch.float32)
    return norms


class _Since(TorchFunctionMode):
    """Remembers the tensors met since the last call of an expert, as long as the block goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] | None = None

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.tensors is not None:
            self.tensors.update({id(tensor): tensor for tensor in tensors_of((args, result)) if tensor.requires_grad})
        return result


class _Listed:
    """A plain block with an `nn.ModuleList` of experts, which sums up their outputs weighted by the router.

    How the block chooses and weighs is its own affair: a backward from the sum to the experts' outputs, with the digits
    of each token's number as gradients, tells the token and the weight of every row. The sum is the block's own output, or
    else the last tensor before it, ahead of a norm or a projection, that is one.
    """

    # Their outputs are linear in their parameters jointly.
    LINEAR = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Conv1d)

    def __init__(self, block: ExpertBlock, heard: Heard, visit: Visit, experts: nn.ModuleList, caller: nn.Module, since: _Since) -> None:
        self._block, self._heard, self._visit, self._experts, self._caller = block, heard, visit, experts, caller
        self._since = since
        self._rows: list[tuple[int, Tensor, Tensor]] = []  # (expert, output [n, H], gate [n]) of each call of an expert
        self._gate = torch.empty(0)

    def attach(self, stack: ExitStack) -> None:
        holders = [module for module in self._experts.modules() if next(module.parameters(recurse=False), None) is not None]
        self._exact = all(isinstance(module, self.LINEAR) for module in holders)
        for module in holders:
            stack.callback(module.register_forward_hook(self._product).remove)
        for number, expert in enumerate(self._experts):
            stack.callback(expert.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
            stack.callback(expert.register_forward_hook(partial(self._leave, number)).remove)
        stack.callback(self._caller.register_forward_hook(self._done).remove)

    def _enter(self, expert: nn.Module, args: Any, kwargs: Any) -> None:
        self._since.tensors = None
        source = next(tensors_of((args, kwargs)))
        self._gate = new_gate(source.shape[:-1].numel(), source)

    def _product(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return gated(output, self._gate).clone()  # a copy, since an activation may change it in place

    def _leave(self, number: int, expert: nn.Module, args: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise self._unseen()
        self._rows.append((number, output, self._gate))
        shown = output.clone()
        self._since.tensors = {id(shown): shown}
        return shown

    def _done(self, caller: nn.Module, args: Any, output: Any) -> None:
        calls, self._rows = [row for row in self._rows if len(row[2])], []
        since, self._since.tensors = reversed((self._since.tensors or {}).values()), None
        if not calls:
            return
        last, width = next(tensors_of(output)), calls[0][1].shape[-1]
        tokens = last.numel() // last.shape[-1]
        sums = (tensor.reshape(tokens, width) for tensor in (last, *since) if tensor.shape[-1:] == (width,) and tensor.numel() == tokens * width)
        places = next(filter(None, (self._places(mixed, [values for _, values, _ in calls]) for mixed in sums)), None)
        if places is None:
            raise self._unseen()
        weight, token = places
        expert = torch.cat([torch.full_like(gate, number, dtype=torch.int64) for number, _, gate in calls])
        norm = torch.cat([_norms(values.reshape(len(gate), -1)) for _, values, gate in calls]) * weight.abs()
        gates = tuple(gate for *_, gate in calls) if self._exact else ()
        self._visit(Call(self._block, tokens, token, expert, weight, norm, gates, _logits(self._heard, self._block, tokens)))

    def _places(self, mixed: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """The router weight and the token of every row of the experts' outputs, [P] each; None if they are not just weighted and added up."""
        tokens, width = mixed.shape
        if width < 3 or not mixed.requires_grad or any(values.shape[-1] != width for values in outputs):
            return None
        digits = torch.arange(tokens, device=mixed.device)[:, None] >> torch.arange(max(tokens - 1, 1).bit_length(), device=mixed.device) & 1  # [tokens, bits]
        token, done = torch.zeros(0, dtype=torch.int64), 0
        while done < digits.shape[1]:
            some = digits[:, done : done + width - 2]
            ones = digits.new_ones(tokens, 1)
            slopes = torch.cat([ones, some, ones.expand(-1, width - 1 - some.shape[1])], 1).to(mixed)  # [tokens, H]
            found = torch.autograd.grad(mixed, outputs, slopes, retain_graph=True, allow_unused=True)
            rows = torch.cat([slopes.new_full((1, width), torch.nan) if gradient is None else gradient.reshape(-1, width) for gradient in found])  # [P, H]
            weight = rows[:, 0]
            if not torch.allclose(weight, rows[:, -1]):  # nor is it, where an expert has no part in it
                return None
            bits = (rows[:, 1 : 1 + some.shape[1]].abs() > weight.abs()[:, None] / 2).long()
            part = (bits << torch.arange(done, done + some.shape[1], device=bits.device)).sum(1)
            token, done = part if done == 0 else token + part, done + some.shape[1]
        return weight, token

    def _unseen(self) -> Unseen:
        name = self._block.name
        return Unseen(
            name,
            f"Block {name!r} does not just add up what its experts give, weighted by its router, so that routing cannot be seen: leave it out with skip={name!r}, or score experts with removal='l2' and protection='deletion'.",
        )


class _Dense(TorchFunctionMode):
    """Fused experts that all see all tokens, [E * T, H] weighted by the router beforehand, in batched products (Llama 4)."""

    def __init__(self, block: ExpertBlock, heard: Heard, visit: Visit) -> None:
        super().__init__()
        self._block, self._heard, self._visit = block, heard, visit
        self._weights: set[int] = set()
        self._gate = torch.empty(0)

    def attach(self, stack: ExitStack, experts: nn.Module) -> None:
        self._weights = {id(parameter) for parameter in experts.parameters()}
        stack.callback(experts.register_forward_pre_hook(self._enter).remove)
        stack.callback(experts.register_forward_hook(self._leave).remove)

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if function is not torch.bmm or id(args[1]) not in self._weights:
            return function(*args, **(kwargs or {}))
        rows, weight = args
        if has_torch_function((rows,)):
            rows = consumed(rows.transpose(0, 1).flatten(0, 1), weight.mT).unflatten(0, (-1, self._block.size)).transpose(0, 1)  # [E, T, I]
        return gated(torch.bmm(rows, weight), self._gate)

    def _enter(self, experts: nn.Module, args: Any) -> None:
        self._gate = new_gate(len(args[0]), args[0])

    def _leave(self, experts: nn.Module, args: Any, output: Tensor) -> None:
        tokens = len(args[0]) // self._block.size
        weights, logits = _logits(self._heard, self._block, tokens), _logits(self._heard, self._block, tokens, -1)
        if len(args) > 1 or weights is None or len(args[0]) != weights.numel():
            return
        pair = torch.arange(weights.numel(), device=weights.device)
        self._visit(Call(self._block, tokens, pair % tokens, pair // tokens, weights.T.reshape(-1), _norms(output), (self._gate,), logits))
