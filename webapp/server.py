"""The web server's process: uvicorn, with what this service allows its callers.

``python -m webapp.server [--host HOST] [--port PORT] [--processes NUMBER]``. It believes no ``X-Forwarded-For`` but that of the
proxies that the settings name.
"""

import argparse
import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

import django
import uvicorn
from django.conf import settings

from webapp.connections import GuardedProtocol
from webapp.environment import set_for_web
from webapp.processes import (
    FirstServer,
    default_processes,
    end_with_first,
    is_helper,
    share_metrics,
    shared_socket,
)
from webapp.schema import end_on_newer_database

MAX_CONNECTIONS = 4_000
"""Twice the event streams that one process carries, and half-open ones beside them; above it requests are answered 503."""
SWITCH_S = 0.0005
"""Longest time that a thread goes on while another waits to run Python. With the usual 5 ms the event loop waits so long for its
turn after each event while requests are worked on, and refusals and short answers with it."""
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
    parser.add_argument("--processes", type=int, default=int(os.environ.get("HEADROOM_WEB_PROCESSES") or 0))
    options = parser.parse_args(arguments)
    num_processes = options.processes or default_processes()
    if num_processes < 1:
        parser.error(f"processes is {num_processes}; allowed: at least 1, or 0 for as many as suit this machine")
    if is_helper():
        end_with_first()
    elif num_processes > 1:
        share_metrics()
    sys.setswitchinterval(SWITCH_S)
    bound_memory()
    _allow_open_files()
    set_for_web()
    django.setup(set_prefix=False)
    end_on_newer_database()
    config = server_config("webapp.asgi:application", host=options.host, port=options.port)
    if num_processes == 1 and not is_helper():
        uvicorn.Server(config).run()
        return
    try:
        listening = shared_socket(options.host, options.port)
    except OSError as error:
        raise SystemExit(f"headroom: the web cannot listen on {options.host}, port {options.port}: {error.strerror}") from None
    if is_helper():
        uvicorn.Server(config).run(sockets=[listening])
    else:
        port = listening.getsockname()[1]
        again = ["--host", options.host, "--port", str(port), "--processes", str(num_processes)]
        FirstServer(config, num_helpers=num_processes - 1, arguments=again).run(sockets=[listening])


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
