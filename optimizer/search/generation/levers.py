"""The levers of a generation's plan, one after the other: the one list that a new field of the plan joins.

Every plan is plain generation (fp32, everything on the device) with one choice of each lever, a batch size, and a number of
micro-batches to a pass. These two are no levers here: plans that differ in nothing else are one family, bounded all at once.

What a goal pins has no other choice, and may be what no lever would choose. Where it is one of a lever's own choices, the plans
that are left are some of those that a goal without pins has, so none of them is better than the best of these.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, get_args

from optimizer.formats.kv_prefix import SHORTEST_PREFIX
from optimizer.goal import GenerationObjective
from optimizer.plan.allocator import AllocatorPlan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import AttentionPlace, KvCachePlan, KvDtype, KvPlace
from optimizer.plan.weights import FrozenFormat, WeightsDtype, WeightsPlace
from optimizer.search.generation.problem import GenerationProblem

_PREFETCHES = (0, 1, 2, 4, 8)
"""Blocks whose weights come ahead. What is between them is hardly ever better than both neighbours."""
_NOTHING_AHEAD = (0,)
"""The only prefetch depth where more would gain nothing."""
MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32)
"""To a pass."""
_MAX_PREFETCH_SHARED = 2
"""Deepest prefetch where several micro-batches run over a block's weights, which leaves more time for the next ones to come."""
_PREFILL_TOKENS = (8, 2)
"""Tokens of a prompt at once: fewer where room for activations is short."""
_CACHE_PREFETCHES = (0, 1)
"""Blocks whose keys and values come ahead; more gains nothing that one does not."""


@dataclass(frozen=True, kw_only=True)
class Lever:
    """One thing that can be decided."""

    name: str
    choices: Callable[[GenerationProblem, GenerationPlan], Iterable[GenerationPlan]]
    """The plan with each of them that is not pinned otherwise; the plan as it is comes first where it may stay so."""
    knob: str = ""
    """The decision that it makes; some objectives leave it alone unless that is pinned."""
    objectives: tuple[GenerationObjective, ...] = get_args(GenerationObjective)
    """Objectives that it can serve."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A choice of each lever: plans that differ in their batch and in how many micro-batches share a pass."""

    plan: GenerationPlan
    """The plan of one sequence at a time, unless pins say otherwise."""
    micro_batches: tuple[int, ...]
    """Ascending; 1 is among them, or it is the pinned number."""

    def list_plans(self) -> Iterator[GenerationPlan]:
        for number in self.micro_batches:
            yield self.plan if number == self.plan.num_micro_batches else replace(self.plan, num_micro_batches=number)


def list_families(problem: GenerationProblem) -> list[Family]:
    """All that the goal, machine and profile allow, plain generation first, the disk and then the remote store last."""
    pins = problem.goal.pins
    found = [_plain(problem)]
    for lever in LEVERS:
        if problem.goal.objective in lever.objectives or lever.knob in pins.held:
            # What one lever makes impossible is not combined with the others.
            found = [plan for before in found for plan in lever.choices(problem, before) if problem.permits_techniques(plan)]
    kept = [plan for plan in found if pins.broken_by(plan) is None] if pins.held else found
    kept.sort(key=_is_far)
    families = [Family(plan=plan, micro_batches=_list_micro_batches(problem, plan)) for plan in kept]
    return [family for family in families if family.micro_batches]


def list_arrangements(problem: GenerationProblem) -> list[GenerationPlan]:
    """The same one by one, each of one sequence in a micro-batch, or of as many as are pinned."""
    return [plan for family in list_families(problem) for plan in family.list_plans() if problem.permits(plan)]


def _is_far(plan: GenerationPlan) -> tuple[bool, bool]:
    places = (plan.weights.place, plan.kv_cache.place)
    return "remote" in places, "disk" in places


def _plain(problem: GenerationProblem) -> GenerationPlan:
    """Plain generation, and what is pinned that is no lever."""
    pins = problem.goal.pins
    return GenerationPlan(
        batch_size=pins.batch_size or 1,
        num_micro_batches=pins.num_micro_batches or 1,
        allocator=AllocatorPlan(expandable_segments=bool(pins.allocator.expandable_segments)),
    )


def _representations(problem: GenerationProblem, plan: GenerationPlan) -> Iterator[GenerationPlan]:
    """Each dtype with each way of holding the blocks' matrices."""
    among = problem.goal.pins.among
    for frozen in among("weights.frozen", get_args(FrozenFormat)):
        for dtype in among("weights.dtype", get_args(WeightsDtype)):
            yield replace(plan, weights=replace(plan.weights, dtype=dtype, frozen=frozen))


def _places(problem: GenerationProblem, plan: GenerationPlan) -> Iterator[GenerationPlan]:
    """Places of the blocks' weights, and how many come ahead of their use."""
    among = problem.goal.pins.among
    for place in among("weights.place", get_args(WeightsPlace)):
        if place == "device":
            yield plan
            continue
        for prefetch in among("weights.prefetch", _PREFETCHES if problem.has_copies_beside else _NOTHING_AHEAD):
            yield replace(plan, weights=replace(plan.weights, place=place, prefetch=prefetch))


