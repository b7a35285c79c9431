"""A followed job in a terminal: what is drawn for which events."""

import io
from typing import Any

import pytest
from rich.console import Console

from headroom.client import StreamEvent
from headroom.commands.terminal import (
    CATEGORY_COLOURS,
    CATEGORY_SIGNS,
    JobView,
    figures,
    headline,
    memory_bar,
    memory_words,
    plain_line,
    progress_bar,
    render,
    watch,
)
from optimizer.base.categories import CATEGORIES

MIB = 1024**2
JOB: dict[str, Any] = {
    "id": "job_1",
    "name": "kjv-demo",
    "state": "running",
    "phase": "training",
    "is_terminal": False,
    "step": 0,
    "num_steps": 400,
    "spec": {"goal": {"device_budget_bytes": 480 * MIB}},
    "prediction": {"device_peak_bytes": 409 * MIB},
    "summary": {},
}
STEP: dict[str, Any] = {
    "kind": "step",
    "step": 128,
    "loss": 3.9123,
    "step_ms": 1000.0,
    "tokens_per_s": 1240.4,
    "device_peak_bytes": 412 * MIB,
    "device_bytes": {"weights": 240 * MIB, "activations": 172 * MIB},
}


def fed(*events: Any) -> JobView:
    view = JobView(job=JOB)
    for kind, data in events:
        view.feed(StreamEvent(kind=kind, data=data))
    return view


def test_every_category_has_its_own_colour_and_sign() -> None:
    assert set(CATEGORY_COLOURS) == set(CATEGORY_SIGNS) == set(CATEGORIES)
    assert len(set(CATEGORY_COLOURS.values())) == len(set(CATEGORY_SIGNS.values())) == len(CATEGORIES)


def test_headline_says_state_phase_step_and_time_left() -> None:
    assert headline(fed(("sample", STEP))) == "kjv-demo  running · training · step 128 of 400 · 5 min left"


def test_memory_words_compare_the_prediction_with_the_measured_peak() -> None:
    assert memory_words(fed(("sample", STEP))) == "peak 412 MiB of 480 MiB · predicted 409 MiB (-0.7 %)"


def test_figures_show_speed_loss_and_validation() -> None:
    view = fed(("sample", STEP), ("sample", {"kind": "eval", "step": 100, "validation_loss": 4.2}))
    assert figures(view) == "1,240 tok/s · loss 3.912 · validation 4.200"


def test_an_older_summary_does_not_take_back_a_newer_evaluation() -> None:
    evaluated = ("sample", {"kind": "eval", "step": 100, "validation_loss": 4.2})
    older = {"state": "running", "summary": {"validation_loss": 6.1}}
    assert fed(evaluated, ("state", older)).validation_loss == 4.2
    ended = {"state": "succeeded", "is_terminal": True, "summary": {"validation_loss": 4.1}}
    assert fed(evaluated, ("done", ended)).validation_loss == 4.1


def test_peak_is_the_largest_of_all_steps_not_the_last() -> None:
    view = fed(("sample", STEP), ("sample", {**STEP, "step": 129, "device_peak_bytes": 300 * MIB}))
    assert view.peak_bytes == 412 * MIB


def test_memory_bar_stacks_categories_in_order_and_is_as_long_as_their_share_of_the_budget() -> None:
    bar = memory_bar(STEP["device_bytes"], limit_bytes=480 * MIB, cells=48)
    assert bar.plain == CATEGORY_SIGNS["weights"] * 24 + CATEGORY_SIGNS["activations"] * 17 + " " * 7 + "▏"


def test_memory_bar_never_passes_the_budget_line() -> None:
    bar = memory_bar({"weights": 900 * MIB}, limit_bytes=480 * MIB, cells=48)
    assert bar.plain == CATEGORY_SIGNS["weights"] * 48 + "▏"


@pytest.mark.parametrize(("done", "filled", "words"), [(0, 0, "0 %"), (100, 12, "25 %"), (400, 48, "100 %")])
def test_progress_bar_fills_with_the_steps(done: int, filled: int, words: str) -> None:
    assert progress_bar(done, 400, cells=48).plain == "█" * filled + "─" * (48 - filled) + f"  {words}"


def test_a_lost_connection_is_said_and_taken_back_by_the_next_event() -> None:
    view = fed(("sample", STEP), ("lost", {"num_lost": 1}))
    assert "connection lost, resuming" in headline(view)
    view.feed(StreamEvent(kind="sample", data={**STEP, "step": 129}))
    assert "connection lost" not in headline(view)


def test_an_ended_job_shows_no_time_left() -> None:
    done = {**JOB, "state": "succeeded", "is_terminal": True, "step": 400}
    assert headline(fed(("sample", STEP), ("done", {"job": done}))) == "kjv-demo  succeeded · step 400 of 400"


def test_without_a_terminal_each_change_of_phase_is_one_plain_line() -> None:
    out = io.StringIO()
    events = [
        StreamEvent(kind="state", data={**JOB, "phase": "profiling"}),
        StreamEvent(kind="state", data={**JOB, "phase": "training"}),
        StreamEvent(kind="sample", data=STEP),
        StreamEvent(kind="done", data={**JOB, "state": "succeeded", "is_terminal": True}),
    ]
    view = watch(JobView(job=JOB), events, console=Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[1].split(" · ")[0:2] for line in lines[:2]] == [["running", "profiling"], ["running", "training"]]
    assert lines[-1] == plain_line(view)
    assert "\x1b" not in out.getvalue()


def test_without_a_terminal_no_line_is_said_twice_in_a_row() -> None:
    out = io.StringIO()
    done = StreamEvent(kind="done", data={**JOB, "state": "succeeded", "is_terminal": True})
    watch(JobView(job=JOB), [done, done], console=Console(file=out, width=200))
    assert len(out.getvalue().splitlines()) == 1


def test_in_a_terminal_the_block_shows_bar_legend_and_figures() -> None:
    out = io.StringIO()
    events = [StreamEvent(kind="sample", data=STEP)]
    watch(JobView(job=JOB), events, console=Console(file=out, width=160, force_terminal=True, color_system="truecolor"))
    shown = out.getvalue()
    assert "weights 240 MiB" in shown
    assert "peak 412 MiB of 480 MiB" in shown
    assert "38;2;0;158;115" in shown  # the green of activations


def test_a_narrow_terminal_has_shorter_bars_that_do_not_wrap() -> None:
    view = JobView(job={"name": "x", "state": "running", "step": 60, "num_steps": 120})
    console = Console(width=40, record=True, file=io.StringIO())
    console.print(render(view, width=console.width))
    bar = console.export_text().splitlines()[1]
    assert bar.endswith("50 %")
    assert len(bar) <= 40
