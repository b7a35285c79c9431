"""Runs requests under a plan, pass by pass: what a generate job does between its prompts' tokens and its results' tokens.

Knows token ids alone; text, files and what survives a crash are the caller's. To go on after one, leave out what has finished:
no request's tokens depend on which others run, but for what a product of other rows differs by in its last bits.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimizer.base.errors import InvalidPlan, InvalidWorkload
from optimizer.formats.sampling import Sampling
from optimizer.models.spec import ModelSpec
from optimizer.plan.devices.layout import check_depth
from optimizer.plan.devices.stages import StageOfModel, list_stages
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.passes.arrange import PassShape, arrange_passes
from optimizer.plan.passes.run import TimedPass, sum_passes
from optimizer.runtime.generation.generator import Generator, PassTimes, build_for_generation
from optimizer.runtime.generation.micro_batch import FinishReason, MicroBatch, Watch
from optimizer.runtime.generation.stages.generator import StagedGenerator
from optimizer.runtime.generation.stages.link import StageLink
from optimizer.runtime.meter.device import check_dtype, prepared_device
from optimizer.runtime.meter.lanes import lane_fields
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.meter.stage_names import loading
from optimizer.runtime.ranks.group import Ranks

Sample = Mapping[str, Any]
"""``prompts_done``, ``num_prompts``, ``num_new_tokens`` and ``tokens_per_s`` (since the start), ``prefill_ms`` and ``decode_ms``
(of one token; both of the last pass that ended, None before), ``device_bytes`` (by category, between two steps),
``device_peak_bytes`` and ``host_bytes``; since the start ``run_ms``, ``copied_bytes`` by link and ``lane_fields``."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt."""

    id: str
    token_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    make_watch: Callable[[], Watch] | None = None
    """Makes what is asked after each new token whether the sequence is over; called once, as its pass begins. So a caller that
    knows texts ends a sequence at one."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The answer to one request."""

    id: str
    token_ids: tuple[int, ...]
    """New ones; what stopped it is the last of them."""
    finish_reason: FinishReason
    prompt_tokens: int


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """The result of a run."""

    num_finished: int
    was_stopped: bool
    """True if ``should_stop`` ended it."""
    num_passes: int
    """That ended."""
    num_steps: int
    """Forward passes over the model, in all passes."""
    num_new_tokens: int
    """New tokens of all sequences, those of a stopped pass among them."""
    total_s: float
    tokens_per_s: float
    prefill_ms: float | None
    """Mean milliseconds of a pass's prefill; None where none ended."""
    decode_ms: float | None
    """Mean milliseconds of each later step of a pass; None where there was none."""
    device_peak_bytes: int
    """Peak of the steps that were counted (``Generator.run_pass``); on CUDA torch's own, of all."""
    device_bytes_by_category: dict[str, int]
    """At the peak."""
    peak_moment: str
    host_peak_bytes: int
    disk_peak_bytes: int
    remote_peak_bytes: int
    copied_bytes: dict[str, int]
    """By link; links without traffic left out."""
    timed_passes: tuple[TimedPass, ...]
    """The passes that ran, from which a machine's calibration learns."""
    draws: bool
    """True if some request drew its tokens."""


@contextmanager
def open_generator(
    spec: ModelSpec,
    *,
    plan: GenerationPlan,
    device: str | torch.device = "cpu",
    weights_folder: Path | None = None,
    seed: int = 0,
    cap_bytes: int | None = None,
    host_cap_bytes: int | None = None,
    scratch: Path | None = None,
    ranks: Ranks | None = None,
) -> Iterator[Generator]:
    """A metered generator of this model, closed at the end. ranks: the processes of a plan of several devices, this among them.

    weights_folder: where the model's own weights are; None draws random ones with ``seed``. scratch: folder of the disk tier.
    Raises OutOfDeviceMemory and OutOfHostMemory over the caps (of ``stage`` "load" while it loads), DiskFull, RemoteStoreFull and
    RemoteStoreLost (inside, for what a pass meets; requests that were reported as finished stay so), InvalidModel, MissingExtra.
    """
    device = torch.device(device)
    stage = _find_stage(plan, spec, ranks)
    with prepared_device(device):
        check_dtype(plan.weights, device)
        meter = Meter(device=device, cap_bytes=cap_bytes, host_cap_bytes=host_cap_bytes)
        with ExitStack() as opened:
            with loading(meter):
                model = build_for_generation(
                    spec,
                    weights=plan.weights,
                    device=device,
                    seed=seed,
                    weights_folder=weights_folder,
                    stage=stage,
                    meter=meter,
                )
                generator = _make_generator(
                    model, plan=plan, device=device, meter=meter, scratch=scratch, ranks=ranks, stage=stage
                )
                opened.callback(generator.close, keep_weights=False)
            yield generator


