"""One kind of fault: a generator that strikes, yields while the fault lasts, and heals what it broke."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tests.chaos.world import World

Strike = Callable[[World, random.Random], Iterator[None]]
ON_ALL = frozenset({"sqlite", "postgresql"})


class Missed(Exception):
    """Nothing was there to be hit."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Called with a world and a source of chance, it is a context that lasts ``lasts_s`` (from, to)."""

    name: str
    strike: Callable[[World, random.Random], AbstractContextManager[Any]]
    lasts_s: tuple[float, float]
    place: str
    """Part of the service that it strikes: a round strikes each place once at most. Whatever healing does, it undoes its own harm
    alone, since other faults may last: dead processes are started again when all are over."""
    on: frozenset[str] = ON_ALL
    needs_disk: bool = False
    outlasts_lease: bool = False
    """A worker stands still for longer than its lease, and goes on."""

    def is_possible_in(self, world: World) -> bool:
        database = "postgresql" if world.postgresql_url else "sqlite"
        return database in self.on and (world.disk is not None or not self.needs_disk)


def fault(
    name: str, *, place: str, lasts_s: tuple[float, float] = (0.2, 1.0), **more: Any
) -> Callable[[Strike], Fault]:
    """Make a fault of a generator function. more: further fields of ``Fault``."""

    def make(strike: Strike) -> Fault:
        return Fault(name=name, place=place, strike=contextmanager(strike), lasts_s=lasts_s, **more)

    return make


def collect(*modules: ModuleType) -> tuple[Fault, ...]:
    return tuple(value for module in modules for value in vars(module).values() if isinstance(value, Fault))


def require(condition: object, what: str) -> None:
    if not condition:
        raise Missed(what)
