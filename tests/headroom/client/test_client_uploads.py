"""Uploads by the client: over a line that is cut, and from where an earlier process stopped. The service is the test's own."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headroom.client import ApiProblem, HeadroomClient, uploads

CONTENT = bytes(range(256)) * 100
PIECE_BYTES = 10_000


class Service:
    """Keeps the bytes it receives; cuts the line at the pieces that a test names."""

    def __init__(self) -> None:
        self.announced: dict[str, Any] | None = None
        self.kept, self.num_pieces = b"", 0
        self.refuse_with: int | None = None
        self.cut_at: set[Any] = set()

    def document(self) -> dict[str, Any]:
        files = [{**self.announced["files"][0], "received_bytes": len(self.kept)}]
        head = {key: self.announced[key] for key in ("kind", "name", "purpose", "columns")}
        return {"id": "upload_1", **head, "files": files, "piece_bytes": PIECE_BYTES}

    def __call__(self, request: httpx.Request) -> httpx.Response | None:
        path = request.url.path.removeprefix("/api/v1/")
        if request.method == "PUT":
            return self.take_piece(request)
        if path == "uploads" and request.method == "GET":
            return httpx.Response(200, json={"results": [self.document()] if self.announced else [], "next": None})
        if path == "uploads":
            self.announced = json.loads(request.read())
            return httpx.Response(201, json=self.document())
        if path.endswith("/finish"):
            return httpx.Response(201, json={"id": "dataset_1", "sha256": hashlib.sha256(self.kept).hexdigest()})
        return httpx.Response(200, json=self.document())

    def take_piece(self, request: httpx.Request) -> httpx.Response | None:
        self.num_pieces += 1
        piece, offset = request.read(), int(request.url.params["offset"])
        if self.refuse_with is not None:
            return httpx.Response(self.refuse_with, json={"detail": "no", "code": "no"})
        assert offset == len(self.kept)
        assert request.headers["X-Piece-SHA256"] == hashlib.sha256(piece).hexdigest()
        if self.num_pieces in self.cut_at:
            raise httpx.ReadError("the line was cut")
        self.kept += piece
        return httpx.Response(200, json={"received_bytes": len(self.kept)})


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def client(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeadroomClient]:
    monkeypatch.setattr(uploads, "SMALL_BYTES", 100)
    monkeypatch.setattr("headroom.client.uploads.time.sleep", lambda seconds: None)
    with HeadroomClient("http://headroom", token="t", transport=httpx.MockTransport(service)) as client:
        yield client


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "verse.txt"
    path.write_bytes(CONTENT)
    return path


def test_a_file_goes_up_in_pieces_and_reports_its_progress(
    client: HeadroomClient, service: Service, file: Path
) -> None:
    told = []
    made = client.create_dataset(file, name="verse", on_progress=lambda sent, total: told.append((sent, total)))
    assert made["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    assert service.num_pieces == 3
    assert told == [(0, 25_600), (10_000, 25_600), (20_000, 25_600), (25_600, 25_600)]


def test_a_cut_line_is_gone_on_from(client: HeadroomClient, service: Service, file: Path) -> None:
    service.cut_at = {2, 3}
    client.create_dataset(file, name="verse")
    assert service.kept == CONTENT
    assert service.num_pieces == 5


def test_the_same_command_goes_on_where_a_killed_one_stopped(
    client: HeadroomClient, service: Service, file: Path
) -> None:
    client.begin_upload("dataset", [uploads._announce(file, name=file.name)], name="verse")
    client.send_piece("upload_1", 0, CONTENT[:PIECE_BYTES], offset_bytes=0)
    client.create_dataset(file, name="verse")
    assert service.kept == CONTENT
    assert service.num_pieces == 3


def test_a_changed_file_is_begun_anew(client: HeadroomClient, service: Service, file: Path) -> None:
    client.create_dataset(file, name="verse")
    service.kept = b""
    file.write_bytes(CONTENT[::-1])
    client.create_dataset(file, name="verse")
    assert service.kept == CONTENT[::-1]
    assert service.announced["files"][0]["sha256"] == hashlib.sha256(CONTENT[::-1]).hexdigest()


def test_an_error_that_a_retry_cannot_mend_is_raised_at_once(
    client: HeadroomClient, service: Service, file: Path
) -> None:
    service.refuse_with = 422
    with pytest.raises(ApiProblem):
        client.create_dataset(file, name="verse")
    assert service.num_pieces == 1


def test_a_server_that_stays_away_is_given_up(client: HeadroomClient, service: Service, file: Path) -> None:
    service.cut_at = set(range(100))
    with pytest.raises(Exception, match="nothing answers"):
        client.create_dataset(file, name="verse")
    assert service.num_pieces == uploads.MAX_FAILURES
