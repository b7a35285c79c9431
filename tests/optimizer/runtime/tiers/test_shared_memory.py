"""Memory that processes have in common: one copy, no name, gone with the last of them; and refusals in words."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optimizer.base.errors import OutOfHostMemory, SharedMemoryRefused
from optimizer.base.serialize import to_json
from optimizer.base.units import MIB
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.tiers import shared_memory
from optimizer.runtime.tiers.shared_memory import SharedMemory, place_pieces
from optimizer.runtime.tiers.tiers import Tiers
from tests.optimizer.runtime.ranks.rank_process import list_dev_shm

ROOT = Path(__file__).resolve().parents[4]
CPU = torch.device("cpu")
OTHER = """
import json, sys
from optimizer.runtime.tiers.shared_memory import MemoryAddress, SharedMemory
memory = SharedMemory.open(MemoryAddress(**json.loads(sys.argv[1])))
print(int(memory.piece(512, 1)[0]), flush=True)
memory.piece(1024, 4).fill_(7)
print("written", flush=True)
sys.stdin.read()
"""


def who_has(inode: int) -> list[str]:
    """Processes that have the memory open or mapped."""
    return [process.name for process in Path("/proc").glob("[0-9]*") if inode in shared_by(process)]


def shared_by(process: Path) -> set[int]:
    """Inodes of such memory that a process has."""
    found = set()
    with suppress(OSError):
        maps = (process / "maps").read_text().splitlines()
        found |= {int(line.split()[4]) for line in maps if "headroom-weights" in line}
        for file in (process / "fd").iterdir():
            # What a listing opens is gone when it is looked at.
            with suppress(OSError):
                found |= {file.stat().st_ino} if "headroom-weights" in str(file.readlink()) else set()
    return found


def test_what_one_process_writes_another_reads_and_nothing_has_a_name() -> None:
    before = list_dev_shm()
    memory = SharedMemory.make(4 * MIB)
    address = memory.address
    home = memory.piece(512, 512)
    home.fill_(5)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, json.dumps(to_json(address))],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "5\n"
        assert other.stdout.readline() == "written\n"
        assert memory.piece(1024, 4).tolist() == [7] * 4
        assert sorted(who_has(address.inode)) == sorted([str(os.getpid()), str(other.pid)])
        assert list_dev_shm() == before
        memory.close_file()
        memory.close_file()
        del memory
        # Still mapped where a home is held, and by the other process.
        assert home[0] == 5
        other.send_signal(signal.SIGKILL)
        other.wait(timeout=30)
    assert who_has(address.inode) == [str(os.getpid())]
    del home
    assert who_has(address.inode) == []


def test_nobody_can_change_its_size() -> None:
    memory = SharedMemory.make(MIB)
    for size in (1, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.address.file, size)
    memory.close_file()


def test_more_than_the_machine_has_left_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9216 kB\nMemFree: 1 kB\nMemAvailable:    1024 kB\n")
    monkeypatch.setattr(shared_memory, "_MEMORY_FILE", tmp_path / "meminfo")
    SharedMemory.make(MIB).close_file()
    with pytest.raises(OutOfHostMemory) as caught:
        SharedMemory.make(3 * MIB)
    assert str(caught.value) == (
        "host memory ran out for the weights that all ranks share: 3.00 MiB more were needed, 8.00 MiB of 9.00 MiB were in use; "
        "2.00 MiB too little"
    )


def test_a_process_that_is_not_the_one_that_made_it_is_found_out() -> None:
    memory = SharedMemory.make(MIB)
    address = memory.address
    for wrong, words in (
        (replace(address, inode=address.inode + 1), "is another than the rank that made it"),
        (replace(address, file=9999), "No such file or directory"),
    ):
        with pytest.raises(SharedMemoryRefused, match=f"open the memory of another rank: .*{words}") as caught:
            SharedMemory.open(wrong)
        assert "let all run as one user in one container" in caught.value.hint
    memory.close_file()


def test_pieces_lie_apart_and_aligned() -> None:
    assert place_pieces([1, 512, 513, 0, 3]) == ([0, 512, 1024, 2048, 2048], 2560)
    assert place_pieces([]) == ([], 0)


def test_a_part_of_it_counts_as_weights_on_the_host_while_the_tiers_live() -> None:
    meter = Meter(device=CPU)
    tiers = Tiers(device=CPU, meter=meter)
    memory = SharedMemory.make(MIB)
    tiers.adopt(memory, counted_bytes=1000)
    with meter:
        memory.piece(0, MIB).add_(1)
    memory.close_file()
    assert meter.bytes_by_category(tier="host")["weights"] == meter.host_bytes == 1000
    assert meter.peak().device_bytes == 0
    tiers.close()
    del tiers
    assert meter.host_bytes == 0


def test_a_part_beyond_the_hosts_budget_is_refused() -> None:
    tiers = Tiers(device=CPU, meter=Meter(device=CPU, host_cap_bytes=999))
    memory = SharedMemory.make(MIB)
    memory.close_file()
    with pytest.raises(OutOfHostMemory, match="host memory ran out"):
        tiers.adopt(memory, counted_bytes=1000)
    tiers.close()
