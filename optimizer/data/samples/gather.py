"""Makes one file of a folder of dataset files: their documents or rows in the order of the files' names.

    python -m optimizer.data.samples.gather OUT_STEM FILE...

writes OUT_STEM.txt or OUT_STEM.jsonl and prints one JSON object, ``{"file": ..., "num_files": ...}`` with exit code 0, or
``{"error": {...}}`` with exit code 2.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from optimizer.base.errors import InvalidDataset
from optimizer.data.documents import DOCUMENT_SEPARATOR, read_documents
from optimizer.data.samples.records import ROW_FORMATS, RowFormat, read_rows

MAX_FILES = 10_000
_SUFFIXES = (".txt", *(f".{format}" for format in ROW_FORMATS))


def list_data_files(folder: Path) -> list[Path]:
    """The dataset files in a folder and its folders, by path; hidden ones and other kinds are passed over.

    Raises InvalidDataset where there are none, or too many.
    """
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in _SUFFIXES and not _is_hidden(path.relative_to(folder)) and path.is_file():
            found.append(path)
        if len(found) > MAX_FILES:
            raise _refusal(f"more than {MAX_FILES:,} files", allowed=f"at most {MAX_FILES:,}")
    if not found:
        raise _refusal(f"{folder.name} holds no dataset file", allowed=f"files ending in {', '.join(_SUFFIXES)}")
    return found


def gather(files: Sequence[Path], out_stem: Path) -> Path:
    """Write ``out_stem`` with ``.txt`` for text files, with ``.jsonl`` for files of rows of any format; its path.

    Raises InvalidDataset that names the file and the line.
    """
    are_texts = {file.suffix.lower() == ".txt" for file in files}
    if len(are_texts) > 1:
        raise _refusal("text files beside files of rows", allowed="one of the two", hint="Move the others elsewhere.")
    out = out_stem.with_name(out_stem.name + (".txt" if are_texts == {True} else ".jsonl"))
    with out.open("w", encoding="utf-8", newline="\n") as stream:
        for file in files:
            try:
                _append_text(file, stream) if are_texts == {True} else _append_rows(file, stream)
            except InvalidDataset as error:
                raise _named(error, file) from error
    return out


def _append_text(file: Path, stream: TextIO) -> None:
    continues = False
    for document in read_documents(file):
        stream.write(document.text)
        continues = document.continues
        if not continues:
            stream.write(f"\n{DOCUMENT_SEPARATOR}\n")
    if continues:
        stream.write(f"\n{DOCUMENT_SEPARATOR}\n")


def _append_rows(file: Path, stream: TextIO) -> None:
    for _, row in read_rows(file, format=cast(RowFormat, file.suffix.lower().removeprefix("."))):
        stream.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _named(error: InvalidDataset, file: Path) -> InvalidDataset:
    field, value, allowed = (error.fields.get(key) for key in ("field", "value", "allowed"))
    return InvalidDataset(f"{file.name}: {error.message}", field=str(field), value=value, allowed=allowed, hint=error.hint)


def _refusal(found: str, *, allowed: str, hint: str = "") -> InvalidDataset:
    return InvalidDataset(f"folder: {found}; allowed: {allowed}", field="path", value=found, allowed=allowed, hint=hint)


def main(arguments: list[str]) -> int:
    name = "python -m optimizer.data.samples.gather"
    parser = argparse.ArgumentParser(prog=name, description="Make one file of many dataset files.")
    parser.add_argument("out_stem", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    answer: dict[str, Any]
    try:
        answer = {"file": str(gather(options.files, options.out_stem)), "num_files": len(options.files)}
    except InvalidDataset as error:
        answer = {"error": error.to_json()}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 2 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
