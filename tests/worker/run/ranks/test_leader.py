"""Real processes under a leader: what each is given, and that all of them end, however one of them does."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.processes import is_alive, wait_for
from worker.run.exit_codes import EXIT_DRAINED, EXIT_FAILED
from worker.run.ranks.leader import rank_environment

ROOT = Path(__file__).resolve().parents[4]
LEADER = """
import json, os, sys
from pathlib import Path
from worker.run.child import isolated_command
from worker.run.ranks.leader import lead_ranks
from worker.run.runner import StopFlag
from worker.run.watch import halted
halted.HALTED_S = 0.3
flag = StopFlag()
flag.raise_on_term()
folder = Path.cwd()
program = json.loads((folder / "rank.json").read_text())
attempt = {"devices": ["cpu"] * 3}
sys.exit(lead_ranks(attempt, folder=folder, should_stop=flag, command=lambda rank: [*program, str(rank)]))
"""
RANK = """
import json, os, signal, sys, time
from pathlib import Path
from worker.run.ranks.rank import die_with_leader, leave_stopping_to_first, reporter_of_rank
from worker.run.runner import StopFlag
rank = int(sys.argv[1])
die_with_leader()
flag = StopFlag()
flag.raise_on_term()
leave_stopping_to_first(rank)
folder = Path.cwd()
facts = {"pid": os.getpid(), "group": os.getpgrp(), "environment": dict(os.environ), "pipe": os.environ.get("HEADROOM_PIPE_FD")}
(folder / f".{rank}").write_text(json.dumps(facts))
(folder / f".{rank}").replace(folder / f"facts-{rank}")
voice = reporter_of_rank(folder, rank=rank, pipe=None)
def leave(code, message):
    error = {"code": code, "message": message, "hint": "", "fields": {}}
    voice.result({"outcome": "failed", "reason": code, "message": message, "error": error, "step": 1})
    sys.exit(1)
while True:
    time.sleep(0.01)
    word = (folder / "word").read_text() if (folder / "word").exists() else ""
    if word == "fail" and rank == 1:
        leave("out_of_device_memory", "no room")
    if word in ("fail", "lost") and rank == 0:
        leave("rank_lost", "another rank was lost")
    if word == "done" or (rank == 0 and flag()):
        outcome = "succeeded" if word == "done" else "drained"
        (folder / "word").write_text("done")
        voice.result({"outcome": outcome, "reason": "", "message": f"by {rank}", "error": None, "step": 1})
        sys.exit(0 if outcome == "succeeded" else 75)
