"""Two real workers, each in a network of its own on this computer, measure the link between them until it is cut."""

import re
import subprocess
from contextlib import ExitStack

import pytest

from benchmarks.parallel.links.namespaces import INTERFACE, LinkProfile, NoNamespaces, joined_namespaces
from optimizer.hardware.peers import read_network
from tests.breadth import SEVERAL_DEVICES
from tests.end_to_end.devices.test_two_machines import MACHINES, PLANNED, JoinedJobs
from tests.end_to_end.site.stack import running_stack
from tests.webapp.conftest import MACHINE_DOCUMENT

pytestmark = [pytest.mark.slow, pytest.mark.breadth(SEVERAL_DEVICES)]


def test_workers_in_two_networks_find_the_link_between_them_and_no_job_is_taken_once_it_is_cut() -> None:
    network = LinkProfile(name="100 Mbit/s, 1 ms", bytes_per_s=12.5e6, delay_s=1e-3)
    with ExitStack() as stack:
        try:
            spaces = stack.enter_context(joined_namespaces(len(MACHINES), network))
        except NoNamespaces as error:
            pytest.skip(f"network namespaces cannot be made here: {error.message}")
        jobs = JoinedJobs(stack.enter_context(running_stack(machine=MACHINE_DOCUMENT, has_worker=False)))
        for place, machine in enumerate(MACHINES):
            own = {"HEADROOM_WORKER_NAME": machine, "HEADROOM_RANK_INTERFACE": INTERFACE}
            jobs.stack.start_worker(machine, prefix=spaces.prefix(place), **own)
        link = jobs.link()
        assert link["failure"] == "", jobs.stack.logs()
        found = read_network(link["link"])
        # what shares this computer's cores with the test makes the link seem slower, never faster
        assert 0.5 * network.bytes_per_s < found.bytes_per_s < 1.05 * network.bytes_per_s
        assert found.latency_s > network.delay_s
        subprocess.run([*spaces.prefix(0), "ip", "link", "set", INTERFACE, "down"], check=True)
        jobs.stack.ask("ask_for_links", machine="home")
        failure = jobs.link()["failure"]
        assert re.search(r"cannot reach|cannot be reached", failure)
        assert "HEADROOM_RANK_INTERFACE" in failure
        refused = jobs.stack.ask("refusal_of", model=jobs.model, dataset=jobs.dataset, **PLANNED)
        assert failure in refused
