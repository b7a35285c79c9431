"""Spells a schedule out as single allocations in order, for the model of the allocator and to name what is in memory. Torch-free.

A schedule says how many bytes come and go, not which: what goes is taken to be the latest of its category and size that is
there, which is what backward does; of streamed weights the earliest. Two steps are laid out, since the first makes the
optimizer's state between everything else, and the second runs in the gaps that this left. Of the micro-batches after the first,
which are alike, at most ``MAX_LATER`` are.

*Not modelled*: which of two storages of one category and size goes first where backward does not undo forward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from optimizer.base.categories import CATEGORIES, Category
from optimizer.estimate.card.allocator import Request
from optimizer.estimate.card.on_cuda import CudaMoves
from optimizer.estimate.categories.optimizer_state import estimate_state_bytes
from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.step.runs import Schedule
from optimizer.estimate.step.simulate import Resident
from optimizer.estimate.tasks.change import FROM_PROLOGUE, Move
from optimizer.estimate.tasks.tasks import Task, list_moves
from optimizer.formats.transfer_sizes import chunk_elements
from optimizer.optimizers import KeptState
from optimizer.plan.plan import Plan

MAX_LATER = 2
"""Micro-batches after the first that are laid out in each step."""
_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_WEIGHTS, _GRADIENTS, _STATE, _TEMPORARIES = _SLOT["weights"], _SLOT["gradients"], _SLOT["optimizer_state"], _SLOT["temporaries"]
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldAllocation:
    """One storage that is in memory at the peak."""

    category: Category
    num_bytes: int
    made_in: str
    """``forward`` or ``backward`` of a block, else the part of the step; ``between steps`` for what is always there."""
    block: int
    """Number of the block; -1 outside the blocks."""
    op: str
    """Op that made it; empty where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Allocations:
    """Requests to the allocator, in phases."""

    loading: tuple[Request, ...]
    first_step: tuple[Request, ...]
    second_step: tuple[Request, ...]
    peak_bytes: int
    """Highest sum in the second step, of bytes as they were asked for."""
    peak_low_bytes: int
    peak_high_bytes: int
    """The peak with the most that kernels may hold beside their tensors; ``peak_low_bytes`` is with the least."""
    not_modelled: tuple[str, ...]
    """Kernels of which no source gives a number."""
    peak_in: str
    """The part of the step in which that is, as ``Held.made_in``."""
    at_peak: tuple[HeldAllocation, ...]
    """Storages that are in memory at that peak, in order of birth."""

    @property
    def phases(self) -> tuple[tuple[Request, ...], ...]:
        return self.loading, self.first_step, self.second_step


def list_allocations(
    schedule: Schedule, *, resident: Resident, tensors: TensorList, plan: Plan, kept: KeptState, on_cuda: CudaMoves | None
) -> Allocations:
    """List the allocations of a training plan. resident: on the device between steps, by category. kept: what the
    optimizer keeps of each tensor. on_cuda: None on the CPU device.
    """
    writer = _Writer(on_cuda=on_cuda)
    device_kind = "cpu" if on_cuda is None else "cuda"
    writer.begin_phase()
    for slot, num_bytes in _list_resident(resident, tensors, plan, device_kind):
        writer.come(slot, num_bytes)
    loading = writer.requests
    stays = {slot: writer.live_bytes(slot) for slot in range(len(CATEGORIES))}
    writer.begin_phase()
    moments = _Moments(resident, tensors, plan, kept)
    writer.write_step(schedule, moments)
    writer.settle({**stays, _STATE: int(resident.device[_STATE])})
    first_step = writer.requests
    writer.begin_phase()
    writer.write_step(schedule, None)
    writer.settle({**stays, _STATE: int(resident.device[_STATE])})
    return _make_allocations(writer, loading, first_step, writer.requests)


def list_pass_allocations(
    rows: Sequence[tuple[Task, ...]], *, loaded: Sequence[int], on_cuda: CudaMoves | None
) -> Allocations:
    """A generation's allocations, as loading and two passes. rows: of tasks, which in order make a pass. loaded: bytes of
    each weight that is always there; all else goes as a pass ends. on_cuda: as above.
    """
    writer = _Writer(on_cuda=on_cuda)
    writer.begin_phase()
    for num_bytes in loaded:
        writer.come(_WEIGHTS, num_bytes)
    loading = writer.requests
    requests: list[Request] = []
    for _ in range(2):
        writer.begin_phase()
        for tasks in rows:
            writer.run(tasks)
        writer.settle({_WEIGHTS: sum(loaded)})
        requests += writer.requests
    # One phase: what stays reserved after the first pass is free as the second begins, and says nothing about what was needed.
    return _make_allocations(writer, loading, [], requests)


