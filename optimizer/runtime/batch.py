"""Carries out the batch row of a plan: the micro-batches of one optimizer step, as tensors on the host."""

import torch

from optimizer.data.batches import Batches, IntArray
from optimizer.plan.batch import BatchPlan
from optimizer.runtime.step import MicroBatch


def read_training_batches(batches: Batches, *, step: int, plan: BatchPlan) -> list[MicroBatch]:
    """The micro-batches of optimizer step ``step``, counted from 0."""
    return [
        _tensors(batches.train_batch(step, index, plan.micro_batch_size, plan.accumulation_steps))
        for index in range(plan.accumulation_steps)
    ]


def read_validation_batches(batches: Batches, *, num_batches: int, plan: BatchPlan) -> list[MicroBatch]:
    """The first ``num_batches`` of the validation split, the same at every evaluation."""
    return [_tensors(batches.validation_batch(index, plan.micro_batch_size)) for index in range(num_batches)]


def _tensors(arrays: tuple[IntArray, IntArray]) -> MicroBatch:
    ids, labels = arrays
    return torch.from_numpy(ids), torch.from_numpy(labels)
