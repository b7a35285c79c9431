"""Measures one steady step of a plan: what it really allocates and how long it takes, on made-up tokens.

The same ``Trainer`` as a real job's, so what is measured here is what a job does. Needs no dataset.
"""

import hashlib
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from optimizer.base.categories import Link
from optimizer.models.anatomy import count_tokens
from optimizer.models.spec import ModelSpec
from optimizer.plan.plan import Plan
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.meter.device import check_dtype, prepared_device
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.meter.timeline import TimelinePoint
from optimizer.runtime.step.micro_batch import MicroBatch
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.tiers.homes import HomeTensor
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
    weights_sha256: str | None
    """Hash of the trained weights after the last step (``hash_weights``), where it was asked for."""
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
    host_cap_bytes: int | None = None,
    scratch: Path | None = None,
    updates_on_thread: bool | None = None,
    with_weights_hash: bool = False,
) -> StepMeasurement:
    """Run ``num_steps`` (at least 2) optimizer steps and report the last one's memory.

    A module is trained in place and must have the plan's dtype; a spec is built first. The global random state is
    advanced. scratch: folder for the disk tier. updates_on_thread: as ``Trainer``'s.
    Raises OutOfDeviceMemory over ``cap_bytes``, OutOfHostMemory over ``host_cap_bytes``, DiskFull.
    """
    if num_steps < 2:
        raise ValueError(
            f"num_steps is {num_steps}; the first step has no optimizer state yet, so at least 2 are needed"
        )
    device = torch.device(device)
    with prepared_device(device):
        check_dtype(plan.weights, device)
        meter = Meter(device=device, cap_bytes=cap_bytes, host_cap_bytes=host_cap_bytes)
        with meter.translating():
            if isinstance(model_or_spec, ModelSpec):
                model = build_prepared(model_or_spec, weights=plan.weights, workload=workload, device=device)
            else:
                model = model_or_spec
            trainer = Trainer(
                model,
                plan=plan,
                workload=workload,
                device=device,
                meter=meter,
                scratch=scratch,
                updates_on_thread=updates_on_thread,
            )
        try:
            return _measure(trainer, meter, num_steps, with_weights_hash=with_weights_hash)
        finally:
            trainer.close(keep_weights=model is model_or_spec)


def hash_weights(trainer: Trainer) -> str:
    """sha256 of every trained tensor's name, dtype, shape and bytes, wherever they live."""
    digest = hashlib.sha256()
    for name, held in trainer.named_weights().items():
        tensor = held.load() if isinstance(held, HomeTensor) else held.cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def make_synthetic_batches(model: nn.Module, *, plan: Plan, workload: TrainingWorkload) -> list[MicroBatch]:
    """One step's micro-batches of uniformly random tokens; two samples in each row where they are packed."""
    generator = torch.Generator().manual_seed(workload.seed)
    shape = (plan.batch.micro_batch_size * workload.rows_per_sequence, workload.sequence_length)
    num_tokens = count_tokens(model)
    half = workload.sequence_length // 2
    positions = torch.cat((torch.arange(half), torch.arange(workload.sequence_length - half))).expand(shape)
    return [
        (
            torch.randint(num_tokens, shape, generator=generator),
            torch.randint(num_tokens, shape, generator=generator),
            *((positions.contiguous(),) if workload.is_packed else ()),
        )
        for _ in range(plan.batch.accumulation_steps)
    ]


def _measure(trainer: Trainer, meter: Meter, num_steps: int, *, with_weights_hash: bool) -> StepMeasurement:
    step_ms: list[float] = []
    before_bytes: dict[Link, int] = {}
    for index in range(num_steps):
        batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
        if index == num_steps - 1:
            # Updates of the step before may still run beside this one's forward; their copies are that step's.
            trainer.join()
            meter.start_timeline()
        before_bytes = dict(trainer.tiers.copied_bytes)
        trainer.tiers.reset_peak()
        step_ms.append(trainer.step(batches, learning_rate=trainer.workload.learning_rate).step_ms)
    start_s = time.perf_counter()
    trainer.join()
    # What still ran after the last step belongs to it, unless there are steps that it could hide behind.
    step_ms[-1] += (time.perf_counter() - start_s) * 1000
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
        weights_sha256=hash_weights(trainer) if with_weights_hash else None,
        timeline=timeline,
    )
