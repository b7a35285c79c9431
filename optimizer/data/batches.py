"""Packed sequences in an order that anyone can recompute: a function of (seed, epoch, step), with no state to save.

The token stream is cut into sequences of S + 1 tokens that overlap by one, so each token but the first is a label exactly
once. Every k-th sequence is for validation: the split is spread evenly over the text, and is the same for every seed, so that
runs with different seeds compare. Attention is not cut at document borders; documents are parted by the end-of-text token.

Nothing is padded, so every batch is flat: the first is as large as the worst. Whole samples in rows: ``samples/rows.py``; batches
that loops of people's own pad: ``lengths.py``.
"""

import numpy as np
from numpy.typing import NDArray

from optimizer.base.errors import InvalidDataset
from optimizer.data.token_file import TokenFile

IntArray = NDArray[np.int64]

IGNORED_LABEL = -100
"""Tokens with this label count for nothing, as in ``F.cross_entropy``."""
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


VALIDATION_FRACTION = 0.05
"""Sequences that are kept for validation."""


class Batches:
    """Training and validation batches over one token file.

    Raises InvalidDataset when the text is too short for one training and one validation sequence.
    """

    def __init__(
        self, token_file: TokenFile, *, sequence_length: int, seed: int, validation_fraction: float = VALIDATION_FRACTION
    ) -> None:
        if sequence_length < 1 or not 0 < validation_fraction <= 0.5:
            raise ValueError("sequence_length must be at least 1, validation_fraction above 0 and at most 0.5")
        num_sequences = (token_file.num_tokens - 1) // sequence_length
        if num_sequences < 2:
            raise InvalidDataset(
                f"the dataset has {token_file.num_tokens:,} tokens; with sequence_length {sequence_length:,} at least "
                f"{2 * sequence_length + 1:,} are needed, for one training and one validation sequence",
                field="dataset",
                value=token_file.num_tokens,
                allowed=f"at least {2 * sequence_length + 1:,} tokens",
                hint="Use a longer text or a shorter sequence_length.",
            )
        self.sequence_length = sequence_length
        self.seed = seed
        self._tokens = token_file.tokens()
        self._training, self._validation = split_evenly(num_sequences, validation_fraction)
        self._order: tuple[int, IntArray] = (-1, self._training)

    @property
    def num_train_sequences(self) -> int:
        """Sequences in one epoch."""
        return len(self._training)

    @property
    def num_validation_sequences(self) -> int:
        return len(self._validation)

    def train_sequence_indices(self, step: int, global_batch_size: int) -> IntArray:
        """Sequences of the text that optimizer step ``step`` (from 0) trains on, in order.

        Step s takes positions s * G to (s + 1) * G of the epochs laid end to end, so each epoch visits each sequence once
        also where G does not divide the epoch.
        """
        num_sequences = self.num_train_sequences
        positions = step * global_batch_size + np.arange(global_batch_size, dtype=np.int64)
        epochs, offsets = np.divmod(positions, num_sequences)
        indices = np.empty(global_batch_size, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = self._epoch_order(int(epoch))[offsets[chosen]]
        return indices

    def train_batch(
        self, step: int, micro_index: int, micro_batch_size: int, accumulation_steps: int
    ) -> tuple[IntArray, IntArray]:
        """Inputs and labels, each [micro_batch_size, sequence_length]; labels are already shifted by one.

        step and micro_index count from 0. The micro-batches of a step are consecutive slices of the same global batch,
        whatever the split.
        """
        if not 0 <= micro_index < accumulation_steps:
            raise IndexError(f"micro_index {micro_index} is not below accumulation_steps {accumulation_steps}")
        first, num_in_all = micro_index * micro_batch_size, micro_batch_size * accumulation_steps
        return self.train_slice(step, first, micro_batch_size, num_in_all)

    def train_slice(self, step: int, first: int, num_sequences: int, global_batch_size: int) -> tuple[IntArray, IntArray]:
        """Some of a step's sequences, in order, as a micro-batch. first: counts from 0 within the step."""
        return self._read(self.train_sequence_indices(step, global_batch_size)[first : first + num_sequences])

    def validation_batch(self, index: int, micro_batch_size: int) -> tuple[IntArray, IntArray]:
        """Validation sequences index * B to (index + 1) * B, in the order of the text, starting over at the end."""
        return self.validation_slice(index * micro_batch_size, micro_batch_size)

    def validation_slice(self, first: int, num_sequences: int) -> tuple[IntArray, IntArray]:
        """So many validation sequences from one on, starting over at the end."""
        positions = (first + np.arange(num_sequences)) % self.num_validation_sequences
        return self._read(self._validation[positions])

    def _read(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        length = self.sequence_length
        rows = [self._tokens[index * length : (index + 1) * length + 1] for index in indices.tolist()]
        sequences = np.stack(rows).astype(np.int64)
        return np.ascontiguousarray(sequences[:, :-1]), np.ascontiguousarray(sequences[:, 1:])

    def _epoch_order(self, epoch: int) -> IntArray:
        if self._order[0] != epoch:
            self._order = (epoch, self._training[shuffled(self.num_train_sequences, seed=self.seed, epoch=epoch)])
        return self._order[1]


def shuffled(num_items: int, *, seed: int, epoch: int) -> IntArray:
    """A permutation of 0 .. num_items - 1 that is the same with every version of numpy.

    Sorts by SplitMix64 (Steele, Lea, Flood 2014) of the index; numpy's own shuffles may change between versions, and a job
    may resume on another machine. Costs O(n log n) time and 16 bytes an item, once an epoch.
    """
    key = _mix(_mix(seed & _MASK) ^ (epoch * _GOLDEN_GAMMA & _MASK))
    with np.errstate(over="ignore"):
        values = np.uint64(key) + np.arange(1, num_items + 1, dtype=np.uint64) * np.uint64(_GOLDEN_GAMMA)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        values ^= values >> np.uint64(31)
    return np.argsort(values, kind="stable").astype(np.int64)


def _mix(value: int) -> int:
    value = (value + _GOLDEN_GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def split_evenly(num_sequences: int, validation_fraction: float) -> tuple[IntArray, IntArray]:
    """Training and validation sequence indices, each at least one; validation at the middle of equal stretches."""
    num_validation = min(max(1, round(num_sequences * validation_fraction)), num_sequences - 1)
    centres = (np.arange(num_validation) + 0.5) * num_sequences / num_validation
    validation = np.floor(centres).astype(np.int64)
    is_training = np.ones(num_sequences, dtype=bool)
    is_training[validation] = False
    return np.flatnonzero(is_training).astype(np.int64), validation
