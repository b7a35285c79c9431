"""Memory that a training plan takes of a card and a host, from its single allocations. Torch-free.

A replay costs up to a tenth of a second for deep models, so it is made for plans that are shown, not for each one that
a search tries.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from optimizer.estimate.card.allocations import Allocations, list_allocations
from optimizer.estimate.card.depth import Cut, cut_short
from optimizer.estimate.card.host_memory import estimate_host_memory
from optimizer.estimate.card.on_cuda import CudaMoves
from optimizer.estimate.card.process import CardLayout, Replayed, allocator_settings, card_memory, replay_layouts
from optimizer.estimate.job.stages import list_stages
from optimizer.estimate.kernels.kernel_scratch import find_kernels
from optimizer.estimate.prediction import Prediction, Stage
from optimizer.estimate.step.ranks import list_machines
from optimizer.estimate.step.setting import LaidOut, lay_out, lay_out_ranks, lay_out_stages
from optimizer.estimate.training import estimate_training, predict_stages
from optimizer.estimate.uneven import list_cases
from optimizer.hardware.cuda_facts import read_card
from optimizer.hardware.machine import Machine
from optimizer.plan.devices.layout import RankShare
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload


def add_memory(
    prediction: Prediction, profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine
) -> Prediction:
    """The prediction of this plan with ``memory`` and ``stages`` filled in, of ranks that differ also those of each."""
    if plan.layout.ranks and plan.layout.is_cut:
        return _add_stages_memory(prediction, profile, plan=plan, workload=workload, machine=machine)
    if plan.layout.ranks:
        return _add_ranks_memory(prediction, profile, plan=plan, workload=workload, machine=machine)
    replayed = _replay_plan(
        profile,
        plan=plan,
        workload=workload,
        machine=machine,
        peak_in=prediction.peak_moment.partition(" of block ")[0],
    )
    here: dict[str, Any] = {"plan": plan, "workload": workload, "machine": machine}
    fullest, *others = lay_out_ranks(profile, **here) if plan.layout.is_cut else (lay_out(profile, **here),)
    found = [_add_rank_memory(prediction, profile, laid, replayed, **here) for laid in (fullest, *others)]
    return found[0] if not others else _with_most_on_host(found[0], found)


def _add_rank_memory(
    prediction: Prediction,
    profile: Profile,
    laid: LaidOut,
    replayed: Replayed,
    *,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
) -> Prediction:
    """The prediction of one rank's step. replayed: its allocations."""
    host = estimate_host_memory(
        prediction, resident=laid.resident, tensors=laid.updated, plan=plan, workload=workload, machine=machine
    )
    memory = card_memory(prediction, replayed, host=host, device=machine.device, torch_version=profile.torch_version)
    stages = list_stages(prediction, profile, laid, plan=plan, workload=workload, machine=machine)
    return replace(prediction, memory=memory, stages=stages)


def _add_ranks_memory(
    prediction: Prediction, profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine
) -> Prediction:
    """Ranks that do the same have the same memory."""
    known: dict[RankShare, Prediction] = {}
    found = []
    for case in list_cases(plan, workload, machine):
        share = plan.layout.share_of(case.rank)
        if share not in known:
            alike = estimate_training(profile, plan=case.plan, workload=case.workload, machine=case.machine)
            known[share] = add_memory(
                alike, profile, plan=case.plan, workload=case.workload, machine=case.machine
            )
        found.append(known[share])
    return _with_ranks_memory(prediction, found)


def _add_stages_memory(
    prediction: Prediction, profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine
) -> Prediction:
    """Replay each stage on its own device."""
    found = []
    stages = lay_out_stages(profile, plan=plan, workload=workload, machine=machine)
    predicted = predict_stages(profile, plan=plan, workload=workload, machine=machine)
    for laid, each, here in zip(stages, predicted, list_machines(machine, plan.layout), strict=True):
        listed = partial(_list_allocations, laid, plan, machine=here, torch_version=profile.torch_version)
        replayed = replay_layouts(
            CardLayout(kept=tuple(range(profile.num_blocks)), list=listed),
            cuts=None,
            settings=allocator_settings(plan.allocator, here.device),
            peak_in=each.peak_moment.partition(" of block ")[0],
        )
        found.append(_add_rank_memory(each, profile, laid, replayed, plan=plan, workload=workload, machine=here))
    return _with_most_on_host(_with_ranks_memory(prediction, found), found)


