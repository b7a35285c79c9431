"""The web service behind its real server, uvicorn on loopback, in the event loop of a test."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from webapp.body_guard import BodyGuard
from webapp.http.handler import Handler
from webapp.live.threads import ChosenThreads
from webapp.server import server_config

LIMIT_S = 60.0
"""Nothing here takes a second; the machine may be busy."""


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    """The port it answers at, for as long as the block runs."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        application = BodyGuard(ChosenThreads(Handler()))
        server = uvicorn.Server(server_config(application, host="127.0.0.1", port=0))
        running = asyncio.create_task(server.serve(sockets=[listening]))
        async with asyncio.timeout(LIMIT_S):
            while not server.started:
                await asyncio.sleep(0.01)
        yield listening.getsockname()[1]
        server.should_exit = True
        async with asyncio.timeout(LIMIT_S):
            await running
            while any(task.get_name() == "live-hub" for task in asyncio.all_tasks()):  # ends with its last viewer
                await asyncio.sleep(0.01)
