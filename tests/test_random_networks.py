"""300 random networks: each is cut right, or refused."""

from __future__ import annotations

import pytest
from random_networks import check_network

CHUNK = 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, CHUNK))
def test_any_network_is_cut_right_or_refused(first: int) -> None:
    outcomes = [check_network(seed) for seed in range(first, first + CHUNK)]
    assert any(outcome.startswith("cut") for outcome in outcomes)
