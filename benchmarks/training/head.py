"""The part of ``benchmarks.training`` about the head in chunks: its peak and its time against all logits at once."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.common.paired import paired_ratio
from benchmarks.common.record import Row
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.logits_and_loss import chunked_cross_entropy
from optimizer.workload import TrainingWorkload

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """One head in fp32, and the numbers of chunks it is run in."""

    num_tokens: int
    width: int
    vocabulary: int = 131_072
    chunk_counts: tuple[int, ...] = (8,)
    num_pairs: int = 3


def head_rows(shape: HeadShape, machine: Machine) -> Iterator[Row]:
    """Forward and backward of one large head, all logits at once and in chunks, in turn."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(shape.num_tokens, shape.width, generator=generator).requires_grad_()
    weight = (torch.randn(shape.vocabulary, shape.width, generator=generator) * 0.02).requires_grad_()
    labels = torch.randint(shape.vocabulary, (shape.num_tokens,), generator=generator)

    def run(num_chunks: int) -> torch.Tensor:
        """The weight's gradient."""
        hidden.grad = weight.grad = None
        if num_chunks == 1:
            loss = F.cross_entropy(F.linear(hidden, weight), labels)
        else:
            loss = chunked_cross_entropy(hidden, weight, labels, num_chunks=num_chunks)
        torch.autograd.backward(loss)
        gradient, weight.grad = weight.grad, None
        if gradient is None:
            raise RuntimeError("the head has no gradient")
        return gradient

    counts = (1, *shape.chunk_counts)
    peaks = {count: _peak_bytes(run, count, resident=(hidden, weight, labels)) for count in counts}
    plain_gradient = run(1)
    times: dict[int, list[float]] = {count: [] for count in counts}
    distances: dict[int, float] = {}
    for index in range(shape.num_pairs):
        for count in counts if index % 2 == 0 else reversed(counts):
            start_s = time.perf_counter()
            gradient = run(count)
            times[count].append((time.perf_counter() - start_s) * 1000)
            distances[count] = float((gradient - plain_gradient).abs().max() / plain_gradient.abs().max())
            del gradient
    profile = _profile_head(shape)
    for count in counts:
        yield {
            "what": "head",
            "num_chunks": count,
            "tokens": shape.num_tokens,
            "vocabulary": shape.vocabulary,
            "width": shape.width,
            "peak_bytes": peaks[count],
            "peak_falls_by": round(peaks[1] / peaks[count], 2),
            "ms": round(statistics.median(times[count]), 1),
            "time_over_plain": round(paired_ratio(times[count], times[1]) - 1, 4),
            "gradient_distance": distances[count],
            **_price(profile, shape, machine, count),
        }


def _peak_bytes(run: Callable[[int], torch.Tensor], num_chunks: int, *, resident: Sequence[torch.Tensor]) -> int:
    """Above the hidden states, the weight and the labels; the gradients count."""
    meter = Meter(device=CPU)
    for tensor in resident:
        tensor.grad = None
        meter.assign(tensor, "weights")
    start_bytes = meter.device_bytes
    with meter:
        run(num_chunks)
    return meter.peak().device_bytes - start_bytes


def _profile_head(shape: HeadShape) -> Profile:
    """Profile a model of one small block that has this head."""
    config = {
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": max(256, shape.num_tokens),
    }
    return profile_model(read_model_spec(config))


def _price(profile: Profile, shape: HeadShape, machine: Machine, num_chunks: int) -> Row:
    """Predict a step of that model: the head's bytes at their most, and the time."""
    plan = Plan(
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=1),
        activations=ActivationsPlan(per_block=("recompute",)),
        logits_and_loss=LogitsAndLossPlan(num_chunks=num_chunks),
    )
    workload = TrainingWorkload(sequence_length=shape.num_tokens, global_batch_size=1)
    prediction = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    return {
        "predicted_peak_bytes": max(point.bytes_by_category["logits_and_loss"] for point in prediction.timeline),
        "predicted_step_ms": round(prediction.step_ms, 1),
    }
