"""Measures the machine at hand in a few seconds: the rates that the estimator multiplies.

Each rate is a median over repeats of what training does: matrix products in their forward and both backward forms,
fused attention forward and backward, element-wise kernels that allocate their result, a chain of tiny ops under
autograd, copies as the offloader makes them, AdamW as the optimizer runs it, on the device and on the host, and the stores'
own reads and writes: of the disk to the disk and from it, past the page cache, which what does not fit in memory cannot count
on; of the remote store where one is configured. On CUDA under the settings of a run (deterministic, no TF32), timed by events.
Neither threads nor random state of the process are changed. Needs torch; the result does not.

*Not modelled*: clocks that sink after minutes of load, other tenants of the link, a page cache that takes what the disk would.
Finished runs correct them (``calibration.py``).
"""

import gc
import importlib.util
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from optimizer.errors import DiskFull, HeadroomError, InvalidInput
from optimizer.hardware.machine import Device, Machine, Rates
from optimizer.hardware.memory import available_memory_bytes
from optimizer.packing import SLAB_BYTES
from optimizer.runtime.device import has_bf16, prepared_device, reserve_workspaces
from optimizer.runtime.store_disk import DiskStore
from optimizer.runtime.store_remote import RemoteStore, remote_url
from optimizer.runtime.stores import Store
from optimizer.units import MIB

MAX_PROBE_S = 8.0
"""Time for all measurements together; shares below. Start-up of kernels comes on top."""
MAX_REPEATS = 15

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MATMUL_SHAPES = {
    "cpu": ((256, 384, 384), (512, 384, 1536), (1024, 768, 768), (512, 384, 8192)),
    "cuda": ((2048, 2048, 2048), (4096, 4096, 4096), (4096, 1024, 4096), (2048, 2048, 32768)),
}
"""Tokens, inputs, outputs; small ones first, so that a slow type is cut off early."""
_ATTENTION_SHAPES = {"cpu": ((2, 6, 256, 64), (1, 8, 512, 64)), "cuda": ((8, 16, 1024, 64), (4, 16, 2048, 64))}
"""Batch, heads, sequence, head size."""
_ATTENTION_MATMULS = 7
"""Two in forward, five in backward, as torch's own counter has it; the causal half is counted as if it were done."""
_ELEMENTWISE_SHAPE = {"cpu": (2048, 1024), "cuda": (8192, 4096)}
_COPY_BYTES = {"cpu": 16 * MIB, "cuda": 256 * MIB}
_OPTIMIZER_ELEMENTS = {"cpu": 4 * 1024 * 1024, "cuda": 64 * 1024 * 1024}
_NUM_TINY_OPS = 200
_STORED_BYTES = 4 * SLAB_BYTES
_REMOTE_TIMEOUT_S = 2.0
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """What a store does; nothing where there is none."""

    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    free_bytes: int = 0
    fault: str = ""
    """Why a store that should be there is not."""


def probe_machine(
    *, name: str | None = None, device: str | None = None, max_s: float = MAX_PROBE_S, scratch: Path | None = None
) -> Machine:
    """Measure this machine with one device.

    name: how the machine is listed; its host name unless given.
    device: ``cpu``, ``cuda`` or ``cuda:1``; CUDA where there is one unless given. InvalidInput where it is not there.
    max_s: how long to measure; less makes the medians rougher, never the shapes smaller than the first of each list.
    scratch: folder whose disk is the disk tier; the system's temporary folder unless given. The remote tier is the store that
    HEADROOM_REMOTE_URL names; one that does not answer is noted among the facts, and there is no remote tier.
    """
    chosen = _choose_device(device)
    share_s = max_s / _NUM_SHARES
    disk = _probe_disk(scratch or Path(tempfile.gettempdir()), max_s=share_s)
    remote = _probe_remote(max_s=share_s)
    with prepared_device(chosen):
        rates = _measure_rates(chosen, share_s=share_s, disk=disk, remote=remote)
        workspace_bytes = reserve_workspaces(chosen)
        host_bytes = available_memory_bytes()
        described = _describe_device(chosen, host_bytes=host_bytes)
    return Machine(
        name=name or socket.gethostname(),
        device=described,
        host_memory_bytes=host_bytes - described.memory_bytes if described.kind == "cpu" else host_bytes,
        rates=rates,
        disk_free_bytes=disk.free_bytes,
        remote_free_bytes=remote.free_bytes,
        num_threads=torch.get_num_threads(),
        facts=_facts(chosen, workspace_bytes=workspace_bytes) | _faults(disk=disk, remote=remote),
    )


def _choose_device(device: str | None) -> torch.device:
    has_cuda = torch.cuda.is_available()
    try:
        chosen = torch.device(device or ("cuda" if has_cuda else "cpu"))
    except RuntimeError as error:
        raise _unknown_device(device) from error
    if chosen.type == "cuda" and chosen.index is None and has_cuda:
        chosen = torch.device("cuda", torch.cuda.current_device())
    present = chosen.type == "cpu" or (chosen.type == "cuda" and (chosen.index or 0) < torch.cuda.device_count())
    if not present:
        raise _unknown_device(device)
    return chosen


