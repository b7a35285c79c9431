"""The process of one mirror beside an attempt: ``python -I -m worker.mirrors.program NAME ATTEMPT_FOLDER``.

It reads what the attempt writes to its files and sends it on; the attempt knows nothing of it and never waits for it. It alone
holds the keys of the service it sends to. A service that is away is tried again, and what it has missed is sent then.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path

from worker.mirrors.ending import GRACE_S, Ending
from worker.mirrors.mirror import Mirror, Run, flat
from worker.mirrors.tail import Tail
from worker.mirrors.voice import Voice

PERIOD_S = 2.0
REOPEN_S = 30.0
"""Between two tries to reach a service that was away."""
_PLACES = {"wandb": ("worker.mirrors.to_wandb", "ToWandb"), "mlflow": ("worker.mirrors.to_mlflow", "ToMlflow")}


def main() -> int:
    name, folder = sys.argv[1], Path(sys.argv[2])
    voice = Voice(_take_output(), environment=os.environ)
    ending = Ending(on_overdue=lambda: voice.say(trouble=f"not everything was taken within {GRACE_S:g} s of the run's end"))
    os.nice(10)
    run, last_attempt = read_run(folder)
    run.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    tail = Tail(folder.parent.parent, last_attempt=last_attempt, marks_folder=run.folder, mirror=name)
    Copying(name, run=run, tail=tail, voice=voice).run(ending)
    sys.stdout.flush()
    os._exit(0)  # past what libraries do at exit: all has been said and done, and they may wait for a service that is away


class Copying:
    """Turn after turn until the run's end, or until a later attempt has begun: a worker that was halted may have left this mirror
    over, and the later attempt's own sends what is left and says what has become of the run.
    """

    def __init__(self, name: str, *, run: Run, tail: Tail, voice: Voice) -> None:
        self._name = name
        self._run = run
        self._tail = tail
        self._voice = voice
        self._mirror: Mirror | None = None
        self._reopen_at_s = 0.0

    def run(self, ending: Ending) -> None:
        is_over = False
        while not is_over and not self._tail.is_passed_on:
            is_over = ending.wait(PERIOD_S)
            if self._mirror is not None or is_over or time.monotonic() >= self._reopen_at_s:
                self._turn(ending.word if is_over else None)

    def _turn(self, ending: str | None) -> None:
        if self._tail.is_passed_on:
            return
        try:
            mirror = self._open()
            while events := self._tail.next():
                mirror.log(events)
                self._tail.keep()
            if ending is not None and not self._tail.is_passed_on:
                mirror.finish(ending)
            self._voice.say(trouble="")
        except ImportError as error:
            self._voice.say(trouble=f"{error}; on this worker: pip install 'headroom[{self._name}]'")
        except Exception as error:  # whatever a library raises is a warning on the run
            self._voice.say(trouble=f"{type(error).__name__}: {error}")
        finally:
            self._reopen_at_s = time.monotonic() + REOPEN_S

    def _open(self) -> Mirror:
        if self._mirror is None:
            module, class_name = _PLACES[self._name]
            self._mirror = getattr(importlib.import_module(module), class_name)(self._run)
            self._voice.say(url=self._mirror.url)
        return self._mirror


def read_run(folder: Path) -> tuple[Run, int]:
    """The run, and the attempt's number, from ``attempt.json``."""
    brief = json.loads((folder / "attempt.json").read_text())
    shown = {name: brief[name] for name in ("kind", "device", "workload", "goal", "prediction") if brief.get(name)}
    mirrored = brief["mirrored"]
    return Run(
        id=brief["job_id"],
        name=mirrored["name"],
        url=mirrored["url"],
        config=flat({**mirrored["config"], **shown}),
        folder=folder.parent.parent / "mirrors",
    ), int(brief["attempt"])


def _take_output() -> int:
    """Keep standard output for the voice; what libraries print goes nowhere, since it may name a key."""
    fd = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return fd


if __name__ == "__main__":
    sys.exit(main())
