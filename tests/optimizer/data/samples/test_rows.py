"""Samples become rows: whole, each once an epoch, learnt where they are to be learnt."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.base.errors import InvalidDataset
from optimizer.data.batches import IGNORED_LABEL
from optimizer.data.samples.packing import pack_best_fit
from optimizer.data.samples.rows import SampleRows, open_batches
from optimizer.data.token_file import TokenFile
from optimizer.data.tokens import tokenize_dataset
from optimizer.workload import TrainingWorkload


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    folder = tmp_path_factory.mktemp("chats")
    rows = [{"prompt": f"What is {n}?", "completion": " ".join(str(n) for _ in range(1 + n % 7))} for n in range(60)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tokenize_dataset(
        file=folder / "d.jsonl", format="jsonl", tokenizer_file=None, folder=folder / "tokens", loss_on="assistant"
    )


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=80))
def test_every_sample_is_in_one_row_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = pack_best_fit(lengths, row_length=40)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in row) for row in rows]
    assert max(sums) <= 40
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 40) + 1 or len(rows) <= len([each for each in lengths if each > 20]) + 1


def test_best_fit_takes_the_fullest_row_that_has_room() -> None:
    assert pack_best_fit([6, 5, 4, 3, 2], row_length=10) == [[0, 2], [1, 3, 4]]


@pytest.mark.parametrize("packs", [True, False])
def test_an_epoch_trains_on_every_answer_once(token_file: TokenFile, packs: bool) -> None:
    rows = SampleRows(token_file, sequence_length=32, seed=1, packs=packs)
    learnt = 0
    for step in range(rows.num_train_sequences):
        _, labels, *_ = rows.train_batch(step, 0, 1, 1)
        learnt += int((labels != IGNORED_LABEL).sum())
    assert learnt == rows.facts().num_labels
    trained = token_file.trained()
    assert trained is not None
    validation = [sample for row in rows._validation for sample in row]
    starts = token_file.starts()
    held_back = sum(int(trained[starts[sample] + 1 : starts[sample + 1]].sum()) for sample in validation)
    assert learnt + held_back == int(trained.sum())


def test_labels_are_the_next_tokens_of_the_same_sample_and_positions_start_over(token_file: TokenFile) -> None:
    rows = SampleRows(token_file, sequence_length=64, seed=1, packs=True)
    ids, labels, positions = rows.train_batch(0, 0, 1, 1)
    starts = np.flatnonzero(positions[0] == 0).tolist()
    assert len(starts) > 2
    for begin, end in zip(starts, [*starts[1:], 64], strict=True):
        for place in range(begin, end - 1):
            assert labels[0, place] in (IGNORED_LABEL, ids[0, place + 1])


def test_fewer_rows_are_needed_packed(token_file: TokenFile) -> None:
    packed, padded = (SampleRows(token_file, sequence_length=64, seed=1, packs=packs) for packs in (True, False))
    assert packed.num_train_sequences * 3 < padded.num_train_sequences
    assert packed.facts().num_labels == padded.facts().num_labels


def test_the_order_is_a_function_of_the_step_and_differs_between_epochs(token_file: TokenFile) -> None:
    first, again = (SampleRows(token_file, sequence_length=32, seed=5, packs=True) for _ in range(2))
    num_rows = first.num_train_sequences
    assert np.array_equal(first.train_sequence_indices(3, 4), again.train_sequence_indices(3, 4))
    assert sorted(first.train_sequence_indices(0, num_rows)) == list(range(num_rows))
    assert not np.array_equal(first.train_sequence_indices(0, num_rows), first.train_sequence_indices(1, num_rows))


def test_long_samples_are_cut_and_counted(token_file: TokenFile) -> None:
    facts = SampleRows(token_file, sequence_length=10, seed=1, packs=True).facts()
    assert facts.num_cut > 0
    assert facts.num_inputs <= facts.num_rows * 10


def test_a_dataset_whose_answers_are_all_cut_away_is_refused(token_file: TokenFile) -> None:
    with pytest.raises(InvalidDataset, match="0 of 60 samples hold something to learn within 2 tokens"):
        SampleRows(token_file, sequence_length=2, seed=1, packs=True)


def test_packing_decides_which_batches_a_workload_gets(token_file: TokenFile) -> None:
    for packing, num_arrays in (("wrapped", 2), ("best_fit", 3), ("off", 2)):
        workload = TrainingWorkload(sequence_length=32, global_batch_size=2, packing=packing)
        assert len(open_batches(token_file, workload).train_batch(0, 0, 2, 1)) == num_arrays
