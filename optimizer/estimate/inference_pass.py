"""One pass of a batch generation, laid out block by block as ``runtime/inference.py`` runs it. Torch-free.

A pass is a prefill and the decode of each further token, every step of them for all its micro-batches. A decode grows with the
cache. Its time and its peak are piecewise linear in the number of tokens: sums and maxima of what is linear, within the ranges
over which the ops are the same and no micro-batch ends. So the ends of a range are priced, and its middle; where that is not on
the line between the ends, both halves are priced the same way. Time is then summed over every step, none of them sampled.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from optimizer.categories import Link
from optimizer.estimate.compiled import Arrival, Bytes, CompiledShape, compile_shape
from optimizer.estimate.drawing import draw_bytes, draw_time
from optimizer.estimate.kv_cache import list_kv_bytes
from optimizer.estimate.prediction import LANES
from optimizer.estimate.runs import Run, Schedule
from optimizer.estimate.simulate import Resident, Simulation, simulate
from optimizer.estimate.streaming import make_weights_task
from optimizer.estimate.tasks import Task, move_task, risen_bytes, single
from optimizer.estimate.unmetered import estimate_allocated_peak
from optimizer.estimate.weights import list_forward_moves
from optimizer.hardware.machine import Machine
from optimizer.packing import STAGING_BYTES
from optimizer.plan.inference import PREFILL, InferencePlan, decode_phase, head_of
from optimizer.plan.passes import MicroBatchShape, PassShape
from optimizer.profile.inference import EMBEDDING, HEAD, ForwardRegime, InferenceProfile, Phase, block_part
from optimizer.time_kinds import COMPUTE_KINDS
from optimizer.workload import InferenceWorkload

PASS_KINDS = (*COMPUTE_KINDS, "allocation")
_ID_BYTES = 8
"""Of one token's id."""
_STRAIGHT = 1e-6
"""What a middle may be off the line between its ends, as a share of the time."""


@dataclass(frozen=True, kw_only=True)
class DecodeSum:
    """Of all steps of a pass but its prefill."""

    ms: NDArray[np.float64]
    """As ``times_of`` has them."""
    num_tokens: int
    """Steps."""


