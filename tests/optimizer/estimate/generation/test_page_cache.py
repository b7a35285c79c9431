"""A generation's files are read from memory if they fit there, and else from the disk."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.units import GIB
from optimizer.estimate.generation.page_cache import is_disk_in_memory
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.hardware.calibration import calibrated_rates
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.passes.arrange import passes_of
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

WORKLOAD = GenerationWorkload(prompt_length=8, num_new_tokens=8, num_sequences=6)
PLANS = (
    GenerationPlan(weights=WeightsPlan(place="disk")),
    GenerationPlan(kv_cache=KvCachePlan(place="disk")),
    GenerationPlan(weights=WeightsPlan(place="disk"), kv_cache=KvCachePlan(place="disk"), batch_size=4),
    GenerationPlan(weights=WeightsPlan(place="host"), kv_cache=KvCachePlan(place="disk"), batch_size=2),
)


@pytest.fixture(scope="module")
def profile() -> GenerationProfile:
    return profile_generation(read_model_spec(SMALL_CONFIGS["llama"]), representations=("fp32",))


def machine_of(host_bytes: int, **rates: object) -> Machine:
    machine = make_cpu_machine()
    disk = {"disk_write_bytes_per_s": 1e8, "disk_read_bytes_per_s": 1e6, "disk_cached_read_bytes_per_s": 1e7}
    return replace(machine, host_memory_bytes=host_bytes, disk_free_bytes=GIB, rates=replace(machine.rates, **(disk | rates)))


def predict(profile: GenerationProfile, plan: GenerationPlan, machine: Machine) -> GenerationPrediction:
    return estimate_generation(profile, plan=plan, workload=WORKLOAD, machine=machine)


def weights_bytes_of(profile: GenerationProfile) -> int:
    """Bytes of all blocks' weights, which stream."""
    by_block = profile.weight_bytes("fp32").by_block
    return sum(by_block[kind] for kind in profile.block_kinds)


@pytest.mark.parametrize("plan", PLANS, ids=["weights", "cache", "both", "weights on the host"])
def test_what_has_room_in_memory_beside_what_is_on_the_host_is_read_from_there(
    profile: GenerationProfile, plan: GenerationPlan
) -> None:
    roomy = predict(profile, plan, machine_of(GIB))
    # Not the host's peak, which holds the staging of a store as well.
    away_bytes = roomy.disk_peak_bytes + (weights_bytes_of(profile) if plan.weights.place == "host" else 0)
    enough, too_little = (predict(profile, plan, machine_of(room)) for room in (away_bytes, away_bytes - 1))
    assert enough.lane_busy_ms["disk"] == roomy.lane_busy_ms["disk"]
    read_bytes = roomy.copied_bytes_per_pass["disk_to_host"]
    more_ms = too_little.lane_busy_ms["disk"] - enough.lane_busy_ms["disk"]
    assert more_ms == pytest.approx(read_bytes / 1e6 * 1000 * 0.9, rel=1e-3)
    assert too_little.copied_bytes == enough.copied_bytes
    assert too_little.device_peak_bytes == enough.device_peak_bytes


def test_without_a_rate_of_the_page_cache_the_disks_own_counts(profile: GenerationProfile) -> None:
    unknown = machine_of(GIB, disk_cached_read_bytes_per_s=None)
    assert predict(profile, PLANS[0], unknown) == predict(profile, PLANS[0], machine_of(0, disk_cached_read_bytes_per_s=None))


def test_a_plan_without_the_disk_takes_as_long_with_any_memory(profile: GenerationProfile) -> None:
    plan = GenerationPlan(weights=WeightsPlan(place="host"))
    assert predict(profile, plan, machine_of(GIB)) == predict(profile, plan, machine_of(1))


def test_it_may_be_in_memory_as_long_as_the_weights_alone_are(profile: GenerationProfile) -> None:
    """The search asks this before batches are known."""
    plan = PLANS[2]
    weights_bytes = weights_bytes_of(profile)
    passes = [shape for shape, _ in passes_of(plan, WORKLOAD)]
    assert is_disk_in_memory(profile, plan, machine_of(weights_bytes))
    assert not is_disk_in_memory(profile, plan, machine_of(weights_bytes), passes=passes)
    assert not is_disk_in_memory(profile, plan, machine_of(weights_bytes - 1))


def test_finished_runs_correct_both_rates_alike() -> None:
    rates = calibrated_rates(machine_of(GIB).rates, {"disk": 2.0})
    assert (rates.disk_read_bytes_per_s, rates.disk_cached_read_bytes_per_s) == (5e5, 5e6)


def test_stores_have_python_of_their_own_where_it_was_measured(profile: GenerationProfile) -> None:
    python_s = {"weights of a pass": 1e-4, "stored weights": 5e-4, "keys and values": 1e-4, "stored keys and values": 1e-3}
    shared = {name: seconds for name, seconds in python_s.items() if "stored" not in name}

    def hooks_ms(plan: GenerationPlan, found: dict[str, Any]) -> float:
        predicted = predict(profile, plan, machine_of(GIB, python_s=found))
        return predicted.decode_by_kind_ms["hooks"]

    assert hooks_ms(PLANS[0], python_s) == pytest.approx(5 * hooks_ms(PLANS[0], shared))
    assert hooks_ms(PLANS[1], python_s) == pytest.approx(10 * hooks_ms(PLANS[1], shared))
