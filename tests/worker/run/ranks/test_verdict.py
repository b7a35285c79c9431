"""The attempt's result from those of its ranks."""

import signal
from typing import Any

import pytest

from worker.run.exit_codes import EXIT_DONE, EXIT_DRAINED, EXIT_FAILED, EXIT_NO_ROOM
from worker.run.ranks.verdict import RankEnd, Verdict, judge_ranks

DEVICES = ("cuda:0", "cuda:1")
DONE: dict[str, Any] = {"outcome": "succeeded", "reason": "done", "message": "", "error": None, "step": 9}
DRAINED: dict[str, Any] = {**DONE, "outcome": "drained", "reason": "drained"}


def failed(code: str, message: str) -> dict[str, Any]:
    error = {"code": code, "message": message, "hint": "", "fields": {"tier": "device"}}
    return {"outcome": "failed", "reason": code, "message": message, "error": error, "step": 3}


LOST = failed("rank_lost", "another rank was lost")
OUT_OF_MEMORY = failed("out_of_device_memory", "no room for 10 bytes")


def end(rank: int, exit_code: int, result: dict[str, Any] | None = None, *, killed: bool = False) -> RankEnd:
    return RankEnd(rank=rank, exit_code=exit_code, result=result, was_killed_by_leader=killed)


def judge(*ends: RankEnd, was_asked_to_stop: bool = False) -> Verdict:
    return judge_ranks(ends, devices=DEVICES, was_asked_to_stop=was_asked_to_stop)


@pytest.mark.parametrize(("code", "result"), [(EXIT_DONE, DONE), (EXIT_DRAINED, DRAINED)])
def test_where_all_end_well_the_result_is_the_first_ranks(code: int, result: dict[str, Any]) -> None:
    other = {**result, "step": 0}
    assert judge(end(1, code, other), end(0, code, result)) == Verdict(result=result, exit_code=code)


def test_the_error_is_that_of_the_rank_that_failed_by_itself_whoever_ended_first() -> None:
    for ends in ((end(0, EXIT_FAILED, LOST), end(1, EXIT_FAILED, OUT_OF_MEMORY)),
                 (end(1, EXIT_FAILED, OUT_OF_MEMORY), end(0, -signal.SIGKILL, killed=True))):  # fmt: skip
        verdict = judge(*ends)
        assert verdict.exit_code == EXIT_FAILED
        assert verdict.result is not None
        assert verdict.result["reason"] == "out_of_device_memory"
        assert verdict.result["message"] == "rank 1 of 2, on cuda:1: no room for 10 bytes"
        assert verdict.result["error"]["message"] == verdict.result["message"]
        assert verdict.result["error"]["fields"] == {"tier": "device", "rank": 1, "num_ranks": 2}


def test_a_rank_that_was_killed_from_outside_ends_the_attempt_as_it_would_alone() -> None:
    ends = (end(1, -signal.SIGKILL), end(0, EXIT_FAILED, LOST))
    assert judge(*ends) == Verdict(result=None, exit_code=-signal.SIGKILL)


def test_a_rank_whose_disk_took_no_result_says_so_by_its_exit_code() -> None:
    assert judge(end(1, EXIT_NO_ROOM), end(0, EXIT_FAILED, LOST)) == Verdict(result=None, exit_code=EXIT_NO_ROOM)


def test_where_all_only_lost_each_other_that_is_the_error() -> None:
    verdict = judge(end(0, EXIT_FAILED, LOST), end(1, -signal.SIGKILL, killed=True))
    assert verdict.result is not None
    assert verdict.result["message"] == "rank 0 of 2, on cuda:0: another rank was lost"


def test_an_end_by_term_before_the_first_rank_listens_is_a_stop_without_a_checkpoint() -> None:
    ends = (end(0, -signal.SIGTERM), end(1, -signal.SIGKILL, killed=True))
    assert judge(*ends, was_asked_to_stop=True) == Verdict(result=None, exit_code=EXIT_DRAINED)
    assert judge(*ends) == Verdict(result=None, exit_code=-signal.SIGTERM)


def test_what_the_others_do_after_the_first_rank_is_done_changes_nothing() -> None:
    assert judge(end(0, EXIT_DONE, DONE), end(1, -signal.SIGKILL, killed=True)) == Verdict(result=DONE, exit_code=EXIT_DONE)
