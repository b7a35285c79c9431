"""Prices one pass of a batch generation: its tasks (``layout.py``) through the simulator. Torch-free.

A pass is a prefill and the decode of each further token, every step of them for all its micro-batches. A decode grows with the
cache. Its time and its peak are piecewise linear in the number of tokens: sums and maxima of what is linear, within the ranges
over which the ops are the same and no sequence leaves. So the ends of a range are priced, and its middle; where that is not on
the line between the ends, both halves are priced the same way. Time is then summed over every step, none of them sampled.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from optimizer.base.categories import LANES, Link
from optimizer.estimate.categories.stores import STORE_LANES
from optimizer.estimate.generation.cut import StageCosts
from optimizer.estimate.generation.kv.cache import add_copies
from optimizer.estimate.generation.layout import PassLayout, Placed, name_tasks, phase_of
from optimizer.estimate.step.runs import Schedule, TaskRun
from optimizer.estimate.step.simulate import Resident, Simulation, simulate
from optimizer.estimate.step.unmetered import estimate_allocated_peak
from optimizer.estimate.tasks.parts import Bytes
from optimizer.estimate.tasks.tasks import Task, move_task, single
from optimizer.formats.ownership import part_of_bytes
from optimizer.formats.transfer_sizes import STAGING_BYTES
from optimizer.hardware.machine import Machine
from optimizer.plan.generation import PREFILL, GenerationPlan, decode_phase
from optimizer.plan.passes.arrange import PassShape
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.time_kinds import COMPUTE_KINDS
from optimizer.workload import GenerationWorkload

PASS_KINDS = (*COMPUTE_KINDS, "allocation")
_STRAIGHT, _ROUGHLY_STRAIGHT = 1e-6, 3e-4
"""Shares of the time by which a middle may be off the line between its ends; in a search the second."""
_NO_RUN = TaskRun(())


@dataclass(frozen=True, kw_only=True)
class DecodeSum:
    """The sum of all steps of a pass but its prefill."""

    ms: NDArray[np.float64]
    """Milliseconds by kind, as ``times_of`` has them."""
    num_tokens: int
    """Steps."""


class GenerationPass:
    """One pass of these micro-batches."""

    def __init__(
        self,
        profile: GenerationProfile,
        plan: GenerationPlan,
        workload: GenerationWorkload,
        machine: Machine,
        *,
        micro_batches: PassShape,
        like: "GenerationPass | None" = None,
        is_rough: bool = False,
        stage: StageCosts | None = None,
    ) -> None:
        """Prepare one pass. is_rough: for a search, which wants times to within ``_ROUGHLY_STRAIGHT``; bytes are exact.
        like: another pass of the same plan on the same machine, whose tasks are taken over where they are the same.
        stage: as ``PassLayout`` has it.
        """
        self.layout: PassLayout = PassLayout(
            profile,
            plan,
            workload,
            machine,
            micro_batches=micro_batches,
            like=None if like is None else like.layout,
            stage=stage,
        )
        """The tasks of the pass."""
        self.profile, self.plan, self.workload, self.machine = profile, plan, workload, machine
        self.micro_batches = micro_batches
        self._stage = stage
        self._straight = _ROUGHLY_STRAIGHT if is_rough else _STRAIGHT
        self.num_steps = max(shape.num_steps for shape in micro_batches)
        """Forward passes, the prefill among them."""
        self._steps: dict[int, Simulation] = {}
        self.allocated_bytes = 0
        """Most bytes that torch has on the CPU device, in the prefill and in the decodes at the ends of ranges, one of
        which has the highest peak."""

    def other(self, micro_batches: PassShape) -> "GenerationPass":
        """A pass of the same plan for other micro-batches."""
        return GenerationPass(
            self.profile, self.plan, self.workload, self.machine, micro_batches=micro_batches, stage=self._stage
        )

    # Host and stores.

    @property
    def host_bytes(self) -> int:
        """Bytes on the host without homes of keys and values, which pass from one pass to the next."""
        streamed_bytes = sum(self.layout.streamed) if self.plan.weights.place == "host" else 0
        # Copies of the model stream from one home, of which the first counts no smaller a part than any other.
        streamed_bytes = part_of_bytes(streamed_bytes, rank=0, num_ranks=self.plan.layout.num_replicas)
        # A cache that is packed keeps the newest tokens on the device: of few tokens nothing goes to a store.
        has_homes = any(size for homes in self.kv_homes for size, _ in homes)
        stages = self.plan.weights.place in STORE_LANES or (self.plan.kv_cache.place in STORE_LANES and has_homes)
        return streamed_bytes + (STAGING_BYTES if stages else 0)

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disk without homes of keys and values."""
        return sum(self.layout.streamed) if self.plan.weights.place == "disk" else 0

    @property
    def remote_bytes(self) -> int:
        """Bytes in the remote store without homes of keys and values."""
        return sum(self.layout.streamed) if self.plan.weights.place == "remote" else 0

    @property
    def kv_homes(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Homes of keys and values by micro-batch, as ``KvCosts.homes``."""
        return tuple(self.layout.kv[shape].homes for shape in self.micro_batches)

    @property
    def room_bytes(self) -> int:
        """Bytes of attention on the host, there; they pass on as homes do."""
        return self.layout.room_bytes

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the caches of all micro-batches."""
        return sum(self.layout.kv[shape].total_bytes for shape in self.micro_batches)

    # Prefill and decode.

    @cached_property
    def prefill(self) -> Simulation:
        """The simulation from the first allocation of a pass to its first token."""
        return self._simulate(self.layout.place_prefill(), single("weights", self.layout.weight_bytes), is_end=True)

    def decode(self, step: int, *, is_end: bool = False) -> Simulation:
        """The step of one token more of each sequence; the prefill is step 0. is_end: it ends a range within which all is
        linear.
        """
        if step not in self._steps:
            layout = self.layout
            kv_bytes = layout.workspace_bytes + sum(layout.kv[shape].device_bytes for shape in layout.running(step))
            resident = single("weights", layout.weight_bytes) + single("kv_cache", kv_bytes)
            resident += single("temporaries", layout.tokens_bytes)
            self._steps[step] = self._simulate(layout.forward(layout.decode, step=step), resident, is_end=is_end)
        return self._steps[step]

    @property
    def highest(self) -> tuple[int, Simulation]:
        """Among the prefill and all decodes, the step with the highest peak, the earliest of equals.

        A decode's peak is the maximum of what is linear in the cache's length: it lies at an end of a range, and ends are priced.
        """
        return max([(0, self.prefill), *self.decoded], key=lambda step: step[1].device_peak_bytes)

    @property
    def peak_moment(self) -> str:
        step, simulation = self.highest
        placed = list(self.layout.forward(self.layout.decode, step=step) if step else self.layout.place_prefill())
        return placed[simulation.peak_index].describe(phase_of(step), self.profile.num_blocks)

    @property
    def prefill_tasks(self) -> tuple[Task, ...]:
        """Keys and values come with it, and the room for the new tokens; they stay to the end of the pass."""
        return name_tasks(self.layout.place_prefill(), PREFILL)

    @cached_property
    def later_tasks(self) -> tuple[Task, ...]:
        """Tasks between the prefill and the rest: the slots into which keys and values come ahead."""
        slot_bytes = max(each.slot_bytes for each in self.layout.kv.values())
        phase = decode_phase(2)
        later = move_task(phase, phase, single("kv_cache", slot_bytes))
        return (later,) * self.plan.kv_cache.num_ahead if slot_bytes and self.num_steps > 1 else ()

    def decode_tasks(self, step: int) -> tuple[Task, ...]:
        return name_tasks(self.layout.forward(self.layout.decode, step=step), phase_of(step))

    @cached_property
    def decode_sum(self) -> DecodeSum:
        total = np.zeros(1 + 2 * len(LANES) + len(PASS_KINDS))
        low = 1
        while low < self.num_steps:
            end = self._last_alike(low)
            for step in (low, end):
                self.decode(step, is_end=True)
            total += _sum_straight(lambda step: times_of(self.decode(step)), low, end, straight=self._straight)
            low = end + 1
        return DecodeSum(ms=total, num_tokens=self.num_steps - 1)

    @property
    def decoded(self) -> list[tuple[int, Simulation]]:
        """Decodes that were priced for the sum, by step, in order."""
        assert self.decode_sum is not None
        return sorted(self._steps.items())

    @property
    def total_ms(self) -> float:
        return self.prefill.step_ms + float(self.decode_sum.ms[0])

    @property
    def copied_bytes(self) -> dict[Link, int]:
        """Bytes that the whole pass copies, exactly; links without traffic left out."""
        prompts = (self.layout.kv[shape].prefill_copied for shape in self.micro_batches)
        return add_copies(self._weights_copied(1), *prompts, self.decode_copied_bytes)

    @property
    def weights_copied_bytes(self) -> dict[Link, int]:
        """Bytes of those that are streamed weights."""
        return self._weights_copied(self.num_steps)

    @property
    def decode_copied_bytes(self) -> dict[Link, int]:
        """Bytes that all steps but the prefill copy."""
        later = (self.layout.kv[shape].decode_copied for shape in self.micro_batches)
        return add_copies(self._weights_copied(self.num_steps - 1), *later)

    def _weights_copied(self, num_steps: int) -> dict[Link, int]:
        """Each step brings all streamed weights once."""
        each = add_copies(*(task.copied for task in self.layout.weights_tasks))
        return {link: num_steps * num_bytes for link, num_bytes in each.items()}

    def _last_alike(self, step: int) -> int:
        """The last step up to which the same sequences run by the same ops."""
        running = self.layout.running(step)
        last = min(shape.last_step_alike(step) for shape in running)
        for shape in dict.fromkeys(running):
            length = shape.prompt_length + step
            regime = self.layout.decode.regime(self.plan.weights.representation, (shape.num_running(step), length))
            last = min(last, regime.sequence_high - shape.prompt_length)
        return last

    def _simulate(self, placed: Iterable[Placed], resident: Bytes, *, is_end: bool) -> Simulation:
        schedule = Schedule(
            first=TaskRun([task for task, _, _ in placed]),
            later=_NO_RUN,
            num_later=0,
            update=_NO_RUN,
            carried=np.zeros_like(resident),
        )
        if is_end and self.machine.device.kind == "cpu":
            processor = self.machine.processor_for(in_fp16=self.plan.weights.computes_in_fp16)
            allocated_bytes = estimate_allocated_peak(schedule, resident, processor=processor)
            self.allocated_bytes = max(self.allocated_bytes, allocated_bytes)
        return simulate(
            schedule,
            resident=Resident(device=resident, host=self.host_bytes, disk=self.disk_bytes, remote=self.remote_bytes),
            device_kind=self.machine.device.kind,
            fresh_bytes_per_s=self.machine.rates.fresh_bytes_per_s,
        )


def times_of(step: Simulation) -> NDArray[np.float64]:
    """The step's time, each lane's busy and each lane's exposed time, each kind's time."""
    lanes = [times.get(lane, 0.0) for times in (step.busy_ms, step.exposed_ms) for lane in LANES]
    return np.array([step.step_ms, *lanes, *(step.kinds_ms.get(kind, 0.0) for kind in PASS_KINDS)])


def _sum_straight(
    price: Callable[[int], NDArray[np.float64]], low: int, high: int, *, straight: float
) -> NDArray[np.float64]:
    """The sum of ``price`` over every whole number from ``low`` to ``high``, which is piecewise linear."""
    first, last = price(low), price(high)
    count = high - low + 1
    if count <= 2:
        return first if count == 1 else first + last
    middle = (low + high) // 2
    share = (middle - low) / (high - low)
    expected = first + share * (last - first)
    if np.abs(price(middle) - expected).max() <= straight * first[0]:
        return count * (first + last) / 2
    return _sum_straight(price, low, middle, straight=straight) + _sum_straight(price, middle + 1, high, straight=straight)
