"""Valkey that dies, stands still, forgets, is full, asks for a password, or is reached badly; hints that lie."""

import contextlib
import os
import random
import signal
from collections.abc import Iterator

import redis

from tests.chaos.faults.fault import fault, require
from tests.chaos.proxy import Manner
from tests.chaos.world import World


def _client(world: World) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(world.home / "run" / "valkey.sock"), socket_timeout=10)


def _gone_meanwhile() -> contextlib.suppress:
    """A server that was killed meanwhile starts again as it was configured at first."""
    return contextlib.suppress(redis.ConnectionError)


@fault("kill Valkey", place="valkey", lasts_s=(0.2, 2.0))
def kill_valkey(world: World, chance: random.Random) -> Iterator[None]:
    require(world.is_running("valkey"), "it is not running")
    world.kill("valkey")
    yield


@fault("halt Valkey", place="valkey", lasts_s=(1.0, 4.0))
def halt_valkey(world: World, chance: random.Random) -> Iterator[None]:
    require(world.is_running("valkey"), "it is not running")
    os.kill(world.pid("valkey"), signal.SIGSTOP)
    yield
    if world.is_running("valkey"):
        os.kill(world.pid("valkey"), signal.SIGCONT)


@fault("Valkey forgets everything", place="valkey")
def flush(world: World, chance: random.Random) -> Iterator[None]:
    with _client(world) as client:
        require(client.dbsize(), "there was nothing to forget")
        client.flushall()
    yield


@fault("Valkey has no memory left", place="valkey", lasts_s=(1.0, 3.0))
def fill_valkey(world: World, chance: random.Random) -> Iterator[None]:
    with _client(world) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        yield
        with _gone_meanwhile():
            client.config_set("maxmemory", "0")


@fault("Valkey asks for a password that nobody was given", place="valkey", lasts_s=(1.0, 3.0))
def lock_out(world: World, chance: random.Random) -> Iterator[None]:
    with _client(world) as client:
        client.config_set("requirepass", "not yours")
        client.client_kill_filter(_type="normal", skipme=True)
        yield
        with _gone_meanwhile():
            client.config_set("requirepass", "")


def _pass_on(world: World, manner: Manner) -> Iterator[None]:
    before = world.redis_proxy.num_harmed
    world.redis_proxy.pass_on(manner)
    yield
    world.redis_proxy.pass_on("well")
    require(world.redis_proxy.num_harmed > before, "nothing passed meanwhile")


@fault("what goes to Valkey is late", place="valkey", lasts_s=(1.0, 3.0))
def late_redis(world: World, chance: random.Random) -> Iterator[None]:
    yield from _pass_on(world, "late")


@fault("what goes to Valkey comes in slices", place="valkey", lasts_s=(1.0, 3.0))
def sliced_redis(world: World, chance: random.Random) -> Iterator[None]:
    yield from _pass_on(world, "sliced")


@fault("nothing gets through to Valkey", place="valkey", lasts_s=(1.0, 6.0))
def lost_redis(world: World, chance: random.Random) -> Iterator[None]:
    yield from _pass_on(world, "not at all")


@fault("every connection to Valkey is cut", place="valkey")
def cut_redis(world: World, chance: random.Random) -> Iterator[None]:
    require(world.redis_proxy.cut(), "nobody was connected")
    yield


@fault("hints come a hundred times, and for jobs that never were", place="valkey")
def false_hints(world: World, chance: random.Random) -> Iterator[None]:
    known = [folder.parent.parent.name for folder in world.children().values()]
    require(world.ask("hint", jobs=[*known, "job_that_never_was"] * 50), "the broker took none")
    yield


@fault("hints that nobody can read", place="valkey")
def garbage_hints(world: World, chance: random.Random) -> Iterator[None]:
    with _client(world) as client:
        for text in (b"", b"\xff\xfe", b"{}", b"[]", b'{"body": "e30=", "headers": {}, "properties": {}}', os.urandom(200)):
            client.lpush("q:headroom", text)
    yield


@fault("hints are lost", place="valkey")
def lost_hints(world: World, chance: random.Random) -> Iterator[None]:
    with _client(world) as client:
        for _ in range(20):
            client.delete("q:headroom")
    yield
