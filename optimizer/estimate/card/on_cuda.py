"""A schedule's allocations as they are on CUDA: copies keep device memory for longer, kernels hold scratch. Torch-free.

Follows ``runtime/tiers/tiers.py`` and ``runtime/step/activations.py``. What an offloaded block sends away stays
allocated until the offloaded block after the next begins, or the backbone ends: only then compute has been told to wait
for its copy. What comes back is there a block early: as backward enters an offloaded block, that block's and the next
offloaded one's are fetched.

*Not modelled*: compressed trips, whose sources stay as well; up to four gradients on their way to the host.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.card.kernel_scratch import scratch_bytes
from optimizer.estimate.tasks.change import Move
from optimizer.estimate.tasks.tasks import Task, list_moves

MAX_LEAVING = 1
"""Groups beside the current one whose device bytes wait for their copies (``runtime/tiers/tiers.py``)."""
_TEMPORARIES = CATEGORIES.index("temporaries")
_COPY = "copy."


class CudaMoves:
    """The same object for alike tasks, so that each is worked out once."""

    def __init__(self, *, element_bytes: int, num_tokens: int) -> None:
        """element_bytes: of what is computed in. num_tokens: of a micro-batch."""
        self._element_bytes = element_bytes
        self._num_tokens = num_tokens
        self._known: dict[tuple[object, ...], tuple[object, tuple[Move, ...]]] = {}

    def list_moves(self, tasks: Sequence[Task]) -> list[Sequence[Move]]:
        """Of a micro-batch's tasks, or of the update's, task by task."""
        fetches = {
            task.block: _fetches(list_moves(task)) for task in tasks if task.phase == "backward" and task.block >= 0
        }
        leaving: deque[tuple[Move, ...]] = deque()
        fetched: set[int] = set()
        found: list[Sequence[Move]] = []
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
            found.append(self._with(moves, before))
        return found

    def _with(self, moves: Sequence[Move], before: tuple[Move, ...]) -> tuple[Move, ...]:
        key = (id(moves), before)
        known = self._known.get(key)
        if known is None:
            # Held, so that its id is not another's.
            known = self._known[key] = (moves, (*before, *self._work_out(moves)))
        return known[1]

    def _work_out(self, moves: Sequence[Move]) -> Iterator[Move]:
        """Without what leaves later and was fetched before; with scratch."""
        later = _indices_of_sources(moves)
        early = {move.storage for move in moves if _is_fetch(move)}
        for op, at_op in groupby(enumerate(moves), key=lambda pair: pair[1].op):
            come: list[Move] = []
            gone: list[Move] = []
            for index, move in at_op:
                if index in later or _is_fetch(move):
                    continue
                kept = move._replace(storage=-1) if move.storage in early and move.storage >= 0 else move
                (gone if gone or kept.num_bytes < 0 else come).append(kept)
            yield from come
            results = [move.num_bytes for move in come if move.tier == "device"]
            name = come[0].op_name if come else ""
            extra = scratch_bytes(name, results, element_bytes=self._element_bytes, num_tokens=self._num_tokens)
            if extra:
                yield Move("device", _TEMPORARIES, extra, op, f"{name} (scratch)")
                yield Move("device", _TEMPORARIES, -extra, op, f"{name} (scratch)")
            yield from gone


def _is_saved(key: object) -> bool:
    return isinstance(key, tuple) and key[0] == "saved"


def _is_fetch(move: Move) -> bool:
    return move.tier == "device" and move.num_bytes > 0 and move.op_name.startswith(_COPY)


def _fetches(moves: Iterable[Move]) -> tuple[Move, ...]:
    return tuple(move._replace(storage=-1) for move in moves if _is_fetch(move))


def _sources(moves: Sequence[Move]) -> tuple[Move, ...]:
    return tuple(moves[index]._replace(op=-1, op_name="", storage=-1) for index in sorted(_indices_of_sources(moves)))


def _indices_of_sources(moves: Sequence[Move]) -> set[int]:
    """Of the device bytes that go in a forward part once they were copied away: for each copy the next of its size."""
    waiting: dict[int, int] = {}
    found: set[int] = set()
    for index, move in enumerate(moves):
        if move.tier != "device" and move.num_bytes > 0:
            waiting[move.num_bytes] = waiting.get(move.num_bytes, 0) + 1
        elif move.tier == "device" and waiting.get(-move.num_bytes):
            waiting[-move.num_bytes] -= 1
            found.add(index)
    return found
