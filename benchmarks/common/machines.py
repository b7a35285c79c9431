"""A CPU machine for questions of bytes, which do not depend on its rates."""

from optimizer.hardware.machine import Device, Machine
from optimizer.hardware.rates import Rates


def make_cpu_machine() -> Machine:
    rates = Rates(
        matmul_flops_per_s={"fp32": 5e10, "bf16": 5e10},
        attention_flops_per_s={"fp32": 3e10, "bf16": 3e10},
        memory_bytes_per_s=8e9,
        op_overhead_s=5e-6,
        device_to_host_bytes_per_s=5e9,
        host_to_device_bytes_per_s=5e9,
        optimizer_elements_per_s={"adamw_32": 3e8, "adamw_8": 2e8},
        source="measured",
    )
    device = Device(kind="cpu", name="test", memory_bytes=2**34)
    return Machine(name="test", device=device, host_memory_bytes=2**34, rates=rates)
