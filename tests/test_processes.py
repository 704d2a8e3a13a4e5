"""Scoring in two real processes gives the scores of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fairpruner as fp

HERE = Path(__file__).parent


def launch(output: Path, *arguments: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
        "--master-addr=127.0.0.1",
        "--master-port=0",
        "--rdzv-backend=c10d",
    ]
    command += ["--rdzv-endpoint=127.0.0.1:0", str(HERE / "scoring_job.py"), str(output), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, fp.Scores]:
    folder = tmp_path_factory.mktemp("alone")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore"}
    for count in (1, 9):
        subprocess.run(
            [sys.executable, str(HERE / "scoring_job.py"), str(folder / str(count)), str(count)],
            env=environment,
            check=True,
            timeout=240,
        )
    return {count: fp.Scores.load(folder / f"{count}.0") for count in (1, 9)}


@pytest.mark.slow
@pytest.mark.parametrize("count", [9, 1])  # with one batch, the second process has nothing to do
def test_two_processes_score_as_one(alone: dict[int, fp.Scores], tmp_path: Path, count: int) -> None:
    done = launch(tmp_path / "scores", str(count))
    assert done.returncode == 0, done.stderr
    first, second = (fp.Scores.load(tmp_path / f"scores.{rank}") for rank in (0, 1))
    one = alone[count]
    assert first.samples == second.samples == one.samples
    for mine, other, single in (
        (first.removals, second.removals, one.removals),
        (first.protections, second.protections, one.protections),
    ):
        for signal in single:
            for space in one.spaces.names:
                assert np.array_equal(mine[signal][space], other[signal][space])
                assert np.allclose(mine[signal][space], single[signal][space], rtol=1e-6, atol=1e-12), (
                    signal,
                    space,
                )


@pytest.mark.slow
def test_a_process_that_dies_ends_the_job_and_leaves_no_scores(tmp_path: Path) -> None:
    done = launch(tmp_path / "scores", "9", "die")
    assert done.returncode != 0
    assert not list(tmp_path.iterdir())
