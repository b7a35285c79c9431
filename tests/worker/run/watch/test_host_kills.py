"""Kills by the host's out-of-memory killer, as the kernel counts them."""

from pathlib import Path

from worker.run.watch.host_kills import HostKills, KillCount, known_counts


def make_count(file: Path, text: str, *, of: str = "the group") -> KillCount:
    file.write_text(text)
    return KillCount(file=file, of=of)


def test_a_count_that_grew_is_named_the_nearest_first(tmp_path: Path) -> None:
    group = make_count(tmp_path / "memory.events", "low 0\noom 3\noom_kill 1\noom_group_kill 0\n")
    machine = make_count(tmp_path / "vmstat", "nr_free_pages 9\noom_kill 5\n", of="the machine")
    kills = HostKills([group, machine])
    assert kills.find() == ""
    machine.file.write_text("nr_free_pages 9\noom_kill 6\n")
    assert kills.find() == "the machine"
    group.file.write_text("low 0\noom 4\noom_kill 2\noom_group_kill 0\n")
    assert kills.find() == "the group"


def test_files_that_are_not_there_are_no_evidence(tmp_path: Path) -> None:
    late = KillCount(file=tmp_path / "none", of="nobody")
    kills = HostKills([late])
    late.file.write_text("oom_kill 1\n")
    assert kills.find() == ""


def test_other_counts_are_not_read_as_kills(tmp_path: Path) -> None:
    count = make_count(tmp_path / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    kills = HostKills([count])
    count.file.write_text("oom_kill_disable 1\nunder_oom 1\noom_kill 0\n")
    assert kills.find() == ""


def test_the_machine_itself_is_asked() -> None:
    assert known_counts()[-1].read() is not None
