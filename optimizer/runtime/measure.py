"""Measures one steady step of a plan: what it really allocates and how long it takes, on made-up tokens.

The same ``Trainer`` as a real job's, so what is measured here is what a job does. Needs no dataset.
"""

import statistics
from dataclasses import dataclass

import torch
from torch import nn

from optimizer.models.spec import ModelSpec
from optimizer.plan import Plan
from optimizer.runtime.device import check_dtype, prepared_device
from optimizer.runtime.meter import Meter
from optimizer.runtime.prepare import build_prepared
from optimizer.runtime.step import MicroBatch, Trainer
from optimizer.runtime.timeline import TimelinePoint
from optimizer.workload import TrainingWorkload


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """A steady step: optimizer state exists already."""

    device_peak_bytes: int
    device_bytes_by_category: dict[str, int]
    """At the peak; sums to ``device_peak_bytes``."""
    host_peak_bytes: int
    peak_moment: str
    step_ms: float
    """Median of the steps after the first, without the one whose timeline was noted when there are others."""
    copied_bytes: dict[str, int]
    """In that step by link; links without traffic left out."""
    disk_peak_bytes: int
    """Most in use in the scratch file, as the next in the remote store."""
    remote_peak_bytes: int
    timeline: list[TimelinePoint]
    """``(offset_ms, device bytes by category)`` of the last step."""


def measure_step(
    model_or_spec: nn.Module | ModelSpec,
    *,
    plan: Plan,
    workload: TrainingWorkload,
    device: str | torch.device = "cpu",
    num_steps: int = 2,
    cap_bytes: int | None = None,
) -> StepMeasurement:
    """Run ``num_steps`` (at least 2) optimizer steps and report the last one's memory.

    A module is trained in place and must have the plan's dtype; a spec is built first. The global random state is
    advanced. Raises OutOfDeviceMemory over ``cap_bytes``.
    """
    if num_steps < 2:
        raise ValueError(
            f"num_steps is {num_steps}; the first step has no optimizer state yet, so at least 2 are needed"
        )
    device = torch.device(device)
    with prepared_device(device):
        check_dtype(plan.weights, device)
        meter = Meter(device=device, cap_bytes=cap_bytes)
        with meter.translating():
            if isinstance(model_or_spec, ModelSpec):
                model = build_prepared(model_or_spec, weights=plan.weights, workload=workload, device=device)
            else:
                model = model_or_spec
            trainer = Trainer(model, plan=plan, workload=workload, device=device, meter=meter)
        try:
            return _measure(trainer, meter, num_steps)
        finally:
            trainer.close()


def make_synthetic_batches(model: nn.Module, *, plan: Plan, workload: TrainingWorkload) -> list[MicroBatch]:
    """One step's micro-batches of uniformly random tokens."""
    generator = torch.Generator().manual_seed(workload.seed)
    shape = (plan.batch.micro_batch_size, workload.sequence_length)
    num_tokens: int = model.config.vocab_size  # type: ignore[union-attr,assignment]
    return [
        (
            torch.randint(num_tokens, shape, generator=generator),
            torch.randint(num_tokens, shape, generator=generator),
        )
        for _ in range(plan.batch.accumulation_steps)
    ]


def _measure(trainer: Trainer, meter: Meter, num_steps: int) -> StepMeasurement:
    step_ms: list[float] = []
    for index in range(num_steps):
        batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
        before_bytes = dict(trainer.tiers.copied_bytes)
        trainer.tiers.reset_peak()
        if index == num_steps - 1:
            meter.start_timeline()
        step_ms.append(trainer.step(batches, learning_rate=trainer.workload.learning_rate).step_ms)
    timeline = meter.take_timeline()
    peak = meter.peak()
    return StepMeasurement(
        device_peak_bytes=peak.device_bytes,
        device_bytes_by_category=peak.device_bytes_by_category,
        host_peak_bytes=peak.host_bytes,
        peak_moment=peak.moment,
        step_ms=statistics.median(step_ms[1:-1] or step_ms[1:]),
        copied_bytes={
            link: num_bytes - before_bytes[link]
            for link, num_bytes in trainer.tiers.copied_bytes.items()
            if num_bytes > before_bytes[link]
        },
        disk_peak_bytes=trainer.tiers.disk_peak_bytes,
        remote_peak_bytes=trainer.tiers.remote_peak_bytes,
        timeline=timeline,
    )
