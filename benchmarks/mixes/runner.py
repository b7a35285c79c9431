"""A process that trains as it is asked to: ``python -m benchmarks.mixes.runner``, JSON lines in and out.

``{"prepare": NAME}`` builds the subject's model and takes two steps; ``{"run": NAME, "num_steps": N}`` takes N more. Each is
answered with the milliseconds of every step and the highest metered peak; the meter stops a step that goes over the subject's
budget.
"""

import json
import sys
import time
from typing import Any

import torch

from benchmarks.common.alternatives import Job
from benchmarks.mixes.real import REAL, Real
from optimizer.base.errors import OutOfMemory
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.meter.device import prepared_device, set_num_threads
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer

_CPU = torch.device("cpu")


class _Training:
    """One subject, ready to take steps."""

    def __init__(self, subject: Real, *, budget_bytes: int) -> None:
        self._meter = Meter(device=_CPU, cap_bytes=budget_bytes)
        self._workload = subject.workload
        with self._meter:
            job = Job(spec=subject.spec, workload=subject.workload, device=_CPU, draws_quickly=True)
            self._trainer = Trainer(
                job.build(subject.plan.weights), plan=subject.plan, workload=subject.workload, device=_CPU, meter=self._meter
            )
            self._batches = make_synthetic_batches(self._trainer.model, plan=subject.plan, workload=subject.workload)

    def run(self, num_steps: int) -> dict[str, Any]:
        times_ms = []
        with self._meter:
            for _ in range(num_steps):
                started_s = time.perf_counter()
                self._trainer.step(self._batches, learning_rate=self._workload.learning_rate)
                self._trainer.join()
                times_ms.append(1000 * (time.perf_counter() - started_s))
        return {"step_ms": times_ms, "peak_bytes": self._meter.peak().device_bytes}


def main() -> None:
    set_num_threads()
    made: dict[str, _Training] = {}
    with prepared_device(_CPU):
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                if name := asked.get("prepare"):
                    made[name] = _Training(REAL[name], budget_bytes=asked["budget_bytes"])
                    answer = made[name].run(2)
                else:
                    answer = made[asked["run"]].run(asked["num_steps"])
            except OutOfMemory as error:
                answer = {"out_of_memory": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
