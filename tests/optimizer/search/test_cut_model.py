"""The search for a model's cut: the blocks of each stage, models that are better left whole, and the words of the answer."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.api.plan import plan_profiled
from optimizer.base.errors import InvalidPlan, NoFeasiblePlan
from optimizer.base.units import MIB
from optimizer.estimate.training import estimate_training
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.pins.training import read_pins
from optimizer.plan.plan import Plan
from optimizer.profile.extent import Extent
from optimizer.profile.profile import Profile
from optimizer.search.arrangements import PlanLine
from optimizer.search.cut_model import search_cut
from optimizer.search.cutting import even_cut
from optimizer.search.problem import SearchProblem
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.search.training import training_problem
from optimizer.workload import Adapter, TrainingWorkload
from tests.optimizer.profiles import trace
from tests.optimizer.search.questions.test_layouts import pair

SIZES: dict[str, Any] = {
    "model_type": "headroom_decoder",
    "attention_block": 8,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "vocab_size": 512,
    "intermediate_size": 172,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
WORKLOAD = TrainingWorkload(sequence_length=64, global_batch_size=8)
FORBID: tuple[Any, ...] = ("offload", "offload_gradients", "offload_optimizer", "stream_weights", "disk")
EXTENT = Extent(representations=("fp32",), shapes=tuple((size, 64) for size in (1, 2, 4, 8)))
SLOW = 2e7
"""Bytes a second between devices: weights take longer to cross than blocks to compute."""


def profile_of(adapter: Adapter | None = None, **changes: Any) -> Profile:
    return trace(read_model_spec({**SIZES, **changes}), adapter=adapter, extent=EXTENT)


def ask(
    machine: Machine,
    *,
    profile: Profile | None = None,
    workload: TrainingWorkload = WORKLOAD,
    pins: tuple[str, ...] = (),
    **goal: Any,
) -> ObjectiveAnswer:
    asked = Goal(
        device_budget_bytes=goal.pop("device_budget_bytes", UNLIMITED_BYTES),
        num_devices=machine.num_devices,
        pins=read_pins(pins),
        forbid=goal.pop("forbid", (*FORBID, "shard_state")),
        **goal,
    )
    return plan_profiled(profile or profile_of(), machine=machine, workload=workload, goal=asked, with_ways_out=False)


def test_a_model_that_fits_on_no_device_is_cut_where_its_weights_are_slow_to_send() -> None:
    machine = pair(bytes_per_s=SLOW, num_devices=2)
    alone = ask(replace(machine, num_devices=1, peers=None), pins=("activations.per_block=recompute", "batch.micro_batch_size=1"))
    budget_bytes = alone.result.chosen.prediction.device_peak_high_bytes * 3 // 4
    answer = ask(machine, device_budget_bytes=budget_bytes, forbid=FORBID)
    chosen = answer.result.chosen
    assert chosen.plan.layout.is_cut
    assert chosen.verdict == "fits"
    assert max(chosen.prediction.rank_peak_bytes) <= budget_bytes
    assert answer.result.explanation[0].startswith("the model is cut over 2 devices: rank 0 has")
    sentences = {option.layout.data if not option.layout.is_cut else "cut": option.sentence for option in answer.layouts}
    assert "chosen" in sentences["cut"]
    assert "the model cut into" in sentences["cut"]


def test_a_model_that_fits_and_hides_its_exchanges_is_not_cut() -> None:
    answer = ask(pair(num_devices=2))
    assert not answer.result.chosen.plan.layout.is_cut
    assert answer.result.chosen.plan.layout.num_devices == 2
    (cut,) = (option for option in answer.layouts if option.layout.is_cut)
    assert "slower" in cut.sentence or "not searched" in cut.sentence


def test_a_slow_link_is_not_worth_a_second_device() -> None:
    machine = pair(bytes_per_s=1e4, latency_s=0.5, num_devices=2)
    assert ask(machine).result.chosen.plan.layout == DeviceLayout()


def test_fewer_blocks_stand_beside_a_large_head() -> None:
    answer = ask(pair(num_devices=2), profile=profile_of(vocab_size=4096), forbid=(*FORBID, "data_parallel"))
    first, last = answer.result.chosen.plan.layout.stage_blocks
    assert first > last


@pytest.mark.breadth
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("share", [1.0, 0.8, 0.65])
def test_no_cut_with_as_many_recomputed_blocks_in_front_is_faster(num_stages: int, share: float) -> None:
    machine = replace(make_cpu_machine(), num_threads=num_stages, num_devices=num_stages)
    roomy = search_cut(problem_of(machine, pins=("batch.micro_batch_size=2",))).chosen
    budget_bytes = int(roomy.prediction.device_peak_high_bytes * share)
    try:
        chosen = search_cut(problem_of(machine, pins=("batch.micro_batch_size=2",), budget_bytes=budget_bytes)).chosen
    except NoFeasiblePlan:
        chosen = None
    priced = [price(plan, machine) for plan in every_plan(roomy.plan)]
    best_ms = min((found.step_ms for found in priced if found.fits_within(budget_bytes)), default=None)
    assert (chosen is None) == (best_ms is None)
    if chosen is not None and best_ms is not None:
        assert chosen.prediction.step_ms <= best_ms * 1.01


def problem_of(machine: Machine, *, pins: tuple[str, ...] = (), budget_bytes: int = UNLIMITED_BYTES) -> SearchProblem:
    number = machine.num_devices
    goal = Goal(device_budget_bytes=budget_bytes, num_devices=number, pins=read_pins(pins), forbid=FORBID)
    layout = DeviceLayout(num_devices=number, stage_blocks=even_cut(6, number))
    return training_problem(profile_of(), workload=WORKLOAD, goal=goal, machine=machine, layout=layout)


def every_plan(plan: Plan) -> list[Plan]:
    """Every cut of six blocks, with the first of each stage's blocks recomputed: none of them, half of them, all."""
    number = plan.layout.num_devices
    cuts = [(a, 6 - a) for a in range(1, 6)] if number == 2 else [(a, b, 6 - a - b) for a in range(1, 5) for b in range(1, 6 - a)]
    found = []
    for cut in cuts:
        for level in (0.0, 0.5, 1.0):
            lines = [PlanLine(num_blocks=blocks, steps=("recompute", "keep")) for blocks in cut]
            per_block = tuple(choice for line in lines for choice in line.per_block(int(line.length * level)))
            layout = replace(plan.layout, stage_blocks=cut)
            found.append(replace(plan, layout=layout, activations=replace(plan.activations, per_block=per_block)))
    return found


