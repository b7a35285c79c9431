"""Databases that are locked, lost, restarted, full of others, or reached badly."""

import contextlib
import random
import sqlite3
from collections.abc import Iterator

import psycopg

from tests.chaos.faults.fault import fault, require
from tests.chaos.proxy import Manner
from tests.chaos.world import World
from tests.postgresql import postgresql_folder, restart_postgresql

SQLITE, POSTGRESQL = frozenset({"sqlite"}), frozenset({"postgresql"})


@contextlib.contextmanager
def _session(world: World) -> Iterator[psycopg.Connection]:
    folder = postgresql_folder(world.postgresql_url or "")
    with psycopg.connect(host=str(folder), user="headroom", dbname="postgres", autocommit=True) as session:
        yield session


@fault("somebody holds SQLite's write lock", place="database", lasts_s=(1.0, 8.0), on=SQLITE)
def lock_sqlite(world: World, chance: random.Random) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(world.home / "headroom.sqlite3", timeout=10, isolation_level=None)) as own:
        own.execute("BEGIN IMMEDIATE")
        yield
        own.execute("ROLLBACK")


@fault("somebody reads SQLite for long", place="database", lasts_s=(2.0, 5.0), on=SQLITE)
def read_sqlite(world: World, chance: random.Random) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(world.home / "headroom.sqlite3", timeout=10, isolation_level=None)) as own:
        own.execute("BEGIN")
        own.execute("SELECT COUNT(*) FROM jobs_job").fetchall()
        yield
        own.execute("ROLLBACK")


@fault("somebody locks the table of jobs", place="database", lasts_s=(1.0, 5.0), on=POSTGRESQL)
def lock_table(world: World, chance: random.Random) -> Iterator[None]:
    with _session(world) as session, session.transaction():
        session.execute("SET LOCAL lock_timeout = '5s'")
        session.execute("LOCK TABLE jobs_job IN ACCESS EXCLUSIVE MODE")
        yield


@fault("every session is ended", place="database", on=POSTGRESQL)
def end_sessions(world: World, chance: random.Random) -> Iterator[None]:
    with _session(world) as session:
        ended = session.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid()")
        require(ended.rowcount, "nobody was connected")
    yield


@fault("PostgreSQL restarts", place="database", on=POSTGRESQL)
def restart(world: World, chance: random.Random) -> Iterator[None]:
    restart_postgresql(world.postgresql_url or "", mode="fast")
    yield


@fault("PostgreSQL crashes and recovers", place="database", on=POSTGRESQL)
def crash(world: World, chance: random.Random) -> Iterator[None]:
    restart_postgresql(world.postgresql_url or "", mode="immediate")
    yield


@fault("others use up PostgreSQL's connections", place="database", lasts_s=(1.0, 4.0), on=POSTGRESQL)
def use_up_connections(world: World, chance: random.Random) -> Iterator[None]:
    with contextlib.ExitStack() as taken:
        for _ in range(200):
            try:
                taken.enter_context(_session(world))
            except psycopg.OperationalError:
                break
        else:
            require(False, "there was no end of them")
        yield


def _pass_on(world: World, manner: Manner) -> Iterator[None]:
    proxy = world.database_proxy
    assert proxy is not None
    before = proxy.num_harmed
    proxy.pass_on(manner)
    yield
    proxy.pass_on("well")
    require(proxy.num_harmed > before, "nothing passed meanwhile")


@fault("what goes to PostgreSQL is late", place="database", lasts_s=(1.0, 3.0), on=POSTGRESQL)
def late_database(world: World, chance: random.Random) -> Iterator[None]:
    yield from _pass_on(world, "late")


@fault("what goes to PostgreSQL comes in slices", place="database", lasts_s=(1.0, 3.0), on=POSTGRESQL)
def sliced_database(world: World, chance: random.Random) -> Iterator[None]:
    yield from _pass_on(world, "sliced")


@fault("nothing gets through to PostgreSQL", place="database", lasts_s=(1.0, 4.0), on=POSTGRESQL)
def lost_database(world: World, chance: random.Random) -> Iterator[None]:
    yield from _pass_on(world, "not at all")


@fault("every connection to PostgreSQL is cut", place="database", on=POSTGRESQL)
def cut_database(world: World, chance: random.Random) -> Iterator[None]:
    assert world.database_proxy is not None
    require(world.database_proxy.cut(), "nobody was connected")
    yield
