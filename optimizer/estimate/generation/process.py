"""From a generation's tensors to what a card and a host really have to hold, as ``process.py`` has it of training. Torch-free.

Two passes are replayed: the prefill, and the decode of a few tokens, from the first to the last. Weights of the blocks are there
one by one, as they are loaded; what belongs to no block as its matrices of vocabulary by width, and the rest as one.

*Not modelled*: the decode of the tokens between those; each makes tensors a little larger than the one before, where the model
makes any that grow with the cache.
"""

from dataclasses import replace

from optimizer.base.intervals import ByteInterval, exact_interval
from optimizer.estimate.card.allocations import Allocations, list_pass_allocations
from optimizer.estimate.card.depth import keep_blocks, list_alike
from optimizer.estimate.card.host_memory import PAGE_BYTES
from optimizer.estimate.card.on_cuda import CudaMoves
from optimizer.estimate.card.process import CardLayout, Replayed, allocator_settings, card_memory, replay_layouts
from optimizer.estimate.generation.cut import StageCosts, list_stage_costs
from optimizer.estimate.generation.one_pass import GenerationPass
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.kernels.kernel_scratch import find_kernels
from optimizer.estimate.prediction import HostMemory
from optimizer.hardware.cuda_facts import read_card
from optimizer.hardware.machine import Machine
from optimizer.hardware.share import share_of
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.passes.arrange import passes_of
from optimizer.profile.generation import GenerationProfile, Phase
from optimizer.workload import GenerationWorkload

_MAX_DECODED = 5
"""Tokens whose decode is replayed in a pass."""


def add_generation_memory(
    prediction: GenerationPrediction,
    profile: GenerationProfile,
    *,
    plan: GenerationPlan,
    workload: GenerationWorkload,
    machine: Machine,
) -> GenerationPrediction:
    """The prediction of this plan with ``memory`` filled in; for plans that are shown, not for each that a search tries."""
    peak_in = prediction.peak_moment.partition(" of block ")[0]
    machine = share_of(machine, num_ranks=plan.layout.num_devices)
    stage = _fullest_stage(prediction, profile, plan)
    if stage is not None:
        profile = stage.profile
    replayed = _replay(profile, plan=plan, workload=workload, machine=machine, peak_in=peak_in, stage=stage)
    host = _host_memory(prediction, profile, plan=plan, machine=machine)
    memory = card_memory(prediction, replayed, host=host, device=machine.device, torch_version=profile.torch_version)
    return replace(prediction, memory=memory)


def _fullest_stage(
    prediction: GenerationPrediction, profile: GenerationProfile, plan: GenerationPlan
) -> StageCosts | None:
    if not prediction.stages:
        return None
    peaks = [stage.device_peak_bytes for stage in prediction.stages]
    return list_stage_costs(profile, plan.layout)[peaks.index(max(peaks))]


def list_generation_allocations(
    profile: GenerationProfile,
    *,
    plan: GenerationPlan,
    workload: GenerationWorkload,
    machine: Machine,
    stage: StageCosts | None = None,
) -> Allocations:
    """Loading and two passes of the kind that keeps most, as single allocations in order. stage: of a model that is cut; the
    profile is then of its blocks.
    """
    passes = passes_of(plan, workload)
    widest = max((shape for shape, _ in passes), key=lambda shape: sum(each.batch_size * each.cache_length for each in shape))
    full = GenerationPass(profile, plan, workload, machine, micro_batches=widest, stage=stage)
    rows = [full.prefill_tasks, full.later_tasks, *(full.decode_tasks(step) for step in _decoded_steps(full.num_steps))]
    on_cuda = None
    if machine.device.kind == "cuda":
        kernels = find_kernels(read_card(machine.device, torch_version=profile.torch_version))
        on_cuda = CudaMoves(kernels, num_tokens=widest[0].batch_size * widest[0].prompt_length)
    return list_pass_allocations(rows, loaded=_loaded(profile, plan, stage), on_cuda=on_cuda)


def _replay(
    profile: GenerationProfile,
    *,
    plan: GenerationPlan,
    workload: GenerationWorkload,
    machine: Machine,
    peak_in: str,
    stage: StageCosts | None,
) -> Replayed:
    def laid(kept: tuple[int, ...]) -> CardLayout:
        part = profile.with_blocks(kept)
        return CardLayout(
            kept=kept,
            list=lambda: list_generation_allocations(part, plan=plan, workload=workload, machine=machine, stage=stage),
        )

    cuts = keep_blocks(list_alike(_kinds(profile)), num_blocks=profile.num_blocks)
    return replay_layouts(
        laid(tuple(range(profile.num_blocks))),
        cuts=None if cuts is None else (laid(cuts[0]), laid(cuts[1])),
        settings=allocator_settings(plan.allocator, machine.device),
        peak_in=peak_in,
    )


def _kinds(profile: GenerationProfile) -> list[object]:
    """A mark of each block that sets it apart from others."""
    regimes = [
        regime for phase in _list_phases(profile) for found in phase.regimes.values() for regime in found
    ]
    return [
        (kind, tuple(regime.block_templates[block] for regime in regimes))
        for block, kind in enumerate(profile.block_kinds)
    ]


def _list_phases(profile: GenerationProfile) -> list[Phase]:
    return [profile.prefill, profile.decode, *([profile.on_host.decode] if profile.on_host is not None else [])]


def _decoded_steps(num_steps: int) -> list[int]:
    """Evenly from the first decoded token to the last."""
    low, high = 1, num_steps - 1
    count = min(_MAX_DECODED, high - low + 1)
    if count < 2:
        return [high] * count
    return [low + (high - low) * index // (count - 1) for index in range(count)]


def _loaded(profile: GenerationProfile, plan: GenerationPlan, stage: StageCosts | None) -> list[int]:
    """Weights that are always on the device, tensor by tensor as far as a profile knows them; they sum to what a pass counts."""
    held = profile.weight_bytes(plan.weights.representation)
    matrix_bytes = profile.vocab_size * profile.hidden_size * plan.weights.bytes_per_element
    outside = held.outside - (0 if stage is None else stage.left_out_bytes(held))
    num_matrices = outside // matrix_bytes
    sizes = [matrix_bytes] * num_matrices + [outside - num_matrices * matrix_bytes]
    for kind in profile.block_kinds:
        sizes += [held.staying_by_block[kind], *(held.tensors[kind] if plan.weights.place == "device" else ())]
    return [num_bytes for num_bytes in sizes if num_bytes]


def _host_memory(
    prediction: GenerationPrediction, profile: GenerationProfile, *, plan: GenerationPlan, machine: Machine
) -> HostMemory:
    """Memory of the host: what streams is pinned where it lies, in whole pages; the staging of disk reads as it is."""
    total_bytes = prediction.host_peak_bytes
    if machine.device.kind == "cpu":
        return HostMemory(exact_interval(0), exact_interval(total_bytes))
    held = profile.weight_bytes(plan.weights.representation)
    num_buffers = sum(len(held.tensors[kind]) for kind in profile.block_kinds) if plan.weights.place == "host" else 0
    num_buffers += profile.num_blocks + 1 if plan.kv_cache.place == "host" else 0
    pinned = ByteInterval(low=total_bytes, value=total_bytes, high=total_bytes + num_buffers * PAGE_BYTES)
    return HostMemory(pinned, exact_interval(0))
