"""Plans on several devices that people write by hand, as far as frameworks offer them: all devices, equal shares, and what is
fastest of the micro-batches with which it fits.

ddp, zero1, zero2, fsdp: state shared out more and more (ZeRO-3 is FSDP). zero_offload: ZeRO-2 with gradients and state on the
host. fsdp_offload: ZeRO-2 with weights there too, the nearest here to what FSDP does when it offloads. 1f1b: an even cut. pooled:
two blocks at a time on each device in turn, all of them from the host. Each with no blocks recomputed, with all, and with as many
as have to be. *Not here*: shares by speed, and anything that differs from block to block but recompute.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Final

from optimizer.base.errors import InvalidPlan, InvalidWorkload
from optimizer.estimate.card.training_memory import add_memory
from optimizer.estimate.training import estimate_training
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import BlockChoice
from optimizer.plan.layout import DataParallel, DeviceLayout, RankShare
from optimizer.plan.logits_and_loss import MAX_CHUNKS
from optimizer.profile.profile import Profile
from optimizer.search.arrangements import PerBlock
from optimizer.search.check.card_fit import ACCEPTED
from optimizer.search.cutting import even_cut
from optimizer.search.problem import OuterPlan, PricedPlan, SearchProblem, divisors
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload

_DATA: Final[dict[str, DataParallel]] = {
    "ddp": "replicated",
    "zero1": "zero1",
    "zero2": "zero2",
    "fsdp": "zero3",
    "zero_offload": "zero2",
    "fsdp_offload": "zero2",
}
_CUTS: Final = ("1f1b", "pooled")
_ALL_ON_HOST: Final = ("fsdp_offload", "pooled")
_PARTS: Final = 8
"""Recomputed blocks are tried in eighths of a stage."""
_RECOMPUTES: Final = ("no", "full", "chosen")
_TOKENS_PER_CHUNK: Final = 1024
_BLOCKS_OF_POOL: Final = 2


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The work and the devices that plans are compared on."""

    profile: Profile
    workload: TrainingWorkload
    goal: Goal
    machine: Machine


def price_recipes(scene: Scene) -> Iterator[tuple[str, PricedPlan | None]]:
    """Yield each recipe by name with its fastest plan that fits; None where none does, or where it cannot be carried out."""
    for name, recompute in product((*_DATA, *_CUTS), _RECOMPUTES):
        found: PricedPlan | None = None
        with suppress(InvalidPlan, InvalidWorkload):
            found = _fastest(scene, name, recompute)
        yield f"{name}, {recompute} recompute", found


def _fastest(scene: Scene, name: str, recompute: str) -> PricedPlan | None:
    layout = _layout_of(scene, name)
    problem = _pose(scene, layout)
    tried = chain.from_iterable(_fitting(scene, problem, each, recompute) for each in _list_settings(problem, layout, name))
    for priced in sorted(tried, key=lambda each: each.prediction.step_ms):
        whole = _in_detail(scene, problem, priced)
        if whole.verdict in ACCEPTED:
            return whole
    return None


def _layout_of(scene: Scene, name: str) -> DeviceLayout:
    """Raises InvalidPlan where the model has too few blocks."""
    machine, depth = scene.machine, scene.profile.num_blocks
    number = machine.total_devices
    ranks: tuple[RankShare, ...] = ()
    if machine.others:
        ranks = tuple(RankShare(device=kind.device.name) for kind in machine.kinds for _ in range(kind.num_devices))
    if name in _DATA:
        return DeviceLayout(num_devices=number, data=_DATA[name], ranks=ranks)
    rounds = depth // (number * _BLOCKS_OF_POOL) if name == "pooled" else 1
    return DeviceLayout(
        num_devices=number,
        stage_blocks=even_cut(depth, number * max(1, rounds)),
        schedule="1f1b" if name == "1f1b" else "breadth_first",
        ranks=ranks,
    )


def _pose(scene: Scene, layout: DeviceLayout) -> SearchProblem:
    """The problem on the devices; where unequal ones have the whole model each, that of the smallest, which decides what fits."""
    machine = scene.machine
    if layout.ranks and not layout.is_cut:
        smallest = min(machine.kinds, key=lambda kind: kind.device.memory_bytes)
        machine = machine.with_kind(smallest.device.name, num_devices=layout.num_devices)
        layout = layout.without_ranks
    return training_problem(scene.profile, workload=scene.workload, goal=scene.goal, machine=machine, layout=layout)


def _list_settings(problem: SearchProblem, layout: DeviceLayout, name: str) -> Iterator[OuterPlan]:
    """Every micro-batch, with all logits at once and in chunks of them."""
    total, tokens = problem.workload.global_batch_size, problem.workload.sequence_length
    is_away = name in (*_ALL_ON_HOST, "zero_offload")
    for size in divisors(total):
        for num_chunks in sorted({1, min(MAX_CHUNKS, -(-size * tokens // _TOKENS_PER_CHUNK))}):
            yield OuterPlan(
                micro_batch_size=size,
                accumulation_steps=total // size,
                dtype="bf16",
                num_chunks=num_chunks,
                gradients="host" if is_away else "keep",
                state_place="host" if is_away else "device",
                weights_place="host" if name in _ALL_ON_HOST else "device",
                layout=layout,
            )


def _fitting(scene: Scene, problem: SearchProblem, setting: OuterPlan, recompute: str) -> Iterator[PricedPlan]:
    """The setting whose tensors have room, with as few blocks recomputed as the recipe allows."""
    numbers = {"no": (0,), "full": (_PARTS,), "chosen": tuple(range(_PARTS + 1))}[recompute]
    for number in numbers:
        try:
            plan = setting.plan(recomputing(setting.layout, problem.num_blocks, number))
            found = estimate_training(scene.profile, plan=plan, workload=scene.workload, machine=scene.machine)
        except InvalidPlan:
            return
        if problem.fits_device(found) and problem.fits_elsewhere(found):
            yield PricedPlan(label=recompute, plan=plan, prediction=found, verdict=problem.verdict(found))
            return


def recomputing(layout: DeviceLayout, depth: int, eighths: int) -> PerBlock:
    """The first eighths of the blocks of every stage, rounded up, are recomputed."""
    found: list[BlockChoice] = []
    for size in layout.stage_blocks or (depth,):
        number = -(-size * eighths // _PARTS)
        found += ["recompute" if index < number else "keep" for index in range(size)]
    return tuple(found)


def _in_detail(scene: Scene, problem: SearchProblem, priced: PricedPlan) -> PricedPlan:
    """The plan with all that its processes take."""
    found = add_memory(
        priced.prediction, scene.profile, plan=priced.plan, workload=scene.workload, machine=scene.machine
    )
    return replace(priced, prediction=found, verdict=problem.verdict(found))
