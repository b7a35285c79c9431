"""Each stage's predicted peak is what its own meter counts: several architectures, cuts, orders and formats, on two and four
processes of gloo.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidPlan
from optimizer.base.units import GIB
from optimizer.estimate.card.training_memory import add_memory
from optimizer.estimate.training import estimate_training
from optimizer.hardware.devices import find_device, table_machine
from optimizer.hardware.machine import DeviceKind
from optimizer.hardware.mixed import play_devices
from optimizer.hardware.peers import network_link, peer_link_of
from optimizer.models.spec import read_model_spec
from optimizer.plan.devices.layout import RankShare
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.workload import Adapter
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.ranks.cases import MODELS, RankCase, make_case
from tests.optimizer.runtime.ranks.pool import RankPool

WITHIN_BYTES = 64
"""A few numbers: of what belongs to no block each stage has one in the place of each tensor that others keep."""
LORA: dict[str, Any] = {"adapter": Adapter(rank=4)}


def cut(**changes: Any) -> RankCase:
    return make_case(**{"model": "untied", "stage_blocks": (1, 2), "accumulation_steps": 4, **changes})


CASES = [
    cut(),
    cut(schedule="gpipe", activations=("recompute", "selective", "keep")),
    cut(model="llama", weights=WeightsPlan(dtype="bf16"), activations=("selective", "recompute", "keep"), stage_blocks=(2, 1)),
    cut(model="llama", weights=WeightsPlan(frozen="int4", dtype="bf16"), **LORA),
    cut(model="llama", accumulation_steps=2, num_chunks=4, state=OptimizerStatePlan(bits=8)),
    cut(model="qwen3", activations=("recompute",) * 3, weights=WeightsPlan(frozen="int8"), **LORA),
    cut(model="gemma2", weights=WeightsPlan(autocast="bf16"), **LORA),
    cut(model="gpt2", activations=("keep", "recompute", "keep"), **LORA),
    cut(model="mixtral", sequence_length=8),
    cut(stage_blocks=(1, 2, 1, 1), activations=("keep", "recompute", "keep", "keep", "selective"), accumulation_steps=6),
    cut(model="llama", stage_blocks=(1, 1, 1, 1), activations=("keep",) * 4, accumulation_steps=8),
]


def profile_of(case: RankCase) -> Any:
    spec = read_model_spec({**MODELS[case.model], "num_hidden_layers": len(case.plan.activations.per_block)})
    return trace(spec, extent=extent_of([(case.plan, case.workload)]), adapter=case.workload.adapter)


@pytest.mark.breadth
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_stage_is_predicted_to_a_few_numbers(pool: RankPool, tmp_path: Path, case: RankCase) -> None:
    machine = replace(make_cpu_machine(), num_threads=2)
    predicted = estimate_training(profile_of(case), plan=case.plan, workload=case.workload, machine=machine)
    replies = pool.run({"kind": "steps", "case": case.to_json(), "folder": str(tmp_path)}, num_ranks=case.num_ranks)
    measured = [max(reply["answer"]["peaks"][1:]) for reply in replies]
    assert predicted.device_peak_bytes == max(predicted.rank_peak_bytes)
    differ = [ours - theirs for ours, theirs in zip(predicted.rank_peak_bytes, measured, strict=True)]
    assert max(map(abs, differ)) <= WITHIN_BYTES, (measured, predicted.rank_peak_bytes)
    assert predicted.exposed_ms["network"] > 0
    assert predicted.network_bytes > 0


UNEQUAL = play_devices(make_cpu_machine(), [GIB, 2 * GIB])
SHARES = tuple(RankShare(device=kind.device.name) for kind in UNEQUAL.kinds)


@pytest.mark.breadth
@pytest.mark.parametrize(
    "case",
    [
        cut(shares=SHARES, activations=("recompute", "selective", "keep")),
        cut(shares=SHARES[::-1], model="llama", stage_blocks=(2, 1), schedule="gpipe"),
        cut(shares=SHARES, model="llama", weights=WeightsPlan(frozen="int4", dtype="bf16"), **LORA),
        cut(shares=(*SHARES, *SHARES), stage_blocks=(1, 2, 1, 1), activations=("keep",) * 5, accumulation_steps=6),
    ],
    ids=lambda case: case.name,
)
def test_each_stage_on_unequal_devices_is_predicted_to_a_few_numbers(pool: RankPool, tmp_path: Path, case: RankCase) -> None:
    here: dict[str, Any] = {"plan": case.plan, "workload": case.workload, "machine": UNEQUAL}
    profile = profile_of(case)
    predicted = add_memory(estimate_training(profile, **here), profile, **here)
    replies = pool.run({"kind": "steps", "case": case.to_json(), "folder": str(tmp_path)}, num_ranks=case.num_ranks)
    measured = [max(reply["answer"]["peaks"][1:]) for reply in replies]
    differ = [rank.peak_bytes - theirs for rank, theirs in zip(predicted.ranks, measured, strict=True)]
    assert max(map(abs, differ)) <= WITHIN_BYTES, (measured, predicted.ranks)
    assert predicted.rank_peak_bytes == tuple(rank.peak_bytes for rank in predicted.ranks)
    assert [rank.device for rank in predicted.ranks] == [share.device for share in case.plan.layout.ranks]
    assert [rank.memory.allocated.value for rank in predicted.ranks if rank.memory] == list(predicted.rank_peak_bytes)
    fullest = predicted.ranks[predicted.fullest_rank or 0]
    assert predicted.device_peak_bytes == fullest.peak_bytes


def test_stages_of_like_devices_cost_what_they_do_where_each_is_named() -> None:
    machine = play_devices(make_cpu_machine(), [GIB, GIB])
    case, named = cut(), cut(shares=(RankShare(device=machine.device.name),) * 2)
    profile = profile_of(case)
    found = [
        estimate_training(profile, plan=each.plan, workload=each.workload, machine=machine) for each in (case, named)
    ]
    assert found[0].step_ms == found[1].step_ms
    assert found[0].rank_peak_bytes == found[1].rank_peak_bytes
    assert found[0].device_bytes_by_category == found[1].device_bytes_by_category


def test_each_links_own_exchanges_are_priced_whatever_was_priced_before() -> None:
    case, delays_s = cut(), (0.001, 0.02)
    profile = profile_of(case)

    def step_ms(delay_s: float) -> float:
        machine = replace(make_cpu_machine(), num_devices=2, peers=network_link(bits_per_s=1e9, delay_s=delay_s))
        return estimate_training(profile, plan=case.plan, workload=case.workload, machine=machine).step_ms

    near_ms, far_ms = map(step_ms, delays_s)
    afresh_ms = estimate_afresh(case, delays_s[1])
    assert far_ms == afresh_ms
    # Ten crossings and their notices, and twice a sum of a few numbers, each of several round trips.
    assert far_ms - near_ms > 16 * 1000 * (delays_s[1] - delays_s[0])


def estimate_afresh(case: RankCase, delay_s: float) -> float:
    """With a profile that nothing was priced with."""
    machine = replace(make_cpu_machine(), num_devices=2, peers=network_link(bits_per_s=1e9, delay_s=delay_s))
    profile = Profile.from_json(profile_of(case).to_json())
    return estimate_training(profile, plan=case.plan, workload=case.workload, machine=machine).step_ms


def test_a_stage_takes_as_long_as_its_own_device_does() -> None:
    machine = table_machine("RTX 4090")
    slow = replace(machine.device, name="slow"), replace(machine.rates, op_overhead_s=10 * machine.rates.op_overhead_s)
    both = replace(machine, others=(DeviceKind(device=slow[0], rates=slow[1]),), peers=peer_link_of(find_device("RTX 4090")))
    work_ms = {}
    for devices in (("RTX 4090", "slow"), ("slow", "RTX 4090")):
        case = cut(shares=tuple(RankShare(device=name) for name in devices))
        predicted = estimate_training(profile_of(case), plan=case.plan, workload=case.workload, machine=both)
        work_ms[devices] = {rank.device: rank.step_ms for rank in predicted.ranks}
        assert predicted.step_ms >= max(rank.step_ms for rank in predicted.ranks)
        assert predicted.ranks[predicted.slowest_rank or 0].device == "slow"
    # The second stage has two of three blocks.
    assert work_ms["RTX 4090", "slow"]["slow"] > 1.5 * work_ms["slow", "RTX 4090"]["slow"]


def test_a_tied_model_is_refused_unless_it_is_frozen() -> None:
    case = cut(model="tied")
    with pytest.raises(InvalidPlan, match="its embedding and its head are one tensor"):
        estimate_training(profile_of(case), plan=case.plan, workload=case.workload, machine=make_cpu_machine())
    frozen = cut(model="tied", **LORA)
    assert estimate_training(profile_of(frozen), plan=frozen.plan, workload=frozen.workload, machine=make_cpu_machine())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("shared", "its blocks share weights"),
        ("bert", "carried out for causal decoders alone; bert is none"),
        ("opt", "another width"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_what_to_do(model: str, message: str) -> None:
    behind = 3 if model == "shared" else 2
    case = cut(model=model, activations=("keep",) * (1 + behind), stage_blocks=(1, behind))
    with pytest.raises(InvalidPlan, match=message):
        estimate_training(profile_of(case), plan=case.plan, workload=case.workload, machine=make_cpu_machine())
