"""One steady optimizer step as the runtime executes it: tasks in order, each with its bytes and its time per lane.

Per micro-batch: inputs and embedding, blocks forward, head and loss, and back in reverse; a recomputed block's
backward begins with
its forward again, an offloaded block's copies back what it moved. Then clipping, the update, and the gradients are dropped.
Micro-batches after the first are alike, so only the first and the last are laid out; the others are counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from optimizer.categories import CATEGORIES, Category
from optimizer.estimate.batch import estimate_input_bytes, inputs_pile_up
from optimizer.estimate.compiled import Bytes, CompiledShape, PartBytes, PartName, PartTime
from optimizer.estimate.gradients import estimate_clip_bytes, estimate_clip_ms
from optimizer.estimate.logits_and_loss import ChunkedHead, estimate_chunked_head
from optimizer.estimate.optimizer_state import estimate_update_ms, list_update_changes
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_NO_TIME = PartTime(compute_ms=0.0, copy_out_ms=0.0, copy_in_ms=0.0)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A stretch of the step."""

    phase: str
    """forward, backward or optimizer."""
    block: int
    """-1 outside the blocks."""
    name: str
    """For people, where it is no block: ``head and loss``."""
    bytes: PartBytes
    time: PartTime
    fetches: int = -1
    """Backward of an offloaded block: the offloaded block before it, whose copy back can run meanwhile; -1 for none."""

    def describe(self, num_blocks: int) -> str:
        return f"{self.phase} of block {self.block + 1} of {num_blocks}" if self.block >= 0 else self.name


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The tasks of a step. ``num_later`` times the ``later`` ones follow the ``first``, then the ``update``."""

    first: tuple[Task, ...]
    later: tuple[Task, ...]
    num_later: int
    update: tuple[Task, ...]
    carried: Bytes
    """What each further micro-batch leaves behind, by category: its inputs, on the CPU device."""


def build_schedule(
    profile: Profile, compiled: CompiledShape, *, plan: Plan, workload: TrainingWorkload, machine: Machine
) -> Schedule:
    rates_key = repr(machine.rates)
    head = estimate_chunked_head(profile, compiled, plan=plan, rates=machine.rates)
    layout = _Layout(compiled, plan, machine, rates_key, head=head)
    num_later = plan.batch.accumulation_steps - 1
    input_bytes = estimate_input_bytes(plan.batch, sequence_length=workload.sequence_length)
    inputs_stay = inputs_pile_up(machine.device)
    carried = single("temporaries", input_bytes if inputs_stay else 0)
    first = tuple(layout.micro_batch("first", input_bytes, inputs_stay=inputs_stay))
    later = tuple(layout.micro_batch("accumulate", input_bytes, inputs_stay=inputs_stay)) if num_later else ()
    update = tuple(_update(profile, plan, workload, machine))
    return Schedule(first=first, later=later, num_later=num_later, update=update, carried=carried)


class _Layout:
    """Puts the parts of one shape in order under one plan."""

    def __init__(
        self, compiled: CompiledShape, plan: Plan, machine: Machine, rates_key: str, *, head: ChunkedHead | None
    ) -> None:
        self._head = head
        self._compiled = compiled
        self._choices = plan.activations.per_block
        self._machine = machine
        self._rates_key = rates_key
        self._templates = compiled.regime.block_templates
        self._releases, self._freed_with_forward = self._place_shared()

    def micro_batch(self, which: str, input_bytes: int, *, inputs_stay: bool) -> Iterator[Task]:
        num_blocks = len(self._choices)
        yield move_task("forward", "inputs", single("temporaries", input_bytes))
        yield self._task("forward", "embedding", "prologue")
        for block in range(num_blocks):
            yield self._block_task(block, "forward", "forward")
        if self._freed_with_forward.any():
            yield move_task("forward", "end of the backbone", -self._freed_with_forward)
        yield self._task("forward", "head and loss", "head")
        yield self._task("backward", "backward of head and loss", f"head_backward_{which}")
        yield self._task("backward", "backward", f"norm_backward_{which}")
        for block in reversed(range(num_blocks)):
            yield self._block_task(block, "backward", f"backward_{which}")
        if not inputs_stay:
            yield move_task("backward", "end of the micro-batch", single("temporaries", -input_bytes))

    def _task(self, phase: str, name: str, part: str) -> Task:
        if self._head is not None and part in self._head.bytes:
            return Task(phase=phase, block=-1, name=name, bytes=self._head.bytes[part], time=self._head.time[part])
        time = self._compiled.part_time(part, self._machine.rates, rates_key=self._rates_key)
        return Task(phase=phase, block=-1, name=name, bytes=self._compiled.part_bytes(part), time=time)

    def _block_task(self, block: int, phase: str, which: str) -> Task:
        part: PartName = (self._choices[block], self._templates[block], which)
        releases = self._releases.get(block, ()) if phase == "backward" else ()
        return Task(
            phase=phase,
            block=block,
            name="",
            bytes=self._compiled.part_bytes(part, releases=releases),
            time=self._compiled.part_time(part, self._machine.rates, rates_key=self._rates_key),
            fetches=self._offloaded_before(block) if phase == "backward" else -1,
        )

    def _offloaded_before(self, block: int) -> int:
        if self._choices[block] != "offload":
            return -1
        return next((other for other in reversed(range(block)) if self._choices[other] == "offload"), -1)

    def _place_shared(self) -> tuple[dict[int, tuple[tuple[int, int], ...]], Bytes]:
        """Where each storage that blocks share goes: in the backward of the first block that holds it, or after the forward."""
        regime = self._compiled.regime
        waiting = set(range(len(regime.shared)))
        releases: dict[int, tuple[tuple[int, int], ...]] = {}
        for block, choice in enumerate(self._choices):
            if not waiting:
                break
            holds = regime.templates[choice][self._templates[block]].holds
            here = tuple((hold.index, hold.until) for hold in holds if hold.index in waiting)
            if here:
                releases[block] = here
                waiting -= {index for index, _ in here}
        freed = np.zeros(len(CATEGORIES), dtype=np.int64)
        for index in waiting:
            num_bytes, category = self._compiled.shared_bytes(index)
            freed[_SLOT[category]] += num_bytes
        return releases, freed


def _update(profile: Profile, plan: Plan, workload: TrainingWorkload, machine: Machine) -> Iterator[Task]:
    tensors = profile.tensors.in_order()
    rates = machine.rates
    clip_ms = estimate_clip_ms(profile, plan.weights, rates, scales=workload.max_grad_norm is not None)
    scratch = single("temporaries", estimate_clip_bytes(len(tensors), plan.weights))
    yield Task(
        phase="optimizer",
        block=-1,
        name="gradient clipping",
        bytes=PartBytes(net=0 * scratch, rise=int(scratch.sum()), at_rise=scratch, host_net=0, host_rise=0),
        time=PartTime(compute_ms=clip_ms, copy_out_ms=0.0, copy_in_ms=0.0),
    )
    update_ms = estimate_update_ms(profile.num_parameters, plan, rates)
    yield Task(
        phase="optimizer",
        block=-1,
        name="optimizer step",
        bytes=_sum_update(list_update_changes(tensors, plan)),
        time=PartTime(compute_ms=update_ms, copy_out_ms=0.0, copy_in_ms=0.0),
    )


def _sum_update(changes: list[tuple[int, int]]) -> PartBytes:
    levels = np.zeros((len(changes) + 1, len(CATEGORIES)), dtype=np.int64)
    levels[1:, _SLOT["temporaries"]] = [change for change, _ in changes]
    levels[1:, _SLOT["gradients"]] = [change for _, change in changes]
    levels = levels.cumsum(axis=0)
    totals = levels.sum(axis=1)
    top = int(totals.argmax())
    return PartBytes(net=levels[-1], rise=int(totals[top]), at_rise=levels[top], host_net=0, host_rise=0)


def single(category: Category, num_bytes: int) -> Bytes:
    """A row of CATEGORIES with one entry."""
    row = np.zeros(len(CATEGORIES), dtype=np.int64)
    row[_SLOT[category]] = num_bytes
    return row


def move_task(phase: str, name: str, net: Bytes) -> Task:
    """Bytes that come or go between two parts, in no time."""
    rise = max(0, int(net.sum()))
    at_rise = net if rise else np.zeros_like(net)
    return Task(
        phase=phase,
        block=-1,
        name=name,
        bytes=PartBytes(net=net, rise=rise, at_rise=at_rise, host_net=0, host_rise=0),
        time=_NO_TIME,
    )
