"""The largest micro-batch that fits: fewer, larger products keep a device busier, and norms over a batch see more of it."""

from dataclasses import replace

from optimizer.base.errors import NoFeasiblePlan
from optimizer.search.answer.smallest import explain_infeasible
from optimizer.search.check.pins import check_pins
from optimizer.search.core import find_best, first_on_the_card
from optimizer.search.problem import PricedPlan, SearchProblem, divisors
from optimizer.search.solver.pricebook import PriceBook, remembering


def find_largest_micro_batch(problem: SearchProblem) -> PricedPlan:
    """The fastest plan of the largest divisor of the batch for which some permitted plan fits.

    Raises NoFeasiblePlan where none fits at any.
    """
    check_pins(problem)
    remembered = remembering(problem)
    for size in reversed(divisors(problem.workload.global_batch_size)):
        sized = replace(remembered, micro_batch_size=size)
        if not sized.settings():
            continue
        book = PriceBook(sized)
        if not find_best(book):
            continue
        try:
            chosen, _ = first_on_the_card(book)
        except NoFeasiblePlan:
            continue
        return chosen
    raise explain_infeasible(remembered)
