"""Predicted bytes held to measured ones."""

from optimizer.estimate.training import estimate_training


def check_bytes(profile, plan, workload, measured, *, machine):
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    assert predicted.device_bytes_by_category == measured.device_bytes_by_category
    assert predicted.device_peak_bytes == measured.device_peak_bytes
    assert predicted.host_peak_bytes == measured.host_peak_bytes
    assert predicted.disk_peak_bytes == measured.disk_peak_bytes
    assert predicted.copied_bytes == measured.copied_bytes
