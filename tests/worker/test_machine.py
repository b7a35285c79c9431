"""A worker's machine, and the brief of an attempt on it."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from optimizer.hardware.machine import Machine
from tests.webapp.conftest import MACHINE_DOCUMENT, make_bench, make_text, make_tiny_model
from webapp.attempts.claiming import claim_job
from webapp.jobs import actions
from webapp.jobs.models import Attempt, Job
from worker import machine as machine_module
from worker.config import WorkerConfig
from worker.gpu import visible_card
from worker.machine import (
    cached_machine,
    device_lock_file,
    device_names,
    machine_key,
    probe_in_process,
    register_this_machine,
    visible_cards,
)
from worker.run.brief import write_brief


def kept_file(home: Path) -> Path:
    return home / "cache" / f"machine-{machine_key()[:16]}.json"


def test_a_machine_measured_under_the_same_facts_is_not_measured_again(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    kept_file(tmp_path).write_text(json.dumps(MACHINE_DOCUMENT))
    assert cached_machine(tmp_path) == Machine.from_json(MACHINE_DOCUMENT)


@pytest.mark.parametrize("content", [None, "{}", "torn", "[]"])
def test_it_is_measured_when_nothing_usable_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "cache").mkdir()
        kept_file(tmp_path).write_text(content)
    monkeypatch.setattr(machine_module, "probe_in_process", lambda home: MACHINE_DOCUMENT)
    assert cached_machine(tmp_path).name == "bench"
    assert json.loads(kept_file(tmp_path).read_text()) == MACHINE_DOCUMENT


@pytest.mark.parametrize(("variable", "value"), [("CUDA_VISIBLE_DEVICES", "7"), ("HEADROOM_DEVICES", "2")])
def test_other_facts_have_another_key(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    before = machine_key()
    monkeypatch.setenv(variable, value)
    assert machine_key() != before


def test_the_machine_is_listed_under_the_name_its_worker_was_given(db: None, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    kept_file(tmp_path).write_text(json.dumps(MACHINE_DOCUMENT))
    row = register_this_machine(WorkerConfig(home=tmp_path, host="box", process_id=1))
    assert (row.name, row.document["name"]) == ("box", "box")


@pytest.mark.slow
def test_the_measurement_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    measured = Machine.from_json(probe_in_process(tmp_path))
    assert measured.rates.source == "measured"
    assert measured.device.memory_bytes > 0


def test_a_measurement_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout=b"", stderr=b"no such card")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(RuntimeError, match="this machine could not be measured, exit code 1: no such card"):
        probe_in_process(tmp_path)


def test_an_attempt_sees_its_own_cards_alone_counted_from_the_first(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    host, cards = make_bench("a"), make_bench("b", kind="cuda")
    assert (device_names(host, [0, 1]), visible_cards(host, [0, 1])) == (["cpu", "cpu"], None)
    assert (device_names(cards, []), visible_cards(cards, [])) == (["cpu"], None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (device_names(cards, [1, 3]), visible_cards(cards, [1, 3])) == (["cuda:0", "cuda:1"], "1,3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert visible_cards(cards, [1]) == "GPU-b"


def test_two_workers_with_a_card_each_lock_different_files(
    db: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = make_bench(kind="cuda")
    names = set()
    for visible in ("0", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        names.add(device_lock_file(row, slot="0", home=tmp_path).name)
    host = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    assert names == {f"device-{host}-cuda-0-0.lock", f"device-{host}-cuda-1-0.lock"}


@pytest.mark.parametrize(
    ("visible", "index", "card"), [("", 1, 1), ("3,5", 1, 5), ("GPU-aa,GPU-bb", 0, "GPU-aa"), ("2", 1, 2)]
)
def test_the_card_behind_a_torch_device_follows_the_visible_ones(visible: str, index: int, card: int | str) -> None:
    assert visible_card(index, visible=visible) == card


@pytest.fixture
def claimed(db: None, settings: Settings, tmp_path: Path) -> Callable[..., Attempt]:
    settings.REDIS_URL = f"unix://{tmp_path}/none.sock"

    def claim(kind: str = "train") -> Attempt:
        machine = make_bench()
        actions.create_job(
            owner=None,
            spec={"name": "a", "workload": {"num_steps": 10}, "goal": {"device_budget_bytes": 1000}},
            model=make_tiny_model(),
            dataset=make_text() if kind == "train" else None,
            plan={"version": 1} if kind == "train" else None,
            prediction=None,
            machine=machine,
            kind=kind,
            actor="user:test",
        )
        return claim_job(worker="w:1", machine=machine)

    return claim


def brief_of(attempt: Attempt, home: Path) -> dict[str, Any]:
    folder = home / "jobs" / attempt.job_id / "attempts" / str(attempt.number)
    write_brief(attempt, folder=folder, home=home, devices=["cpu"])
    assert [path.name for path in folder.iterdir()] == ["attempt.json"]
    return json.loads((folder / "attempt.json").read_text())


def test_a_training_attempt_gets_all_it_needs_in_absolute_paths(
    claimed: Callable[..., Attempt], tmp_path: Path
) -> None:
    attempt = claimed()
    brief = brief_of(attempt, tmp_path)
    assert brief["fence"] == attempt.fence
    assert brief["dataset"]["file"] == str(tmp_path / "datasets" / "text" / "data.txt")
    assert brief["tokenizer_file"] == str(tmp_path / "models" / "tiny" / "tokenizer.json")
    assert brief["job_folder"] == str(tmp_path / "jobs" / attempt.job_id)
    assert brief["workload"] == {"num_steps": 10}
    assert brief["resume_from"] is None


def test_a_later_attempt_resumes_from_the_newest_checkpoint(claimed: Callable[..., Attempt], tmp_path: Path) -> None:
    attempt = claimed()
    attempt.number = 2
    assert brief_of(attempt, tmp_path)["resume_from"] == "newest"


def test_a_retried_job_gets_the_folders_of_earlier_checkpoints(claimed: Callable[..., Attempt], tmp_path: Path) -> None:
    attempt = claimed()
    first = Job(pk="job_first", spec={})
    attempt.job.retry_of = Job(pk="job_second", retry_of=first, spec={})
    brief = brief_of(attempt, tmp_path)
    assert brief["resume_from"] == "newest"
    assert brief["earlier_job_folders"] == [str(tmp_path / "jobs" / name) for name in ("job_second", "job_first")]


def test_what_ships_with_the_program_keeps_its_own_path(claimed: Callable[..., Attempt], tmp_path: Path) -> None:
    attempt = claimed()
    attempt.job.dataset.file = "/program/kjv.txt"
    assert brief_of(attempt, tmp_path)["dataset"]["file"] == "/program/kjv.txt"


def test_a_profiling_attempt_gets_the_folder_for_the_profile(claimed: Callable[..., Attempt], tmp_path: Path) -> None:
    attempt = claimed("profile")
    brief = brief_of(attempt, tmp_path)
    assert brief["profile_file"].endswith(f"{attempt.job_id}/attempts/1/profile.json")
    assert "plan" not in brief