def _list_micro_batches(problem: GenerationProblem, plan: GenerationPlan) -> tuple[int, ...]:
    """Numbers of micro-batches that share a pass; with resident weights nothing is saved."""
    weights, pins = plan.weights, problem.goal.pins
    streams = weights.place != "device"
    is_shared = streams and weights.prefetch <= _MAX_PREFETCH_SHARED
    options = MICRO_BATCHES if is_shared and problem.goal.objective == "throughput" else MICRO_BATCHES[:1]
    found = pins.among("num_micro_batches", options)
    is_held = "weights.prefetch" in pins.held or not streams
    return found if is_shared or is_held or found == MICRO_BATCHES[:1] else ()


def _prefills(problem: GenerationProblem, plan: GenerationPlan) -> Iterator[GenerationPlan]:
    """Tokens of a prompt that run at once: less makes room for more sequences, which is worth most where each step costs a pass
    over weights that come, and is all that counts where the largest batch is looked for.
    """
    workload = problem.workload
    shortest = min(workload.prompt_lengths or (workload.prompt_length,)) if problem.can_cut_prompts else 1
    is_worth_it = plan.weights.place != "device" or problem.goal.objective == "largest_batch"
    fewer = tuple(tokens for tokens in _PREFILL_TOKENS if tokens < shortest and is_worth_it)
    for tokens in problem.goal.pins.among("prefill_tokens", (None, *fewer)):
        yield plan if tokens is None else replace(plan, prefill_tokens=tokens)


def _caches(problem: GenerationProblem, plan: GenerationPlan) -> Iterator[GenerationPlan]:
    """Representations and places of keys and values, and where attention is computed."""
    among = problem.goal.pins.among
    dtypes, places = among("kv_cache.dtype", get_args(KvDtype)), among("kv_cache.place", get_args(KvPlace))
    attentions = among("kv_cache.attention", get_args(AttentionPlace))
    if "device" in attentions:
        for place, dtype in product(places, dtypes):
            for prefetch in _cache_prefetches(problem, plan) if place != "device" else (KvCachePlan().prefetch,):
                yield replace(plan, kv_cache=KvCachePlan(place=place, dtype=dtype, prefetch=prefetch))
    if "host" in attentions and "host" in places and "same" in dtypes:
        yield replace(plan, kv_cache=KvCachePlan(place="host", prefetch=0, attention="host"))


def _cache_prefetches(problem: GenerationProblem, plan: GenerationPlan) -> tuple[int, ...]:
    """They come as far ahead as weights that come do: what has to wait for one of the two would wait for the other as well."""
    pins = problem.goal.pins
    options = pins.among("kv_cache.prefetch", _CACHE_PREFETCHES if problem.has_copies_beside else _NOTHING_AHEAD)
    if plan.weights.place == "device" or not problem.has_copies_beside:
        return options
    alike = tuple(ahead for ahead in options if ahead == plan.weights.prefetch or ahead not in _CACHE_PREFETCHES)
    # Unless both are held so that they cannot.
    return alike or (options if {"weights.prefetch", "kv_cache.place"} <= pins.held.keys() else ())


def _prefixes(problem: GenerationProblem, plan: GenerationPlan) -> Iterator[GenerationPlan]:
    """Make keys and values of prompts' first tokens again, of as many tokens as may be: how many are best depends on
    the batch, and is found with its bounds (``Floors.prefix_tokens``). With little of a prompt at once there are few such tokens.
    """
    cache, pins = plan.kv_cache, problem.goal.pins
    is_moved = cache.place != "device" and cache.dtype == "same" and cache.attention == "device"
    is_tried = is_moved and (plan.prefill_tokens is None or "prefill_tokens" in pins.held)
    options = (0, problem.longest_prefix) if problem.longest_prefix else (0,)
    for num_tokens in pins.among("kv_cache.prefix_tokens", options):
        if not num_tokens:
            yield plan
        elif is_tried and num_tokens >= SHORTEST_PREFIX:
            yield replace(plan, kv_cache=replace(cache, prefix_tokens=num_tokens))


_BY_ROOM: Final[tuple[GenerationObjective, ...]] = ("throughput", "largest_batch")
"""A first token comes soonest of a prompt that runs whole."""
LEVERS: Final = (
    Lever(name="representation of the weights", choices=_representations),
    Lever(name="place of the weights", choices=_places),
    Lever(name="tokens of a prompt at once", choices=_prefills, knob="prefill_tokens", objectives=_BY_ROOM),
    Lever(name="keys and values", choices=_caches),
    Lever(name="keys and values made again", choices=_prefixes, knob="kv_cache.prefix_tokens", objectives=("throughput",)),
)
"""In the order in which they are tried; each finds the plan as the ones before it left it."""
