import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

import pytest
import torch

from optimizer.base.errors import CheckpointInvalid, DiskFull
from optimizer.runtime.job.checkpoint import (
    MANIFEST_VERSION,
    WrittenCheckpoint,
    find_resumable,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
)


def write(job_folder: Path, step: int, *, fence: int = 1, value: float = 0.0) -> WrittenCheckpoint | None:
    return write_checkpoint(
        job_folder,
        step=step,
        fence=fence,
        plan_fingerprint="abc",
        tensors={"model": {"weight": torch.full((100,), value)}, "optimizer": {"a//exp_avg": torch.ones(3)}},
        facts={"loss": 1.5},
    )


class Crash(BaseException):
    """Stands for a killed process: nothing of the program may catch it as a failure and go on."""


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written = write(tmp_path, 50, fence=12, value=3.0)
    checkpoint = find_resumable(tmp_path)
    assert written.folder == "checkpoints/step-000050-f12"
    assert checkpoint.folder == tmp_path / written.folder
    assert (checkpoint.manifest.step, checkpoint.manifest.fence) == (50, 12)
    assert checkpoint.manifest.plan_fingerprint == "abc"
    assert checkpoint.facts == {"loss": 1.5}
    assert torch.equal(checkpoint.load("model")["weight"], torch.full((100,), 3.0))
    assert written.num_bytes == sum(file.stat().st_size for file in checkpoint.folder.iterdir())


def test_only_safetensors_and_json_are_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / write(tmp_path, 1).folder
    assert {file.suffix for file in folder.iterdir()} == {".safetensors", ".json"}


def test_a_job_without_checkpoints_has_nothing_to_resume(tmp_path: Path) -> None:
    assert find_resumable(tmp_path) is None


def test_the_newest_three_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        write(tmp_path, step)
    assert [folder.name for folder in list_checkpoints(tmp_path)] == [
        "step-000050-f1",
        "step-000040-f1",
        "step-000030-f1",
    ]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def names(job_folder: Path) -> list[str]:
    return [folder.name for folder in list_checkpoints(job_folder)]


def test_newest_is_by_fence_and_then_by_step(tmp_path: Path) -> None:
    write(tmp_path, 1_000_000, fence=9)
    write(tmp_path, 999_999, fence=11)
    write(tmp_path, 1_000_000, fence=11)
    assert names(tmp_path) == ["step-1000000-f11", "step-999999-f11", "step-1000000-f9"]
    assert find_resumable(tmp_path).folder.name == "step-1000000-f11"


def test_a_newer_attempt_that_resumed_earlier_keeps_what_it_wrote(tmp_path: Path) -> None:
    for step in (100, 110, 120):
        write(tmp_path, step, fence=1)
    written = write(tmp_path, 90, fence=2)
    assert names(tmp_path) == ["step-000090-f2", "step-000120-f1", "step-000110-f1"]
    assert find_resumable(tmp_path).folder == tmp_path / written.folder
    assert written.num_bytes == sum(file.stat().st_size for file in (tmp_path / written.folder).iterdir())


def test_an_attempt_that_lost_its_job_displaces_nothing_of_its_successor(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step, fence=2)
    for step in (40, 50, 60, 70):
        write(tmp_path, step, fence=1)
    assert names(tmp_path) == [
        *(f"step-0000{step}-f2" for step in (30, 20, 10)),
        *(f"step-0000{step}-f1" for step in (70, 60, 50)),
    ]
    assert find_resumable(tmp_path).manifest.step == 30
    write(tmp_path, 40, fence=2)
    assert names(tmp_path) == [f"step-0000{step}-f2" for step in (40, 30, 20)]


def test_only_what_older_attempts_had_staged_is_cleared(tmp_path: Path) -> None:
    write(tmp_path, 10, fence=2)
    staged = {fence: tmp_path / "checkpoints" / f".tmp-step-000020-f{fence}" for fence in (1, 2, 3)}
    for folder in staged.values():
        folder.mkdir()
    write(tmp_path, 30, fence=2)
    assert {fence: folder.exists() for fence, folder in staged.items()} == {1: False, 2: False, 3: True}


