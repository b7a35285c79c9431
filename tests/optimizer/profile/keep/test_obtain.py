"""Profiles kept on disk: found again without torch, never half-written, never believed when damaged."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimizer.base.errors import HeadroomError, InvalidModel, InvalidWorkload, ProfilingFailed
from optimizer.base.serialize import to_json
from optimizer.models.spec import read_model_spec
from optimizer.profile.extent import EVERYTHING, Extent
from optimizer.profile.keep import asking, kept, obtain
from optimizer.profile.keep.asking import TracingChild
from optimizer.profile.keep.kept import keep_profile, profiles_folder, read_kept_profile
from optimizer.profile.keep.obtain import ProfileSource, obtain_profile
from optimizer.profile.profile import Profile
from optimizer.workload import Adapter
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.profile.conftest import LLAMA

SPEC = read_model_spec(LLAMA)
PLAIN = Extent(representations=("fp32",), choices=("keep",), shapes=((1, 40),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which one child has left the plain part of the profile."""
    folder = tmp_path_factory.mktemp("kept")
    obtain_profile(SPEC, extent=PLAIN, folder=folder)
    return folder


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def list_differences(one: Any, other: Any, where: str = "") -> list[Any]:
    """The innermost places in which two documents differ."""
    if type(one) is not type(other) or not isinstance(one, dict | list):
        return [] if one == other else [f"{where}: {one!r} and {other!r}"]
    if len(one) != len(other):
        return [f"{where}: {len(one)} and {len(other)} entries"]
    names = one if isinstance(one, dict) else range(len(one))
    missing = [f"{where}.{name} is missing" for name in names if isinstance(one, dict) and name not in other]
    return missing or [found for name in names for found in list_differences(one[name], other[name], f"{where}.{name}")]


def test_a_child_traces_with_little_imported_what_this_process_traces_with_all(
    profile: Profile, tmp_path: Path
) -> None:
    traced = obtain_profile(SPEC, folder=tmp_path)
    assert list_differences(traced.to_json(), profile.to_json()) == []
    assert traced == profile


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_moe"])
def test_kernels_that_torch_has_in_python_only_are_imported_when_an_op_needs_one(model_type: str) -> None:
    """gpt2 needs none, and experts one to count tokens (``histc``)."""
    from optimizer.profile.trace.trace import profile_model

    spec = read_model_spec(SMALL_CONFIGS[model_type])
    request = {"config": spec.to_config(), "adapter": None, "extent": to_json(PLAIN)}
    answer = TracingChild(is_lean=True).ask(request)
    assert Profile.from_json(answer["profile"]) == profile_model(spec, extent=PLAIN)


def test_adapters_are_traced_in_a_child_too_though_peft_does_not_import_where_little_is(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    adapter = Adapter(rank=2, targets=("q_proj",))
    profile = obtain_profile(SPEC, adapter=adapter, extent=PLAIN, folder=tmp_path)
    assert profile.frozen["fp32"]
    assert profile.covers(PLAIN)


def test_a_kept_profile_is_found_again_without_a_child(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obtain, "TracingChild", None)
    with ProfileSource(SPEC, folder=folder) as source:
        assert source.read(PLAIN).covers(PLAIN)


def test_what_is_missing_is_traced_and_joined(folder: Path, profile: Profile, tmp_path: Path) -> None:
    (tmp_path / only_file(folder).name).write_bytes(only_file(folder).read_bytes())
    more = Extent(representations=("bf16",), choices=("keep", "recompute"), shapes=((2, 40),))
    found = obtain_profile(SPEC, extent=more, folder=tmp_path)
    assert found.covers(more)
    assert found.covers(PLAIN)
    assert read_kept_profile(SPEC.fingerprint, folder=tmp_path) == found
    assert set(found.ops) <= set(profile.ops)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-40],
        lambda data: data.replace(b"keep", b"kept", 1),
        lambda data: b"\xff\xfe",
    ],
    ids=["empty", "cut off", "changed", "not text"],
)
def test_a_damaged_file_counts_as_none_and_is_written_again(
    folder: Path, profile: Profile, tmp_path: Path, damage: Callable[..., Any]
) -> None:
    path = tmp_path / only_file(folder).name
    path.write_bytes(damage(only_file(folder).read_bytes()))
    assert read_kept_profile(SPEC.fingerprint, folder=tmp_path) is None
    keep_profile(profile, folder=tmp_path)
    assert read_kept_profile(SPEC.fingerprint, folder=tmp_path) == profile


