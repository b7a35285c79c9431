"""A schedule's allocations as they are on CUDA: copies keep device memory for longer, kernels hold scratch. Torch-free.

Follows ``runtime/tiers/tiers.py`` and ``runtime/step/activations.py``. What an offloaded block sends away stays
allocated until the offloaded block after the next begins, or the backbone ends: only then compute has been made to wait
for its copy. What comes back is there a block early: as backward enters an offloaded block, that block's and the next
offloaded one's are fetched.

*Not modelled*: compressed trips, whose sources stay as well; up to four gradients on their way to the host.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from optimizer.base.categories import CATEGORIES
from optimizer.base.intervals import ByteInterval
from optimizer.estimate.kernels.cuda_kernels import CudaKernels
from optimizer.estimate.kernels.held import NOTHING, Held, OpCall
from optimizer.estimate.tasks.change import Move
from optimizer.estimate.tasks.tasks import Task, list_moves

MAX_LEAVING = 1
"""Groups beside the current one whose device bytes wait for their copies (``runtime/tiers/tiers.py``)."""
_TEMPORARIES = CATEGORIES.index("temporaries")
_ACTIVATIONS = CATEGORIES.index("activations")
_COPY = "copy."


class CudaMoves:
    """Changes of bytes on a card, the same object for alike tasks, so that each is worked out once."""

    def __init__(self, kernels: CudaKernels, *, num_tokens: int, norm_elements: Sequence[int] = ()) -> None:
        """Prepare for one plan's tasks. num_tokens: of a micro-batch. norm_elements: of each gradient whose norm is
        taken before the update.
        """
        self._kernels = kernels
        self._num_tokens = num_tokens
        self._norm_elements = norm_elements
        self._known: dict[tuple[object, ...], tuple[object, tuple[Move, ...], tuple[ByteInterval, ...]]] = {}
        self._num_ended: dict[int, tuple[Sequence[Move], int]] = {}
        self._held: dict[tuple[int, bool], tuple[OpCall, Held]] = {}
        """By the id of a call, which is held so that its id is not another's, and whether what it saves is kept."""
        self._unknown: dict[str, None] = {}

    @property
    def not_modelled(self) -> tuple[str, ...]:
        """Kernels that were listed and of which no source gives a number."""
        return tuple(self._unknown)

    def list_moves(self, tasks: Sequence[Task]) -> list[Sequence[Move]]:
        """Moves of a micro-batch's tasks, or of the update's, task by task."""
        fetches = {
            task.block: _fetches(list_moves(task)) for task in tasks if task.phase == "backward" and task.block >= 0
        }
        leaving: deque[tuple[Move, ...]] = deque()
        fetched: set[int] = set()
        found: list[Sequence[Move]] = []
        kept: tuple[ByteInterval, ...] = ()
        for task in tasks:
            moves = list_moves(task)
            before: tuple[Move, ...] = ()
            if task.phase == "forward" and task.block < 0 and leaving and task.name != "inputs":
                before = tuple(move for group in leaving for move in group)
                leaving.clear()
            if task.phase == "forward" and (sources := _sources(moves)):
                while len(leaving) > MAX_LEAVING:
                    before += leaving.popleft()
                leaving.append(sources)
            if task.phase == "backward" and fetches.get(task.block):
                ahead = [other.key[1] for other in task.begins if _is_saved(other.key)]  # type: ignore[index]
                for block in (task.block, *ahead):
                    if block not in fetched:
                        before += fetches.get(block, ())
                        fetched.add(block)
            if task.phase == "optimizer" and not found:
                before += tuple(self._norms())
            placed, kept = self._with(moves, before, kept)
            found.append(placed)
        return found

    def _norms(self) -> Iterator[Move]:
        held = self._kernels.hold_norms(self._norm_elements)
        if held.scratch.high:
            yield from _come_and_go(held.scratch, -1, "aten._foreach_norm")

    def _with(
        self, moves: Sequence[Move], before: tuple[Move, ...], kept: tuple[ByteInterval, ...]
    ) -> tuple[tuple[Move, ...], tuple[ByteInterval, ...]]:
        """One task's moves, with what is kept after it. kept: by forward kernels whose backward is to come, the next
        last.
        """
        # Only so much of what is kept as the task may end, so that blocks which are alike share what was worked out.
        at = max(0, len(kept) - self._count_ended(moves))
        key = (id(moves), before, kept[at:])
        known = self._known.get(key)
        if known is None:
            left = list(kept[at:])
            # Held, so that its id is not another's.
            known = self._known[key] = (moves, (*before, *self._work_out(moves, left)), tuple(left))
        return known[1], (*kept[:at], *known[2])

    def _count_ended(self, moves: Sequence[Move]) -> int:
        """At most so many forward kernels' bytes end in a task: one for each backward of attention in it."""
        known = self._num_ended.get(id(moves))
        if known is None:
            ends = {move.op for move in moves if _is_attention(move.op_name) and "backward" in move.op_name}
            known = self._num_ended[id(moves)] = (moves, len(ends))
        return known[1]

    def _work_out(self, moves: Sequence[Move], kept: list[ByteInterval]) -> Iterator[Move]:
        """Work out one task's moves: without what leaves later and was fetched before; with what kernels hold."""
        later = _indices_of_sources(moves)
        early = {move.storage for move in moves if _is_fetch(move)}
        for op, at_op in groupby(enumerate(moves), key=lambda pair: pair[1].op):
            come: list[Move] = []
            gone: list[Move] = []
            for index, move in at_op:
                if index in later or _is_fetch(move):
                    continue
                placed = move._replace(storage=-1) if move.storage in early and move.storage >= 0 else move
                (gone if gone or placed.num_bytes < 0 else come).append(placed)
            yield from come
            yield from self._hold(op, come, gone, kept)
            yield from gone

    def _hold(self, op: int, come: Sequence[Move], gone: Sequence[Move], kept: list[ByteInterval]) -> Iterator[Move]:
        """Yield the bytes that the op's kernel holds, and those that its forward kernel kept until now."""
        first = next(iter((*come, *gone)), None)
        if first is None or first.call is None:
            return
        held = self._look_up(first, come, gone)
        if held.scratch.high:
            yield from _come_and_go(held.scratch, op, first.op_name)
        if not _is_attention(first.op_name):
            return
        if "backward" not in first.op_name:
            if _outlives(come, gone):
                kept.append(held.kept)
                yield from _moves_of(held.kept, op, first.op_name)
        elif kept:
            yield from _moves_of(kept.pop(), op, first.op_name, sign=-1)

    def _look_up(self, first: Move, come: Sequence[Move], gone: Sequence[Move]) -> Held:
        if first.call is None:
            return NOTHING
        is_kept = _is_attention(first.op_name) and _outlives(come, gone)
        known = self._held.get((id(first.call), is_kept))
        if known is not None:
            return known[1]
        held = self._kernels.hold_call(first.call, num_tokens=self._num_tokens, is_kept=is_kept)
        self._held[id(first.call), is_kept] = first.call, held
        if held.certainty == "unknown":
            self._unknown.setdefault(f"{first.op_name} holds memory on a card of which no source gives a number: {held.source}")
        return held


