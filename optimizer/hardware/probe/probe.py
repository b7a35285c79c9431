"""Measures the machine at hand in under a minute: the rates that the estimator multiplies.

Modules by subject. In ``rates/``: ``matmuls.py`` (by shape and form, attention by length), ``decoding.py`` (both for one token),
``ops.py`` (by bytes), ``compression.py`` (compressed trips), ``host_attention.py`` (to keys and values on the host), ``flat.py``
(one number each, where there is no curve), ``links.py`` (copies alone and under load), ``peers.py`` (between devices),
``updates.py`` (AdamW on the device and the host), ``stores.py`` (disk and remote store). Beside this file: ``steps.py`` and
``passes.py`` (what a step and a generation cost beside their kernels), ``thread_wakeup.py``, ``facts.py``. ``clock.py`` says how
something is timed, ``disturbance.py`` whether others used the machine meanwhile.

Under the settings of a run: on CUDA deterministic, without TF32, timed by events; on the CPU device with freed memory kept
(``base/heap.py``), from then on. Neither threads nor random state of the process are changed. Needs torch; the result does not.

*Not modelled*: clocks that sink after minutes of load, other tenants of the link, a page cache that takes what is written.
Finished runs correct them (``hardware/calibration.py``).
"""

import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from optimizer.base.errors import InvalidInput
from optimizer.base.heap import keep_freed_memory
from optimizer.hardware.curves import Curve
from optimizer.hardware.machine import PROBE_DISTURBED_FACT, Machine
from optimizer.hardware.memory import available_memory_bytes
from optimizer.hardware.probe.clock import TimeShare, better_of
from optimizer.hardware.probe.disturbance import Disturbance, Watch
from optimizer.hardware.probe.facts import describe_device, has_library_for_bf16, list_facts
from optimizer.hardware.probe.passes import probe_draws, probe_passes
from optimizer.hardware.probe.rates.compression import probe_packing
from optimizer.hardware.probe.rates.decoding import find_cache_bytes, probe_rows, probe_token_attention
from optimizer.hardware.probe.rates.flat import (
    probe_attention_rate,
    probe_matmul_rate,
    probe_memory_rate,
    probe_op_overhead_s,
)
from optimizer.hardware.probe.rates.host_attention import probe_host_attention
from optimizer.hardware.probe.rates.links import probe_fresh_memory, probe_links, rate_in_step
from optimizer.hardware.probe.rates.matmuls import probe_attention, probe_library_call_s, probe_matmuls
from optimizer.hardware.probe.rates.ops import probe_ops
from optimizer.hardware.probe.rates.peers import count_like_cards, count_on_one_switch, probe_peers
from optimizer.hardware.probe.rates.stores import Stored, faults_of, probe_disk, probe_remote
from optimizer.hardware.probe.rates.updates import probe_8bit_tensor_s, probe_host_update, probe_updates
from optimizer.hardware.probe.steps import probe_steps
from optimizer.hardware.probe.thread_wakeup import probe_wake_s
from optimizer.hardware.rates import Rates
from optimizer.runtime.layers.matmul_dispatch import has_quicker_library
from optimizer.runtime.meter.device import has_bf16, prepared_device, reserve_workspaces

