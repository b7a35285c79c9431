"""The plans people choose by hand, priced beside the solver's. They are reported even where the goal forbids what they do."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.search.generation.problem import GenerationProblem, PricedGenerationPlan
from optimizer.search.generation.solve import Book, find_largest_batch

GenerationBaseline = Callable[[Book, WeightsPlan], GenerationPlan]


def resident(book: Book, weights: WeightsPlan) -> GenerationPlan:
    """All weights on the device, as many sequences at once as fit."""
    return _filled(book, weights)


def one_at_a_time(book: Book, weights: WeightsPlan) -> GenerationPlan:
    """A loop over the prompts."""
    return GenerationPlan(weights=weights)


def all_at_once(book: Book, weights: WeightsPlan) -> GenerationPlan:
    """One call of ``generate`` with every prompt."""
    return GenerationPlan(batch_size=book.problem.workload.num_sequences, weights=weights)


def stream_host(book: Book, weights: WeightsPlan) -> GenerationPlan:
    """Weights come from the host block by block, as with accelerate's ``cpu_offload``; as many sequences at once as fit."""
    return _filled(book, replace(weights, place="host"))


def stream_disk(book: Book, weights: WeightsPlan) -> GenerationPlan:
    """The same from disk, as with ``disk_offload``."""
    return _filled(book, replace(weights, place="disk"))


GENERATION_BASELINES: Final[dict[str, GenerationBaseline]] = {
    "resident": resident,
    "one_at_a_time": one_at_a_time,
    "all_at_once": all_at_once,
    "stream_host": stream_host,
    "stream_disk": stream_disk,
}


def list_generation_baselines(problem: GenerationProblem) -> dict[str, GenerationBaseline]:
    """Those that the machine can carry out, by label."""
    left_out = (stream_disk,) if "disk" in problem.unavailable or not problem.disk_budget_bytes else ()
    return {label: baseline for label, baseline in GENERATION_BASELINES.items() if baseline not in left_out}


def price_generation_baselines(
    book: Book, *, weights: WeightsPlan | None = None, labels: Sequence[str] | None = None, in_detail: bool = True
) -> dict[str, PricedGenerationPlan]:
    """By label, in fp32 unless ``weights`` says otherwise; one plan per label, also where two coincide. labels: of those wanted;
    all that the machine can carry out unless given.
    """
    if labels is None:
        labels = list(list_generation_baselines(book.problem))
    found = {}
    for label in labels:
        plan = GENERATION_BASELINES[label](book, weights or WeightsPlan())
        found[label] = book.problem.priced(label, plan, in_detail=in_detail)
    return found


def _filled(book: Book, weights: WeightsPlan) -> GenerationPlan:
    """With the largest batch that fits the device; one sequence where none does."""
    plan = GenerationPlan(weights=weights)
    return replace(plan, batch_size=max(1, find_largest_batch(book, plan)))
