"""Bounds the time of all plans of a problem from below, where not all of them can be tried.

A step runs at least the forward and backward of every block and of what is around them, once. What is decided outside the blocks
may take the update off compute (state on the host beside the next forward) and may turn memory over less often; so both are left
out. Everything else that can be decided only adds work or waiting: recompute runs ops again, copies are waited for or not, chunks
read the head again, streamed weights are waited for or not. So the bound of a micro-batch and a representation is what keeping
everything spends in it, less the update and what is spent once a step.

*Not in the bound*: that memory is short. Where it is, the gap covers what room would buy, too.
"""

from typing import Final

from optimizer.estimate.prediction import Prediction
from optimizer.search.arrangements import keep_everything
from optimizer.search.solver.pricebook import PriceBook

_MAY_VANISH: Final = ("optimizer", "hooks", "allocation")
"""Kinds of time on compute that other decisions may make shorter than keeping everything in plain training's places has them."""


def bound_of(book: PriceBook) -> float:
    """Milliseconds."""
    blocks = keep_everything(book.problem.num_blocks)
    return min(_least_ms(book.price(base, blocks)) for base in book.problem.settings())


def _least_ms(prediction: Prediction) -> float:
    vanishing_ms = sum(prediction.busy_by_kind_ms.get(kind, 0.0) for kind in _MAY_VANISH)
    waiting_ms = sum(prediction.exposed_ms.values())
    return prediction.step_ms - vanishing_ms - waiting_ms
