"""Keeps processes for ranks, since each takes seconds to start torch; one that died is started again when it is next needed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
_MODULE = "tests.optimizer.runtime.ranks.rank_process"


class RankPool:
    """Processes that carry out commands together, as the ranks 0 to n - 1. Call ``close`` at the end."""

    def __init__(
        self,
        folder: Path,
        *,
        num_ranks: int,
        module: str = _MODULE,
        prefix: Callable[[int], Sequence[str]] = lambda rank: (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """folder: for rendezvous and what processes print. num_ranks: to start with. module: what each runs. prefix: words before
        a rank's command. environment: beside this process's own.
        """
        self._folder = folder
        self._module = module
        self._prefix = prefix
        self._environment = environment
        self._processes: list[subprocess.Popen[str]] = []
        self._num_commands = 0
        self._ensure(num_ranks)

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait(timeout=30)
            _release(process)

    def run(self, command: dict[str, Any], *, num_ranks: int, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Give each rank the command with its place; returns their answers, of one that died its exit code as ``died``."""
        self.begin(command, num_ranks=num_ranks, timeout_s=timeout_s)
        return [self._read(process) for process in self._processes[:num_ranks]]

    @property
    def processes(self) -> Sequence[subprocess.Popen[str]]:
        """In the order of ranks."""
        return self._processes

    def begin(self, command: dict[str, Any], *, num_ranks: int, timeout_s: float = 60.0) -> None:
        """Give each rank the command and wait for none."""
        self._ensure(num_ranks)
        self._num_commands += 1
        folder = self._folder / f"rendezvous-{self._num_commands}"
        for rank, process in enumerate(self._processes[:num_ranks]):
            place = {"rank": rank, "num_ranks": num_ranks, "folder": str(folder), "timeout_s": timeout_s}
            process.stdin.write(json.dumps({**command, "place": place}) + "\n")
            process.stdin.flush()

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        line = process.stdout.readline()
        if not line:
            return {"died": process.wait(timeout=30)}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ensure(self, num_ranks: int) -> None:
        started = []
        for rank in range(num_ranks):
            if rank == len(self._processes):
                self._processes.append(self._start(rank))
            elif self._processes[rank].poll() is not None:
                _release(self._processes[rank])
                self._processes[rank] = self._start(rank)
            else:
                continue
            started.append(self._processes[rank])
        for process in started:
            # Waits for others have a deadline, which is not to begin while one of them imports torch.
            assert self._read(process) == {"is_ready": True}

    def _start(self, rank: int) -> subprocess.Popen[str]:
        with (self._folder / "stderr.txt").open("a") as errors:
            return subprocess.Popen(
                [*self._prefix(rank), sys.executable, "-m", self._module],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HEADROOM_NUM_THREADS": "1", **self._environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )


def _release(process: subprocess.Popen[str]) -> None:
    process.stdin.close()
    process.stdout.close()
