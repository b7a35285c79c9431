"""The bytes predicted at each named moment of a step, to hold beside what a run noted as it came to them. Torch-free."""

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.job.shortfalls import Moments
from optimizer.estimate.step.setting import lay_out
from optimizer.estimate.training import simulate_step
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload


def predict_moments(profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine) -> Moments:
    """A steady step's moments; where a moment comes more than once, as with several micro-batches, its highest."""
    simulation = simulate_step(lay_out(profile, plan=plan, workload=workload, machine=machine))
    found: Moments = {}
    for row in simulation.rows:
        for task, level in zip(row.tasks, row.levels.tolist(), strict=True):
            name = task.describe(profile.num_blocks)
            if sum(level) > sum(found.get(name, {}).values()):
                found[name] = dict(zip(CATEGORIES, level, strict=True))
    return found
