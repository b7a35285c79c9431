"""An attempt that wakes after its lease, wherever it was halted, leaves what the next attempt left as it is."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optimizer.base.serialize import to_json
from optimizer.goal import Goal
from tests.optimizer.runtime.tiny import CONFIGS, make_plan, make_workload, write_tokenizer
from tests.worker.processes import is_halted, wait_for
from worker.run.child import child_environment
from worker.run.watch.lifeline import Beats, boot_s

ROOT = Path(__file__).resolve().parents[3]
HALTING = textwrap.dedent("""
    import importlib, os, signal, sys
    sys.path.append(sys.argv.pop(1))
    from worker.run import runner
    from worker.run.watch import lifeline
    # as if it were the last to get a turn after a halt
    lifeline.WorkTime.watch = lambda time_left: signal.pause()
    module, _, name = sys.argv.pop(1).partition(":")
    place = importlib.import_module(module)
    whole = getattr(place, name)
    def halt_first(*given, **more):
        os.kill(os.getpid(), signal.SIGSTOP)
        return whole(*given, **more)
    setattr(place, name, halt_first)
    sys.exit(runner.main())
""")
PLACES = (
    "optimizer.runtime.job.export.artifacts:_leave_model",
    "optimizer.models.files.export:write_tensors",
    "optimizer.runtime.job.export.artifacts:_leave_sample",
    "worker.run.runner:_event_file",
)
"""Functions on whose threshold an attempt is halted."""


class HaltedAttempts:
    """Attempts at one job, each a process as its supervisor starts it; all but the last were halted within their export."""

    def __init__(self, folder: Path) -> None:
        self.job_folder = folder / "job"
        self._tokenizer = write_tokenizer(folder / "tokenizer.json")
        self._text = folder / "text.txt"
        self._text.write_text("In the beginning God created the heaven and the earth.\n" * 40)
        self._until_s = boot_s() + 600
        self._beats = Beats(lambda: self._until_s, interval_s=0.05)
        self._beats.start()
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self, number: int, *, halted_in: str, seed: int) -> "subprocess.Popen[bytes]":
        """seed: another gives other weights, so that whose they are can be seen."""
        folder = self.job_folder / "attempts" / str(number)
        folder.mkdir(parents=True)
        document = {
            "job_id": "job_1",
            "attempt": number,
            "fence": 10 + number,
            "kind": "train",
            "device": "cpu",
            "config": CONFIGS["llama"],
            "model_folder": str(self.job_folder),
            "weights_folder": None,
            "linked_files": [],
            "tokenizer_file": str(self._tokenizer),
            "dataset": {"file": str(self._text), "format": "txt"},
            "tokens_folder": str(self.job_folder.parent / "tokens"),
            "workload": to_json(make_workload(num_steps=1, eval_batches=1, sample_tokens=2, seed=seed)),
            "goal": to_json(Goal(device_budget_bytes=2**40)),
            "plan": make_plan().to_json(),
            "prediction": None,
            "job_folder": str(self.job_folder),
            "resume_from": None,
            "earlier_job_folders": [],
        }
        (folder / "attempt.json").write_text(json.dumps(document))
        environment = {**child_environment({"PATH": os.environ["PATH"]}, folder=folder), "HEADROOM_NUM_THREADS": "1"}
        environment["HEADROOM_BEAT_FD"] = str(self._beats.child_fd)
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-u", "-c", HALTING, str(ROOT), halted_in, str(folder)],
                env=environment,
                pass_fds=[self._beats.child_fd],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def wait_until_halted(self, number: int) -> None:
        process = self.processes[number - 1]
        wait_for(lambda: is_halted(process.pid) or process.poll(), what=f"the halt of attempt {number}", timeout_s=120)
        assert process.poll() is None, self.log(number)

    def result(self, number: int) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.job_folder / "attempts" / str(number) / "result.json").read_text())
        return document

    def log(self, number: int) -> str:
        return (self.job_folder / "attempts" / str(number) / "log.txt").read_text()

    def lose_the_lease(self) -> None:
        self._until_s = boot_s()
        self._beats._beat()
        wait_for(lambda: boot_s() > self._until_s, what="the end of the lease")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._beats.close()


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[HaltedAttempts]:
    found = HaltedAttempts(tmp_path)
    yield found
    found.close()


def test_attempts_that_were_halted_within_their_export_change_nothing_of_a_later_one(attempts: HaltedAttempts) -> None:
    for number, place in enumerate(PLACES, 1):
        attempts.begin(number, halted_in=place, seed=number)
        attempts.wait_until_halted(number)
    last = len(PLACES) + 1
    assert attempts.begin(last, halted_in="os:abort", seed=last).wait(timeout=600) == 0, attempts.log(last)
    left = attempts.result(last)["artifacts"]
    files = [attempts.job_folder / artifact["file"] for artifact in left]
    before = [file.stat() for file in files]
    attempts.lose_the_lease()
    for process in attempts.processes[:-1]:
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=60) == -signal.SIGKILL
    assert {artifact["kind"] for artifact in left} == {"model", "sample", "tensorboard"}
    assert [hashlib.sha256(file.read_bytes()).hexdigest() for file in files] == [artifact["sha256"] for artifact in left]
    assert [(file.stat().st_ino, file.stat().st_mtime_ns) for file in files] == [(at.st_ino, at.st_mtime_ns) for at in before]
    own = files[0].parents[1]
    assert sorted(path for path in own.rglob("*") if path.is_file()) == sorted(files)
