"""A folder for what a long job keeps on disk, from which the job continues after it was killed.

Arrays are grouped into stages. A stage is written under a temporary name, and has its final name as soon as
it is complete, so whatever has a final name can be used.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from fairpruner.core.sealed import Json, digest, read_json, write_json
from fairpruner.core.writing import WORKSPACE, node_name, runs
from fairpruner.errors import FairprunerError

JOB = "job.json"
GIGABYTE = 10**9


def _temporary_folder(place: Path) -> Path:
    """A new folder for this process; those that dead processes left are removed."""
    for folder in place.glob(".fairpruner-work-*-*-*"):
        node, process = folder.name.split("-")[2:4]
        if node == node_name() and process.isdigit() and not runs(int(process)) and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f".fairpruner-work-{node_name()}-{os.getpid()}-", dir=place))


class WorkFolder:
    """What one process of a job keeps on disk."""

    def __init__(self, root: Path | None, job: Json, *, process: int = 0) -> None:
        """Open the folder of a job, which may have begun; without `root`, a temporary one in this folder.

        `job` holds all that the results depend on: a folder of another job is refused.
        """
        self._temporary = root is None
        try:
            self.root = _temporary_folder(Path()) if root is None else root
            self._own = self.root / f"process-{process}"
            self._own.mkdir(parents=True, exist_ok=True)
            others = [path for path in self._own.iterdir() if not WORKSPACE.fullmatch(path.name)]
            strange = bool(others) and not (self._own / JOB).exists()
        except OSError as error:
            raise FairprunerError(f"The work folder {root} cannot be made: {error}.") from error
        if strange:  # it is removed at the end
            raise FairprunerError(
                f"{self._own} holds files that fairpruner did not write: choose another work folder."
            )
        mark = digest(job)
        if (self._own / JOB).exists() and read_json(self._own / JOB, "work").get("job") != mark:
            raise FairprunerError(
                f"The work folder {self.root} belongs to a call with another model, other data or other"
                " options: remove it, or choose another folder."
            )
        write_json(self._own / JOB, "work", {"job": mark})

    @property
    def used(self) -> int:
        """The bytes that an earlier call left here."""
        return sum(file.stat().st_size for file in self._own.rglob("*") if file.is_file())

    def check_room(self, needed: int) -> str:
        """A sentence with the bytes that are needed and free; an error if too few are free."""
        free = shutil.disk_usage(self._own).free + self.used
        found = f"{needed / GIGABYTE:.2f} GB in {self.root}, where {free / GIGABYTE:.2f} GB are free"
        if needed > free:
            raise FairprunerError(f"This takes up to {found}: make room, or choose another work folder.")
        return f"This takes up to {found}."

    def has(self, stage: str) -> bool:
        """Whether a stage is complete."""
        return (self._own / stage).is_dir()

    def stages(self) -> list[str]:
        """The complete stages, by name."""
        return sorted(path.name for path in self._own.iterdir() if path.is_dir() and "." not in path.name)

    @contextmanager
    def writing(self, stage: str) -> Iterator[Callable[[int | str, np.ndarray], None]]:
        """Yields a function that writes an array of the stage, which is complete when the block ends."""
        place, part = self._own / stage, self._own / f"{stage}.part"

        def write(key: int | str, values: np.ndarray) -> None:
            with self._reporting(stage), (part / f"{key}.npy").open("wb") as file:
                np.lib.format.write_array(file, np.ascontiguousarray(values), allow_pickle=False)

        with self._reporting(stage):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
        yield write
        with self._reporting(stage):
            shutil.rmtree(place, ignore_errors=True)
            part.rename(place)

    def read(self, stage: str, key: int | str) -> np.ndarray:
        """One array of a complete stage."""
        path = self._own / stage / f"{key}.npy"
        try:
            found: np.ndarray = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise FairprunerError(
                f"{path} cannot be read: {error}. Remove {self.root}, and begin again."
            ) from error
        return found

    def keys(self, stage: str) -> list[str]:
        """The names of the arrays of a complete stage."""
        return sorted(file.stem for file in (self._own / stage).glob("*.npy"))

    def drop(self, stage: str) -> None:
        """Remove a stage that is not needed any more."""
        shutil.rmtree(self._own / stage, ignore_errors=True)

    def close(self, *, finished: bool) -> None:
        """Remove the folder, unless the job can continue from it."""
        if finished or self._temporary:
            shutil.rmtree(self._own, ignore_errors=True)
            with suppress(OSError):  # other processes, or the user, may have something here
                self.root.rmdir()

    @contextmanager
    def _reporting(self, stage: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            again = "" if self._temporary else "; the same call then continues from here"
            raise FairprunerError(
                f"The work folder {self.root} cannot take {stage}: {error}. Make room, or choose another work"
                f" folder{again}."
            ) from error
