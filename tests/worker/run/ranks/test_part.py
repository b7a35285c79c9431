"""Real processes under the leaders of two machines, in folders of their own: who judges, who only reports, and who is named."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.processes import is_alive, wait_for
from tests.worker.run.ranks.test_leader import program
from worker.run.exit_codes import EXIT_DONE, EXIT_DRAINED, EXIT_FAILED
from worker.run.ranks.part import Part

LEADER = """
import json, sys
from pathlib import Path
from worker.run.ranks.leader import lead_ranks
from worker.run.runner import StopFlag
from worker.run.watch import halted, host_kills
halted.HALTED_S, halted._LOOK_S = 0.5, 0.05
flag = StopFlag()
flag.raise_on_term()
folder = Path.cwd()
host_kills.known_counts = lambda: (host_kills.KillCount(file=folder / "kills", of="the worker's control group"),)
attempt = json.loads((folder / "attempt.json").read_text())
program = json.loads((folder / "rank.json").read_text())
sys.exit(lead_ranks(attempt, folder=folder, should_stop=flag, command=lambda rank: [*program, str(rank)]))
"""
RANK = """
import json, os, sys, time
from pathlib import Path
from worker.run.ranks.rank import brief_of_rank, die_with_leader, leave_stopping_to_first, reporter_of_rank, shared_folder
from worker.run.runner import StopFlag
die_with_leader()
rank, flag = int(sys.argv[1]), StopFlag()
flag.raise_on_term()
leave_stopping_to_first(rank)
attempt = json.loads((Path.cwd() / "attempt.json").read_text())
shared = shared_folder(attempt, Path.cwd())
place = brief_of_rank(attempt, folder=Path.cwd(), rank=rank)["ranks"]
voice = reporter_of_rank(shared, rank=rank, pipe=None)
facts = {"pid": os.getpid(), "place": place, "threads": os.environ["HEADROOM_NUM_THREADS"]}
(shared / f".{rank}").write_text(json.dumps(facts))
(shared / f".{rank}").replace(shared / f"facts-{rank}")
def leave(outcome, code, exit_code):
    error = {"code": code, "message": "said so", "hint": "", "fields": {}} if outcome == "failed" else None
    voice.result({"outcome": outcome, "reason": code, "message": "said so", "error": error, "step": 1})
    sys.exit(exit_code)
while True:
    time.sleep(0.01)
    words = (shared / "word").read_text().split() if (shared / "word").exists() else []
    if f"fail-{rank}" in words:
        leave("failed", "out_of_device_memory", 1)
    if f"lost-{rank}" in words:
        leave("failed", "rank_lost", 1)
    if rank == 0 and flag():
        (shared / "word").write_text("drained")
    if words == ["drained"]:
        leave("drained", "", 75)
    if words == ["done"]:
        leave("succeeded", "done", 0)
"""
WORKER = """
import signal, subprocess, sys
leader = subprocess.Popen(sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: leader.terminate())
sys.exit(leader.wait())
"""
"""Starts the leader, as a machine's worker does."""
MACHINES = ("home", "office", "office")
OWN = {"home": ["cpu", "", ""], "office": ["", "cpu", "cpu"]}


