"""Energy and CO2 of one call, measured by CodeCarbon; no network is used."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fairpruner.errors import FairprunerError, import_extra
from fairpruner.measuring.timing import Inference
from fairpruner.terminal.progress import silenced

SECONDS = 4.0  # of running, at least: hardware counters change about once a second
# The modes in which CodeCarbon reads a counter of the processor; its other modes are estimates.
COUNTERS = ("intel_rapl", "intel_power_gadget", "apple_powermetrics")


@dataclass(frozen=True)
class Energy:
    """The energy and the CO2 of one call."""

    joules: float
    co2_milligrams: float
    counted: bool  # read from a hardware counter; otherwise an estimate from load and nominal power


def energy_of(run: Inference, country: str) -> Energy:
    """Call `run` for some seconds and divide the machine's energy by the number of calls.

    `country` is an ISO code; it determines how much CO2 a joule causes.
    """
    with silenced("codecarbon"):  # it logs every run
        tracker = _tracker(country)
        tracker.start()
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            run()
            calls += 1
        kilograms = tracker.stop()
    if kilograms is None or not tracker.final_emissions_data:
        raise FairprunerError(
            "CodeCarbon returned no measurement: another of its trackers may be running on this machine. Stop"
            " it and measure again."
        )
    modes = [getattr(part, "_mode", None) for part in tracker._hardware if type(part).__name__ == "CPU"]
    joules = 3.6e6 * tracker.final_emissions_data.energy_consumed / calls
    counted = bool(modes) and all(mode in COUNTERS for mode in modes)
    return Energy(joules, 1e6 * kilograms / calls, counted)


def _tracker(country: str) -> Any:  # CodeCarbon has no types
    library: Any = import_extra("codecarbon", "energy", "Energy")
    source: Any = import_extra("codecarbon.input", "energy", "Energy")
    try:
        # The tracker itself would take the mean of the world for an unknown country.
        if country not in source.DataSource().get_global_energy_mix_data():
            raise ValueError("it is not in the list of countries")
        return library.OfflineEmissionsTracker(
            country_iso_code=country,
            save_to_file=False,
            measure_power_secs=1,
            log_level="critical",
            allow_multiple_runs=True,
        )
    except Exception as error:
        raise FairprunerError(
            f"CodeCarbon refuses the country {country!r}: {error}. Give an ISO code of three letters, such as"
            " 'DEU'."
        ) from error
