"""The web server's process: uvicorn, with what this service allows its callers.

``python -m webapp.server [--host HOST] [--port PORT]``. It believes no ``X-Forwarded-For`` but that of the proxies that
the settings name.
"""

import argparse
import contextlib
import ctypes
import resource
from collections.abc import Sequence
from typing import Any

import uvicorn
from django.conf import settings

from webapp.connections import GuardedProtocol
from webapp.schema import end_on_newer_database

MAX_CONNECTIONS = 4_000
"""Twice the event streams that one process carries, and half-open ones beside them; above it requests are answered 503."""
NUM_HEAPS = 2
_MAX_OPEN_FILES = 65_536
_M_ARENA_MAX = -8
"""From glibc's malloc.h."""


def server_config(application: Any, *, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        host=host,
        port=port,
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        proxy_headers=settings.HEADROOM_BEHIND_PROXY,
        forwarded_allow_ips=settings.HEADROOM_TRUSTED_PROXIES,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=5,
        access_log=False,
        log_config=None,  # Django's settings say how
        log_level="warning",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m webapp.server", description="Serve the pages and the API.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8400)
    options = parser.parse_args(arguments)
    bound_memory()
    _allow_open_files()
    from webapp.asgi import application  # loads Django with what a web process sets

    end_on_newer_database()
    uvicorn.Server(server_config(application, host=options.host, port=options.port)).run()


def _allow_open_files() -> None:
    """Open as many files as the system lets this process have: the usual limit of 1,024 is less than a thousand viewers need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bound_memory() -> None:
    """Let all threads share two of the C library's heaps; call it before they start.

    Django gives each request a thread, and the library gives threads up to eight heaps for each core, of which each keeps
    what its busiest moment took. Where the library is not glibc nothing is done.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, NUM_HEAPS)


if __name__ == "__main__":
    main()
