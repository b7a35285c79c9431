"""What can be done to a generation's plan, one lever after the other: the one list that a new field of the plan joins.

Every plan is plain generation (fp32, everything on the device) with one choice of each lever, and a batch size. The batch is no
lever here: ``solve.py`` bisects it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Final, get_args

from optimizer.plan.inference import InferencePlan
from optimizer.plan.kv_cache import KvCachePlan, KvDtype, KvPlace
from optimizer.plan.weights import FrozenFormat, WeightsDtype
from optimizer.search.inference.problem import InferenceProblem
from optimizer.workload import InferenceObjective

_PREFETCHES = (0, 1, 2, 4, 8)
"""Blocks whose weights come ahead. What is between them is hardly ever better than both neighbours."""
_MICRO_BATCHES = (2, 4, 8, 16, 32)
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
    only_slows: bool
    """Whether no choice makes a micro-batch faster than its first choice and those of all other such levers do: what they bring
    is room, or a smaller price of what that costs."""
    objectives: tuple[InferenceObjective, ...] = get_args(InferenceObjective)
    """What it can be good for; it is left alone for others."""


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """A choice of each lever."""

    plan: InferencePlan
    """Of one sequence at a time."""
    fastest: InferencePlan
    """The same with the first choice of each lever that only slows: at the same batch it is at least as fast."""


def list_arrangements(problem: InferenceProblem) -> list[Arrangement]:
    """All that the goal, machine and profile allow, in the order in which ``solve.py`` looks at them."""
    found = [Arrangement(plan=InferencePlan(), fastest=InferencePlan())]
    for lever in LEVERS:
        if problem.goal.objective in lever.objectives:
            found = list(_pull(lever, found))
    found.sort(key=_turn)
    shortest = min(problem.workload.prompt_lengths or (problem.workload.prompt_length,)) if problem.can_cut_prompts else 1
    return [
        arrangement
        for arrangement in found
        if (arrangement.plan.prefill_tokens or 0) < shortest
        and (problem.has_copies_beside or not _comes_ahead(arrangement.plan)) and problem.permits(arrangement.plan)
    ]


def _turn(arrangement: Arrangement) -> tuple[bool, bool, int, float]:
    """Those that are their own fastest first, plain generation before all; then what leaves most room for sequences, which is
    mostly what wins where plain generation has none; the disk last.
    """
    plan = arrangement.plan
    return plan != arrangement.fastest, uses_disk(plan), -plan.num_micro_batches, plan.prefill_tokens or inf


def uses_disk(plan: InferencePlan) -> bool:
    return "disk" in (plan.weights.place, plan.kv_cache.place)


def from_host(plan: InferencePlan) -> InferencePlan:
    """The same with the host in place of the disk."""
    weights, cache = plan.weights, plan.kv_cache
    if weights.place == "disk":
        weights = replace(weights, place="host")
    if cache.place == "disk":
        cache = replace(cache, place="host")
    return replace(plan, weights=weights, kv_cache=cache)


def _comes_ahead(plan: InferencePlan) -> bool:
    return any(part.place != "device" and part.prefetch > 0 for part in (plan.weights, plan.kv_cache))


def _pull(lever: Lever, arrangements: Iterable[Arrangement]) -> Iterator[Arrangement]:
    for before in arrangements:
        if lever.only_slows:
            yield from (Arrangement(plan=plan, fastest=before.fastest) for plan in lever.choices(before.plan))
            continue
        for plan, fastest in zip(lever.choices(before.plan), lever.choices(before.fastest), strict=True):
            yield Arrangement(plan=plan, fastest=fastest)


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


def _micro_batches(plan: InferencePlan) -> Iterator[InferencePlan]:
    """How many micro-batches share a pass: of weights that are there anyway, nothing is saved."""
    yield plan
    if plan.weights.place != "device" and plan.weights.prefetch <= _MAX_PREFETCH_SHARED:
        for number in _MICRO_BATCHES:
            yield replace(plan, num_micro_batches=number)


def _prefills(plan: InferencePlan) -> Iterator[InferencePlan]:
    """How much of a prompt runs at once: less makes room for more sequences, which is worth most where each step costs a pass
    over weights that come.
    """
    yield plan
    if plan.weights.place != "device":
        for tokens in _PREFILL_TOKENS:
            yield replace(plan, prefill_tokens=tokens)


def _caches(plan: InferencePlan) -> Iterator[InferencePlan]:
    """How keys and values are held, and where. They come as far ahead as weights that come do: what has to wait for one of the
    two would wait for the other as well.
    """
    yield plan
    ahead = _CACHE_PREFETCHES if plan.weights.place == "device" else (plan.weights.prefetch,)
    for place, dtype in product(get_args(KvPlace), get_args(KvDtype)):
        for prefetch in ahead if place != "device" else (KvCachePlan().prefetch,):
            cache = KvCachePlan(place=place, dtype=dtype, prefetch=prefetch)
            if not cache.is_plain and prefetch in _CACHE_PREFETCHES:
                yield replace(plan, kv_cache=cache)


LEVERS: Final = (
    Lever(name="representation of the weights", choices=_representations, only_slows=False),
    Lever(name="place of the weights", choices=_places, only_slows=True),
    Lever(name="micro-batches to a pass", choices=_micro_batches, only_slows=True, objectives=("throughput",)),
    Lever(name="tokens of a prompt at once", choices=_prefills, only_slows=True, objectives=("throughput",)),
    Lever(name="keys and values", choices=_caches, only_slows=True),
)
