"""Tasks of the reference's forward in a preference step: the model without its adapters, before each micro-batch's own forward.

Time is that of an evaluation, whose adapters make it a little long; weights that stream come once more. It leaves nothing but
the scores, which are traced with the forward, and is never higher than the training forward that follows it, which does the
same and keeps more: its own bytes come and go unseen.
"""

from collections.abc import Sequence

from optimizer.base.errors import NotProfiled
from optimizer.estimate.step.part_prices import PartPrices
from optimizer.estimate.tasks.tasks import Task, move_task, moved_bytes, single

_NAME = "reference"


def list_reference_tasks(prices: PartPrices, *, weights_tasks: Sequence[Task], last_streamed_bytes: int) -> list[Task]:
    """Tasks in order. Raises NotProfiled without an evaluation.

    weights_tasks: of the forward, one for each block; empty where weights stay. last_streamed_bytes: of the last block, which
    go at the end of the backbone.
    """
    evaluation = prices.compiled.regime.evaluation
    if evaluation is None:
        raise NotProfiled("an evaluation, by which a reference is priced")
    blocks = [_task(prices, evaluation.blocks[template]) for template in prices.compiled.regime.block_templates]
    gone: list[Task] = []
    if weights_tasks:
        blocks = [task for pair in zip(weights_tasks, blocks, strict=True) for task in pair]
        gone = [move_task("forward", _NAME, single("weights", -last_streamed_bytes))]
    return [_task(prices, evaluation.prologue), *blocks, *gone, _task(prices, evaluation.head)]


def _task(prices: PartPrices, index: int) -> Task:
    """index: of the part in the profile."""
    time = prices.compiled.evaluation_time(index, prices.machine, rates_key=prices.rates_key)
    return Task(phase="forward", block=-1, name=_NAME, bytes=moved_bytes(single("weights", 0)), time=time)
