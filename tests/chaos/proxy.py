"""A relay between a service's Unix socket and its clients, which passes bytes on well or badly, as it is asked to."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

Manner = Literal["well", "late", "sliced", "not at all"]
LATE_S = 0.25
"""Wait before each piece that is passed on late."""
_READ_BYTES = 64 * 1024
_MOST_SLICES = 50
"""Largest slice of one piece; the rest of it goes in one, so that a large answer does not take minutes."""


class FaultProxy:
    """Listens at ``listen`` and passes on to ``target``, both paths of Unix sockets; the target may come and go."""

    def __init__(self, listen: Path, target: Path) -> None:
        self.num_harmed = 0
        """Pieces passed on late, in slices or not at all, and connections that were cut or refused."""
        self._listen, self._target = listen, target
        self._manner: Manner = "well"
        self._writers: set[asyncio.StreamWriter] = set()
        self._random = random.Random(0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy of {target.name}", daemon=True)
        self._thread.start()
        self._call(self._open())

    def pass_on(self, manner: Manner) -> None:
        """From now on, also on connections that are open."""

        async def change() -> None:
            self._manner = manner
            async with self._changed:
                self._changed.notify_all()

        self._call(change())

    def cut(self) -> int:
        """End every open connection without a word; the number of them."""

        async def abort() -> int:
            writers = list(self._writers)
            for writer in writers:
                writer.transport.abort()
            self.num_harmed += len(writers)
            return len(writers)

        return self._call(abort())

    def close(self) -> None:
        async def end() -> None:
            self._loop.set_exception_handler(lambda *_: None)  # callbacks of what is cancelled
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    async def _open(self) -> None:
        self._changed = asyncio.Condition()
        self._server = await asyncio.start_unix_server(self._serve, str(self._listen))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.ExitStack() as ends:
            self._keep(writer, ends.callback)
            await self._wait_while_nothing_passes()
            try:
                to_reader, to_writer = await asyncio.open_unix_connection(str(self._target))
            except OSError:
                return  # the target is away, and the client sees that as it would without this relay
            self._keep(to_writer, ends.callback)
            pumps = [asyncio.create_task(self._pump(reader, to_writer)), asyncio.create_task(self._pump(to_reader, writer))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()

    def _keep(self, writer: asyncio.StreamWriter, at_end: Callable[..., Any]) -> None:
        self._writers.add(writer)
        at_end(self._writers.discard, writer)
        at_end(writer.close)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_READ_BYTES):
                await self._wait_while_nothing_passes()
                if self._manner == "late":
                    self.num_harmed += 1
                    await asyncio.sleep(LATE_S)
                for part in self._parts(piece):
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)

    async def _wait_while_nothing_passes(self) -> None:
        if self._manner == "not at all":
            self.num_harmed += 1
            async with self._changed:
                await self._changed.wait_for(lambda: self._manner != "not at all")

    def _parts(self, piece: bytes) -> list[bytes]:
        if self._manner != "sliced":
            return [piece]
        self.num_harmed += 1
        parts: list[bytes] = []
        begin = 0
        while begin < len(piece) and len(parts) < _MOST_SLICES:
            end = begin + self._random.randint(1, 16)
            parts.append(piece[begin:end])
            begin = end
        return [*parts, piece[begin:]]
