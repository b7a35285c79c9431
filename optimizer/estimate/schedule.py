"""One steady optimizer step as the runtime executes it: tasks in order, each with its bytes, its copies and its time per lane.

What a search asks for hundreds of times is made of tasks that are kept: a plan only puts them in order.

Per micro-batch: inputs and embedding, blocks forward, head and loss, and back in reverse; a recomputed block's
backward begins with its forward again, an offloaded block's copies back what it moved, and weights that stream come before
their block and go after it. Then clipping, the update, and the gradients are dropped.
Micro-batches after the first are alike, so they are laid out once and counted.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Final

from optimizer.categories import CATEGORIES, Category, Link, Tier
from optimizer.estimate.activations import trip_of
from optimizer.estimate.batch import estimate_input_bytes, inputs_pile_up
from optimizer.estimate.compiled import CompiledShape, Move, PartName, drop_gradients
from optimizer.estimate.cpu_scratch import Point
from optimizer.estimate.gradients import estimate_rows_bytes, find_dropped
from optimizer.estimate.logits_and_loss import estimate_chunked_head
from optimizer.estimate.moments import Moments
from optimizer.estimate.optimizer_state import StateCosts, host_bytes_per_s
from optimizer.estimate.parts import Change, PartTime, sum_changes
from optimizer.estimate.prediction import Lane
from optimizer.estimate.runs import Run, Schedule
from optimizer.estimate.shared import Places, Release, SharedStorages
from optimizer.estimate.streaming import make_weights_task
from optimizer.estimate.tasks import Task, add_legs, as_moves, move_task, single
from optimizer.estimate.tensors import TensorList
from optimizer.estimate.transfers import Legs, Transfer
from optimizer.estimate.update import list_update_tasks, update_key
from optimizer.estimate.weights import (
    list_backward_moves,
    list_forward_moves,
    list_streamed_bytes,
    list_streamed_tensors,
)
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import OFFLOADING, REBUILDING, BlockChoice
from optimizer.plan.plan import Plan
from optimizer.profile.extent import traced_choice
from optimizer.profile.profile import Profile, tail_name
from optimizer.workload import TrainingWorkload

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_GRADIENTS, _LOGITS = _SLOT["gradients"], _SLOT["logits_and_loss"]
_STORES: dict[Tier, Lane | None] = {"host": None, "disk": "disk", "remote": "network"}
"""The lane between the host and a place."""
_OFFLOADING: Final = frozenset(OFFLOADING)
_END: Final = "end of the micro-batch"
_OUTSIDE: Final[Mapping[str, tuple[str, str, int | None]]] = {
    "prologue": ("forward", "embedding", -1),
    "head": ("forward", "head and loss", 0),
    "head_backward_first": ("backward", "backward of head and loss", None),
    "head_backward_accumulate": ("backward", "backward of head and loss", None),
    "norm_backward_first": ("backward", "backward", None),
    "norm_backward_accumulate": ("backward", "backward", None),
}
"""Phase, name, and below 0 where it waits for the update of what is before the blocks, 0 of what is behind them."""


class Layout:
    """Puts the parts of one shape in order: all that a plan decides outside its blocks, for whatever its blocks do.

    Made once for each setting that a search tries; the tasks of its blocks are shared with the settings that do the same to them.
    """

    def __init__(
        self,
        profile: Profile,
        compiled: CompiledShape,
        *,
        plan: Plan,
        workload: TrainingWorkload,
        machine: Machine,
        tensors: TensorList,
        state: StateCosts,
        first_moments: Moments | None = None,
    ) -> None:
        """plan: of which the blocks' choices are not looked at. first_moments: which updates inside backward make, in a first
        step that consumes gradients.
        """
        self._compiled = compiled
        self._plan = plan
        self._machine = machine
        self.rates_key = f"{machine.device.kind} {machine.rates.fingerprint}"
        self._templates = compiled.regime.block_templates
        self._shared = SharedStorages(compiled)
        self.dropped = find_dropped(plan, first_moments=first_moments, device_kind=machine.device.kind)
        self.leaves_gradients = plan.gradients.choice == "host"
        head_key = ("head", plan.logits_and_loss, plan.weights.representation, self.rates_key)
        self._head = compiled.keep(
            head_key, lambda: estimate_chunked_head(profile, compiled, plan=plan, machine=machine)
        )
        # One object for all that does not change from block to block: plans are slow to hash.
        in_blocks = (self.leaves_gradients, plan.activations.compress, self.rates_key, self.dropped)
        self._blocks: dict[tuple[str, bool], list[dict[Hashable, Task]]] = compiled.keep(("blocks", in_blocks), dict)
        common = (plan.weights, plan.gradients, plan.logits_and_loss, self.rates_key, self.dropped)
        self._common = compiled.keep(("common", common), object)
        self._trains_all = workload.adapter is None
        self.streamed = list_streamed_bytes(profile, plan.weights, trains_all=self._trains_all)
        self._streamed_tensors = list_streamed_tensors(profile, plan.weights, trains_all=self._trains_all)
        self.input_bytes = estimate_input_bytes(profile, plan.batch, sequence_length=workload.sequence_length)
        self.inputs_stay = inputs_pile_up(machine.device)
        self._rows_bytes = estimate_rows_bytes(tensors, num_tokens=plan.batch.micro_batch_size * workload.sequence_length)
        self._carried = single("temporaries", self.input_bytes if self.inputs_stay else 0)
        self._carried += single("gradients", self._rows_bytes)
        self._weights: dict[str, list[Task]] = {}
        self._moves: dict[Hashable, Run] = {}
        """Bytes that go between two parts, which few plans do differently."""
        self.num_later = plan.batch.accumulation_steps - 1
        self._list_update = partial(list_update_tasks, tensors, state, plan=plan, workload=workload, machine=machine)
        self._update_key = (
            "update", plan.gradients, plan.optimizer_state, plan.weights, self.num_later, workload.max_grad_norm is None,
            self._trains_all, workload.num_moments, self.rates_key,
        )  # fmt: skip

    @cached_property
    def update(self) -> Run:
        """What follows the last micro-batch."""
        return self._compiled.keep(self._update_key, lambda: Run(tuple(self._list_update())))

    @cached_property
    def _inputs_task(self) -> Task:
        return move_task("forward", "inputs", single("temporaries", self.input_bytes))

    def schedule(self, choices: Sequence[BlockChoice]) -> Schedule:
        """choices: of the blocks, first to last. Raises NotProfiled."""
        places = self._shared.place(choices)
        forward = Run(self._list_forward(choices, places))
        first = self._micro_batch(forward, choices, places, is_first=True)
        later = Run(())
        if self.num_later:
            later = self._micro_batch(forward, choices, places, is_first=False)
            if self._rows_bytes:
                # The profile adds to the gradient that is there; rows are put aside beside it.
                later += self._move("backward", _END, (("gradients", self._rows_bytes),))
        return Schedule(first=first, later=later, num_later=self.num_later, update=self.update, carried=self._carried)

    def _micro_batch(self, forward: Run, choices: Sequence[BlockChoice], places: Places, *, is_first: bool) -> Run:
        run = forward + Run(self._list_backward(choices, places, is_first=is_first))
        left_bytes = run.sums.logits
        # The first one's loss stays and takes up those of the others. The traced parts free the loss and backward's root in
        # plain training's dtype, and no loss where a gradient that does not stay makes every micro-batch like the first.
        loss_bytes = left_bytes if self._head is None else self._head.loss_bytes
        gone_bytes = (loss_bytes if is_first else 0) - left_bytes
        inputs_bytes = 0 if self.inputs_stay else -self.input_bytes
        if gone_bytes or inputs_bytes:
            run += self._move("backward", _END, (("logits_and_loss", gone_bytes), ("temporaries", inputs_bytes)))
        return run

    def _move(self, phase: str, name: str, bytes_by_category: tuple[tuple[Category, int], ...]) -> Run:
        """Bytes that come or go at once, as a run of one task."""
        key = (phase, name, bytes_by_category)
        if key not in self._moves:
            net = sum((single(category, num_bytes) for category, num_bytes in bytes_by_category), single("weights", 0))
            self._moves[key] = Run((move_task(phase, name, net),))
        return self._moves[key]

    def _list_forward(self, choices: Sequence[BlockChoice], places: Places) -> list[Task]:
        blocks = self._forward_blocks(choices, places)
        if self.streamed:
            blocks = _in_turn(self.weights_tasks("forward"), blocks)
        tasks = [
            self._inputs_task,
            self.outside_task("prologue", choices[-1]),
            *blocks,
        ]
        if places.freed:
            tasks += self._freed(places.freed).tasks
        if self.streamed:
            # As they go here, those of the last block come again for its backward.
            tasks += self._move("forward", "end of the backbone", (("weights", -self.streamed[-1]),)).tasks
        tasks.append(self.outside_task("head", choices[-1]))
        return tasks

    def _list_backward(self, choices: Sequence[BlockChoice], places: Places, *, is_first: bool) -> list[Task]:
        # A gradient that does not stay is new in every micro-batch.
        which = "first" if is_first or self.dropped is not None else "accumulate"
        blocks = self._backward_blocks(choices, places, f"backward_{which}", is_first=is_first)
        blocks.reverse()
        if self.streamed:
            blocks = _in_turn(self.weights_tasks("backward"), blocks)
        tasks = [
            self.outside_task(f"head_backward_{which}", choices[-1], is_first=is_first),
            self.outside_task(f"norm_backward_{which}", choices[-1], is_first=is_first),
            *blocks,
        ]
        if self.streamed:
            tasks += self._move("backward", _END, (("weights", -self.streamed[0]),)).tasks
        return tasks

    def _forward_blocks(self, choices: Sequence[BlockChoice], places: Places) -> list[Task]:
        tasks: list[Task] = []
        known = self._known_blocks("forward", is_first=True)
        released = places.forward
        for block, choice in enumerate(choices):
            key: Hashable = (choice, released[block]) if block in released else choice
            task = known[block].get(key)
            if task is None:
                task = known[block][key] = self._make_block_task(
                    "forward", block, "forward", choice=choice, releases=released.get(block, ()), is_first=True
                )
            tasks.append(task)
        return tasks

    def _backward_blocks(
        self, choices: Sequence[BlockChoice], places: Places, which: str, *, is_first: bool
    ) -> list[Task]:
        """In the order of the blocks, though the last comes first. Each offloaded block begins what the one before it saved."""
        tasks: list[Task] = []
        known = self._known_blocks(which, is_first=is_first)
        released = places.backward
        ahead, ahead_choice = -1, choices[0]
        for block, choice in enumerate(choices):
            key: Hashable = choice
            begun = -1
            if choice in _OFFLOADING:
                begun, begun_choice = ahead, ahead_choice
                key = choice, begun, begun_choice
                ahead, ahead_choice = block, choice
            if block in released:
                key = key, released[block]
            task = known[block].get(key)
            if task is None:
                task = known[block][key] = self._make_block_task(
                    "backward",
                    block,
                    which,
                    choice=choice,
                    releases=released.get(block, ()),
                    ahead=(begun, begun_choice) if begun >= 0 else None,
                    is_first=is_first,
                )
            tasks.append(task)
        return tasks

    def _known_blocks(self, which: str, *, is_first: bool) -> list[dict[Hashable, Task]]:
        known = self._blocks.get((which, is_first))
        if known is None:
            known = self._blocks[which, is_first] = [{} for _ in self._templates]
        return known

    def outside_task(self, part: str, last: BlockChoice, *, is_first: bool = True) -> Task:
        """Of one of PART_NAMES. last: what the last block does."""
        phase, name, block = _OUTSIDE[part]
        tail = tail_name(part, traced_choice(last))
        part = tail if tail in self._compiled.regime.parts else part
        waits_for = () if block is None else (update_key(block if block < 0 else len(self._templates)),)
        key = ("task", part, is_first, waits_for, self._common)
        return self._compiled.keep(
            key, lambda: self._make_task(phase, name, part, is_first=is_first, waits_for=waits_for)
        )

    def _make_task(self, phase: str, name: str, part: str, *, is_first: bool, waits_for: tuple[Hashable, ...]) -> Task:
        head = self._head
        moves: Callable[[], Sequence[Move]]
        points: Callable[[], tuple[Point, ...]] | None
        if head is not None and part in head.bytes:
            part_bytes, time = head.bytes[part], head.time[part]
            changes: list[Change] = [
                ("device", _SLOT[category], num_bytes) for category, num_bytes in head.changes[part]
            ]
            kept_net = part_bytes.net
            if self.dropped is not None:
                changes = list(drop_gradients(changes, self.dropped, region=_SLOT["logits_and_loss"]))
                part_bytes = sum_changes(changes)
            moves, points = partial(as_moves, changes), None
        else:
            time = self._compiled.part_time(part, self._machine, rates_key=self.rates_key)
            part_bytes = self._compiled.part_bytes(part, dropped=self.dropped)
            kept_net = self._compiled.part_bytes(part).net
            moves = partial(self._compiled.part_moves, part, dropped=self.dropped)
            points = partial(self._compiled.part_points, part, dropped=self.dropped)
        gradient_bytes = int(kept_net[_GRADIENTS]) if self.leaves_gradients and phase == "backward" else 0
        leaving = self.gradients_legs(gradient_bytes, is_first=is_first)
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
            list_points=points,
        )

    def _make_block_task(
        self,
        phase: str,
        block: int,
        which: str,
        *,
        choice: BlockChoice,
        releases: tuple[Release, ...],
        is_first: bool,
        ahead: tuple[int, BlockChoice] | None = None,
    ) -> Task:
        """ahead: the offloaded block before this one, which comes back next."""
        trip = trip_of(choice, self._plan.activations)
        part: PartName = (choice, self._templates[block], which)
        time = self._compiled.part_time(part, self._machine, rates_key=self.rates_key, trip=trip)
        is_backward = phase == "backward"
        leaves: list[Legs] = []
        if trip is not None and not is_backward:
            leaves.append(_legs(time, "copy_out", _STORES[trip.place]))
        gradient_bytes = 0
        if is_backward and self.leaves_gradients:
            gradient_bytes = int(self._compiled.part_bytes(part, releases=releases, trip=trip).net[_GRADIENTS])
        gradients = self.gradients_legs(gradient_bytes, is_first=is_first)
        leaves.append(gradients)
        return Task(
            phase=phase,
            block=block,
            name="",
            bytes=self._compiled.part_bytes(part, releases=releases, trip=trip, dropped=self.dropped),
            time=add_legs(time, gradients),
            copied=_with_gradients(self._compiled.part_copies(part, trip=trip), gradient_bytes),
            waits_for=() if is_backward else (update_key(block),),
            arrives=(self._saved(block, choice, which),) if trip is not None and is_backward else (),
            begins=(self._saved(*ahead, which),) if ahead is not None else (),
            leaves=tuple(legs for legs in leaves if legs),
            moves=partial(self._compiled.part_moves, part, releases=releases, trip=trip, dropped=self.dropped),
            list_points=partial(self._compiled.part_points, part, releases=releases, trip=trip, dropped=self.dropped),
            num_random_states=(-1 if is_backward else 1) if choice in REBUILDING else 0,
        )

    def _saved(self, block: int, choice: BlockChoice, which: str) -> Transfer:
        """What an offloaded block saved, on its way back."""
        trip = trip_of(choice, self._plan.activations)
        assert trip is not None
        part: PartName = (choice, self._templates[block], which)
        time = self._compiled.part_time(part, self._machine, rates_key=self.rates_key, trip=trip)
        return Transfer(key=("saved", block), legs=_legs(time, _STORES[trip.place], "copy_in"))

    def gradients_legs(self, num_bytes: int, *, is_first: bool) -> Legs:
        """Of a part's gradients to the host, where they are added to those of the micro-batches before and measured."""
        if num_bytes <= 0:
            return ()
        rates = self._machine.rates
        # Norms are taken in the last micro-batch only, which a single one is too.
        num_passes = 1 if is_first else 3
        host_ms = num_passes * num_bytes / host_bytes_per_s(rates) * 1000
        return (("copy_out", num_bytes / rates.device_to_host_bytes_per_s * 1000), ("host", host_ms))

    def weights_tasks(self, phase: str) -> list[Task]:
        """In the order in which their blocks come; none where weights stay."""
        if phase in self._weights or not self.streamed:
            return self._weights.get(phase, [])
        is_forward = phase == "forward"
        list_moves = list_forward_moves if is_forward else list_backward_moves

        def make() -> list[Task]:
            moves = list(enumerate(list_moves(self.streamed, prefetch=self._plan.weights.prefetch)))
            in_order = moves if is_forward else moves[::-1]
            return [self._make_weights_task(phase, block, *move) for block, move in in_order]

        key = ("weights", phase, self._plan.weights, self._trains_all, self.rates_key)
        self._weights[phase] = self._compiled.keep(key, make)
        return self._weights[phase]

    def _make_weights_task(self, phase: str, block: int, gone_bytes: int, coming: range) -> Task:
        return make_weights_task(
            phase,
            block,
            by_block=self.streamed,
            tensors=self._streamed_tensors,
            gone_bytes=gone_bytes,
            coming=coming,
            plan=self._plan.weights,
            rates=self._machine.rates,
            waits_for=tuple(update_key(other) for other in coming) if phase == "forward" else (),
        )

    def _freed(self, freed: list[Move]) -> Run:
        key = tuple(freed)
        if key not in self._moves:
            net = sum((single(CATEGORIES[move.slot], move.num_bytes) for move in freed), single("weights", 0))
            task = move_task("forward", "end of the backbone", net)
            self._moves[key] = Run((replace(task, moves=partial(tuple, key)),))
        return self._moves[key]


def _in_turn(weights: Sequence[Task], blocks: Sequence[Task]) -> list[Task]:
    """Each block's weights before the block."""
    return [task for pair in zip(weights, blocks, strict=True) for task in pair]


def _legs(time: PartTime, *lanes: Lane | None) -> Legs:
    """A part's copies, in the order of the lanes."""
    return tuple((lane, getattr(time, f"{lane}_ms")) for lane in lanes if lane is not None)


def _with_gradients(copied: Mapping[Link, int], gradient_bytes: int) -> Mapping[Link, int]:
    if not gradient_bytes:
        return copied
    return {**copied, "device_to_host": copied.get("device_to_host", 0) + gradient_bytes}