class Led:
    """Two leaders and three ranks; the shared folder is that of the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.leaders = {name: self._lead(name, folder if name == "home" else folder / "members" / name) for name in OWN}
        self.ranks = [self._facts(rank) for rank in range(3)]

    def _lead(self, name: str, own: Path) -> "subprocess.Popen[bytes]":
        own.mkdir(parents=True, exist_ok=True)
        (own / "rank.json").write_text(json.dumps(program(RANK)))
        (own / "kills").write_text("oom_kill 4")
        brief: dict[str, Any] = {"devices": OWN[name], "machines": MACHINES, "kinds": ["small", "large", "large"]}
        (own / "attempt.json").write_text(json.dumps({**brief, "attempt_folder": str(self.folder)}))
        command = [*program(WORKER), *program(LEADER)]
        return subprocess.Popen(command, cwd=own, env={**os.environ, "HEADROOM_NUM_THREADS": "6"}, start_new_session=True)

    def _facts(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"facts-{rank}"
        wait_for(path.exists, what=f"rank {rank}")
        facts: dict[str, Any] = json.loads(path.read_text())
        return facts

    def say(self, *words: str) -> None:
        (self.folder / ".word").write_text(" ".join(words))
        (self.folder / ".word").replace(self.folder / "word")

    def codes(self) -> list[int]:
        return [self.leaders[name].wait(timeout=20) for name in OWN]

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    def is_anyone_left(self) -> bool:
        return any(is_alive(rank["pid"]) for rank in self.ranks)

    def close(self) -> None:
        for leader in self.leaders.values():
            if leader.poll() is None:
                os.killpg(leader.pid, signal.SIGKILL)
            leader.wait()


@pytest.fixture
def led(tmp_path: Path) -> Iterator[Led]:
    led = Led(tmp_path)
    yield led
    led.close()


def test_each_leader_starts_its_own_ranks_which_meet_in_the_shared_folder(led: Led) -> None:
    assert [rank["threads"] for rank in led.ranks] == ["6", "3", "3"]
    assert {rank["place"]["folder"] for rank in led.ranks} == {str(led.folder / "ranks" / "meeting")}
    assert [(rank["place"]["rank"], rank["place"]["num_ranks"]) for rank in led.ranks] == [(0, 3), (1, 3), (2, 3)]
    assert tuple(rank["place"]["machine"] for rank in led.ranks) == MACHINES
    led.say("done")
    assert led.codes() == [EXIT_DONE, EXIT_DONE]
    assert led.result()["outcome"] == "succeeded"
    assert not (led.folder / "members" / "office" / "result.json").exists()


def test_the_error_of_another_machines_rank_is_the_attempts_with_its_device_and_machine(led: Led) -> None:
    led.say("fail-2", "lost-0", "lost-1")
    assert led.codes() == [EXIT_FAILED, EXIT_FAILED]
    result = led.result()
    assert (result["reason"], result["message"]) == ("out_of_device_memory", "rank 2 of 3, on large of office: said so")
    assert (result["error"]["fields"]["rank"], "lost_machine" in result) == (2, False)


def test_a_rank_that_fails_before_any_has_met_ends_those_of_the_other_machine(led: Led) -> None:
    led.say("fail-1")
    assert led.codes() == [EXIT_FAILED, EXIT_FAILED]
    assert led.result()["message"] == "rank 1 of 3, on large of office: said so"
    assert not led.is_anyone_left()


def test_a_killed_rank_of_another_machine_is_named_and_this_leader_does_not_die_of_it(led: Led) -> None:
    os.kill(led.ranks[1]["pid"], signal.SIGKILL)
    led.say("lost-0", "lost-2")
    assert led.codes() == [EXIT_FAILED, EXIT_FAILED]
    result = led.result()
    assert result["reason"] == "worker_lost"
    assert result["message"] == "rank 1 of 3, on large of office: its process was ended by signal 9 and left no result"


def test_a_rank_that_another_machines_host_killed_ran_out_of_its_memory_with_the_last_sizes(led: Led) -> None:
    step = {"kind": "step", "step": 3, "device_bytes": {"weights": 100}, "host_bytes": 7}
    (led.folder / "samples.jsonl").write_text(f"{json.dumps(step)}\n")
    (led.folder / "members" / "office" / "kills").write_text("oom_kill 5")
    os.kill(led.ranks[1]["pid"], signal.SIGKILL)
    led.say("lost-0", "lost-2")
    assert led.codes() == [EXIT_FAILED, EXIT_FAILED]
    result = led.result()
    assert (result["reason"], result["step"]) == ("out_of_host_memory", 3)
    assert result["message"] == (
        "rank 1 of 3, on large of office: The host ran out of memory and ended the job's process after step 3; "
        "the kernel counted it in the worker's control group"
    )
    fields = result["error"]["fields"]
    assert (fields["cause"], fields["rank"], fields["bytes_by_category"]) == ("host_killed", 1, {"weights": 100})


def test_a_kill_that_the_kernel_counted_says_nothing_of_a_rank_that_its_leader_ended(led: Led) -> None:
    (led.folder / "members" / "office" / "kills").write_text("oom_kill 5")
    led.say("fail-1")
    assert led.codes() == [EXIT_FAILED, EXIT_FAILED]
    assert led.result()["reason"] == "out_of_device_memory"


def test_a_machine_that_is_gone_without_a_word_is_named(led: Led) -> None:
    os.killpg(led.leaders["office"].pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(led.ranks[2]["pid"]), what="the end of its ranks")
    led.say("lost-0")
    assert led.leaders["home"].wait(timeout=20) == EXIT_FAILED
    result = led.result()
    assert (result["lost_machine"], result["message"]) == ("office", "office, which has rank 1 of 3, was lost")


def test_ranks_whose_worker_is_halted_end_and_the_other_machine_names_it(led: Led) -> None:
    led.leaders["office"].send_signal(signal.SIGSTOP)
    assert led.leaders["home"].wait(timeout=20) == EXIT_FAILED
    result = led.result()
    assert (result["lost_machine"], result["trouble"]) == ("office", "its worker was halted")
    assert result["message"] == "office, which has rank 1 of 3, was lost: its worker was halted"
    assert not led.is_anyone_left()


def test_ranks_of_a_halted_worker_that_leads_leave_a_result_that_costs_nothing_and_a_word_for_the_others(led: Led) -> None:
    office = Part.read(json.loads((led.folder / "members" / "office" / "attempt.json").read_text()), led.folder)
    assert office.halted_machines() == ()
    led.leaders["home"].send_signal(signal.SIGSTOP)
    assert wait_for(office.halted_machines, what="the word of home's leader") == ("home",)
    assert not is_alive(led.ranks[0]["pid"])
    assert is_alive(led.ranks[1]["pid"])
    assert led.result()["outcome"] == "drained"
    led.leaders["home"].send_signal(signal.SIGCONT)
    assert led.leaders["home"].wait(timeout=20) == EXIT_DRAINED


def test_a_worker_that_was_halted_for_a_moment_loses_nothing(led: Led) -> None:
    for worker in led.leaders.values():
        worker.send_signal(signal.SIGSTOP)
        worker.send_signal(signal.SIGCONT)
    led.say("done")
    assert led.codes() == [EXIT_DONE, EXIT_DONE]


def test_a_stop_is_for_the_leader_of_the_first_rank_and_all_stop_with_it(led: Led) -> None:
    led.leaders["office"].terminate()
    led.leaders["home"].terminate()
    assert led.codes() == [EXIT_DRAINED, EXIT_DONE]
    assert led.result()["outcome"] == "drained"
    assert not led.is_anyone_left()


def test_ranks_of_one_machine_are_all_its_leaders_own(tmp_path: Path) -> None:
    part = Part.read({"devices": ["cuda:0", "cuda:1"]}, tmp_path)
    assert (part.own, part.elsewhere, part.judges) == ((0, 1), (), True)
    assert (part.labels, part.folder) == (("cuda:0", "cuda:1"), tmp_path)
