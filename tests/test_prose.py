"""Docstrings, names and pages are written in the words of CONTRIBUTING.md, as far as a check can see."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("optimizer", "webapp", "worker", "headroom", "benchmarks", "tools")
HALF_A_SENTENCE = re.compile(r"(?:Of|As|What|Whether|Where|Who|How|Which)\b")
"""Beginnings of a docstring that cannot be read without the signature above it."""
TELLING = re.compile(r"\b(?:tell|tells|told|telling)\b", re.IGNORECASE)
"""A program predicts, prices, reports or shows."""
STUMBLED_OVER = (
    "May at most",
    "Hears of",
    "; hears of",
    "trained from random ones",
    "Plainly",
    "in nine of ten",
    "at worst",
    "Nothing of yours",
    "nothing of yours",
    "or it is not yours",
    "Make it a model. ",
    "cut at its longest",
    "is not a public address",
    "The job is failed",
    "The job is succeeded",
    "Decisions that I make",
    "Techniques that must not",
    "whatever does",
    "What was asked for",
    "Change what is asked",
    "what stands ahead",
    "a second or so",
)
"""Said on pages and by commands once, and misread."""
MAX_README_LINES = 10


def list_files(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in sorted(set(listed)) if (ROOT / name).is_file() and "/vendor/" not in name]


def list_code() -> list[Path]:
    files = [file for file in list_files(*(f"{folder}/*.py" for folder in CODE)) if "migrations" not in file.parts]
    assert len(files) > 500
    return files


def list_docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Those of modules, classes and functions, and the strings below constants and fields."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_a_docstring_can_be_read_without_its_function() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line} {text[:60]}"
        for file in list_code()
        for line, text in list_docstrings(file)
        if HALF_A_SENTENCE.match(text)
    ]
    assert found == []


def test_nothing_tells() -> None:
    prose = [*list_files("webapp/templates/*.html", "static/js/*.js", "docs/*.md", "README.md", "CONTRIBUTING.md")]
    found = [
        f"{file.relative_to(ROOT)}:{number} {line.strip()[:80]}"
        for file in [*list_code(), *prose]
        if "decisions" not in file.parts
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if TELLING.search(line) and ".tell()" not in line
    ]
    assert found == []


def test_no_page_or_command_uses_a_phrase_that_a_reader_stumbled_over() -> None:
    places = ("webapp/*.html", "webapp/pages/*.py", "webapp/jobs/*.py", "webapp/http/*.py", "headroom/*.py", "static/js/*.js")
    found = [
        f"{file.relative_to(ROOT)}: {phrase}"
        for file in list_files(*places)
        for phrase in STUMBLED_OVER
        if phrase in file.read_text()
    ]
    assert found == []


def test_no_identifier_has_the_old_word_for_generation() -> None:
    words = re.compile(r"\w*(?:inference(?!_mode)|Inference|INFERENCE)\w*")
    found = [
        f"{file.relative_to(ROOT)} {name}"
        for file in list_code()
        for node in ast.walk(ast.parse(file.read_text()))
        for name in [getattr(node, "name", None) or getattr(node, "id", None) or getattr(node, "attr", None)]
        if isinstance(name, str) and words.fullmatch(name)
    ]
    assert found == []


def test_each_package_says_what_is_in_it_in_ten_lines() -> None:
    modules = [file for file in list_code() if not {"management", "tools"} & set(file.relative_to(ROOT).parts)]
    for folder in sorted({file.parent for file in modules}):
        readme = folder / "README.md"
        assert readme.is_file(), f"{folder.relative_to(ROOT)} has no README.md"
        text = readme.read_text().strip()
        assert len(text.splitlines()) <= MAX_README_LINES, readme.relative_to(ROOT)
        named = set(re.findall(r"`([\w/]+?)(?:\.py|/)?`", text))
        unnamed = [
            file.stem
            for file in modules
            if file.parent == folder and file.stem not in {"__init__", "__main__"} and file.stem not in named
        ]
        assert unnamed == [], f"{readme.relative_to(ROOT)} does not name {', '.join(unnamed)}"
