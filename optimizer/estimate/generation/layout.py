"""One pass of a batch generation, block by block as ``runtime/generation/generator.py`` runs it, as tasks.
Torch-free.

Nothing is priced here but what a task itself takes; ``one_pass.py`` runs the tasks and sums them up. *Not
modelled*: moving what is kept of a plain cache together as sequences leave, once each time that half of them are over.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final, NamedTuple

from optimizer.estimate.categories.batch import ID_BYTES
from optimizer.estimate.categories.weights import list_forward_moves
from optimizer.estimate.generation.cold_weights import are_weights_cold, reading_weights
from optimizer.estimate.generation.cut import StageCosts, give_on
from optimizer.estimate.generation.kv.cache import NO_WORKSPACE, KvCosts
from optimizer.estimate.generation.sampling import draw_bytes, draw_time
from optimizer.estimate.memo import Table
from optimizer.estimate.shape.compiled import CompiledShape, PartRequest, compile_shape
from optimizer.estimate.step.streaming import make_weights_task
from optimizer.estimate.tasks.change import Arrival
from optimizer.estimate.tasks.tasks import Task, move_task, risen_bytes, single
from optimizer.hardware.machine import Machine
from optimizer.plan.generation import PREFILL, GenerationPlan, decode_phase, head_of
from optimizer.plan.passes.arrange import MicroBatchShape, PassShape
from optimizer.profile.generation import ForwardRegime, GenerationProfile, Phase, block_part
from optimizer.profile.ops import EMBEDDING, HEAD
from optimizer.workload import GenerationWorkload

_TASKS: Final[Table[tuple[str, tuple[Arrival, ...], str], Task]] = Table()
"""Tasks by part, what arrives in it, and rates."""
_DRAW_TASKS: Final[Table[str, Task]] = Table()
"""Tasks of drawing tokens by rates."""


class Placed(NamedTuple):
    """A task at its place. Tasks know neither block nor token: those that are alike are one, made once for all that runs it."""

    task: Task
    block: int = -1
    """Number of the block; -1 outside the blocks."""
    name: str = ""
    """Name of a task outside the blocks."""

    def describe(self, phase: str, num_blocks: int) -> str:
        return f"{phase} of block {self.block + 1} of {num_blocks}" if self.block >= 0 else self.name


class PassLayout:
    """Tasks that one pass of these micro-batches runs, in order."""

    def __init__(
        self,
        profile: GenerationProfile,
        plan: GenerationPlan,
        workload: GenerationWorkload,
        machine: Machine,
        *,
        micro_batches: PassShape,
        like: "PassLayout | None" = None,
        stage: StageCosts | None = None,
    ) -> None:
        """Lay out one pass. like: of another pass of the same plan on the same machine, whose tasks are taken over
        where they are the same. stage: of a model that is cut; the profile is then of its blocks.
        """
        machine = reading_weights(machine, are_cold=are_weights_cold(profile, plan.weights, machine))
        self.profile, self.plan, self.workload, self.machine = profile, plan, workload, machine
        self.micro_batches = micro_batches
        self.decode = profile.decode_with(plan.kv_cache.attention)
        """The device's part of each token after the prompt."""
        self._like = like
        self._stage = stage
        self._rates_key = f"{machine.device.kind} {machine.rates.fingerprint}"
        self.kv = {shape: KvCosts(profile, plan, machine, shape=shape) for shape in dict.fromkeys(micro_batches)}
        """Costs of the cache of each shape of micro-batch."""
        self.tokens_bytes = ID_BYTES * sum(shape.batch_size * shape.num_steps for shape in micro_batches)
        """Bytes of the new tokens' ids."""
        held = profile.weight_bytes(plan.weights.representation)
        kinds = profile.block_kinds
        by_block = tuple(held.by_block[kind] for kind in kinds)
        self._tensors = tuple(held.tensors[kind] for kind in kinds)
        is_streaming = plan.weights.place != "device"
        self.streamed = by_block if is_streaming else ()
        """Bytes of the blocks whose weights come and go."""
        self._moves = list_forward_moves(len(self.streamed), prefetch=plan.weights.prefetch)
        staying_bytes = sum(held.staying_by_block[kind] for kind in kinds)
        outside_bytes = held.outside - (0 if stage is None else stage.left_out_bytes(held))
        self.weight_bytes = outside_bytes + staying_bytes + (0 if is_streaming else sum(by_block))
        """Bytes of weights that stay on the device."""

    def place_prefill(self) -> Iterator[Placed]:
        prompts_bytes = ID_BYTES * sum(shape.batch_size * shape.prompt_length for shape in self.micro_batches)
        for num_bytes in (self.tokens_bytes, prompts_bytes):
            yield Placed(move_task(PREFILL, PREFILL, single("temporaries", num_bytes)), name=PREFILL)
        yield from self.forward(self.profile.prefill, step=0)
        name = head_of(PREFILL)
        yield Placed(move_task(PREFILL, name, -single("temporaries", prompts_bytes)), name=name)

    def forward(self, traced: Phase, *, step: int) -> Iterator[Placed]:
        """Embeddings, then blocks, each for all micro-batches, then heads; streamed weights before their blocks."""
        phase = phase_of(step)
        running = self.running(step)
        # Micro-batches of one shape are laid out once.
        arrivals = [()] * len(running) if step else self._kv_arrivals
        each_shape = list(zip(running, arrivals, strict=True))
        layouts = {each: self._lay_out(traced, each[0], step=step, arrivals=each[1]) for each in dict.fromkeys(each_shape)}
        in_turn = [layouts[each] for each in each_shape]
        if self._stage is not None:
            yield from _one_after_the_other(in_turn, phase, is_last=self._stage.stage.is_last)
            return
        kv_tasks = self._list_kv_tasks(running, step=step)
        for layout in in_turn:
            yield Placed(layout.embedding, name=phase)
        for block in range(self.profile.num_blocks):
            if self.streamed:
                yield Placed(self.weights_tasks[block], block)
            for layout in in_turn:
                for task in () if self.plan.kv_cache.is_plain else next(kv_tasks):
                    yield Placed(task, block)
                yield Placed(layout.blocks[block], block)
        if self.streamed:
            # The last that are there go as the backbone ends, still counted as the last block.
            yield Placed(move_task(phase, phase, -single("weights", self.streamed[-1])), name=phase)
        for layout in in_turn:
            for task in layout.head:
                yield Placed(task, name=head_of(phase))

    def _lay_out(
        self, traced: Phase, shape: MicroBatchShape, *, step: int, arrivals: tuple[tuple[int, ...], ...]
    ) -> "_Layout":
        """Lay out one micro-batch. arrivals: of keys and values, by block; empty where all are there."""
        num_running = shape.num_running(step)
        compiled = compile_shape(traced, self.plan.weights, (num_running, shape.prompt_length + step))
        regime = compiled.regime
        assert isinstance(regime, ForwardRegime)
        blocks = []
        for block, template in enumerate(regime.block_templates):
            after = regime.kv_after[template]
            come: tuple[Arrival, ...] = tuple((after, "kv_cache", num_bytes) for num_bytes in arrivals[block]) if arrivals else ()
            blocks.append(self._part(compiled, block_part(template), arrivals=come))
        embedding = self._part(compiled, EMBEDDING)
        if self._stage is not None:
            num_tokens = num_running * (1 if step else shape.prompt_length)
            hidden_bytes = num_tokens * self.profile.hidden_size * self.plan.weights.bytes_per_element
            hidden = self._stage.place_hidden(compiled, hidden_bytes=hidden_bytes)
            if not self._stage.stage.is_last:
                end = give_on([embedding, *hidden, *blocks])
                return _Layout(embedding=embedding, hidden=hidden, blocks=tuple(blocks), head=(end,))
        else:
            hidden = ()
        head = [self._part(compiled, HEAD)]
        if self.workload.draws:
            head.append(_DRAW_TASKS.obtain(compiled, self._rates_key, lambda: self._draw_task(num_running)))
        return _Layout(embedding=embedding, hidden=hidden, blocks=tuple(blocks), head=tuple(head))

    def _draw_task(self, num_running: int) -> Task:
        """Sequences draw one after the other while the logits are there, which the head's own part has gone again."""
        profile, size = self.profile, self.plan.weights.bytes_per_element
        logits_bytes = num_running * (profile.hidden_size + profile.vocab_size) * size
        return Task(
            phase="",
            block=-1,
            name="",
            bytes=risen_bytes(single("logits_and_loss", logits_bytes + draw_bytes(profile.vocab_size))),
            time=draw_time(profile.vocab_size, num_sequences=num_running, rates=self.machine.rates),
        )

    def _part(self, compiled: CompiledShape, part: str, *, arrivals: tuple[Arrival, ...] = ()) -> Task:
        def make() -> Task:
            request = PartRequest(part, arrivals=arrivals)
            return Task(
                phase="",
                block=-1,
                name="",
                bytes=compiled.part_bytes(request),
                time=compiled.part_time(part, self.machine, rates_key=self._rates_key),
                moves=partial(compiled.part_moves, request),
                allocated_rise=partial(compiled.part_rise, request),
            )

        return _TASKS.obtain(compiled, (part, arrivals, self._rates_key), make)

    @cached_property
    def weights_tasks(self) -> list[Task]:
        """Weights' tasks by block, of any phase: what comes and goes is the same in all, and in all passes."""
        if self._like is not None:
            return self._like.weights_tasks
        kinds = self.profile.block_kinds
        slots = self.plan.weights.prefetch + 1
        known: dict[Hashable, Task] = {}
        found = []
        for block, (gone, coming) in enumerate(self._moves):
            gone_bytes = sum(self.streamed[other] for other in gone)
            key = (gone_bytes, kinds[block], block % slots, block == 0, tuple(kinds[other] for other in coming))
            task = known.get(key)
            if task is None:
                task = known[key] = make_weights_task(
                    "",
                    block,
                    by_block=self.streamed,
                    tensors=self._tensors,
                    gone=gone,
                    coming=coming,
                    plan=self.plan.weights,
                    rates=self.machine.rates,
                    num_keys=slots,
                    holds_up_cpu=True,
                    generates=True,
                )
            found.append(task)
        return found


    @property
    def room_bytes(self) -> int:
        """Bytes of attention on the host, there."""
        return max(each.room_bytes for each in self.kv.values())

    @cached_property
    def workspace_bytes(self) -> int:
        """Bytes that caches share on the device while tokens are decoded."""
        costs = self.kv.values()
        slots = self.plan.kv_cache.num_ahead + 1
        return max(each.front_bytes for each in costs) + slots * max(each.slot_bytes for each in costs)

    @cached_property
    def _kv_arrivals(self) -> list[tuple[tuple[int, ...], ...]]:
        """Keys and values, by micro-batch and block, that come to the device as a prompt first runs through it. The
        workspace comes with those that need it first.
        """
        workspace = NO_WORKSPACE
        arrivals: list[list[tuple[int, ...]]] = [[] for _ in self.micro_batches]
        for block in range(self.profile.num_blocks):
            for turn, shape in enumerate(self.micro_batches):
                come, workspace = self.kv[shape].list_arrivals(block, workspace)
                arrivals[turn].append(come)
        return list(map(tuple, arrivals))

    def _list_kv_tasks(self, running: PassShape, *, step: int) -> Iterator[tuple[Task, ...]]:
        """List the tasks of keys and values in the order in which caches take turns: in each block one after the other.
        Nothing for plain caches.

        A transfer's key sets it apart from others that are under way with it, of which there are no more than come ahead.
        """
        if self.plan.kv_cache.is_plain:
            return
        kinds, ahead = self.profile.block_kinds, self.plan.kv_cache.num_ahead
        if not step or not ahead:
            alike = {
                (kind, shape): self._make_kv_tasks(0, kind, shape, later=[], step=step)
                for kind in dict.fromkeys(kinds)
                for shape in dict.fromkeys(running)
            }
            yield from [alike[kind, shape] for kind in kinds for shape in running]
            return
        order = [(kind, shape) for kind in kinds for shape in running]
        known: dict[Hashable, tuple[Task, ...]] = {}
        for place, (kind, shape) in enumerate(order):
            later = order[place + ahead if place else 1 : place + ahead + 1]
            key = (kind, shape, place % (ahead + 1), place > 0, *later)
            tasks = known.get(key)
            if tasks is None:
                tasks = known[key] = self._make_kv_tasks(place, kind, shape, later=later, step=step)
            yield tasks

    def _make_kv_tasks(
        self, place: int, kind: int, shape: MicroBatchShape, *, later: list[tuple[int, MicroBatchShape]], step: int
    ) -> tuple[Task, ...]:
        """Make the tasks of one cache in one block. later: whose keys and values begin to come then."""
        costs, ahead = self.kv[shape], self.plan.kv_cache.num_ahead
        if not step:
            return (costs.prefill_task(kind),)
        slots = ahead + 1
        first = place + ahead if place else 1
        begins = [
            each
            for index, (other, its) in enumerate(later, first)
            for each in self.kv[its].list_coming(other, step=step, key=("keys and values", index % slots))
        ]
        return costs.decode_tasks(
            kind,
            step=step,
            arrives=costs.list_coming(kind, step=step, key=("keys and values", place % slots)),
            begins=begins,
            was_begun=place > 0 and ahead > 0,
        )

    def running(self, step: int) -> PassShape:
        """The micro-batches that still generate in a step."""
        return tuple(shape for shape in self.micro_batches if step < shape.num_steps)

@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Tasks of one micro-batch in one step."""

    embedding: Task
    hidden: tuple[Task, ...]
    """Hidden states of another stage."""
    blocks: tuple[Task, ...]
    head: tuple[Task, ...]


def _one_after_the_other(layouts: Iterable[_Layout], phase: str, *, is_last: bool) -> Iterator[Placed]:
    """Each micro-batch through all blocks of a stage before the next."""
    for layout in layouts:
        for task in (layout.embedding, *layout.hidden):
            yield Placed(task, name=phase)
        for block, task in enumerate(layout.blocks):
            yield Placed(task, block)
        for task in layout.head:
            yield Placed(task, name=head_of(phase)) if is_last else Placed(task, len(layout.blocks) - 1)


def phase_of(step: int) -> str:
    return decode_phase(step + 1) if step else PREFILL


def name_tasks(placed: Iterable[Placed], phase: str) -> tuple[Task, ...]:
    """The placed tasks, named for people."""
    return tuple(replace(task, phase=phase, block=block, name=name) for task, block, name in placed)