MAX_PROBE_S = 20.0
"""Time for all measurements together; shares below. Start-up of kernels comes on top."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHARES = {
    "disk": 2, "remote": 1, "updates": 2, "host update": 1, "flat": 3, "matmuls": 10, "attention": 4, "ops": 14, "steps": 10,
    "passes": 3, "packing": 1, "links": 2, "fresh memory": 1, "rows": 3, "token attention": 2, "draws": 1,
    "host attention": 1, "waking": 1, "peers": 1,
}  # fmt: skip
"""Shares of the time, by what is measured."""
_NUM_VISITS = 2
"""Visits of all curves, one after the other."""

Measured = TypeVar("Measured")


def probe_machine(
    *,
    name: str | None = None,
    device: str | None = None,
    max_s: float = MAX_PROBE_S,
    scratch: Path | None = None,
    num_played: int = 1,
) -> Machine:
    """Measure one device of this machine, and count those like it.

    name: how the machine is listed; its host name unless given.
    device: ``cpu``, ``cuda`` or ``cuda:1``; CUDA where there is one unless given. InvalidInput where it is not there.
    max_s: how long to measure; less makes rates rougher and curves shorter, never the shapes smaller than the first of each list.
    scratch: folder whose disk is the disk tier; the system's temporary folder unless given. The remote tier is the store that
    HEADROOM_REMOTE_URL names; one that does not answer is noted among the facts, and there is no remote tier.
    num_played: devices that the CPU plays, which share its cores and memory. Of cards those from the device on count that are
    like it.
    """
    chosen = _choose_device(device)
    if chosen.type == "cpu":
        keep_freed_memory()
    share_s = {what: max_s * share / sum(_SHARES.values()) for what, share in _SHARES.items()}
    scratch = scratch or Path(tempfile.gettempdir())
    disk = probe_disk(scratch, max_s=share_s["disk"])
    remote = probe_remote(max_s=share_s["remote"])
    state = torch.get_rng_state()
    with prepared_device(chosen):
        watch = Watch(chosen)
        rates = _measure_rates(chosen, share_s=share_s, disk=disk, remote=remote, scratch=scratch, watch=watch)
        disturbance = watch.judge()
        del watch
        workspace_bytes = reserve_workspaces(chosen)
        host_bytes = available_memory_bytes()
        described = describe_device(chosen, host_bytes=host_bytes, workspace_bytes=workspace_bytes)
        num_devices = count_like_cards(described.index) if described.kind == "cuda" else num_played
    torch.set_rng_state(state)
    machine = Machine(
        name=name or socket.gethostname(),
        device=described,
        host_memory_bytes=host_bytes - described.memory_bytes if described.kind == "cpu" else host_bytes,
        rates=replace(rates, probe_slowdown=disturbance.slowdown),
        num_devices=num_devices,
        disk_free_bytes=disk.free_bytes,
        remote_free_bytes=remote.free_bytes,
        num_threads=torch.get_num_threads(),
        packs_bf16=chosen.type == "cpu" and has_library_for_bf16(),
        packs_fp32=chosen.type == "cpu" and has_quicker_library(),
        facts=list_facts(chosen, workspace_bytes=workspace_bytes)
        | faults_of(disk=disk, remote=remote)
        | _remarks_on(disturbance),
    )
    machine = replace(machine, cards_per_switch=count_on_one_switch(machine))
    return replace(machine, peers=probe_peers(machine, max_s=share_s["peers"]))


def _remarks_on(disturbance: Disturbance) -> dict[str, str]:
    return {PROBE_DISTURBED_FACT: disturbance.describe()} if disturbance.slowdown > 1 else {}


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


def _measure_rates(
    device: torch.device, *, share_s: dict[str, float], disk: Stored, remote: Stored, scratch: Path, watch: Watch
) -> Rates:
    dtypes = {name: dtype for name, dtype in _DTYPES.items() if name != "bf16" or has_bf16(device)}
    # Without a flat rate no search takes a dtype: not bf16 where a card emulates it, and fp16 only there.
    flat_dtypes = {name: dtype for name, dtype in dtypes.items() if name != "fp16" or "bf16" not in dtypes}

    def look_after(measured: Measured) -> Measured:
        """The value that was just measured; a look at the machine goes with it."""
        watch.look()
        return measured

    watch.look()
    optimizers = look_after(probe_updates(device, max_s=share_s["updates"] * 3 / 4))
    eight_s = look_after(probe_8bit_tensor_s(optimizers, device, max_s=share_s["updates"] / 4))
    links = look_after(probe_links(device, max_s=share_s["links"]))
    steps = look_after(probe_steps(device, max_s=share_s["steps"]))
    passes = look_after(probe_passes(device, scratch=scratch if disk.free_bytes else None, max_s=share_s["passes"]))
    call_s = look_after(probe_library_call_s(max_s=share_s["flat"] / 20)) if device.type == "cpu" else 0.0
    curve_probes: dict[str, Callable[..., dict[str, Curve]]] = {
        "matmuls": partial(probe_matmuls, device, dtypes, library_call_s=call_s),
        "rows": partial(probe_rows, device, dtypes, library_call_s=call_s),
        "attention": partial(probe_attention, device, dtypes),
        "token attention": partial(probe_token_attention, device, dtypes),
        "ops": partial(probe_ops, device, dtypes),
        "draws": partial(probe_draws, device),
        "host attention": partial(probe_host_attention, dtypes),
        "packing": partial(probe_packing, device),
    }
    visits = [
        {what: look_after(probe(max_s=share_s[what] / _NUM_VISITS)) for what, probe in curve_probes.items()}
        for _ in range(_NUM_VISITS)
    ]
    curves = {what: better_of(visit[what] for visit in visits) for what in curve_probes}
    flat = TimeShare(share_s["flat"])
    return Rates(
        matmul_flops_per_s={
            name: probe_matmul_rate(device, dtype, max_s=flat.part_s(6)) for name, dtype in flat_dtypes.items()
        },
        attention_flops_per_s={
            name: probe_attention_rate(device, dtype, max_s=flat.part_s(4)) for name, dtype in flat_dtypes.items()
        },
        memory_bytes_per_s=probe_memory_rate(device, max_s=flat.part_s(2)),
        op_overhead_s=look_after(probe_op_overhead_s(device, max_s=flat.part_s(1))),
        device_to_host_bytes_per_s=rate_in_step(links, "device_to_host"),
        host_to_device_bytes_per_s=rate_in_step(links, "host_to_device"),
        optimizer_elements_per_s=optimizers,
        source="measured",
        host_optimizer_elements_per_s=look_after(probe_host_update(optimizers, device, max_s=share_s["host update"])),
        disk_write_bytes_per_s=disk.write_bytes_per_s,
        disk_read_bytes_per_s=disk.read_bytes_per_s,
        disk_cached_read_bytes_per_s=disk.cached_read_bytes_per_s,
        remote_write_bytes_per_s=remote.write_bytes_per_s,
        remote_read_bytes_per_s=remote.read_bytes_per_s,
        remote_round_trip_s=remote.round_trip_s,
        matmul_curves=curves["matmuls"] | curves["rows"],
        library_call_s=call_s,
        attention_curves=curves["attention"] | curves["token attention"],
        cache_bytes=find_cache_bytes() if device.type == "cpu" else None,
        op_curves=curves["ops"] | curves["draws"],
        host_attention_curves=curves["host attention"],
        packing_curves=curves["packing"],
        forward_dispatch_s=steps.forward_dispatch_s,
        backward_dispatch_s=steps.backward_dispatch_s,
        pass_dispatch_s=passes.dispatch_s,
        python_s=steps.python_s | passes.python_s | {"update 8-bit": eight_s},
        wake_s=look_after(probe_wake_s(device, max_s=share_s["waking"])),
        fresh_bytes_per_s=look_after(probe_fresh_memory(device, max_s=share_s["fresh memory"])),
        link_bytes_per_s=links,
    )
