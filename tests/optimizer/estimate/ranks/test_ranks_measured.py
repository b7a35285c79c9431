"""Each rank's predicted peak is what its own meter counts, to the byte: plans drawn at random, on two processes of gloo."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.estimate.step.setting import lay_out_ranks
from optimizer.estimate.training import estimate_training, simulate_step
from optimizer.models.spec import read_model_spec
from optimizer.plan.devices.layout import DATA_PARALLEL
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter
from tests.breadth import BYTES_OF_RANKS
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.ranks.cases import MODELS, RankCase, draw_cases, make_case
from tests.optimizer.runtime.ranks.pool import RankPool

pytestmark = pytest.mark.breadth(BYTES_OF_RANKS)

NUM_CASES = 12


def drawn_cases() -> list[RankCase]:
    drawn = draw_cases(80, seed=11, num_ranks=(2,))
    return [case for case in drawn if case.workload.adapter is None and case.model != "tied"][:NUM_CASES]


def plain_cases() -> list[RankCase]:
    """Plans whose peak is in the midst of backward, where gradients come and go: short sequences beside large matrices."""
    return [
        make_case(
            data=data, accumulation_steps=steps, activations=("recompute",) * 3, sequence_length=8, optimizer="sgd", momentum=0.0
        )
        for data in DATA_PARALLEL
        for steps in (1, 2)
    ]


def streamed_cases() -> list[RankCase]:
    """Weights that stream from the host: from one home where one rank updates each tensor or none does, else from two."""
    on_host: dict[str, Any] = {"gradients": "host", "state": OptimizerStatePlan(place="host")}
    trained = [
        make_case(data=data, weights=WeightsPlan(place="host", dtype=dtype, prefetch=prefetch), **on_host)
        for data, dtype, prefetch in (("zero1", "fp32", 1), ("zero2", "bf16", 0), ("replicated", "fp32", 2))
    ]
    frozen = [
        make_case(data=data, weights=WeightsPlan(place="host", frozen=form), adapter=Adapter(rank=4))
        for data, form in (("replicated", "same"), ("zero2", "int4"))
    ]
    return [*trained, *frozen]


def dealt_cases() -> list[RankCase]:
    """Weights that one rank keeps each: trained or under adapters, as many blocks ahead as a plan may say, in every format."""
    trained = [
        make_case(data="zero3", weights=WeightsPlan(dtype=dtype, prefetch=prefetch), **more)
        for dtype, prefetch, more in (
            ("fp32", 0, {"sequence_length": 8, "optimizer": "sgd", "momentum": 0.0}),
            ("fp32", 2, {"gradients": "consume", "activations": ("recompute", "selective", "offload")}),
            ("bf16", 1, {"gradients": "host", "state": OptimizerStatePlan(place="host"), "accumulation_steps": 2}),
        )
    ]
    frozen = [
        make_case(data="zero3", weights=WeightsPlan(dtype=dtype, frozen=form, prefetch=ahead), adapter=Adapter(rank=4), **more)
        for dtype, form, ahead, more in (
            ("fp32", "same", 1, {"activations": ("recompute",) * 3, "sequence_length": 8}),
            ("bf16", "int4", 0, {"num_chunks": 4}),
            ("fp32", "int8", 2, {"gradients": "consume"}),
            ("bf16", "nf4", 1, {"accumulation_steps": 2}),
        )
    ]
    return [*trained, *frozen]


def replica_cases() -> list[RankCase]:
    """Four ranks with two replicas of what they share out, on the device and on the host."""
    shared: dict[str, Any] = {"num_ranks": 4, "replicas": 2}
    on_host: dict[str, Any] = {"gradients": "host", "state": OptimizerStatePlan(place="host")}
    trained = [
        make_case(data="zero1", accumulation_steps=3, sequence_length=8, optimizer="sgd", momentum=0.0, **shared),
        make_case(data="zero2", accumulation_steps=2, **shared),
        make_case(data="zero2", weights=WeightsPlan(place="host"), **on_host, **shared),
        make_case(data="zero3", weights=WeightsPlan(prefetch=2), gradients="consume", **shared),
    ]
    frozen = [
        make_case(data="zero3", weights=WeightsPlan(frozen="int4"), adapter=Adapter(rank=4), **shared),
        make_case(data="replicated", weights=WeightsPlan(place="host"), adapter=Adapter(rank=4), **shared),
    ]
    return [*trained, *frozen]


def check_cases(cases: list[RankCase], pool: RankPool, folder: Path) -> None:
    machine = replace(make_cpu_machine(), num_threads=max(case.num_ranks for case in cases))
    for case in cases:
        alike = [(each.plan, each.workload) for each in cases if (each.model, each.workload.adapter) == _kind(case)]
        profile = trace(read_model_spec(MODELS[case.model]), extent=extent_of(alike), adapter=case.workload.adapter)
        predicted = estimate_training(profile, plan=case.plan, workload=case.workload, machine=machine)
        assert predicted.device_peak_bytes == max(predicted.rank_peak_bytes)
        on_device, on_host = measure(case, pool, folder)
        assert on_device == predicted.rank_peak_bytes, case.name
        laid = lay_out_ranks(profile, plan=case.plan, workload=case.workload, machine=machine)
        hosts = [simulate_step(each).host_peak_bytes for each in sorted(laid, key=lambda each: each.rank)]
        # Ranks of other replicas hold what those of the first do.
        assert list(on_host[: len(hosts)]) == hosts, case.name
        assert on_host[case.num_ranks // 2 :] == on_host[: case.num_ranks // 2] or case.plan.layout.replicas == 1
        assert max(on_host) == predicted.host_peak_bytes, case.name


def _kind(case: RankCase) -> tuple[str, Adapter | None]:
    return case.model, case.workload.adapter


def measure(case: RankCase, pool: RankPool, folder: Path) -> tuple[tuple[int, ...], ...]:
    """The peaks of each rank over its steady steps, on the device and on the host."""
    replies = pool.run({"kind": "steps", "case": case.to_json(), "folder": str(folder)}, num_ranks=case.num_ranks)
    return tuple(tuple(max(reply["answer"][name][1:]) for reply in replies) for name in ("peaks", "host_peaks"))


def test_plans_drawn_at_random_are_predicted_to_the_byte_on_each_rank(pool: RankPool, tmp_path: Path) -> None:
    check_cases(drawn_cases(), pool, tmp_path)


def test_weights_that_stream_are_predicted_to_the_byte_on_each_rank_and_its_host(pool: RankPool, tmp_path: Path) -> None:
    cases = streamed_cases()
    check_cases(cases, pool, tmp_path)
    assert {case.plan.shares_homes(trains_all=case.workload.adapter is None) for case in cases} == {True, False}


def test_weights_that_are_dealt_out_are_predicted_to_the_byte_on_each_rank(pool: RankPool, tmp_path: Path) -> None:
    check_cases(dealt_cases(), pool, tmp_path)


def test_replicas_of_what_is_shared_are_predicted_to_the_byte_on_each_rank_and_its_host(pool: RankPool, tmp_path: Path) -> None:
    check_cases(replica_cases(), pool, tmp_path)


def test_gradients_that_come_and_go_in_backward_are_predicted_to_the_byte(pool: RankPool, tmp_path: Path) -> None:
    cases = plain_cases()
    check_cases(cases, pool, tmp_path)
    assert {case.plan.layout.data for case in cases} == set(DATA_PARALLEL)
