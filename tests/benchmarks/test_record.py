"""Results are published: they have one form, and nothing of the machine's folders."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.parts import Part, run_parts
from benchmarks.common.record import GoalEntry, Record, all_of, at_most, describe_machine, failure, goal, none_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
FILE_OF_A_MACHINE = re.compile(r'File \\?"/')


def fail() -> None:
    json.loads("{")


def test_a_failure_is_reported_with_paths_as_the_repository_has_them() -> None:
    try:
        fail()
    except ValueError as error:
        row = failure("reading", error)
    assert (row["what"], row["of"]) == ("failed", "reading")
    assert row["error"].startswith("JSONDecodeError: ")
    assert 'File "tests/benchmarks/test_record.py"' in row["traceback"]
    assert not FILE_OF_A_MACHINE.search(row["traceback"])


def test_an_error_among_rows_leaves_those_before_it(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"what": "first"}
        fail()

    record = Record(file=tmp_path / "result.json", machine=describe_machine())
    record.add_all("all", rows())
    written = json.loads((tmp_path / "result.json").read_text())
    assert [row["what"] for row in written["rows"]] == ["first", "failed"]


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_committed_result_has_the_form_and_names_no_folder_of_a_machine(file: Path) -> None:
    text = file.read_text()
    document = json.loads(text)
    # parts that are processes of their own (gpu_check) leave a document each
    parts = document.get("parts", {"all": document})
    assert isinstance(document["machine"], dict)
    assert parts
    for part in parts.values():
        assert {"machine", "rows", "summary"} <= set(part)
        assert isinstance(part["machine"], dict)
        assert isinstance(part["rows"], list)
        assert all({"value", "goal", "met"} <= set(entry) for entry in part["summary"].values())
    assert not FILE_OF_A_MACHINE.search(text)


def test_a_benchmark_without_tensors_imports_no_torch() -> None:
    code = "import sys, benchmarks.common.record, benchmarks.live.command, benchmarks.repricing; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def goals_of_a_run(*, num_cases: int = 3, took_s: float | None = 0.5) -> dict[str, GoalEntry]:
    return {
        "cases": goal(num_cases, ">= 100", met=num_cases >= 100, needs="all cases"),
        "time": at_most(took_s, 1.0, needs="full size"),
        "peaks over the budget": none_of(0, ["a row"]),
        "runs that finished": all_of([]),
    }


def test_a_quick_run_leaves_out_the_goals_that_it_cannot_judge_and_passes(tmp_path: Path) -> None:
    record = Record(file=tmp_path / "result.json", machine={}, is_quick=True)
    assert record.finish(goals_of_a_run(took_s=9.0)) == 0
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["summary"] == {"peaks over the budget": {"value": 0, "goal": 0, "met": True}}


def test_a_quick_run_still_fails_for_what_it_measured_and_missed() -> None:
    record = Record(file=None, machine={}, is_quick=True)
    assert record.finish({**goals_of_a_run(), "peaks over the budget": none_of(1, ["a row"])}) == 1


def test_a_run_of_some_cases_is_judged_on_its_times_but_not_on_what_it_has_no_rows_for() -> None:
    record = Record(file=None, machine={}, is_whole=False)
    assert record.finish(goals_of_a_run()) == 0
    assert list(record.summary) == ["time", "peaks over the budget"]
    slow = Record(file=None, machine={}, is_whole=False)
    assert slow.finish(goals_of_a_run(took_s=9.0)) == 1


def test_a_full_run_has_every_goal_and_misses_those_that_it_shows_nothing_for() -> None:
    record = Record(file=None, machine={})
    assert record.finish(goals_of_a_run(num_cases=100, took_s=None)) == 1
    assert {name: entry["met"] for name, entry in record.summary.items()} == {
        "cases": True,
        "time": False,
        "peaks over the budget": True,
        "runs that finished": False,
    }


def test_what_a_quick_run_leaves_out_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    Record(file=None, machine={}, is_quick=True).finish(goals_of_a_run())
    assert "left to a full run:\n  cases\n  time\n  runs that finished\n" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "code"), [([], 1), (["--quick"], 0), (["--of", "a"], 0), (["--of", "a", "--add"], 1)])
def test_parts_end_with_the_code_of_the_goals_that_the_run_could_judge(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int
) -> None:
    part = Part(
        name="one",
        measure=lambda options: iter([{"part": "one", "case": "a"}]),
        summarize=lambda rows: {"cases": goal(len(rows), ">= 2", met=len(rows) >= 2, needs="all cases")},
        case="case",
    )
    monkeypatch.setattr(sys, "argv", ["benchmark", "--device", "cpu", *arguments])
    assert run_parts([part], prog="benchmark", description=None) == code


def test_an_error_in_a_part_fails_a_quick_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = ({"what": fail()} for _ in range(1))
    part = Part(name="one", measure=lambda options: failing, summarize=lambda rows: {"all": all_of([])})
    monkeypatch.setattr(sys, "argv", ["benchmark", "--device", "cpu", "--quick"])
    assert run_parts([part], prog="benchmark", description=None) == 1
