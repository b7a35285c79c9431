"""Prompts are sorted into micro-batches and passes."""

from collections import Counter
from random import Random

import pytest

from optimizer.plan.passes.arrange import (
    MicroBatchShape,
    arrange_passes,
    covers,
    list_passes,
    may_leave,
    micro_batch_shape,
)
from optimizer.workload import GenerationWorkload


def test_equal_prompts_are_split_in_their_order() -> None:
    passes = arrange_passes([(8, 4)] * 7, batch_size=2, num_micro_batches=2)
    assert passes == [[(0, 1), (2, 3)], [(4, 5), (6,)]]


def test_the_longest_come_first_and_neighbours_run_together() -> None:
    lengths = [(5, 4), (9, 4), (7, 4), (8, 4), (6, 4)]
    assert arrange_passes(lengths, batch_size=2, num_micro_batches=1) == [[(1, 3)], [(2, 4)], [(0,)]]


def test_prompts_are_parted_where_two_micro_batches_take_fewer_steps() -> None:
    """Together they would take 16 + 4 steps, apart 4 and 4."""
    assert arrange_passes([(20, 4), (4, 4)], batch_size=2, num_micro_batches=1) == [[(0,)], [(1,)]]
    assert arrange_passes([(8, 4), (4, 4)], batch_size=2, num_micro_batches=1) == [[(0, 1)]]


def test_a_micro_batch_is_as_long_as_its_last_sequence_from_its_shortest_prompt_on() -> None:
    shape = micro_batch_shape([(9, 4), (7, 8)])
    assert shape == MicroBatchShape(batch_size=2, prompt_length=7, num_steps=8)
    assert shape.cache_length == 14


def test_a_cut_prefill_takes_a_step_for_each_token_that_it_leaves() -> None:
    cut = micro_batch_shape([(9, 4), (7, 8)], prefill_tokens=2)
    assert cut == MicroBatchShape(batch_size=2, prompt_length=2, num_steps=13)
    assert cut.cache_length == micro_batch_shape([(9, 4), (7, 8)]).cache_length


def test_requests_for_fewer_tokens_join_the_same_prompts_where_that_takes_fewer_steps() -> None:
    most = [(9, 6), (9, 6), (5, 6), (4, 6), (3, 6)]
    fewer = [(9, 6), (9, 1), (5, 2), (4, 6), (3, 1)]

    def prompts(lengths: list[tuple[int, int]]) -> list[list[list[int]]]:
        return [
            [[lengths[index][0] for index in group] for group in each]
            for each in arrange_passes(lengths, batch_size=2, num_micro_batches=2)
        ]

    assert prompts(fewer) == prompts(most) == [[[9, 9], [5, 4]], [[3]]]


def test_requests_for_about_as_many_tokens_run_together_where_that_takes_fewer_steps() -> None:
    """Sorted by prompt each pass would take 64 steps; so two take 64, two 4, and one as many as prompts differ by besides."""
    lengths = [(10 + index, 64 if index % 2 else 4) for index in range(8)]
    passes = arrange_passes(lengths, batch_size=2, num_micro_batches=1)
    assert passes == [[(7, 5)], [(3, 1)], [(6, 4)], [(2, 0)]]
    few = arrange_passes(lengths, batch_size=8, num_micro_batches=1)
    assert few == [[(7, 6, 5, 4, 3, 2, 1, 0)]]


def test_sequences_leave_when_half_of_those_that_run_are_over_and_the_rest_have_some_steps_to_go() -> None:
    shape = micro_batch_shape([(10, 4), (10, 6), (10, 30), (10, 50), (10, 54), (12, 5)], drops_ended=True)
    assert (shape.batch_size, shape.num_steps) == (6, 54)
    # Three are over after 7 steps; of the other three two after 50, when there are but 4 to go.
    assert shape.leaving == ((7, 3),)
    assert [shape.num_running(step) for step in (0, 6, 7, 53)] == [6, 6, 3, 3]
    assert [shape.last_step_alike(step) for step in (1, 6, 7, 53)] == [6, 6, 53, 53]
    assert list(shape.cache_stretches) == [(6, 16), (3, 63)]
    assert micro_batch_shape([(10, 4), (10, 30)]).leaving == ()


def test_a_pass_covers_another_only_with_as_many_sequences_at_as_long_a_cache() -> None:
    early, late = (micro_batch_shape([(10, 4), (10, second), (10, 60)], drops_ended=True) for second in (4, 20))
    assert early.leaving == ((4, 1),)
    assert late.leaving == ((20, 1),)
    assert covers((late,), (early,))
    assert not covers((early,), (late,))


@pytest.mark.parametrize("seed", range(30))
def test_sequences_leave_in_the_step_in_which_a_micro_batch_lets_them(seed: int) -> None:
    random = Random(seed)
    lengths = [(random.randint(2, 40), random.randint(1, 40)) for _ in range(random.randint(1, 12))]
    shape = micro_batch_shape(lengths, drops_ended=True)
    ends = [prompt + num_new - shape.prompt_length for prompt, num_new in lengths]
    running, found = ends, []
    for step in range(1, shape.num_steps):
        live = [end for end in running if end > step]
        if may_leave(num_running=len(running), num_live=len(live), num_steps_to_go=max(running) - step):
            running = live
            found.append((step, len(live)))
    assert shape.leaving == tuple(found)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("are_alike", [True, False])
def test_what_is_priced_are_the_passes_that_run(seed: int, are_alike: bool) -> None:
    random = Random(seed)
    prompts = [random.randint(2, 60) for _ in range(random.randint(1, 30))]
    num_new = [random.randint(1, 40) for _ in prompts]
    if are_alike:
        num_new = num_new[:1] * len(prompts)
    sizes = {"batch_size": random.randint(1, 5), "num_micro_batches": random.randint(1, 4)}
    most = random.choice((None, 2, 9))
    lengths = list(zip(prompts, num_new, strict=True))
    run = Counter(
        tuple(micro_batch_shape([lengths[index] for index in group], prefill_tokens=most, drops_ended=True) for group in each)
        for each in arrange_passes(lengths, **sizes)
    )
    workload = GenerationWorkload.of_prompts(prompts, num_new_tokens=num_new)
    assert list_passes(workload, **sizes, prefill_tokens=most, drops_ended=True) == tuple(run.items())