def _with_ranks_memory(prediction: Prediction, found: Sequence[Prediction]) -> Prediction:
    ranks = tuple(replace(rank, memory=each.memory) for rank, each in zip(prediction.ranks, found, strict=True))
    fullest = found[prediction.fullest_rank or 0]
    return prediction.changed(ranks=ranks, memory=fullest.memory, stages=fullest.stages)


def _with_most_on_host(prediction: Prediction, found: Sequence[Prediction]) -> Prediction:
    """The prediction with the host's bytes of whichever rank has most there, in the whole and in each stage of the job."""
    most: dict[Stage, int] = {}
    for each in found:
        for peak in each.stages:
            most[peak.stage] = max(peak.host_peak_bytes, most.get(peak.stage, 0))
    stages = tuple(replace(peak, host_peak_bytes=most[peak.stage]) for peak in prediction.stages)
    memory = prediction.memory
    hosts = [each.memory for each in found if each.memory is not None]
    if memory is not None and hosts:
        host = max(hosts, key=lambda each: each.host_pinned.value + each.host_pageable.value)
        memory = replace(memory, host_pinned=host.host_pinned, host_pageable=host.host_pageable)
    return prediction.changed(memory=memory, stages=stages)


def list_training_allocations(
    profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine
) -> Allocations:
    """Single allocations of a plan in order: loading and two steps. Raises what ``estimate_training`` raises."""
    laid = lay_out(profile, plan=plan, workload=workload, machine=machine)
    return _list_allocations(laid, plan, machine=machine, torch_version=profile.torch_version)


def _list_allocations(laid: LaidOut, plan: Plan, *, machine: Machine, torch_version: str) -> Allocations:
    on_cuda = None
    if machine.device.kind == "cuda":
        on_cuda = _cuda_moves(laid, plan, laid.workload, machine=machine, torch_version=torch_version)
    return list_allocations(
        laid.schedule,
        resident=laid.resident,
        tensors=laid.updated,
        plan=plan,
        kept=laid.workload.kept_state,
        on_cuda=on_cuda,
    )


def _cuda_moves(
    laid: LaidOut, plan: Plan, workload: TrainingWorkload, *, machine: Machine, torch_version: str
) -> CudaMoves:
    # Consumed gradients are gone before all norms could be taken at once.
    takes_norms = plan.gradients.choice != "consume"
    return CudaMoves(
        find_kernels(read_card(machine.device, torch_version=torch_version)),
        num_tokens=workload.tokens_per_step // plan.batch.accumulation_steps,
        norm_elements=[tensor.num_elements for tensor in laid.updated.sizes] if takes_norms else (),
    )


def _replay_plan(
    profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine, peak_in: str
) -> Replayed:
    """Replay one plan. peak_in: the part of the step in which the whole model's peak is."""

    def layout_of(cut: Cut) -> CardLayout:
        return CardLayout(
            kept=cut.kept,
            list=lambda: list_training_allocations(cut.profile, plan=cut.plan, workload=workload, machine=machine),
        )

    # Shorter models of as many stages would be cut elsewhere.
    cuts = None if plan.layout.is_cut else cut_short(profile, plan)
    return replay_layouts(
        layout_of(Cut(profile=profile, plan=plan, kept=tuple(range(profile.num_blocks)))),
        cuts=None if cuts is None else (layout_of(cuts[0]), layout_of(cuts[1])),
        settings=allocator_settings(plan.allocator, machine.device),
        peak_in=peak_in,
    )
