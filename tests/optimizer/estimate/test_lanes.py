"""Time of work beside compute: serial on the CPU device, overlapped on CUDA, and reported by lane."""

import dataclasses
from typing import Any

import pytest

from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload


@pytest.fixture(scope="module")
def card(machine: Machine) -> Machine:
    rates = dataclasses.replace(
        machine.rates, host_optimizer_elements_per_s=1e8, disk_write_bytes_per_s=1e9, disk_read_bytes_per_s=1e9
    )
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, kind="cuda"), rates=rates)


def predict(
    profile: Profile, machine: Machine, *, accumulation_steps: int = 1, clip: float = 1.0, **columns: Any
) -> Prediction:
    batch = BatchPlan(micro_batch_size=2, accumulation_steps=accumulation_steps)
    plan = Plan(**{"batch": batch, "activations": ActivationsPlan(per_block=("keep",) * 4), **columns})
    workload = TrainingWorkload(sequence_length=40, global_batch_size=plan.batch.global_batch_size, max_grad_norm=clip)
    return estimate_training(profile, plan=plan, workload=workload, machine=machine)


def on_host(place: str = "host") -> dict[str, Any]:
    return {"gradients": GradientsPlan(choice="host"), "optimizer_state": OptimizerStatePlan(place=place)}


def faster(machine: Machine, **rates: Any) -> Machine:
    return dataclasses.replace(machine, rates=dataclasses.replace(machine.rates, **rates))


def test_on_the_cpu_device_every_copy_and_update_is_waited_for(profile: Profile, machine: Machine) -> None:
    predicted = predict(profile, machine, **on_host())
    busy_ms = {lane: lane_ms for lane, lane_ms in predicted.lane_busy_ms.items() if lane_ms}
    assert predicted.step_ms == pytest.approx(sum(busy_ms.values()))
    del busy_ms["compute"]
    assert predicted.exposed_ms == pytest.approx(busy_ms)


def test_updates_on_the_host_hide_behind_the_next_forward_of_a_card(profile: Profile, card: Machine) -> None:
    predicted = predict(profile, card, **on_host())
    assert 0 < predicted.exposed_ms.get("host", 0.0) < predicted.lane_busy_ms["host"]
    rapid = predict(profile, faster(card, host_optimizer_elements_per_s=1e12), **on_host())
    assert rapid.exposed_ms.get("host", 0.0) < 0.01 * rapid.step_ms


def test_a_step_on_a_card_is_never_shorter_than_its_busiest_lane(profile: Profile, card: Machine) -> None:
    slow = faster(card, host_optimizer_elements_per_s=1e5)
    for clip in (1.0, None):
        predicted = predict(profile, slow, clip=clip, **on_host())
        assert predicted.step_ms >= 0.999 * predicted.lane_busy_ms["host"]


def test_time_is_compute_and_what_it_waits_for(profile: Profile, card: Machine) -> None:
    streamed = {**on_host("disk"), "weights": WeightsPlan(place="disk")}
    for accumulation_steps in (1, 3):
        predicted = predict(profile, card, accumulation_steps=accumulation_steps, **streamed)
        assert predicted.step_ms == pytest.approx(
            predicted.lane_busy_ms["compute"] + sum(predicted.exposed_ms.values())
        )
        assert predicted.exposed_copy_ms <= sum(predicted.exposed_ms.values())


def test_weights_that_are_fetched_ahead_are_waited_for_less(profile: Profile, card: Machine) -> None:
    slow = faster(card, host_to_device_bytes_per_s=2e8)
    without, ahead = (
        predict(profile, slow, **on_host(), weights=WeightsPlan(place="host", prefetch=prefetch)) for prefetch in (0, 1)
    )
    assert ahead.exposed_ms["copy_in"] < without.exposed_ms["copy_in"]
    assert ahead.copied_bytes == without.copied_bytes
    most = [max(point.bytes_by_category["weights"] for point in one.timeline) for one in (without, ahead)]
    assert most[0] < most[1]


def test_state_on_the_disk_keeps_the_disk_busy_and_the_host_free_of_it(profile: Profile, card: Machine) -> None:
    host, disk = (predict(profile, card, **on_host(place)) for place in ("host", "disk"))
    assert "disk" not in host.lane_busy_ms
    moved_bytes = disk.copied_bytes["disk_to_host"] + disk.copied_bytes["host_to_disk"]
    assert disk.lane_busy_ms["disk"] == pytest.approx(moved_bytes / 1e9 * 1000)
    assert disk.disk_peak_bytes == 12 * profile.num_parameters


def test_links_without_traffic_are_left_out(profile: Profile, machine: Machine) -> None:
    assert predict(profile, machine).copied_bytes == {}


def test_gradients_that_come_back_are_scaled_by_the_device(profile: Profile, machine: Machine) -> None:
    gradients = GradientsPlan(choice="host")
    bare, clipped = (predict(profile, machine, gradients=gradients, clip=clip) for clip in (None, 1.0))
    moved_bytes = 2 * 4 * profile.num_parameters
    assert clipped.step_ms - bare.step_ms == pytest.approx(moved_bytes / machine.rates.memory_bytes_per_s * 1000)
    assert clipped.exposed_by_kind_ms["optimizer"] - bare.exposed_by_kind_ms["optimizer"] == pytest.approx(
        clipped.step_ms - bare.step_ms
    )


def test_each_tensor_costs_what_becomes_of_its_state(profile: Profile, machine: Machine) -> None:
    slow = faster(machine, python_s={"gradients": 0.1, "state": 0.01})

    def hooks_ms(fraction: float) -> float:
        state = OptimizerStatePlan(place="host", fraction=fraction)
        predicted = predict(profile, slow, gradients=GradientsPlan(choice="host"), optimizer_state=state)
        return predicted.exposed_by_kind_ms["hooks"]

    num_tensors = len(profile.tensors.placed())
    assert hooks_ms(1.0) == pytest.approx(10 * num_tensors)
    assert hooks_ms(1.0) < hooks_ms(0.5) < 100 * num_tensors
