import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.accuracy import cards, command
from benchmarks.generation import larger, plans, sweep, throughput
from benchmarks.gpu_check import budgets, generations
from optimizer.hardware.machine import Machine
from tests.conftest import made_once

PROBING: Final[tuple[Any, ...]] = (budgets, cards, command, generations, larger, plans, sweep, throughput)


@pytest.fixture(scope="session", autouse=True)
def _one_measured_machine(pytestconfig: pytest.Config) -> Iterator[None]:
    """Measure this machine's rates once, instead of in each benchmark: that is half a minute of a processor, and none of these
    tests asks what the rates are. ``tests/optimizer/hardware/probe`` holds the measuring.
    """

    def measure(folder: Path) -> None:
        from optimizer.hardware.probe.probe import probe_machine

        (folder / "machine.json").write_text(json.dumps(probe_machine(device="cpu", max_s=0.1).to_json()))

    document = json.loads((made_once(pytestconfig, "measured", measure) / "machine.json").read_text())
    machine = Machine.from_json(document)
    with pytest.MonkeyPatch.context() as patch:
        for module in PROBING:
            patch.setattr(module, "probe_machine", lambda name=machine.name, **_: replace(machine, name=name))
        yield
