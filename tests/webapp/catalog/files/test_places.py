"""Checks of uploads: a small file cannot take much memory, and many requests cannot start many checks."""

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from pyarrow import parquet

from optimizer.base.errors import InvalidDataset
from optimizer.base.units import GIB
from webapp.accounts.turns import asked_by
from webapp.catalog.actions import create_dataset
from webapp.catalog.errors import ChecksBusy
from webapp.catalog.files import limited
from webapp.catalog.files.limited import run_limited
from webapp.catalog.files.places import MAX_CHECKS, take_place
from webapp.catalog.models import Dataset

AT_ONCE = 12
ALL_TAKEN = f"{MAX_CHECKS} files are being checked, as many as go at once, so this one cannot be checked now"
LONG_CHECK = ["-n", "1", "-r", "1", "import time; time.sleep(600)"]


@pytest.mark.parametrize("repeats_by_dictionary", [True, False])
def test_a_small_parquet_file_that_unpacks_to_a_gigabyte_is_refused_in_little_memory(
    ada: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeats_by_dictionary: bool
) -> None:
    path = tmp_path / "bomb.parquet"
    table = pa.table({"text": ["a" * 50_000_000] * 20})
    parquet.write_table(table, path, compression="zstd", use_dictionary=repeats_by_dictionary)
    assert path.stat().st_size < 40_000
    peaks, limit = Peaks(), limited._limit
    monkeypatch.setattr(limited, "_limit", lambda pid, **limits: (limit(pid, **limits), peaks.watch(pid)))
    with pytest.raises(InvalidDataset, match="more memory is needed|columns text unpack to 1,000,000,113 bytes for 20 rows"):
        create_dataset(owner=ada, name="bomb", file=SimpleUploadedFile("bomb.parquet", path.read_bytes()))
    assert 0 < peaks.largest_bytes() <= GIB


class Peaks:
    """Largest memory of processes while they run; what the system adds up when they end counts what they were forked from."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._found: list[int] = []

    def watch(self, pid: int) -> None:
        self._threads.append(threading.Thread(target=self._follow, args=(Path(f"/proc/{pid}/status"),)))
        self._threads[-1].start()

    def _follow(self, status: Path) -> None:
        while (peak := re.search(r"^VmHWM:\s+(\d+) kB", _text(status), flags=re.M)) is not None:
            self._found.append(int(peak[1]) * 1024)

    def largest_bytes(self) -> int:
        for thread in self._threads:
            thread.join(timeout=60)
        return max(self._found, default=0)


def _text(status: Path) -> str:
    try:
        return status.read_text()
    except OSError:
        return ""


def test_of_many_files_at_once_few_are_checked_and_the_others_are_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    started, limit = threading.Semaphore(0), limited._limit

    def note(pid: int, **limits: Any) -> None:
        pids.append(pid)
        limit(pid, **limits)
        started.release()

    def check(owner_id: int) -> str:
        with pytest.raises((ChecksBusy, InvalidDataset)) as refusal:
            run_limited("timeit", LONG_CHECK, field="file", error=InvalidDataset, owner_id=owner_id)
        return str(refusal.value)

    monkeypatch.setattr(limited, "_limit", note)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = [pool.submit(check, owner_id) for owner_id in range(AT_ONCE)]
        try:
            refused = [one.result() for one in islice(as_completed(answers, timeout=300), AT_ONCE - MAX_CHECKS)]
            assert refused == [ALL_TAKEN] * (AT_ONCE - MAX_CHECKS)
            assert len(pids) == MAX_CHECKS
        finally:
            for pid in pids:
                os.kill(pid, 9)
    assert all(started.acquire(blocking=False) for _ in range(MAX_CHECKS))


def test_a_person_has_one_check_at_a_time_and_leaves_a_place_to_others() -> None:
    refused = pytest.raises(ChecksBusy, match="another file of the same person is being checked")
    with take_place(1), refused, take_place(1, wait_s=0):
        pass
    with take_place(1), take_place(2, wait_s=0):
        pass


def test_a_place_is_free_again_when_its_check_has_ended() -> None:
    for _ in range(MAX_CHECKS + 1):
        with take_place(1, wait_s=0):
            pass


def test_the_api_answers_503_and_when_to_ask_again(client: Client, ada: User) -> None:
    client.force_login(ada)
    sent = {"file": SimpleUploadedFile("words.txt", b"In the beginning.\n"), "name": "words"}
    with take_place(ada.pk):
        answer = client.post("/api/v1/datasets", sent)
    assert (answer.status_code, answer["Retry-After"], answer.json()["code"]) == (503, "5", "checks_busy")
    assert answer.json()["hint"] == "Send it again in 5 seconds."
    assert not Dataset.objects.exists()


def test_a_page_says_that_a_file_cannot_be_checked_just_now(client: Client, ada: User) -> None:
    client.force_login(ada)
    sent = {"file": SimpleUploadedFile("words.txt", b"In the beginning.\n"), "name": "words"}
    with take_place(ada.pk):
        answer = client.post("/datasets/", sent)
    assert answer.status_code < 500
    assert "another file of the same person is being checked" in answer.content.decode().lower()


def test_a_check_counts_for_who_asks_and_not_for_whose_file_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else somebody who looks at another's dataset again and again, or at one that ships with the program, keeps others out."""
    monkeypatch.setattr(limited, "_run", lambda *_, **__: (b"{}", 0))
    for owner_id in (1, None):
        with asked_by(lambda: 2):
            with take_place(1):
                assert run_limited("check", [], field="file", error=InvalidDataset, owner_id=owner_id) == {}
            with take_place(2), pytest.raises(ChecksBusy, match="another file of the same person"):
                run_limited("check", [], field="file", error=InvalidDataset, owner_id=owner_id)
