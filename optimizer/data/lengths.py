"""Lengths of a dataset's sequences, and the batches they make where they are padded. Torch-free, JSON-able.

The service's own datasets never need this: their documents, chats too, are packed to ``sequence_length`` (``tokens.py``,
``batches.py``), so every batch is as large as every other. It is for loops of people's own, transformers' ``Trainer`` among
them, whose collator pads each batch to its longest sequence.

Whatever the order, the longest sequence is in some batch, so the most that an epoch pads to is known without the order; in which
step, how often, and how much is padding depends on it.
"""

import base64
import binascii
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.base.errors import InvalidDataset
from optimizer.base.shown import shown_value
from optimizer.data.batches import shuffled

IntArray = NDArray[np.int64]

_MAX_LENGTH = 2**31 - 1
_FORMAT = "zlib+int32"


class Lengths:
    """Tokens in each sequence of a dataset, in the dataset's order; 4 bytes a sequence, in JSON compressed."""

    def __init__(self, lengths: Sequence[int] | IntArray) -> None:
        """Raises InvalidDataset where there is none, or one is no length."""
        found = np.asarray(lengths)
        if found.ndim != 1 or not found.size:
            raise InvalidDataset(
                f"lengths have the shape {found.shape}; allowed: a list of at least one",
                field="lengths",
                value=str(found.shape),
                allowed="a list of at least one",
            )
        if found.dtype.kind not in "iu" or found.min() < 1 or found.max() > _MAX_LENGTH:
            raise InvalidDataset(
                f"lengths are from {found.min()} to {found.max()} as {found.dtype}; allowed: whole numbers from 1",
                field="lengths",
                value=[float(found.min()), float(found.max())],
                allowed={"minimum": 1, "maximum": _MAX_LENGTH},
            )
        self.values: IntArray = found.astype(np.int64)
        self.values.flags.writeable = False

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lengths) and np.array_equal(self.values, other.values)

    def __hash__(self) -> int:
        return hash(self.values.tobytes())

    @property
    def longest(self) -> int:
        return int(self.values.max())

    def quantile(self, share: float) -> int:
        """The shortest length that so large a share of the sequences does not exceed."""
        return _quantile(self.values, share)

    def cut(self, max_length: int) -> "Lengths":
        """The lengths that a truncating tokenizer leaves."""
        return Lengths(np.minimum(self.values, max_length))

    def to_json(self) -> dict[str, Any]:
        packed = base64.b64encode(zlib.compress(self.values.astype("<i4").tobytes())).decode()
        return {"format": _FORMAT, "num_sequences": len(self), "lengths": packed}

    @classmethod
    def from_json(cls, document: Any) -> "Lengths":
        """Raises InvalidDataset for what ``to_json`` never wrote."""
        try:
            count, text = document["num_sequences"], document["lengths"]
            if document["format"] != _FORMAT or not isinstance(count, int) or count < 1:
                raise ValueError("format or num_sequences")
            unpacker = zlib.decompressobj()
            # A few bytes may unpack to gigabytes: never to more than what was said.
            data = unpacker.decompress(base64.b64decode(text, validate=True), 4 * count)
            if len(data) != 4 * count or unpacker.unconsumed_tail:
                raise ValueError("the number of lengths")
        except (KeyError, TypeError, ValueError, binascii.Error, zlib.error) as error:
            raise InvalidDataset(
                f"lengths cannot be read: {type(error).__name__}: {error}",
                field="lengths",
                allowed="what Lengths.to_json wrote",
            ) from error
        return cls(np.frombuffer(data, dtype="<i4"))


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Rules by which sequences become batches."""

    micro_batch_size: int
    accumulation_steps: int = 1
    pad_to_multiple: int = 1
    """Padded lengths are multiples of this (a collator's ``pad_to_multiple_of``)."""
    seed: int = 0
    """Seed of the order: ``epoch_order``."""
    keeps_last: bool = True
    """True if an epoch's last, smaller micro-batch and step are run, as transformers' ``Trainer`` does."""

    def __post_init__(self) -> None:
        if not 1 <= self.pad_to_multiple <= _MAX_LENGTH:
            raise InvalidDataset(
                f"pad_to_multiple is {self.pad_to_multiple}; allowed: 1 to {_MAX_LENGTH:,}",
                field="pad_to_multiple",
                value=shown_value(self.pad_to_multiple),
                allowed={"minimum": 1, "maximum": _MAX_LENGTH},
            )


@dataclass(frozen=True, kw_only=True)
class PaddedBatch:
    """One micro-batch after padding."""

    step: int
    """Optimizer step from 0, over all epochs."""
    micro_index: int
    num_sequences: int
    length: int
    """To which every sequence is padded."""
    num_real_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.length

    @property
    def is_padded(self) -> bool:
        """True if some token is padding: then attention needs a mask."""
        return self.num_real_tokens < self.num_tokens


@dataclass(frozen=True, kw_only=True)
class PaddedBatches:
    """Every micro-batch of the steps of a run, in order: one entry of each array for each."""

    steps: IntArray
    micro_indices: IntArray
    num_sequences: IntArray
    lengths: IntArray
    num_real_tokens: IntArray

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> PaddedBatch:
        return PaddedBatch(
            step=int(self.steps[index]),
            micro_index=int(self.micro_indices[index]),
            num_sequences=int(self.num_sequences[index]),
            length=int(self.lengths[index]),
            num_real_tokens=int(self.num_real_tokens[index]),
        )

    @property
    def mean_length(self) -> float:
        """Mean over micro-batches, each counted alike."""
        return float(self.lengths.mean())

    @property
    def padding_share(self) -> float:
        """Share of padding among all tokens computed."""
        return 1 - float(self.num_real_tokens.sum()) / float((self.num_sequences * self.lengths).sum())

    def quantile(self, share: float) -> int:
        """The shortest padded length that so large a share of the micro-batches does not exceed."""
        return _quantile(self.lengths, share)

    def list_longest(self) -> list[PaddedBatch]:
        """The first of the longest among those alike in all else that counts: the number of sequences, whether any is padded (one
        without padding needs no mask), and whether the batch is in the first step, in which the optimizer has no state yet.

        Nothing in the run can be higher than the highest of these few.
        """
        is_padded = self.num_real_tokens < self.num_sequences * self.lengths
        kinds = np.stack([self.num_sequences, is_padded, self.steps == 0])
        found = []
        for kind in np.unique(kinds, axis=1).T:
            alike = np.flatnonzero((kinds == kind[:, None]).all(axis=0))
            found.append(self[int(alike[self.lengths[alike].argmax()])])
        return sorted(found, key=lambda batch: (batch.step, batch.micro_index))


def epoch_order(lengths: Lengths, *, seed: int, epoch: int) -> IntArray:
    """Indices of an epoch's sequences in the order in which batches take them: the same on every machine.

    A ``Sampler`` that yields these makes a ``DataLoader`` follow it; so does a dataset sorted by them, read without shuffling.
    """
    return shuffled(len(lengths), seed=seed, epoch=epoch)


def list_batches(lengths: Lengths, *, padding: Padding, num_steps: int) -> PaddedBatches:
    """The micro-batches of the first ``num_steps`` steps, over as many epochs as that takes. No step reaches over an epoch's end.

    Raises InvalidDataset where an epoch has no whole step and what is left of it is not kept.
    """
    parts: list[PaddedBatches] = []
    done = 0
    while done < num_steps:
        epoch = _list_epoch(lengths, padding, epoch=len(parts), first_step=done)
        if not len(epoch):
            per_step = padding.micro_batch_size * padding.accumulation_steps
            raise InvalidDataset(
                f"the dataset has {len(lengths):,} sequences; a step takes {per_step:,}",
                field="dataset",
                value=len(lengths),
                allowed=f"at least {per_step:,} sequences",
            )
        parts.append(epoch)
        done = int(epoch.steps[-1]) + 1
    fields = ("steps", "micro_indices", "num_sequences", "lengths", "num_real_tokens")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in fields}
    within = joined["steps"] < num_steps
    return PaddedBatches(**{name: values[within] for name, values in joined.items()})


def _list_epoch(lengths: Lengths, padding: Padding, *, epoch: int, first_step: int) -> PaddedBatches:
    ordered = lengths.values[epoch_order(lengths, seed=padding.seed, epoch=epoch)]
    size = padding.micro_batch_size
    if not padding.keeps_last:
        per_step = size * padding.accumulation_steps
        ordered = ordered[: len(ordered) // per_step * per_step]
    starts = np.arange(0, len(ordered), size)
    index = np.arange(len(starts), dtype=np.int64)
    longest = np.maximum.reduceat(ordered, starts) if len(starts) else index
    return PaddedBatches(
        steps=first_step + index // padding.accumulation_steps,
        micro_indices=index % padding.accumulation_steps,
        num_sequences=np.minimum(starts + size, len(ordered)) - starts,
        lengths=-(-longest // padding.pad_to_multiple) * padding.pad_to_multiple,
        num_real_tokens=np.add.reduceat(ordered, starts) if len(starts) else index,
    )


def _quantile(values: IntArray, share: float) -> int:
    return int(np.quantile(values, share, method="inverted_cdf"))
