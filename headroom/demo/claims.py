"""Every promise of the demo, checked on measured numbers; each can fail."""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.demo.answers import Answers, names_place
from headroom.demo.jobs import ChatJobs, ExactJobs
from optimizer.base.units import format_bytes

LARGEST_BUDGET_SHARE = 0.60
SMALLEST_LOSS_DROP = 1.0
"""In nats of validation loss."""
LARGEST_ERROR = 0.01
"""Share of a measured peak that the prediction may be off."""
MOST_BEFORE, LEAST_AFTER = 0.1, 0.75
"""Shares of the answers that name their place before and after."""
FLOAT_NOISE = 5e-3
"""Between two validation losses whose sums were only taken in another order."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One thing the demo promises, and whether it was so."""

    text: str
    holds: bool


def check_chat(jobs: ChatJobs, answers: Sequence[Answers]) -> list[Claim]:
    """Memory and loss of the fine-tune, and the difference it makes."""
    tuned, prediction = jobs.tuned["summary"], jobs.tuned["prediction"] or {}
    budget_bytes, peak_bytes = int(jobs.tuned["spec"]["goal"]["device_budget_bytes"]), int(tuned["device_peak_bytes"])
    error = int(prediction.get("device_peak_bytes") or 0) / peak_bytes - 1
    before, after = (share([names_place(text) for text in texts]) for texts in _by_model(answers))
    return [
        Claim(
            text=f"measured peak {format_bytes(peak_bytes)} stayed within the budget of {format_bytes(budget_bytes)}",
            holds=peak_bytes <= budget_bytes,
        ),
        Claim(text=f"the peak was predicted to {percent(error, signed=True)}", holds=abs(error) <= LARGEST_ERROR),
        Claim(
            text=f"with no memory saved it ended {jobs.refused['state']}: {jobs.refused['reason'].replace('_', ' ')}",
            holds=(jobs.refused["state"], jobs.refused["reason"]) == ("failed", "out_of_device_memory"),
        ),
        Claim(
            text=f"validation loss fell from {tuned['validation_loss_start']:.3f} to {tuned['validation_loss']:.3f}",
            holds=tuned["validation_loss_start"] - tuned["validation_loss"] >= SMALLEST_LOSS_DROP,
        ),
        Claim(
            text=f"the exported model answers as the chats do: {percent(after)} of its answers name their place, "
            f"{percent(before)} of the base model's",
            holds=after >= LEAST_AFTER and before <= MOST_BEFORE,
        ),
    ]


def check_exact(jobs: ExactJobs) -> list[Claim]:
    """Memory of exact training in a budget, and that it changes no bit."""
    fitted, plain = jobs.fitted["summary"], jobs.plain["summary"]
    budget_bytes = int(jobs.fitted["spec"]["goal"]["device_budget_bytes"])
    peak_bytes, plain_bytes = int(fitted["device_peak_bytes"]), int(plain["device_peak_bytes"])
    size = f"{jobs.num_parameters / 1e6:.1f} M parameters for {jobs.fitted['step']} steps"
    return [
        Claim(
            text=f"{size} of exact training took {format_bytes(peak_bytes)} of {format_bytes(budget_bytes)}",
            holds=peak_bytes <= budget_bytes,
        ),
        Claim(
            text=f"that budget is {percent(budget_bytes / plain_bytes)} of plain training's measured peak of "
            f"{format_bytes(plain_bytes)} (at most {percent(LARGEST_BUDGET_SHARE)})",
            holds=budget_bytes <= LARGEST_BUDGET_SHARE * plain_bytes,
        ),
        check_equality(jobs),
    ]


def check_equality(jobs: ExactJobs) -> Claim:
    """Recomputing and offloading change no bit. Another micro-batch changes the order of sums, so there noise is allowed."""
    fitted, plain = jobs.fitted["summary"], jobs.plain["summary"]
    batches = [(job["plan"] or {}).get("batch") for job in (jobs.fitted, jobs.plain)]
    if batches[0] == batches[1]:
        same = bool(fitted["weights_sha256"]) and fitted["weights_sha256"] == plain["weights_sha256"]
        text = f"its weights {'equal' if same else 'differ from'} plain training's, bit for bit"
        return Claim(text=f"{text} (sha256 {fitted['weights_sha256'][:12]}…)", holds=same)
    difference = abs(fitted["validation_loss"] - plain["validation_loss"])
    return Claim(
        text=f"validation loss differs from plain training's by {difference:.1e}, float noise (at most {FLOAT_NOISE:g})",
        holds=difference <= FLOAT_NOISE,
    )


def _by_model(answers: Sequence[Answers]) -> tuple[list[str], list[str]]:
    return [each.base for each in answers], [each.tuned for each in answers]


def share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def percent(value: float, *, signed: bool = False) -> str:
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.0f} %"
