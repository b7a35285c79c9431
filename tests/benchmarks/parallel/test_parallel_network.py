"""The benchmark of links: what it reports, and what it does where no namespaces may be made."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from benchmarks.common.record import Row
from benchmarks.parallel import network
from benchmarks.parallel.links import namespaces, relay
from benchmarks.parallel.links.namespaces import LinkProfile, NoNamespaces


def row(link: str, *, step: float, sent: float = 0.0, frames: float = 0.0, has_small_frames: bool = False) -> Row:
    return {
        "what": "case",
        "link": link,
        "step_error_percent": step,
        "sent_error_percent": sent,
        "frames_error_percent": frames,
        "has_small_frames": has_small_frames,
    }


def test_goals_are_about_the_worst_and_the_median_of_each_link() -> None:
    link = "1 Gbit/s, 1 ms"
    rows = [row(link, step=step, sent=-3.0, frames=9.0) for step in (-16.0, 2.0, -1.0)]
    rows.append(row("same box, frames of 1500 bytes", step=80.0, frames=1.0, has_small_frames=True))
    goals = network.summarize(rows)
    worst = goals[f"step time over {link}, worst error, %"]
    median = goals[f"step time over {link}, median error, %"]
    assert (worst["value"], worst["met"]) == (16.0, False)
    assert (median["value"], median["met"]) == (2.0, True)
    assert not goals["bytes of a rank's connections, worst error, %"]["met"]
    assert goals["bytes of a rank's interface in frames of 1500 bytes, worst error, %"]["met"]
    assert goals["step time over same box, worst error, %"]["value"] is None


def test_without_namespaces_the_failure_is_named_and_the_loopback_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LinkProfile | None] = []

    def measure(cases: Sequence[Any], profile: LinkProfile | None, profiles: Any, *, num_rounds: int) -> Iterator[Row]:
        asked.append(profile)
        if profile is not None:
            namespaces._run("headroom-has-no-such-program", "netns")
        yield row("loopback", step=0.0)

    monkeypatch.setattr(network, "_measure", measure)
    monkeypatch.setattr(network, "make_profile", lambda shape, cases: None)
    failed, measured = network.measure_all(is_quick=True)
    assert asked[1:] == [None]
    assert "headroom-has-no-such-program cannot be run" in failed["error"]
    assert measured["link"] == "loopback"


def test_a_command_that_the_system_refuses_is_named() -> None:
    with pytest.raises(NoNamespaces, match=r"ip netns frobnicate failed: .+"):
        namespaces._run("ip", "netns", "frobnicate")


def test_large_frames_take_the_time_of_those_that_a_cable_would_carry() -> None:
    assert relay._bytes_on_wire(1514) == 1514
    assert relay._bytes_on_wire(66 + 10 * 1448) == 10 * 1514
