"""Writing output: it is written whole beside its place and swapped in, and what is there stays until then.

Every output is first written into a workspace, a hidden folder beside it that belongs to one process. A
process that dies leaves its workspace; the next one that writes into the same folder removes it.
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
NEW, OLD = "new", "old"  # the folders of a workspace: what is being written, and what it takes the place of
DAY = 24 * 3600  # seconds; no output takes that long to write

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux


@contextmanager
def written_whole(path: str | Path, *, over_folder: bool = False) -> Iterator[Path]:
    """A place to write a file or a folder to, which takes the name `path` once all is written.

    If anything fails, `path` is as it was. A file takes the place of a file; a folder takes that of a folder
    only if it is empty or `over_folder` is true. A symbolic link stays, and what it leads to is replaced.
    """
    place = Path(os.path.realpath(path))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(place.parent)
        workspace = place.parent / f".fairpruner-{_node()}-{os.getpid()}-{uuid4().hex[:8]}"
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


def is_at_or_below(path: str | Path, folder: str | Path) -> bool:
    """Whether a path leads to a folder or file or into it, symbolic links followed."""
    real, above = (os.path.realpath(p) for p in (path, folder))
    return real == above or real.startswith(above.rstrip(os.sep) + os.sep)


def remove_abandoned(folder: Path) -> None:
    """Remove the workspaces in a folder whose process is dead; a swap that was interrupted is completed."""
    for workspace in folder.iterdir() if folder.is_dir() else ():
        found = WORKSPACE.fullmatch(workspace.name)
        with suppress(OSError):  # another process may remove it too
            if found and _is_abandoned(workspace, found["node"], int(found["pid"])):
                _complete_swap(workspace)
                shutil.rmtree(workspace, ignore_errors=True)


def _is_abandoned(workspace: Path, node: str, pid: int) -> bool:
    status = workspace.lstat()
    if workspace.is_symlink() or not workspace.is_dir():
        return False
    if os.name == "nt":  # where asking for a process ends it
        return time.time() - status.st_mtime > DAY
    mine = status.st_uid == os.getuid()
    return mine and (time.time() - status.st_mtime > DAY or (node == _node() and not _runs(pid)))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 only asks
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it runs and belongs to another user
        return True
    return True


def _node() -> str:
    """This machine, and in it the container: process ids mean something only there."""
    try:
        container = os.readlink("/proc/self/ns/pid")
    except OSError:
        container = ""
    return hashlib.sha256(f"{platform.node()} {container}".encode()).hexdigest()[:8]


def _swap(new: Path, place: Path, aside: Path) -> None:
    """Give the folder `new` the name `place`; what is there goes into the workspace, in one step if the
    system can exchange two names.
    """
    if _exchange(new, place):
        return
    os.rename(place, aside)  # whoever dies after this leaves the rest to `_complete_swap`
    try:
        os.rename(new, place)
    except BaseException:
        os.rename(aside, place)
        raise


def _complete_swap(workspace: Path) -> None:
    """Where the old folder was moved aside and the new one, which is whole, has not taken its name."""
    for old in (workspace / OLD).glob("*"):
        new, place = workspace / NEW / old.name, workspace.parent / old.name
        if not os.path.lexists(place):
            os.rename(new if os.path.lexists(new) else old, place)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; false where the system or the file system cannot."""
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
    """Have the content on the disk before the name: a machine that loses power keeps the old or the new."""
    for file in (new, *new.rglob("*")) if new.is_dir() else (new,):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