def _unknown_device(device: str | None) -> InvalidInput:
    present = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return InvalidInput(
        f"device {device!r} is not on this machine; present: {', '.join(present)}",
        field="device",
        value=device,
        allowed=present,
    )


_NUM_SHARES = 20
"""Of the time: one for each of the tiny ops, the copies of each way, the host's optimizer, each way of each store, and two for
each of the rest."""


def _measure_rates(device: torch.device, *, share_s: float, disk: _Stored, remote: _Stored) -> Rates:
    # Without a rate for bf16 no plan takes it: a card that emulates it gains nothing.
    dtypes = {name: dtype for name, dtype in _DTYPES.items() if name != "bf16" or has_bf16(device)}
    optimizers = _optimizer_rates(device, max_s=2 * share_s)
    return Rates(
        matmul_flops_per_s={name: _matmul_rate(device, dtype, max_s=2 * share_s) for name, dtype in dtypes.items()},
        attention_flops_per_s={
            name: _attention_rate(device, dtype, max_s=2 * share_s) for name, dtype in dtypes.items()
        },
        memory_bytes_per_s=_memory_rate(device, max_s=2 * share_s),
        op_overhead_s=_op_overhead_s(device, max_s=share_s),
        device_to_host_bytes_per_s=_copy_rate(device, to_host=True, max_s=share_s),
        host_to_device_bytes_per_s=_copy_rate(device, to_host=False, max_s=share_s),
        optimizer_elements_per_s=optimizers,
        source="measured",
        host_optimizer_elements_per_s=_host_optimizer_rate(optimizers, device, max_s=share_s),
        disk_write_bytes_per_s=disk.write_bytes_per_s,
        disk_read_bytes_per_s=disk.read_bytes_per_s,
        remote_write_bytes_per_s=remote.write_bytes_per_s,
        remote_read_bytes_per_s=remote.read_bytes_per_s,
    )


def _probe_disk(folder: Path, *, max_s: float) -> _Stored:
    """Nothing where the folder cannot be written to or its disk is full."""
    try:
        store = DiskStore(folder)
        with _closing(store):
            free_bytes = shutil.disk_usage(folder).free
            return _store_rates(store, store.flush, max_s=max_s, free_bytes=free_bytes)
    except (OSError, DiskFull) as error:
        return _Stored(fault=str(error))


def _probe_remote(*, max_s: float) -> _Stored:
    url = remote_url()
    if url is None:
        return _Stored()
    try:
        store = RemoteStore(url, timeout_s=_REMOTE_TIMEOUT_S)
        with _closing(store):
            return _store_rates(store, lambda: None, max_s=max_s, free_bytes=store.free_bytes() or 0)
    except HeadroomError as error:
        return _Stored(fault=str(error))


def _store_rates(store: Store, flush: Callable[[], None], *, max_s: float, free_bytes: int) -> _Stored:
    """flush: until what was written has arrived and what is read next comes from there."""
    place = store.take(_STORED_BYTES)
    data = memoryview(bytearray(_STORED_BYTES))

    def write() -> None:
        for start in range(0, _STORED_BYTES, SLAB_BYTES):
            store.write(place, data[start : start + SLAB_BYTES], offset=start)
        flush()

    def read() -> None:
        for start in range(0, _STORED_BYTES, SLAB_BYTES):
            store.read(place, data[start : start + SLAB_BYTES], offset=start)
        flush()

    rates = [_STORED_BYTES / _median_s(run, _CPU, max_s=max_s) for run in (write, read)]
    return _Stored(write_bytes_per_s=rates[0], read_bytes_per_s=rates[1], free_bytes=free_bytes)


@contextmanager
def _closing(store: Store) -> Iterator[None]:
    try:
        yield
    finally:
        store.close()


def _faults(**stored: _Stored) -> dict[str, str]:
    return {name: found.fault for name, found in stored.items() if found.fault}


def _matmul_rate(device: torch.device, dtype: torch.dtype, *, max_s: float) -> float:
    def product(shape: tuple[int, ...]) -> tuple[Callable[[], object], float]:
        tokens, inputs, outputs = shape
        x, weight, gradient = (
            _random(size, device, dtype) for size in ((tokens, inputs), (inputs, outputs), (tokens, outputs))
        )
        return lambda: (x @ weight, gradient @ weight.T, x.T @ gradient), 6.0 * tokens * inputs * outputs

    return _rate_over_shapes(_MATMUL_SHAPES[device.type], product, device, max_s=max_s)


def _attention_rate(device: torch.device, dtype: torch.dtype, *, max_s: float) -> float:
    def attention(shape: tuple[int, ...]) -> tuple[Callable[[], object], float]:
        batch, heads, sequence, size = shape
        query, key, value = (_random(shape, device, dtype).requires_grad_() for _ in range(3))
        gradient = _random(shape, device, dtype)

        def run() -> object:
            output = scaled_dot_product_attention(query, key, value, is_causal=True)
            return torch.autograd.grad(output, (query, key, value), gradient)

        return run, _ATTENTION_MATMULS * 2.0 * batch * heads * sequence * sequence * size

    return _rate_over_shapes(_ATTENTION_SHAPES[device.type], attention, device, max_s=max_s)


