"""Measures what a job's first step, its steady steps and its evaluations each allocate at most, on made-up tokens.

The same ``Trainer`` as a real job's. ``measure.py`` measures a steady step in more detail.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from optimizer.models.anatomy import Anatomy
from optimizer.models.spec import ModelSpec
from optimizer.plan.plan import Plan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.meter.device import check_dtype, prepared_device
from optimizer.runtime.meter.meter import Meter, Peak
from optimizer.runtime.step.micro_batch import MicroBatch
from optimizer.runtime.step.step import Trainer
from optimizer.workload import TrainingWorkload


@dataclass(frozen=True, kw_only=True)
class StageMeasurements:
    """Most bytes in each stage, one after the other in one run."""

    first_step: Peak
    """The optimizer's moments come to be in its update."""
    steady_step: Peak
    evaluation: Peak
    """After the steady step, so with the moments there."""


def measure_stages(
    model_or_spec: nn.Module | ModelSpec,
    *,
    plan: Plan,
    workload: TrainingWorkload,
    device: str | torch.device = "cpu",
    scratch: Path | None = None,
    anatomy: Anatomy | None = None,
    make_batches: Callable[..., list[MicroBatch]] = make_synthetic_batches,
) -> StageMeasurements:
    """A first step, a second, and an evaluation of ``workload.eval_batches`` global batches.

    A module is trained in place and must have the plan's dtype; a spec is built first. anatomy: as ``Trainer``'s.
    make_batches: one step's micro-batches, called as ``make_synthetic_batches`` is.
    """
    device = torch.device(device)
    with prepared_device(device):
        check_dtype(plan.weights, device)
        meter = Meter(device=device)
        with meter.translating():
            model = model_or_spec
            if isinstance(model, ModelSpec):
                model = build_prepared(model, weights=plan.weights, workload=workload, device=device)
            trainer = Trainer(
                model, plan=plan, workload=workload, device=device, meter=meter, scratch=scratch, anatomy=anatomy
            )
        try:
            steps = []
            for _ in range(2):
                trainer.join()
                batches = make_batches(model, plan=plan, workload=workload)
                trainer.step(batches, learning_rate=workload.learning_rate)
                del batches
                steps.append(meter.peak())
            held_out = [
                batch
                for _ in range(workload.eval_batches)
                for batch in make_batches(model, plan=plan, workload=workload)
            ]
            trainer.join()
            meter.reset_peak()
            trainer.evaluate(held_out)
            return StageMeasurements(first_step=steps[0], steady_step=steps[1], evaluation=meter.peak())
        finally:
            trainer.close(keep_weights=model is model_or_spec)
