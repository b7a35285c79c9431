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