def _make_allocations(
    writer: "_Writer", loading: list[Request], first_step: list[Request], second_step: list[Request]
) -> Allocations:
    """The requests of all phases, with the peak of the last one written."""
    return Allocations(
        loading=tuple(loading),
        first_step=tuple(first_step),
        second_step=tuple(second_step),
        peak_bytes=writer.peak_bytes,
        peak_low_bytes=writer.peak_low_bytes,
        peak_high_bytes=writer.peak_high_bytes,
        not_modelled=writer.on_cuda.not_modelled if writer.on_cuda is not None else (),
        peak_in=_name_of(writer.peak_task)[0],
        at_peak=tuple(writer.list_held()),
    )


# What is there between steps.


def _list_resident(resident: Resident, tensors: TensorList, plan: Plan, device_kind: str) -> Iterator[tuple[int, int]]:
    """Weights as one storage for each trained tensor, as far as they do not stream; masters of weights below fp32, which are
    made before the first step. The rest of a category as one."""
    left = dict(enumerate(resident.device.tolist()))
    size = plan.weights.bytes_per_element
    streams = plan.weights.place != "device"
    for tensor, block in zip(tensors.sizes, tensors.blocks, strict=True):
        num_bytes = tensor.num_elements * size
        is_here = not (streams and 0 <= block < tensors.num_blocks)
        if is_here and num_bytes <= left[_WEIGHTS]:
            left[_WEIGHTS] -= num_bytes
            yield _WEIGHTS, num_bytes
    if plan.weights.master_bytes_per_element:
        for tensor in tensors.sizes:
            num_bytes = plan.weights.master_bytes_per_element * tensor.num_elements
            if num_bytes <= left[_STATE]:
                left[_STATE] -= num_bytes
                yield _STATE, num_bytes
    # An int8 trip's packer has two buffers, one of them in fp32.
    wide_bytes = _FP32_BYTES * chunk_elements(device_kind) if plan.activations.compress == "int8" else 0
    wide_bytes = min(wide_bytes, left[_TEMPORARIES])
    left[_TEMPORARIES] -= wide_bytes
    for slot, num_bytes in (*left.items(), (_TEMPORARIES, wide_bytes)):
        if slot != _STATE and num_bytes:
            yield slot, num_bytes


