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
    """The first ``num_batches`` global batches of the validation split, in micro-batches.

    The sequences do not depend on how the plan splits a batch, so that two plans of one job are scored on the same text.
    """
    num_micro_batches = num_batches * plan.accumulation_steps
    return [_tensors(batches.validation_batch(index, plan.micro_batch_size)) for index in range(num_micro_batches)]


def _tensors(arrays: tuple[IntArray, IntArray]) -> MicroBatch:
    ids, labels = arrays
    return torch.from_numpy(ids), torch.from_numpy(labels)
