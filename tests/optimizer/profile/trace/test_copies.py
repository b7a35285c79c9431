"""Representations traced side by side make the profile that one process makes, and nothing stays behind."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.models.spec import read_model_spec
from optimizer.profile.extent import Extent
from optimizer.profile.profile import Profile
from optimizer.profile.trace.copies import map_in_copies
from optimizer.profile.trace.trace import profile_model
from optimizer.workload import Adapter
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.profile.conftest import LLAMA


def named(profile: Profile, name: str) -> Profile:
    return replace(profile, model_type=name)


def test_copies_make_the_same_profile_to_the_letter(profile: Profile) -> None:
    for num_processes in (2, 8):
        assert profile_model(read_model_spec(LLAMA), num_processes=num_processes).to_json() == profile.to_json()


@pytest.mark.breadth
@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_moe", "t5"])
def test_adapters_on_packed_weights_too(model_type: str) -> None:
    pytest.importorskip("peft")
    spec = read_model_spec(SMALL_CONFIGS[model_type])
    one_range = Extent(representations=("fp32", "fp32/int8", "bf16/int4"), choices=("keep",), shapes=((2, 16),))
    alone, beside = (profile_model(spec, adapter=Adapter(rank=2), extent=one_range, num_processes=number) for number in (1, 3))
    assert beside.to_json() == alone.to_json()


def test_items_keep_their_order(profile: Profile) -> None:
    names = ["a", "b", "c", "d", "e"]
    found = map_in_copies(lambda name: named(profile, name), names, num_processes=3)
    assert [each.model_type for each in found] == names


def test_an_error_in_a_copy_is_raised_as_itself(profile: Profile) -> None:
    def trace(name: str) -> Profile:
        if name == "b":
            raise InvalidPlan("refused", field="plan")
        return named(profile, name)

    with pytest.raises(InvalidPlan, match="refused"):
        map_in_copies(trace, ["a", "b"], num_processes=2)


def test_a_copy_that_is_killed_costs_time_alone(profile: Profile) -> None:
    here = os.getpid()

    def trace(name: str) -> Profile:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return named(profile, name)

    assert [each.model_type for each in map_in_copies(trace, ["a", "b"], num_processes=2)] == ["a", "b"]


def test_no_copy_and_no_pipe_is_left(profile: Profile) -> None:
    def refuse(name: str) -> Profile:
        if name == "a":
            raise InvalidPlan("refused", field="plan")
        signal.pause()
        return profile

    before, children_before = set(Path("/proc/self/fd").iterdir()), list_children()
    with pytest.raises(InvalidPlan):
        map_in_copies(refuse, ["a", "b", "c"], num_processes=3)
    assert set(Path("/proc/self/fd").iterdir()) <= before
    assert list_children() == children_before


def list_children() -> str:
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
