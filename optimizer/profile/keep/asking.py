"""A child process that traces one model: begins it, asks it once, and reads what it answers. Torch-free."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from optimizer.base.errors import HeadroomError, ProfilingFailed

_ROOT = Path(__file__).parents[3]


class TracingChild:
    """One process that answers one request."""

    def __init__(self, *, is_lean: bool) -> None:
        search_path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        # -P: not from the working directory, where anything may lie.
        command = [sys.executable, "-P", "-m", "optimizer.profile.keep.child", *(["--lean"] if is_lean else [])]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": search_path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises ProfilingFailed with the last line it wrote."""
        try:
            output, errors = self._process.communicate(json.dumps(request))
        except BaseException:
            self.end()
            raise
        with contextlib.suppress(ValueError):
            answer = json.loads(output)
            if isinstance(answer, dict):
                return answer
        lines = errors.strip().splitlines()
        raise ProfilingFailed(exit_code=self._process.returncode, last_line=lines[-1] if lines else "")

    def end(self) -> None:
        """End the child at once, whatever it does."""
        self._process.kill()
        self._process.communicate()


def ask_child(child: TracingChild, request: dict[str, Any]) -> Any:
    """The profile's document; from a child that imports everything where a lean one cannot. Raises what the trace raised, and
    ProfilingFailed.
    """
    answer = child.ask(request)
    if "again" in answer:
        answer = TracingChild(is_lean=False).ask(request)
    if "error" in answer:
        raise read_error(answer["error"])
    return answer["profile"]


def read_error(document: dict[str, Any]) -> HeadroomError:
    """The error that a child wrote, of its own kind."""
    # Only what optimizer/base/errors.py defines: the service has kinds of its own under some of these codes.
    kinds = {kind.code: kind for kind in _subclasses(HeadroomError) if kind.__module__ == HeadroomError.__module__}
    kind = kinds.get(document["code"], HeadroomError)
    error = kind.__new__(kind)
    HeadroomError.__init__(error, document["message"], hint=document["hint"], **document["fields"])
    return error


def _subclasses(kind: type[HeadroomError]) -> list[type[HeadroomError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _subclasses(child))]
