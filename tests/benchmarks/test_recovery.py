"""Rounds in which jobs over two machines lose something are judged by what came of them."""

from benchmarks.recovery.devices import summarize
from benchmarks.recovery.strikes import ALL

ROW = {
    "what": "devices",
    "strike": "kill the rank of office",
    "moment": "step",
    "ended_first": False,
    "noticed_s": 1.0,
    "restart_s": 20.0,
    "orphans": 0,
    "same_bits": True,
    "all_steps": True,
}


def test_each_process_of_each_machine_is_killed_and_halted_and_the_link_is_cut() -> None:
    assert len({strike.words for strike in ALL}) == len(ALL) == 13


def test_a_strike_that_nobody_noticed_is_named_and_has_no_restart() -> None:
    found = summarize([ROW, ROW | {"noticed_s": None, "restart_s": None}])
    assert found["strikes that nobody noticed"]["value"] == ["kill the rank of office in mid-step"]
    assert found["strike to a step of the next attempt, p99 (s)"]["value"] == 20.0


def test_a_round_whose_job_ended_first_does_not_count() -> None:
    found = summarize([ROW, ROW | {"ended_first": True, "noticed_s": None, "restart_s": None}])
    assert found["rounds of lost parts"]["value"] == 1
    assert not found["strikes that nobody noticed"]["value"]


def test_a_slow_restart_other_bits_and_a_process_that_is_left_are_missed_goals() -> None:
    found = summarize([ROW | {"restart_s": 50.0, "same_bits": False, "orphans": 1}])
    missed = [name for name, entry in found.items() if not entry["met"]]
    assert missed == [
        "rounds of lost parts",
        "rounds that ended with other bits or steps",
        "processes left 10 s after the job was given back",
        "strike to a step of the next attempt, p99 (s)",
    ]
