"""A backup is whole or is not there; what is put back is what was backed up, checked byte by byte."""

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.postgresql import create_database
from worker.stack.backup import make, restore
from worker.stack.backup.contents import BACKUP_VERSION, LIST_FILE, BackupError, DatabaseKind, read_contents
from worker.stack.backup.database import copy_database, restore_database
from worker.stack.backup.make import make_backup
from worker.stack.backup.restore import restore_backup
from worker.stack.stack import main

FILES = {
    "secret_key": b"key",
    "cli.json": b"{}",
    "cache/machine-1.json": b"{}",
    "models/model_1/config.json": b"{}",
    "datasets/dataset_1/verse.txt": b"In the beginning",
    "jobs/job_1/checkpoints/step-10-f1/model.safetensors": bytes(range(256)) * 8192,
    "jobs/job_1/attempts/1/log.txt": b"",
}
LEFT_OUT = {
    "log/web.log": b"-",
    "run/stack.lock": b"",
    "uploads/upload_1/part": b"-",
    "jobs/job_1/checkpoints/.tmp-step-20-f1/model.safetensors": b"half",
}


@pytest.fixture(autouse=True)
def _sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)


@pytest.fixture
def service(tmp_path: Path) -> Path:
    """A home at work: its database has a writer that has not come to its checkpoint."""
    home = tmp_path / "home"
    for name, text in {**FILES, **LEFT_OUT}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(text)
    (home / "models" / "model_1" / "model.safetensors").symlink_to(tmp_path / "weights.safetensors")
    with closing(sqlite3.connect(home / "headroom.sqlite3")) as connection:
        connection.executescript("PRAGMA journal_mode=WAL; CREATE TABLE jobs (id TEXT); INSERT INTO jobs VALUES ('job_1');")
    return home


def jobs_in(home: Path) -> list[str]:
    with closing(sqlite3.connect(home / "headroom.sqlite3")) as connection:
        return [row[0] for row in connection.execute("SELECT id FROM jobs ORDER BY id")]


def test_what_is_put_back_is_what_was_there(service: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(service / "headroom.sqlite3")) as writer:
        writer.execute("INSERT INTO jobs VALUES ('job_2')")
        writer.commit()
        writer.execute("INSERT INTO jobs VALUES ('not committed')")
        make_backup(service, tmp_path / "backup")
    restored = tmp_path / "restored"
    restore_backup(tmp_path / "backup", restored)
    found = {str(path.relative_to(restored)): path for path in restored.rglob("*") if not path.is_dir()}
    assert found.keys() == {*FILES, "headroom.sqlite3", "models/model_1/model.safetensors"}
    assert {name: found[name].read_bytes() for name in FILES} == FILES
    assert found["models/model_1/model.safetensors"].readlink() == tmp_path / "weights.safetensors"
    assert jobs_in(restored) == ["job_1", "job_2"]
    assert {path.stat().st_mode & 0o077 for path in found.values() if not path.is_symlink()} == {0}


