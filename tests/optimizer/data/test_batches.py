"""Batches are a function of (seed, epoch, step): no state, no order lost, no sequence seen twice in an epoch."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.base.errors import InvalidDataset
from optimizer.data.batches import Batches, shuffled
from optimizer.data.bundled import TEXT_FILE
from optimizer.data.token_file import FORMAT_VERSION, TokenFile, TokenManifest, write_manifest
from optimizer.data.tokens import tokenize_dataset


def _token_file(folder: Path, num_tokens: int) -> TokenFile:
    """Tokens 0, 1, 2, ... so that a sequence says where in the text it comes from."""
    folder.mkdir(exist_ok=True)
    np.arange(num_tokens, dtype="<u4").tofile(folder / "tokens.bin")
    facts: dict[str, Any] = {"vocab_size": num_tokens, "end_of_text_id": 0, "tokenizer": "own", "num_documents": 1}
    hashes = {"dataset_sha256": "", "tokenizer_sha256": "", "tokens_sha256": ""}
    write_manifest(folder, TokenManifest(version=FORMAT_VERSION, dtype="uint32", num_tokens=num_tokens, **facts, **hashes))
    return TokenFile.open(folder)


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return _token_file(tmp_path_factory.mktemp("tokens"), 1_003)


def _starts(inputs: np.ndarray[Any, Any]) -> list[int]:
    return [int(start) for start in inputs[:, 0]]


def test_labels_are_the_inputs_one_token_on(token_file: TokenFile) -> None:
    inputs, labels = Batches(token_file, sequence_length=10, seed=1).train_batch(0, 0, 4, 1)
    assert inputs.shape == labels.shape == (4, 10)
    assert inputs.dtype == labels.dtype == np.int64
    assert np.array_equal(labels, inputs + 1)
    assert inputs.flags.c_contiguous
    assert labels.flags.c_contiguous


def test_every_token_but_the_first_is_a_label_once(token_file: TokenFile) -> None:
    batches = Batches(token_file, sequence_length=10, seed=1)
    _, train = batches.train_batch(0, 0, batches.num_train_sequences, 1)
    _, validation = batches.validation_batch(0, batches.num_validation_sequences)
    assert sorted([*train.ravel().tolist(), *validation.ravel().tolist()]) == list(range(1, 1_001))


def test_validation_is_the_asked_share_spread_over_the_text_whatever_the_seed(token_file: TokenFile) -> None:
    one, other = (Batches(token_file, sequence_length=10, seed=seed) for seed in (1, 2))
    assert (one.num_train_sequences, one.num_validation_sequences) == (95, 5)
    starts = _starts(one.validation_batch(0, 5)[0])
    assert starts == [100, 300, 500, 700, 900]
    assert starts == _starts(other.validation_batch(0, 5)[0])


def test_validation_batches_go_through_the_split_and_start_over(token_file: TokenFile) -> None:
    batches = Batches(token_file, sequence_length=10, seed=1)
    assert [_starts(batches.validation_batch(index, 2)[0]) for index in range(3)] == [
        [100, 300],
        [500, 700],
        [900, 100],
    ]


@settings(deadline=None)
@given(seed=st.integers(0, 2**63 - 1), global_batch=st.integers(1, 120), epoch=st.integers(0, 5))
def test_each_epoch_visits_each_training_sequence_once(
    token_file: TokenFile, seed: int, global_batch: int, epoch: int
) -> None:
    batches = Batches(token_file, sequence_length=10, seed=seed)
    num_sequences = batches.num_train_sequences
    first, last = epoch * num_sequences // global_batch, (epoch + 1) * num_sequences // global_batch
    visited = np.concatenate([batches.train_sequence_indices(step, global_batch) for step in range(first, last + 1)])
    begin = epoch * num_sequences - first * global_batch
    counts = Counter(visited[begin : begin + num_sequences].tolist())
    assert len(counts) == num_sequences
    assert set(counts.values()) == {1}
    validation = {start // 10 for start in _starts(batches.validation_batch(0, 5)[0])}
    assert not validation & set(counts)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1), step=st.integers(0, 500), split=st.sampled_from([(24, 1), (12, 2), (8, 3), (1, 24)])
)
def test_however_a_batch_is_split_the_step_sees_the_same_sequences_in_order(
    token_file: TokenFile, seed: int, step: int, split: tuple[int, int]
) -> None:
    batches = Batches(token_file, sequence_length=10, seed=seed)
    micro_batch_size, accumulation_steps = split
    parts = [
        batches.train_batch(step, index, micro_batch_size, accumulation_steps) for index in range(accumulation_steps)
    ]
    whole = batches.train_batch(step, 0, 24, 1)
    for part, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert np.array_equal(np.concatenate(part), expected)


@settings(deadline=None)
@given(seed=st.integers(0, 2**63 - 1), resume_at=st.integers(0, 60))
def test_a_resumed_job_sees_what_an_undisturbed_one_would(token_file: TokenFile, seed: int, resume_at: int) -> None:
    undisturbed = Batches(token_file, sequence_length=10, seed=seed)
    wanted = [undisturbed.train_batch(step, 0, 8, 1)[0] for step in range(resume_at + 3)][resume_at:]
    resumed = Batches(token_file, sequence_length=10, seed=seed)
    assert np.array_equal(wanted, [resumed.train_batch(step, 0, 8, 1)[0] for step in range(resume_at, resume_at + 3)])


def test_other_seeds_and_epochs_have_other_orders() -> None:
    orders = {tuple(shuffled(50, seed=seed, epoch=epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_the_order_is_fixed_for_all_time() -> None:
    assert shuffled(10, seed=1, epoch=0).tolist() == [9, 8, 7, 4, 2, 0, 3, 6, 5, 1]


@settings(deadline=None)
@given(num_items=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**40))
def test_a_shuffle_is_a_permutation(num_items: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(num_items, seed=seed, epoch=epoch).tolist()) == list(range(num_items))


def test_every_place_is_as_likely_for_the_first_item() -> None:
    places = Counter(int(np.flatnonzero(shuffled(8, seed=seed, epoch=0) == 0)[0]) for seed in range(4_000))
    # 500 expected each; five standard deviations of a binomial are 105.
    assert all(395 <= places[place] <= 605 for place in range(8))


def test_a_text_too_short_for_two_sequences_is_refused_with_the_numbers(tmp_path: Path) -> None:
    short = _token_file(tmp_path / "short", 20)
    with pytest.raises(InvalidDataset) as caught:
        Batches(short, sequence_length=10, seed=1)
    assert str(caught.value) == (
        "the dataset has 20 tokens; with sequence_length 10 at least 21 are needed, for one training and one validation sequence"
    )
    assert caught.value.fields == {"field": "dataset", "value": 20, "allowed": "at least 21 tokens"}


def test_the_shortest_text_that_will_do_gives_one_sequence_each(tmp_path: Path) -> None:
    batches = Batches(_token_file(tmp_path / "short", 21), sequence_length=10, seed=1)
    assert (batches.num_train_sequences, batches.num_validation_sequences) == (1, 1)
    assert _starts(batches.train_batch(3, 1, 2, 2)[0]) == [0, 0]
    assert _starts(batches.validation_batch(0, 1)[0]) == [10]


@settings(deadline=None)
@given(num_sequences=st.integers(2, 200), fraction=st.floats(0.001, 0.5))
def test_both_parts_have_a_sequence_and_share_none(
    tmp_path_factory: pytest.TempPathFactory, num_sequences: int, fraction: float
) -> None:
    folder = tmp_path_factory.getbasetemp() / "split"
    batches = Batches(
        _token_file(folder, num_sequences * 3 + 1), sequence_length=3, seed=1, validation_fraction=fraction
    )
    train = set(batches.train_sequence_indices(0, batches.num_train_sequences).tolist())
    validation = {start // 3 for start in _starts(batches.validation_batch(0, batches.num_validation_sequences)[0])}
    assert train
    assert validation
    assert train | validation == set(range(num_sequences))
    assert not train & validation


@pytest.mark.parametrize("micro_index", [-1, 2])
def test_a_micro_batch_outside_the_step_is_an_error(token_file: TokenFile, micro_index: int) -> None:
    with pytest.raises(IndexError, match="is not below accumulation_steps 2"):
        Batches(token_file, sequence_length=10, seed=1).train_batch(0, micro_index, 4, 2)


@pytest.mark.parametrize(
    "options", [{"sequence_length": 0}, {"validation_fraction": 0.0}, {"validation_fraction": 0.6}]
)
def test_senseless_settings_are_a_programming_error(token_file: TokenFile, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sequence_length must be at least 1"):
        Batches(token_file, **{"sequence_length": 10, "seed": 1, **options})


def test_the_bundled_text_gives_hundreds_of_steps_without_repeating(tmp_path: Path) -> None:
    made = tokenize_dataset(file=TEXT_FILE, format="txt", tokenizer_file=None, folder=tmp_path, vocab_size=4096)
    batches = Batches(made, sequence_length=256, seed=1)
    assert batches.num_train_sequences >= 8 * 500
    inputs, _ = batches.train_batch(0, 0, 8, 1)
    assert inputs.min() >= 0
    assert inputs.max() < 4096
