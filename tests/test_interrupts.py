"""Ctrl-C and SIGTERM while the command imports torch, which takes seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fairpruner.terminal.interrupts import STOPPED

SOURCE = str(Path(__file__).parent.parent / "src")
# The installed script, and what torchrun starts.
WAYS = {
    "script": ["-c", "import sys; sys.argv = ['/bin/fairpruner', '-h']; import fairpruner.__main__"],
    "module": ["-m", "fairpruner", "-h"],
}


def interrupted(
    arguments: list[str], number: signal.Signals, folder: Path, *, during: str = "torch"
) -> subprocess.CompletedProcess[str]:
    """Run Python with a module that gets a signal while it is imported."""
    (folder / f"{during}.py").write_text(
        f"import os, signal, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(60)\n"
    )
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), SOURCE])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("during", ["email", "torch"])  # of the first module imported, and of the slowest
def test_a_signal_during_the_imports_is_one_sentence(
    way: str, number: signal.Signals, during: str, tmp_path: Path
) -> None:
    done = interrupted(WAYS[way], number, tmp_path, during=during)
    assert (done.returncode, done.stderr) == (130, f"{STOPPED}\n")


def test_a_program_that_imports_fairpruner_keeps_its_own_handling(tmp_path: Path) -> None:
    done = interrupted(["-c", "import fairpruner"], signal.SIGINT, tmp_path)
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in done.stderr
