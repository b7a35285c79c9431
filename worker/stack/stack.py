"""The embedded stack: Valkey, the web server, a Celery worker and the reconciler, under one supervisor.

``python -m worker.stack up [--foreground] | down | status | backup | restore``, and behind ``headroom up`` and ``make up``.
All state lives in one folder, ``HEADROOM_HOME``. A ``flock`` held by the supervisor says whether it runs; it is free the moment
the supervisor is gone, however it went, so there is no stale lock. A database and broker named by ``DATABASE_URL`` and
``REDIS_URL`` are used rather than started.
"""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from optimizer.base.units import format_duration
from worker.stack.backup.command import run_backup_command
from worker.stack.backup.contents import BackupError
from worker.stack.home import PROGRAM_FOLDER, Stack, StackError, check_port, prepare_home, write_private
from worker.stack.supervisor import services_of

READY_LIMIT_S = 120.0
"""From the start to an answer of /readyz; a cold start on two busy cores takes a quarter of it."""


def start_stack(stack: Stack, *, foreground: bool) -> None:
    """Prepare the folder, start everything, return when it answers; in the foreground, when it has ended."""
    running = find_running(stack)
    if running is not None:
        raise StackError(_where(stack, running), hint="Stop it with: make down")
    if foreground:
        # A shell without job control starts what stands in its background with Ctrl-C ignored; here it must count.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(0o077)  # whatever any of the processes writes is this user's alone
    prepare_home(stack)
    check_port(stack)
    run_manage(stack, "collectstatic", "--noinput", "--verbosity", "0")
    for line in prepare_database(stack):
        print(line, flush=True)
    supervisor = spawn_supervisor(stack, foreground=foreground)
    try:
        wait_ready(stack, supervisor)
    except BaseException:
        supervisor.terminate()
        supervisor.wait()
        raise
    print(f"Headroom runs at {stack.url}", flush=True)
    if foreground:
        _stay_until_end(supervisor)


def _where(stack: Stack, running: dict[str, Any]) -> str:
    return (
        f"Headroom is already running at {running.get('url', stack.url)} (process {running.get('pid', 'unknown')}, "
        f"state in {stack.home})"
    )


def stop_stack(stack: Stack) -> None:
    """Ask the supervisor to end and wait for it; running jobs save first."""
    running = find_running(stack)
    if running is None:
        print("Headroom is not running")
        return
    pid = running.get("pid")
    if not isinstance(pid, int):
        raise StackError(f"something holds {stack.lock_file} but {stack.state_file} does not say which process")
    print("stopping; running jobs save first")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + sum(service.stop_s for service in services_of(stack)) + 10
    while find_running(stack) is not None:
        if time.monotonic() > deadline:
            raise StackError(f"process {pid} has not ended", hint=f"See {stack.log_folder}/stack.log")
        time.sleep(0.1)
    print("stopped")


def print_status(stack: Stack) -> int:
    """0 when it runs, 1 when it does not."""
    running = find_running(stack)
    if running is None:
        print(f"Headroom is not running (state in {stack.home}); start it with: make up")
        return 1
    print(f"Headroom runs at {running.get('url')} (process {running.get('pid')}, state in {stack.home})")
    for row in running.get("services", []):
        state = f"process {row['pid']}" if row["pid"] else "being started again"
        restarts = f", restarted {row['num_restarts']} times" if row["num_restarts"] else ""
        print(f"  {row['name']:<11} {state}{restarts}, log {stack.log_folder / row['name']}.log")
    return 0


def find_running(stack: Stack) -> dict[str, Any] | None:
    """The state that a running supervisor wrote; None when none holds the lock."""
    try:
        with stack.lock_file.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except BlockingIOError:
        return stack.read_state()
    except OSError as error:
        raise StackError(f"HEADROOM_HOME {stack.home} cannot be used: {error.strerror}") from error
    return None


def run_manage(stack: Stack, *arguments: str) -> str:
    """One command of manage.py, its output returned; a failure is reported by its last line, the rest is in the log."""
    done = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=PROGRAM_FOLDER,
        env=stack.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return done.stdout
    log_file = stack.log_folder / "manage.log"
    log_file.write_text(done.stderr)
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise StackError(f"manage.py {arguments[0]} failed: {reason}", hint=f"See {log_file}")


