"""What the plans of one setting come to at least, as sums over their blocks: what a bound on them is made of. Torch-free.

A setting is all that is decided outside the blocks. Bytes: the level between the last block's forward and its backward, where
all blocks hold what they save; parts count as the schedule counts them, storages that blocks share are taken as gone. Time: a
step is at least as long as each of a few sums of what has to be done one after the other. Neither is ever more than what the
estimator simulates; ``tests/optimizer/search/test_relaxed.py`` holds them to it.

*Not in it*: the middle of backward, where gradients have grown and not all activations are gone; how lanes wait for each other
inside a micro-batch; on the CPU device the time that fresh memory takes to be touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from optimizer.categories import CATEGORIES
from optimizer.estimate.compiled import PartName, compile_shape
from optimizer.estimate.gradients import estimate_gradient_bytes
from optimizer.estimate.optimizer_state import StateCosts, estimate_state, estimate_update_ms
from optimizer.estimate.prediction import LANES
from optimizer.estimate.relaxed_blocks import Form, list_relaxed_blocks
from optimizer.estimate.relaxed_time import Pass, Update, sums_on_cpu, sums_on_cuda
from optimizer.estimate.schedule import Layout
from optimizer.estimate.tasks import Task
from optimizer.estimate.tensors import list_tensors
from optimizer.estimate.training import MEMORY_MARGIN
from optimizer.estimate.update import UpdateTime, begins_in_backward, list_update_times
from optimizer.estimate.weights import estimate_weight_bytes
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import BlockChoice
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.plan import Plan
from optimizer.profile.profile import PART_NAMES, Profile
from optimizer.workload import TrainingWorkload

Numbers = NDArray[np.float64]
_GRADIENTS = CATEGORIES.index("gradients")
_ALIKE = 0.05
"""Share by which blocks of one kind may differ: the first and the last block from those between."""
_COMPUTE, _HOST, _DISK = (LANES.index(lane) for lane in ("compute", "host", "disk"))


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """Of a setting's plans, at several counts of chunks. Bytes over all categories, milliseconds of a whole step."""

    num_of_kind: Numbers
    """[kind]: blocks but the last."""
    kind_bytes: Numbers
    """[kind, form]: what such a block holds when forward ends."""
    kind_ms: Numbers
    """[sum, kind, form]"""
    last_bytes: Numbers
    """[chunks, form]: of the last block, with the highest of what comes on top of all blocks until its backward ends."""
    last_ms: Numbers
    """[sum, form]"""
    fixed_bytes: float
    """With all of the state on the device."""
    end_bytes: Numbers
    """[chunks]: at the end of backward, whatever the blocks do; above ``fixed_bytes``."""
    fixed_ms: Numbers
    """[sum, chunks]"""
    state_bytes: float
    """That go from the device where all of the state leaves that may."""
    state_ms: Numbers
    """[sum]: more, or less, where it does."""
    host_bytes: int
    """On the host between steps, where it does."""
    disk_bytes: int
    margin: float
    """Of a peak, which the budget must have room for beside it."""


def least_compute_ms(profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine) -> float:
    """Of all but the head, forward and back once in each micro-batch: no plan with this micro-batch and these dtypes is faster.

    plan: of which nothing else is looked at. The head is left out, since chunks of it may be quicker than the whole. Raises as
    ``estimate_training`` does.
    """
    compiled = compile_shape(profile, plan.weights, (plan.batch.micro_batch_size, workload.sequence_length))
    rates_key = f"{machine.device.kind} {machine.rates.fingerprint}"

    def part_ms(name: PartName) -> float:
        return compiled.part_time(name, machine, rates_key=rates_key).compute_ms

    num_later = plan.batch.accumulation_steps - 1
    templates = compiled.regime.block_templates
    block_ms = {
        template: part_ms(("keep", template, "forward")) + part_ms(("keep", template, "backward_first"))
        for template in set(templates)
    }
    around_ms = sum(part_ms(name) for name in ("prologue", "norm_backward_first"))
    return (1 + num_later) * (sum(block_ms[template] for template in templates) + around_ms)


def relax(
    profile: Profile,
    *,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    forms: Sequence[Form],
    chunk_counts: Sequence[int],
    state_is_free: bool,
) -> Relaxation:
    """plan: of which blocks, chunks and blocks fetched ahead are not looked at. state_is_free: any share of the state may leave.

    Raises as ``estimate_training`` does.
    """
    return _Relaxer(profile, plan, workload, machine, forms=tuple(forms), chunk_counts=chunk_counts).relax(
        state_is_free=state_is_free
    )


