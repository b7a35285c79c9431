"""Predicted bytes held to measured ones."""

from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.runtime.job.measure import StepMeasurement
from optimizer.workload import TrainingWorkload


def check_bytes(
    profile: Profile, plan: Plan, workload: TrainingWorkload, measured: StepMeasurement, *, machine: Machine
) -> None:
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    assert predicted.device_bytes_by_category == measured.device_bytes_by_category
    assert predicted.device_peak_bytes == measured.device_peak_bytes
    assert predicted.host_peak_bytes == measured.host_peak_bytes
    assert predicted.disk_peak_bytes == measured.disk_peak_bytes
    assert predicted.copied_bytes == measured.copied_bytes