def test_files_that_come_while_others_are_copied_are_in_it_if_rows_name_them(
    service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_late(home: Path, folder: Path) -> Path:
        """A checkpoint is finished and recorded, and a log grows, between the first files and the database."""
        checkpoint = home / "jobs" / "job_1" / "checkpoints" / "step-20-f1"
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_bytes(b"new")
        (home / "jobs" / "job_1" / "attempts" / "1" / "log.txt").write_bytes(b"step 20")
        with closing(sqlite3.connect(home / "headroom.sqlite3")) as connection:
            connection.execute("INSERT INTO jobs VALUES ('step-20-f1')")
            connection.commit()
        return copy_database(home, folder)

    monkeypatch.setattr(make, "copy_database", copy_late)
    make_backup(service, tmp_path / "backup")
    restored = tmp_path / "restored"
    restore_backup(tmp_path / "backup", restored)
    assert "step-20-f1" in jobs_in(restored)
    assert (restored / "jobs/job_1/checkpoints/step-20-f1/model.safetensors").read_bytes() == b"new"
    assert (restored / "jobs/job_1/attempts/1/log.txt").read_bytes() == b"step 20"


def test_a_backup_that_breaks_off_leaves_nothing_of_its_name_and_can_be_made_again(
    service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(home: Path, folder: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(make, "copy_database", fail)
        with pytest.raises(OSError, match="No space left"):
            make_backup(service, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    make_backup(service, tmp_path / "backup")
    assert restore_backup(tmp_path / "backup", tmp_path / "restored").version == BACKUP_VERSION


def test_a_second_backup_of_the_same_name_is_refused_and_the_first_is_whole(
    service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin_another(home: Path, folder: Path) -> Path:
        with pytest.raises(BackupError, match="another backup or restore is writing .*/backup at present"):
            make_backup(service, tmp_path / "backup")
        return copy_database(home, folder)

    monkeypatch.setattr(make, "copy_database", begin_another)
    make_backup(service, tmp_path / "backup")
    restore_backup(tmp_path / "backup", tmp_path / "restored")
    assert {path.name for path in tmp_path.iterdir()} == {"home", "backup", "restored"}


def test_a_second_restore_into_the_same_folder_is_refused(
    service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin_another(copy: Path, home: Path, kind: DatabaseKind) -> None:
        with pytest.raises(BackupError, match="another backup or restore is writing .*/restored at present"):
            restore_backup(tmp_path / "backup", tmp_path / "restored")
        restore_database(copy, home, kind)

    make_backup(service, tmp_path / "backup")
    monkeypatch.setattr(restore, "restore_database", begin_another)
    restore_backup(tmp_path / "backup", tmp_path / "restored")
    assert (tmp_path / "restored" / "secret_key").read_bytes() == b"key"


def test_a_backup_whose_files_were_cleared_away_gets_no_name(
    service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clear(home: Path, folder: Path) -> Path:
        shutil.rmtree(folder / "home")
        return copy_database(home, folder)

    monkeypatch.setattr(make, "copy_database", clear)
    with pytest.raises(BackupError, match="home/cache/machine-1.json was copied into .* and is gone from it"):
        make_backup(service, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def flip_a_byte(backup: Path) -> None:
    file = backup / "home" / "jobs" / "job_1" / "checkpoints" / "step-10-f1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")


def shorten_the_database(backup: Path) -> None:
    file = backup / "database.sqlite3"
    file.write_bytes(file.read_bytes()[:-1024])


def take_a_file_away(backup: Path) -> None:
    (backup / "home" / "secret_key").unlink()


def link_a_file(backup: Path) -> None:
    (backup / "home" / "secret_key").unlink()
    (backup / "home" / "secret_key").symlink_to("/etc/hostname")


def change_list(**changes: Any) -> Callable[[Path], None]:
    def change(backup: Path) -> None:
        document = json.loads((backup / LIST_FILE).read_text())
        (backup / LIST_FILE).write_text(json.dumps(document | changes))

    return change


def name_path(path: str) -> Callable[[Path], None]:
    return change_list(entries=[{"path": path, "num_bytes": 1, "sha256": "0" * 64, "link_to": ""}])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip_a_byte, "model.safetensors is not what was backed up: its bytes differ"),
        (shorten_the_database, "database.sqlite3 is not what was backed up"),
        (take_a_file_away, "home/secret_key is not in the backup"),
        (link_a_file, "home/secret_key is not in the backup"),
        (lambda backup: (backup / LIST_FILE).unlink(), "is no backup"),
        (lambda backup: (backup / LIST_FILE).write_text("{"), "cannot be read"),
        (change_list(version=BACKUP_VERSION + 1), "this program reads forms to 1"),
        (change_list(entries=[]), "names no database"),
        (change_list(database="oracle"), "database"),
        (name_path("home/jobs/../../secret"), "which no backup has"),
        (name_path("/etc/passwd"), "which no backup has"),
        (name_path("home/run/stack.lock"), "which no backup has"),
        (name_path("home/jobs"), "which no backup has"),
        (name_path("home/jobs//x"), "which no backup has"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_refused_by_name_and_nothing_is_put_back(
    service: Path, tmp_path: Path, damage: Callable[[Path], None], why: str
) -> None:
    make_backup(service, tmp_path / "backup")
    damage(tmp_path / "backup")
    with pytest.raises(BackupError, match=why):
        restore_backup(tmp_path / "backup", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()
    assert not (tmp_path / "restored.part").exists()


def test_nothing_is_overwritten(service: Path, tmp_path: Path) -> None:
    make_backup(service, tmp_path / "backup")
    with pytest.raises(BackupError, match="is there already"):
        make_backup(service, tmp_path / "backup")
    with pytest.raises(BackupError, match="is not empty"):
        restore_backup(tmp_path / "backup", service)
    with pytest.raises(BackupError, match="lies in HEADROOM_HOME"):
        make_backup(service, service / "backup")
    assert jobs_in(service) == ["job_1"]


def test_a_home_that_was_never_used_has_nothing_to_back_up(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="is not there"):
        make_backup(tmp_path / "empty", tmp_path / "backup")


def test_the_command_says_what_it_did_and_what_to_do(
    service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADROOM_HOME", str(service))
    umask = os.umask(0o022)
    try:
        assert main(["backup", str(tmp_path / "backup")]) == 0
        assert "1 linked files of models are not in it" in capsys.readouterr().out
        assert main(["restore", str(tmp_path / "backup"), "--into", str(tmp_path / "new")]) == 0
        assert f"HEADROOM_HOME={tmp_path / 'new'} headroom up" in capsys.readouterr().out
        assert main(["restore", str(tmp_path / "backup")]) == 1
        assert "is not empty" in capsys.readouterr().err
    finally:
        os.umask(umask)


@pytest.mark.postgres
def test_a_database_of_postgresql_goes_with_it_into_an_empty_one_only(
    service: Path, tmp_path: Path, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backed_up, empty = create_database(postgresql_url), create_database(postgresql_url)
    with psycopg.connect(backed_up) as connection:
        connection.execute("CREATE TABLE jobs (id text)")
        connection.execute("INSERT INTO jobs VALUES ('job_1')")
    monkeypatch.setenv("DATABASE_URL", backed_up)
    make_backup(service, tmp_path / "backup")
    assert read_contents(tmp_path / "backup").database == "postgresql"
    with pytest.raises(BackupError, match="has 1 tables; allowed: an empty one"):
        restore_backup(tmp_path / "backup", tmp_path / "restored")
    monkeypatch.delenv("DATABASE_URL")
    with pytest.raises(BackupError, match="holds a database of postgresql"):
        restore_backup(tmp_path / "backup", tmp_path / "restored")
    monkeypatch.setenv("DATABASE_URL", empty)
    restore_backup(tmp_path / "backup", tmp_path / "restored")
    with psycopg.connect(empty) as connection:
        assert connection.execute("SELECT id FROM jobs").fetchall() == [("job_1",)]
    assert (tmp_path / "restored" / "secret_key").read_bytes() == b"key"
