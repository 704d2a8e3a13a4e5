"""Energy and CO2 of one call, by CodeCarbon, without a network."""

from __future__ import annotations

import importlib
import logging
import time
from dataclasses import dataclass

from fairpruner.errors import FairprunerError
from fairpruner.measuring.timing import Run

SECONDS = 4.0  # of running, at least: counters tick about once a second
COUNTERS = (
    "intel_rapl",
    "intel_power_gadget",
    "apple_powermetrics",
)  # how CodeCarbon calls those of processors; all else is worked out


@dataclass(frozen=True)
class Energy:
    """Of one call."""

    joules: float
    co2_milligrams: float
    # by the hardware; else it is an estimate from the processor's load and its nominal power
    counted: bool


def energy_of(run: Run, country: str) -> Energy:
    """Run for some seconds and divide what the machine used by the number of calls; `country` says how
    its power is made.
    """
    tracker = _tracker(country)
    tracker.start()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        run()
        calls += 1
    kilograms = tracker.stop()
    if kilograms is None or not tracker.final_emissions_data:
        raise FairprunerError(
            "CodeCarbon gave no number: another of its trackers may be running on this machine."
        )
    modes = [getattr(part, "_mode", None) for part in tracker._hardware if type(part).__name__ == "CPU"]
    joules = 3.6e6 * tracker.final_emissions_data.energy_consumed / calls
    return Energy(
        joules, 1e6 * kilograms / calls, counted=bool(modes) and all(mode in COUNTERS for mode in modes)
    )


def _tracker(country: str):  # type: ignore[no-untyped-def]  # CodeCarbon is optional and has no types
    try:
        library = importlib.import_module("codecarbon")
    except ModuleNotFoundError as error:
        raise FairprunerError(
            "Energy needs CodeCarbon, which is not installed: pip install 'fairpruner[energy]'."
        ) from error
    logging.getLogger("codecarbon").disabled = True  # it tells the story of every run
    try:
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
