"""A pass of all stages of a cut model: each simulated as one device is, then run against each other. Torch-free.

Bytes are those of a stage with all its micro-batches. Its time for each of them is that of a pass of this micro-batch alone,
since on a stage they run one after the other; between the steps that were priced time is a straight line, as on one device. *Not
modelled*: that later stages look no tokens up, and that a stage may begin the next pass while the others end this one.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.generation.cut import StageCosts
from optimizer.estimate.generation.one_pass import GenerationPass, times_of
from optimizer.estimate.generation.prediction import StagePrediction
from optimizer.estimate.generation.stages.schedule import HandOver, RanPass, Times, run_schedule
from optimizer.hardware.machine import Machine, PeerLink
from optimizer.hardware.peers import LOOPBACK
from optimizer.plan.passes.arrange import MicroBatchShape, PassShape, num_steps_of


class StagedPass:
    """One pass of these micro-batches on all stages."""

    def __init__(
        self, costs: tuple[StageCosts, ...], machine: Machine, link: PeerLink, *, micro_batches: PassShape, **here: Any
    ) -> None:
        """machine: of one stage. link: between the devices. here: plan, workload and how roughly, as ``GenerationPass`` has
        them.
        """
        self.micro_batches = micro_batches
        self.num_steps = num_steps_of(micro_batches)
        self._costs, self._link, self._slowdown = costs, link, machine.rates.time_factor("network")
        self.stages = tuple(
            GenerationPass(each.profile, machine=machine, micro_batches=micro_batches, stage=each, **here) for each in costs
        )
        """Each with all micro-batches: its bytes."""
        shapes = dict.fromkeys(micro_batches)
        self._alone = [
            {
                shape: stage
                if len(micro_batches) == 1
                else GenerationPass(
                    each.profile, machine=machine, micro_batches=(shape,), stage=each, like=stage, **here
                )
                for shape in shapes
            }
            for each, stage in zip(costs, self.stages, strict=True)
        ]

    @cached_property
    def ran(self) -> RanPass:
        times = [[_step_times(passes[shape]) for shape in self.micro_batches] for passes in self._alone]
        return run_schedule(times, self._hand_over)

    @property
    def total_ms(self) -> float:
        return self.ran.total_ms

    @property
    def fullest(self) -> int:
        """The stage with the highest peak, the first of equals."""
        peaks = [stage.highest[1].device_peak_bytes for stage in self.stages]
        return peaks.index(max(peaks))

    @property
    def busiest(self) -> int:
        return int(np.argmax(self.ran.busy_ms))

    def kinds_of(self, stage: int) -> tuple[Times, Times]:
        """Times of the prefill and of all later steps, as ``times_of`` has them, of a stage by itself."""
        passes = [self._alone[stage][shape] for shape in self.micro_batches]
        prefill = np.sum([times_of(each.prefill) for each in passes], axis=0)
        return prefill, np.sum([each.decode_sum.ms for each in passes], axis=0)

    def sent_bytes(self, stage: int) -> int:
        if self._costs[stage].stage.is_last:
            return 0
        return sum(
            self._hidden_bytes(shape, step) for shape in self.micro_batches for step in range(shape.num_steps)
        )

    @property
    def _hand_over(self) -> HandOver:
        others = len(self.stages) - 1
        return HandOver(
            prefill_ms=tuple(self._crossing_ms(self._hidden_bytes(shape, 0)) for shape in self.micro_batches),
            decode_ms=tuple(self._crossing_ms(self._hidden_bytes(shape, 1)) for shape in self.micro_batches),
            token_ms=1000 * self._slowdown * LOOPBACK.latency_s * others,
        )

    def _hidden_bytes(self, shape: MicroBatchShape, step: int) -> int:
        stage = self.stages[0]
        num_tokens = shape.num_running(step) * (1 if step else shape.prompt_length)
        return num_tokens * stage.profile.hidden_size * stage.plan.weights.bytes_per_element

    def _crossing_ms(self, num_bytes: int) -> float:
        return 1000 * self._slowdown * (num_bytes / self._link.bytes_per_s + self._link.latency_s)


def predict_stages(priced: Mapping[int, StagedPass], *, margin: float, unmeasured_bytes: int) -> tuple[StagePrediction, ...]:
    """Each device, over all passes. margin: share of a peak by which it may be missed. unmeasured_bytes: what may come on top."""
    found = []
    for index in range(len(next(iter(priced.values())).stages)):
        full = max(priced.values(), key=lambda each: each.stages[index].highest[1].device_peak_bytes)
        stage = full.stages[index]
        peak = stage.highest[1]
        peak_bytes = peak.device_peak_bytes
        unmetered_bytes = max(0, max(each.stages[index].allocated_bytes for each in priced.values()) - peak_bytes)
        found.append(
            StagePrediction(
                first_block=full._costs[index].stage.first_block,
                num_blocks=full._costs[index].stage.num_blocks,
                device_peak_bytes=peak_bytes,
                device_peak_high_bytes=peak_bytes + int(np.ceil(peak_bytes * margin)) + unmetered_bytes + unmeasured_bytes,
                device_bytes_by_category=dict(zip(CATEGORIES, peak.peak.tolist(), strict=True)),
                peak_moment=stage.peak_moment,
                busy_ms=full.ran.busy_ms[index],
                sent_bytes=full.sent_bytes(index),
            )
        )
    return tuple(found)


def _step_times(alone: GenerationPass) -> Times:
    """Milliseconds of each step of a micro-batch on a stage, the prefill first."""
    num_later = alone.decode_sum.num_tokens
    known = alone.decoded
    if not num_later:
        return np.array([alone.prefill.step_ms])
    steps = np.arange(1, num_later + 1)
    later = np.interp(steps, [step for step, _ in known], [each.step_ms for _, each in known])
    return np.concatenate(([alone.prefill.step_ms], later))
