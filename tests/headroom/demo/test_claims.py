"""The demo's verdict: each claim must be able to fail."""

import copy
import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headroom.demo.answers import QUESTIONS, Answers, ask_both, names_place
from headroom.demo.claims import check_chat, check_exact
from headroom.demo.jobs import ChatJobs, DemoError, ExactJobs, time_limit
from headroom.demo.shown import print_table

MIB = 1024**2
BATCH = {"micro_batch_size": 8, "num_accumulation_steps": 1}
ANSWERS = [Answers(question=question, base="And he said.", tuned="He said: (1 Kings 8:27)") for question in QUESTIONS]


def job(peak_mib: int, *, sha256: str = "", loss: float = 4.0, **more: Any) -> dict[str, Any]:
    return {
        "state": "succeeded",
        "reason": "done",
        "step": 20,
        "spec": {"goal": {"device_budget_bytes": 300 * MIB}},
        "plan": {"batch": BATCH},
        "prediction": {"device_peak_bytes": peak_mib * MIB, "step_ms": 900.0},
        "summary": {
            "device_peak_bytes": peak_mib * MIB,
            "step_ms": 1000.0,
            "validation_loss_start": 9.0,
            "validation_loss": loss,
            "weights_sha256": sha256,
        },
        **more,
    }


@pytest.fixture
def chat() -> ChatJobs:
    refused: Any = {"state": "failed", "reason": "out_of_device_memory"}
    tuned: Any = job(299)
    return ChatJobs(tuned=tuned, refused=refused)


@pytest.fixture
def exact() -> ExactJobs:
    fitted: Any = job(299, sha256="a" * 64)
    plain: Any = job(501, sha256="a" * 64)
    return ExactJobs(fitted=fitted, plain=plain, num_parameters=10_400_000)


def changed(jobs: Any, changes: dict[str, Any]) -> Any:
    """The same jobs with one value replaced, named as job__key or job__part__key."""
    made = copy.deepcopy(jobs)
    for name, value in changes.items():
        where, *path, key = name.split("__")
        part = getattr(made, where)
        for step in path:
            part = part[step]
        part[key] = value
    return made


def test_all_claims_hold_for_a_good_run(chat: ChatJobs, exact: ExactJobs) -> None:
    claims = [*check_chat(chat, ANSWERS), *check_exact(exact)]
    assert len(claims) == 8
    assert all(claim.holds for claim in claims)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tuned__summary__device_peak_bytes": 301 * MIB}, "stayed within"),
        ({"tuned__prediction__device_peak_bytes": 290 * MIB}, "was predicted to"),
        ({"refused__state": "succeeded"}, "with no memory saved"),
        ({"refused__reason": "internal"}, "with no memory saved"),
        ({"tuned__summary__validation_loss": 8.5}, "validation loss fell"),
    ],
)
def test_each_claim_of_the_fine_tune_fails_alone(chat: ChatJobs, changes: dict[str, Any], said: str) -> None:
    failed = [claim.text for claim in check_chat(changed(chat, changes), ANSWERS) if not claim.holds]
    assert len(failed) == 1
    assert said in failed[0]


@pytest.mark.parametrize(("base", "tuned"), [("He said: (Psalms 3:6)", "He said: (Psalms 3:6)"), ("And he.", "And he.")])
def test_answers_that_do_not_differ_as_they_should_fail(chat: ChatJobs, base: str, tuned: str) -> None:
    answers = [Answers(question="What?", base=base, tuned=tuned)]
    failed = [claim.text for claim in check_chat(chat, answers) if not claim.holds]
    assert len(failed) == 1
    assert "answers as the chats do" in failed[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fitted__summary__device_peak_bytes": 301 * MIB}, "of exact training took"),
        ({"plain__summary__device_peak_bytes": 499 * MIB}, "of plain training's measured peak"),
        ({"plain__summary__weights_sha256": "b" * 64}, "differ from plain training's"),
    ],
)
def test_each_claim_of_exact_training_fails_alone(exact: ExactJobs, changes: dict[str, Any], said: str) -> None:
    failed = [claim.text for claim in check_exact(changed(exact, changes)) if not claim.holds]
    assert len(failed) == 1
    assert said in failed[0]


@pytest.mark.parametrize(("loss", "holds"), [(4.001, True), (4.01, False)])
def test_another_micro_batch_is_allowed_float_noise_and_no_more(exact: ExactJobs, loss: float, holds: bool) -> None:
    changes = {
        "fitted__plan": {"batch": {"micro_batch_size": 4, "num_accumulation_steps": 2}},
        "fitted__summary__weights_sha256": "c" * 64,
        "plain__summary__validation_loss": loss,
    }
    assert check_exact(changed(exact, changes))[-1].holds is holds


def test_the_table_sets_both_runs_side_by_side(exact: ExactJobs) -> None:
    out = io.StringIO()
    print_table(exact, console=Console(file=out, width=120))
    assert "device peak, measured                  299 MiB               501 MiB" in out.getvalue()
    assert "40 % less device memory, and each step 0 % slower" in out.getvalue()


@pytest.mark.parametrize(
    ("answer", "named"),
    [("It is so. (Genesis 1:1)", True), ("So. (1 Kings 8:27) ", True), ("So. (Genesis 1:1) And", False), ("(3:6)", False)],
)
def test_an_answer_names_its_place_at_its_end(answer: str, named: bool) -> None:
    assert names_place(answer) is named


def test_a_folder_that_does_not_load_ends_the_demo(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="the exported folder does not load and answer: "):
        ask_both(tmp_path)


def test_a_job_that_never_ends_is_given_up() -> None:
    with pytest.raises(DemoError, match="chat-demo has not ended within"), time_limit(0.05, what="chat-demo"):
        time.sleep(30)  # ended by the signal
