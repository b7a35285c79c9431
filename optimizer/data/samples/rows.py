"""Batches of whole samples: packed into rows by best fit, or one in each row, padded at its end. In a recomputable order.

A sample of n tokens takes n - 1 places of a row: each of its tokens but the last is an input, each but the first a label. What is
not to be learnt has the label -100, and so has padding. ``positions`` count from 0 in each sample, and anew in the padding at a
row's end: where they start over, attention is cut.

A sample longer than a row is cut at its end; one of which nothing is left to learn is left out. Both are counted. Every k-th
sample is for validation, the same for every seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer.base.errors import InvalidDataset
from optimizer.data.batches import IGNORED_LABEL, VALIDATION_FRACTION, Batches, shuffled, split_evenly
from optimizer.data.samples.packing import pack_best_fit
from optimizer.data.token_file import TokenFile
from optimizer.workload import TrainingWorkload

IntArray = NDArray[np.int64]


def open_batches(token_file: TokenFile, workload: TrainingWorkload) -> "Batches | SampleRows":
    """The batches of a workload, by its packing. Raises InvalidDataset where there is too little to train on."""
    length, seed = workload.sequence_length, workload.seed
    if workload.has_pairs:
        return PairRows(token_file, sequence_length=length, seed=seed, packs=False)
    if workload.packing == "wrapped":
        return Batches(token_file, sequence_length=length, seed=seed)
    return SampleRows(token_file, sequence_length=length, seed=seed, packs=workload.is_packed)


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """Counts over the training rows."""

    num_rows: int
    num_samples: int
    num_cut: int
    """Samples that lost their end; of the whole dataset, as is the next."""
    num_left_out: int
    """Samples without anything to learn."""
    num_inputs: int
    """Places that hold a token; the others are padding."""
    num_labels: int
    """Places whose label counts."""


class SampleRows:
    """Training and validation rows over one token file; the interface of ``Batches``.

    packs: whether rows hold several samples; else one each. Raises InvalidDataset where fewer than two can be learnt from.
    """

    def __init__(
        self,
        token_file: TokenFile,
        *,
        sequence_length: int,
        seed: int,
        packs: bool,
        validation_fraction: float = VALIDATION_FRACTION,
    ) -> None:
        self.sequence_length = sequence_length
        self.seed = seed
        self.packs = packs
        self._tokens = token_file.tokens()
        self._trained = token_file.trained()
        self._starts = np.asarray(token_file.starts())
        self._lengths: IntArray = np.minimum(np.diff(self._starts) - 1, sequence_length)
        self._num_labels = self._count_labels()
        kept = self._find_kept((self._lengths > 0) & (self._num_labels > 0))
        if len(kept) < 2:
            raise InvalidDataset(
                f"{len(kept)} of {len(self._lengths):,} samples hold something to learn within {sequence_length:,} tokens; "
                "at least 2 are needed, one to train on and one to validate with",
                field="dataset",
                value=len(kept),
                allowed="at least 2",
                hint="Raise workload.sequence_length, or set workload.loss_on to all.",
            )
        training, validation = split_evenly(len(kept), validation_fraction)
        self._training = self._lay_out(kept[training])
        self._validation = self._lay_out(kept[validation])
        self._order: tuple[int, IntArray] = (-1, np.arange(0))

    @property
    def num_train_sequences(self) -> int:
        """Rows in one epoch."""
        return len(self._training)

    @property
    def num_validation_sequences(self) -> int:
        return len(self._validation)

    def facts(self) -> RowFacts:
        """Count what an epoch trains on."""
        members = np.concatenate([np.asarray(row) for row in self._training])
        whole = np.diff(self._starts) - 1
        return RowFacts(
            num_rows=len(self._training),
            num_samples=len(members),
            num_cut=int((whole > self.sequence_length).sum()),
            num_left_out=int(((self._lengths <= 0) | (self._num_labels <= 0)).sum()),
            num_inputs=int(self._lengths[members].sum()),
            num_labels=int(self._num_labels[members].sum()),
        )

    def samples_of_row(self, index: int) -> Sequence[int]:
        """Numbers of the samples in a training row."""
        return self._training[index]

    def train_sequence_indices(self, step: int, global_batch_size: int) -> IntArray:
        """Rows that optimizer step ``step`` (from 0) trains on, in order: positions of the epochs laid end to end."""
        positions = step * global_batch_size + np.arange(global_batch_size, dtype=np.int64)
        epochs, offsets = np.divmod(positions, self.num_train_sequences)
        indices = np.empty(global_batch_size, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = self._epoch_order(int(epoch))[offsets[chosen]]
        return indices

    def train_batch(
        self, step: int, micro_index: int, micro_batch_size: int, accumulation_steps: int
    ) -> tuple[IntArray, ...]:
        """Inputs, labels and, where rows are packed, positions, each [rows, sequence_length]."""
        if not 0 <= micro_index < accumulation_steps:
            raise IndexError(f"micro_index {micro_index} is not below accumulation_steps {accumulation_steps}")
        first, num_in_all = micro_index * micro_batch_size, micro_batch_size * accumulation_steps
        return self.train_slice(step, first, micro_batch_size, num_in_all)

    def train_slice(self, step: int, first: int, num_sequences: int, global_batch_size: int) -> tuple[IntArray, ...]:
        """Some of a step's rows, in order, as a micro-batch. first: counts from 0 within the step."""
        chosen = self.train_sequence_indices(step, global_batch_size)[first : first + num_sequences]
        return self._read([self._training[index] for index in chosen.tolist()])

    def validation_batch(self, index: int, micro_batch_size: int) -> tuple[IntArray, ...]:
        """Validation rows index * B to (index + 1) * B, starting over at the end."""
        return self.validation_slice(index * micro_batch_size, micro_batch_size)

    def validation_slice(self, first: int, num_sequences: int) -> tuple[IntArray, ...]:
        """So many validation rows from one on, starting over at the end."""
        positions = (first + np.arange(num_sequences)) % self.num_validation_sequences
        return self._read([self._validation[position] for position in positions.tolist()])

    def _find_kept(self, has_labels: NDArray[np.bool_]) -> IntArray:
        """Samples that rows are made of. has_labels: by sample, whether something can be learnt from it."""
        return np.flatnonzero(has_labels)

    def _lay_out(self, samples: IntArray) -> list[list[int]]:
        if not self.packs:
            return [[sample] for sample in samples.tolist()]
        rows = pack_best_fit(self._lengths[samples], row_length=self.sequence_length)
        return [samples[row].tolist() for row in rows]

    def _count_labels(self) -> IntArray:
        """Labels of each sample that count, after it was cut."""
        if self._trained is None:
            return self._lengths
        sums = np.concatenate(([0], np.cumsum(self._trained, dtype=np.int64)))
        first = np.minimum(self._starts[:-1] + 1, self._starts[1:])
        last = np.minimum(first + np.maximum(self._lengths, 0), self._starts[1:])
        counts: IntArray = sums[last] - sums[first]
        return counts

    def _read(self, rows: Sequence[Sequence[int]]) -> tuple[IntArray, ...]:
        shape = (len(rows), self.sequence_length)
        ids = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        for place, row in enumerate(rows):
            at = 0
            for sample in row:
                start, length = int(self._starts[sample]), int(self._lengths[sample])
                span = slice(at, at + length)
                ids[place, span] = self._tokens[start : start + length]
                labels[place, span] = self._labels(start + 1, length)
                positions[place, span] = np.arange(length)
                at += length
            positions[place, at:] = np.arange(self.sequence_length - at)
        return (ids, labels, positions) if self.packs else (ids, labels)

    def _labels(self, start: int, length: int) -> IntArray:
        wanted: IntArray = self._tokens[start : start + length].astype(np.int64)
        if self._trained is not None:
            wanted[self._trained[start : start + length] == 0] = IGNORED_LABEL
        return wanted

    def _epoch_order(self, epoch: int) -> IntArray:
        if self._order[0] != epoch:
            self._order = (epoch, shuffled(self.num_train_sequences, seed=self.seed, epoch=epoch))
        return self._order[1]


class PairRows(SampleRows):
    """Training and validation pairs, whose better answers are the samples with even numbers, each followed by its worse one.

    A sequence, in all counts of them, is a pair; a batch of B has 2 * B rows, the better answers first. Pairs of which one answer
    has nothing left to learn are left out.
    """

    def _find_kept(self, has_labels: NDArray[np.bool_]) -> IntArray:
        """The better answers' samples of whole pairs."""
        return 2 * np.flatnonzero(has_labels[::2] & has_labels[1::2])

    def _lay_out(self, samples: IntArray) -> list[list[int]]:
        return [[better, better + 1] for better in samples.tolist()]

    def _read(self, rows: Sequence[Sequence[int]]) -> tuple[IntArray, ...]:
        return super()._read([[pair[answer]] for answer in (0, 1) for pair in rows])
