"""The check of a card runs here on the CPU device and on the hostile one, on a model small enough to be traced in a test."""

import fcntl
import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.common.record import Record
from benchmarks.gpu_check import bits, budgets, card_tests, command
from benchmarks.gpu_check.command import PARTS, main
from optimizer.formats.allocator_slack import ALLOCATOR_SLACK_BYTES, ALLOCATOR_SLACK_SHARE
from optimizer.models.spec import read_model_spec
from tests.breadth import GPU_CHECK
from tests.left_out import NEEDS_PACKAGE


@pytest.fixture(scope="module")
def record() -> Record:
    config = {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 128,
        "n_positions": 64,
    }
    return budgets.check("cpu", quick=True, models={"tiny": read_model_spec(config)}, probe_s=0.1)


def test_nothing_fails_and_the_exact_goals_are_met(record: Record) -> None:
    assert [row["traceback"] for row in record.rows if row["what"] == "failed"] == []
    summary = budgets.summarize(record.rows)
    for name in ("bits equal those of keeping", "plans kept under their cap", "plain training refused"):
        assert summary[name]["met"], summary[name]


def test_the_machine_and_the_rows_are_json(record: Record) -> None:
    assert json.loads(json.dumps([record.machine, record.rows], allow_nan=False))


def test_offloading_is_among_what_runs(record: Record) -> None:
    assert any(row.get("copied_bytes") for row in record.rows)


def test_a_card_keeps_room_for_its_allocator_above_the_budget() -> None:
    for usable_bytes in (2**30, 2**33, 2**36):
        budget_bytes = budgets.budget_of_card(usable_bytes)
        slack_bytes = max(ALLOCATOR_SLACK_BYTES, budget_bytes * ALLOCATOR_SLACK_SHARE)
        assert budget_bytes + slack_bytes == pytest.approx(usable_bytes, rel=1e-6)


def test_a_row_that_failed_misses_its_goal() -> None:
    found = [{"what": "bits", "equal": True}, {"what": "failed"}]
    assert not budgets.summarize(found)["rows that failed"]["met"]


def test_parts_that_ended_are_not_run_again_unless_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "check.json"
    only = ["--device", "cpu", "--json", str(file), "--only", "tests", "--quick"]
    assert main(only) == 1
    told = capfd.readouterr().out
    assert "bits: not run" in told
    assert "tests: all goals met" in told
    first = json.loads(file.read_text())["parts"]["tests"]
    assert first["rows"][0]["what"] == "left out"
    main(only)
    assert json.loads(file.read_text())["parts"]["tests"] == first
    main([*only, "--again", "tests"])
    assert json.loads(file.read_text())["parts"]["tests"]["seconds"] > 0
    assert "== tests" in capfd.readouterr().out


def test_a_part_that_an_error_ended_failed_and_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    breaks = command.Part(name="breaks", module="benchmarks.gpu_check.no_such_module")
    monkeypatch.setattr(command, "PARTS", (breaks,))
    asked = ["--device", "cpu", "--json", str(tmp_path / "check.json")]
    for _ in range(2):
        assert main(asked) == 1
        told = capfd.readouterr().out
        assert "== breaks" in told
        assert "breaks: failed with exit code 1" in told


def test_a_part_that_missed_a_goal_is_done() -> None:
    (part, *_) = PARTS
    missed = {"exit_code": 1, "seconds": 1.0, "summary": {"bits": {"value": "1 of 2", "goal": "all", "met": False}}}
    assert command.is_done({"parts": {part.name: missed}}, part)
    assert not command.is_done({"parts": {part.name: {**missed, "summary": {}}}}, part)
    assert not command.is_done({"parts": {part.name: {**missed, "exit_code": -1}}}, part)


