"""What the inputs cost: ids and labels, both int64, and the mask of padded sequences."""

from optimizer.hardware.machine import Device
from optimizer.plan.batch import BatchPlan

_ID_BYTES = 8


def estimate_input_bytes(plan: BatchPlan, *, sequence_length: int, is_padded: bool = False) -> int:
    """Of one micro-batch. is_padded: with an attention mask, as wide as ids."""
    return (3 if is_padded else 2) * _ID_BYTES * plan.micro_batch_size * sequence_length


def inputs_pile_up(device: Device) -> bool:
    """On the CPU device a step's batches are on the device already, and each is counted from its first use to the step's end."""
    return device.kind == "cpu"
