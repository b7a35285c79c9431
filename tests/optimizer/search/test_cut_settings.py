"""The search for a cut with something on the host: where it lets a model fit, where it is faster, and where it is left alone."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import NoFeasiblePlan
from optimizer.estimate.training import estimate_training
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.devices import find_device, table_machine
from optimizer.hardware.machine import Machine
from optimizer.hardware.peers import peer_link_of
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.pins.training import read_pins
from optimizer.plan.plan import Plan
from optimizer.search.arrangements import PlanLine
from optimizer.search.cut_model import search_cut
from optimizer.search.cutting import Cutting, even_cut
from optimizer.search.problem import OuterPlan, SearchProblem
from optimizer.search.result import SearchResult
from optimizer.search.training import training_problem
from tests.optimizer.search.test_cut_model import FORBID, WORKLOAD, profile_of

ON_DISK: tuple[Any, ...] = ("disk", "remote", "compress")
HOMES: tuple[dict[str, Any], ...] = (
    {},
    {"gradients": "host"},
    {"gradients": "host", "state_place": "host"},
    *({"gradients": "host", "state_place": "host", "weights_place": "host", "prefetch": number} for number in (0, 1)),
)


def two_devices() -> Machine:
    return replace(make_cpu_machine(), num_threads=2, num_devices=2)


def problem_of(machine: Machine, *, budget_bytes: int = UNLIMITED_BYTES, forbid: Any = ON_DISK, **goal: Any) -> SearchProblem:
    pins = goal.pop("pins", ("batch.micro_batch_size=2", "logits_and_loss.num_chunks=1"))
    asked = Goal(device_budget_bytes=budget_bytes, num_devices=2, pins=read_pins(pins), forbid=forbid, **goal)
    layout = DeviceLayout(num_devices=2, stage_blocks=even_cut(6, 2))
    return training_problem(profile_of(), workload=WORKLOAD, goal=asked, machine=machine, layout=layout)


def search(machine: Machine, **asked: Any) -> SearchResult:
    return search_cut(problem_of(machine, **asked))


def smallest_bytes(machine: Machine, **asked: Any) -> int:
    with pytest.raises(NoFeasiblePlan) as raised:
        search(machine, budget_bytes=1, **asked)
    return int(raised.value.fields["smallest_feasible_bytes"])


def every_plan(plan: Plan) -> list[Plan]:
    """Every cut of six blocks with every home, with none, half or all of each stage's blocks recomputed or offloaded."""
    found = []
    for first, home, ways in product(range(1, 6), HOMES, product(list_ways(), repeat=2)):
        own = [line.per_block(int(line.length * level)) for line, level in map(_sized, (first, 6 - first), ways)]
        setting = replace(OuterPlan.of(plan), layout=replace(plan.layout, stage_blocks=(first, 6 - first)), **home)
        found.append(setting.plan((*own[0], *own[1])))
    return found


def list_ways() -> list[tuple[str, float]]:
    return [("keep", 1.0), ("recompute", 0.5), ("recompute", 0.0), ("offload", 0.5), ("offload", 0.0)]


def _sized(num_blocks: int, way: tuple[str, float]) -> tuple[PlanLine, float]:
    if way[0] == "offload":
        return PlanLine(num_blocks=num_blocks, num_offload=None), way[1]
    return PlanLine(num_blocks=num_blocks, steps=("recompute", "keep")), way[1]


@pytest.mark.breadth
@pytest.mark.parametrize("share", [0.8, 0.6, 0.45, 0.3])
def test_no_cut_with_something_on_the_host_is_faster_than_the_one_that_is_found(share: float) -> None:
    machine = two_devices()
    roomy = search(machine).chosen
    budget_bytes = int(roomy.prediction.device_peak_high_bytes * share)
    try:
        chosen = search(machine, budget_bytes=budget_bytes).chosen
    except NoFeasiblePlan:
        chosen = None
    priced = [estimate_training(profile_of(), plan=plan, workload=WORKLOAD, machine=machine) for plan in every_plan(roomy.plan)]
    best_ms = min((found.step_ms for found in priced if found.fits_within(budget_bytes)), default=None)
    assert chosen is not None or best_ms is None
    if chosen is not None and best_ms is not None:
        assert chosen.prediction.step_ms <= best_ms * 1.02


def test_a_model_that_fits_on_no_devices_alone_fits_with_its_state_on_the_host() -> None:
    machine = two_devices()
    needed_bytes = smallest_bytes(machine, forbid=FORBID)
    budget_bytes = needed_bytes * 3 // 4
    with pytest.raises(NoFeasiblePlan):
        search(machine, budget_bytes=budget_bytes, forbid=FORBID)
    chosen = search(machine, budget_bytes=budget_bytes).chosen
    assert chosen.verdict == "fits"
    assert chosen.plan.gradients.choice == "host"
    assert chosen.plan.optimizer_state.place == "host"
    assert max(chosen.prediction.rank_peak_bytes) <= budget_bytes
    assert chosen.prediction.host_peak_bytes > 0
    least_bytes = smallest_bytes(machine)
    assert least_bytes < budget_bytes
    assert search(machine, budget_bytes=least_bytes).chosen.verdict == "fits"


def test_what_the_host_has_no_room_for_stays_on_the_devices() -> None:
    machine = two_devices()
    budget_bytes = smallest_bytes(machine, forbid=FORBID) * 3 // 4
    with pytest.raises(NoFeasiblePlan):
        search(machine, budget_bytes=budget_bytes, host_budget_bytes=1000)


def test_pins_put_a_cut_models_weights_on_the_host() -> None:
    pins = ("batch.micro_batch_size=2", "weights.place=host", "weights.prefetch=0")
    chosen = search(two_devices(), pins=pins).chosen
    assert (chosen.plan.weights.place, chosen.plan.weights.prefetch) == ("host", 0)
    assert chosen.plan.optimizer_state.place == "host"


def test_a_model_with_room_for_everything_is_not_searched_with_something_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[OuterPlan] = []
    best = Cutting.best

    def watch(cutting: Cutting, *start: Any) -> Any:
        looked_at.append(cutting.setting)
        return best(cutting, *start)

    monkeypatch.setattr(Cutting, "best", watch)
    result = search(two_devices(), pins=())
    assert result.chosen.plan.gradients.choice == "keep"
    assert {setting.gradients for setting in looked_at} == {"keep"}


def test_a_card_copies_beside_compute_and_the_hosts_update_of_a_stage_ends_in_its_next_step() -> None:
    machine = replace(table_machine("RTX 4090"), num_devices=2, peers=peer_link_of(find_device("RTX 4090")))
    # A host that is slow enough for its updates to be what a step waits for.
    machine = replace(machine, rates=replace(machine.rates, host_optimizer_elements_per_s=2e8))
    roomy = search(machine, pins=()).chosen.plan
    moved = replace(OuterPlan.of(roomy), gradients="host", state_place="host").plan(("offload",) * 6)
    found = estimate_training(profile_of(), plan=moved, workload=WORKLOAD, machine=machine)
    in_turn_ms = sum(found.lane_busy_ms.get(lane, 0.0) for lane in ("compute", "copy_out", "copy_in", "host"))
    assert found.step_ms < in_turn_ms + found.exposed_ms.get("network", 0.0)
    plain = estimate_training(profile_of(), plan=roomy, workload=WORKLOAD, machine=machine)
    assert found.step_ms >= plain.step_ms
