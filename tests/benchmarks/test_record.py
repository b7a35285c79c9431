"""Results are published: they have one form, and nothing of the machine's folders."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.record import Record, describe_machine, failure

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
FILE_OF_A_MACHINE = re.compile(r'File \\?"/')


def fail():
    json.loads("{")


def test_a_failure_is_told_with_paths_as_the_repository_has_them():
    try:
        fail()
    except ValueError as error:
        row = failure("reading", error)
    assert (row["what"], row["of"]) == ("failed", "reading")
    assert row["error"].startswith("JSONDecodeError: ")
    assert 'File "tests/benchmarks/test_record.py"' in row["traceback"]
    assert not FILE_OF_A_MACHINE.search(row["traceback"])


def test_an_error_among_rows_leaves_those_before_it(tmp_path):
    def rows():
        yield {"what": "first"}
        fail()

    record = Record(file=tmp_path / "result.json", machine=describe_machine())
    record.add_all("all", rows())
    written = json.loads((tmp_path / "result.json").read_text())
    assert [row["what"] for row in written["rows"]] == ["first", "failed"]


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_committed_result_has_the_form_and_names_no_folder_of_a_machine(file):
    text = file.read_text()
    document = json.loads(text)
    assert {"machine", "rows", "summary"} <= set(document)
    assert isinstance(document["machine"], dict)
    assert isinstance(document["rows"], list)
    assert all({"value", "goal", "met"} <= set(entry) for entry in document["summary"].values())
    assert not FILE_OF_A_MACHINE.search(text)


def test_a_benchmark_without_tensors_imports_no_torch():
    code = "import sys, benchmarks.record, benchmarks.live.command, benchmarks.repricing; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
