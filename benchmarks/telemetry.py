"""Measures the whole cost of telemetry to a run: step time with all of its path at work over that with none; goal 1 % at 5/s.

Reported: a clock on every copy, the record of the step, a counted timeline as often as in a job, the line in ``samples.jsonl``,
the pipe, and a supervisor in a process of its own that writes rows to the database and publishes them through Valkey. Silent:
none of this, the supervisor stopped; what it has not read yet it reads in the next reported block. One trainer takes short
blocks of steps in turn (A B, B A, ...), since the machine's pace drifts within seconds by more than is to be seen. The cost is
the time of all reported steps over that of all silent ones, so that the rare counted steps weigh what they take; its interval is
drawn from the pairs again and again (bootstrap). Where a step is longer than a fifth of a second, several records are sent for
it, so that the rate is 5/s whatever the machine. Beside it stands the same of processor time, the supervisor's and Valkey's
added to the reported side: the cost of telemetry to the machine, which others at work on it disturb less.

    python -m benchmarks.telemetry [--quick] [--only PLAN] [--json FILE]
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.record import Record, Row, at_most, describe_machine
from optimizer.models.build import build_model
from optimizer.models.presets import PRESETS
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.job.telemetry import StepWatch
from optimizer.runtime.meter.counting import CountingPolicy
from optimizer.runtime.meter.device import set_num_threads
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.micro_batch import MicroBatch
from optimizer.runtime.step.step import StepResult, Trainer
from optimizer.workload import TrainingWorkload
from worker.run.pipe import PipeWriter
from worker.run.reporter import Reporter

MODEL = "headroom-demo-10m"
WORKLOAD = TrainingWorkload(sequence_length=256, global_batch_size=2, num_steps=1_000_000)
CPU = torch.device("cpu")
RECORDS_PER_S = 5.0
GOAL_COST = 0.01
_BLOCK_S, _WARM_UP_S = 0.3, 2.5
_MODULE = "benchmarks.telemetry_supervisor"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few and short blocks, under a minute on two cores")
    parser.add_argument("--only", choices=list(make_plans()), help="one of the plans")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well")
    arguments = parser.parse_args()
    set_num_threads()
    record = Record(file=arguments.json, machine=describe_machine(CPU), is_quick=arguments.quick)
    for name, plan in make_plans().items():
        if arguments.only in (None, name):
            record.add(measure(name, plan, duration_s=12.0 if arguments.quick else 240.0))
    worst = max(row["cost"] for row in record.rows)
    return record.finish({"telemetry_share_of_step_time": at_most(worst, GOAL_COST, needs="full size")})


def make_plans() -> dict[str, Plan]:
    """One that copies nothing, and one whose copies, each on the clock, are many."""
    num_blocks = read_model_spec(PRESETS[MODEL].config).num_blocks
    batch = BatchPlan(micro_batch_size=WORKLOAD.global_batch_size, accumulation_steps=1)
    return {
        "keep": Plan(batch=batch, activations=ActivationsPlan(per_block=_each("keep", num_blocks))),
        "offload": Plan(
            batch=batch,
            activations=ActivationsPlan(per_block=_each("offload", num_blocks)),
            gradients=GradientsPlan(choice="host"),
            optimizer_state=OptimizerStatePlan(place="host"),
        ),
    }


def _each(choice: BlockChoice, num_blocks: int) -> tuple[BlockChoice, ...]:
    return (choice,) * num_blocks


def measure(name: str, plan: Plan, *, duration_s: float) -> Row:
    """Measure one plan in pairs of blocks, one reported and one silent."""
    with _subject(plan) as subject:
        for is_reported in (True, False):
            subject.run_block(_WARM_UP_S, is_reported=is_reported)
        subject.forget()
        pairs: list[dict[bool, Block]] = []
        start_s = time.perf_counter()
        while time.perf_counter() - start_s < duration_s:
            order = (True, False) if len(pairs) % 2 == 0 else (False, True)
            pairs.append({is_reported: subject.run_block(_BLOCK_S, is_reported=is_reported) for is_reported in order})
        wall = [(pair[True].step_ms, pair[False].step_ms) for pair in pairs]
        cpu = [(pair[True].cpu_ms, pair[False].cpu_ms) for pair in pairs]
        return {
            "what": "cost",
            "plan": name,
            "num_pairs": len(pairs),
            "silent_step_ms": round(statistics.median(silent for _, silent in wall), 2),
            "records_per_s": round(subject.num_records / subject.reported_s, 2),
            "num_copies_per_step": subject.copies_per_step(),
            "cost": _cost(wall),
            "cost_90_percent": _interval(wall),
            "cost_cpu_time": _cost(cpu),
            "cost_cpu_time_90_percent": _interval(cpu),
            "own_ms_per_record": round(statistics.median(subject.own_ms), 4),
            "rows_in_database": subject.rows_in_database(),
        }


def _cost(pairs: Sequence[tuple[float, float]]) -> float:
    """Time of the reported steps over that of the silent ones, less one; pairs are (reported, silent)."""
    return round(sum(reported for reported, _ in pairs) / sum(silent for _, silent in pairs) - 1, 5)


def _interval(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Interval that holds nine of ten costs of as many pairs drawn from these."""
    drawn = random.Random(1)
    costs = [_cost(drawn.choices(pairs, k=len(pairs))) for _ in range(1000)]
    tenths = statistics.quantiles(costs, n=20)
    return [tenths[0], tenths[-1]]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Means over the steps of one block."""

    step_ms: float
    cpu_ms: float
    """Processor time of a step, with that of the supervisor meanwhile."""


class Subject:
    """One trainer whose steps are reported or silent."""

    def __init__(
        self,
        trainer: Trainer,
        batches: list[MicroBatch],
        *,
        reporter: Reporter,
        supervisor: "subprocess.Popen[str]",
    ) -> None:
        self._trainer = trainer
        self._batches = batches
        self._reporter = reporter
        self._supervisor = supervisor
        assert trainer.meter is not None
        self._watch = StepWatch(trainer, meter=trainer.meter, workload=WORKLOAD)
        self._busy = trainer.tiers.lanes.busy
        self._step = 0
        self._reported_steps_s = 0.0
        self._counting = CountingPolicy(now_s=lambda: self._reported_steps_s)
        self.own_ms: list[float] = []
        """This process's time to make and send one record, for each."""
        self.forget()

    def forget(self) -> None:
        self.num_records = 0
        self.reported_s = 0.0
        self.own_ms.clear()

    def run_block(self, block_s: float, *, is_reported: bool) -> Block:
        """Take whole steps for at least that long."""
        self._supervisor.send_signal(signal.SIGCONT if is_reported else signal.SIGSTOP)
        lanes: Any = self._trainer.tiers.lanes
        lanes.busy = self._busy if is_reported else lambda lane: contextlib.nullcontext()
        start_s, num_steps, num_sent = time.perf_counter(), 0, 0
        start_cpu_s = time.process_time() + _cpu_s(self._supervisor.pid)
        while (now_s := time.perf_counter()) - start_s < block_s:
            if is_reported:
                num_due = int((self.reported_s + now_s - start_s) * RECORDS_PER_S) + 1 - self.num_records - num_sent
                self._reported_step(num_records=num_due)
                num_sent += num_due
            else:
                self._trainer.step(self._batches, learning_rate=1e-4, is_counted=False)
            num_steps += 1
        took_s = time.perf_counter() - start_s
        if is_reported:
            self.num_records += num_sent
            self.reported_s += took_s
        cpu_s = time.process_time() + _cpu_s(self._supervisor.pid) - start_cpu_s
        return Block(step_ms=took_s / num_steps * 1000, cpu_ms=cpu_s / num_steps * 1000)

    def copies_per_step(self) -> int:
        """Number of copies of one step, each of which has a clock on it."""
        lanes: Any = self._trainer.tiers.lanes
        count = 0

        @contextmanager
        def counted(lane: Any) -> Iterator[None]:
            nonlocal count
            count += 1
            yield

        lanes.busy = counted
        self._trainer.step(self._batches, learning_rate=1e-4, is_counted=False)
        lanes.busy = self._busy
        return count

    def rows_in_database(self) -> int:
        """Number of rows that the supervisor says it wrote, which shows that it did its part."""
        self._supervisor.send_signal(signal.SIGCONT)
        out, _ = self._supervisor.communicate("end\n", timeout=60)
        return int(out.strip().splitlines()[-1])

    def _reported_step(self, *, num_records: int) -> None:
        with_timeline = num_records > 0 and self._counting.is_due(self._step)
        self._watch.begin(with_timeline=with_timeline)
        result = self._trainer.step(self._batches, learning_rate=1e-4, is_counted=with_timeline)
        self._watch.end()
        self._counting.note(result.step_ms / 1000, is_counted=with_timeline)
        self._reported_steps_s += result.step_ms / 1000
        if with_timeline:
            self._report("timeline", self._watch.timeline(result))
        for _ in range(num_records):
            self._report_step(result, is_counted=with_timeline)

    def _report_step(self, result: StepResult, *, is_counted: bool) -> None:
        start_s = time.perf_counter()
        fields = self._watch.fields(result, learning_rate=1e-4, data_wait_ms=0.0, is_counted=is_counted)
        self._report("step", fields)
        self.own_ms.append((time.perf_counter() - start_s) * 1000)

    def _report(self, kind: str, fields: dict[str, Any]) -> None:
        self._step += 1
        self._reporter({"type": "sample", "kind": kind, "attempt": 1, "step": self._step, "time_s": time.time(), **fields})