def _find_stage(plan: GenerationPlan, spec: ModelSpec, ranks: Ranks | None) -> StageOfModel | None:
    """The stage of this process. Raises InvalidPlan where ranks and plan are of different numbers of devices."""
    num_ranks = 1 if ranks is None else ranks.num_ranks
    if plan.layout.num_devices != num_ranks:
        raise InvalidPlan(
            f"plan.layout is of {plan.layout.num_devices} devices; this process generates with {num_ranks} of them",
            field="plan.layout",
            value=plan.layout.num_devices,
            allowed=num_ranks,
        )
    check_depth(plan.layout.stage_blocks, spec.num_blocks)
    return None if ranks is None or not plan.layout.is_cut else list_stages(plan.layout.stage_blocks)[ranks.rank]


def _make_generator(
    model: nn.Module,
    *,
    plan: GenerationPlan,
    device: torch.device,
    meter: Meter,
    scratch: Path | None,
    ranks: Ranks | None,
    stage: StageOfModel | None,
) -> Generator:
    if ranks is not None and stage is not None:
        # Others may take longer to load; from here on a wait is for a stage's work.
        ranks.barrier()
        link = StageLink(ranks, stage)
        return StagedGenerator(model, plan=plan, device=device, link=link, meter=meter, scratch=scratch)
    homes = ranks if plan.weights.place == "host" else None
    return Generator(model, plan=plan, device=device, meter=meter, scratch=scratch, homes=homes)


def run_requests(
    generator: Generator,
    requests: Sequence[Request],
    *,
    on_finished: Callable[[Finished], None],
    report: Callable[[Sample], None] = lambda sample: None,
    should_stop: Callable[[], bool] = lambda: False,
    report_every_s: float = 1.0,
) -> GenerationResult:
    """All requests, the longest prompts first.

    on_finished: called for each request as it ends, between two steps. report: a sample at most every ``report_every_s``, and one
    after each pass. should_stop: asked before each forward pass; sequences that have not ended are then dropped. Raises
    InvalidWorkload for requests that the model cannot take, before anything runs.
    """
    config: Any = generator.model.config
    check_requests(
        requests,
        vocab_size=config.vocab_size,
        max_sequence_length=getattr(config, "max_position_embeddings", None),
    )
    return _Run(generator, requests, on_finished, report, should_stop, report_every_s).run()


def check_requests(requests: Sequence[Request], *, vocab_size: int, max_sequence_length: int | None) -> None:
    """Raise InvalidWorkload for the first that the model cannot take. max_sequence_length: None for no limit."""
    seen: set[str] = set()
    for request in requests:
        name, length = f"requests[{request.id!r}]", len(request.token_ids)
        num_tokens = length + request.sampling.max_new_tokens
        outside = next((token for token in request.token_ids if not 0 <= token < vocab_size), None)
        if request.id in seen:
            raise _refused(name, "its id is given twice", request.id)
        if not length:
            raise _refused(name, "it has no tokens; a prompt has one at least", 0)
        if outside is not None:
            raise _refused(name, f"token {outside} is outside the vocabulary of {vocab_size:,}", outside)
        if max_sequence_length is not None and num_tokens > max_sequence_length:
            raise _refused(
                name,
                f"{length:,} tokens and {request.sampling.max_new_tokens:,} new ones make {num_tokens:,}; this model has "
                f"positions for {max_sequence_length:,}: shorten the prompt or generate fewer",
                num_tokens,
            )
        seen.add(request.id)


def _refused(name: str, why: str, value: object) -> InvalidWorkload:
    return InvalidWorkload(f"{name} cannot run: {why}", field=name, value=value)


