"""The decisions outside the blocks, as nodes of a search: each with a bound that none of its plans can be faster than.

A node is a micro-batch, a representation, a home of gradients, state and weights, and a count of chunks; any share of the state
may leave and any number of blocks may be fetched ahead. No plan of a node is priced to bound it (``relaxed.py``).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from math import isfinite
from typing import Final

from optimizer.estimate.bounds.lower_bounds import Form, Relaxation
from optimizer.search.problem import OuterPlan, Relax
from optimizer.search.solver.grid import all_homes, has_free_fraction, on_host, with_chunks
from optimizer.search.solver.pricebook import PriceBook
from optimizer.search.solver.relaxed import (
    INFINITE_MS,
    at_counts,
    bound_relaxed,
    bound_with_between,
    count_forms,
    with_forms,
    with_host_limit,
)

_ALL: Final = slice(None)


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """The nodes that differ in their count of chunks alone."""

    setting: OuterPlan
    """With one chunk, all of the state away that may be."""
    chunk_counts: tuple[int, ...]
    forms: tuple[Form, ...]
    relaxation: Relaxation
    budget_bytes: int
    enough_ms: Callable[[], float]
    """Bounds that are as high need not be the best: the time of the best plan by now."""

    @cached_property
    def _bounds_ms(self) -> tuple[list[float], list[float]]:
        """By count of chunks, alone and with all counts up to the next."""
        own, between = bound_with_between(self.relaxation, budget_bytes=self.budget_bytes, enough_ms=self.enough_ms())
        return own.tolist(), between.tolist()

    @property
    def bounds_ms(self) -> list[float]:
        """By count of chunks."""
        return self._bounds_ms[0]

    @property
    def floor_ms(self) -> float:
        """The least bound of all nodes, with the counts of chunks between those that are tried."""
        return min(self._bounds_ms[1])

    @cached_property
    def quick_floor_ms(self) -> float:
        """No more than ``floor_ms``, and worked out in a small part of the time."""
        _, between = bound_with_between(self.relaxation, budget_bytes=self.budget_bytes, enough_ms=0.0)
        return float(between.min())

    def least_with(self, num_chunks: int) -> float:
        """With just so many chunks, tried or not."""
        at = bisect_right(self.chunk_counts, num_chunks) - 1
        return self._bounds_ms[num_chunks not in self.chunk_counts][at]

    @cached_property
    def fingerprint(self) -> bytes:
        """The same where plans take the same bytes and times, as far as the bound knows."""
        found = self.relaxation
        arrays = (found.kind_bytes, found.kind_ms, found.last_bytes, found.last_ms, found.fixed_ms, found.state_ms)
        return b"".join([*(array.tobytes() for array in arrays), repr((found.fixed_bytes, found.state_bytes)).encode()])

    def bounds_with(self, *forms: Form, chunks: slice = _ALL) -> list[float]:
        """The bounds on plans whose blocks do nothing else, by count of chunks. chunks: which counts."""
        kept = [index for index, form in enumerate(self.forms) if form in forms]
        found = at_counts(self.relaxation, chunks)
        if not kept:
            return [INFINITE_MS] * len(found.end_bytes)
        narrowed = with_forms(found, kept)
        bounds: list[float] = bound_relaxed(narrowed, budget_bytes=self.budget_bytes, enough_ms=self.enough_ms()).tolist()
        return bounds


@dataclass(frozen=True, kw_only=True)
class Node:
    """One count of chunks at a home."""

    home: NodeGroup
    chunks: int
    """Index among the group's counts."""

    @property
    def setting(self) -> OuterPlan:
        return replace(self.home.setting, num_chunks=self.home.chunk_counts[self.chunks])

    @property
    def likeness(self) -> tuple[int, bytes]:
        """The same for nodes with the same bytes and times."""
        return self.setting.num_chunks, self.home.fingerprint

    @property
    def bound_ms(self) -> float:
        return self.home.bounds_ms[self.chunks]

    def bound_with(self, *forms: Form) -> float:
        """The bound on plans whose blocks do nothing else."""
        return self.home.bounds_with(*forms, chunks=slice(self.chunks, self.chunks + 1))[0]

    def best_share(self, steps: int, most: int) -> int:
        """Steps of the state that leave, one or more, at which the bound is least. It falls to there and rises beyond."""
        found = narrow(self.home.relaxation, list(range(len(self.home.forms))), self.chunks)

        def bound_ms(step: int) -> float:
            return float(bound_relaxed(with_share(found, step / steps), budget_bytes=self.home.budget_bytes)[0])

        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            here_ms, next_ms = bound_ms(middle), bound_ms(middle + 1)
            low, high = (middle + 1, high) if next_ms < here_ms or here_ms == INFINITE_MS else (low, middle)
        return low

    def best_counts(self, setting: OuterPlan, forms: tuple[Form, Form, Form]) -> tuple[int, int] | None:
        """Numbers of blocks that take the first and the last of three forms, the rest the second, where the sums that
        bounds are made of are shortest; blocks of all kinds as one. None where no counts fit."""
        home = self.home
        found = narrow(home.relaxation, [home.forms.index(form) for form in forms], self.chunks)
        if setting.state_place != "device" and found.state_bytes:
            found = with_share(found, setting.state_fraction)
        return count_forms(found, budget_bytes=home.budget_bytes)


