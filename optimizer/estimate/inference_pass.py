"""One pass of a batch generation, laid out block by block as ``runtime/inference.py`` runs it. Torch-free.

A pass is a prefill and the decode of each further token, every step of them for all its micro-batches. A decode grows with the
cache. Its time and its peak are piecewise linear in the number of tokens: sums and maxima of what is linear, within the ranges
over which the ops are the same and no micro-batch ends. So the ends of a range are priced, and its middle; where that is not on
the line between the ends, both halves are priced the same way. Time is then summed over every step, none of them sampled.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.categories import Link
from optimizer.estimate.compiled import Arrival, CompiledShape, compile_shape
from optimizer.estimate.kv_cache import NO_WORKSPACE, KvCosts, add_copies
from optimizer.estimate.parts import Bytes
from optimizer.estimate.prediction import LANES
from optimizer.estimate.runs import Run, Schedule
from optimizer.estimate.sampling import draw_bytes, draw_time
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
_STRAIGHT, _ROUGHLY_STRAIGHT = 1e-6, 3e-4
"""What a middle may be off the line between its ends, as a share of the time; in a search the second."""
_NO_RUN = Run(())


class Placed(NamedTuple):
    """A task at its place. Tasks know neither block nor token: those that are alike are one, made once for all that runs it."""

    task: Task
    block: int = -1
    """-1 outside the blocks."""
    name: str = ""
    """Of what is outside the blocks."""

    def describe(self, phase: str, num_blocks: int) -> str:
        return f"{phase} of block {self.block + 1} of {num_blocks}" if self.block >= 0 else self.name


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
        like: "GenerationPass | None" = None,
        is_rough: bool = False,
    ) -> None:
        """is_rough: for a search, which wants times to within ``_ROUGHLY_STRAIGHT``; bytes are exact. like: another pass of the
        same plan on the same machine, whose tasks are taken over where they are the same.
        """
        self.profile, self.plan, self.workload, self.machine = profile, plan, workload, machine
        self.micro_batches = micro_batches
        self._like = like
        self._straight = _ROUGHLY_STRAIGHT if is_rough else _STRAIGHT
        self.num_steps = max(shape.num_steps for shape in micro_batches)
        """Forward passes, the prefill among them."""
        self._rates_key = f"{machine.device.kind} {machine.rates.fingerprint}"
        self.kv = {shape: KvCosts(profile, plan, machine, shape=shape) for shape in dict.fromkeys(micro_batches)}
        """What each micro-batch's cache costs."""
        self._tokens_bytes = _ID_BYTES * sum(shape.batch_size * shape.num_steps for shape in micro_batches)
        self._steps: dict[int, Simulation] = {}
        self.allocated_bytes = 0
        """What torch has at most on the CPU device, in the prefill and in the decodes at the ends of ranges, one of which has
        the highest peak.
        """
        held = profile.weight_bytes(plan.weights.representation)
        kinds = profile.block_kinds
        by_block = tuple(held.by_block[kind] for kind in kinds)
        self._tensors = tuple(held.tensors[kind] for kind in kinds)
        is_streaming = plan.weights.place != "device"
        self._streamed = by_block if is_streaming else ()
        self._moves = list_forward_moves(self._streamed, prefetch=plan.weights.prefetch)
        staying_bytes = sum(held.staying_by_block[kind] for kind in kinds)
        self.weight_bytes = held.outside + staying_bytes + (0 if is_streaming else sum(by_block))

    def other(self, micro_batches: PassShape) -> "GenerationPass":
        """A pass of the same plan for other micro-batches."""
        return GenerationPass(self.profile, self.plan, self.workload, self.machine, micro_batches=micro_batches)

    # Host and disk.

    @property
    def host_bytes(self) -> int:
        """Without homes of keys and values, which pass from one pass to the next."""
        streamed_bytes = sum(self._streamed) if self.plan.weights.place == "host" else 0
        stages = "disk" in (self.plan.weights.place, self.plan.kv_cache.place)
        return streamed_bytes + (STAGING_BYTES if stages else 0)

    @property
    def disk_bytes(self) -> int:
        """The same."""
        return sum(self._streamed) if self.plan.weights.place == "disk" else 0

    @property
    def kv_homes(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By micro-batch, as ``KvCosts.homes``."""
        return tuple(self.kv[shape].homes for shape in self.micro_batches)

    @property
    def kv_cache_bytes(self) -> int:
        """Of all micro-batches."""
        return sum(self.kv[shape].total_bytes for shape in self.micro_batches)

    # Prefill and decode.

    @cached_property
    def prefill(self) -> Simulation:
        """From the first allocation of a pass to its first token."""
        return self._simulate(self._place_prefill(), single("weights", self.weight_bytes), is_end=True)

    def decode(self, step: int, *, is_end: bool = False) -> Simulation:
        """Of one token more of each sequence; the prefill is step 0. is_end: of a range within which all is linear."""
        if step not in self._steps:
            kv_bytes = self._workspace_bytes + sum(self.kv[shape].device_bytes for shape in self._running(step))
            resident = single("weights", self.weight_bytes) + single("kv_cache", kv_bytes)
            resident += single("temporaries", self._tokens_bytes)
            self._steps[step] = self._simulate(self._forward(self.profile.decode, step=step), resident, is_end=is_end)
        return self._steps[step]

    @property
    def highest(self) -> tuple[int, Simulation]:
        """Of the prefill and of all decodes the step with the highest peak, the earliest of equals.

        A decode's peak is the maximum of what is linear in the cache's length: it lies at an end of a range, and ends are priced.
        """
        return max([(0, self.prefill), *self.decoded], key=lambda step: step[1].device_peak_bytes)

    @property
    def peak_moment(self) -> str:
        step, simulation = self.highest
        placed = list(self._forward(self.profile.decode, step=step) if step else self._place_prefill())
        return placed[simulation.peak_index].describe(_phase_of(step), self.profile.num_blocks)

    @property
    def prefill_tasks(self) -> tuple[Task, ...]:
        """Keys and values come with it, and the room for the new tokens; they stay to the end of the pass."""
        return _named(self._place_prefill(), PREFILL)

    @cached_property
    def later_tasks(self) -> tuple[Task, ...]:
        """Between the prefill and the rest: the slots into which keys and values come ahead."""
        slot_bytes = max(each.slot_bytes for each in self.kv.values())
        phase = decode_phase(2)
        later = move_task(phase, phase, single("kv_cache", slot_bytes))
        return (later,) * self.plan.kv_cache.prefetch if slot_bytes and self.num_steps > 1 else ()

    def decode_tasks(self, step: int) -> tuple[Task, ...]:
        return _named(self._forward(self.profile.decode, step=step), _phase_of(step))

    def _place_prefill(self) -> Iterator[Placed]:
        prompts_bytes = _ID_BYTES * sum(shape.batch_size * shape.prompt_length for shape in self.micro_batches)
        coming = move_task(PREFILL, PREFILL, single("temporaries", self._tokens_bytes + prompts_bytes))
        yield Placed(coming, name=PREFILL)
        yield from self._forward(self.profile.prefill, step=0)
        name = head_of(PREFILL)
        yield Placed(move_task(PREFILL, name, -single("temporaries", prompts_bytes)), name=name)

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
        """What was priced for the sum, by step, in order."""
        assert self.decode_sum is not None
        return sorted(self._steps.items())

    @property
    def total_ms(self) -> float:
        return self.prefill.step_ms + float(self.decode_sum.ms[0])

    @property
    def copied_bytes(self) -> dict[Link, int]:
        """Of the whole pass, exactly; links without traffic left out."""
        prompts = (self.kv[shape].prefill_copied for shape in self.micro_batches)
        return add_copies(self._weights_copied(1), *prompts, self.decode_copied_bytes)

    @property
    def weights_copied_bytes(self) -> dict[Link, int]:
        """Of these, what streamed weights are."""
        return self._weights_copied(self.num_steps)

    @property
    def decode_copied_bytes(self) -> dict[Link, int]:
        """Of all steps but the prefill."""
        later = (self.kv[shape].decode_copied for shape in self.micro_batches)
        return add_copies(self._weights_copied(self.num_steps - 1), *later)

    def _weights_copied(self, num_steps: int) -> dict[Link, int]:
        """Each step brings all streamed weights once."""
        each = add_copies(*(task.copied for task in self._weights_tasks))
        return {link: num_steps * num_bytes for link, num_bytes in each.items()}

    @cached_property
    def _workspace_bytes(self) -> int:
        """What caches share on the device while tokens are decoded."""
        costs = self.kv.values()
        slots = self.plan.kv_cache.prefetch + 1
        return max(each.front_bytes for each in costs) + slots * max(each.slot_bytes for each in costs)

    @cached_property
    def _kv_arrivals(self) -> list[tuple[tuple[int, ...], ...]]:
        """By micro-batch and block: what comes to the device as a prompt first runs through it. The workspace comes with those
        that need it first.
        """
        workspace = NO_WORKSPACE
        arrivals: list[list[tuple[int, ...]]] = [[] for _ in self.micro_batches]
        for block in range(self.profile.num_blocks):
            for turn, shape in enumerate(self.micro_batches):
                come, workspace = self.kv[shape].list_arrivals(block, workspace)
                arrivals[turn].append(come)
        return list(map(tuple, arrivals))

    def _list_kv_tasks(self, running: PassShape, *, step: int) -> Iterator[Task]:
        """In the order in which caches take turns: in each block one after the other. Nothing for plain caches.

        A transfer's key tells it from others that are under way with it, of which there are no more than come ahead.
        """
        if self.plan.kv_cache.is_plain:
            return
        kinds, ahead = self.profile.block_kinds, self.plan.kv_cache.prefetch
        if not step or not ahead:
            alike = {
                (kind, shape): self._make_kv_task(0, kind, shape, later=[], step=step)
                for kind in dict.fromkeys(kinds)
                for shape in dict.fromkeys(running)
            }
            yield from [alike[kind, shape] for kind in kinds for shape in running]
            return
        order = [(kind, shape) for kind in kinds for shape in running]
        known: dict[Hashable, Task] = {}
        for place, (kind, shape) in enumerate(order):
            later = order[place + ahead if place else 1 : place + ahead + 1]
            key = (kind, shape, place % (ahead + 1), place > 0, *later)
            task = known.get(key)
            if task is None:
                task = known[key] = self._make_kv_task(place, kind, shape, later=later, step=step)
            yield task

    def _make_kv_task(
        self, place: int, kind: int, shape: MicroBatchShape, *, later: list[tuple[int, MicroBatchShape]], step: int
    ) -> Task:
        """later: whose keys and values begin to come then."""
        costs, ahead = self.kv[shape], self.plan.kv_cache.prefetch
        if not step:
            return costs.prefill_task(kind)
        slots = ahead + 1
        first = place + ahead if place else 1
        begins = [
            each
            for index, (other, its) in enumerate(later, first)
            for each in self.kv[its].list_coming(other, step=step, key=("keys and values", index % slots))
        ]
        return costs.decode_task(
            kind,
            step=step,
            arrives=costs.list_coming(kind, step=step, key=("keys and values", place % slots)),
            begins=begins,
            was_begun=place > 0 and ahead > 0,
        )

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

    def _simulate(self, placed: Iterable[Placed], resident: Bytes, *, is_end: bool) -> Simulation:
        schedule = Schedule(
            first=Run([task for task, _, _ in placed]),
            later=_NO_RUN,
            num_later=0,
            update=_NO_RUN,
            carried=np.zeros_like(resident),
        )
        if is_end and self.machine.device.kind == "cpu":
            allocated_bytes = estimate_allocated_peak(schedule, resident, num_threads=self.machine.num_threads)
            self.allocated_bytes = max(self.allocated_bytes, allocated_bytes)
        return simulate(
            schedule,
            resident=Resident(device=resident, host=self.host_bytes, disk=self.disk_bytes),
            device_kind=self.machine.device.kind,
            fresh_bytes_per_s=self.machine.rates.fresh_bytes_per_s,
        )

    def _forward(self, traced: Phase, *, step: int) -> Iterator[Placed]:
        """Embeddings, then blocks, each for all micro-batches, then heads; streamed weights before their blocks."""
        phase = _phase_of(step)
        running = self._running(step)
        # Micro-batches of one shape are laid out once.
        arrivals = [()] * len(running) if step else self._kv_arrivals
        each_shape = list(zip(running, arrivals, strict=True))
        layouts = {each: self._lay_out(traced, each[0], step=step, arrivals=each[1]) for each in dict.fromkeys(each_shape)}
        in_turn = [layouts[each] for each in each_shape]
        kv_tasks = self._list_kv_tasks(running, step=step)
        for layout in in_turn:
            yield Placed(layout.embedding, name=phase)
        for block in range(self.profile.num_blocks):
            if self._streamed:
                yield Placed(self._weights_tasks[block], block)
            for layout in in_turn:
                if not self.plan.kv_cache.is_plain:
                    yield Placed(next(kv_tasks), block)
                yield Placed(layout.blocks[block], block)
        if self._streamed:
            # The last that are there go as the backbone ends, still told of as the last block.
            yield Placed(move_task(phase, phase, -single("weights", self._streamed[-1])), name=phase)
        for layout in in_turn:
            for task in layout.head:
                yield Placed(task, name=head_of(phase))

    def _lay_out(
        self, traced: Phase, shape: MicroBatchShape, *, step: int, arrivals: tuple[tuple[int, ...], ...]
    ) -> "_Layout":
        """arrivals: of keys and values, by block; empty where all are there."""
        compiled = compile_shape(traced, self.plan.weights, (shape.batch_size, shape.prompt_length + step))
        regime = compiled.regime
        assert isinstance(regime, ForwardRegime)
        blocks = []
        for block, template in enumerate(regime.block_templates):
            after = regime.kv_after[template]
            come: tuple[Arrival, ...] = tuple((after, "kv_cache", num_bytes) for num_bytes in arrivals[block]) if arrivals else ()
            blocks.append(self._part(compiled, block_part(template), arrivals=come))
        head = [self._part(compiled, HEAD)]
        if self.workload.draws:
            head.append(compiled.keep(("draw", self._rates_key), lambda: self._draw_task(shape)))
        return _Layout(embedding=self._part(compiled, EMBEDDING), blocks=tuple(blocks), head=tuple(head))

    def _draw_task(self, shape: MicroBatchShape) -> Task:
        """Sequences draw one after the other while the logits are there, which the head's own part has gone again."""
        profile, size = self.profile, self.plan.weights.bytes_per_element
        logits_bytes = shape.batch_size * (profile.hidden_size + profile.vocab_size) * size
        return Task(
            phase="",
            block=-1,
            name="",
            bytes=risen_bytes(single("logits_and_loss", logits_bytes + draw_bytes(profile.vocab_size))),
            time=draw_time(profile.vocab_size, num_sequences=shape.batch_size, rates=self.machine.rates),
        )

    def _part(self, compiled: CompiledShape, part: str, *, arrivals: tuple[Arrival, ...] = ()) -> Task:
        def make() -> Task:
            return Task(
                phase="",
                block=-1,
                name="",
                bytes=compiled.part_bytes(part, arrivals=arrivals),
                time=compiled.part_time(part, self.machine, rates_key=self._rates_key),
                moves=partial(compiled.part_moves, part, arrivals=arrivals),
                list_points=partial(compiled.part_points, part, arrivals=arrivals),
            )

        return compiled.keep(("task", part, arrivals, self._rates_key), make)

    @cached_property
    def _weights_tasks(self) -> list[Task]:
        """By block, of any phase: what comes and goes is the same in all, and in all passes."""
        if self._like is not None:
            return self._like._weights_tasks
        kinds = self.profile.block_kinds
        slots = self.plan.weights.prefetch + 1
        known: dict[Hashable, Task] = {}
        found = []
        for block, (gone_bytes, coming) in enumerate(self._moves):
            key = (gone_bytes, kinds[block], block % slots, block == 0, tuple(kinds[other] for other in coming))
            task = known.get(key)
            if task is None:
                task = known[key] = make_weights_task(
                    "",
                    block,
                    by_block=self._streamed,
                    tensors=self._tensors,
                    gone_bytes=gone_bytes,
                    coming=coming,
                    plan=self.plan.weights,
                    rates=self.machine.rates,
                    num_keys=slots,
                    holds_up_cpu=True,
                )
            found.append(task)
        return found


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Tasks of one micro-batch in one step."""

    embedding: Task
    blocks: tuple[Task, ...]
    head: tuple[Task, ...]


def _phase_of(step: int) -> str:
    return decode_phase(step + 1) if step else PREFILL


def _named(placed: Iterable[Placed], phase: str) -> tuple[Task, ...]:
    """As tasks are told of."""
    return tuple(replace(task, phase=phase, block=block, name=name) for task, block, name in placed)


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