def prepare_database(stack: Stack) -> list[str]:
    """Migrate, make what ships with the program. On the first start also the admin; returns what to show the person, once."""
    output = run_manage(stack, "setup_headroom", "--json")
    made = read_credentials(output)
    if not made:
        return []
    write_private(stack.credentials_file, json.dumps({"url": stack.url, "token": made["token"]}))
    return [
        f"first start; sign in at {stack.url} (this is shown once)",
        f"  user      {made['user']}",
        f"  password  {made['password']}",
        f"  API token {made['token']}  (kept for the command line in {stack.credentials_file})",
    ]


def read_credentials(output: str) -> dict[str, str]:
    """The JSON line that ``setup_headroom`` prints when it has made the admin; empty when there was one already."""
    for line in output.splitlines():
        if line.startswith("{"):
            document = json.loads(line)
            if {"user", "password", "token"} <= set(document):
                return {key: str(document[key]) for key in ("user", "password", "token")}
    return {}


def spawn_supervisor(stack: Stack, *, foreground: bool) -> "subprocess.Popen[bytes]":
    """In its own session either way; in the foreground this process passes Ctrl-C on and waits."""
    with (stack.log_folder / "stack.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "worker.stack.supervisor", *(["--with-parent"] if foreground else [])],
            cwd=PROGRAM_FOLDER,
            env=stack.environment(),
            stdin=subprocess.PIPE if foreground else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_ready(stack: Stack, supervisor: "subprocess.Popen[bytes]") -> None:
    """Until /readyz answers 200. What went wrong otherwise is said with the end of the log it stands in."""
    deadline = time.monotonic() + READY_LIMIT_S
    answer = "no answer"
    while time.monotonic() < deadline:
        if supervisor.poll() is not None:
            raise StackError(f"the supervisor ended at once\n{tail(stack.log_folder / 'stack.log')}")
        try:
            response = httpx.get(f"{stack.url}/readyz", timeout=5, trust_env=False)
        except httpx.TransportError:
            time.sleep(0.2)
            continue
        if response.status_code == 200:
            return
        answer = f"{response.status_code} {response.text[:300]}"
        time.sleep(0.2)
    raise StackError(
        f"not ready after {format_duration(READY_LIMIT_S)} ({answer})\n{tail(stack.log_folder / 'web.log')}",
        hint=f"The logs are in {stack.log_folder}",
    )


def tail(file: Path, *, num_lines: int = 12) -> str:
    with contextlib.suppress(FileNotFoundError):
        return "\n".join(file.read_text(errors="replace").splitlines()[-num_lines:])
    return ""


def _stay_until_end(supervisor: "subprocess.Popen[bytes]") -> None:
    print("Ctrl-C stops it", flush=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.terminate())
    supervisor.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m worker.stack", description="Start and stop the embedded stack.")
    add_commands(parser.add_subparsers(dest="command", required=True))
    options = parser.parse_args(arguments)
    try:
        return run_command(options)
    except KeyboardInterrupt:
        return 130
    except (StackError, BackupError) as error:
        print(f"headroom: {error.message}" + (f"\n  {error.hint}" if error.hint else ""), file=sys.stderr)
        return 1


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """``up``, ``down``, ``status``, ``backup`` and ``restore``, for this module's command line and for ``headroom``."""
    up = commands.add_parser("up", help="start the service, say where it is")
    up.add_argument("--foreground", action="store_true", help="stay, and stop it on Ctrl-C")
    up.add_argument("--if-needed", action="store_true", help="say nothing more when it runs already")
    commands.add_parser("down", help="stop the service; running jobs save first")
    commands.add_parser("status", help="say what runs, and where")
    backup = commands.add_parser("backup", help="copy the whole service into a folder, while it runs")
    backup.add_argument("folder", type=Path, metavar="FOLDER", help="a new one, best on another disk; it will hold secrets")
    restore = commands.add_parser("restore", help="put a backup into an empty folder, from which the service can start")
    restore.add_argument("folder", type=Path, metavar="FOLDER", help="that backup made")
    restore.add_argument("--into", type=Path, metavar="HOME", help="an empty or new folder (default: HEADROOM_HOME)")


def run_command(options: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    if options.command in ("backup", "restore"):
        return run_backup_command(options, home=stack.home)
    if options.command == "status":
        return print_status(stack)
    if options.command == "down":
        stop_stack(stack)
    elif not options.foreground and (running := find_running(stack)) is not None:
        # what was asked for is so already: no error, and make prints none
        print(f"Headroom runs at {running.get('url', stack.url)}" if options.if_needed else _where(stack, running))
    else:
        start_stack(stack, foreground=options.foreground)
    return 0
