"""``/healthz``: the process answers. ``/readyz``: it can do its work, for which Redis is not needed; its state is reported, and
the reconciler's.
"""

import redis
from django.conf import settings
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, HttpResponse, JsonResponse

from webapp.attempts.leading import find_alarm


def healthz(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok\n", content_type="text/plain")


def readyz(request: HttpRequest) -> HttpResponse:
    database = _database_state()
    document = {"database": database, "redis": _redis_state()}
    if database == "ok":
        document["reconciler"] = "silent: jobs of lost workers are not given back" if find_alarm() else "ok"
    return JsonResponse(document, status=200 if database == "ok" else 503)


def _database_state() -> str:
    try:
        executor = MigrationExecutor(connection)
        waiting = executor.migration_plan(executor.loader.graph.leaf_nodes())
    except DatabaseError:
        return "unreachable"
    return "not migrated" if waiting else "ok"


def _redis_state() -> str:
    client = redis.Redis.from_url(settings.REDIS_URL, socket_timeout=0.5, socket_connect_timeout=0.5, retry=None)
    try:
        client.ping()
    except (redis.RedisError, OSError):
        return "unreachable: jobs run, pages poll"
    finally:
        client.close()
    return "ok"
