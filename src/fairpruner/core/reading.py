"""Reading files of unknown origin: in bounded memory, and every fault is one FairprunerError."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from fairpruner.errors import FairprunerError

TEXT_LIMIT = 256 * 2**20  # bytes of a JSON file; a plan of 1,000 spaces of 4,096 units has 30 MB


def unreadable(path: str | Path, error: Exception) -> FairprunerError:
    """The error for a file that cannot be read; for a missing one it suggests the closest name beside it.

    >>> print(unreadable("nothing-is-here.json", FileNotFoundError()))
    Cannot read nothing-is-here.json: there is no such file. Correct the path, or write the file first.
    """
    if isinstance(error, UnicodeDecodeError):
        return FairprunerError(
            f"Cannot read {path}: it holds no text in UTF-8. Scores and weights do not; plans, tables and"
            " reports do. Check that it is the file you mean."
        )
    if not isinstance(error, FileNotFoundError):
        reason = error.strerror if isinstance(error, OSError) else None  # without the path again
        return FairprunerError(f"Cannot read {path}: {reason or error}.")
    folder = Path(path).parent
    beside = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = get_close_matches(Path(path).name, beside, n=1, cutoff=0.85)
    step = f"Did you mean {folder / close[0]}?" if close else "Correct the path, or write the file first."
    return FairprunerError(f"Cannot read {path}: there is no such file. {step}")


def check_regular(path: str | Path, *, limit: int | None = None) -> None:
    """Refuse a file that is too long, and anything but a regular file: reading a pipe may never end."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        what = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise FairprunerError(f"Cannot read {path}: it is {what}, expected a file.")
    if limit is not None and status.st_size > limit:
        raise FairprunerError(
            f"Cannot read {path}: it has {status.st_size:,} bytes, expected at most {limit:,}."
        )


def read_text(path: str | Path, *, limit: int = TEXT_LIMIT) -> str:
    """The text of a file in UTF-8."""
    check_regular(path, limit=limit)
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def read_plain_json(path: str | Path) -> Any:
    """The value in a JSON file of any origin."""
    return parse_json(read_text(path), path)


def parse_json(text: str, path: str | Path) -> Any:
    """The value of a JSON text from `path`: finite numbers, and text that UTF-8 can hold."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:  # an escape may be half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise FairprunerError(f"{path} is nested too deeply for a JSON file of fairpruner.") from error
    except ValueError as error:
        raise FairprunerError(f"{path} is not a complete JSON file: {error}.") from error
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


@contextmanager
def understanding(path: str | Path) -> Iterator[None]:
    """Report a failure to interpret a file's content in one sentence that names the file."""
    try:
        yield
    except FairprunerError as error:
        raise FairprunerError(f"The content of {path} is invalid. {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise FairprunerError(
            f"The content of {path} is invalid. {type(error).__name__}: {str(error)[:300]}"
        ) from error
