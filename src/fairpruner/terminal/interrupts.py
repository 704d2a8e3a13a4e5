"""Ctrl-C and SIGTERM: one sentence instead of a traceback, also while the command still imports torch.

`fairpruner/__init__.py` imports this module first, so it imports nothing that takes long.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPPED = "Stopped. No output was left half-written."


def is_command() -> bool:
    """Whether this process is the `fairpruner` command, and not a program that imports the package."""
    name = os.path.basename(sys.argv[0] if sys.argv else "").partition(".")[0]
    return name == "fairpruner" or (name == "-m" and "fairpruner" in sys.orig_argv)


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM, which schedulers send, raise KeyboardInterrupt: a command can clean up."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    _handle(signal.default_int_handler)
    try:
        yield
    finally:
        if _may_handle():
            for number, handler in before.items():
                signal.signal(number, handler)


def stop_at_once(*_: object) -> None:
    """End the process with one sentence. Nothing is cleaned up: this is for times when nothing is written."""
    os.write(2, f"{STOPPED}\n".encode())
    os._exit(130)


def _handle(handler: object) -> None:
    for number in (signal.SIGINT, signal.SIGTERM) if _may_handle() else ():
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in a job in the background of a shell
            signal.signal(number, handler)  # type: ignore[arg-type]


def _may_handle() -> bool:
    return threading.current_thread() is threading.main_thread()


if is_command():
    _handle(stop_at_once)
