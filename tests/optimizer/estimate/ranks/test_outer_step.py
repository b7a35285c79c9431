"""Ranks that take steps alone: bytes on device, host and link are those that were counted, and time is the mean over a round."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.step.setting import LaidOut, lay_out
from optimizer.estimate.training import estimate_training, simulate_step
from optimizer.hardware.machine import Machine, PeerLink
from optimizer.models.spec import read_model_spec
from optimizer.plan.devices.layout import RankShare
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.workload import Adapter
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.ranks.cases import MODELS, RankCase, make_case
from tests.optimizer.runtime.ranks.conftest import answers_of
from tests.optimizer.runtime.ranks.pool import RankPool

ON_HOST: dict[str, Any] = {"gradients": "host", "state": OptimizerStatePlan(place="host")}
CASES = (
    make_case(sync_every=2, accumulation_steps=2),
    make_case(sync_every=2, sync_rule="average"),
    make_case(sync_every=2, sync_format="int8", num_ranks=3),
    make_case(sync_every=2, sync_format="bf16", weights=WeightsPlan(dtype="bf16")),
    make_case(sync_every=2, weights=WeightsPlan(dtype="bf16", master="none")),
    make_case(sync_every=2, sync_format="int8", adapter=Adapter(rank=4), weights=WeightsPlan(frozen="int8", place="host")),
    make_case(sync_every=2, gradients="consume", activations=("recompute", "selective", "offload")),
    make_case(sync_every=2, **ON_HOST, weights=WeightsPlan(place="host")),
    make_case(sync_every=2, **ON_HOST, weights=WeightsPlan(dtype="bf16")),
)


def profile_of(case: RankCase) -> Profile:
    extent = extent_of([(case.plan, case.workload)])
    return trace(read_model_spec(MODELS[case.model]), extent=extent, adapter=case.workload.adapter)


def machine_of(case: RankCase) -> Machine:
    return replace(make_cpu_machine(), num_threads=case.num_ranks)


def predict(case: RankCase, machine: Machine) -> tuple[Prediction, LaidOut]:
    profile = profile_of(case)
    here: dict[str, Any] = {"plan": case.plan, "workload": case.workload, "machine": machine}
    return estimate_training(profile, **here), lay_out(profile, **here)


@pytest.mark.breadth
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_on_device_host_and_link_are_those_that_are_counted(case: RankCase, pool: RankPool, tmp_path: Path) -> None:
    predicted, laid = predict(case, machine_of(case))
    command = {"kind": "steps", "case": case.to_json(), "folder": str(tmp_path), "counts": True, "num_steps": 4}
    answers = answers_of(pool.run(command, num_ranks=case.num_ranks))
    for rank, answer in enumerate(answers):
        assert max(answer["peaks"][1:]) == predicted.device_peak_bytes
        assert answer["host_peaks"][3] == max(answer["host_peaks"][1:]) == predicted.host_peak_bytes
        assert answer["host_peaks"][2] == simulate_step(laid).host_peak_bytes
        assert laid.setting.outer is not None
        assert answer["sent_bytes"][1] == answer["sent_bytes"][3] == laid.setting.outer.sent_bytes[rank]
        assert answer["sent_bytes"][0] == answer["sent_bytes"][2] == 0
    assert predicted.sync_bytes == round(sum(answer["sent_bytes"][1] for answer in answers) / len(answers))
    assert predicted.network_bytes == pytest.approx(predicted.sync_bytes / 2, abs=1)


def slow_machine(*, bytes_per_s: float = 25e6) -> Machine:
    """With a link of 200 Mbit/s and 20 ms, unless it is even slower."""
    return replace(
        machine_of(CASES[0]), peers=PeerLink(kind="network", bytes_per_s=bytes_per_s, latency_s=0.02, source="a test")
    )


def test_a_steps_time_is_the_mean_over_a_round() -> None:
    two, eight = (predict(make_case(sync_every=every), slow_machine())[0] for every in (2, 8))
    alone_ms = simulate_step(predict(make_case(sync_every=8), slow_machine())[1]).step_ms
    assert two.sync_ms == eight.sync_ms > alone_ms
    for every, found in ((2, two), (8, eight)):
        assert found.step_ms == pytest.approx(((every - 1) * alone_ms + found.sync_ms) / every)
        assert sum(found.exposed_by_kind_ms.values()) == pytest.approx(found.step_ms)
        assert found.exposed_ms["network"] == pytest.approx(found.lane_busy_ms["network"])
    assert two.exposed_ms["network"] == pytest.approx(4 * eight.exposed_ms["network"])


def test_a_slow_link_is_waited_for_less_the_less_is_sent() -> None:
    slow = slow_machine(bytes_per_s=1e6)
    shared = predict(make_case(), slow)[0]
    formats = [predict(make_case(sync_every=8, sync_format=each), slow)[0] for each in ("fp32", "bf16", "int8")]
    assert [found.sync_bytes for found in formats] == sorted((found.sync_bytes for found in formats), reverse=True)
    assert formats[0].step_ms > formats[1].step_ms > formats[2].step_ms
    assert formats[0].step_ms < shared.step_ms / 4


def test_ranks_that_take_unequal_shares_wait_for_the_slowest_once_in_a_round() -> None:
    case = make_case(sync_every=8, shares=(RankShare(micro_batch_size=1), RankShare(micro_batch_size=4)))
    even, _ = predict(make_case(sync_every=8), slow_machine())
    uneven = estimate_training(profile_of(case), plan=case.plan, workload=case.workload, machine=slow_machine())
    assert uneven.step_ms == pytest.approx(max(rank.step_ms for rank in uneven.ranks))
    assert uneven.step_ms > even.step_ms
    assert uneven.sync_bytes == even.sync_bytes
