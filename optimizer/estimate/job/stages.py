"""Every stage of a training job in order, each with its peak on device, host and disk. Torch-free.

load, resume, the first step, a steady one, evaluation, saving a checkpoint, merging adapters, exporting. Worked out for
plans that are shown, not for each that a search tries. Disk counts the scratch file and the job's own files: checkpoints
that are kept, and what is exported.

*Not modelled*: random weights that are drawn rather than read, which are whole on the host for a moment where they are
packed or streamed; exports of single checkpoints, which are jobs of their own.
"""

from dataclasses import replace

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.categories.tensors import list_tensors
from optimizer.estimate.job.files import estimate_export, estimate_save, kept_checkpoint_bytes
from optimizer.estimate.job.load import estimate_load
from optimizer.estimate.prediction import Prediction, Stage, StagePeak
from optimizer.estimate.step.setting import LaidOut
from optimizer.estimate.step.simulate import Resident
from optimizer.estimate.tasks.parts import Bytes
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload


def list_stages(
    prediction: Prediction, profile: Profile, laid: LaidOut, *, plan: Plan, workload: TrainingWorkload, machine: Machine
) -> tuple[StagePeak, ...]:
    """laid: the plan's steps."""
    resident, tensors, profile = laid.resident, laid.tensors.whole, profile.of_layout(plan.layout)
    kept_bytes = kept_checkpoint_bytes(tensors, plan=plan, workload=workload, num_steps=workload.num_steps)
    kept_before_bytes = kept_checkpoint_bytes(tensors, plan=plan, workload=workload, num_steps=workload.num_steps - 1)
    stages: list[StagePeak] = []
    if workload.mode == "finetune":
        # Copies through a store take their staging area with the first of them.
        loaded = Resident(
            device=laid.setting.stages.loaded(resident), host=laid.setting.always.host, disk=laid.setting.always.disk
        )
        load = estimate_load(profile, plan=plan, workload=workload, machine=machine, loaded=loaded, rank=laid.rank)
        if load is not None:
            peak = _between("load", loaded, device_bytes=load.device_bytes)
            stages.append(replace(peak, host_peak_bytes=load.host_bytes, together_peak_bytes=load.together_bytes))
    stages.append(_between("resume", resident))
    for step in prediction.peaks:
        host_bytes = resident.host if step.stage == "evaluation" else prediction.host_peak_bytes
        scratch_bytes = resident.disk if step.stage == "evaluation" else prediction.disk_peak_bytes
        file_bytes = {"first_step": 0, "steady_step": kept_before_bytes}.get(step.stage, kept_bytes)
        stages.append(
            replace(
                step,
                host_peak_bytes=host_bytes,
                disk_peak_bytes=scratch_bytes + file_bytes,
                file_bytes=file_bytes,
                together_peak_bytes=step.device_peak_bytes + host_bytes,
            )
        )
    save = estimate_save(tensors, plan=plan, workload=workload)
    stages.append(_between("save", resident, host_bytes=save.host_bytes, file_bytes=save.disk_bytes))
    exports = estimate_export(profile, tensors, plan=plan, workload=workload, machine=machine)
    for name, held in exports.items():
        stage: Stage = "merge" if name == "merge" else "export"
        stages.append(_between(stage, resident, host_bytes=held.host_bytes, file_bytes=held.disk_bytes + kept_bytes))
    return tuple(stages)


def most_file_bytes(profile: Profile, plan: Plan, *, workload: TrainingWorkload, machine: Machine) -> int:
    """Most bytes in a job's own files, whatever its blocks do and wherever its parts are."""
    tensors = list_tensors(profile).whole
    kept_bytes = kept_checkpoint_bytes(tensors, plan=plan, workload=workload, num_steps=workload.num_steps)
    exports = estimate_export(profile, tensors, plan=plan, workload=workload, machine=machine)
    save = estimate_save(tensors, plan=plan, workload=workload)
    return max(save.disk_bytes, kept_bytes + max((held.disk_bytes for held in exports.values()), default=0))


def _between(
    stage: Stage, resident: Resident, *, device_bytes: int | None = None, host_bytes: int = 0, file_bytes: int = 0
) -> StagePeak:
    """A stage between steps: what is there all the while, and what it adds."""
    on_device = int(resident.device.sum())
    return StagePeak(
        stage=stage,
        device_peak_bytes=on_device if device_bytes is None else device_bytes,
        device_bytes_by_category=_by_category(resident.device, device_bytes),
        moment=stage,
        host_peak_bytes=resident.host + host_bytes,
        disk_peak_bytes=resident.disk + file_bytes,
        file_bytes=file_bytes,
        together_peak_bytes=on_device + resident.host + host_bytes,
    )


def _by_category(row: Bytes, total_bytes: int | None) -> dict[str, int]:
    """Bytes above those that stay are on their way there."""
    found = dict(zip(CATEGORIES, row.tolist(), strict=True))
    if total_bytes is not None:
        found["weights"] += total_bytes - int(row.sum())
    return found