def _is_attention(op_name: str) -> bool:
    return "scaled_dot_product" in op_name


def _outlives(come: Sequence[Move], gone: Sequence[Move]) -> bool:
    """True where a backward follows: what the kernel made for it does not go with the op."""
    made = {move.storage for move in come if move.storage >= 0}
    return not any(move.storage in made for move in gone)


def _come_and_go(held: ByteInterval, op: int, op_name: str) -> Iterator[Move]:
    name = f"{op_name} (scratch)"
    slack = (held.value - held.low, held.high - held.value)
    # What may be there and likely is not takes a byte, so that its moment is looked at.
    num_bytes = max(1, held.value)
    yield Move("device", _TEMPORARIES, num_bytes, op, name, slack=slack)
    yield Move("device", _TEMPORARIES, -num_bytes, op, name, slack=slack)


def _moves_of(kept: ByteInterval, op: int, op_name: str, *, sign: int = 1) -> Iterator[Move]:
    if kept.high:
        slack = (kept.value - kept.low, kept.high - kept.value)
        yield Move("device", _ACTIVATIONS, sign * max(1, kept.value), op, f"{op_name} (kept)", slack=slack)


def _is_saved(key: object) -> bool:
    return isinstance(key, tuple) and key[0] == "saved"


def _is_fetch(move: Move) -> bool:
    return move.tier == "device" and move.num_bytes > 0 and move.op_name.startswith(_COPY)


def _fetches(moves: Iterable[Move]) -> tuple[Move, ...]:
    return tuple(move._replace(storage=-1) for move in moves if _is_fetch(move))


def _sources(moves: Sequence[Move]) -> tuple[Move, ...]:
    return tuple(moves[index]._replace(op=-1, op_name="", storage=-1) for index in sorted(_indices_of_sources(moves)))


def _indices_of_sources(moves: Sequence[Move]) -> set[int]:
    """Places of the device bytes that go in a forward part once they were copied away: for each copy the next of its size."""
    waiting: dict[int, int] = {}
    found: set[int] = set()
    for index, move in enumerate(moves):
        if move.tier != "device" and move.num_bytes > 0:
            waiting[move.num_bytes] = waiting.get(move.num_bytes, 0) + 1
        elif move.tier == "device" and waiting.get(-move.num_bytes):
            waiting[-move.num_bytes] -= 1
            found.add(index)
    return found
