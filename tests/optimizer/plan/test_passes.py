"""Which prompts share a micro-batch and a pass."""

from collections import Counter
from random import Random

import pytest

from optimizer.plan.passes import MicroBatchShape, arrange_passes, list_passes, shape_of
from optimizer.workload import InferenceWorkload


def test_equal_prompts_are_split_in_their_order():
    passes = arrange_passes([(8, 4)] * 7, batch_size=2, num_micro_batches=2)
    assert passes == [[(0, 1), (2, 3)], [(4, 5), (6,)]]


def test_the_longest_come_first_and_neighbours_run_together():
    lengths = [(5, 4), (9, 4), (7, 4), (8, 4), (6, 4)]
    assert arrange_passes(lengths, batch_size=2, num_micro_batches=1) == [[(1, 3)], [(2, 4)], [(0,)]]


def test_prompts_are_parted_where_two_micro_batches_take_fewer_steps():
    """Together they would take 16 + 4 steps, apart 4 and 4."""
    assert arrange_passes([(20, 4), (4, 4)], batch_size=2, num_micro_batches=1) == [[(0,)], [(1,)]]
    assert arrange_passes([(8, 4), (4, 4)], batch_size=2, num_micro_batches=1) == [[(0, 1)]]


def test_a_micro_batch_is_as_long_as_its_last_sequence_from_its_shortest_prompt_on():
    shape = shape_of([(9, 4), (7, 8)])
    assert shape == MicroBatchShape(batch_size=2, prompt_length=7, num_steps=8)
    assert shape.cache_length == 14


def test_a_cut_prefill_takes_a_step_for_each_token_that_it_leaves():
    cut = shape_of([(9, 4), (7, 8)], prefill_tokens=2)
    assert cut == MicroBatchShape(batch_size=2, prompt_length=2, num_steps=13)
    assert cut.cache_length == shape_of([(9, 4), (7, 8)]).cache_length


def test_who_generates_fewer_runs_beside_the_same_prompts():
    most = [(9, 6), (9, 6), (5, 6), (4, 6), (3, 6)]
    fewer = [(9, 6), (9, 1), (5, 2), (4, 6), (3, 1)]

    def prompts(lengths):
        return [
            [[lengths[index][0] for index in group] for group in each]
            for each in arrange_passes(lengths, batch_size=2, num_micro_batches=2)
        ]

    assert prompts(fewer) == prompts(most) == [[[9, 9], [5, 4]], [[3]]]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_priced_are_the_passes_that_run(seed):
    random = Random(seed)
    prompts = [random.randint(2, 60) for _ in range(random.randint(1, 30))]
    num_new = random.randint(1, 8)
    sizes = {"batch_size": random.randint(1, 5), "num_micro_batches": random.randint(1, 4)}
    most = random.choice((None, 2, 9))
    lengths = [(prompt, num_new) for prompt in prompts]
    run = Counter(
        tuple(shape_of([lengths[index] for index in group], prefill_tokens=most) for group in each)
        for each in arrange_passes(lengths, **sizes)
    )
    workload = InferenceWorkload.of_prompts(prompts, num_new_tokens=num_new)
    assert list_passes(workload, **sizes, prefill_tokens=most) == tuple(run.items())
