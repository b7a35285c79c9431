"""A slow link to the remote store: ``python -m benchmarks.mixes.link LISTEN TARGET BYTES_PER_S`` relays between two Unix sockets.

All connections share one rate in each direction, as jobs on one machine share its network. A process of its own, so that what
it relays costs the measured ones no interpreter. Ends with its standard input.
"""

import asyncio
import contextlib
import sys
import time

_READ_BYTES = 64 * 1024


class _Direction:
    """Pieces pass one after the other, each for as long as its bytes take."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def take(self, num_bytes: int) -> None:
        self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self._bytes_per_s
        await asyncio.sleep(max(0.0, self._free_s - time.monotonic()))


async def _relay(listen: str, target: str, bytes_per_s: float) -> None:
    there, back = _Direction(bytes_per_s), _Direction(bytes_per_s)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: _Direction) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_READ_BYTES):
                await direction.take(len(piece))
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_unix_connection(target)
        await asyncio.gather(pump(reader, to_writer, there), pump(to_reader, writer, back))

    server = await asyncio.start_unix_server(serve, listen)
    async with server:
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_relay(sys.argv[1], sys.argv[2], float(sys.argv[3])))
