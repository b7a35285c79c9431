"""Plans whose layout and ways of saving memory are chosen together, against plans whose memory policy was fixed first, by
predictions alone.

Which scenarios there are was written down before any was priced: each of five sets of devices with each of three works, one that
is long, one whose state is more than its weights, one whose frozen weights are most of it; and one more whose state is more than
any of the devices has. All take 24 sequences a step, which 2, 3 and 4 devices can share evenly. Every plan computes alike, in
bf16 with fp32 masters and 32-bit state: layout and memory alone differ.

- policies: the homes of gradients, state and weights are fixed, nothing else is offloaded, and then the search chooses the layout
  among all it knows, with micro-batches, shares, chunks of the loss and the blocks that are recomputed, of which none and all
  are two cases.
- of one device: what the search chooses on the smallest device alone is fixed, and then the layout is chosen.
- recipes: setups that people write by hand, as they stand beside the plan in its answer.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from benchmarks.common.record import GoalEntry, Row, failure, goal
from optimizer.api.inputs import read_model
from optimizer.api.needs import profile_for
from optimizer.api.plan import plan_profiled
from optimizer.base.errors import InvalidPlan, InvalidWorkload, NoFeasiblePlan
from optimizer.base.units import GIB
from optimizer.goal import Goal
from optimizer.hardware.joined import cards_of
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import ActivationsPins
from optimizer.plan.gradients import GradientsPins
from optimizer.plan.logits_and_loss import LogitsAndLossPins
from optimizer.plan.optimizer_state import OptimizerStatePins
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPins
from optimizer.profile.profile import Profile
from optimizer.search.check.card_fit import ACCEPTED
from optimizer.search.problem import PricedPlan
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.search.questions.layout_list import describe_layout
from optimizer.workload import Adapter, TrainingWorkload

_WORTH: Final = 1.10
_ROUNDING: Final = 1.006
"""Factor within which a plan is as fast as another: the search prefers fewer devices, and less shared out, to 0.5 %."""
_BATCH: Final = 24


@dataclass(frozen=True, kw_only=True)
class Devices:
    """A set of devices, as ``headroom plan --devices`` has it."""

    cards: str
    host_gib: int
    """Memory of each machine."""
    links: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model, and the length of its sequences."""

    model: str
    sequence_length: int
    adapter_rank: int | None = None

    @property
    def words(self) -> str:
        return f"{self.model}{' LoRA' * (self.adapter_rank is not None)}, {self.sequence_length}"

    @property
    def workload(self) -> TrainingWorkload:
        adapter = None if self.adapter_rank is None else Adapter(rank=self.adapter_rank)
        return TrainingWorkload(sequence_length=self.sequence_length, global_batch_size=_BATCH, adapter=adapter)


DEVICES: Final = (
    Devices(cards="2x RTX 4090", host_gib=64, links={}),
    Devices(cards="4x RTX 4090", host_gib=64, links={}),
    Devices(cards="2x RTX 3060", host_gib=16, links={}),
    Devices(cards="2x RTX 3060, RTX 4090", host_gib=32, links={}),
    Devices(cards="RTX 4090, 2x RTX 3060@office", host_gib=32, links={"office": "1Gbit,1ms"}),
)
WORKS: Final = (
    Work(model="qwen2.5-0.5b", sequence_length=8192),
    Work(model="llama-3.2-1b", sequence_length=2048),
    Work(model="llama-3-8b", sequence_length=4096, adapter_rank=16),
)
_LARGE: Final = (Devices(cards="4x RTX 4090", host_gib=256, links={}), Work(model="llama-3-8b", sequence_length=2048))
SCENARIOS: Final = (*product(DEVICES, WORKS), _LARGE)



@dataclass(frozen=True, kw_only=True)
class Scene:
    """The work and the devices that plans are compared on."""

    profile: Profile
    workload: TrainingWorkload
    goal: Goal
    machine: Machine


_FORMATS: Final = Pins(
    weights=WeightsPins(dtype="bf16", master="fp32", autocast="off", frozen="same"), optimizer_state=OptimizerStatePins(bits=32)
)
_HOMES: Final[Mapping[str, dict[str, Any]]] = {
    "resident": {"gradients": "keep", "state": "device", "weights": "device"},
    "state on host": {"gradients": "host", "state": "host", "weights": "device"},
    "all on host": {"gradients": "host", "state": "host", "weights": "host"},
    "state on disk": {"gradients": "host", "state": "disk", "weights": "host"},
}
_NO_OFFLOAD: Final = ("offload", "compress")


def compare_all(*, is_quick: bool) -> Iterator[Row]:
    """One row for each scenario."""
    for devices, work in SCENARIOS[:2] if is_quick else SCENARIOS:
        try:
            yield _compare(devices, work)
        except Exception as error:
            yield failure(f"{work.words} on {devices.cards}", error)


def _compare(devices: Devices, work: Work) -> Row:
    start_s = time.process_time()
    machine = cards_of(devices.cards, links=devices.links, host_memory_bytes=devices.host_gib * GIB)
    goal_ = Goal(
        device_budget_bytes=machine.most_memory_bytes,
        allow_lossy=True,
        most_loss="rounding",
        num_devices=machine.total_devices,
        pins=_FORMATS,
    )
    profile = profile_for(read_model(work.model), workload=work.workload, goal=replace(goal_, num_devices=1), folder=None)
    scene = Scene(profile=profile, workload=work.workload, goal=goal_, machine=machine)
    answer = _answer(scene, goal_)
    joint = None if answer is None else answer.result.chosen
    joint_s = time.process_time() - start_s
    policies = {home: _fixed(scene, home) for home in _HOMES}
    policies["of one device"] = _as_on_one(scene)
    recipes = {} if answer is None else _recipes_of(answer)
    return {
        "what": "joint",
        "work": work.words,
        "devices": devices.cards,
        "host_gib": devices.host_gib,
        "link": "; ".join(devices.links.values()),
        "joint_step_ms": None if joint is None else joint.prediction.step_ms,
        "joint_tokens_per_s": None if joint is None else joint.prediction.tokens_per_s,
        "joint_plan": _words(joint),
        **_against("policy", joint, policies),
        **_against("recipe", joint, recipes),
        "joint_cpu_s": joint_s,
        "cpu_s": time.process_time() - start_s,
        "policies": {name: _step_ms(found) for name, found in policies.items()},
        "recipes": {name: _step_ms(found) for name, found in recipes.items()},
    }


