"""A probe between two network namespaces finds the rate and the delay of the relay between them, and what does not answer."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parallel.links.namespaces import INTERFACE, LinkProfile, Namespaces, NoNamespaces, joined_namespaces
from optimizer.hardware.peers import network_link, read_network, write_network

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
PROFILES = (
    LinkProfile(name="200 Mbit/s, 20 ms", bytes_per_s=25e6, delay_s=20e-3),
    LinkProfile(name="100 Mbit/s, 1 ms", bytes_per_s=12.5e6, delay_s=1e-3),
)


@pytest.fixture(params=PROFILES, ids=lambda profile: profile.name)
def network(request: pytest.FixtureRequest) -> Iterator[tuple[LinkProfile, Namespaces]]:
    with ExitStack() as stack:
        try:
            spaces = stack.enter_context(joined_namespaces(2, request.param))
        except NoNamespaces as error:
            pytest.skip(f"network namespaces cannot be made here: {error.message}")
        yield request.param, spaces


def start(spaces: Namespaces, side: int, *words: str) -> subprocess.Popen[str]:
    # at real-time priority, as the relay is: waits for a core that others use are no part of the link
    command = [*spaces.prefix(side), "chrt", "--rr", "1", sys.executable, "-m", "tests.worker.links.side", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def connect(spaces: Namespaces, address: str, port: int) -> dict[str, Any]:
    with start(spaces, 1, "connect", INTERFACE, address, str(port)) as caller:
        line, _ = caller.communicate(timeout=60)
    found: dict[str, Any] = json.loads(line)
    return found


def test_rate_and_delay_of_a_network_are_found(network: tuple[LinkProfile, Namespaces]) -> None:
    profile, spaces = network
    with start(spaces, 0, "listen", INTERFACE) as listener:
        address, port = json.loads(listener.stdout.readline())
        found = connect(spaces, address, port)
        listener.wait(timeout=30)
    size, rate = found["rates"][-1]
    written = write_network(bytes_per_s=rate, delay_s=found["round_trip_s"] / 2)
    print(f"{profile.name}: {written}, pieces of {size:,} bytes; {found}")
    stated = network_link(bits_per_s=8 * profile.bytes_per_s, delay_s=profile.delay_s)
    assert read_network(written).bytes_per_s == pytest.approx(stated.bytes_per_s, rel=0.2)
    assert found["round_trip_s"] / 2 == pytest.approx(profile.delay_s, rel=0.2, abs=0.5e-3)


def test_a_side_that_lets_nobody_in_is_not_reached(network: tuple[LinkProfile, Namespaces]) -> None:
    _, spaces = network
    closed = connect(spaces, "10.77.0.1", 40000)
    assert closed["failure"] == "connection refused"
    subprocess.run([*spaces.prefix(0), "ip", "link", "set", INTERFACE, "down"], check=True)
    assert connect(spaces, "10.77.0.1", 40000)["failure"] in ("no answer within 5 s", "no route to host")
