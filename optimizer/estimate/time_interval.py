"""The interval of a predicted time: from what finished runs show, else from how its rates were come by. Torch-free."""

from optimizer.hardware.calibration import Spread
from optimizer.hardware.rates import Rates

TIME_SPREAD = {"measured": 0.15, "table": 0.5}
"""Half-width as a share, until enough runs have finished on this machine to measure it."""


def time_interval(rates: Rates, spread: Spread | None) -> tuple[float, float]:
    """Factors on a predicted time: its low and its high end.

    A probe that others disturbed may have found everything too slow, or, where they go on, not slow enough: until runs show it,
    either end is further away by as much.
    """
    if spread is not None:
        return 1 - spread.width, 1 + spread.width
    width = TIME_SPREAD[rates.source]
    return (1 - width) / rates.probe_slowdown, (1 + width) * rates.probe_slowdown