def _memory_rate(device: torch.device, *, max_s: float) -> float:
    """Bytes over time of a mix: an addition, an activation function, a normalization."""
    shape = _ELEMENTWISE_SHAPE[device.type]
    x, y = _random(shape, device, torch.float32), _random(shape, device, torch.float32)
    ops: list[tuple[Callable[[], object], int]] = [
        (lambda: x + y, 3),
        (lambda: gelu(x), 2),
        (lambda: layer_norm(x, shape[1:]), 2),
    ]
    seconds = sum(_median_s(run, device, max_s=max_s / len(ops)) for run, _ in ops)
    return sum(passes for _, passes in ops) * x.nbytes / seconds


def _op_overhead_s(device: torch.device, *, max_s: float) -> float:
    start = torch.ones(8, device=device, requires_grad=True)

    def run() -> object:
        value = start
        for _ in range(_NUM_TINY_OPS):
            value = value * 1.0001
        return torch.autograd.grad(value, start, torch.ones_like(start))

    return _median_s(run, device, max_s=max_s) / (2 * _NUM_TINY_OPS)


def _copy_rate(device: torch.device, *, to_host: bool, max_s: float) -> float:
    """On CUDA between pinned and device memory; on the CPU device into memory taken afresh, as its offloader does."""
    num_bytes = _COPY_BYTES[device.type]
    on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        return num_bytes / _median_s(lambda: torch.empty_like(on_device).copy_(on_device), device, max_s=max_s)
    on_host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    source, target = (on_device, on_host) if to_host else (on_host, on_device)
    return num_bytes / _median_s(lambda: target.copy_(source, non_blocking=True), device, max_s=max_s)


def _optimizer_rates(device: torch.device, *, max_s: float) -> dict[str, float]:
    num_elements = _OPTIMIZER_ELEMENTS[device.type]
    adamw = _make_adamw(num_elements, device)
    parameter = adamw.param_groups[0]["params"][0]
    optimizers: dict[str, Any] = {"adamw_32": adamw}
    if importlib.util.find_spec("bitsandbytes") is not None:
        import bitsandbytes

        adamw_8bit: Any = bitsandbytes.optim.AdamW8bit  # type: ignore[attr-defined]
        optimizers["adamw_8"] = adamw_8bit([parameter], lr=1e-6)
    return {
        kind: num_elements / _median_s(optimizer.step, device, max_s=max_s / len(optimizers))
        for kind, optimizer in optimizers.items()
    }


def _host_optimizer_rate(on_device: dict[str, float], device: torch.device, *, max_s: float) -> float:
    """Of 32-bit AdamW; the CPU device's own is the host's."""
    if device.type == "cpu":
        return on_device["adamw_32"]
    num_elements = _OPTIMIZER_ELEMENTS["cpu"]
    optimizer = _make_adamw(num_elements, _CPU)
    return num_elements / _median_s(optimizer.step, _CPU, max_s=max_s)


def _make_adamw(num_elements: int, device: torch.device) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(_random((num_elements // 1024, 1024), device, torch.float32))
    parameter.grad = _random((num_elements // 1024, 1024), device, torch.float32)
    return torch.optim.AdamW([parameter], lr=1e-6, fused=True)


def _rate_over_shapes(
    shapes: tuple[tuple[int, ...], ...],
    make: Callable[[tuple[int, ...]], tuple[Callable[[], object], float]],
    device: torch.device,
    *,
    max_s: float,
) -> float:
    """FLOPs of all shapes over their time together; shapes that would not fit the time left are left out."""
    flops = seconds = 0.0
    started = time.perf_counter()
    for position, shape in enumerate(shapes):
        left_s = max_s - (time.perf_counter() - started)
        run, shape_flops = make(shape)
        too_slow = flops > 0 and shape_flops * seconds / flops * 2 > left_s
        if too_slow:
            break
        flops += shape_flops
        seconds += _median_s(run, device, max_s=left_s / (len(shapes) - position))
    return flops / seconds


def _median_s(run: Callable[[], object], device: torch.device, *, max_s: float) -> float:
    """Median duration after one run to warm up: at least one repeat, then as many as the time allows."""
    started = time.perf_counter()
    _timed(run, device)
    durations = [_timed(run, device)]
    while len(durations) < MAX_REPEATS and time.perf_counter() - started + durations[-1] < max_s:
        durations.append(_timed(run, device))
    return max(median(durations), 1e-9)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    with torch.cuda.device(device):
        begin.record()
        run()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """From its own generator, so that the process's random state stays as it was."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def _describe_device(device: torch.device, *, host_bytes: int) -> Device:
    if device.type == "cpu":
        return Device(kind="cpu", name=_processor_name(), memory_bytes=host_bytes // 2)
    # What is left is this process's context and the libraries' workspaces: neither is any plan's.
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_properties(device).name
    return Device(kind="cuda", name=name, memory_bytes=free_bytes, index=device.index or 0)


def _facts(device: torch.device, *, workspace_bytes: int) -> dict[str, str]:
    facts = {
        "processor": _processor_name(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }
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
