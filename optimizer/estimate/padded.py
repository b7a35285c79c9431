"""Prices training over a dataset whose batches are padded to their longest sequence: the worst one, and the mean. Torch-free.

Packed data, which is all that the service trains on, needs none of this: every batch is flat and as large as every other.

A batch in which some token is padding needs an attention mask, which changes kernels and what they save; one in which all
sequences are equally long does not (transformers leaves the mask out). So there are two profiles, and the worst batch is the
highest of the longest of each kind. With one micro-batch per step its peak is exact. With more it is a bound: each of the
step is taken to be as large as the largest.
"""

import math
from dataclasses import dataclass, replace

from optimizer.base.errors import InvalidPlan
from optimizer.data.lengths import Lengths, PaddedBatch, Padding, list_batches
from optimizer.estimate.categories.batch import inputs_pile_up
from optimizer.estimate.prediction import Prediction, StagePeak, Verdict
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.assemble.ranges import SEQUENCE_LOW
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload

_MASK_BYTES = 8
"""Bytes of the mask per token."""


@dataclass(frozen=True, kw_only=True)
class PaddedPrediction:
    """The prediction of a run over padded batches."""

    worst_batch: PaddedBatch
    """The batch at which the run's peak falls; the first of its size."""
    peak: StagePeak
    """Most bytes allocated on the device in any step of the run."""
    worst: Prediction
    """Prediction of a steady step on the worst batch."""
    mean: Prediction
    """Prediction of a steady step on a batch of the mean length: its ``step_ms`` is what a step takes on average."""
    median_length: int
    """Median length of padded micro-batches; the next two are of them, too."""
    p90_length: int
    p99_length: int
    padding_share: float
    """Share of padding among all tokens computed."""

    @property
    def device_peak_bytes(self) -> int:
        return self.peak.device_peak_bytes

    @property
    def device_peak_high_bytes(self) -> int:
        """Upper end of the interval, as much above the peak as the worst step's is above its own."""
        return self.device_peak_bytes + self.worst.device_peak_high_bytes - self.worst.highest_peak_bytes

    def verdict(self, budget_bytes: int) -> Verdict:
        if self.device_peak_high_bytes <= budget_bytes:
            return "fits"
        return "tight" if self.device_peak_bytes <= budget_bytes else "does_not_fit"


def estimate_padded(
    profile: Profile,
    *,
    padded_profile: Profile,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    lengths: Lengths,
    pad_to_multiple: int = 1,
    keeps_last: bool = True,
) -> PaddedPrediction:
    """Price a run over padded batches. padded_profile: ``profile_model(spec, is_padded=True)``. lengths: of all
    sequences, cut to ``workload.sequence_length``. The order is that of ``epoch_order`` with the workload's seed, over
    ``workload.num_steps`` steps.

    *Not modelled*: evaluations, whose batches are the caller's. Raises as ``estimate_training`` and ``list_batches`` do.
    """
    if not padded_profile.is_padded or profile.is_padded:
        raise InvalidPlan(
            "padded_profile must be of padded batches and profile of batches without padding",
            field="padded_profile",
            hint="Make them with profile_model(spec, is_padded=True) and profile_model(spec).",
        )
    padding = Padding(
        micro_batch_size=plan.batch.micro_batch_size,
        accumulation_steps=plan.batch.accumulation_steps,
        pad_to_multiple=pad_to_multiple,
        seed=workload.seed,
        keeps_last=keeps_last,
    )
    batches = list_batches(lengths.cut(workload.sequence_length), padding=padding, num_steps=workload.num_steps)

    def price(num_sequences: int, length: int, *, is_padded: bool) -> Prediction:
        batch = replace(plan.batch, micro_batch_size=num_sequences)
        asked = replace(
            workload,
            sequence_length=max(length, SEQUENCE_LOW),
            global_batch_size=num_sequences * plan.batch.accumulation_steps,
        )
        chosen = padded_profile if is_padded else profile
        return estimate_training(chosen, plan=replace(plan, batch=batch), workload=asked, machine=machine)

    priced = [
        (batch, price(batch.num_sequences, batch.length, is_padded=batch.is_padded)) for batch in batches.list_longest()
    ]
    num_masks = plan.batch.accumulation_steps if inputs_pile_up(machine.device) else 1
    peaks = [(batch, worst, _peak_of(batch, worst, num_masks=num_masks)) for batch, worst in priced]
    worst_batch, worst, peak = max(peaks, key=lambda found: found[2].device_peak_bytes)
    mean_length = math.ceil(batches.mean_length / pad_to_multiple) * pad_to_multiple
    return PaddedPrediction(
        worst_batch=worst_batch,
        peak=peak,
        worst=worst,
        mean=price(plan.batch.micro_batch_size, mean_length, is_padded=True),
        median_length=batches.quantile(0.5),
        p90_length=batches.quantile(0.9),
        p99_length=batches.quantile(0.99),
        padding_share=batches.padding_share,
    )


def _peak_of(batch: PaddedBatch, prediction: Prediction, *, num_masks: int) -> StagePeak:
    """Peak of the step that the batch is in. A mask is among the inputs also where it hides nothing and the model leaves it
    out.
    """
    stage = "first_step" if batch.step == 0 else "steady_step"
    peak = next(peak for peak in prediction.peaks if peak.stage == stage)
    if batch.is_padded:
        return peak
    mask_bytes = num_masks * _MASK_BYTES * batch.num_tokens
    by_category = peak.device_bytes_by_category
    return replace(
        peak,
        device_peak_bytes=peak.device_peak_bytes + mask_bytes,
        device_bytes_by_category={**by_category, "temporaries": by_category["temporaries"] + mask_bytes},
    )