@contextmanager
def _subject(plan: Plan) -> Iterator[Subject]:
    # short, because the path of a Unix socket may have 107 characters
    with tempfile.TemporaryDirectory(prefix="hr-") as home, contextlib.ExitStack() as stack:
        folder = Path(home) / "attempt"
        folder.mkdir()
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        environment = {**os.environ, "HEADROOM_HOME": home, "DJANGO_SETTINGS_MODULE": "webapp.settings"}
        for name in ("DATABASE_URL", "REDIS_URL"):
            environment.pop(name, None)
        supervisor = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(folder), str(read_fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            pass_fds=[read_fd],
        )
        stack.callback(_end, supervisor)
        os.close(read_fd)
        assert supervisor.stdout is not None
        if supervisor.stdout.readline() != "ready\n":
            raise RuntimeError("the supervisor's process did not start")
        spec = read_model_spec(PRESETS[MODEL].config)
        meter = Meter(device=CPU)
        with meter.translating():
            trainer = Trainer(build_model(spec, seed=1), plan=plan, workload=WORKLOAD, device=CPU, meter=meter)
        stack.callback(trainer.close)
        batches = make_synthetic_batches(trainer.model, plan=plan, workload=WORKLOAD)
        for _ in range(2):
            trainer.step(batches, learning_rate=1e-4)
        reporter = Reporter(folder, pipe=PipeWriter(write_fd))
        stack.callback(reporter.close)
        yield Subject(trainer, batches, reporter=reporter, supervisor=supervisor)


def _cpu_s(pid: int) -> float:
    """Processor time of a process and its children that live."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own_s + sum(_cpu_s(int(child)) for child in children)


def _end(supervisor: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        supervisor.send_signal(signal.SIGCONT)
        supervisor.terminate()
    supervisor.wait()


if __name__ == "__main__":
    sys.exit(main())
