"""Several web processes behind one port: they start, are started again and end together, and count what they do as one."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.site.site import ROOT, Site
from tests.worker.processes import is_alive, wait_for
from webapp.processes import shared_socket

TOKEN = "scrape me"


def helpers_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


def test_answers_on_a_shared_port_are_sent_at_once() -> None:
    """Nagle's delay, which asyncio leaves on for sockets whose protocol is not named, made each answer take 40 ms longer."""
    with shared_socket("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP


def listeners(port: int) -> int:
    """Sockets that listen on the port, whoever has them."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(line[1].rpartition(":")[2], 16) == port and line[3] == "0A" for line in lines)


class Web:
    """The web processes of a site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.port = int(site.url.rpartition(":")[2])
        self.wait_for_both()

    @property
    def pid(self) -> int:
        process: Any = self._site._web
        return int(process.pid)

    def wait_for_both(self) -> int:
        """The process id of the second one, once both listen."""
        wait_for(lambda: listeners(self.port) == 2, what="both processes to listen", timeout_s=90)
        (helper,) = helpers_of(self.pid)
        return helper

    def get(self, path: str) -> httpx.Response:
        """By a connection of its own, which either of them may get."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.get(f"{self._site.url}{path}", headers=headers, trust_env=False, timeout=30)

    def end(self, how: int) -> int:
        process: Any = self._site._web
        os.kill(self.pid, how)
        return int(process.wait(timeout=30))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site(HEADROOM_WEB_PROCESSES="2", HEADROOM_METRICS_TOKEN=TOKEN)
    yield site
    site.close()


@pytest.fixture
def web(site: Site) -> Web:
    if site._web is None or site._web.poll() is not None:
        site.start_web()
    return Web(site)


def count_answers(text: str) -> int:
    found = re.search(r'headroom_http_requests_total\{method="GET",route="/healthz",status="200"\} ([0-9.]+)', text)
    return int(float(found[1])) if found else 0


def test_either_process_shows_the_requests_of_both(web: Web) -> None:
    before = count_answers(web.get("/metrics").text)
    for _ in range(20):
        assert web.get("/healthz").status_code == 200
    assert [count_answers(web.get("/metrics").text) - before for _ in range(8)] == [20] * 8


def test_a_process_that_is_killed_is_started_again_and_the_other_answers_meanwhile(web: Web) -> None:
    helper = web.wait_for_both()
    os.kill(helper, signal.SIGKILL)
    wait_for(lambda: listeners(web.port) == 1, what="the killed process to be gone")
    for _ in range(10):
        assert web.get("/healthz").status_code == 200
    assert web.wait_for_both() != helper


def test_another_service_cannot_take_a_part_of_the_port(web: Web, site: Site) -> None:
    command = [sys.executable, "-m", "webapp.server", "--port", str(web.port), "--processes", "2"]
    other = subprocess.run(command, cwd=ROOT, env=site._environment, capture_output=True, text=True, check=False)
    assert other.returncode != 0
    assert f"the web cannot listen on 127.0.0.1, port {web.port}: Address already in use" in other.stderr
    assert listeners(web.port) == 2


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["asked to end", "killed"])
def test_no_process_outlives_the_first(web: Web, how: int) -> None:
    helper = web.wait_for_both()
    web.end(how)
    wait_for(lambda: not is_alive(helper) and listeners(web.port) == 0, what="the second process to end")
