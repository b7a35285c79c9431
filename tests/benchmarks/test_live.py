"""The summary that the benchmark of live viewers makes of its rows, and its line that can be cut."""

import asyncio
import math
from asyncio.streams import StreamReader, StreamWriter

from benchmarks.live.command import _summary
from benchmarks.live.cuts import CutLine
from benchmarks.live.viewers import Seen, _at, _take


def test_goals_are_judged_on_the_rows_that_are_there() -> None:
    rows = [
        {"what": "viewers", "p99_ms": 251.0, "web_peak_bytes": 150 * 1024**2},
        {"what": "cuts", "num_missing": 0},
    ]
    summary = _summary(rows)
    assert {name: entry["met"] for name, entry in summary.items()} == {
        "sample to browser, p99 (ms)": False,
        "web process (bytes)": True,
        "points missing after cuts": True,
    }


def test_a_percentile_is_one_of_the_measurements() -> None:
    latencies = [float(value) for value in range(1, 101)]
    assert (_at(latencies, 0.5), _at(latencies, 0.99), _at(latencies, 1.0)) == (51.0, 100.0, 100.0)
    assert math.isnan(_at([], 0.5))


def test_a_sample_counts_from_its_own_clock_to_its_arrival() -> None:
    async def see() -> Seen:
        seen = Seen()
        _take(seen, "snapshot", b"{}", 0.0)
        _take(seen, "sample", b'{"step": 7, "time_s": 100.0}', 100.25)
        return seen

    seen = asyncio.run(see())
    assert (seen.steps, seen.latencies_ms, seen.has_snapshot.is_set()) == ({7}, [250.0], True)


def test_a_cut_ends_every_connection_and_takes_new_ones() -> None:
    async def ask(port: int) -> tuple[StreamReader, StreamWriter, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello\n")
        return reader, writer, await reader.readline()

    async def story() -> tuple[bytes, bytes, bytes]:
        async def echo(reader: StreamReader, writer: StreamWriter) -> None:
            while line := await reader.readline():
                writer.write(line)
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        line = CutLine(server.sockets[0].getsockname()[1])
        line.start()
        reader, writer, answer = await ask(line.port)
        line.cut()
        try:
            ended = await reader.read()
        except ConnectionError:
            ended = b""
        writer.close()
        _, again, second = await ask(line.port)
        again.close()
        await asyncio.to_thread(line.stop)
        server.close()
        return answer, ended, second

    assert asyncio.run(story()) == (b"hello\n", b"", b"hello\n")
