"""Router weights of a token that sum to one again, as if the removed experts had never existed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fairpruner.repair.job import Job
from fairpruner.repair.notes import NO_EXPERTS, Note

SETTING = "norm_topk_prob"  # what routers of transformers call it
SET = "its router divides the weights of a token by their sum"
NO_SETTING = f"no router has the attribute {SETTING}, or all of them already divide by the sum"


def renormalise(job: Job) -> list[Note]:
    """Let every router of the cut model divide the weights of the chosen experts by their sum.

    The setting is also made in the configuration, so that it is saved.
    """
    if not any(s.kind == "expert" and job.plan.removed[s.name] for s in job.plan.spaces):
        return [Note("renormalise", "skipped", NO_EXPERTS)]
    routers = [path for path, module in job.small.named_modules() if vars(module).get(SETTING) is False]
    for path in routers:
        vars(job.small.get_submodule(path))[SETTING] = True
    for config in _configurations(job.small) if routers else ():
        if getattr(config, SETTING, None) is False:
            setattr(config, SETTING, True)
    found = [Note(path, "repaired", SET) for path in routers]
    return found or [Note("renormalise", "skipped", NO_SETTING)]


def _configurations(model: nn.Module) -> Iterator[Any]:
    """The configuration of a model of Hugging Face, and its parts."""
    config = getattr(model, "config", None)
    yield config
    yield from (getattr(config, name) for name in getattr(config, "sub_configs", ()))