def narrow(found: Relaxation, forms: Sequence[int], chunks: int) -> Relaxation:
    """With these forms alone and one count of chunks."""
    return with_forms(at_counts(found, slice(chunks, chunks + 1)), forms)


def with_share(found: Relaxation, share: float) -> Relaxation:
    """With just this share of the state away."""
    return replace(
        found,
        fixed_bytes=found.fixed_bytes - share * found.state_bytes,
        fixed_ms=found.fixed_ms + share * found.state_ms[:, None],
        state_bytes=0.0,
        state_ms=0 * found.state_ms,
    )


class Nodes:
    """The nodes of all bases; a base is looked into when nothing that is known promises more."""

    def __init__(self, book: PriceBook, relax: Relax) -> None:
        self._book, self._relax = book, relax
        self._by_setting: dict[OuterPlan, NodeGroup] = {}
        self._waiting: list[tuple[float, str, OuterPlan | Node]] = []
        self._seen: set[tuple[int, bytes]] = set()
        self._looked_into: set[OuterPlan] = set()
        self._homes: dict[OuterPlan, list[NodeGroup]] = {}
        """By base."""
        for base in book.problem.settings():
            self._wait(relax.base_ms(base), base)

    def in_order(self) -> Iterator[Node]:
        """Those in which something may fit, most promising first; of nodes with the same bytes and times only the first.

        What is not asked for any more still counts in ``floor_ms``.
        """
        while self._waiting:
            _, _, first = heappop(self._waiting)
            if not isinstance(first, Node):
                self._look_into(first)
            elif self._is_first(first):
                yield first

    def in_order_with(self, *forms: Form) -> Iterator[tuple[float, Node]]:
        """The nodes in the order of their bounds on plans whose blocks do nothing else, each with that bound. ``in_order`` yields
        them too, whether they were yielded here or not.
        """
        waiting: list[tuple[float, str, OuterPlan | Node]] = []
        seen: set[tuple[int, bytes]] = set()
        for base in self._book.problem.settings():
            heappush(waiting, (self._relax.base_ms(base), repr(base), base))
        while waiting:
            first_ms, _, first = heappop(waiting)
            if isinstance(first, Node):
                if first.likeness not in seen:
                    seen.add(first.likeness)
                    yield first_ms, first
                continue
            for home in self._list_homes(first):
                for chunks, bound_ms in enumerate(home.bounds_with(*forms)):
                    if isfinite(bound_ms):
                        node = Node(home=home, chunks=chunks)
                        heappush(waiting, (bound_ms, repr(node.setting) + "Node", node))

    def holding(self, settings: Iterable[OuterPlan]) -> Iterator[Node]:
        """The nodes of settings, in their order, as far as something may fit there. ``in_order`` passes over them."""
        bases = {base.base: base for base in self._book.problem.settings()}
        for setting in settings:
            base = bases.get(setting.base)
            if base is None:
                continue
            self._look_into(base)
            home = self._by_setting.get(setting.home)
            if home is None:
                continue
            node = Node(home=home, chunks=bisect_right(home.chunk_counts, setting.num_chunks) - 1)
            if isfinite(node.bound_ms) and self._is_first(node):
                yield node

    def _look_into(self, base: OuterPlan) -> None:
        if base in self._looked_into:
            return
        self._looked_into.add(base)
        for home in self._list_homes(base):
            for chunks, bound_ms in enumerate(home.bounds_ms):
                if isfinite(bound_ms):
                    self._wait(bound_ms, Node(home=home, chunks=chunks))

    def _list_homes(self, base: OuterPlan) -> list[NodeGroup]:
        if base not in self._homes:
            self._homes[base] = list(_homes_of(self._book, base, self._relax))
            self._by_setting.update({home.setting.home: home for home in self._homes[base]})
        return self._homes[base]

    def _is_first(self, node: Node) -> bool:
        """Report whether no node with the same bytes and times was yielded, and take this one for it."""
        is_first = node.likeness not in self._seen
        self._seen.add(node.likeness)
        return is_first

    @property
    def floor_ms(self) -> float:
        """No plan of any base is faster."""
        bases = [
            bound_ms
            for bound_ms, _, waiting in self._waiting
            if isinstance(waiting, OuterPlan) and waiting not in self._homes
        ]
        floor_ms = min(bases, default=INFINITE_MS)
        for home in sorted(self._by_setting.values(), key=lambda home: home.quick_floor_ms):
            if home.quick_floor_ms >= floor_ms:
                break
            floor_ms = min(floor_ms, home.floor_ms)
        return floor_ms

    def least_ms(self, setting: OuterPlan) -> float:
        """No plan with another share of the state or other blocks fetched ahead is faster either; 0 where nothing is known."""
        home = self._by_setting.get(setting.home)
        return 0.0 if home is None else home.least_with(setting.num_chunks)

    def _wait(self, bound_ms: float, waiting: "OuterPlan | Node") -> None:
        setting = waiting if isinstance(waiting, OuterPlan) else waiting.setting
        heappush(self._waiting, (bound_ms, repr(setting) + type(waiting).__name__, waiting))


def _homes_of(book: PriceBook, base: OuterPlan, relax: Relax) -> Iterator[NodeGroup]:
    """A home in a store only where the same on the host has no room."""
    problem = book.problem
    roomy: set[OuterPlan] = set()
    for setting in all_homes(book.problem, base):
        nearer = on_host(setting)
        if nearer != setting and nearer in roomy:
            continue
        counts = tuple(chunked.num_chunks for chunked in with_chunks(book.problem, setting))
        is_free = has_free_fraction(book.problem, setting)
        found = relax.setting(setting, forms=problem.forms, chunk_counts=counts, state_is_free=is_free)
        found = with_host_limit(found, host_budget_bytes=problem.host_budget_bytes)
        if problem.has_room(host_bytes=found.host_bytes, disk_bytes=found.disk_bytes, remote_bytes=found.remote_bytes):
            roomy.add(setting)
        elif not is_free:
            continue
        yield NodeGroup(
            setting=setting,
            chunk_counts=counts,
            forms=problem.forms,
            relaxation=found,
            budget_bytes=problem.goal.device_budget_bytes,
            enough_ms=lambda: book.best_step_ms,
        )