class _Run:
    """Counts kept during a run."""

    def __init__(
        self,
        generator: Generator,
        requests: Sequence[Request],
        on_finished: Callable[[Finished], None],
        report: Callable[[Sample], None],
        should_stop: Callable[[], bool],
        report_every_s: float,
    ) -> None:
        self._generator, self._requests = generator, requests
        self._on_finished, self._report, self._should_stop = on_finished, report, should_stop
        self._report_every_s = report_every_s
        self._passes: list[PassTimes] = []
        self._ran: list[tuple[PassShape, float]] = []
        """Passes as they ran, each with its milliseconds."""
        self._draws = False
        self._num_finished = 0
        self._num_new_tokens = 0
        """Counts of passes that ended."""
        self._current: list[tuple[MicroBatch, Sequence[Request]]] = []
        """Counts of the pass under way."""
        self._start_s = self._reported_s = time.perf_counter()
        self._before_bytes = dict(generator.tiers.copied_bytes)

    def run(self) -> GenerationResult:
        generator = self._generator
        if generator.meter is not None:
            generator.meter.reset_peak()
        generator.tiers.reset_peak()
        generator.tiers.lanes.begin()
        was_stopped = self._run_passes()
        total_s = time.perf_counter() - self._start_s
        peak = generator.meter.peak() if generator.meter is not None else None
        num_later = sum(each.num_steps - 1 for each in self._passes)
        return GenerationResult(
            num_finished=self._num_finished,
            was_stopped=was_stopped,
            num_passes=sum(not each.was_stopped for each in self._passes),
            num_steps=sum(each.num_steps for each in self._passes),
            num_new_tokens=self._num_new_tokens,
            total_s=total_s,
            tokens_per_s=self._num_new_tokens / total_s,
            prefill_ms=sum(each.prefill_ms for each in self._passes) / len(self._passes) if self._passes else None,
            decode_ms=sum(each.decode_ms for each in self._passes) / num_later if num_later else None,
            device_peak_bytes=peak.device_bytes if peak is not None else 0,
            device_bytes_by_category=peak.device_bytes_by_category if peak is not None else {},
            peak_moment=peak.moment if peak is not None else "",
            host_peak_bytes=peak.host_bytes if peak is not None else 0,
            disk_peak_bytes=generator.tiers.disk_peak_bytes,
            remote_peak_bytes=generator.tiers.remote_peak_bytes,
            copied_bytes=self._copied_bytes(),
            timed_passes=sum_passes(self._ran),
            draws=self._draws,
        )

    def _run_passes(self) -> bool:
        """Report whether it was stopped."""
        plan = self._generator.plan
        passes = arrange_passes(
            [(len(request.token_ids), request.sampling.max_new_tokens) for request in self._requests],
            batch_size=plan.batch_size,
            num_micro_batches=plan.num_micro_batches,
        )
        for each in passes:
            if self._generator.asks_to_stop(self._should_stop):
                return True
            if self._run_pass([[self._requests[index] for index in indices] for indices in each]):
                return True
        return False

    def _run_pass(self, requests: Sequence[Sequence[Request]]) -> bool:
        """Report whether it was stopped."""
        start_s = time.perf_counter()
        self._draws |= any(not request.sampling.is_greedy for part in requests for request in part)
        self._current = [
            (
                self._generator.micro_batch(
                    [request.token_ids for request in part],
                    samplings=[request.sampling for request in part],
                    watches=[None if request.make_watch is None else request.make_watch() for request in part],
                ),
                part,
            )
            for part in requests
        ]
        micro_batches = [micro_batch for micro_batch, _ in self._current]
        times = self._generator.run_pass(micro_batches, should_stop=self._after_step, counts_all=False)
        self._hand_over()
        self._num_new_tokens += sum(micro_batch.num_generated for micro_batch in micro_batches)
        self._current = []
        self._passes.append(times)
        ran = tuple(micro_batch.shape_run for micro_batch in micro_batches)
        self._ran.append((ran, (time.perf_counter() - start_s) * 1000))
        self._tell()
        return times.was_stopped

    def _hand_over(self) -> None:
        """Sequences that have ended since the last call."""
        for micro_batch, requests in self._current:
            for row, made in micro_batch.take_ended():
                self._num_finished += 1
                self._on_finished(
                    Finished(
                        id=requests[row].id,
                        token_ids=made.token_ids,
                        finish_reason=made.finish_reason,
                        prompt_tokens=len(requests[row].token_ids),
                    )
                )

    def _after_step(self) -> bool:
        self._hand_over()
        if time.perf_counter() - self._reported_s >= self._report_every_s:
            self._tell()
        return self._should_stop()

    def _copied_bytes(self) -> dict[str, int]:
        """By this run so far."""
        moved = self._generator.tiers.copied_bytes
        return {link: moved[link] - before for link, before in self._before_bytes.items() if moved[link] > before}

    def _tell(self) -> None:
        now_s = self._reported_s = time.perf_counter()
        generator, meter = self._generator, self._generator.meter
        run_ms = (now_s - self._start_s) * 1000
        last = self._passes[-1] if self._passes else None
        num_new_tokens = self._num_new_tokens + sum(micro_batch.num_generated for micro_batch, _ in self._current)
        self._report(
            {
                "prompts_done": self._num_finished,
                "num_prompts": len(self._requests),
                "num_new_tokens": num_new_tokens,
                "tokens_per_s": num_new_tokens / (now_s - self._start_s),
                "prefill_ms": last.prefill_ms if last is not None else None,
                "decode_ms": last.decode_ms / (last.num_steps - 1) if last is not None and last.num_steps > 1 else None,
                "device_bytes": meter.bytes_by_category() if meter is not None else {},
                "device_peak_bytes": meter.peak().device_bytes if meter is not None else 0,
                "host_bytes": meter.host_bytes if meter is not None else 0,
                "run_ms": round(run_ms, 1),
                "copied_bytes": self._copied_bytes(),
                **lane_fields(generator.tiers.lanes.take(), total_ms=run_ms, device=generator.device),
            }
        )
