"""10,000 mutants of the files that fairpruner reads; `python -m benchmarks fuzz` runs many more."""

from __future__ import annotations

import warnings

import pytest
from fuzzing import TARGETS, run_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Fewer where one case takes long.
CASES = {
    **{"plan": 1000, "latency": 1400, "index": 1200, "jsonl": 1300, "csv": 1300, "npz": 1400},
    **{"safetensors": 1000, "xz": 600, "pt": 300, "png": 200, "parquet": 100},
    **{"scores": 60, "checkpoint": 60, "folder": 40, "measured": 20, "configuration": 20},
}
LIBRARY = {"parquet": "pyarrow", "configuration": "transformers", "png": "PIL"}


def test_every_target_is_fuzzed() -> None:
    assert CASES.keys() == TARGETS.keys()
    assert sum(CASES.values()) == 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_mutant_is_right_or_one_sentence(name: str) -> None:
    pytest.importorskip(LIBRARY.get(name, "torch"))

    @settings(max_examples=CASES[name], deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(min_size=1, max_size=48))
    def check(data: bytes) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries that read pictures, tables and configurations
            run_case(name, data)

    check()
