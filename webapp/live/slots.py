"""Counts open streams by person and by project: of events, and of answers in chats.

They are counted over all web processes in Redis; in this process alone while Redis is away. A stream holds its slot for a minute
and renews it while it is open, so that those of a process that died are free again.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import redis.exceptions
from django.conf import settings
from prometheus_client import Gauge

from webapp.live.hub import Hub

HELD_S = 60
RENEWED_EACH_S = 20.0
MAX_STREAMS = 1_000
"""A process carries no more."""
PROCESS_IS_FULL = "the streams of one web process"
_AWAY = (redis.exceptions.RedisError, OSError)
_ASK = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
for place, key in ipairs(KEYS) do
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  local allowed = tonumber(ARGV[3 + place])
  if allowed > 0 and redis.call('ZCARD', key) >= allowed and not redis.call('ZSCORE', key, ARGV[1]) then return place end
end
if ARGV[2] == 'take' then
  for _, key in ipairs(KEYS) do
    redis.call('ZADD', key, now + ARGV[3], ARGV[1])
    redis.call('EXPIRE', key, ARGV[3])
  end
end
return 0
"""
_GIVE_BACK = "for _, key in ipairs(KEYS) do redis.call('ZREM', key, ARGV[1]) end"

VIEWERS = Gauge("headroom_stream_viewers", "Streams of events and answers open now.", registry=None, multiprocess_mode="livesum")
_open_here: Counter[str] = Counter()
"""By key. Counted inside the generator: a client that leaves before the first byte never starts it, and leaks no slot."""
_ALL = "all"


@dataclass(kw_only=True)
class Slot:
    """One stream's place among those of its person and of its job's project."""

    user_id: int
    project_id: str = ""
    """Empty for a job of no project and for an answer in a chat, which only the person's limit counts."""
    _name: str = field(default_factory=lambda: uuid4().hex)
    _renewed_at_s: float = 0.0

    async def full_limit(self, hub: Hub) -> str:
        """Name of the setting whose limit leaves no room, ``PROCESS_IS_FULL``, or nothing."""
        return await self._ask(hub, "look")

    async def take(self, hub: Hub) -> str:
        """The same, and the slot is held where there is room."""
        full = await self._ask(hub, "take")
        if not full:
            self._renewed_at_s = time.monotonic()
            _open_here.update([_ALL, *self._keys()])
            VIEWERS.set(num_viewers())
        return full

    async def renew(self, hub: Hub) -> None:
        """Hold it for longer; free of charge while that is not yet needed."""
        if time.monotonic() - self._renewed_at_s >= RENEWED_EACH_S:
            self._renewed_at_s = time.monotonic()
            await self._in_redis(hub, "take", allowed=[0 for _ in self._keys()])

    async def give_back(self, hub: Hub) -> None:
        try:
            if not hub.is_down:
                await hub.evaluate(_GIVE_BACK, self._keys(), [self._name])
        except _AWAY:
            pass  # it is free a minute later
        finally:
            _open_here.subtract([_ALL, *self._keys()])
            for key in (_ALL, *self._keys()):
                if not _open_here[key]:
                    del _open_here[key]
            VIEWERS.set(num_viewers())

    async def _ask(self, hub: Hub, what: str) -> str:
        if num_viewers() >= MAX_STREAMS:
            return PROCESS_IS_FULL
        limits = list(self._limits())
        for key, setting in limits:
            if 0 < int(getattr(settings, setting)) <= _open_here[key]:
                return setting
        place = await self._in_redis(hub, what, allowed=[int(getattr(settings, setting)) for _, setting in limits])
        return limits[place - 1][1] if place else ""

    async def _in_redis(self, hub: Hub, what: str, *, allowed: list[int]) -> int:
        """Number of the limit that is reached, counted from 1; 0 where none is, and where Redis cannot say."""
        if hub.is_down:
            return 0
        arguments: list[Any] = [self._name, what, HELD_S, *allowed]
        try:
            return int(await hub.evaluate(_ASK, self._keys(), arguments))
        except _AWAY:
            return 0

    def _limits(self) -> Iterator[tuple[str, str]]:
        yield f"streams:person:{self.user_id}", "HEADROOM_MAX_STREAMS_PER_PERSON"
        if self.project_id:
            yield f"streams:project:{self.project_id}", "HEADROOM_MAX_STREAMS_PER_PROJECT"

    def _keys(self) -> list[str]:
        return [key for key, _ in self._limits()]


def full_words(full: str) -> str:
    """A sentence on the limit that leaves no room."""
    if full == PROCESS_IS_FULL:
        return "too many live streams are open"
    whose = "this job's project" if full.endswith("PROJECT") else "you"
    return f"too many live streams are open: {whose} may have {getattr(settings, full):,} at once ({full})"


def num_viewers() -> int:
    """Streams that are open on this process."""
    return _open_here[_ALL]
