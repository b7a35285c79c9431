"""One steady optimizer step as the runtime executes it: tasks in order, each with its bytes, its copies and its time per lane.

Per micro-batch: inputs and embedding, blocks forward, head and loss, and back in reverse; a recomputed block's
backward begins with its forward again, an offloaded block's copies back what it moved, and weights that stream come before
their block and go after it. Then clipping, the update, and the gradients are dropped.
Micro-batches after the first are alike, so they are laid out once and counted.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from optimizer.categories import CATEGORIES, Link, Tier
from optimizer.estimate.activations import trip_of
from optimizer.estimate.batch import estimate_input_bytes, inputs_pile_up
from optimizer.estimate.compiled import (
    FROM_PROLOGUE,
    Change,
    CompiledShape,
    Move,
    PartName,
    PartTime,
    TensorList,
    drop_gradients,
    sum_changes,
)
from optimizer.estimate.gradients import estimate_rows_bytes, find_dropped
from optimizer.estimate.logits_and_loss import estimate_chunked_head
from optimizer.estimate.moments import Moments
from optimizer.estimate.optimizer_state import StateCosts, host_bytes_per_s
from optimizer.estimate.prediction import Lane
from optimizer.estimate.streaming import make_weights_task
from optimizer.estimate.tasks import Legs, Schedule, Task, Transfer, add_legs, as_moves, move_task, single
from optimizer.estimate.update import list_update_tasks, update_key
from optimizer.estimate.weights import (
    list_backward_moves,
    list_forward_moves,
    list_streamed_bytes,
    list_streamed_tensors,
)
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import OFFLOADING
from optimizer.plan.plan import Plan
from optimizer.profile.extent import traced_choice
from optimizer.profile.profile import Profile, tail_name
from optimizer.workload import TrainingWorkload

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_GRADIENTS, _LOGITS = _SLOT["gradients"], _SLOT["logits_and_loss"]
_STORES: dict[Tier, Lane | None] = {"host": None, "disk": "disk", "remote": "network"}
"""The lane between the host and a place."""


def build_schedule(
    profile: Profile,
    compiled: CompiledShape,
    *,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    tensors: TensorList,
    state: StateCosts,
    first_moments: Moments | None = None,
) -> Schedule:
    """first_moments: which updates inside backward make, in a first step that consumes gradients."""
    layout = _Layout(
        profile, compiled, plan=plan, workload=workload, machine=machine, first_moments=first_moments
    )
    num_later = plan.batch.accumulation_steps - 1
    input_bytes = estimate_input_bytes(profile, plan.batch, sequence_length=workload.sequence_length)
    inputs_stay = inputs_pile_up(machine.device)
    rows_bytes = estimate_rows_bytes(tensors, num_tokens=plan.batch.micro_batch_size * workload.sequence_length)
    carried = single("temporaries", input_bytes if inputs_stay else 0) + single("gradients", rows_bytes)
    first = tuple(layout.micro_batch(input_bytes, inputs_stay=inputs_stay, is_first=True))
    later = tuple(layout.micro_batch(input_bytes, inputs_stay=inputs_stay, is_first=False)) if num_later else ()
    if later and rows_bytes:
        # The profile adds to the gradient that is there; rows are put aside beside it.
        later += (move_task("backward", "end of the micro-batch", single("gradients", rows_bytes)),)
    update = compiled.keep(
        ("update", plan.gradients, plan.optimizer_state, plan.weights, num_later, workload.max_grad_norm is None,
         workload.adapter is None, workload.num_moments, layout.rates_key),
        lambda: tuple(list_update_tasks(tensors, state, plan=plan, workload=workload, machine=machine)),
    )  # fmt: skip
    return Schedule(first=first, later=later, num_later=num_later, update=update, carried=carried)


class _Layout:
    """Puts the parts of one shape in order under one plan."""

    def __init__(
        self,
        profile: Profile,
        compiled: CompiledShape,
        *,
        plan: Plan,
        workload: TrainingWorkload,
        machine: Machine,
        first_moments: Moments | None = None,
    ) -> None:
        self._compiled = compiled
        self._plan = plan
        self._choices = plan.activations.per_block
        self._machine = machine
        self.rates_key = f"{machine.device.kind} {machine.rates.fingerprint}"
        self._templates = compiled.regime.block_templates
        self._place_shared()
        self._trips = {choice: trip_of(choice, plan.activations) for choice in set(self._choices)}
        self._dropped = find_dropped(plan, first_moments=first_moments)
        self._leaves_gradients = plan.gradients.choice == "host"
        head_key = ("head", plan.logits_and_loss, plan.weights.representation, self.rates_key)
        self._head = compiled.keep(
            head_key, lambda: estimate_chunked_head(profile, compiled, plan=plan, rates=machine.rates)
        )
        # One object for all that does not change from block to block: plans are slow to hash.
        common = (plan.weights, plan.gradients, plan.logits_and_loss, plan.activations.compress, self.rates_key, self._dropped)
        self._common = compiled.keep(("common", common), object)
        trains_all = workload.adapter is None
        self._streamed = list_streamed_bytes(profile, plan.weights, trains_all=trains_all)
        self._streamed_tensors = list_streamed_tensors(profile, plan.weights, trains_all=trains_all)
        self._trains_all = trains_all
        self._forward_moves = list_forward_moves(self._streamed, prefetch=plan.weights.prefetch)
        self._backward_moves = list_backward_moves(self._streamed, prefetch=plan.weights.prefetch)

    def micro_batch(self, input_bytes: int, *, inputs_stay: bool, is_first: bool) -> Iterator[Task]:
        left_bytes = 0
        for task in self._parts_of_micro_batch(input_bytes, is_first=is_first):
            left_bytes += int(task.bytes.net[_LOGITS])
            yield task
        # The first one's loss stays and takes up those of the others. The traced parts free the loss and backward's root in
        # plain training's dtype, and no loss where a gradient that does not stay makes every micro-batch like the first.
        loss_bytes = left_bytes if self._head is None else self._head.loss_bytes
        gone = single("logits_and_loss", (loss_bytes if is_first else 0) - left_bytes)
        if not inputs_stay:
            gone -= single("temporaries", input_bytes)
        if gone.any():
            yield move_task("backward", "end of the micro-batch", gone)

    def _parts_of_micro_batch(self, input_bytes: int, *, is_first: bool) -> Iterator[Task]:
        # A gradient that does not stay is new in every micro-batch.
        which = "first" if is_first or self._dropped is not None else "accumulate"
        num_blocks = len(self._choices)
        yield move_task("forward", "inputs", single("temporaries", input_bytes))
        yield self._task("forward", "embedding", "prologue", waits_for=(update_key(-1),))
        for block in range(num_blocks):
            if self._streamed:
                yield self._weights_task("forward", block, *self._forward_moves[block])
            yield self._block_task("forward", block, "forward", is_first=is_first)
        if self._freed_with_forward:
            freed = sum(single(CATEGORIES[move.slot], move.num_bytes) for move in self._freed_with_forward)
            task = move_task("forward", "end of the backbone", np.asarray(freed))
            yield replace(task, moves=partial(tuple, self._freed_with_forward))
        if self._streamed:
            # As they go here, those of the last block come again for its backward.
            yield move_task("forward", "end of the backbone", single("weights", -self._streamed[-1]))
        yield self._task("forward", "head and loss", "head", waits_for=(update_key(num_blocks),))
        yield self._task("backward", "backward of head and loss", f"head_backward_{which}", is_first=is_first)
        yield self._task("backward", "backward", f"norm_backward_{which}", is_first=is_first)
        for block in reversed(range(num_blocks)):
            if self._streamed:
                yield self._weights_task("backward", block, *self._backward_moves[block])
            yield self._block_task("backward", block, f"backward_{which}", is_first=is_first)
        if self._streamed:
            yield move_task("backward", "end of the micro-batch", single("weights", -self._streamed[0]))

    def _task(
        self, phase: str, name: str, part: str, *, is_first: bool = True, waits_for: tuple[Hashable, ...] = ()
    ) -> Task:
        tail = tail_name(part, traced_choice(self._choices[-1]))
        part = tail if tail in self._compiled.regime.parts else part
        key = ("task", part, is_first, waits_for, self._common)
        return self._compiled.keep(
            key, lambda: self._make_task(phase, name, part, is_first=is_first, waits_for=waits_for)
        )

    def _make_task(self, phase: str, name: str, part: str, *, is_first: bool, waits_for: tuple[Hashable, ...]) -> Task:
        head = self._head
        moves: Callable[[], Sequence[Move]]
        if head is not None and part in head.bytes:
            part_bytes, time = head.bytes[part], head.time[part]
            changes: list[Change] = [
                ("device", _SLOT[category], num_bytes) for category, num_bytes in head.changes[part]
            ]
            kept_net = part_bytes.net
            if self._dropped is not None:
                changes = list(drop_gradients(changes, self._dropped, region=_SLOT["logits_and_loss"]))
                part_bytes = sum_changes(changes)
            moves = partial(as_moves, changes)
        else:
            time = self._compiled.part_time(part, self._machine, rates_key=self.rates_key)
            part_bytes = self._compiled.part_bytes(part, dropped=self._dropped)
            kept_net = self._compiled.part_bytes(part).net
            moves = partial(self._compiled.part_moves, part, dropped=self._dropped)
        gradient_bytes = int(kept_net[_GRADIENTS]) if self._leaves_gradients and phase == "backward" else 0
        leaving = self._gradients_legs(gradient_bytes, is_first=is_first)
        return Task(
            phase=phase,
            block=-1,
            name=name,
            bytes=part_bytes,
            time=add_legs(time, leaving),
            copied=_with_gradients({}, gradient_bytes),
            waits_for=waits_for,
            leaves=(leaving,) if leaving else (),
            moves=moves,
        )

    def _block_task(self, phase: str, block: int, which: str, *, is_first: bool) -> Task:
        choice = self._choices[block]
        releases = self._releases.get((phase, block), ())
        ahead = self._offloaded_before(block) if phase == "backward" else -1
        ahead_choice = self._choices[ahead] if ahead >= 0 else "keep"
        key = ("block", block, which, choice, releases, ahead, ahead_choice, is_first, self._common)
        return self._compiled.keep(
            key, lambda: self._make_block_task(phase, block, which, releases=releases, ahead=ahead, is_first=is_first)
        )

    def _make_block_task(
        self, phase: str, block: int, which: str, *, releases: tuple[tuple[int, int], ...], ahead: int, is_first: bool
    ) -> Task:
        choice = self._choices[block]
        trip = self._trips[choice]
        part: PartName = (choice, self._templates[block], which)
        time = self._compiled.part_time(part, self._machine, rates_key=self.rates_key, trip=trip)
        is_backward = phase == "backward"
        leaves: list[Legs] = []
        if trip is not None and not is_backward:
            leaves.append(_legs(time, "copy_out", _STORES[trip.place]))
        gradient_bytes = 0
        if is_backward and self._leaves_gradients:
            gradient_bytes = int(self._compiled.part_bytes(part, releases=releases, trip=trip).net[_GRADIENTS])
        gradients = self._gradients_legs(gradient_bytes, is_first=is_first)
        leaves.append(gradients)
        return Task(
            phase=phase,
            block=block,
            name="",
            bytes=self._compiled.part_bytes(part, releases=releases, trip=trip, dropped=self._dropped),
            time=add_legs(time, gradients),
            copied=_with_gradients(self._compiled.part_copies(part, trip=trip), gradient_bytes),
            waits_for=() if is_backward else (update_key(block),),
            arrives=(self._saved(block, which),) if trip is not None and is_backward else (),
            begins=(self._saved(ahead, which),) if ahead >= 0 else (),
            leaves=tuple(legs for legs in leaves if legs),
            moves=partial(self._compiled.part_moves, part, releases=releases, trip=trip, dropped=self._dropped),
        )

    def _saved(self, block: int, which: str) -> Transfer:
        """What an offloaded block saved, on its way back."""
        choice = self._choices[block]
        trip = self._trips[choice]
        assert trip is not None
        part: PartName = (choice, self._templates[block], which)
        time = self._compiled.part_time(part, self._machine, rates_key=self.rates_key, trip=trip)
        return Transfer(key=("saved", block), legs=_legs(time, _STORES[trip.place], "copy_in"))

    def _gradients_legs(self, num_bytes: int, *, is_first: bool) -> Legs:
        """Of a part's gradients to the host, where they are added to those of the micro-batches before and measured."""
        if num_bytes <= 0:
            return ()
        rates = self._machine.rates
        # Norms are taken in the last micro-batch only, which a single one is too.
        num_passes = 1 if is_first else 3
        host_ms = num_passes * num_bytes / host_bytes_per_s(rates) * 1000
        return (("copy_out", num_bytes / rates.device_to_host_bytes_per_s * 1000), ("host", host_ms))

    def _weights_task(self, phase: str, block: int, gone_bytes: int, coming: range) -> Task:
        key = ("weights", phase, block, self._trains_all, self._common)
        return self._compiled.keep(key, lambda: self._make_weights_task(phase, block, gone_bytes, coming))

    def _make_weights_task(self, phase: str, block: int, gone_bytes: int, coming: range) -> Task:
        return make_weights_task(
            phase,
            block,
            by_block=self._streamed,
            tensors=self._streamed_tensors,
            gone_bytes=gone_bytes,
            coming=coming,
            plan=self._plan.weights,
            rates=self._machine.rates,
            waits_for=tuple(update_key(other) for other in coming) if phase == "forward" else (),
        )

    def _offloaded_before(self, block: int) -> int:
        if self._choices[block] not in OFFLOADING:
            return -1
        return next((other for other in range(block - 1, -1, -1) if self._choices[other] in OFFLOADING), -1)

    def _place_shared(self) -> None:
        """Where each storage that blocks share goes: in the backward of the first block that holds it, or in the forward pass."""
        regime = self._compiled.regime
        waiting = set(range(len(regime.shared)))
        self._releases: dict[tuple[str, int], tuple[tuple[int, int], ...]] = {}
        for block, choice in enumerate(self._choices):
            if not waiting:
                break
            holds = regime.templates_of(choice)[self._templates[block]].holds
            here = tuple((hold.index, hold.until) for hold in holds if hold.index in waiting)
            if here:
                self._releases["backward", block] = here
                waiting -= {index for index, _ in here}
        freed: list[Move] = []
        for index in sorted(waiting):
            shared = regime.shared[index]
            if shared.ends_in >= 0:
                block = self._templates.index(shared.ends_in)
                after = self._num_ops(block) - 1 - shared.ends_before
                self._releases["forward", block] = (*self._releases.get(("forward", block), ()), (index, after))
            else:
                num_bytes, category = self._compiled.shared_bytes(index)
                freed.append(Move("device", _SLOT[category], -num_bytes, -1, storage=FROM_PROLOGUE))
        self._freed_with_forward = tuple(freed)

    def _num_ops(self, block: int) -> int:
        """In the block's part of the forward pass."""
        return self._compiled.num_ops((self._choices[block], self._templates[block], "forward"))


def _legs(time: PartTime, *lanes: Lane | None) -> Legs:
    """A part's copies, in the order of the lanes."""
    return tuple((lane, getattr(time, f"{lane}_ms")) for lane in lanes if lane is not None)


def _with_gradients(copied: Mapping[Link, int], gradient_bytes: int) -> Mapping[Link, int]:
    if not gradient_bytes:
        return copied
    return {**copied, "device_to_host": copied.get("device_to_host", 0) + gradient_bytes}
