"""The best plan of a generation whose model is cut over so many devices: in which form, how many sequences at once, and where.

Weights, and keys and values as they are, stay on the devices, so few decisions are left. In each form of the weights as many
micro-batches as there are stages, and multiples of that, are tried, each with the largest batch that fits and with the sequences
spread evenly over as many passes; then blocks move from the busiest stage to the least busy, or from the fullest to the emptiest,
as long as that is better. What is found is no proven optimum; the bound says how far from it it can be.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.generation import GenerationPlan
from optimizer.search.check.card_fit import ACCEPTED
from optimizer.search.generation.levers import list_families
from optimizer.search.generation.problem import GenerationProblem, PricedGenerationPlan

_WAVES: Final = (1, 2, 4)
"""Micro-batches on their way at once, by stage."""
_REFINED: Final = 2
"""Forms of the weights for which other cuts are tried."""
_MAX_MOVES: Final = 12
Value = tuple[float, ...]


def list_resident(problem: GenerationProblem) -> list[GenerationPlan]:
    """Plans of one sequence at a time with all on the device, in each form of the weights that is allowed."""
    plans = (family.plan for family in list_families(problem))
    found = [plan for plan in plans if plan.weights.place == "device" and plan.kv_cache.is_plain]
    return [replace(plan, num_micro_batches=1) for plan in found if plan.prefill_tokens is None] or found


def find_cut(problem: GenerationProblem, *, num_blocks: int, num_devices: int) -> PricedGenerationPlan | None:
    """None where nothing fits, or where the model has fewer blocks."""
    if num_devices > num_blocks:
        return None
    even = split_evenly(num_blocks, num_devices)
    found: list[tuple[Value, GenerationPlan]] = []
    for plan in list_resident(problem):
        best = _best_batch(problem, replace(plan, layout=GenerationLayout(stage_blocks=even)))
        if best is not None:
            found.append((value_of_devices(problem, best, problem.price(best)), best))
    found.sort(key=lambda each: each[0])
    moved = [_move_blocks(problem, plan) for _, plan in found[:_REFINED]]
    for plan in sorted(moved, key=lambda plan: value_of_devices(problem, plan, problem.price(plan))):
        priced = _with_room(problem, plan)
        if priced is not None:
            return priced
    return None


def split_evenly(num_blocks: int, num_devices: int) -> tuple[int, ...]:
    """Blocks by stage; the first, which have the embeddings and not the head, have those that are left over."""
    least, rest = divmod(num_blocks, num_devices)
    return tuple(least + (stage < rest) for stage in range(num_devices))


def value_of_devices(problem: GenerationProblem, plan: GenerationPlan, prediction: GenerationPrediction) -> Value:
    """Smaller is better, whatever the layouts."""
    rest = prediction.total_s, float(prediction.device_peak_high_bytes)
    if problem.goal.objective == "first_token":
        return prediction.prefill_ms, *rest
    if problem.goal.objective == "largest_batch":
        return -float(plan.sequences_per_pass * plan.layout.num_replicas), *rest
    return rest


def _best_batch(problem: GenerationProblem, plan: GenerationPlan) -> GenerationPlan | None:
    """With the best number of micro-batches, and the best batch for it."""
    best: tuple[Value, GenerationPlan] | None = None
    for tried in _list_batches(problem, plan):
        prediction = problem.price(tried)
        if problem.fits(prediction):
            value = value_of_devices(problem, tried, prediction)
            if best is None or value < best[0]:
                best = value, tried
    return None if best is None else best[1]


def _list_batches(problem: GenerationProblem, plan: GenerationPlan) -> Iterator[GenerationPlan]:
    num_sequences, pins = problem.workload.num_sequences, problem.goal.pins
    num_stages = plan.layout.num_devices
    waves = pins.among("num_micro_batches", (*dict.fromkeys((1, *(num_stages * times for times in _WAVES))),))
    for number in waves:
        least = replace(plan, num_micro_batches=number, batch_size=pins.batch_size or 1)
        if not problem.permits(least):
            continue
        if pins.batch_size is not None:
            yield least
            continue
        largest = _largest_batch(problem, least, -(-num_sequences // number))
        if largest:
            yield replace(least, batch_size=largest)
            num_passes = -(-num_sequences // (largest * number))
            spread = -(-num_sequences // (num_passes * number))
            if spread < largest and problem.permits(replace(least, batch_size=spread)):
                yield replace(least, batch_size=spread)


def _largest_batch(problem: GenerationProblem, plan: GenerationPlan, most: int) -> int:
    """The most sequences in a micro-batch that fit; 0 where one does not."""

    def fits(size: int) -> bool:
        sized = replace(plan, batch_size=size)
        # Fewer, larger micro-batches may leave the last one empty.
        return problem.permits(sized) and problem.fits(problem.price(sized))

    while most > 1 and not problem.permits(replace(plan, batch_size=most)):
        most -= 1
    if not fits(1) or fits(most):
        return most if fits(most) else 0
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _move_blocks(problem: GenerationProblem, plan: GenerationPlan) -> GenerationPlan:
    """The plan with its cuts where they are best, as far as single blocks that move make it better."""
    best, value = plan, value_of_devices(problem, plan, problem.price(plan))
    for _ in range(_MAX_MOVES):
        stages = problem.price(best).stages
        measures = [[stage.busy_ms for stage in stages], [float(stage.device_peak_bytes) for stage in stages]]
        tried = [_moved(best, measure) for measure in measures]
        better: tuple[Value, GenerationPlan] = (inf,), best
        for each in tried:
            if each is None:
                continue
            refilled = _best_batch(problem, each) or each
            prediction = problem.price(refilled)
            if problem.fits(prediction):
                better = min(better, (value_of_devices(problem, refilled, prediction), refilled), key=lambda pair: pair[0])
        if better[0] >= value:
            return best
        value, best = better
    return best


def _moved(plan: GenerationPlan, measure: Sequence[float]) -> GenerationPlan | None:
    """With one block less on the stage that has the most of something, and one more on the one that has the least."""
    blocks = list(plan.layout.stage_blocks)
    source, target = measure.index(max(measure)), measure.index(min(measure))
    if source == target or blocks[source] == 1:
        return None
    blocks[source] -= 1
    blocks[target] += 1
    return replace(plan, layout=GenerationLayout(stage_blocks=tuple(blocks)))


def _with_room(problem: GenerationProblem, plan: GenerationPlan) -> PricedGenerationPlan | None:
    """In detail, with fewer sequences at once where a card has room for the tensors alone; None where none are left."""
    while True:
        priced = problem.priced("chosen", plan)
        if priced.verdict in ACCEPTED:
            return priced
        if plan.batch_size == 1 or problem.goal.pins.batch_size is not None:
            return None
        plan = replace(plan, batch_size=plan.batch_size * 3 // 4)