def test_a_flipped_bit_is_noticed_and_the_one_before_is_used(tmp_path: Path) -> None:
    write(tmp_path, 10)
    newest = tmp_path / write(tmp_path, 20).folder
    flip_bit(newest / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"step-000020-f1 cannot be used: model\.safetensors does not have"):
        read_checkpoint(newest)
    assert find_resumable(tmp_path).manifest.step == 10


@pytest.mark.parametrize("file", ["optimizer.safetensors", "facts.json", "manifest.json"])
def test_a_missing_file_is_noticed(tmp_path: Path, file: str) -> None:
    write(tmp_path, 10)
    newest = tmp_path / write(tmp_path, 20).folder
    (newest / file).unlink()
    assert find_resumable(tmp_path).manifest.step == 10


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(document | changes))


def test_one_of_a_newer_release_is_refused_in_words(tmp_path: Path) -> None:
    """Its manifest may have fields that this release has never heard of."""
    folder = tmp_path / write(tmp_path, 10).folder
    rewrite_manifest(folder, version=MANIFEST_VERSION + 1, shards=[])
    with pytest.raises(CheckpointInvalid, match=r"a newer release of Headroom wrote it \(manifest of version") as raised:
        read_checkpoint(folder)
    assert raised.value.hint == "Go on with the newer release."


def test_one_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    folder = tmp_path / write(tmp_path, 10).folder
    rewrite_manifest(folder, version=MANIFEST_VERSION - 1)
    assert read_checkpoint(folder).manifest.step == 10


def test_when_every_checkpoint_is_damaged_the_newest_fault_is_raised(tmp_path: Path) -> None:
    for step in (10, 20):
        flip_bit(tmp_path / write(tmp_path, step).folder / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match="step-000020-f1"):
        find_resumable(tmp_path)


def count_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Count how many times one write syncs or renames."""
    counts = crash_at(monkeypatch, None)
    write(tmp_path / "counted", 1)
    return counts[0]


def crash_at(monkeypatch: pytest.MonkeyPatch, moment: int | None) -> list[int]:
    """Stop at the n-th sync or rename, before it is done; returns a counter of them."""
    counts = [0]
    sync, rename = os.fsync, Path.rename

    def counted(original: Callable[..., Any]) -> Callable[..., Path | None]:
        def call(*args: Any) -> Path | None:
            counts[0] += 1
            if counts[0] == moment:
                raise Crash
            return original(*args)

        return call

    monkeypatch.setattr(os, "fsync", counted(sync))
    monkeypatch.setattr(Path, "rename", counted(rename))
    return counts


def test_a_crash_at_any_write_step_leaves_a_checkpoint_to_resume_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        num_moments = count_calls(tmp_path, patch)
    assert num_moments == 7  # three files and the manifest, the staged folder, the rename, the parent
    for moment in range(1, num_moments + 1):
        folder = tmp_path / f"crash-{moment}"
        write(folder, 10, value=1.0)
        with monkeypatch.context() as patch:
            # The process is gone at once, so nothing is cleaned up behind it either.
            patch.setattr(shutil, "rmtree", lambda *args, **options: None)
            crash_at(patch, moment)
            with pytest.raises(Crash):
                write(folder, 20, value=2.0)
        found = find_resumable(folder)
        # Only after the rename may the new one be seen, and then it is whole.
        assert found.manifest.step == (20 if moment == num_moments else 10)
        assert float(found.load("model")["weight"][0]) == (2.0 if moment == num_moments else 1.0)
        write(folder, 30)
        assert find_resumable(folder).manifest.step == 30
        assert not list((folder / "checkpoints").glob(".tmp-*"))


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 10)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DiskFull, match=r"a checkpoint needs 256 MiB of disk, 256 MiB of which stay free; 1000 B are free"):
        write(tmp_path, 20)
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-000010-f1"]


def test_a_disk_that_fills_during_the_write_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 10)

    def full(descriptor: int) -> Never:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull):
        write(tmp_path, 20)
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-000010-f1"]


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
