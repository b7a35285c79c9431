"""The tensors that one forward is given, and how much each counts in the mean over a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from optimizer.data.batches import IGNORED_LABEL

MicroBatch = tuple[Any, ...]
"""``(ids, labels)``, both int64 ``[micro_batch_size, sequence_length]``; labels are the next tokens, already shifted, and of a
model that is no decoder what each position or target is to be. A third of the same shape is ``position_ids`` where the workload
packs samples, or an ``attention_mask`` where a loop of somebody's own pads sequences. Of pairs there are twice as many rows, the
better answers first. Of a plain module (``models/plain.py``) its inputs, a tensor or a tuple of them, and the labels."""


def shares_of_labels(micro_batches: Sequence[MicroBatch]) -> list[float]:
    """Share of each micro-batch in the labels that count; empty where all have as many.

    Weighted by these, the means over micro-batches add up to the mean over the step, however the step was split. Labels that
    are on a device already are not read, since that would wait for it: such micro-batches weigh the same.
    """
    counts = count_labels(micro_batches)
    if counts is None or len(set(counts)) <= 1:
        return []
    return [count / sum(counts) for count in counts]


def count_labels(micro_batches: Sequence[MicroBatch]) -> list[int] | None:
    """Labels that count, by micro-batch; None where they are not on the host, or no class numbers."""
    counts = []
    for _, labels, *_ in micro_batches:
        if not isinstance(labels, torch.Tensor) or labels.device.type != "cpu" or labels.is_floating_point():
            return None
        counts.append(int(np.count_nonzero(labels.numpy() != IGNORED_LABEL)))
    return counts