def test_nothing_but_whole_files_is_left_behind(folder: Path) -> None:
    assert [path.suffixes[-2:] for path in folder.iterdir()] == [[".profile", ".json"]]


def test_another_version_of_torch_finds_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "99.0"}
    real = kept._version_of
    monkeypatch.setattr(kept, "_version_of", lambda package: versions.get(package) or real(package))
    assert read_kept_profile(SPEC.fingerprint, folder=folder) is None


def test_the_least_recently_used_go_when_all_are_too_large(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_profile(profile, folder=tmp_path)
    size = only_file(tmp_path).stat().st_size
    monkeypatch.setattr(kept, "MAX_KEPT_BYTES", 2 * size + 10)
    for index, name in enumerate(("0", "1")):
        other = tmp_path / f"{name}.profile.json"
        other.write_bytes(b"x" * size)
        os.utime(other, (index, index))
    keep_profile(profile, folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if len(path.name) < 20) == ["1.profile.json"]


def test_a_folder_that_cannot_be_written_keeps_nothing_and_fails_nothing(profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep_profile(profile, folder=tmp_path / "file" / "below")
    assert read_kept_profile(SPEC.fingerprint, folder=tmp_path / "file" / "below") is None


def test_profiles_lie_under_headroom_home_or_in_the_users_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiles_folder() == home / "cache" / "profiles"
    monkeypatch.delenv("HEADROOM_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(profiles_folder()) == "/somewhere/headroom/profiles"


def test_an_error_of_the_trace_comes_out_of_the_child_as_itself(tmp_path: Path) -> None:
    with pytest.raises(InvalidWorkload, match="this model has positions for 8 to 64 tokens") as caught:
        obtain_profile(SPEC, extent=Extent(shapes=((1, 65),)), folder=tmp_path)
    assert caught.value.fields["field"] == "workload.sequence_length"


def test_an_error_of_the_child_is_never_taken_for_anothers_of_the_same_code() -> None:
    class OfTheService(HeadroomError):
        code = InvalidModel.code

    document = InvalidModel("no such op", field="config").to_json()
    assert type(asking.read_error(document)) is InvalidModel
    assert OfTheService.code == document["code"]


def test_a_child_that_is_killed_is_an_error_of_the_tree(tmp_path: Path) -> None:
    with ProfileSource(SPEC, folder=tmp_path) as source:
        source._child._process.send_signal(signal.SIGKILL)
        with pytest.raises(ProfilingFailed, match="ended by signal 9"):
            source.read(EVERYTHING)


def test_a_child_that_is_not_needed_is_ended(tmp_path: Path) -> None:
    with ProfileSource(SPEC, folder=tmp_path) as source:
        process = source._child._process
    assert process.returncode == -signal.SIGKILL


def test_where_less_imported_does_not_do_the_child_is_asked_again_in_full(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of transformers with other modules leads here."""
    asked = []
    real = TracingChild.ask

    def ask(child: TracingChild, request: dict[str, Any]) -> dict[str, Any]:
        command: Any = child._process.args
        asked.append(command[-1])
        if len(asked) > 1:
            return real(child, request)
        child.end()
        return {"again": "ImportError: no such module"}

    monkeypatch.setattr(TracingChild, "ask", ask)
    assert obtain_profile(SPEC, extent=PLAIN, folder=tmp_path) == read_kept_profile(SPEC.fingerprint, folder=folder)
    assert asked == ["--lean", "optimizer.profile.keep.child"]


def test_the_module_that_reads_kept_profiles_imports_no_torch(folder: Path) -> None:
    code = (
        "import json, sys; from pathlib import Path\n"
        "from optimizer.models.spec import read_model_spec; from optimizer.profile.keep.obtain import obtain_profile\n"
        "from optimizer.profile.extent import Extent\n"
        f"extent = Extent(representations=('fp32',), choices=('keep',), shapes=((1, 40),))\n"
        f"obtain_profile(read_model_spec({LLAMA!r}), extent=extent, folder=Path({str(folder)!r}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_kept_file_holds_the_profile_as_json_below_its_hash(folder: Path) -> None:
    digest, body = only_file(folder).read_text().split("\n")
    assert len(digest) == 64
    assert Profile.from_json(json.loads(body)).covers(PLAIN)
