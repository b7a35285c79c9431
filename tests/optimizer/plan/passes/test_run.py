"""Times of passes that ran, summed up by their shapes."""

from typing import Any

from optimizer.base.serialize import from_json, to_json
from optimizer.plan.passes.arrange import MicroBatchShape
from optimizer.plan.passes.run import MAX_TIMED, TimedPass, sum_passes


def shape(batch_size: int, **changes: Any) -> tuple[MicroBatchShape, ...]:
    return (MicroBatchShape(**{"batch_size": batch_size, "prompt_length": 4, "num_steps": 9, **changes}),)


def test_passes_alike_are_one_with_the_time_of_all() -> None:
    first, second = sum_passes([(shape(2), 10.0), (shape(1), 7.0), (shape(2), 12.0)])
    assert (first, second) == (
        TimedPass(micro_batches=shape(2), count=2, total_ms=22.0),
        TimedPass(micro_batches=shape(1), count=1, total_ms=7.0),
    )


def test_many_shapes_are_sampled_over_the_run_with_the_first_and_the_last() -> None:
    timed = sum_passes([(shape(1, num_steps=number), float(number)) for number in range(1, 200)])
    assert len(timed) == MAX_TIMED
    assert [timed[0].total_ms, timed[-1].total_ms] == [1.0, 199.0]
    assert [each.total_ms for each in timed] == sorted({each.total_ms for each in timed})


def test_they_survive_json() -> None:
    each = TimedPass(micro_batches=shape(5, leaving=((3, 2), (6, 1))), count=3, total_ms=1.5)
    assert from_json(TimedPass, to_json(each)) == each