def price(plan: Plan, machine: Machine) -> Any:
    return estimate_training(profile_of(), plan=plan, workload=WORKLOAD, machine=machine)


def test_pins_decide_the_cut_and_the_order() -> None:
    answer = ask(pair(num_devices=2), pins=("layout.stage_blocks=4,2", "layout.schedule=gpipe"))
    assert answer.result.chosen.plan.layout == DeviceLayout(num_devices=2, stage_blocks=(4, 2), schedule="gpipe")
    assert [option.layout.stage_blocks for option in answer.layouts] == [(4, 2)]


def test_more_stages_than_devices_go_around_them_where_that_is_pinned() -> None:
    answer = ask(pair(num_devices=2), pins=("layout.stage_blocks=2,1,1,2",))
    assert answer.result.chosen.plan.layout == DeviceLayout(num_devices=2, stage_blocks=(2, 1, 1, 2), schedule="breadth_first")
    answer = ask(pair(num_devices=2), pins=("layout.schedule=breadth_first",), forbid=(*FORBID, "data_parallel"))
    cuts = [option.layout for option in answer.layouts if option.layout.is_cut]
    assert {layout.stage_blocks for layout in cuts} == {(1,) * 6, (3, 3)}
    assert {layout.schedule for layout in cuts} == {"breadth_first"}
    assert "in 3 rounds" in " ".join(option.sentence for option in answer.layouts)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (("layout.stage_blocks=4,3",), "7 blocks in all; this model has 6"),
        (("layout.stage_blocks=6,0",), "leaves stage 2 without a block"),
        (("layout.stage_blocks=2,2,2",), "3 stages; goal.num_devices is 2"),
        (("layout.stage_blocks=3,3", "layout.data=zero1"), "data is zero1; plan.layout.stage_blocks is 3, 3"),
        (("layout.stage_blocks=3,3", "batch.micro_batch_size=8"), "it takes 2 micro-batches or more"),
        (("layout.stage_blocks=3,3", "gradients.choice=consume"), "keeps weights, gradients"),
    ],
    ids=["depth", "empty", "too-many", "shared", "one-micro-batch", "gradients"],
)
def test_pins_of_a_cut_that_cannot_be_are_refused_in_words(pins: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        ask(pair(num_devices=2), pins=pins, forbid=FORBID)


def test_a_cut_that_is_forbidden_is_not_among_the_layouts() -> None:
    assert not any(option.layout.is_cut for option in ask(pair(num_devices=2), forbid=(*FORBID, "cut_model")).layouts)


def test_a_tied_model_is_cut_for_adapters_alone() -> None:
    tied = profile_of(tie_word_embeddings=True)
    assert not any(option.layout.is_cut for option in ask(pair(num_devices=2), profile=tied).layouts)
    with pytest.raises(InvalidPlan, match="train adapters, or use zero3"):
        ask(pair(num_devices=2), profile=tied, pins=("layout.stage_blocks=3,3",))
    adapter = Adapter(rank=4)
    answer = ask(
        pair(num_devices=2), profile=profile_of(adapter, tie_word_embeddings=True), workload=replace(WORKLOAD, adapter=adapter)
    )
    assert any(option.layout.is_cut for option in answer.layouts)


def test_where_nothing_fits_the_smallest_cut_is_named() -> None:
    machine = pair(num_devices=2)
    with pytest.raises(NoFeasiblePlan) as raised:
        search_cut(problem_of(machine, budget_bytes=MIB))
    smallest_bytes = int(raised.value.fields["smallest_feasible_bytes"])
    assert search_cut(problem_of(machine, budget_bytes=smallest_bytes)).chosen.prediction.fits_within(smallest_bytes)


def test_a_bound_is_never_above_what_is_found() -> None:
    for num_devices in (2, 3):
        result = search_cut(problem_of(pair(num_devices=num_devices)))
        assert result.bound_step_ms is not None
        assert result.bound_step_ms <= result.chosen.prediction.step_ms
        assert result.unlimited_step_ms <= result.chosen.prediction.step_ms


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "cut"), [(6, 2, (3, 3)), (7, 2, (4, 3)), (8, 3, (3, 3, 2)), (10, 4, (2, 3, 3, 2))]
)
def test_an_even_cut_leaves_the_ends_less(num_blocks: int, num_stages: int, cut: tuple[int, ...]) -> None:
    assert even_cut(num_blocks, num_stages) == cut
