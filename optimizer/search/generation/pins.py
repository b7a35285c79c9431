"""Checks whether any plan can keep what a generation's goal pins, and if none can, why. Asked once, before a search."""

from optimizer.base.errors import InvalidPlan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation_knobs import change_generation
from optimizer.search.check.pin_errors import check_pinned_techniques, no_plan_keeps, refuse_pin
from optimizer.search.generation.levers import list_families
from optimizer.search.generation.problem import GenerationProblem


def check_generation_pins(problem: GenerationProblem) -> None:
    """Raise InvalidPlan where no plan of this model and this workload on this machine keeps every pin."""
    pins = problem.goal.pins
    if pins.is_empty:
        return
    if pins.batch_size is not None:
        _check_batch(problem, pins.batch_size)
    if isinstance(pins.prefill_tokens, int):
        _check_prefill(problem, pins.prefill_tokens)
    check_pinned_techniques(problem)
    if not list_families(problem):
        raise _contradiction(problem)


def _check_batch(problem: GenerationProblem, size: int) -> None:
    num_sequences = problem.workload.num_sequences
    if problem.goal.objective == "largest_batch":
        why = "largest_batch looks for just that: leave the pin out, or ask for throughput"
        raise refuse_pin("batch_size", size, why)
    if size > num_sequences:
        raise refuse_pin("batch_size", size, f"there are {num_sequences:,} to generate: allowed are 1 to {num_sequences:,}")


def _check_prefill(problem: GenerationProblem, num_tokens: int) -> None:
    if not problem.can_cut_prompts:
        raise refuse_pin("prefill_tokens", num_tokens, "prompts of this model run whole: allowed is all")
    if problem.goal.objective == "first_token":
        why = "a first token comes soonest of a prompt that runs whole: allowed is all, or ask for throughput"
        raise refuse_pin("prefill_tokens", num_tokens, why)


def _contradiction(problem: GenerationProblem) -> InvalidPlan:
    """Faults of plain generation with the pins put into it."""
    pins = problem.goal.pins
    try:
        problem.check(change_generation(GenerationPlan(), pins.change()))
    except InvalidPlan as error:
        return no_plan_keeps(pins, error.message)
    return no_plan_keeps(pins)
