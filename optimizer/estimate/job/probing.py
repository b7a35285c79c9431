"""Holds the first steps of a run against their prediction, while there is time to take another plan. Pure and torch-free."""

from optimizer.base.units import format_bytes
from optimizer.estimate.job.shortfalls import Shortfall
from optimizer.estimate.prediction import Prediction


def find_miss(
    prediction: Prediction,
    *,
    device_peak_bytes: int,
    step_ms: float,
    num_steps_left: int,
    enough_left_s: float,
) -> str:
    """Say how a steady step missed its prediction; empty inside both intervals, and where little of the run is left.

    enough_left_s: a run with less before it is left alone; to start it again would cost more than a better plan gives.
    Fewer bytes than predicted are no miss: the plan fits. Faster steps are one, since another plan may now be the fastest.
    """
    if step_ms <= 0 or num_steps_left * step_ms / 1000 < enough_left_s:
        return ""
    missed = []
    if device_peak_bytes > prediction.device_peak_high_bytes:
        at_most = format_bytes(prediction.device_peak_high_bytes)
        missed.append(f"a step took {format_bytes(device_peak_bytes)} of the device; predicted were at most {at_most}")
    if not prediction.step_low_ms <= step_ms <= prediction.step_high_ms:
        predicted = f"{prediction.step_low_ms:,.0f} to {prediction.step_high_ms:,.0f} ms"
        missed.append(f"a step took {step_ms:,.0f} ms; predicted were {predicted}")
    return "; ".join(missed)


def probe_shortfall(prediction: Prediction, *, device_peak_bytes: int) -> Shortfall | None:
    """By how much a steady step was predicted too low; None inside the interval."""
    if device_peak_bytes <= prediction.device_peak_high_bytes:
        return None
    return Shortfall(
        stage="steady_step", tier="device", num_bytes=device_peak_bytes - prediction.device_peak_bytes
    )
