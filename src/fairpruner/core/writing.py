"""Writing output: it is written completely beside its place, and then replaces what is there.

Every output is first written into a workspace, a hidden folder beside it that belongs to one process. A
process that dies leaves its workspace; the next process that writes into the same folder removes it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError

from fairpruner.errors import FairprunerError

WORKSPACE = re.compile(r"\.fairpruner-(?P<node>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}")
NEW, OLD = "new", "old"  # the folders of a workspace: what is being written, and what it replaces
DAY = 24 * 3600  # seconds; no output takes that long to write

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux


@contextmanager
def written_whole(path: str | Path, *, over_folder: bool = False) -> Iterator[Path]:
    """Yields a temporary path for a file or folder, which is renamed to `path` once all is written.

    If anything fails, `path` stays as it was. A file replaces a file. A folder replaces a folder only if that
    is empty or `over_folder` is true. A symbolic link stays, and its target is replaced.
    """
    place = _place(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(place.parent)
        workspace = place.parent / f".fairpruner-{node_name()}-{os.getpid()}-{uuid4().hex[:8]}"
        try:
            for part in (NEW, OLD):
                (workspace / part).mkdir(parents=True)
            new = workspace / NEW / place.name
            yield new
            _flush(new)
            if over_folder and place.is_dir():
                _swap(new, place, workspace / OLD / place.name)
            else:
                os.replace(new, place)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise FairprunerError(f"Cannot write {path}: {error}. Choose a place that can be written.") from error


def _place(path: str | Path) -> Path:
    """The path with symbolic links followed; a device is refused, because a rename would replace it."""
    try:
        place = Path(os.path.realpath(path))
    except ValueError as error:  # a name that no file can have
        raise FairprunerError(f"Cannot write {str(path)!r}: {error}. Choose another name.") from error
    if place.exists() and not (place.is_file() or place.is_dir()):
        raise FairprunerError(
            f"Cannot write {path}: it is a pipe, a socket or a device, expected a file or a folder."
        )
    return place


def is_at_or_below(path: str | Path, folder: str | Path) -> bool:
    """Whether a path, with symbolic links followed, is `folder` or lies inside it."""
    real, above = (os.path.realpath(p) for p in (path, folder))
    return real == above or real.startswith(above.rstrip(os.sep) + os.sep)


def remove_abandoned(folder: Path) -> None:
    """Remove the workspaces of dead processes from a folder, and complete swaps that they left unfinished."""
    for workspace in folder.iterdir() if folder.is_dir() else ():
        found = WORKSPACE.fullmatch(workspace.name)
        with suppress(OSError):  # another process may remove it too
            if found and _is_abandoned(workspace, found["node"], int(found["pid"])):
                _complete_swap(workspace)
                shutil.rmtree(workspace, ignore_errors=True)


def _is_abandoned(workspace: Path, node: str, pid: int) -> bool:
    """Whether the process of a workspace is dead, or the workspace is older than a day."""
    status = workspace.lstat()
    if workspace.is_symlink() or not workspace.is_dir():
        return False
    if os.name == "nt":  # there, files have no owner of this kind
        return time.time() - status.st_mtime > DAY
    mine = status.st_uid == os.getuid()
    return mine and (time.time() - status.st_mtime > DAY or (node == node_name() and not runs(pid)))


def runs(pid: int) -> bool:
    """Whether a process of this machine exists."""
    if os.name == "nt":  # there, `os.kill` with signal 0 ends the process
        return True
    try:
        os.kill(pid, 0)  # signal 0 only checks that the process exists
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it runs and belongs to another user
        return True
    return True


def node_name() -> str:
    """A hash of this machine and of its container, within which process ids are unique."""
    try:
        container = os.readlink("/proc/self/ns/pid")
    except OSError:
        container = ""
    return hashlib.sha256(f"{platform.node()} {container}".encode()).hexdigest()[:8]


def _swap(new: Path, place: Path, aside: Path) -> None:
    """Give the folder `new` the name `place`, and move the folder that has this name aside.

    It is one step where the system can exchange two names.
    """
    if _exchange(new, place):
        return
    os.rename(place, aside)  # if the process dies after this, `_complete_swap` does the rest
    try:
        os.rename(new, place)
    except BaseException:
        os.rename(aside, place)
        raise


def _complete_swap(workspace: Path) -> None:
    """Rename the new folder, which is complete, where a process died after it moved the old one aside."""
    for old in (workspace / OLD).glob("*"):
        new, place = workspace / NEW / old.name, workspace.parent / old.name
        if not os.path.lexists(place):
            os.rename(new if os.path.lexists(new) else old, place)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False if the system or the file system cannot do so."""
    library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    rename = getattr(library, "renameat2", None)  # not in every C library
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _flush(new: Path) -> None:
    """Write the content to the disk before the rename: a power failure then leaves the old or the new one."""
    for file in (new, *new.rglob("*")) if new.is_dir() else (new,):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