@pytest.mark.breadth(GPU_CHECK)
def test_a_part_that_time_ends_keeps_its_rows_ends_what_it_started_and_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "lock"
    holds = f"import fcntl, time; file = open({str(lock)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
    holds += "print(flush=True); time.sleep(1000)"
    lines = (
        "import subprocess, sys",
        "from pathlib import Path",
        "from benchmarks.common.record import Record",
        f"started = subprocess.Popen([sys.executable, '-c', {holds!r}], stdout=subprocess.PIPE)",
        "started.stdout.readline()",
        "Record(file=Path(sys.argv[2]), machine={}).add({'what': 'found'})",
        "started.wait()",
    )
    (tmp_path / "takes_long.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    part = command.Part(name="long", module="takes_long")
    monkeypatch.setattr(command, "PARTS", (part,))
    monkeypatch.setattr(command, "_LEAST_S", 1.0)
    monkeypatch.setattr(command, "_STARTING_S", 0.0)
    file = tmp_path / "check.json"
    assert main(["--device", "cpu", "--json", str(file), "--minutes", "0.25"]) == 1
    assert "long: ended at its time limit" in capfd.readouterr().out
    result = json.loads(file.read_text())
    assert result["parts"]["long"]["rows"] == [{"what": "found"}]
    assert not command.is_done(result, part)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # let go of by the process that held it


def test_no_part_is_begun_that_would_have_no_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--json", str(tmp_path / "check.json"), "--minutes", "1"]) == 1
    assert capfd.readouterr().out.count("not begun") == len(PARTS)


@pytest.mark.breadth(GPU_CHECK)
def test_a_part_runs_on_the_hostile_device_in_a_process_of_its_own(tmp_path: Path) -> None:
    options = command.read_options(["--device", "hostile", "--quick"])
    (part,) = (part for part in PARTS if part.name == "budgets")
    asked = command.command_of(part, options, tmp_path / "part.json")
    module = asked.index("benchmarks.gpu_check.on_hostile_device")
    lines = "from tests.hostile_device.backend import HostileBackend; from optimizer.runtime.device.backends import backend_of; "
    lines += "import sys, torch; print(sys.argv[1:], isinstance(backend_of(torch.device('cpu')), HostileBackend))"
    (tmp_path / "asks_its_device.py").write_text(lines)
    command_line = [*asked[: module + 1], "asks_its_device", *asked[module + 2 :]]
    paths = f"{tmp_path}:{Path.cwd()}"
    done = subprocess.run(command_line, capture_output=True, text=True, check=True, env={"PYTHONPATH": paths})
    assert done.stdout.strip() == f"{asked[module + 2 :]} True"


@pytest.mark.breadth(GPU_CHECK)
def test_techniques_and_generations_give_the_bits_of_keeping_everything(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    record = Record(file=None, machine={})
    bench = bits._Bench(torch.device("cpu"), tmp_path)
    cases = {case.name: case for case in [*bits.list_techniques(quick=False), *bits.list_adapters()]}
    assert len(cases) > 80
    for name in ("weights on disk, bf16", "selective and state on host, fp32", "adapters over nf4 on host"):
        record.add_all(name, bench.rows_of_training(cases[name]))
    record.add_all("generations", bench.rows_of_generations(bits.list_generations()[5:7]))
    summary = bits.summarize(record.rows, is_card=False)
    assert summary["plans that failed or were left out"]["met"]
    assert summary["the bits of keeping everything"]["value"] == "7 of 7"


def test_other_bits_miss_the_goal_unless_a_card_s_host_computed_them() -> None:
    row = {"what": "training", "equal": False, "distance": 1e-7, "by_host": True}
    assert not bits.summarize([row], is_card=False)["the bits of keeping everything"]["met"]
    on_card = bits.summarize([row, {**row, "by_host": False, "equal": True}], is_card=True)
    assert on_card["the bits of keeping everything"]["value"] == "1 of 1"
    assert on_card["distance of weights that the host updated"]["met"]
    far = bits.summarize([{**row, "distance": 1e-3}], is_card=True)
    assert not far["distance of weights that the host updated"]["met"]


@pytest.mark.breadth(GPU_CHECK)
def test_every_file_with_a_test_for_cards_is_run_and_each_outcome_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert {file.name for file in card_tests.list_files()} >= {"test_cuda.py", "test_step_cuda.py", "test_cuda_backend.py"}
    head = "import os, pytest\npytestmark = pytest.mark.gpu\n"
    left = "@pytest.mark.skip(reason='x')\ndef test_left(): pass\n"
    left += f"@pytest.mark.skip(reason='{NEEDS_PACKAGE}x')\ndef test_lacks(): pass\n"
    texts = {
        "test_it.py": f"def test_good(): pass\ndef test_bad(): assert 1 == 2\n{left}",
        "test_dies.py": "def test_dies(): os._exit(7)\n",
        "test_last.py": "def test_last(): pass\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(head + text)
    rows = list(card_tests.run_tests([tmp_path / name for name in texts]))
    assert {row["name"].rpartition("::")[2]: row["outcome"] for row in rows if row["what"] == "test"} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_left": "skipped",
        "test_lacks": "skipped",
        "test_last": "passed",
    }
    assert "1 == 2" in next(row["why_not"] for row in rows if row.get("outcome") == "failed")
    assert card_tests.summarize(rows)["gpu tests that pass"]["value"] == "2 of 4"
    assert [row["exit_code"] for row in rows if row["what"] == "pytest"] == [1, 7, 0]


def test_a_file_that_does_not_end_is_a_failed_row_that_names_it_and_the_next_one_is_begun(tmp_path: Path) -> None:
    files = [tmp_path / "test_hangs.py", tmp_path / "test_after.py"]
    for file in files:
        file.write_text("import pytest, time\n@pytest.mark.gpu\ndef test_hangs(): time.sleep(1000)\n")
    rows = list(card_tests.run_tests(files, limit_s=3))
    assert rows == [{"what": "failed", "of": str(file), "error": "did not end in 1 s"} for file in files]


@pytest.mark.parametrize("row", [{"what": "failed"}, {"what": "pytest", "exit_code": 7}, {"what": "test", "outcome": "skipped"}])
def test_a_file_that_did_not_end_well_and_a_test_that_was_left_out_miss_the_goal(row: dict[str, object]) -> None:
    passed = {"what": "test", "outcome": "passed"}
    assert card_tests.summarize([passed])["gpu tests that pass"]["met"]
    assert not card_tests.summarize([passed, row])["gpu tests that pass"]["met"]
