"""The load before the first pass of a generation, as a stage with its peaks: the walk over a model's tensors that
``job/load.py`` is for training, each as ``categories/reading.py`` has it. Torch-free.

Of weights that stream what belongs to no block comes first, then the blocks, whose homes are made as they come. Of copies of the
model that stream from one home it is the load of the first, which fills it. *Not modelled*: the load of one stage of a model that
is cut over devices.
"""

from functools import lru_cache

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.categories.reading import Level, Reading, TierPeaks, file_dtype
from optimizer.estimate.prediction import StagePeak
from optimizer.formats.ownership import part_of_bytes
from optimizer.hardware.machine import Machine
from optimizer.plan.generation import GenerationPlan
from optimizer.profile.generation import GenerationProfile, WeightBytes
from optimizer.profile.trained import BaseSizes

_MAX_FORMS = 256


def estimate_generation_load(profile: GenerationProfile, *, plan: GenerationPlan, machine: Machine) -> StagePeak | None:
    """None where a profile does not know the tensors one by one, and of a model that is cut. Raises InvalidPlan for a
    representation that was not profiled.

    It depends on the plan's weights alone, so plans that differ elsewhere share it.
    """
    held = profile.weight_bytes(plan.weights.representation)
    if profile.base is None or plan.layout.is_cut:
        return None
    num_ranks = plan.layout.num_replicas
    reading = Reading(
        weights=plan.weights.without_prefetch,
        file_dtype=file_dtype(profile.weights_dtype),
        packs=plan.weights.frozen != "same",
        on_cuda=machine.device.kind == "cuda",
        has_homes=num_ranks > 1 and plan.weights.place == "host",
    )
    peaks = _walk(profile.base, profile.block_kinds, held, reading, num_ranks)
    if peaks is None:
        return None
    return StagePeak(
        stage="load",
        device_peak_bytes=peaks.device_bytes,
        device_bytes_by_category={name: peaks.device_bytes if name == "weights" else 0 for name in CATEGORIES},
        moment="load",
        host_peak_bytes=peaks.host_bytes,
        disk_peak_bytes=peaks.disk_bytes,
        together_peak_bytes=peaks.together_bytes,
    )


@lru_cache(maxsize=_MAX_FORMS)
def _walk(
    base: BaseSizes, kinds: tuple[int, ...], held: WeightBytes, reading: Reading, num_ranks: int
) -> TierPeaks | None:
    """None where the single tensors do not sum up to what a pass counts."""
    by_kind = tuple(sum(map(reading.stay_bytes, sizes)) for sizes in base.by_block)
    outside = (*base.before, *base.after)
    buffer_bytes = held.outside - sum(map(reading.stay_bytes, outside))
    if by_kind != held.by_block or buffer_bytes < 0:
        return None
    level = Level(device=buffer_bytes + sum(held.staying_by_block[kind] for kind in kinds))
    place, streamed_bytes = reading.weights.place, sum(by_kind[kind] for kind in kinds)
    if place == "device":
        for _, size in base.in_order(kinds):
            reading.read(level, size, "to the device")
        return level.peaks(disk_bytes=0)
    for size in outside:
        reading.read(level, size, "to the device")
    if reading.has_homes:
        # All at once, counted in equal parts by those that share them.
        level.host += part_of_bytes(streamed_bytes, rank=0, num_ranks=num_ranks)
        level.reach()
    for kind in kinds:
        for size in base.by_block[kind]:
            reading.read(level, size, "to the host")
    return level.peaks(disk_bytes=streamed_bytes if place == "disk" else 0)
