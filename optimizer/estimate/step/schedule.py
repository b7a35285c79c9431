"""One steady optimizer step as the runtime executes it: tasks in order, each with its bytes, its copies and its time per lane.

What a search asks for hundreds of times is made of tasks that are kept: a plan only puts them in order.

Per micro-batch: inputs, the reference's forward where there is one (``reference.py``), embedding, blocks forward, head and loss,
and back in reverse; a recomputed block's backward begins with its forward again, an offloaded block's copies back what it moved,
and weights that stream come before their block and go after it. Then clipping, the update, and the gradients are dropped.
Micro-batches after the first are alike, so they are laid out once and counted.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Final

from optimizer.base.categories import CATEGORIES, Category
from optimizer.estimate.categories.batch import estimate_input_bytes, inputs_pile_up
from optimizer.estimate.categories.block_sums import Phase, SumCosts
from optimizer.estimate.categories.gradients import estimate_rows_bytes
from optimizer.estimate.categories.network import dealt_ms
from optimizer.estimate.categories.optimizer_state import StateCosts
from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.categories.weights import (
    Brought,
    WeightsMove,
    find_brought,
    list_backward_moves,
    list_forward_moves,
)
from optimizer.estimate.memo import Table
from optimizer.estimate.shape.compiled import CompiledShape
from optimizer.estimate.shape.shared import SharedPlaces, SharedStorages
from optimizer.estimate.step.block_tasks import BlockTasks
from optimizer.estimate.step.exchange import GradientExchange
from optimizer.estimate.step.outside_tasks import OutsideTasks
from optimizer.estimate.step.part_prices import PartPrices
from optimizer.estimate.step.reference import list_reference_tasks
from optimizer.estimate.step.runs import Schedule, TaskRun
from optimizer.estimate.step.streaming import make_weights_task
from optimizer.estimate.step.update import (
    UpdateExchange,
    UpdateInputs,
    exchange_task,
    list_update_tasks,
    update_inputs,
    update_key,
)
from optimizer.estimate.tasks.change import Move
from optimizer.estimate.tasks.moments import moments_of
from optimizer.estimate.tasks.tasks import Task, move_task, single
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import BlockChoice
from optimizer.plan.devices.stages import RankStages
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload

END: Final = "end of the micro-batch"
_SHARED: Final[Table[None, SharedStorages]] = Table()
_WEIGHTS: Final[Table[tuple[str, WeightsPlan, Brought, str, tuple[float, ...]], list[Task]]] = Table()
_UPDATES: Final[Table[UpdateInputs, TaskRun]] = Table()


class StepLayout:
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
        is_first: bool = False,
        exchange: GradientExchange | None = None,
        after: UpdateExchange | None = None,
        own: RankStages | None = None,
        sums: SumCosts | None = None,
    ) -> None:
        """Prepare a plan's step. plan: of which the blocks' choices are not looked at. tensors: that this rank updates.
        is_first: whether updates inside backward make the moments, as in a first step that consumes gradients. exchange,
        after: what ranks exchange of gradients, and once a step; None on one device. own: of a model that is cut.
        sums: of ranks that share each block.
        """
        self._compiled = compiled
        self._plan = plan
        self._machine = machine
        self._shared = _SHARED.obtain(compiled, None, lambda: SharedStorages(compiled))
        moments = moments_of(tensors.sizes, bits=plan.optimizer_state.bits, kept=workload.kept_state)
        prices = PartPrices.find(compiled, plan=plan, machine=machine, moments=moments, is_first=is_first)
        self._makes_anew = prices.dropped is not None
        self._rates_key = prices.rates_key
        self._prices = prices
        self._has_reference = workload.objective == "dpo"
        self._blocks = BlockTasks.find(prices, compress=plan.activations.compress)
        self._outside = OutsideTasks.find(profile, prices, plan=plan)
        self._exchange, self._sums = exchange, sums
        self._sum_tasks: dict[tuple[Phase, float], Task] = {}
        if exchange is not None:
            self._sharing_blocks = BlockTasks.find(prices, compress=plan.activations.compress, others=exchange.others)
            self._sharing_outside = OutsideTasks.find(profile, prices, plan=plan, others=exchange.others)
        self._trains_all = workload.adapter is None
        rank = 0 if exchange is None else exchange.rank
        self._brought = find_brought(profile, plan, trains_all=self._trains_all, rank=rank, own=own)
        self.streamed = self._brought.by_block
        self._exchange_ms: tuple[float, ...] = ()
        if exchange is not None:
            self._exchange_ms = dealt_ms(exchange.network, self._brought.exchanged, self._brought.owners)
        self.input_bytes = estimate_input_bytes(profile, plan.batch, sequence_length=workload.sequence_length)
        self.inputs_stay = inputs_pile_up(machine.device)
        self._rows_bytes = estimate_rows_bytes(tensors, num_tokens=workload.tokens_per_step // plan.batch.accumulation_steps)
        self._carried = single("temporaries", self.input_bytes if self.inputs_stay else 0)
        self._carried += single("gradients", self._rows_bytes)
        self._weights: dict[str, list[Task]] = {}
        self._moves: dict[Hashable, TaskRun] = {}
        """Bytes that go between two parts, which few plans do differently."""
        self.num_later = plan.batch.accumulation_steps - 1
        self._tensors = tensors
        self._list_update = partial(
            list_update_tasks, tensors, state, plan=plan, workload=workload, machine=machine, exchange=after
        )
        self._update_key = update_inputs(plan, workload, machine, after)

    @cached_property
    def update(self) -> TaskRun:
        """Tasks that follow the last micro-batch."""
        return _UPDATES.obtain(self._tensors, self._update_key, lambda: TaskRun(tuple(self._list_update())))

    @cached_property
    def _inputs_task(self) -> Task:
        return move_task("forward", "inputs", single("temporaries", self.input_bytes))

    def schedule(self, choices: Sequence[BlockChoice]) -> Schedule:
        """The tasks of a step in order. choices: of the blocks, first to last. Raises NotProfiled."""
        places = self._shared.place(choices)
        forward = TaskRun(self._list_forward(choices, places))
        if self._exchange is not None:
            return self._schedule_of_rank(forward, choices, places, self._exchange)
        first = self._micro_batch(forward, choices, places, is_first=True)
        later = TaskRun(())
        if self.num_later:
            later = self._micro_batch(forward, choices, places, is_first=False)
            if self._rows_bytes:
                # The profile adds to the gradient that is there; rows are put aside beside it.
                later += self._move("backward", END, (("gradients", self._rows_bytes),))
        return Schedule(first=first, later=later, num_later=self.num_later, update=self.update, carried=self._carried)

    def _schedule_of_rank(
        self, forward: TaskRun, choices: Sequence[BlockChoice], places: SharedPlaces, exchange: GradientExchange
    ) -> Schedule:
        """The same of one of several ranks, with what they exchange. No model of theirs has sparse gradients."""

        def micro_batch(*, is_first: bool, is_last: bool) -> TaskRun:
            exchanges = exchange if is_last or exchange.in_each_micro_batch else None
            return self._micro_batch(forward, choices, places, is_first=is_first, is_last=is_last, exchange=exchanges)

        first = micro_batch(is_first=True, is_last=not self.num_later)
        has_own_last = self.num_later > 0 and not exchange.is_last_alike
        num_alike = self.num_later - has_own_last
        later = micro_batch(is_first=False, is_last=False) if num_alike else TaskRun(())
        last = micro_batch(is_first=False, is_last=True) if has_own_last else None
        update = self.update if last is None else last + self.update
        return Schedule(first=first, later=later, num_later=num_alike, update=update, carried=self._carried, last=last)

    def _micro_batch(
        self,
        forward: TaskRun,
        choices: Sequence[BlockChoice],
        places: SharedPlaces,
        *,
        is_first: bool,
        is_last: bool = False,
        exchange: GradientExchange | None = None,
    ) -> TaskRun:
        backward = TaskRun(self._list_backward(choices, places, is_first=is_first, is_last=is_last, exchange=exchange))
        return forward + self._ended(forward, backward, is_first=is_first)

    def _ended(self, forward: TaskRun, backward: TaskRun, *, is_first: bool, has_loss: bool = True) -> TaskRun:
        """A micro-batch's backward with what goes at its end."""
        left_bytes = forward.sums.logits + backward.sums.logits
        # The first one's loss stays and takes up those of the others. The traced parts free the loss and backward's root in
        # plain training's dtype, and no loss where a gradient that does not stay makes every micro-batch like the first.
        loss_bytes = left_bytes if self._outside.loss_bytes is None else self._outside.loss_bytes
        gone_bytes = (loss_bytes if is_first and has_loss else 0) - left_bytes
        inputs_bytes = 0 if self.inputs_stay else -self.input_bytes
        if gone_bytes or inputs_bytes:
            backward += self._move("backward", END, (("logits_and_loss", gone_bytes), ("temporaries", inputs_bytes)))
        return backward

    def _move(self, phase: str, name: str, bytes_by_category: tuple[tuple[Category, int], ...]) -> TaskRun:
        """Bytes that come or go at once, as a run of one task."""
        key = (phase, name, bytes_by_category)
        if key not in self._moves:
            net = sum((single(category, num_bytes) for category, num_bytes in bytes_by_category), single("weights", 0))
            self._moves[key] = TaskRun((move_task(phase, name, net),))
        return self._moves[key]

    def _list_forward(self, choices: Sequence[BlockChoice], places: SharedPlaces) -> list[Task]:
        blocks = self._blocks.list_forward(choices, places.forward)
        if self.streamed:
            blocks = _in_turn(self.weights_tasks("forward"), blocks)
        if self._sums is not None:
            blocks = self._with_sums(self._sums, "forward", blocks, choices)
        tasks = [
            self._inputs_task,
            *self._reference_tasks,
            self._outside.task("prologue", choices[-1]),
            *blocks,
        ]
        if places.freed:
            tasks += self._freed_run(places.freed).tasks
        if self.streamed:
            # As they go here, those of the last block come again for its backward.
            tasks += self._move("forward", "end of the backbone", (("weights", -self.streamed[-1]),)).tasks
        tasks.append(self._outside.task("head", choices[-1]))
        return tasks

    @cached_property
    def _reference_tasks(self) -> list[Task]:
        if not self._has_reference:
            return []
        last_bytes = self.streamed[-1] if self.streamed else 0
        return list_reference_tasks(
            self._prices, weights_tasks=self.weights_tasks("forward"), last_streamed_bytes=last_bytes
        )

    def _list_backward(
        self,
        choices: Sequence[BlockChoice],
        places: SharedPlaces,
        *,
        is_first: bool,
        is_last: bool = False,
        exchange: GradientExchange | None,
    ) -> list[Task]:
        # A gradient that does not stay is new in every micro-batch.
        which = "first" if is_first or self._makes_anew else "accumulate"
        # Others' gradients that go in every micro-batch are new in each; what adds to them takes the same bytes.
        drops = exchange is not None and (is_first or not exchange.in_each_micro_batch or self._makes_anew)
        of_blocks, outside = (self._sharing_blocks, self._sharing_outside) if drops else (self._blocks, self._outside)
        blocks = of_blocks.list_backward(choices, places.backward, f"backward_{which}", is_first=is_first)
        blocks.reverse()
        tasks_per_block = 1
        if self.streamed:
            blocks = _in_turn(self.weights_tasks("backward"), blocks)
            tasks_per_block = 2
        if self._sums is not None:
            blocks = self._with_sums(self._sums, "backward", blocks, choices)
            tasks_per_block += 1
        behind = [
            outside.task(f"head_backward_{which}", choices[-1], is_first=is_first),
            outside.task(f"norm_backward_{which}", choices[-1], is_first=is_first),
        ]
        tasks = [*behind, *blocks]
        if exchange is not None:
            tasks = list(exchange.in_turn(behind, blocks, tasks_per_block=tasks_per_block, is_last=is_last))
        if self.streamed:
            tasks += self._move("backward", END, (("weights", -self.streamed[0]),)).tasks
        return tasks

    def _with_sums(self, sums: SumCosts, phase: Phase, tasks: list[Task], choices: Sequence[BlockChoice]) -> list[Task]:
        """The blocks' tasks in their order, each with the sums that it waits for before it. tasks: as many for each block."""
        times_ms = sums.list_ms(phase, choices)
        in_order = times_ms if phase == "forward" else times_ms[::-1]
        number, found = len(tasks) // len(choices), list[Task]()
        for index, sum_ms in enumerate(in_order):
            if (phase, sum_ms) not in self._sum_tasks:
                self._sum_tasks[phase, sum_ms] = exchange_task(phase, "sums of hidden states", sum_ms)
            found += [self._sum_tasks[phase, sum_ms], *tasks[number * index : number * (index + 1)]]
        return found

    def weights_tasks(self, phase: str) -> list[Task]:
        """The weights' tasks in the order in which their blocks come; none where weights stay."""
        if phase in self._weights or not self.streamed:
            return self._weights.get(phase, [])
        is_forward = phase == "forward"
        list_moves = list_forward_moves if is_forward else list_backward_moves

        def make() -> list[Task]:
            moves = list(enumerate(list_moves(len(self.streamed), prefetch=self._plan.weights.prefetch)))
            in_order = moves if is_forward else moves[::-1]
            return [self.make_weights_task(phase, block, move) for block, move in in_order]

        key = (phase, self._plan.weights, self._brought, self._rates_key, self._exchange_ms)
        self._weights[phase] = _WEIGHTS.obtain(self._compiled, key, make)
        return self._weights[phase]

    def make_weights_task(
        self, phase: str, block: int, move: WeightsMove, *, is_there: bool = False, comes_for: str = ""
    ) -> Task:
        """block: counted among the rank's own. is_there: whether it has come before, so that nothing is waited for. comes_for:
        as ``make_weights_task`` of ``streaming.py`` has it.
        """
        blocks = self._brought.blocks or range(len(self.streamed))
        task = make_weights_task(
            phase,
            block,
            by_block=self.streamed,
            tensors=self._brought.tensors,
            gone=move.gone,
            coming=move.coming,
            plan=self._plan.weights,
            rates=self._machine.rates,
            waits_for=tuple(update_key(blocks[other]) for other in move.coming) if phase == "forward" else (),
            exchange_ms=self._exchange_ms,
            comes_for=comes_for,
        )
        return replace(task, block=blocks[block], arrives=() if is_there else task.arrives)

    def _freed_run(self, freed: list[Move]) -> TaskRun:
        key = tuple(freed)
        if key not in self._moves:
            net = sum((single(CATEGORIES[move.slot], move.num_bytes) for move in freed), single("weights", 0))
            task = move_task("forward", "end of the backbone", net)
            self._moves[key] = TaskRun((replace(task, moves=partial(tuple, key)),))
        return self._moves[key]


def _in_turn(weights: Sequence[Task], blocks: Sequence[Task]) -> list[Task]:
    """Each block's weights before the block."""
    return [task for pair in zip(weights, blocks, strict=True) for task in pair]
