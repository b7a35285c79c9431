"""What can be done to a generation's plan, one lever after the other: the one list that a new field of the plan joins.

Every plan is plain generation (fp32, everything on the device) with one choice of each lever, a batch size, and a number of
micro-batches to a pass. These two are no levers here: plans that differ in nothing else are one family, bounded all at once.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, get_args

from optimizer.kv_prefix import SHORTEST_PREFIX
from optimizer.plan.inference import InferencePlan
from optimizer.plan.kv_cache import KvCachePlan, KvDtype, KvPlace
from optimizer.plan.weights import FrozenFormat, WeightsDtype
from optimizer.search.inference.problem import InferenceProblem
from optimizer.workload import InferenceObjective

_PREFETCHES = (0, 1, 2, 4, 8)
"""Blocks whose weights come ahead. What is between them is hardly ever better than both neighbours."""
MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32)
"""To a pass."""
_MAX_PREFETCH_SHARED = 2
"""Where several micro-batches run while a block's weights are there, there is more time for the next ones to come."""
_PREFILL_TOKENS = (8, 2)
"""Of a prompt at once: fewer as often as room for activations is short."""
_CACHE_PREFETCHES = (0, 1)
"""Blocks whose keys and values come ahead; more gains nothing that one does not."""


@dataclass(frozen=True, kw_only=True)
class Lever:
    """One thing that can be decided."""

    name: str
    choices: Callable[[InferencePlan], Iterable[InferencePlan]]
    """The plan with each of them; the plan as it is comes first."""
    objectives: tuple[InferenceObjective, ...] = get_args(InferenceObjective)
    """What it can be good for; it is left alone for others."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A choice of each lever: plans that differ in their batch and in how many micro-batches share a pass."""

    plan: InferencePlan
    """Of one sequence at a time."""
    micro_batches: tuple[int, ...]
    """Ascending; 1 is among them."""

    def list_plans(self) -> Iterator[InferencePlan]:
        for number in self.micro_batches:
            yield self.plan if number == 1 else replace(self.plan, num_micro_batches=number)


def list_families(problem: InferenceProblem) -> list[Family]:
    """All that the goal, machine and profile allow, plain generation first, the disk and then the remote store last."""
    shortest = min(problem.workload.prompt_lengths or (problem.workload.prompt_length,)) if problem.can_cut_prompts else 1

    def is_allowed(plan: InferencePlan) -> bool:
        return (
            (plan.prefill_tokens or 0) < shortest
            and (problem.has_copies_beside or not _comes_ahead(plan))
            and problem.permits(plan)
        )

    found = [InferencePlan()]
    for lever in (*LEVERS, _prefix_lever(problem)):
        if problem.goal.objective in lever.objectives:
            # What one lever makes impossible is not combined with the others.
            found = [plan for before in found for plan in lever.choices(before) if is_allowed(plan)]
    found.sort(key=_is_far)
    return [Family(plan=plan, micro_batches=_list_micro_batches(problem, plan)) for plan in found]


def list_arrangements(problem: InferenceProblem) -> list[InferencePlan]:
    """The same one by one, each of one sequence in a micro-batch."""
    return [plan for family in list_families(problem) for plan in family.list_plans() if problem.permits(plan)]


def _is_far(plan: InferencePlan) -> tuple[bool, bool]:
    places = (plan.weights.place, plan.kv_cache.place)
    return "remote" in places, "disk" in places


def _comes_ahead(plan: InferencePlan) -> bool:
    return any(part.place != "device" and part.prefetch > 0 for part in (plan.weights, plan.kv_cache))


def _representations(plan: InferencePlan) -> Iterator[InferencePlan]:
    """Each dtype with each way of holding the blocks' matrices."""
    for frozen in get_args(FrozenFormat):
        for dtype in get_args(WeightsDtype):
            yield replace(plan, weights=replace(plan.weights, dtype=dtype, frozen=frozen))


def _places(plan: InferencePlan) -> Iterator[InferencePlan]:
    """Where the blocks' weights live, and how many come ahead of their use."""
    yield plan
    for place in ("host", "disk"):
        for prefetch in _PREFETCHES:
            yield replace(plan, weights=replace(plan.weights, place=place, prefetch=prefetch))


def _list_micro_batches(problem: InferenceProblem, plan: InferencePlan) -> tuple[int, ...]:
    """How many may share a pass: of weights that are there anyway, nothing is saved."""
    weights = plan.weights
    is_shared = weights.place != "device" and weights.prefetch <= _MAX_PREFETCH_SHARED
    return MICRO_BATCHES if is_shared and problem.goal.objective == "throughput" else MICRO_BATCHES[:1]


def _prefills(plan: InferencePlan) -> Iterator[InferencePlan]:
    """How much of a prompt runs at once: less makes room for more sequences, which is worth most where each step costs a pass
    over weights that come.
    """
    yield plan
    if plan.weights.place != "device":
        for tokens in _PREFILL_TOKENS:
            yield replace(plan, prefill_tokens=tokens)


def _caches(plan: InferencePlan) -> Iterator[InferencePlan]:
    """How keys and values are held, and where, and where attention is computed. They come as far ahead as weights that come do:
    what has to wait for one of the two would wait for the other as well.
    """
    yield plan
    ahead = _CACHE_PREFETCHES if plan.weights.place == "device" else (plan.weights.prefetch,)
    for place, dtype in product(get_args(KvPlace), get_args(KvDtype)):
        for prefetch in ahead if place != "device" else (KvCachePlan().prefetch,):
            cache = KvCachePlan(place=place, dtype=dtype, prefetch=prefetch)
            if not cache.is_plain and prefetch in _CACHE_PREFETCHES:
                yield replace(plan, kv_cache=cache)
    yield replace(plan, kv_cache=KvCachePlan(place="host", prefetch=0, attention="host"))


def _prefix_lever(problem: InferenceProblem) -> Lever:
    """Whether keys and values of prompts' first tokens are made again, of as many tokens as may be: how many are best depends on
    the batch, and is found with its bounds (``Floors.prefix_tokens``). With little of a prompt at once there are few such tokens.
    """

    def choices(plan: InferencePlan) -> Iterator[InferencePlan]:
        yield plan
        cache = plan.kv_cache
        is_moved = cache.place != "device" and cache.dtype == "same" and cache.attention == "device"
        if is_moved and plan.prefill_tokens is None and problem.longest_prefix >= SHORTEST_PREFIX:
            yield replace(plan, kv_cache=replace(cache, prefix_tokens=problem.longest_prefix))

    return Lever(name="keys and values made again", choices=choices, objectives=("throughput",))


LEVERS: Final = (
    Lever(name="representation of the weights", choices=_representations),
    Lever(name="place of the weights", choices=_places),
    Lever(name="tokens of a prompt at once", choices=_prefills, objectives=("throughput",)),
    Lever(name="keys and values", choices=_caches),
)
