"""Ranks that share each block: each one's predicted peaks and bytes by link are what is counted, on two processes of gloo."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.step.setting import LaidOut, lay_out
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import PeerLink
from optimizer.models.spec import read_model_spec
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.ranks.cases import MODELS, RankCase, make_case
from tests.optimizer.runtime.ranks.conftest import answers_of
from tests.optimizer.runtime.ranks.pool import RankPool

ON_HOST: dict[str, Any] = {"gradients": "host", "state": OptimizerStatePlan(place="host"), "weights": WeightsPlan(place="host")}
ADAPTER = Adapter(rank=4)
CASES = tuple(
    make_case(shares_blocks=True, **case)
    for case in (
        {},
        {"model": "llama", "activations": ("recompute", "selective", "offload"), "accumulation_steps": 2},
        {"model": "qwen3", "activations": ("recompute", "recompute", "keep"), "gradients": "host", "accumulation_steps": 2},
        {"model": "gemma2", "activations": ("recompute", "selective", "keep"), "adapter": ADAPTER},
        {"model": "phi", "activations": ("recompute", "selective", "keep"), "adapter": ADAPTER},
        {"model": "starcoder2", "weights": WeightsPlan(autocast="bf16"), "activations": ("recompute", "selective", "keep")},
        {**ON_HOST, "num_chunks": 4},
        {"adapter": ADAPTER, "weights": WeightsPlan(place="host", dtype="bf16"), "accumulation_steps": 3},
        {"gradients": "consume", "weights": WeightsPlan(dtype="bf16", master="none")},
    )
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp("ranks"), num_ranks=2)
    yield pool
    pool.close()


def predict(case: RankCase, *, link: PeerLink | None = None) -> tuple[Prediction, LaidOut]:
    extent = extent_of([(case.plan, case.workload)])
    spec = read_model_spec(MODELS[case.model])
    profile = trace(spec, extent=extent, adapter=case.workload.adapter, num_sharing=case.plan.layout.tensor)
    machine = replace(make_cpu_machine(), num_threads=case.num_ranks, peers=link)
    here: dict[str, Any] = {"plan": case.plan, "workload": case.workload, "machine": machine}
    return estimate_training(profile, **here), lay_out(profile, **here)


@pytest.mark.breadth
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_on_device_host_and_link_are_those_that_are_counted(case: RankCase, ranks: RankPool, tmp_path: Path) -> None:
    predicted, laid = predict(case)
    command = {"kind": "steps", "case": case.to_json(), "folder": str(tmp_path), "counts": True}
    answers = answers_of(ranks.run(command, num_ranks=case.num_ranks))
    for rank, answer in enumerate(answers):
        assert answer["peaks"][1] == answer["peaks"][2] == predicted.device_peak_bytes
        assert answer["host_peaks"][1] == answer["host_peaks"][2] == predicted.host_peak_bytes
        assert answer["sent_bytes"][1] == answer["sent_bytes"][2] == laid.setting.sent_bytes(case.plan)[rank]
    assert predicted.rank_peak_bytes == (predicted.device_peak_bytes,) * 2


def test_compute_waits_for_each_sum() -> None:
    case = make_case(shares_blocks=True, activations=("recompute", "keep", "keep"))
    slow, slower = (
        predict(case, link=PeerLink(kind="network", bytes_per_s=bytes_per_s, latency_s=1e-3, source="a test"))[0]
        for bytes_per_s in (1e8, 1e7)
    )
    assert slower.exposed_ms["network"] == pytest.approx(slower.lane_busy_ms["network"])
    assert slower.step_ms - slow.step_ms == pytest.approx(slower.exposed_ms["network"] - slow.exposed_ms["network"])
    # A ring of two sends as many bytes as the tensor has: 4 sums a block, one more where it is recomputed.
    sums_bytes = (4 * 3 + 1) * 2 * 32 * 64 * 4
    assert slower.network_bytes == pytest.approx(sums_bytes, rel=0.1)
