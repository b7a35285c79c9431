"""The log of an attempt: moments and numbers."""

import re
from pathlib import Path
from typing import Any

import pytest

from optimizer.base.units import MIB
from worker.run.reporter import Reporter

STEP = {
    "type": "sample", "kind": "step", "attempt": 1, "step": 1, "time_s": 1_790_000_000.0,
    "loss": 5.20412, "step_ms": 120.31, "tokens_per_s": 4470.4, "device_peak_bytes": 394 * MIB,
}  # fmt: skip
EVALUATED = {"type": "sample", "kind": "eval", "attempt": 1, "step": 150, "time_s": 1_790_000_060.0, "validation_loss": 5.11}


def logged(capsys: pytest.CaptureFixture[str], folder: Path, *messages: dict[str, Any]) -> list[str]:
    reporter = Reporter(folder, pipe=None)
    for message in messages:
        reporter(message)
    reporter.close()
    return capsys.readouterr().out.splitlines()


def test_measurements_are_logged_with_their_moment_and_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    step, evaluated = logged(capsys, tmp_path, STEP, EVALUATED)
    assert step == "2026-09-21 14:13:20Z step 1, loss 5.2041, 120.3 ms, 4,470 tokens/s, peak 394 MiB"
    assert evaluated == "2026-09-21 14:14:20Z step 150, validation loss 5.1100"


def test_what_it_does_is_logged_with_its_moment(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = logged(
        capsys,
        tmp_path,
        {"type": "started", "resumed_from_step": 40},
        {"type": "phase", "phase": "training", "message": ""},
        {"type": "phase", "phase": "loading", "message": "starting torch"},
        {"type": "checkpoint", "step": 60, "folder": "x", "num_bytes": 3 * MIB},
    )
    assert all(re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\dZ ", line) for line in lines)
    words = [line.split(" ", 2)[2] for line in lines]
    assert words == ["goes on from step 40", "training", "loading: starting torch", "checkpoint of step 60, 3.00 MiB"]


def test_steps_that_come_fast_do_not_fill_the_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    steps = [{**STEP, "step": number} for number in range(1, 200)]
    assert len(logged(capsys, tmp_path, *steps)) == 1


def test_a_generation_is_logged_by_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sample = {"type": "sample", "kind": "generate", "step": 96, "prompts_done": 3, "num_prompts": 8, "tokens_per_s": 51.2}
    (line,) = logged(capsys, tmp_path, {**sample, "attempt": 1, "time_s": 1_790_000_000.0})
    assert line == "2026-09-21 14:13:20Z 3 of 8 prompts, 51 tokens/s"
