import json
import random
from typing import Any

import numpy as np
import pytest

from optimizer.base.errors import InvalidDataset
from optimizer.data.lengths import Lengths, Padding, epoch_order, list_batches


def draw_lengths(num: int = 37, *, seed: int = 3, high: int = 90) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1, high) for _ in range(num)]


def batches_by_hand(values: list[int], padding: Padding, num_steps: int) -> list[tuple[int, ...]]:
    """Step, micro-batch, sequences, padded length, real tokens: straight from the definition."""
    found, step, epoch = [], 0, 0
    while step < num_steps:
        order = epoch_order(Lengths(values), seed=padding.seed, epoch=epoch).tolist()
        size, steps_of = padding.micro_batch_size, padding.accumulation_steps
        if not padding.keeps_last:
            order = order[: len(order) // (size * steps_of) * size * steps_of]
        micro_batches = [order[start : start + size] for start in range(0, len(order), size)]
        for start in range(0, len(micro_batches), steps_of):
            for index, chosen in enumerate(micro_batches[start : start + steps_of]):
                longest = max(values[each] for each in chosen)
                padded = -(-longest // padding.pad_to_multiple) * padding.pad_to_multiple
                found.append((step, index, len(chosen), padded, sum(values[each] for each in chosen)))
            step += 1
        epoch += 1
    return [batch for batch in found if batch[0] < num_steps]


@pytest.mark.parametrize("keeps_last", [True, False])
@pytest.mark.parametrize(("size", "accumulation", "multiple"), [(1, 1, 1), (4, 1, 8), (5, 3, 1), (3, 2, 16)])
def test_batches_are_those_of_the_order_padded_to_their_longest(
    size: int, accumulation: int, multiple: int, keeps_last: bool
) -> None:
    values = draw_lengths()
    padding = Padding(
        micro_batch_size=size,
        accumulation_steps=accumulation,
        pad_to_multiple=multiple,
        seed=5,
        keeps_last=keeps_last,
    )
    batches = list_batches(Lengths(values), padding=padding, num_steps=25)
    listed = [
        (b.step, b.micro_index, b.num_sequences, b.length, b.num_real_tokens)
        for b in (batches[index] for index in range(len(batches)))
    ]
    assert listed == batches_by_hand(values, padding, 25)


def test_the_longest_are_of_every_kind_of_batch_that_there_is() -> None:
    values = [10, 12, 10, 64, 64, 10, 9]
    padding = Padding(micro_batch_size=2)
    batches = list_batches(Lengths(values), padding=padding, num_steps=40)
    every = [batches[index] for index in range(len(batches))]
    longest = batches.list_longest()
    kinds = {(batch.num_sequences, batch.is_padded, batch.step == 0) for batch in every}
    assert {(batch.num_sequences, batch.is_padded, batch.step == 0) for batch in longest} == kinds
    for batch in longest:
        kind = (batch.num_sequences, batch.is_padded, batch.step == 0)
        alike = [b for b in every if (b.num_sequences, b.is_padded, b.step == 0) == kind]
        assert batch.length == max(b.length for b in alike)
        assert batch == next(b for b in alike if b.length == batch.length)


def test_whatever_the_order_the_longest_sequence_is_in_some_batch() -> None:
    lengths = Lengths(draw_lengths())
    for seed in range(5):
        padding = Padding(micro_batch_size=4, seed=seed)
        assert max(b.length for b in list_batches(lengths, padding=padding, num_steps=10).list_longest()) == lengths.longest


def test_shares_and_quantiles_are_of_what_is_computed() -> None:
    batches = list_batches(Lengths([4, 4, 4, 4]), padding=Padding(micro_batch_size=2), num_steps=2)
    assert batches.padding_share == 0
    assert batches.mean_length == 4
    padded = list_batches(Lengths([4, 4, 4, 4]), padding=Padding(micro_batch_size=2, pad_to_multiple=8), num_steps=2)
    assert padded.padding_share == 0.5
    lengths = Lengths([1, 2, 3, 4, 5, 6, 7, 8, 9, 100])
    assert [lengths.quantile(share) for share in (0.5, 0.9, 0.99)] == [5, 9, 100]
    assert lengths.cut(8).longest == 8


def test_lengths_survive_json_and_are_small_in_it() -> None:
    lengths = Lengths(np.full(100_000, 512))
    text = json.dumps(lengths.to_json())
    assert Lengths.from_json(json.loads(text)) == lengths
    assert len(text) < 2_000
    assert Lengths.from_json(Lengths([7]).to_json()) != Lengths([8])


@pytest.mark.parametrize("values", [[], [0, 1], [2.5], [[1]], [2**31]])
def test_a_file_without_lengths_is_refused(values: list[Any]) -> None:
    with pytest.raises(InvalidDataset, match="lengths"):
        Lengths(values)


@pytest.mark.parametrize(
    "change",
    [{"num_sequences": 2}, {"num_sequences": 4}, {"num_sequences": "3"}, {"lengths": "no"}, {"format": "other"}],
)
def test_json_that_was_never_written_is_refused(change: dict[str, Any]) -> None:
    document = Lengths([3, 4, 5]).to_json() | change
    with pytest.raises(InvalidDataset, match="lengths cannot be read"):
        Lengths.from_json(document)


def test_a_dataset_of_less_than_one_step_is_refused_where_the_last_is_not_kept() -> None:
    padding = Padding(micro_batch_size=4, accumulation_steps=2, keeps_last=False)
    with pytest.raises(InvalidDataset, match="the dataset has 3 sequences; a step takes 8"):
        list_batches(Lengths([3, 4, 5]), padding=padding, num_steps=1)
