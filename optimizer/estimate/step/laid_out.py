"""A training plan as tasks in order: what is simulated, and what is replayed allocation by allocation. Torch-free."""

from dataclasses import dataclass

from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.step.runs import Schedule
from optimizer.estimate.step.setting import PreparedStep, find_setting
from optimizer.estimate.step.simulate import Resident
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """A plan as tasks in order, with what is there all the while."""

    schedule: Schedule
    resident: Resident
    setting: PreparedStep

    @property
    def tensors(self) -> TensorList:
        return self.setting.tensors


def lay_out(profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine) -> LaidOut:
    """Raises as ``estimate_training`` does."""
    plan.check(
        num_blocks=profile.num_blocks,
        workload=workload,
        has_sparse_gradients=profile.has_sparse_gradients,
        has_plain_head=profile.has_plain_head,
        clamps_fp16=profile.clamps_fp16,
    )
    setting = find_setting(profile, plan=plan, workload=workload, machine=machine)
    return LaidOut(
        schedule=setting.layout.schedule(plan.activations.per_block),
        resident=setting.resident(plan),
        setting=setting,
    )
