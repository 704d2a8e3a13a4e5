"""The results of signals for one layer, on disk, so that a killed call continues with the next layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fairpruner.core.sealed import Json, compact
from fairpruner.core.work_folder import WorkFolder
from fairpruner.scoring.running import Results
from fairpruner.scoring.signals.base import Result, Side
from fairpruner.scoring.signals.selection import Selection

RESULT, REST = "result", "rest"

Selections = Mapping[Side, tuple[Selection, ...]]


def keep_results(folder: WorkFolder, name: str, results: Results, hidden: Mapping[str, str]) -> None:
    """Write the results of a layer."""
    arrays: list[np.ndarray] = []
    rest: list[Json] = []
    for side, of_side in results.items():
        for selection, result in of_side.items():
            for form, values in (("scores", result.scores), ("halves", result.halves)):
                for space, array in values.items():
                    rest.append({"place": [side, selection, form, space]})
                    arrays.append(array)
            rest.append({"settings": [side, selection, dict(result.settings)]})
            arrays.append(np.zeros(0))
    with folder.writing(name) as write:
        for number, array in enumerate(arrays):
            write(number, array)
        text = compact({"results": rest, "hidden": dict(hidden)})
        write(REST, np.frombuffer(text.encode(), dtype=np.uint8))


def merged_results(folder: WorkFolder, selections: Selections) -> tuple[Results, dict[str, str]]:
    """The results of all layers together, and the spaces that were hidden."""
    parts: dict[tuple[str, str, str], dict[str, Any]] = {}
    hidden: dict[str, str] = {}
    for name in folder.stages():
        if not name.startswith(f"{RESULT}-"):
            continue
        rest = json.loads(folder.read(name, REST).tobytes().decode())
        hidden |= rest["hidden"]
        for number, entry in enumerate(rest["results"]):
            if "place" in entry:
                side, selection, form, space = entry["place"]
                parts.setdefault((side, selection, form), {})[space] = folder.read(name, number)
            else:
                side, selection, settings = entry["settings"]
                parts.setdefault((side, selection, "settings"), {}).update(settings)

    def found(side: str, selection: str, form: str) -> dict[str, Any]:
        return parts.get((side, selection, form), {})

    results: Results = {
        side: {
            one.name: Result(*(found(side, one.name, form) for form in ("scores", "halves", "settings")))
            for one in chosen
        }
        for side, chosen in selections.items()
    }
    return results, hidden
