"""Ranks whose supervisor is silent end by themselves, though their leader is halted as well."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.worker.processes import is_alive, is_halted, wait_for
from worker.run.watch.lifeline import Beats, boot_s

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = textwrap.dedent("""
    import json, os, signal, sys, time
    from pathlib import Path
    from worker.run import runner
    from worker.run.ranks import leader
    from worker.run.watch import lifeline
    own = json.loads(Path("program.json").read_text())
    leader._runner = lambda folder: lambda rank: [*own, str(folder), str(rank)]
    if Path("deaf").exists():  # as if the thread that waits were the last to get a turn after a halt
        lifeline.WorkTime.watch = lambda time_left: signal.pause()
    def work(attempt, *, reporter, should_stop):
        rank, step = attempt["ranks"]["rank"], 0
        Path(f"pid-{rank}").write_text(f"{os.getpid()}\\n")
        with open(f"written-{rank}", "a") as file:
            while True:
                step += 1
                reporter({"type": "sample", "kind": "step", "step": step, "time_s": lifeline.boot_s()})
                print(lifeline.boot_s(), file=file, flush=True)
                time.sleep(0.01)
    runner._WORK["train"] = work
    sys.exit(runner.main())
""")
ONE_MACHINE = {"devices": ["cpu", "cpu"]}
ANOTHER_LEADS = {"devices": ["", "cpu"], "machines": ["home", "office"], "kinds": ["CPU", "CPU"], "machine": "office"}


class Silent:
    """A leader and its ranks, whose supervisor this process plays."""

    def __init__(self, folder: Path, part: dict[str, Any]) -> None:
        self.folder = folder
        self.until_s = boot_s() + 600
        self.beats = Beats(lambda: self.until_s, interval_s=0.02)
        program = [sys.executable, "-I", "-u", "-c", f"import sys; sys.path.append({str(ROOT)!r}); exec({PROGRAM!r})"]
        (folder / "program.json").write_text(json.dumps(program))
        attempt = {"job_id": "job_1", "attempt": 1, "fence": 1, "kind": "train", "plan": {"layout": {"num_devices": 2}}, **part}
        (folder / "attempt.json").write_text(json.dumps({**attempt, "attempt_folder": str(folder)}))
        self.leader = subprocess.Popen(
            [*program, str(folder)],
            cwd=folder,
            env={**os.environ, "HEADROOM_BEAT_FD": str(self.beats.child_fd)},
            pass_fds=[self.beats.child_fd],
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.beats.start()
        self.ranks = [rank for rank, device in enumerate(part["devices"]) if device]
        for rank in self.ranks:
            wait_for(partial(self.times, rank), what=f"work of rank {rank}")
        self.pids = [int((folder / f"pid-{rank}").read_text()) for rank in self.ranks]

    def times(self, rank: int) -> list[float]:
        """The moments at which it wrote."""
        file = self.folder / f"written-{rank}"
        whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
        return [float(line) for line in whole.splitlines()]

    def num_written(self, rank: int) -> int:
        return len(self.times(rank))

    def close(self) -> None:
        if self.leader.poll() is None:
            os.killpg(self.leader.pid, signal.SIGKILL)
        self.leader.communicate()
        self.beats.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Silent]]:
    started: list[Silent] = []

    def make(part: dict[str, Any]) -> Silent:
        started.append(Silent(tmp_path, part))
        return started[-1]

    yield make
    for silent in started:
        silent.close()


@pytest.mark.parametrize("part", [ONE_MACHINE, ANOTHER_LEADS], ids=["one machine", "another machine leads"])
def test_ranks_of_a_silent_supervisor_end_within_the_lease_though_their_leader_is_halted(
    start: Callable[..., Silent], part: dict[str, Any]
) -> None:
    silent = start(part)
    os.kill(silent.leader.pid, signal.SIGSTOP)
    until_s = silent.until_s = boot_s() + 1.0
    assert "the supervisor is silent" in silent.leader.communicate(timeout=60)[1]
    assert silent.leader.returncode == -signal.SIGKILL
    wait_for(lambda: not any(map(is_alive, silent.pids)), what="the end of all ranks")
    assert all(silent.times(rank)[-1] <= until_s for rank in silent.ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_wakes_before_its_leader_ends_all_before_it_writes_anything(
    start: Callable[..., Silent], tmp_path: Path, rank: int
) -> None:
    (tmp_path / "deaf").touch()
    silent = start(ONE_MACHINE)
    os.killpg(silent.leader.pid, signal.SIGSTOP)
    wait_for(lambda: all(map(is_halted, silent.pids)), what="the halt of all ranks")
    silent.until_s = boot_s()
    before = [silent.num_written(each) for each in silent.ranks]
    wait_for(lambda: silent.beats.has_lapsed, what="the end of the lease")
    os.kill(silent.pids[rank], signal.SIGCONT)
    assert silent.leader.wait(timeout=60) == -signal.SIGKILL
    after = [silent.num_written(each) for each in silent.ranks]
    # a line that it was about to write when it was halted
    assert all(now - then <= int(each == rank) for each, then, now in zip(silent.ranks, before, after, strict=True))