def _answer(scene: Scene, goal_: Goal) -> ObjectiveAnswer | None:
    """None where nothing fits."""
    with suppress(NoFeasiblePlan, InvalidPlan, InvalidWorkload):
        return plan_profiled(scene.profile, machine=scene.machine, workload=scene.workload, goal=goal_, with_ways_out=False)
    return None


def _plan(scene: Scene, goal_: Goal) -> PricedPlan | None:
    answer = _answer(scene, goal_)
    return None if answer is None else answer.result.chosen


def _recipes_of(answer: ObjectiveAnswer) -> dict[str, PricedPlan | None]:
    """By label; None for one that does not fit, or cannot be carried out."""
    found = {setup.label: answer.result.baselines.get(setup.label) for setup in answer.setups}
    return {label: each if each is not None and each.verdict in ACCEPTED else None for label, each in found.items()}


def _fixed(scene: Scene, home: str) -> PricedPlan | None:
    """The best plan of a policy."""
    places = _HOMES[home]
    pins = replace(
        scene.goal.pins,
        gradients=GradientsPins(choice=places["gradients"]),
        optimizer_state=replace(scene.goal.pins.optimizer_state, place=places["state"]),
        weights=replace(scene.goal.pins.weights, place=places["weights"]),
    )
    return _plan(scene, replace(scene.goal, pins=pins, forbid=_NO_OFFLOAD))


def _as_on_one(scene: Scene) -> PricedPlan | None:
    """The best plan with the policy that is best for a device's share of the batch on the smallest device alone."""
    smallest = min(scene.machine.kinds, key=lambda kind: kind.device.memory_bytes).device
    alone = scene.machine.among({smallest.name}).with_kind(smallest.name, num_devices=1)
    workload = replace(scene.workload, global_batch_size=_BATCH // scene.machine.total_devices)
    goal_ = replace(scene.goal, num_devices=1, device_budget_bytes=smallest.memory_bytes)
    found = _plan(replace(scene, machine=alone, workload=workload), goal_)
    return None if found is None else _plan(scene, replace(scene.goal, pins=_pins_of(found.plan)))


def _pins_of(plan: Plan) -> Pins:
    """Everything that saves memory but the size of micro-batches."""
    state = plan.optimizer_state
    return replace(
        _FORMATS,
        gradients=GradientsPins(choice=plan.gradients.choice),
        optimizer_state=OptimizerStatePins(bits=32, place=state.place, fraction=state.fraction),
        weights=replace(_FORMATS.weights, place=plan.weights.place),
        activations=ActivationsPins(per_block=plan.activations.per_block, compress=plan.activations.compress),
        logits_and_loss=LogitsAndLossPins(num_chunks=plan.logits_and_loss.num_chunks),
    )


def _against(kind: str, joint: PricedPlan | None, others: Mapping[str, PricedPlan | None]) -> Row:
    """The fastest of the others, and the times that the joint plan is faster."""
    fitting = {name: each for name, each in others.items() if each is not None}
    name = min(fitting, key=lambda name: fitting[name].prediction.step_ms, default=None)
    if name is None:
        return {f"best_{kind}": None, f"over_{kind}": None}
    ratio = None if joint is None else fitting[name].prediction.step_ms / joint.prediction.step_ms
    return {f"best_{kind}": f"{name}: {_words(fitting[name])}", f"over_{kind}": ratio}


def _step_ms(found: PricedPlan | None) -> float | None:
    return None if found is None else found.prediction.step_ms


def _words(found: PricedPlan | None) -> str:
    return "nothing fits" if found is None else f"{describe_layout(found.plan.layout)}, {found.label}"


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """The goals of every scenario in which a plan with a fixed policy fits, and the number of those in which none does."""
    found = [row for row in rows if row["what"] == "joint"]
    ratios = [row["over_policy"] for row in found if row["over_policy"] is not None]
    median = statistics.median(ratios) if ratios else None
    worth = [ratio for ratio in ratios if ratio >= _WORTH]
    alone = [row for row in found if row["over_policy"] is None and row["joint_step_ms"] is not None]
    below = [row["work"] + " on " + row["devices"] for row in found if _is_below(row)]
    return {
        "scenarios": goal(len(found), ">= 12", met=len(found) >= 12, needs="all cases"),
        "joint over the best fixed policy, median": goal(
            median, f">= {_WORTH}", met=median is not None and median >= _WORTH, needs="all cases"
        ),
        "scenarios in which it is 1.10 or more": goal(
            f"{len(worth)} of {len(ratios)}", "all", met=len(worth) == len(ratios), needs="all cases"
        ),
        "scenarios in which only the joint plan fits": goal(len(alone), "none: reported", met=True),
        "joint plans slower than another": goal(below, "none", met=not below),
    }


def _is_below(row: Row) -> bool:
    return any(row[f"over_{kind}"] is not None and row[f"over_{kind}"] < 1 / _ROUNDING for kind in ("policy", "recipe")) or (
        row["joint_step_ms"] is None and (row["best_policy"] or row["best_recipe"]) is not None
    )