class GenerationPass:
    """One pass of these micro-batches."""

    def __init__(
        self,
        profile: InferenceProfile,
        plan: InferencePlan,
        workload: InferenceWorkload,
        machine: Machine,
        *,
        micro_batches: PassShape,
    ) -> None:
        self.profile, self.plan, self.workload, self.machine = profile, plan, workload, machine
        self.micro_batches = micro_batches
        self.num_steps = max(shape.num_steps for shape in micro_batches)
        """Forward passes, the prefill among them."""
        self._rates_key = f"{machine.device.kind} {machine.rates!r}"
        self._kv_bytes = {
            shape: list_kv_bytes(profile, plan, batch_size=shape.batch_size, num_tokens=shape.cache_length)
            for shape in micro_batches
        }
        self._tokens_bytes = _ID_BYTES * sum(shape.batch_size * shape.num_steps for shape in micro_batches)
        self._steps: dict[int, Simulation] = {}
        self.allocated_bytes = 0
        """What torch has at most on the CPU device, in all that was priced so far."""
        held = profile.weight_bytes(plan.weights.representation)
        kinds = profile.block_kinds
        by_block = tuple(held.by_block[kind] for kind in kinds)
        self._tensors = tuple(held.tensors[kind] for kind in kinds)
        is_streaming = plan.weights.place != "device"
        self._streamed = by_block if is_streaming else ()
        self._moves = list_forward_moves(self._streamed, prefetch=plan.weights.prefetch)
        staying_bytes = sum(held.staying_by_block[kind] for kind in kinds)
        self.weight_bytes = held.outside + staying_bytes + (0 if is_streaming else sum(by_block))

    # Host and disk.

    @property
    def host_bytes(self) -> int:
        place = self.plan.weights.place
        return sum(self._streamed) if place == "host" else STAGING_BYTES if place == "disk" else 0

    @property
    def disk_bytes(self) -> int:
        return sum(self._streamed) if self.plan.weights.place == "disk" else 0

    @property
    def kv_cache_bytes(self) -> int:
        """Of all micro-batches."""
        return sum(sum(self._kv_bytes[shape]) for shape in self.micro_batches)

    # Prefill and decode.

    @cached_property
    def prefill(self) -> Simulation:
        """From the first allocation of a pass to its first token."""
        return self._simulate(self.prefill_tasks, single("weights", self.weight_bytes))

    def decode(self, step: int) -> Simulation:
        """Of one token more of each sequence; the prefill is step 0."""
        if step not in self._steps:
            kv_bytes = sum(sum(self._kv_bytes[shape]) for shape in self._running(step))
            resident = single("weights", self.weight_bytes) + single("kv_cache", kv_bytes)
            resident += single("temporaries", self._tokens_bytes)
            self._steps[step] = self._simulate(self.decode_tasks(step), resident)
        return self._steps[step]

    @cached_property
    def prefill_tasks(self) -> tuple[Task, ...]:
        """Keys and values come with it, and the room for the new tokens; they stay to the end of the pass."""
        prompts_bytes = _ID_BYTES * sum(shape.batch_size * shape.prompt_length for shape in self.micro_batches)
        return (
            move_task(PREFILL, PREFILL, single("temporaries", self._tokens_bytes + prompts_bytes)),
            *self._forward(self.profile.prefill, PREFILL, step=0),
            move_task(PREFILL, head_of(PREFILL), -single("temporaries", prompts_bytes)),
        )

    def decode_tasks(self, step: int) -> tuple[Task, ...]:
        return tuple(self._forward(self.profile.decode, decode_phase(step + 1), step=step))

    @cached_property
    def decode_sum(self) -> DecodeSum:
        total = np.zeros(1 + 2 * len(LANES) + len(PASS_KINDS))
        low = 1
        while low < self.num_steps:
            end = self._last_alike(low)
            total += _sum_straight(lambda step: times_of(self.decode(step)), low, end)
            low = end + 1
        return DecodeSum(ms=total, num_tokens=self.num_steps - 1)

    @property
    def decoded(self) -> list[tuple[int, Simulation]]:
        """What was priced for the sum, by step, in order."""
        assert self.decode_sum is not None
        return sorted(self._steps.items())

    @property
    def total_ms(self) -> float:
        return self.prefill.step_ms + float(self.decode_sum.ms[0])

    @property
    def step_copies(self) -> dict[Link, int]:
        """Of a prefill, and of every decode as well: each brings all streamed weights once."""
        return {link: num_bytes for link, num_bytes in self.prefill.copied_bytes.items() if num_bytes}

    def _running(self, step: int) -> PassShape:
        """The micro-batches that still generate in a step."""
        return tuple(shape for shape in self.micro_batches if step < shape.num_steps)

    def _last_alike(self, step: int) -> int:
        """Up to which step the same micro-batches run by the same ops."""
        running = self._running(step)
        last = min(shape.num_steps for shape in running) - 1
        for shape in dict.fromkeys(running):
            length = shape.prompt_length + step
            regime = self.profile.decode.regime(self.plan.weights.representation, (shape.batch_size, length))
            last = min(last, regime.sequence_high - shape.prompt_length)
        return last

    def _simulate(self, tasks: tuple[Task, ...], resident: Bytes) -> Simulation:
        schedule = Schedule(
            first=Run(tasks), later=Run(()), num_later=0, update=Run(()), carried=np.zeros_like(resident)
        )
        if self.machine.device.kind == "cpu":
            allocated_bytes = estimate_allocated_peak(schedule, resident, num_threads=self.machine.num_threads)
            self.allocated_bytes = max(self.allocated_bytes, allocated_bytes)
        return simulate(
            schedule,
            resident=Resident(device=resident, host=self.host_bytes, disk=self.disk_bytes),
            device_kind=self.machine.device.kind,
            fresh_bytes_per_s=self.machine.rates.fresh_bytes_per_s,
        )

    def _forward(self, traced: Phase, phase: str, *, step: int) -> Iterator[Task]:
        """Embeddings, then blocks, each for all micro-batches, then heads; streamed weights before their blocks."""
        running = self._running(step)
        # Micro-batches of one shape are laid out once.
        layouts = {shape: self._lay_out(traced, phase, shape, step=step) for shape in dict.fromkeys(running)}
        for shape in running:
            yield layouts[shape].embedding
        for block in range(self.profile.num_blocks):
            if self._streamed:
                yield replace(self._weights_tasks[block], phase=phase)
            for shape in running:
                yield layouts[shape].blocks[block]
        if self._streamed:
            # The last that are there go as the backbone ends, still told of as the last block.
            yield move_task(phase, phase, -single("weights", self._streamed[-1]))
        for shape in running:
            yield from layouts[shape].head

    def _lay_out(self, traced: Phase, phase: str, shape: MicroBatchShape, *, step: int) -> "_Layout":
        compiled = compile_shape(traced, self.plan.weights, (shape.batch_size, shape.prompt_length + step))
        regime = compiled.regime
        assert isinstance(regime, ForwardRegime)
        blocks = []
        for block, template in enumerate(regime.block_templates):
            kv_bytes = 0 if step else self._kv_bytes[shape][block]
            # Keys, then values.
            halves = (kv_bytes - kv_bytes // 2, kv_bytes // 2) if kv_bytes else ()
            arrivals: tuple[Arrival, ...] = tuple((regime.kv_after[template], "kv_cache", half) for half in halves)
            blocks.append(self._part(compiled, phase, block_part(template), block=block, arrivals=arrivals))
        head = [self._part(compiled, phase, HEAD, name=head_of(phase))]
        if self.workload.draws:
            head.append(self._draw_task(phase, shape))
        return _Layout(
            embedding=self._part(compiled, phase, EMBEDDING, name=phase), blocks=tuple(blocks), head=tuple(head)
        )

    def _draw_task(self, phase: str, shape: MicroBatchShape) -> Task:
        """Sequences draw one after the other while the logits are there, which the head's own part has gone again."""
        profile, size = self.profile, self.plan.weights.bytes_per_element
        logits_bytes = shape.batch_size * (profile.hidden_size + profile.vocab_size) * size
        return Task(
            phase=phase,
            block=-1,
            name=head_of(phase),
            bytes=risen_bytes(single("logits_and_loss", logits_bytes + draw_bytes(profile.vocab_size))),
            time=draw_time(profile.vocab_size, num_sequences=shape.batch_size, rates=self.machine.rates),
        )

    def _part(
        self,
        compiled: CompiledShape,
        phase: str,
        part: str,
        *,
        block: int = -1,
        name: str = "",
        arrivals: tuple[Arrival, ...] = (),
    ) -> Task:
        return Task(
            phase=phase,
            block=block,
            name=name,
            bytes=compiled.part_bytes(part, arrivals=arrivals),
            time=compiled.part_time(part, self.machine, rates_key=self._rates_key),
            moves=partial(compiled.part_moves, part, arrivals=arrivals),
            list_points=partial(compiled.part_points, part, arrivals=arrivals),
        )

    @cached_property
    def _weights_tasks(self) -> list[Task]:
        """By block, of any phase: what comes and goes is the same in all."""
        return [
            make_weights_task(
                PREFILL,
                block,
                by_block=self._streamed,
                tensors=self._tensors,
                gone_bytes=gone_bytes,
                coming=coming,
                plan=self.plan.weights,
                rates=self.machine.rates,
            )
            for block, (gone_bytes, coming) in enumerate(self._moves)
        ]


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Tasks of one micro-batch in one step."""

    embedding: Task
    blocks: tuple[Task, ...]
    head: tuple[Task, ...]


def times_of(step: Simulation) -> NDArray[np.float64]:
    """The step's time, each lane's busy and each lane's exposed time, each kind's time."""
    lanes = [times.get(lane, 0.0) for times in (step.busy_ms, step.exposed_ms) for lane in LANES]
    return np.array([step.step_ms, *lanes, *(step.kinds_ms.get(kind, 0.0) for kind in PASS_KINDS)])


def _sum_straight(price: Callable[[int], NDArray[np.float64]], low: int, high: int) -> NDArray[np.float64]:
    """The sum of ``price`` over every whole number from ``low`` to ``high``, which is piecewise linear."""
    first, last = price(low), price(high)
    count = high - low + 1
    if count <= 2:
        return first if count == 1 else first + last
    middle = (low + high) // 2
    share = (middle - low) / (high - low)
    expected = first + share * (last - first)
    if np.abs(price(middle) - expected).max() <= _STRAIGHT * first[0]:
        return count * (first + last) / 2
    return _sum_straight(price, low, middle) + _sum_straight(price, middle + 1, high)
