"""Names a probed machine, and the memory that a job may use of it."""

import gc
import platform
from pathlib import Path

import torch

from optimizer.hardware.machine import COMPILER_FACT, NO_COMPILER_FACT, Device
from optimizer.hardware.probe.compilers import compiler_in_words, missing_to_compile
from optimizer.runtime.layers.matmul_dispatch import has_quicker_library


def describe_device(device: torch.device, *, host_bytes: int, workspace_bytes: int) -> Device:
    """Describe a device. workspace_bytes: that the matrix libraries hold on the device."""
    if device.type == "cpu":
        return Device(kind="cpu", name=_processor_name(), memory_bytes=host_bytes // 2)
    # What is left is this process's context and the libraries' workspaces: neither is any plan's.
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return Device(
        kind="cuda",
        name=torch.cuda.get_device_properties(device).name,
        memory_bytes=free_bytes,
        index=device.index or 0,
        total_bytes=total_bytes,
        compute_capability=".".join(map(str, torch.cuda.get_device_capability(device))),
        context_bytes=max(0, total_bytes - free_bytes - torch.cuda.memory_reserved(device)),
        workspace_bytes=workspace_bytes,
        num_multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
    )


def has_library_for_bf16() -> bool:
    """True where torch leaves products in bf16 on the CPU to oneDNN, and the processor has instructions for them."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()  # type: ignore[no-untyped-call]


def list_facts(device: torch.device, *, workspace_bytes: int) -> dict[str, str]:
    facts = {
        "processor": _processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }
    if device.type == "cpu" and has_quicker_library():
        facts["large products in fp32"] = "oneDNN"
    if missing := missing_to_compile(device.type):
        facts[NO_COMPILER_FACT] = missing
    else:
        facts[COMPILER_FACT] = compiler_in_words(device.type)
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        facts |= {
            "cuda": str(torch.version.cuda),
            "driver": _driver_version(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "total_bytes": str(total_bytes),
            "context_bytes": str(total_bytes - free_bytes - torch.cuda.memory_reserved(device)),
            "workspace_bytes": str(workspace_bytes),
        }
    return facts


def _processor_name() -> str:
    names = _lines_after("/proc/cpuinfo", "model name")
    return names[0] if names else platform.processor() or platform.machine()


def _driver_version() -> str:
    versions = _lines_after("/proc/driver/nvidia/version", "NVRM version")
    return versions[0] if versions else "unknown"


def _lines_after(path: str, key: str) -> list[str]:
    """Values of ``key : value`` lines; none where the file is not there."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(key)]
