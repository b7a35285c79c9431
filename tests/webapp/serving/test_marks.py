"""Marks of supervisors that hold a model."""

import pytest

from webapp.wire.serving import SupervisorWire, alive_key

pytestmark = pytest.mark.usefixtures("valkey")


def test_a_supervisor_that_ends_late_leaves_the_mark_of_a_later_attempt() -> None:
    earlier, later = SupervisorWire("job_1"), SupervisorWire("job_1")
    earlier.mark_alive("1")
    later.mark_alive("2")
    earlier.unmark("1")
    assert later._client.get(alive_key("job_1")) == "2"
    later.unmark("2")
    assert later._client.get(alive_key("job_1")) is None
    for wire in (earlier, later):
        wire.close()
