"""One file of a folder of dataset files."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from optimizer.base.errors import InvalidDataset
from optimizer.data.documents import read_documents
from optimizer.data.samples.gather import gather, list_data_files


def test_rows_of_all_formats_follow_each_other_by_file_name(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    (folder / "b.jsonl").write_text('{"text": "two"}\n\n{"text": "drei ä"}')
    (folder / "a.json").write_text('[{"text": "one"}]')
    (folder / "more" / "c.csv").write_text("text\nfour\n")
    parquet.write_table(pa.table({"text": ["five"]}), folder / "more" / "d.parquet")
    (folder / "README.md").write_text("no data")
    (folder / ".hidden.jsonl").write_text("{}")
    out = gather(list_data_files(folder), tmp_path / "all")
    assert out.name == "all.jsonl"
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == ["one", "two", "drei ä", "four", "five"]


def test_texts_stay_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n\ntwo\nlines")
    (tmp_path / "b.txt").write_text("three\n")
    out = gather(list_data_files(tmp_path), tmp_path / "all")
    assert [document.text for document in read_documents(out)] == ["one", "two\nlines", "three"]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"a.md": ""}, r"holds no dataset file; allowed: files ending in \.txt, \.jsonl"),
        ({"a.txt": "text", "b.jsonl": "{}"}, "text files beside files of rows"),
        ({"a.jsonl": '{"text": "fine"}', "b.jsonl": "{}\nno"}, r"b\.jsonl: dataset, line 2: not JSON"),
    ],
)
def test_a_folder_that_is_no_dataset_is_refused(tmp_path: Path, files: dict[str, str], why: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(InvalidDataset, match=why):
        gather(list_data_files(folder), tmp_path / "all")