class _Moments:
    """Storages that the first update of each tensor makes: little numbers and two moments, or what else the optimizer keeps."""

    def __init__(self, resident: Resident, tensors: TensorList, plan: Plan, kept: KeptState) -> None:
        master_bytes, num_moments = plan.weights.master_bytes_per_element, kept.num_moments
        self.come_in_backward = plan.gradients.choice == "consume"
        self.come_one_by_one = plan.weights.widens_updates or plan.gradients.choice != "keep"
        self._left = int(resident.device[_STATE]) - master_bytes * tensors.total_elements
        self._waiting: dict[int, list[int]] = {}
        """Tensors by the bytes of their gradient, in the order of the update."""
        self._storages: dict[int, list[int]] = {}
        """Bytes of each storage of a tensor's state, by tensor, in that order."""
        sizes = [*(t for t in tensors.sizes if t.is_matrix), *(t for t in tensors.sizes if not t.is_matrix)]
        for index, tensor in enumerate(sizes):
            num_bytes = estimate_state_bytes([tensor], plan, kept=kept) - master_bytes * tensor.num_elements
            little = num_bytes % 8 if kept.counts_steps else 0
            moments = [(num_bytes - little) // num_moments] * num_moments if num_moments else []
            gradient_bytes = tensor.num_elements * plan.weights.bytes_per_element
            self._waiting.setdefault(gradient_bytes, []).append(index)
            self._storages[index] = [little, *moments]

    def come(self, writer: "_Writer", gradient_bytes: int) -> None:
        """Bring the state of the tensor whose gradient goes."""
        waiting = self._waiting.get(gradient_bytes)
        if waiting:
            self._come(writer, waiting.pop(0))

    def come_all(self, writer: "_Writer") -> None:
        """Bring the state that is still to come."""
        for index in list(self._storages):
            self._come(writer, index)
        if self._left > 0:
            writer.come(_STATE, self._left)
            self._left = 0

    def _come(self, writer: "_Writer", index: int) -> None:
        for num_bytes in self._storages.pop(index, ()):
            if 0 < num_bytes <= self._left:
                self._left -= num_bytes
                writer.come(_STATE, num_bytes)


_NO_SLACK = (0, 0)


@dataclass(frozen=True, slots=True)
class _Instruction:
    """One change to the storages."""

    slot: int
    num_bytes: int
    target: int
    """The category that the storage counts as from now on; -1 where it comes or goes."""
    op: str
    storage: int
    """The storage's number, as in ``Move``."""
    slack: tuple[int, int] = _NO_SLACK
    """Bytes fewer and more that it may be, as in ``Move``."""


@dataclass
class _Writer:
    """The storages that are there, and the requests that made and ended them."""

    requests: list[Request] = field(default_factory=list)
    peak_bytes: int = 0
    peak_low_bytes: int = 0
    peak_high_bytes: int = 0
    peak_task: Task | None = None
    moments: _Moments | None = None
    """Moments that come to be as gradients go, in the first step."""
    unmatched_bytes: int = 0
    """Bytes that went without a storage to take them from: 0 where a schedule is consistent."""
    _num_made: int = 0
    _num_loaded: int = 0
    _num_before_run: int = 0
    _total_bytes: int = 0
    _below: int = 0
    _above: int = 0
    """Bytes by which there may be less and more than the total, of what kernels hold."""
    _peak_at: int = 0
    _live: list[dict[int, dict[int, None]]] = field(default_factory=lambda: [{} for _ in CATEGORIES])
    """Storages by category and size, in order of birth."""
    _alive_before: list[int] = field(default_factory=list)
    _births: dict[int, tuple[int, int, Task | None, str]] = field(default_factory=dict)
    """Category, bytes, task and op of what lives and of what came in this phase."""
    _moved: list[tuple[int, int, int]] = field(default_factory=list)
    """Storages that came to count as another category in this phase: after how many requests, which storage, as what."""
    on_cuda: CudaMoves | None = None
    _moves: dict[int, list[Sequence[Move]]] = field(default_factory=dict)
    """Moves by the id of a row of tasks, which the schedule holds; alike blocks have the same."""
    _programs: dict[int, tuple[Sequence[Move], list[_Instruction], bool]] = field(default_factory=dict)

    def begin_phase(self) -> None:
        """A phase."""
        categories = {key: slot for slot, sizes in enumerate(self._live) for keys in sizes.values() for key in keys}
        self._births = {key: (categories[key], *birth[1:]) for key, birth in self._births.items() if key in categories}
        self._alive_before = sorted(categories)
        self._num_loaded = self._num_loaded or self._num_made
        self.requests, self._moved = [], []
        self.peak_bytes, self.peak_task = self._total_bytes, None
        self.peak_low_bytes = self.peak_high_bytes = self._total_bytes
        self._below = self._above = 0
        self._peak_at = 0

    def live_bytes(self, slot: int) -> int:
        """Bytes that are there of one category."""
        return sum(size * len(keys) for size, keys in self._live[slot].items())

    def write_step(self, schedule: Schedule, moments: "_Moments | None") -> None:
        """One step. moments: made by the updates of the first step; None of other steps."""
        self.moments = moments if moments is not None and moments.come_in_backward else None
        self.run(schedule.first.tasks)
        for _ in range(min(schedule.num_later, MAX_LATER)):
            self.run(schedule.later.tasks)
        if schedule.last is not None:
            self.run(schedule.last.tasks)
        self.moments = moments
        if moments is not None and not moments.come_one_by_one:
            moments.come_all(self)
        self.run(schedule.tasks_after_last)
        if moments is not None:
            moments.come_all(self)
        self.moments = None

    def settle(self, stays: dict[int, int]) -> None:
        """Let gradients go at the end of a step, and whatever else is not there between steps."""
        for slot in range(len(CATEGORIES)):
            self.go_down_to(slot, stays.get(slot, 0))

    def run(self, tasks: Sequence[Task]) -> None:
        """One micro-batch, or the update."""
        self._num_before_run = self._num_made
        known_moves = self._moves.get(id(tasks))
        if known_moves is None:
            listed = [list_moves(task) for task in tasks] if self.on_cuda is None else self.on_cuda.list_moves(tasks)
            known_moves = self._moves[id(tasks)] = listed
        for task, moves in zip(tasks, known_moves, strict=True):
            known = self._programs.get(id(moves))
            if known is None:
                program = list(_program(moves))
                known = self._programs[id(moves)] = (moves, program, any(instruction.storage >= 0 for instruction in program))
            born: dict[int, int] = {}
            for instruction in known[1]:
                num_bytes = abs(instruction.num_bytes)
                if instruction.slack != _NO_SLACK:
                    self._shift(instruction)
                if instruction.num_bytes > 0 and instruction.target < 0:
                    key = self.come(instruction.slot, num_bytes, task, instruction.op)
                    if instruction.storage >= 0:
                        born[instruction.storage] = key
                    continue
                found = born.get(instruction.storage)
                if found is None or found not in self._live[instruction.slot].get(num_bytes, ()):
                    newest = min(born.values(), default=self._num_made + 1) - 1 if known[2] else self._num_made
                    found = self._pick(instruction.slot, num_bytes, newest, from_prologue=instruction.storage == FROM_PROLOGUE)
                if instruction.target < 0:
                    self.go(instruction.slot, num_bytes, found)
                elif found is None:
                    self.unmatched_bytes += num_bytes
                else:
                    del self._live[instruction.slot][num_bytes][found]
                    self._live[instruction.target].setdefault(num_bytes, {})[found] = None
                    self._moved.append((len(self.requests), found, instruction.target))

    def _shift(self, instruction: _Instruction) -> None:
        """Account for what kernels may hold less or more: it comes and goes with what they likely hold."""
        below, above = instruction.slack
        sign = 1 if instruction.num_bytes > 0 else -1
        self._below, self._above = self._below + sign * below, self._above + sign * above

    def come(self, slot: int, num_bytes: int, task: Task | None = None, op: str = "") -> int:
        key = self._num_made = self._num_made + 1
        self._live[slot].setdefault(num_bytes, {})[key] = None
        self._births[key] = (slot, num_bytes, task, op)
        self.requests.append((key, num_bytes))
        self._total_bytes += num_bytes
        if self._total_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_at, self.peak_task = self._total_bytes, len(self.requests), task
        if self._total_bytes - self._below > self.peak_low_bytes:
            self.peak_low_bytes = self._total_bytes - self._below
        if self._total_bytes + self._above > self.peak_high_bytes:
            self.peak_high_bytes = self._total_bytes + self._above
        return key

    def go(self, slot: int, num_bytes: int, key: int | None) -> None:
        """Remove a storage. key: None where no storage of that category and size is known to be there."""
        if slot == _GRADIENTS and self.moments is not None:
            self.moments.come(self, num_bytes)
        if key is not None:
            self._end(slot, num_bytes, key)
        else:
            self.go_down_to(slot, self.live_bytes(slot) - num_bytes)

    def go_down_to(self, slot: int, left_bytes: int) -> None:
        """The latest of a category go, as many as it takes; at least ``left_bytes`` stay."""
        too_many = self.live_bytes(slot) - left_bytes
        newest = sorted(((key, size) for size, keys in self._live[slot].items() for key in keys), reverse=True)
        for key, size in newest:
            if size <= too_many:
                too_many -= size
                self._end(slot, size, key)
        self.unmatched_bytes += max(0, too_many)

    def list_held(self) -> Iterator[HeldAllocation]:
        """Storages that were there at this phase's highest point."""
        there = dict.fromkeys(self._alive_before)
        for key, num_bytes in self.requests[: self._peak_at]:
            if num_bytes:
                there[key] = None
            else:
                del there[key]
        moved = {key: slot for at, key, slot in self._moved if at < self._peak_at}
        for key in there:
            slot, num_bytes, task, op = self._births[key]
            slot = moved.get(key, slot)
            made_in, block = _name_of(task)
            yield HeldAllocation(category=CATEGORIES[slot], num_bytes=num_bytes, made_in=made_in, block=block, op=op)

    def _end(self, slot: int, num_bytes: int, key: int) -> None:
        del self._live[slot][num_bytes][key]
        self.requests.append((key, 0))
        self._total_bytes -= num_bytes

    def _pick(self, slot: int, num_bytes: int, newest: int, *, from_prologue: bool) -> int | None:
        """Choose the storage that goes. newest: the number of the last storage that it may be."""
        keys = self._live[slot].get(num_bytes, {})
        if from_prologue:
            return next((key for key in keys if key > self._num_before_run), None)
        if slot == _WEIGHTS:
            return next((key for key in keys if key > self._num_loaded), None)
        return next((key for key in reversed(keys) if key <= newest), None)


def _name_of(task: Task | None) -> tuple[str, int]:
    """Part of the step, and block."""
    return ("between steps", -1) if task is None else (task.name or task.phase, task.block)


def _program(moves: Sequence[Move]) -> Iterator[_Instruction]:
    on_device = [move for move in moves if move.tier == "device" and move.num_bytes]
    index = 0
    while index < len(on_device):
        move = on_device[index]
        after = on_device[index + 1] if index + 1 < len(on_device) else None
        index += 1
        if after is not None and move.num_bytes < 0 and _is_same_storage(move, after):
            yield _Instruction(move.slot, after.num_bytes, after.slot, move.op_name, move.storage)
            index += 1
        else:
            yield _Instruction(move.slot, move.num_bytes, -1, move.op_name, move.storage, move.slack)


def _is_same_storage(gone: Move, come: Move) -> bool:
    """Bytes that go and come again at once in another category are one storage, counted anew."""
    return (
        come.num_bytes == -gone.num_bytes
        and come.op == gone.op
        and come.slot != gone.slot
        and come.storage == gone.storage
    )
