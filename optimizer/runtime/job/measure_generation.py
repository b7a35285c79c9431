"""Measures a batch generation under a plan: what it really allocates and how long it takes, on made-up prompts.

The same ``Generator`` as any other generation's. Needs no dataset.
"""

import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from optimizer.formats.sampling import Sampling
from optimizer.models.anatomy import count_tokens
from optimizer.models.spec import ModelSpec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.passes.arrange import arrange_passes
from optimizer.runtime.generation.generator import Generator, build_for_generation
from optimizer.runtime.generation.micro_batch import MicroBatch
from optimizer.runtime.meter.device import check_dtype, prepared_device
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.meter.stage_names import loading
from optimizer.runtime.meter.timeline import TimelinePoint
from optimizer.workload import GenerationWorkload


@dataclass(frozen=True, kw_only=True)
class GenerationMeasurement:
    """All passes of a workload."""

    device_peak_bytes: int
    device_bytes_by_category: dict[str, int]
    """At the peak; sums to ``device_peak_bytes``."""
    peak_moment: str
    host_peak_bytes: int
    disk_peak_bytes: int
    remote_peak_bytes: int
    prefill_ms: float
    """Time to the first token of a pass: the median of the passes."""
    decode_ms: float
    """Mean milliseconds of each later token of a pass; 0 where there is only one."""
    total_s: float
    tokens_per_s: float
    """Speed of all sequences, prefill included."""
    copied_bytes: dict[str, int]
    """In all passes by link; links without traffic left out."""
    timeline: list[TimelinePoint]
    """``(offset_ms, device bytes by category)`` of all passes."""
    tokens: torch.Tensor
    """[sequences, new tokens], on the host; behind a sequence's own, -1."""
    load_device_peak_bytes: int
    """Before the first pass, while the model came to its places; of random weights, which are not counted as they are drawn, what
    stays."""
    load_host_peak_bytes: int


def measure_generation(
    model_or_spec: nn.Module | ModelSpec,
    *,
    plan: GenerationPlan,
    workload: GenerationWorkload,
    device: str | torch.device = "cpu",
    cap_bytes: int | None = None,
    host_cap_bytes: int | None = None,
    scratch: Path | None = None,
    weights_folder: Path | None = None,
) -> GenerationMeasurement:
    """Generate the whole workload and report its memory and its time.

    A module must be prepared for the plan (``prepare_for_generation``); a spec is built first, with the weights in
    ``weights_folder`` or random ones. scratch: folder of the disk tier.
    Raises OutOfDeviceMemory over ``cap_bytes``, OutOfHostMemory over ``host_cap_bytes``, DiskFull, RemoteStoreFull and
    RemoteStoreLost, InvalidModel for models that keep anything but keys and values between tokens, and what
    ``GenerationPlan.check`` raises.
    """
    device = torch.device(device)
    with prepared_device(device):
        check_dtype(plan.weights, device)
        meter = Meter(device=device, cap_bytes=cap_bytes, host_cap_bytes=host_cap_bytes)
        with ExitStack() as opened:
            with loading(meter):
                model = model_or_spec
                if isinstance(model, ModelSpec):
                    plan.check(workload=workload, max_sequence_length=model.max_sequence_length)
                    model = build_for_generation(
                        model,
                        weights=plan.weights,
                        device=device,
                        seed=workload.seed,
                        weights_folder=weights_folder,
                        meter=meter,
                    )
                generator = Generator(model, plan=plan, device=device, meter=meter, scratch=scratch)
                opened.callback(generator.close, keep_weights=model is model_or_spec)
            return _measure(generator, meter, workload)


def make_prompts(vocab_size: int, workload: GenerationWorkload) -> torch.Tensor:
    """[sequences, prompt length] of uniformly random tokens; shorter prompts are the first of theirs."""
    generator = torch.Generator().manual_seed(workload.seed)
    shape = (workload.num_sequences, workload.prompt_length)
    return torch.randint(vocab_size, shape, generator=generator)


def _measure(generator: Generator, meter: Meter, workload: GenerationWorkload) -> GenerationMeasurement:
    vocab_size = count_tokens(generator.model)
    arranged = _arrange(generator.plan, workload, make_prompts(vocab_size, workload))
    before_bytes = dict(generator.tiers.copied_bytes)
    load = meter.peak()
    generator.tiers.reset_peak()
    meter.reset_peak()
    meter.start_timeline()
    passes = [generator.run_pass(micro_batches) for _, micro_batches in arranged]
    timeline = meter.take_timeline()
    peak = meter.peak()
    total_s = sum(each.prefill_ms + each.decode_ms for each in passes) / 1000
    num_later = sum(each.num_steps - 1 for each in passes)
    return GenerationMeasurement(
        device_peak_bytes=peak.device_bytes,
        device_bytes_by_category=peak.device_bytes_by_category,
        peak_moment=peak.moment,
        host_peak_bytes=peak.host_bytes,
        disk_peak_bytes=generator.tiers.disk_peak_bytes,
        remote_peak_bytes=generator.tiers.remote_peak_bytes,
        prefill_ms=statistics.median(each.prefill_ms for each in passes),
        decode_ms=sum(each.decode_ms for each in passes) / num_later if num_later else 0.0,
        total_s=total_s,
        tokens_per_s=workload.total_new_tokens / total_s,
        copied_bytes={
            link: num_bytes - before_bytes[link]
            for link, num_bytes in generator.tiers.copied_bytes.items()
            if num_bytes > before_bytes[link]
        },
        timeline=timeline,
        tokens=_in_order(arranged),
        load_device_peak_bytes=load.device_bytes,
        load_host_peak_bytes=load.host_bytes,
    )


_Arranged = tuple[list[tuple[int, ...]], list[MicroBatch]]
"""The prompts of one pass, and their micro-batches."""


def _arrange(plan: GenerationPlan, workload: GenerationWorkload, prompts: torch.Tensor) -> list[_Arranged]:
    lengths = workload.lengths if len(workload.lengths) > 1 else workload.lengths * workload.num_sequences
    given = [row[:length] for row, (length, _) in zip(prompts.tolist(), lengths, strict=True)]
    passes = arrange_passes(
        lengths,
        batch_size=plan.batch_size,
        num_micro_batches=plan.num_micro_batches,
    )
    temperature = 1.0 if workload.draws else 0.0
    samplings = [
        Sampling(max_new_tokens=num_new, temperature=temperature, seed=workload.seed + index)
        for index, (_, num_new) in enumerate(lengths)
    ]
    return [
        (
            groups,
            [
                MicroBatch(
                    [given[index] for index in group],
                    samplings=[samplings[index] for index in group],
                    prefill_tokens=plan.prefill_tokens,
                    drops_ended=plan.drops_ended,
                )
                for group in groups
            ],
        )
        for groups in passes
    ]


def _in_order(arranged: list[_Arranged]) -> torch.Tensor:
    """``GenerationMeasurement.tokens``, in the order in which the prompts were given."""
    rows: dict[int, tuple[int, ...]] = {}
    for groups, micro_batches in arranged:
        for group, micro_batch in zip(groups, micro_batches, strict=True):
            rows |= {group[row]: made.token_ids for row, made in micro_batch.take_ended()}
    most = max(map(len, rows.values()))
    return torch.tensor([rows[index] + (-1,) * (most - len(rows[index])) for index in range(len(rows))])
