"""Disks that are full, and checkpoints that are damaged before they are needed."""

import contextlib
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from optimizer.base.errors import DiskFull
from optimizer.runtime.job.checkpoint import list_checkpoints
from tests.chaos.faults.fault import fault, require
from tests.chaos.world import World
from tests.disks import MIB


@fault("the disk is full", place="disk", lasts_s=(1.0, 3.0), needs_disk=True)
def full_disk(world: World, chance: random.Random) -> Iterator[None]:
    assert world.disk is not None
    world.disk.fill()
    yield
    world.disk.make_room()


@fault("the disk is all but full", place="disk", lasts_s=(1.0, 4.0), needs_disk=True)
def tight_disk(world: World, chance: random.Random) -> Iterator[None]:
    """Less is free than a checkpoint leaves."""
    assert world.disk is not None
    world.disk.fill(leave_bytes=16 * MIB)
    yield
    world.disk.make_room()


def _damage(world: World, chance: random.Random, harm: Callable[[Path, random.Random], None]) -> Iterator[None]:
    """Harm the newest of several checkpoints of a job that runs, whose process is then killed, so that it is looked for."""
    for pid, attempt in world.children().items():
        found = list_checkpoints(attempt.parent.parent)
        if len(found) < 2:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)  # so that none newer is written meanwhile
        with contextlib.suppress(OSError, DiskFull):
            harm(list_checkpoints(attempt.parent.parent)[0], chance)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        yield
        return
    require(False, "no running job has two checkpoints")


def _flip(folder: Path, chance: random.Random) -> None:
    file = folder / "facts.json"
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


@fault("a bit of the newest checkpoint flips", place="job")
def flip_checkpoint(world: World, chance: random.Random) -> Iterator[None]:
    yield from _damage(world, chance, _flip)


@fault("the newest checkpoint is cut short", place="job")
def truncate_checkpoint(world: World, chance: random.Random) -> Iterator[None]:
    yield from _damage(world, chance, lambda folder, _: os.truncate(folder / "facts.json", 5))


@fault("the newest checkpoint has no manifest", place="job")
def lose_manifest(world: World, chance: random.Random) -> Iterator[None]:
    yield from _damage(world, chance, lambda folder, _: (folder / "manifest.json").unlink())


@fault("the newest checkpoint is gone", place="job")
def lose_checkpoint(world: World, chance: random.Random) -> Iterator[None]:
    yield from _damage(world, chance, lambda folder, _: shutil.rmtree(folder))


@fault("half a checkpoint is left behind", place="job")
def leave_staged(world: World, chance: random.Random) -> Iterator[None]:
    for attempt in world.children().values():
        checkpoints = attempt.parent.parent / "checkpoints"
        if checkpoints.is_dir():
            with contextlib.suppress(OSError):
                (checkpoints / ".tmp-step-000003-f1").mkdir()
                (checkpoints / ".tmp-step-000003-f1" / "facts.json").write_text("{")
            yield
            return
    require(False, "no running job has a checkpoint")
