"""Torch's own fused loss beside the one of the runtime: peak, time and distance from the loss in double precision. Needs no GPU.

``torch.nn.functional.linear_cross_entropy`` with chunks (torch 2.13) and ``chunked_cross_entropy`` do forward and backward of one
head, in as many chunks. Peaks are torch's profiler's, since a mode such as the meter sees nothing inside of torch's op, without
what is there before. Times are of the process, of pairs in turn.

    python -m benchmarks.fused_loss [--quick] [--json FILE]
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.paired import paired_ratio
from benchmarks.common.record import GoalEntry, Record, Row, all_of, at_most, describe_machine
from optimizer.runtime.step.logits_and_loss import chunked_cross_entropy

CPU = torch.device("cpu")
LOSS_GOAL = 1e-3
"""Distance from the loss in double precision, of losses of about ten."""
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Head:
    num_tokens: int
    width: int
    vocabulary: int
    num_chunks: int
    dtype: torch.dtype
    trains_head: bool = True


HEADS = (
    Head(num_tokens=512, width=128, vocabulary=16_384, num_chunks=8, dtype=torch.float32),
    Head(num_tokens=1024, width=64, vocabulary=8_192, num_chunks=8, dtype=torch.float32),
    Head(num_tokens=256, width=256, vocabulary=32_768, num_chunks=4, dtype=torch.float32),
    Head(num_tokens=512, width=128, vocabulary=16_384, num_chunks=8, dtype=torch.float32, trains_head=False),
    Head(num_tokens=512, width=128, vocabulary=16_384, num_chunks=8, dtype=torch.bfloat16),
    Head(num_tokens=1024, width=64, vocabulary=8_192, num_chunks=8, dtype=torch.bfloat16),
    Head(num_tokens=512, width=128, vocabulary=16_384, num_chunks=8, dtype=torch.bfloat16, trains_head=False),
)


def _all_at_once(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, num_chunks: int) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def _ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, num_chunks: int) -> torch.Tensor:
    return chunked_cross_entropy(hidden, weight, labels, num_chunks=num_chunks)


def _theirs(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """With the policy that torch takes by itself here."""
    size = -(-hidden.shape[0] // num_chunks)
    options = LinearCrossEntropyOptions(batch_chunk_size=size, chunking_method=None)
    found: torch.Tensor = F.linear_cross_entropy(hidden, weight, labels, options=options)
    return found


LOSSES: dict[str, Loss] = {"all logits at once": _all_at_once, "ours": _ours, "torch's": _theirs}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused_loss", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three pairs of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record = Record(file=options.json, machine=describe_machine(CPU), is_quick=options.quick)
    for head in HEADS:
        record.add_all(str(head), head_rows(head, num_pairs=3 if options.quick else 8))
    return record.finish(summarize(record.rows))


def head_rows(head: Head, *, num_pairs: int) -> Iterator[Row]:
    """A row for each loss, in the order of ``LOSSES``."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(head.num_tokens, head.width, generator=generator).to(head.dtype).requires_grad_()
    weight = (torch.randn(head.vocabulary, head.width, generator=generator) * 0.02).to(head.dtype)
    weight.requires_grad_(head.trains_head)
    labels = torch.randint(head.vocabulary, (head.num_tokens,), generator=generator)
    wide = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in (hidden, weight)]
    exact = _run(_all_at_once, wide[0], wide[1], labels)
    found = {name: _run(loss, hidden, weight, labels, num_chunks=head.num_chunks) for name, loss in LOSSES.items()}
    peaks = {
        name: _profile_peak(partial(_run, loss, hidden, weight, labels, num_chunks=head.num_chunks))
        for name, loss in LOSSES.items()
    }
    times_ms: dict[str, list[float]] = {name: [] for name in LOSSES}
    for index in range(num_pairs):
        for name in LOSSES if index % 2 == 0 else reversed(LOSSES):
            start_s = time.process_time()
            _run(LOSSES[name], hidden, weight, labels, num_chunks=head.num_chunks)
            times_ms[name].append((time.process_time() - start_s) * 1000)
    for name in LOSSES:
        loss, *gradients = found[name]
        distances = [
            float((mine.double() - theirs).abs().max() / theirs.abs().max())
            for mine, theirs in zip(gradients, exact[1:], strict=True)
            if mine is not None and theirs is not None
        ]
        yield {
            "what": "loss",
            "by": name,
            "dtype": str(head.dtype).removeprefix("torch."),
            "tokens": head.num_tokens,
            "width": head.width,
            "vocabulary": head.vocabulary,
            "num_chunks": head.num_chunks,
            "trains_head": head.trains_head,
            "peak_bytes": peaks[name],
            "peak_over_ours": round(peaks[name] / peaks["ours"], 3),
            "time_over_ours": round(paired_ratio(times_ms[name], times_ms["ours"]), 3),
            "loss_dtype": str(loss.dtype).removeprefix("torch."),
            "loss_distance": float((loss.double() - exact[0]).abs()),
            "gradient_distance": max(distances),
        }


def _run(loss: Loss, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, num_chunks: int = 1) -> Any:
    """The loss, and the gradients of hidden states and of the head."""
    hidden.grad = weight.grad = None
    found = loss(hidden, weight, labels, num_chunks)
    torch.autograd.backward(found)
    gradients = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    return found.detach(), *gradients


def _profile_peak(run: Callable[[], Any]) -> int:
    """Bytes above what was there before, that of inner buffers of ops among them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held_bytes = peak_bytes = 0
    for event in events:
        held_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, held_bytes)
    return peak_bytes


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """The runtime's own is judged: torch's has no goal to meet."""
    ours = [row for row in rows if row["what"] == "loss" and row["by"] == "ours"]
    theirs = [row for row in rows if row["what"] == "loss" and row["by"] == "torch's"]
    return {
        "largest distance of our loss": at_most(max((row["loss_distance"] for row in ours), default=None), LOSS_GOAL),
        "heads where torch's takes no less memory": all_of(row["peak_over_ours"] >= 1 for row in theirs),
    }


if __name__ == "__main__":
    sys.exit(main())
