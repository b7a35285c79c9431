"""Carries out the batch row of a plan: the micro-batches of one optimizer step, read ahead so that the device never waits.

Training batches are read by a thread of their own while the device computes, from the memory-mapped token file into tensors,
pinned where the device is CUDA, so that their copy runs beside compute. The order is a function of the step, so reading ahead
needs no state that a checkpoint would have to hold.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from optimizer.data.batches import Batches, IntArray
from optimizer.data.samples.rows import SampleRows
from optimizer.plan.batch import BatchPlan
from optimizer.runtime.device.backend import Backend
from optimizer.runtime.device.backends import backend_of
from optimizer.runtime.step.micro_batch import MicroBatch

NUM_STEPS_AHEAD = 2


class BatchReader:
    """Training micro-batches by optimizer step, the next steps' being read meanwhile. Call ``close`` at the end."""

    def __init__(
        self,
        batches: Batches | SampleRows,
        *,
        plan: BatchPlan,
        num_steps: int,
        device: torch.device,
        first: int = 0,
        num_in_all: int | None = None,
    ) -> None:
        """first, num_in_all: of several ranks the first sequence of this one's stretch of a step (``Plan.stretch_of``), and the
        sequences of all of them; the plan's own unless given.
        """
        self._batches = batches
        self._plan = plan
        self._num_steps = num_steps
        self._first = first
        self._num_in_all = plan.global_batch_size if num_in_all is None else num_in_all
        self._backend = backend_of(device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: dict[int, Future[list[MicroBatch]]] = {}
        self.waited_ms = 0.0
        """Milliseconds that the last ``read`` waited for its batches; near zero once the reader is ahead."""

    def read(self, step: int) -> list[MicroBatch]:
        """The micro-batches of optimizer step ``step``, counted from 0. Any step may be asked for; the next one costs least."""
        start_s = time.perf_counter()
        for wanted in range(step, min(step + 1 + NUM_STEPS_AHEAD, max(self._num_steps, step + 1))):
            if wanted not in self._ahead:
                self._ahead[wanted] = self._thread.submit(self._read, wanted)
        for passed in [known for known in self._ahead if known < step]:
            del self._ahead[passed]
        micro_batches = self._ahead.pop(step).result()
        self.waited_ms = (time.perf_counter() - start_s) * 1000
        return micro_batches

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def _read(self, step: int) -> list[MicroBatch]:
        size = self._plan.micro_batch_size
        starts = (self._first + index * size for index in range(self._plan.accumulation_steps))
        return [
            _tensors(self._batches.train_slice(step, start, size, self._num_in_all), backend=self._backend)
            for start in starts
        ]


def read_validation_batches(
    batches: Batches | SampleRows, *, num_batches: int, plan: BatchPlan, first: int = 0
) -> list[MicroBatch]:
    """The first ``num_batches`` global batches of the validation split, in micro-batches; of several ranks this one's stretch.
    first: as ``BatchReader`` has it.

    The sequences do not depend on how the plan splits a batch, so that two plans of one job are scored on the same text.
    """
    size = plan.micro_batch_size
    starts = (num_batches * first + index * size for index in range(num_batches * plan.accumulation_steps))
    return [_tensors(batches.validation_slice(start, size)) for start in starts]


def _tensors(arrays: tuple[IntArray, ...], *, backend: Backend | None = None) -> MicroBatch:
    """backend: in whose pinned memory they are to be."""
    tensors = (torch.from_numpy(array) for array in arrays)
    return tuple(tensor if backend is None else backend.pin(tensor) for tensor in tensors)