"""


def program(source: str) -> list[str]:
    return [sys.executable, "-I", "-u", "-c", f"import sys; sys.path.append({str(ROOT)!r}); exec({source!r})"]


class Led:
    """A leader and three ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "rank.json").write_text(json.dumps(program(RANK)))
        environment = {**os.environ, "HEADROOM_NUM_THREADS": "6", "HEADROOM_SECRET_KEY": "x", "HEADROOM_PIPE_FD": "1"}
        self.leader = subprocess.Popen(
            program(LEADER), cwd=folder, env=environment, stdout=subprocess.PIPE, start_new_session=True
        )
        self.ranks = [self._facts(rank) for rank in range(3)]

    def _facts(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"facts-{rank}"
        wait_for(path.exists, what=f"rank {rank}")
        facts: dict[str, Any] = json.loads(path.read_text())
        return facts

    def say(self, word: str) -> None:
        (self.folder / ".word").write_text(word)
        (self.folder / ".word").replace(self.folder / "word")

    def result(self) -> dict[str, Any] | None:
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def is_anyone_left(self) -> bool:
        return any(is_alive(rank["pid"]) for rank in self.ranks)

    def close(self) -> None:
        if self.leader.poll() is None:
            os.killpg(self.leader.pid, signal.SIGKILL)
        self.leader.communicate()


@pytest.fixture
def led(tmp_path: Path) -> Iterator[Led]:
    led = Led(tmp_path)
    yield led
    led.close()


def test_each_rank_has_its_part_of_the_threads_nothing_secret_and_the_first_alone_the_pipe(led: Led) -> None:
    for rank in led.ranks:
        assert rank["environment"]["HEADROOM_NUM_THREADS"] == "2"
        assert "HEADROOM_SECRET_KEY" not in rank["environment"]
        assert rank["group"] == led.leader.pid
    assert [rank["pipe"] for rank in led.ranks] == ["1", None, None]
    led.say("done")
    assert led.leader.wait(timeout=10) == 0
    assert led.result() == {"outcome": "succeeded", "reason": "", "message": "by 0", "error": None, "step": 1}


def test_the_others_are_ended_within_seconds_and_the_result_is_the_failed_ranks_own(led: Led) -> None:
    began_s = time.monotonic()
    led.say("fail")
    assert led.leader.wait(timeout=10) == EXIT_FAILED
    assert time.monotonic() - began_s < 8
    result = led.result()
    assert result is not None
    assert (result["reason"], result["message"]) == ("out_of_device_memory", "rank 1 of 3, on cpu: no room")
    assert not led.is_anyone_left()


def test_a_killed_rank_takes_the_others_and_the_leader_along_by_the_same_signal(led: Led) -> None:
    os.kill(led.ranks[1]["pid"], signal.SIGKILL)
    led.say("lost")
    assert led.leader.wait(timeout=10) == -signal.SIGKILL
    assert led.result() is None
    assert not led.is_anyone_left()


def test_a_halted_rank_is_ended_as_a_killed_one_is(led: Led) -> None:
    os.kill(led.ranks[2]["pid"], signal.SIGSTOP)
    assert led.leader.wait(timeout=20) == -signal.SIGKILL
    assert not led.is_anyone_left()


def test_no_rank_is_left_without_its_leader(led: Led) -> None:
    led.leader.kill()
    led.leader.wait()
    wait_for(lambda: not led.is_anyone_left(), what="the end of all ranks", timeout_s=10)


def test_a_stop_reaches_the_first_rank_which_stops_all(led: Led) -> None:
    for process in (led.leader.pid, led.ranks[2]["pid"]):  # a service that is stopped signals all of its processes
        os.kill(process, signal.SIGTERM)
    assert led.leader.wait(timeout=10) == EXIT_DRAINED
    result = led.result()
    assert result is not None
    assert result["outcome"] == "drained"
    assert not led.is_anyone_left()


@pytest.mark.parametrize(
    ("visible", "device", "card"),
    [("", "cuda:1", "1"), ("4,6", "cuda:1", "6"), ("GPU-a,GPU-b", "cuda:0", "GPU-a")],
)
def test_a_rank_sees_its_own_card_alone(tmp_path: Path, visible: str, device: str, card: str) -> None:
    given = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    environment = rank_environment(given, device=device, num_ranks=2, folder=tmp_path, num_cores=8)
    assert environment["CUDA_VISIBLE_DEVICES"] == card
    assert environment["OMP_NUM_THREADS"] == "4"


def test_nccl_takes_its_memory_as_ranks_connect_unless_set_otherwise(tmp_path: Path) -> None:
    def taken(device: str, **given: str) -> str | None:
        own = rank_environment(given, device=device, num_ranks=2, folder=tmp_path, num_cores=8)
        return own.get("NCCL_RUNTIME_CONNECT")

    assert (taken("cuda:0"), taken("cuda:0", NCCL_RUNTIME_CONNECT="1"), taken("cpu")) == ("0", "1", None)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_ranks_share_the_threads_of_their_own_machine(tmp_path: Path, device: str) -> None:
    def dealt(num_ranks: int, **given: str) -> str:
        return rank_environment(given, device=device, num_ranks=num_ranks, folder=tmp_path, num_cores=8)["HEADROOM_NUM_THREADS"]

    assert (dealt(2), dealt(3), dealt(2, HEADROOM_NUM_THREADS="6"), dealt(16)) == ("4", "2", "3", "1")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"HEADROOM_RANK_INTERFACE": "eth0"}, "=eth0"),
        ({"HEADROOM_RANK_INTERFACE": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}, "ib0"),
        ({"HEADROOM_RANK_INTERFACE": "lo"}, None),
        ({}, None),
    ],
)
def test_nccl_takes_the_interface_of_the_ranks_unless_it_has_its_own(
    tmp_path: Path, given: dict[str, str], taken: str | None
) -> None:
    environment = rank_environment(given, device="cuda:0", num_ranks=2, folder=tmp_path, num_cores=8)
    assert environment.get("NCCL_SOCKET_IFNAME") == taken


def test_threads_of_the_cpu_device_are_dealt_out_and_each_rank_has_one_at_least(tmp_path: Path) -> None:
    def dealt(num_ranks: int, **given: str) -> str:
        return rank_environment(given, device="cpu", num_ranks=num_ranks, folder=tmp_path, num_cores=8)["HEADROOM_NUM_THREADS"]

    assert (dealt(2), dealt(2, HEADROOM_NUM_THREADS="2"), dealt(4, HEADROOM_NUM_THREADS="1")) == ("4", "1", "1")
