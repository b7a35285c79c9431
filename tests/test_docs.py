"""The pages of the documentation, as the site has them: every link leads somewhere, every module has its place."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tool", ROOT / "tools" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs = load_tool()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    subprocess.run([sys.executable, "tools/docs.py", str(folder)], cwd=ROOT, check=True)
    return folder


def pages_of(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    assert not isinstance(parts, str)
    return [page for part in parts for page in pages_of(part)]  # type: ignore[attr-defined]


def test_the_navigation_has_every_page_once(built: Path) -> None:
    settings = tomllib.loads((built / "zensical.toml").read_text())
    pages = pages_of(settings["project"]["nav"])
    there = sorted(file.relative_to(built / "pages").as_posix() for file in (built / "pages").rglob("*.md"))
    assert sorted(pages) == there
    assert settings["project"]["theme"]["font"] is False


def test_every_module_is_in_the_reference_by_its_path(built: Path) -> None:
    text = "".join(file.read_text() for file in sorted((built / "pages" / "reference").rglob("*.md")))
    named = set(re.findall(r"^## (\S+\.py)$", text, flags=re.M))
    files = {file.relative_to(ROOT) for package in docs.PACKAGES for file in (ROOT / package).rglob("*.py")}
    wanted = {file.as_posix() for file in files if file.stem not in docs.LEFT_OUT and "migrations" not in file.parts}
    assert named == wanted


def test_links_between_pages_become_the_sites_and_others_become_their_paths() -> None:
    names = {"docs/devices.md": "devices.md", "README.md": "index.md"}
    text = "[start](../README.md#two-commands), [rows](../benchmarks/published/rows.csv), [elsewhere](https://example.org/)"
    assert docs.link_pages(text, "docs/devices.md", names) == (
        "[start](index.md#two-commands), rows (`benchmarks/published/rows.csv`), [elsewhere](https://example.org/)"
    )


def test_a_link_to_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match=re.escape("docs/devices.md links to nothing.md, which is not there")):
        docs.link_pages("[x](nothing.md)", "docs/devices.md", {})


def test_every_picture_in_the_repository_is_shown_by_a_page(built: Path) -> None:
    kept = {file.name for file in (ROOT / "docs" / "screenshots").iterdir()}
    assert kept == {file.name for file in (built / "pages" / "pictures").iterdir()}
    assert len(kept) <= 10


def test_every_requirement_of_the_security_page_has_a_state_and_tests_that_are_there() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| \d+\.\d+\.\d+ \|", line)]
    assert len({row[0] for row in rows}) == len(rows) == 70
    assert {row[2] for row in rows} == {"met", "partly", "open", "none here", "yours"}
    shown = {row[0]: re.findall(r"`(tests/\S+?\.py)::(test_\w+)`", row[3]) for row in rows}
    written = {"6.1.1", "15.1.1"}  # what is asked for is a text
    assert [row[0] for row in rows if row[2] == "met" and not shown[row[0]] and row[0] not in written] == []
    for file, name in (test for tests in shown.values() for test in tests):
        assert is_there(file, name), f"{file}::{name} is not there"


def test_every_promise_names_tests_that_are_there() -> None:
    lines = (ROOT / "docs" / "promises.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and line != "| promise | shown by |"]
    assert len(rows) >= 28
    for promise, tests in rows:
        shown = re.findall(r"`(tests/\S+?\.py)::(test_\w+)`", tests)
        assert shown, f"nothing shows that {promise}"
        assert [f"{file}::{name}" for file, name in shown if not is_there(file, name)] == []


def is_there(file: str, name: str) -> bool:
    return bool(re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), flags=re.M))
