"""Bytes of the inputs: ids and labels, both int64, and the mask of padded sequences."""

from optimizer.hardware.machine import Device
from optimizer.plan.batch import BatchPlan
from optimizer.profile.profile import Profile

ID_BYTES = 8
"""Bytes of one token's id, and of one label."""


def estimate_input_bytes(profile: Profile, plan: BatchPlan, *, sequence_length: int) -> int:
    """Bytes of one micro-batch; padded ones have an attention mask, as wide as ids."""
    if profile.input_bytes is not None:
        return plan.micro_batch_size * profile.input_bytes
    return profile.num_inputs * ID_BYTES * plan.micro_batch_size * sequence_length


def inputs_pile_up(device: Device) -> bool:
    """True on the CPU device, where a step's batches are on the device already, and each is counted from its first use
    to the step's end.
    """
    return device.kind == "cpu"
