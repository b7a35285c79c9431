"""Processes that are killed, halted, asked to end, doubled, or starved."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.faults.fault import fault, require
from tests.chaos.world import LEASE_S, SERVICES, WORKERS, World

PAST_A_LEASE = (LEASE_S + 1.0, LEASE_S + 2.5)


def _child(world: World, chance: random.Random) -> int:
    children = list(world.children())
    require(children, "no job is running")
    return chance.choice(children)


def _worker_at_work(world: World) -> str:
    """A worker whose job is running, or else any."""
    require(world.children(), "no job is running")
    running = [name for name in WORKERS if world.is_running(name)]
    require(running, "no worker is running")
    for pid in world.children():
        parent = int(_stat(pid)[1])
        for name in running:
            if world.pid(name) == parent:
                return name
    return running[0]


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ["X", "0"]


def _kill(world: World, name: str) -> None:
    require(world.is_running(name), f"{name} is not running")
    world.kill(name)


def _halt(world: World, name: str) -> None:
    require(world.is_running(name) and world.try_to_halt(name), f"{name} is not running, or holds a lock at every moment")


def _wake(world: World, name: str) -> None:
    if world.is_running(name):
        world.wake(name)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        require(False, "it ended by itself")


@fault("kill a job's process", place="job")
def kill_child(world: World, chance: random.Random) -> Iterator[None]:
    _signal(_child(world, chance), signal.SIGKILL)
    yield


@fault("kill a worker", place="workers")
def kill_worker(world: World, chance: random.Random) -> Iterator[None]:
    _kill(world, _worker_at_work(world))
    yield


@fault("kill a worker and its job's process", place="workers")
def kill_both(world: World, chance: random.Random) -> Iterator[None]:
    worker, child = _worker_at_work(world), _child(world, chance)
    _kill(world, worker)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    yield


@fault("halt a worker past its lease", place="workers", lasts_s=PAST_A_LEASE, outlasts_lease=True)
def halt_worker(world: World, chance: random.Random) -> Iterator[None]:
    worker = _worker_at_work(world)
    _halt(world, worker)
    yield
    _wake(world, worker)


@fault("halt a worker and its job's process past the lease", place="workers", lasts_s=PAST_A_LEASE, outlasts_lease=True)
def halt_both(world: World, chance: random.Random) -> Iterator[None]:
    worker, child = _worker_at_work(world), _child(world, chance)
    _halt(world, worker)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGSTOP)
    yield
    _wake(world, worker)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGCONT)


@fault("halt a worker within a write, until it is ended", place="workers", lasts_s=(1.0, 4.0), on=frozenset({"sqlite"}))
def halt_writer(world: World, chance: random.Random) -> Iterator[None]:
    """Nobody else can write meanwhile. The stack's supervisor ends such a worker after 10 s; here the lease is but 2."""
    worker = _worker_at_work(world)
    require(world.try_to_halt_within_write(worker), "it was met within no write")
    yield
    if world.is_running(worker):
        world.kill(worker)


@fault("halt a job's process", place="job", lasts_s=(1.0, 3.0))
def halt_child(world: World, chance: random.Random) -> Iterator[None]:
    child = _child(world, chance)
    _signal(child, signal.SIGSTOP)
    yield
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGCONT)


@fault("ask a worker to end", place="workers", lasts_s=(0.5, 2.0))
def drain_worker(world: World, chance: random.Random) -> Iterator[None]:
    world.ask_to_end(_worker_at_work(world))
    yield


@fault("ask a worker to end, twice", place="workers")
def drain_worker_twice(world: World, chance: random.Random) -> Iterator[None]:
    worker = _worker_at_work(world)
    os.kill(world.pid(worker), signal.SIGTERM)
    time.sleep(chance.random() * 0.3)
    world.ask_to_end(worker)
    yield


@fault("a third worker comes and goes", place="workers", lasts_s=(2.0, 4.0))
def third_worker(world: World, chance: random.Random) -> Iterator[None]:
    world.start_worker("worker-3")
    yield
    world.kill("worker-3")


@fault("kill the reconciler", place="reconciler")
def kill_reconciler(world: World, chance: random.Random) -> Iterator[None]:
    _kill(world, "reconciler")
    yield


@fault("halt the reconciler past its term", place="reconciler", lasts_s=(3.0, 5.0))
def halt_reconciler(world: World, chance: random.Random) -> Iterator[None]:
    _halt(world, "reconciler")
    yield
    _wake(world, "reconciler")


@fault("a second reconciler, and the first is killed", place="reconciler", lasts_s=(2.0, 4.0))
def second_reconciler(world: World, chance: random.Random) -> Iterator[None]:
    require(world.is_running("reconciler"), "it is not running")
    world.start_reconciler("reconciler-2")
    time.sleep(1.5)
    world.kill("reconciler")
    yield
    world.kill("reconciler-2")


@fault("kill the web", place="web")
def kill_web(world: World, chance: random.Random) -> Iterator[None]:
    _kill(world, "web")
    yield


@fault("halt the web", place="web", lasts_s=(1.0, 3.0))
def halt_web(world: World, chance: random.Random) -> Iterator[None]:
    _halt(world, "web")
    yield
    _wake(world, "web")


@fault("ask the web to end", place="web")
def end_web(world: World, chance: random.Random) -> Iterator[None]:
    require(world.is_running("web"), "it is not running")
    world.terminate("web")
    yield


@fault("kill everything at once", place="everything")
def power_cut(world: World, chance: random.Random) -> Iterator[None]:
    world.kill_all((*SERVICES, "valkey"))
    yield


@fault("others take the processors", place="processors", lasts_s=(2.0, 4.0))
def starve(world: World, chance: random.Random) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
