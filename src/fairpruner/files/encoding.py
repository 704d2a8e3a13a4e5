"""Spaces, plans and latency tables as plain JSON values and back, and the digest that tells whether they were altered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
import torch

from ..costs import predict
from ..errors import FairprunerError
from ..latency import LatencyTable, TimedOp
from ..types import CostModel, Count, Factor, Ints, Plan, Slice, Spaces, Term, UnitSpace

Json = dict[str, Any]
WIDTH = 120  # of a line of a readable file


def encode_runs(values: Ints) -> list[list[int]]:
    """A vector as runs [first, count, each]: `count` values that rise by one from `first`, each repeated `each` times.

    >>> encode_runs(np.array([-1, -1, 4, 5, 6, 0, 0, 0, 1, 1, 1]))
    [[-1, 1, 2], [4, 3, 1], [0, 2, 3]]
    """
    starts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))  # [B] where a block of equal values begins
    value, each = values[starts], np.diff(starts, append=values.size)  # [B]
    joined = (np.diff(value) == 1) & (np.diff(each) == 0)  # [B - 1] the next block continues this run
    first = np.flatnonzero(np.concatenate([[True], ~joined]))  # [R] the block each run begins with
    count = np.diff(first, append=starts.size)
    return np.stack([value[first], count, each[first]], axis=1).tolist()  # type: ignore[no-any-return]


def decode_runs(runs: Sequence[Sequence[int]]) -> Ints:
    """The vector that `encode_runs` was given.

    >>> decode_runs([[-1, 1, 2], [4, 3, 1]])
    array([-1, -1,  4,  5,  6])
    """
    table = np.array(runs)  # [R, 3]
    if table.dtype.kind != "i" or table.ndim != 2 or table.shape[1] != 3 or table[:, 1:].min() < 1:
        raise ValueError(f"expected runs [first, count, each] of whole numbers, found {str(runs)[:80]}")
    first, count, each = table.T
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)  # position inside its run
    return np.repeat(np.repeat(first, count) + within, np.repeat(each, count)).astype(np.int64)


def spaces_to_json(spaces: Spaces) -> Json:
    """Spaces with all that they hold; owner vectors as runs."""
    return {
        "fingerprint": spaces.fingerprint,
        "left_out": dict(spaces.left_out),
        "items": [
            {
                "name": space.name,
                "kind": space.kind,
                "size": space.size,
                "min_keep": space.min_keep,
                "groups": space.groups,
                "multiple": space.multiple,
                "slices": [{"tensor": s.tensor, "dim": s.dim, "role": s.role, "owner": encode_runs(s.owner)} for s in space.slices],
                "counts": [{"module": c.module, "attribute": c.attribute, "owner": encode_runs(c.owner)} for c in space.counts],
            }
            for space in spaces
        ],
        "costs": {
            "factors": [{"size": f.size, "owned": {name: encode_runs(owned) for name, owned in f.owned.items()}} for f in spaces.costs.factors],
            "params": [[t.coefficient, list(t.factors)] for t in spaces.costs.params],
            "flops": [[t.coefficient, list(t.factors)] for t in spaces.costs.flops],
            "bytes": [[t.coefficient, list(t.factors)] for t in spaces.costs.bytes],
        },
    }


def spaces_from_json(content: Mapping[str, Any]) -> Spaces:
    """What `spaces_to_json` was given."""
    items = tuple(
        UnitSpace(
            name=item["name"],
            kind=item["kind"],
            size=index(item["size"]),
            min_keep=index(item["min_keep"]),
            groups=index(item.get("groups", 1)),  # files from before there were experts have neither, nor bytes
            multiple=index(item.get("multiple", 1)),
            slices=tuple(Slice(s["tensor"], index(s["dim"]), decode_runs(s["owner"]), s["role"]) for s in item["slices"]),
            counts=tuple(Count(c["module"], c["attribute"], decode_runs(c["owner"])) for c in item["counts"]),
        )
        for item in content["items"]
    )
    costs = content["costs"]
    factors = tuple(Factor(index(f["size"]), {name: decode_runs(runs) for name, runs in f["owned"].items()}) for f in costs["factors"])
    model = CostModel(factors, _terms(costs["params"]), _terms(costs["flops"]), _terms(costs.get("bytes", ())))
    return Spaces(items, dict(content["left_out"]), model, content["fingerprint"])


def _terms(rows: Sequence[Any]) -> tuple[Term, ...]:
    return tuple(Term(index(coefficient), tuple(map(index, factors))) for coefficient, factors in rows)


def plan_to_json(plan: Plan) -> Json:
    """A plan with its spaces: what a person wants to read comes first."""
    return {
        "rule": plan.rule,
        "alpha": None if plan.alpha is None else float(plan.alpha),
        "exact": bool(plan.exact),
        "original": {metric: _plain(amount) for metric, amount in plan.original.items()},
        "predicted": {metric: _plain(amount) for metric, amount in plan.predicted.items()},
        "removed": {name: [int(unit) for unit in units] for name, units in plan.removed.items()},
        "spaces": spaces_to_json(plan.spaces),
    }


def _plain(amount: float) -> float:
    """Milliseconds may have decimals, counts have none."""
    return float(amount) if isinstance(amount, (float, np.floating)) else int(amount)


def plan_from_json(content: Mapping[str, Any], *, edited: bool) -> Plan:
    """A plan again; if it was `edited` by hand, what it costs is worked out anew from its spaces."""
    spaces = spaces_from_json(content["spaces"])
    removed = {name: tuple(map(index, units)) for name, units in content["removed"].items()}
    return Plan(
        spaces=spaces,
        removed=removed,
        alpha=content["alpha"],
        rule=content["rule"],
        exact=content["exact"],
        predicted=predict(spaces, removed) if edited else content["predicted"],
        original=predict(spaces, {}) if edited else content["original"],
    )


def latency_to_json(table: LatencyTable) -> Json:
    """What a person wants to read comes first."""
    return {
        "setting": dict(table.setting),
        "original": table.original,
        "multiple": table.multiple,
        "trials": [list(trial) for trial in table.trials],
        "fingerprint": table.fingerprint,
        "ops": [[list(op.factors), op.fixed, op.work, op.uneven, list(op.widths)] for op in table.ops],
        "factors": [{"size": f.size, "owned": {name: encode_runs(owned) for name, owned in f.owned.items()}} for f in table.factors],
    }


def latency_from_json(content: Mapping[str, Any]) -> LatencyTable:
    """What `latency_to_json` was given."""
    return LatencyTable(
        factors=tuple(Factor(index(f["size"]), {name: decode_runs(runs) for name, runs in f["owned"].items()}) for f in content["factors"]),
        ops=tuple(
            TimedOp(tuple(map(index, factors)), float(fixed), float(work), float(uneven), tuple(map(float, widths)))
            for factors, fixed, work, uneven, widths in content["ops"]
        ),
        original=float(content["original"]),
        multiple=index(content["multiple"]),
        fingerprint=content["fingerprint"],
        setting=content["setting"],
        trials=tuple((float(measured), float(predicted)) for measured, predicted in content["trials"]),
    )


def digest(content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> str:
    """SHA-256 over JSON content, whatever its spacing and key order, and over the bits of tensors.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    state = hashlib.sha256(compact(content, sort_keys=True).encode())
    for name, tensor in sorted((tensors or {}).items()):
        state.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def compact(value: Any, *, sort_keys: bool = False) -> str:
    """JSON on one line."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
    except (TypeError, ValueError) as error:
        raise FairprunerError(f"Only text, finite numbers, lists and mappings can be saved as JSON: {error}.") from error


def readable(value: Any, indent: str = "") -> str:
    """JSON over several lines, with lists of numbers and all that fits within 120 columns on one.

    >>> print(readable({"removed": {"conv1": [3, 1]}}))
    {"removed": {"conv1": [3, 1]}}
    """
    flat = compact(value)
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if len(indent) + len(flat) <= WIDTH or not any(isinstance(child, (dict, list)) for child in children):
        return flat
    inner = indent + "  "
    keys = [f"{compact(str(key))}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    lines = ",\n".join(f"{inner}{key}{readable(child, inner)}" for key, child in zip(keys, children, strict=True))
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{lines}\n{indent}{closing}"
