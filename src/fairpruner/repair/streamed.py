"""Repair a cut of a model that is larger than memory, one layer at a time.

Three streams go through the layers together: that of the original, that of the repaired cut, and for a few
batches that of the plain cut, whose loss the repair has to beat. At each layer the method works on a `Job` of
that layer alone; the cut layer reads what the repaired layers before it return.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairpruner.core.plan import Plan
from fairpruner.core.sealed import compact
from fairpruner.errors import FairprunerError
from fairpruner.files.streaming import Changes, stream
from fairpruner.inputs.batches import Batch, check_rereadable, forward, no_samples, read_batches
from fairpruner.inputs.losses import mean_loss
from fairpruner.inputs.streamed import ORIGINAL, Streamed
from fairpruner.inputs.walking import Disk, Walk, stage, walking
from fairpruner.models.calling import in_eval_mode
from fairpruner.models.layer_calls import LayerModel
from fairpruner.models.narrowing import cut_units
from fairpruner.repair.job import Job, compared, would_raise_loss
from fairpruner.repair.methods import METHODS
from fairpruner.repair.notes import Note
from fairpruner.repair.tensors import tensors_by_name
from fairpruner.surgery import cut_without_weights

STREAMED = ("least_squares", "mean", "experts", "merge")  # methods that work on one layer at a time
CUT, PLAIN, REPAIRED, REST = "cut", "plain", "repaired", "rest"
ROOM = 500_000_000  # bytes of tensors that a plan from a file is verified with at once


def cut_files(
    streamed: Streamed,
    plan: Plan,
    folder: str | Path,
    *,
    data: Iterable[Any] | None = None,
    method: str = "least_squares",
    force: bool = False,
) -> tuple[Note, ...]:
    """Write the folder that `save(cut(model, plan))` would write, with one layer in memory at a time.

    With `data`, the cut is repaired by `method` (`least_squares`, `mean`, `experts` or `merge`), unless that
    raises the loss on the first samples. `force` replaces a folder that was written before. The notes say
    what the repair did.
    """
    if data is None:
        stream(streamed.place, plan, folder, force=force)
        return ()
    with repairing(streamed, plan, data, method) as (changes, notes):
        stream(streamed.place, plan, folder, force=force, changes=changes)
    return notes


def check_method(method: str) -> None:
    """Refuse a repair that does not work on one layer at a time."""
    if method not in STREAMED:
        raise FairprunerError(
            f"The repair {method!r} needs the whole model, which --stream does not load: use one of"
            f" {', '.join(STREAMED)}."
        )


class RepairedTensors(NamedTuple):
    """The tensors that a repair changed, by name, and what it did to each weight."""

    tensors: Changes
    notes: tuple[Note, ...]


@contextmanager
def repairing(streamed: Streamed, plan: Plan, data: Iterable[Any], method: str) -> Iterator[RepairedTensors]:
    """Inside, the repaired tensors can be read from the work folder of a model."""
    check_method(method)
    check_rereadable(data, "repair reads it several times")
    cut_without_weights(streamed.model, plan, room=ROOM)  # refuses a plan that is not this model's
    batches = list(read_batches(data, torch.device("cpu"), streamed.model))
    if not batches:
        raise no_samples()
    job = {"job": "repair", "method": method, "plan": plan.to_json()}
    disk = Disk(streams=5, beside=_bytes_of_changes(streamed, plan))
    with walking(streamed, batches, job, disk=disk, passes=3) as walk:
        walk.start(ORIGINAL, CUT, PLAIN)
        notes = [note for layer in range(streamed.count) for note in _Layer(walk, plan, layer).repair(method)]
        before, after = (_loss(walk, role) for role in (PLAIN, CUT))
        if after <= before:
            yield RepairedTensors(_changes(walk), tuple(notes))
        else:
            yield RepairedTensors({}, (would_raise_loss(method, before, after),))


def _bytes_of_changes(streamed: Streamed, plan: Plan) -> int:
    """The most that repaired tensors take in float32: those that units of shortened spaces own."""
    owned = tuple(
        f"{part.tensor}." for space in plan.spaces if plan.removed[space.name] for part in space.slices
    )
    tensors = tensors_by_name(streamed.model).items()
    return sum(4 * tensor.numel() for name, tensor in tensors if f"{name}.".startswith(owned))


class _Layer:
    """One layer, in the original and in the cut."""

    def __init__(self, walk: Walk, plan: Plan, number: int) -> None:
        self._walk, self._number = walk, number
        others = [s.name for s in plan.spaces if walk.streamed.layer_of(s.slices[0].tensor) != number]
        spaces = plan.spaces.without(dict.fromkeys(others, "in another layer"))
        self._plan = Plan.removing(spaces, {name: plan.removed[name] for name in spaces.names})

    def repair(self, method: str) -> list[Note]:
        """Repair the cut layer, and pass all streams on; what was done before a kill is read instead."""
        folder, name = self._walk.folder, stage(REPAIRED, self._number)
        following = [stage(role, self._number + 1) for role in (PLAIN, ORIGINAL, CUT)]
        later = any(
            folder.has(stage(REPAIRED, n)) for n in range(self._number + 1, self._walk.streamed.count)
        )
        if not later and not (folder.has(name) and all(map(folder.has, following))):
            model = self._walk.streamed.layer(self._number)
            small: Any = cut_units(model, self._plan.spaces, self._plan.removed)
            with in_eval_mode(model), in_eval_mode(small):
                self._repair(model, small, method)
        for role in (PLAIN, ORIGINAL, CUT):
            folder.drop(stage(role, self._number))
        rest = json.loads(folder.read(name, REST).tobytes().decode())
        return [Note(**note) for note in rest["notes"]]

    def _repair(self, model: LayerModel, small: LayerModel, method: str) -> None:
        folder, name = self._walk.folder, stage(REPAIRED, self._number)
        self._pass_on(small, PLAIN, range(sum(1 for _ in compared(self._walk.batches))))
        small.role = CUT
        if folder.has(name):
            _fill(self._walk, name, small)
        else:
            before = {key: tensor.clone() for key, tensor in tensors_by_name(small).items()}
            notes = METHODS[method](Job(small, model, self._plan, self._read)) if self._removes else []
            _keep(self._walk, name, before, small, notes)
        self._pass_on(model, ORIGINAL)
        self._pass_on(small, CUT)

    @property
    def _removes(self) -> bool:
        return any(self._plan.removed.values())

    def _read(self) -> Iterator[Batch]:
        for index in range(len(self._walk.batches)):
            yield self._walk.batch(index, self._number, [ORIGINAL, CUT])
            self._walk.advance(f"repair, layer {self._number + 1} of {self._walk.streamed.count}")

    def _pass_on(self, model: LayerModel, role: str, indices: Sequence[int] | None = None) -> None:
        """Write what a layer returns in a role, unless that was done before a kill."""
        if self._walk.folder.has(stage(role, self._number + 1)):
            return
        model.role = role

        def run(index: int) -> Tensor:
            output: Tensor = forward(model, self._walk.batch(index, self._number, [role]))
            return output

        title = f"{role}, layer {self._number + 1} of {self._walk.streamed.count}"
        self._walk.write(stage(role, self._number + 1), title, run, indices)


def _loss(walk: Walk, role: str) -> float:
    """The mean loss of the compared batches, from what the last layer returned in a role."""
    shell, total, samples = walk.streamed.shell(), 0.0, 0
    for index, batch in enumerate(compared(walk.batches)):
        output = shell.finish(batch.inputs, walk.stream(index, walk.streamed.count, role))
        total += float(mean_loss(None, output, batch)) * batch.size
        samples += batch.size
    return total / samples


def _keep(walk: Walk, name: str, before: dict[str, Tensor], small: LayerModel, notes: Sequence[Note]) -> None:
    """Write the tensors that a repair changed, and its notes."""
    changed = {k: t for k, t in tensors_by_name(small).items() if not torch.equal(t, before[k])}
    with walk.folder.writing(name) as write:
        for number, tensor in enumerate(changed.values()):
            write(number, tensor.detach().numpy())
        text = compact({"names": list(changed), "notes": [asdict(note) for note in notes]})
        write(REST, np.frombuffer(text.encode(), dtype=np.uint8))


def _names(walk: Walk, name: str) -> list[str]:
    found: list[str] = json.loads(walk.folder.read(name, REST).tobytes().decode())["names"]
    return found


def _fill(walk: Walk, name: str, small: LayerModel) -> None:
    """Put repaired tensors into a cut layer."""
    tensors = tensors_by_name(small)
    for number, key in enumerate(_names(walk, name)):
        tensors[key].copy_(torch.from_numpy(walk.folder.read(name, number)))


def _changes(walk: Walk) -> Changes:
    """The repaired tensors of all layers, each read when it is asked for."""

    def read(name: str, number: int) -> Tensor:
        return torch.from_numpy(walk.folder.read(name, number))

    stages = [name for name in walk.folder.stages() if name.startswith(f"{REPAIRED}-")]
    return {
        key: partial(read, name, number) for name in stages for number, key in enumerate(_names(walk, name))
    }