def list_kinds(
    profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine, choices: Sequence[BlockChoice]
) -> tuple[int, ...]:
    """Of each block a number: the same where blocks hold nearly the same and take nearly as long under every one of the choices.

    plan: of which blocks are not looked at. Raises as ``estimate_training`` does.
    """
    forms: tuple[Form, ...] = tuple((choice, "none") for choice in choices)
    found = _Relaxer(profile, plan, workload, machine, forms=forms, chunk_counts=(1,))
    return found.kinds()


@dataclass(frozen=True, kw_only=True)
class _Outside:
    """The parts around the blocks for one count of chunks; tasks by form of the last block."""

    prologue: tuple[Task, ...]
    head: tuple[Task, ...]
    first: tuple[tuple[Task, Task], ...]
    """Backward of the head and of what is between it and the blocks."""
    later: tuple[tuple[Task, Task], ...]


@dataclass(frozen=True, kw_only=True)
class _Fixed:
    """Milliseconds by lane of what is around the blocks, for one count of chunks; [lane]."""

    enter: Numbers
    head: Numbers
    first: Numbers
    later: Numbers


class _Relaxer:
    """Of one setting."""

    def __init__(
        self,
        profile: Profile,
        plan: Plan,
        workload: TrainingWorkload,
        machine: Machine,
        *,
        forms: tuple[Form, ...],
        chunk_counts: Sequence[int],
    ) -> None:
        if plan.weights.place != "device":
            plan = replace(plan, weights=replace(plan.weights, prefetch=0))
        self._profile, self._plan, self._workload, self._machine = profile, plan, workload, machine
        self._forms = forms
        self._compiled = compile_shape(profile, plan.weights, (plan.batch.micro_batch_size, workload.sequence_length))
        self._tensors = list_tensors(profile)
        self._num_later = plan.batch.accumulation_steps - 1
        self._state = self._find_state()
        self._layouts = [self._layout(count) for count in chunk_counts]
        layout, compiled = self._layouts[0], self._compiled
        key = ("relaxed", forms, layout.rates_key, layout.dropped, layout.leaves_gradients, self._num_later > 0)
        self._blocks = compiled.keep(key, lambda: list_relaxed_blocks(compiled, layout, machine, forms))
        # What follows the last block depends on its choice in plain modules only.
        self._has_tails = not set(compiled.regime.parts).issubset(PART_NAMES)
        self._outside = [self._around(layout) for layout in self._layouts]
        self._templates = list(compiled.regime.block_templates)

    def relax(self, *, state_is_free: bool) -> Relaxation:
        *others, last = self._templates
        kinds = sorted(set(others))
        num_of_kind = np.array([others.count(kind) for kind in kinds], dtype=np.float64)
        block_ms, fixed_ms, state_ms = self._list_sums(state_is_free=state_is_free)
        state_bytes = self._state_bytes() if state_is_free else 0
        resident_bytes, host_bytes, disk_bytes = self._resident()
        return Relaxation(
            num_of_kind=num_of_kind,
            kind_bytes=self._blocks.held[kinds],
            kind_ms=block_ms[:, kinds],
            last_bytes=np.array([self._blocks.held[last] + self._over(outside) for outside in self._outside]),
            last_ms=block_ms[:, last],
            fixed_bytes=resident_bytes + state_bytes,
            end_bytes=np.array([self._end_bytes(outside) for outside in self._outside]),
            fixed_ms=fixed_ms,
            state_bytes=state_bytes,
            state_ms=state_ms,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            margin=MEMORY_MARGIN[self._machine.device.kind],
        )

    def kinds(self) -> tuple[int, ...]:
        blocks = self._blocks
        costs = np.concatenate([blocks.held, blocks.forward_ms[..., _COMPUTE], blocks.first_ms[..., _COMPUTE]], axis=1)
        known: list[int] = []
        of_template: list[int] = []
        for template, cost in enumerate(costs):
            alike = (kind for kind, other in enumerate(known) if np.allclose(cost, costs[other], rtol=_ALIKE))
            kind = next(alike, len(known))
            if kind == len(known):
                known.append(template)
            of_template.append(kind)
        return tuple(of_template[template] for template in self._templates)

    def _find_state(self) -> StateCosts:
        plan, workload, kind = self._plan, self._workload, self._machine.device.kind
        key = ("state", plan.optimizer_state, plan.weights, plan.gradients, workload.adapter is None, workload.num_moments, kind)
        return self._compiled.keep(key, lambda: estimate_state(self._tensors, plan, workload=workload, device_kind=kind))

    def _layout(self, num_chunks: int) -> Layout:
        plan = replace(self._plan, logits_and_loss=LogitsAndLossPlan(num_chunks=num_chunks))
        return Layout(
            self._profile,
            self._compiled,
            plan=plan,
            workload=self._workload,
            machine=self._machine,
            tensors=self._tensors,
            state=self._state,
        )

    def _around(self, layout: Layout) -> _Outside:
        accumulates = "accumulate" if layout.dropped is None else "first"
        choices = [choice if self._has_tails else "keep" for choice, _ in self._forms]

        def tasks(part: str, *, is_first: bool = True) -> tuple[Task, ...]:
            by_choice = {choice: layout.outside_task(part, choice, is_first=is_first) for choice in dict.fromkeys(choices)}
            return tuple(by_choice[choice] for choice in choices)

        first = zip(tasks("head_backward_first"), tasks("norm_backward_first"), strict=True)
        later = zip(
            tasks(f"head_backward_{accumulates}", is_first=False),
            tasks(f"norm_backward_{accumulates}", is_first=False),
            strict=True,
        )
        return _Outside(prologue=tasks("prologue"), head=tasks("head"), first=tuple(first), later=tuple(later))

    # Bytes.

    def _resident(self) -> tuple[int, int, int]:
        """On the device, the host and the disk between steps."""
        plan, state = self._plan, self._state
        streamed_bytes = sum(self._layouts[0].streamed)
        gradients = estimate_gradient_bytes(self._tensors, plan, device_kind=self._machine.device.kind)
        device_bytes = estimate_weight_bytes(self._profile, plan.weights) - streamed_bytes
        device_bytes += state.device_bytes + gradients.device
        home = {"device": 0, "host": 0, "disk": 0, plan.weights.place: streamed_bytes}
        return device_bytes, gradients.host + state.host_bytes + home["host"], state.disk_bytes + home["disk"]

    def _state_bytes(self) -> int:
        """Of all of it on the device, in 32 bits: other widths do not leave."""
        num_words = self._workload.num_moments + (self._plan.weights.dtype != "fp32")
        return 4 * num_words * self._tensors.total_elements

    def _over(self, outside: _Outside) -> Numbers:
        """[form of the last block]: the highest level until its backward ends, above what all blocks hold."""
        blocks, last = self._blocks, self._templates[-1]
        streamed = self._layouts[0].streamed
        weights_bytes = streamed[-1] if streamed else 0
        before = [self._before_last(outside, form) for form in range(len(self._forms))]
        found = []
        for form, entered in enumerate(self._enter_bytes(outside)):
            forward_bytes = blocks.forward_rise[last, form] - blocks.held[last, form] + weights_bytes
            highest = entered + max(
                forward_bytes,
                _highest(outside.head[form], *outside.first[form]),
                _left(outside.head[form], *outside.first[form]) + blocks.first_rise[last, form] + weights_bytes,
            )
            if self._num_later:
                again = max(
                    forward_bytes,
                    _highest(outside.head[form], *outside.later[form]),
                    _left(outside.head[form], *outside.later[form]) + blocks.later_rise[last, form] + weights_bytes,
                )
                highest = max(highest, entered + before[form] + again)
            found.append(highest)
        return np.array(found, dtype=np.float64)

    def _enter_bytes(self, outside: _Outside) -> list[int]:
        """Before the first block, without what blocks share."""
        regime = self._compiled.regime
        shared_bytes = sum(self._compiled.shared_bytes(index)[0] for index in range(len(regime.shared)))
        entered = self._layouts[0].input_bytes - shared_bytes
        return [entered + int(task.bytes.net.sum()) for task in outside.prologue]

    def _before_last(self, outside: _Outside, form: int) -> float:
        """What earlier micro-batches have left for the last one: gradients, and inputs where they stay."""
        inputs_bytes = self._num_later * self._layouts[0].input_bytes if self._layouts[0].inputs_stay else 0
        around = sum(int(task.bytes.net[_GRADIENTS]) for task in outside.first[form])
        return inputs_bytes + around + float(self._blocks.gradients.min(axis=1)[self._templates].sum())

    def _end_bytes(self, outside: _Outside) -> float:
        """At the highest point of the first block's backward in the first micro-batch."""
        blocks, (first, *others) = self._blocks, self._templates
        streamed = self._layouts[0].streamed
        left = [_left(*pair) + _left(head) for head, pair in zip(outside.head, outside.first, strict=True)]
        around = min(map(sum, zip(self._enter_bytes(outside), left, strict=True)))
        own = float((blocks.held[first] + blocks.first_rise[first]).min()) + (streamed[0] if streamed else 0)
        return around + own + float(blocks.left.min(axis=1)[others].sum())

    # Time.

    def _list_sums(self, *, state_is_free: bool) -> tuple[Numbers, Numbers, Numbers]:
        """[sum, template, form] of each block, [sum, chunks] of all else, [sum] where all of the state leaves that may."""
        blocks = self._blocks
        chunks = [self._fixed(outside) for outside in self._outside]
        fixed = _Fixed(
            **{name: np.array([getattr(of, name) for of in chunks]) for name in ("enter", "head", "first", "later")}
        )
        around = Pass(
            forward=fixed.enter + fixed.head + self._weights_ms("forward"),
            first=fixed.first + self._weights_ms("backward"),
            later=fixed.later + self._weights_ms("backward"),
            num_later=self._num_later,
        )
        inside = Pass(
            forward=blocks.forward_ms, first=blocks.first_ms, later=blocks.later_ms, num_later=self._num_later
        )
        update = self._update(state_is_free=state_is_free)
        list_sums = sums_on_cpu if self._machine.device.kind == "cpu" else sums_on_cuda
        rows = list_sums(inside, around, update, head_ms=fixed.head[:, _COMPUTE])
        return tuple(np.array(column) for column in zip(*rows, strict=True))  # type: ignore[return-value]

    def _fixed(self, outside: _Outside) -> _Fixed:
        """The least of all forms of the last block."""

        def least(*tasks: tuple[Task, ...]) -> Numbers:
            return sum((np.array([task.time.by_lane for task in found]).min(axis=0) for found in tasks), np.zeros(len(LANES)))

        return _Fixed(
            enter=least(outside.prologue),
            head=least(outside.head),
            first=least(*zip(*outside.first, strict=True)),
            later=least(*zip(*outside.later, strict=True)),
        )

    def _weights_ms(self, phase: str) -> Numbers:
        tasks = self._layouts[0].weights_tasks(phase)
        return np.array([task.time.by_lane for task in tasks]).sum(axis=0) if tasks else np.zeros(len(LANES))

    def _update(self, *, state_is_free: bool) -> Update:
        workload, plan, rates = self._workload, self._plan, self._machine.rates
        clip, update = self._update_times
        lanes = np.array([part.time.by_lane for part in (clip, update) if part is not None]).sum(axis=0)
        whole_ms = 0.0
        if state_is_free:
            whole_ms = estimate_update_ms(self._tensors.total_elements, plan, rates, num_moments=workload.num_moments)
        num_fetched = 0
        if plan.gradients.choice == "host":
            num_fetched = self._tensors.total_elements if state_is_free else self._state.num_staying
        blocks, first = self._blocks, self._templates[0]
        last_ms = max(float(found[first, :, _COMPUTE].max()) for found in (blocks.first_ms, blocks.later_ms))
        return Update(
            lanes=lanes,
            clip_ms=clip.time.compute_ms,
            whole_ms=whole_ms,
            fetched_ms=num_fetched * plan.weights.bytes_per_element / rates.host_to_device_bytes_per_s * 1000,
            is_away=plan.optimizer_state.place != "device",
            is_free=state_is_free,
            behind_ms=self._behind_ms(state_is_free=state_is_free),
            last_ms=last_ms if begins_in_backward(plan, workload) else None,
        )


    @cached_property
    def _update_times(self) -> tuple[UpdateTime, UpdateTime | None]:
        return list_update_times(
            self._tensors, self._state, plan=self._plan, workload=self._workload, machine=self._machine
        )

    def _behind_ms(self, *, state_is_free: bool) -> tuple[float, float]:
        """Forward of the blocks behind the last one whose state leaves, which begins when the updates of all that leave are done:
        at least the first number less the second times the share that leaves.

        Tensors leave from the first on, as long as the share has room for them (``split_state``): then of a block that is begun
        and of the one after it some; of those behind only what is small enough to count as nothing but in the host's time.
        """
        if not state_is_free or self._plan.optimizer_state.place == "device":
            return 0.0, 0.0
        tensors = self._tensors
        compute_ms = self._blocks.forward_ms[..., _COMPUTE].min(axis=1)[self._templates]
        elements = np.zeros(len(self._templates) + 2)
        np.add.at(elements, np.array(tensors.blocks, dtype=np.int64) + 1, np.array(tensors.num_elements))
        begun_at = elements.cumsum()[:-2] / elements.sum()
        behind_ms = np.append(compute_ms[::-1].cumsum()[::-1], (0.0, 0.0))[2:]
        whole_ms = float(compute_ms.sum())
        small = sum(size.num_elements for size in tensors.sizes if not size.is_matrix) / elements.sum()
        host_ms = sum(part.time.host_ms for part in self._update_times if part is not None)
        return float((behind_ms + whole_ms * begun_at).min()) - small * host_ms, whole_ms


def _highest(*tasks: Task) -> int:
    """Of tasks in a row, above their start."""
    level, top = 0, 0
    for task in tasks:
        top = max(top, level + task.bytes.rise)
        level += int(task.bytes.net.sum())
    return top


def _left(*tasks: Task) -> int:
    return sum(int(task.bytes.net.sum()) for task in tasks)
