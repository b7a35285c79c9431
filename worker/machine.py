"""Identifies this machine: measured once by a process of its own, kept in HEADROOM_HOME, registered at each start of a worker.

The measurement needs torch and all of the machine for some seconds; the worker's process has neither. It is repeated when what
it was made on has changed: processor, memory, cards, versions.
"""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from optimizer.base.errors import InvalidInput
from optimizer.hardware.machine import Machine
from optimizer.hardware.probe.compilers import missing_to_compile
from webapp.catalog.actions import register_machine
from webapp.catalog.models import Machine as MachineRow
from webapp.jobs.devices.room import count_devices, device_kinds, full_bytes
from worker.config import WorkerConfig
from worker.gpu import GpuMeter, card_identity, card_names, visible_card
from worker.run.child import child_environment, isolated_command
from worker.run.watch.worker_lock import boot_id

PROBE_TIMEOUT_S = 600
_CACHE_VERSION = 4


def register_this_machine(config: WorkerConfig) -> MachineRow:
    """Measure if need be, and write the machine's row. Raises RuntimeError when it cannot be measured."""
    machine = replace(cached_machine(config.home), name=config.host)
    return register_machine(name=machine.name, document=machine.to_json())


def device_names(row: MachineRow, places: Sequence[int]) -> list[str]:
    """torch's names of an attempt's devices in its own process, which sees those cards alone; ``cpu`` for one that needs none."""
    if row.document["device"]["kind"] == "cuda":
        return [f"cuda:{index}" for index in range(len(places))] or ["cpu"]
    return ["cpu"] * max(1, len(places))


def visible_cards(row: MachineRow, places: Sequence[int]) -> str | None:
    """``CUDA_VISIBLE_DEVICES`` for a process on these of the machine's devices; None where it stays as it is.

    places: counted from the machine's first device, in the order of the ranks.
    """
    if row.document["device"]["kind"] != "cuda" or not places:
        return None
    visible, indices = os.environ.get("CUDA_VISIBLE_DEVICES", ""), card_indices(row)
    first = row.document["device"]["index"]
    cards = [indices[place] if place < len(indices) else first + place for place in places]
    return ",".join(str(visible_card(card, visible=visible)) for card in cards)


def card_indices(row: MachineRow) -> list[int]:
    """torch's index of the card at each of the machine's places, which are by kind."""
    return [
        index
        for device, number in device_kinds(row)
        for index in device.get("indices") or range(device["index"], device["index"] + number)
    ]


def count_slots(row: MachineRow, config: WorkerConfig) -> int:
    """Attempts at once on all of the machine's devices."""
    return config.num_slots * count_devices(row)


def device_meters(row: MachineRow) -> list[GpuMeter]:
    """One for each of the machine's devices, which reads nothing on the CPU device."""
    return [GpuMeter(index) for index in card_indices(row)]


def read_used_bytes(row: MachineRow, meters: Sequence[GpuMeter], *, resting: Collection[int] = ()) -> list[int]:
    """By device, memory in use by whatever program, as the cards' driver says; empty where there is no driver.

    More than there is, so that nothing begins, where the driver is there and does not answer for a card: nobody knows what is
    free. Likewise at the places of those that rest.
    """
    devices = [device for device, number in device_kinds(row) for _ in range(number)]
    facts = [meter.read() for meter in meters]
    cards = enumerate(zip(devices, meters, strict=False))
    is_shut = [(meter.is_silent and device["kind"] == "cuda") or place in resting for place, (device, meter) in cards]
    if not any(is_shut) and not any("free_bytes" in each for each in facts):
        return []
    return [
        full_bytes(device) if shut else each.get("total_bytes", 0) - each.get("free_bytes", 0)
        for device, each, shut in zip(devices, facts, is_shut, strict=False)
    ]


def device_lock_file(row: MachineRow, *, slot: str, home: Path) -> Path:
    """Named after the host and the machine's first card itself, so that it holds wherever several hosts, or containers that each
    count their cards from 0, share one HEADROOM_HOME. Slots are the machine's: a job of several devices takes one.
    """
    device = row.document["device"]
    name = f"cuda-{card_identity(device['index'])}" if device["kind"] == "cuda" else "cpu"
    return home / "run" / f"device-{boot_id()}-{name}-{slot}.lock"


def host_lock_file(*, slot: str, worker: str, home: Path) -> Path:
    """Held by a slot's process that needs no device, so that none is started beside one that a killed worker left behind."""
    return home / "run" / f"{slot}-{boot_id()}-{quote(worker, safe='')}.lock"


def cached_machine(home: Path) -> Machine:
    """From the file of the present facts, else measured and kept there."""
    path = home / "cache" / f"machine-{machine_key()[:16]}.json"
    # none yet, or not readable by this version: measuring costs seconds
    with contextlib.suppress(OSError, ValueError, InvalidInput):
        return Machine.from_json(json.loads(path.read_text()))
    document = probe_in_process(home)
    machine = Machine.from_json(document)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}-{os.getpid()}")
    staged.write_text(json.dumps(document, indent=1))
    staged.replace(path)
    return machine


def machine_key() -> str:
    """Hash of what the measured rates depend on, read without torch."""
    facts = {
        "version": _CACHE_VERSION,
        "host": platform.node(),
        "processor": _processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "cards": card_names(),
        "visible_cards": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "played_devices": os.environ.get("HEADROOM_DEVICES", ""),
        "remote_store": os.environ.get("HEADROOM_REMOTE_URL", ""),
        "torch": metadata.version("torch"),
        "headroom": _program_version(),
    }
    if missing := missing_to_compile("cuda" if card_names() else "cpu"):
        facts["compiler"] = missing
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def probe_in_process(home: Path) -> dict[str, Any]:
    """Run ``worker.probing`` in a process of its own; its standard output is the measured machine as JSON."""
    ended = subprocess.run(
        isolated_command("worker.probing"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=home,
        env=child_environment(os.environ, folder=home),
        timeout=PROBE_TIMEOUT_S,
        check=False,
    )
    if ended.returncode != 0:
        tail = ended.stderr.decode(errors="replace").strip()[-2000:]
        raise RuntimeError(f"this machine could not be measured, exit code {ended.returncode}: {tail}")
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _program_version() -> str:
    """Also where the program runs from its tree, uninstalled."""
    try:
        return metadata.version("headroom")
    except metadata.PackageNotFoundError:
        return "tree"

