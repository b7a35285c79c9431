"""Paths on the server: what lies below an open folder is found, everything else is answered alike."""

from pathlib import Path

import pytest

from webapp.catalog.files.server_paths import PathNotAllowed, find_beside, find_on_server


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "open"
    (folder / "models" / "llama").mkdir(parents=True)
    (tmp_path / "closed" / "llama").mkdir(parents=True)
    return folder


def find(path: Path | str, *roots: Path) -> Path:
    return find_on_server(str(path), roots=roots, variable="HEADROOM_MODEL_ROOTS")


def test_a_folder_below_a_root_is_found_by_its_real_path(root: Path) -> None:
    (root / "alias").symlink_to(root / "models")
    assert find(root / "alias" / "llama", root) == root / "models" / "llama"
    assert find(root / "models" / ".." / "models" / "llama", root) == root / "models" / "llama"


def test_a_root_may_itself_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert find(tmp_path / "link" / "models", tmp_path / "link") == root / "models"


@pytest.mark.parametrize("path", ["../closed/llama", "models/../../closed/llama", "absent", "loop", "out", "out/llama"])
def test_what_lies_outside_or_is_not_there_is_answered_alike(root: Path, tmp_path: Path, path: str) -> None:
    (root / "loop").symlink_to(root / "loop")
    (root / "out").symlink_to(tmp_path / "closed")
    with pytest.raises(PathNotAllowed) as refused:
        find(root / path, root)
    assert refused.value.message == (
        f"{root / path} is not there, or outside of the folders that are open; "
        f"allowed: below {root}, in no hidden folder"
    )


@pytest.mark.parametrize("path", ["", "models", "/x\ny", "/x\0y", "/" + "x" * 1_000])
def test_what_is_no_absolute_path_is_refused(root: Path, path: str) -> None:
    with pytest.raises(PathNotAllowed, match="allowed: an absolute path of at most 1,000 printable characters"):
        find(path, root)


def test_hidden_folders_are_closed_unless_they_are_roots_themselves(root: Path) -> None:
    hidden = root / ".cache" / "hub" / "llama"
    hidden.mkdir(parents=True)
    with pytest.raises(PathNotAllowed):
        find(hidden, root)
    assert find(hidden, root, root / ".cache" / "hub") == hidden


def test_what_the_service_keeps_is_closed_even_below_a_root(headroom_home: Path) -> None:
    (headroom_home / "models" / "someone_elses").mkdir(parents=True)
    with pytest.raises(PathNotAllowed):
        find(headroom_home / "models" / "someone_elses", headroom_home.parent)


def test_without_roots_the_setting_is_named(root: Path) -> None:
    with pytest.raises(PathNotAllowed, match="no folder of this server is open") as refused:
        find(root)
    assert refused.value.hint == "An administrator opens folders with HEADROOM_MODEL_ROOTS."


def test_files_of_a_folder_may_be_links_that_stay_inside(root: Path, tmp_path: Path) -> None:
    folder = root / "models" / "llama"
    (root / "blob").write_text("x")
    (tmp_path / "closed" / "secret").write_text("x")
    (folder / "inside").symlink_to(root / "blob")
    (folder / "outside").symlink_to(tmp_path / "closed" / "secret")
    (folder / "nowhere").symlink_to(folder / "absent")
    assert find_beside(folder, "inside", roots=[root]) == root / "blob"
    assert find_beside(folder, "absent", roots=[root]) is None
    with pytest.raises(PathNotAllowed, match="outside in .* is a link that leads out of the folders that are open"):
        find_beside(folder, "outside", roots=[root])
    with pytest.raises(PathNotAllowed, match="nowhere in .* is no file"):
        find_beside(folder, "nowhere", roots=[root])
