"""The choices outside the blocks, before anything is priced: the homes that are permitted, and of decisions with many values
those that a search takes (counts of chunks, shares of the state, blocks that are fetched ahead)."""

from dataclasses import replace
from typing import Final, get_args

from optimizer.plan.gradients import GradientsChoice
from optimizer.plan.logits_and_loss import MAX_CHUNKS
from optimizer.plan.optimizer_state import StatePlace
from optimizer.plan.weights import WeightsPlace
from optimizer.search.problem import OuterPlan, SearchProblem

TOKENS_PER_CHUNK: Final = (1024, 256, 64)
"""Rows of logits that exist at once, in the counts of chunks that are tried first: few enough to be small beside a model, and
few enough to be small at all."""
MAX_PREFETCH: Final = 3
FRACTION_STEPS: Final = {"shallow": 16, "deep": 64}
"""Shares of the state that leave the device are multiples of one over this. Few tensors make no finer shares."""
MAX_SHALLOW_BLOCKS: Final = 8
PREFETCHES: Final = (2, 1, 0)
"""Blocks fetched ahead that are tried first; larger numbers when a plan is polished."""


def chunk_counts(base: OuterPlan, *, tokens: int) -> tuple[int, ...]:
    """One, and those that leave TOKENS_PER_CHUNK tokens in a chunk. tokens: of a sequence."""
    total = base.micro_batch_size * tokens
    counts = {min(MAX_CHUNKS, -(-total // size)) for size in TOKENS_PER_CHUNK}
    return tuple(sorted({1, *counts}))


def fraction_steps(num_blocks: int) -> int:
    return FRACTION_STEPS["shallow" if num_blocks <= MAX_SHALLOW_BLOCKS else "deep"]


def all_homes(problem: SearchProblem, base: OuterPlan) -> list[OuterPlan]:
    """The base with each home that the goal and the machine permit, from weakest to strongest, whether or not there is room."""
    homes = (
        replace(base, gradients=gradients, state_place=state, weights_place=weights)
        for gradients, state, weights in _HOMES
    )
    return [home for home in homes if problem.permits_setting(home)]


def on_host(setting: OuterPlan) -> OuterPlan:
    """The same with what it puts in a store on the host."""
    return replace(
        setting,
        state_place="host" if setting.state_place in ("disk", "remote") else setting.state_place,
        weights_place="host" if setting.weights_place in ("disk", "remote") else setting.weights_place,
    )


def with_chunks(problem: SearchProblem, setting: OuterPlan) -> list[OuterPlan]:
    """The setting with one chunk and with more, where that is allowed."""
    if not problem.allows("chunked_loss") or "num_chunks" in problem.pinned_levers:
        return [setting]
    counts = chunk_counts(setting, tokens=problem.workload.sequence_length)
    return [replace(setting, num_chunks=count) for count in counts]


def with_prefetch(problem: SearchProblem, setting: OuterPlan) -> list[OuterPlan]:
    if not setting.brings_weights or "prefetch" in problem.pinned_levers:
        return [setting]
    return [replace(setting, prefetch=prefetch) for prefetch in PREFETCHES]


def has_free_fraction(problem: SearchProblem, setting: OuterPlan) -> bool:
    """True where a part of the state may stay on the device."""
    is_pinned = "state_fraction" in problem.pinned_levers
    return setting.state_place != "device" and setting.weights_place == "device" and not is_pinned


def _strength(home: tuple[GradientsChoice, StatePlace, WeightsPlace]) -> tuple[int, int, int]:
    gradients, state, weights = home
    order = ("device", "host", "disk", "remote")
    return order.index(weights), order.index(state), ("keep", "consume", "host").index(gradients)


_HOMES: Final = tuple(
    sorted(
        (
            (gradients, state, weights)
            for gradients in get_args(GradientsChoice)
            for state in get_args(StatePlace)
            for weights in get_args(WeightsPlace)
        ),
        key=_strength,
    )
)
"""All that can be written down; most contradict themselves or the workload."""
