"""The worker's settings from the environment."""

import os

import pytest

from worker.config import WorkerConfig


def test_times_can_be_shortened_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_LEASE_S", "3")
    monkeypatch.setenv("HEADROOM_POLL_S", "0.25")
    config = WorkerConfig.from_environment()
    assert (config.lease_s, config.poll_s, config.heartbeat_s) == (3, 0.25, 0.5)


@pytest.mark.parametrize(("value", "slots", "shares_if_faster"), [("", 4, True), ("1", 1, False), ("6", 6, False)])
def test_a_number_of_slots_that_was_given_is_kept_whatever_it_costs(
    monkeypatch: pytest.MonkeyPatch, value: str, slots: int, shares_if_faster: bool
) -> None:
    monkeypatch.setenv("HEADROOM_SLOTS", value) if value else monkeypatch.delenv("HEADROOM_SLOTS", raising=False)
    config = WorkerConfig.from_environment()
    assert (config.num_slots, config.shares_if_faster) == (slots, shares_if_faster)


@pytest.mark.parametrize("value", ["0", "-1", "many", "nan", "1e9"])
def test_a_number_out_of_range_names_its_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HEADROOM_SLOTS", value)
    with pytest.raises(ValueError, match=rf"HEADROOM_SLOTS is '{value}'; allowed: a number from 1 to 64"):
        WorkerConfig.from_environment()


def test_two_workers_of_one_host_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_WORKER_NAME", "box")
    assert WorkerConfig.from_environment().name == f"box:{os.getpid()}"


def test_devices_that_the_cpu_plays_are_one_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADROOM_DEVICES", raising=False)
    assert WorkerConfig.from_environment().num_played == 1
    monkeypatch.setenv("HEADROOM_DEVICES", "2")
    assert WorkerConfig.from_environment().num_played == 2
    monkeypatch.setenv("HEADROOM_DEVICES", "65")
    with pytest.raises(ValueError, match=r"HEADROOM_DEVICES is '65'; allowed: a number from 1 to 64"):
        WorkerConfig.from_environment()


def test_devices_that_the_cpu_plays_may_each_have_bytes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_DEVICES", "1GiB, 2 GiB, 1GiB")
    assert WorkerConfig.from_environment().num_played == 3
    monkeypatch.setenv("HEADROOM_DEVICES", "1GiB, two")
    with pytest.raises(ValueError, match="HEADROOM_DEVICES is '1GiB, two'; allowed: .* such as 1GiB, 2GiB"):
        WorkerConfig.from_environment()
