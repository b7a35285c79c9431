"""Splits computed for all sizes and numbers of micro-batches at once are the splits that each plan would run."""

from collections import Counter

from optimizer.estimate.generation.splits import Splits, Way
from optimizer.plan.passes.arrange import list_passes
from optimizer.workload import GenerationWorkload

SIZES, NUMBERS = tuple(range(1, 6)), (1, 2, 3, 4)


def test_micro_batches_are_those_of_the_plan_also_where_their_number_decides_who_shares_one() -> None:
    workload = GenerationWorkload.of_prompts(
        (6, 11, 16, 6, 11, 16, 6, 11, 16), num_new_tokens=(3, 17, 9, 2, 17, 5, 12, 1, 9)
    )
    splits = Splits.count(workload, SIZES, NUMBERS, Way(None, False))
    seen = set()
    for row, number in enumerate(NUMBERS):
        for column, size in enumerate(SIZES):
            passes = list_passes(workload, batch_size=size, num_micro_batches=number)
            expected = Counter(dict.fromkeys(splits.shapes, 0))
            for shape, count in passes:
                for each in shape:
                    expected[each] += count
            assert splits.counts[row, column].tolist() == [expected[each] for each in splits.shapes]
            assert splits.shapes[splits.leader[row, column]] == passes[0][0][0]
            seen.add((size, tuple(sorted(expected.items(), key=repr))))
    assert len(seen) > len(SIZES)
