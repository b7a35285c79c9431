"""Inspecting a dataset gives its facts or the reason it is refused, also as a limited process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optimizer.base.errors import InvalidDataset
from optimizer.data.bundled import TEXT_FILE
from optimizer.data.inspect import inspect_dataset


def _run(path: Path, format: str, *options: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "optimizer.data.inspect", str(path), "--format", format, *options]
    # OpenBLAS reserves address space for each core, which a limit on address space counts.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}


def test_the_bundled_text_has_66_books() -> None:
    facts = inspect_dataset(TEXT_FILE, format="txt")
    assert (facts.num_documents, facts.num_bytes) == (66, TEXT_FILE.stat().st_size)
    assert facts.preview.startswith("Genesis\n\n1:1 In the beginning God created the heaven and the earth.\n")
    assert len(facts.preview) == 600


def test_counts_and_preview_of_a_small_file_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(
        '{"text": "héllo"}\n{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}\n'
    )
    facts = inspect_dataset(path, format="jsonl")
    assert facts.to_json() == {
        "num_documents": 2,
        "num_bytes": path.stat().st_size,
        "num_characters": len("héllo") + len("user: hi\nassistant: yo"),
        "preview": "héllo\n---\nuser: hi\nassistant: yo\n---\n",
            "records": ["héllo", "user: hi\nassistant: yo"],
            "lengths": [[8, 1], [32, 1]],
            "kind": "text",
            "columns": {"text": "text"},
            "names": ["text"],
    }


def test_a_dataset_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("\n\n\n")
    with pytest.raises(InvalidDataset, match="the dataset holds no text"):
        inspect_dataset(tmp_path / "d.txt", format="txt")


BLANK_CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " "}]}\n'
BLANK_PAIR = '{"prompt": "a", "chosen": " ", "rejected": ""}\n'
CALL = '{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f"}}]}]}\n'


@pytest.mark.parametrize("rows", [BLANK_CHAT * 3, BLANK_PAIR * 3], ids=["chats", "pairs"])
def test_a_file_in_which_every_answer_is_empty_is_refused_at_upload(tmp_path: Path, rows: str) -> None:
    """Such a file was "ready to use", and its job failed after the start."""
    (tmp_path / "d.jsonl").write_text(rows)
    with pytest.raises(InvalidDataset, match="all 3 answers are empty; allowed: at least one with text to learn"):
        inspect_dataset(tmp_path / "d.jsonl", format="jsonl")


@pytest.mark.parametrize("last", [BLANK_CHAT.replace('" "', '"yes"'), CALL], ids=["an answer", "a call of a tool"])
def test_one_answer_with_something_to_learn_is_enough(tmp_path: Path, last: str) -> None:
    (tmp_path / "d.jsonl").write_text(BLANK_CHAT + last)
    assert inspect_dataset(tmp_path / "d.jsonl", format="jsonl").num_documents == 2


def test_rows_of_empty_texts_are_refused_at_upload(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": ""}\n{"text": "  "}\n')
    with pytest.raises(InvalidDataset, match="the dataset holds no text"):
        inspect_dataset(tmp_path / "d.jsonl", format="jsonl")


def test_the_process_prints_the_facts(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("one\n\n\ntwo")
    code, answer = _run(tmp_path / "d.txt", "txt")
    assert code == 0
    assert answer == {
        "facts": {
            "num_documents": 2,
            "num_bytes": 9,
            "num_characters": 6,
            "preview": "one\n---\ntwo\n---\n",
            "records": ["one", "two"],
            "lengths": [[4, 2]],
            "kind": "text",
            "columns": {},
            "names": [],
        }
    }


def test_the_process_prints_the_error(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_bytes(b"\xff")
    code, answer = _run(tmp_path / "d.txt", "txt")
    assert code == 2
    assert answer["error"]["code"] == "bad_dataset"
    assert answer["error"]["fields"]["field"] == "dataset.line 1"


def test_the_process_reads_parquet_within_its_limits(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "d.parquet")
    code, answer = _run(tmp_path / "d.parquet", "parquet")
    assert (code, answer["facts"]["num_documents"]) == (0, 2)


def test_the_process_stops_at_its_cpu_limit(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "x"}\n' * 3_000_000)
    code, answer = _run(path, "jsonl", "--cpu-s", "1")
    assert code < 0
    assert answer == {}


def test_the_process_says_when_its_memory_limit_is_reached(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    # Compresses to almost nothing: 64 rows of 900 KB in one page.
    parquet.write_table(pa.table({"text": ["x" * 900_000] * 640}), tmp_path / "d.parquet")
    code, answer = _run(tmp_path / "d.parquet", "parquet", "--address-space-bytes", str(400 * 1024**2))
    assert code == 2
    assert answer["error"]["code"] == "bad_dataset"
