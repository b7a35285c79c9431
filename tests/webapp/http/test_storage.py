"""A disk that is full or broken is answered in words, by a real web server whose whole state lies on a real small disk."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.disks import MIB, SmallDisk, small_disk
from tests.worker.processes import wait_for

ROOT = Path(__file__).resolve().parents[3]
LINE = (
    b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "headroom-chat-4m", "prompt": "x"}}\n'
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    with small_disk(tmp_path_factory.mktemp("full") / "disk", num_bytes=256 * MIB) as made:
        yield made


@pytest.fixture(scope="module")
def client(disk: SmallDisk) -> Iterator[httpx.Client]:
    """An administrator of the service on that disk."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
    environment |= {"HEADROOM_HOME": str(disk.folder), "DJANGO_SETTINGS_MODULE": "webapp.settings"}
    environment |= {"HEADROOM_DISK_RESERVE_BYTES": "0", "HEADROOM_DISK_FLOOR_BYTES": "0"}
    made = subprocess.run(
        [sys.executable, "manage.py", "setup_headroom", "--json"], cwd=ROOT, env=environment, check=True, capture_output=True
    )
    known = json.loads(next(line for line in made.stdout.decode().splitlines() if line.startswith("{")))
    command = f"-m uvicorn webapp.asgi:application --host 127.0.0.1 --port {port} --log-level warning"
    server = subprocess.Popen([sys.executable, *command.split()], cwd=ROOT, env=environment)
    headers = {"Authorization": f"Bearer {known['token']}"}
    (disk.folder / "password").write_text(known["password"])
    # as the other services do: else each request would have to make the -shm file anew, even to read
    beside = sqlite3.connect(disk.folder / "headroom.sqlite3")
    beside.execute("SELECT count(*) FROM jobs_job").fetchone()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False, timeout=60) as found:
        wait_for(lambda: answers(found), what="the web to answer", timeout_s=90)
        yield found
    beside.close()
    server.terminate()
    server.wait()


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def make_projects_until_refused(client: httpx.Client) -> httpx.Response:
    """Writing fills the last blocks that SQLite has in its hands, and then there are none."""
    for number in range(200):
        answer = client.post("/api/v1/projects", json={"name": f"project {number} {os.urandom(4).hex()}"})
        if answer.status_code != 201:
            return answer
    raise AssertionError("the disk is not full")


def test_a_request_on_a_full_disk_is_answered_507_and_the_same_one_succeeds_once_there_is_room(
    client: httpx.Client, disk: SmallDisk
) -> None:
    disk.fill()
    try:
        refused = make_projects_until_refused(client)
        assert (refused.status_code, refused.json()["code"]) == (507, "disk_full")
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json()["detail"] == "nothing was changed: the disk of the service is full"
        batch = client.post("/v1/files", files={"file": ("a.jsonl", LINE)}, data={"purpose": "batch"})
        assert batch.status_code == 507, batch.text
        assert batch.json()["error"]["code"] == "disk_full"
        assert client.get("/api/v1/jobs").status_code == 200
    finally:
        disk.make_room()
    assert client.post("/api/v1/projects", json={"name": "there is room"}).status_code == 201


def test_a_page_on_a_full_disk_says_so(client: httpx.Client, disk: SmallDisk) -> None:
    disk.fill()
    try:
        make_projects_until_refused(client)
        with httpx.Client(base_url=client.base_url, trust_env=False, timeout=60) as browser:
            token = browser.get("/login/").cookies["csrftoken"]
            password = (disk.folder / "password").read_text()
            page = browser.post("/login/", data={"username": "admin", "password": password, "csrfmiddlewaretoken": token})
        assert page.status_code == 507
        assert "<h1>The disk is full</h1>" in page.text
    finally:
        disk.make_room()


def test_a_request_on_a_broken_disk_is_answered_503_to_be_sent_again(client: httpx.Client, disk: SmallDisk) -> None:
    disk.break_down()
    refused = client.post("/api/v1/projects", json={"name": "broken"})
    assert (refused.status_code, refused.json()["code"]) == (503, "storage_failed")
    assert refused.headers["retry-after"] == "30"
