"""The demo's verdict: each claim must be able to fail."""

import copy
import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headroom.commands.demo import DemoError, DemoJobs, check_jobs, check_weights, print_table, time_limit

MIB = 1024**2


def job(peak_mib: int, *, batch: dict[str, int], sha256: str, loss: float = 4.0, **more: Any) -> dict[str, Any]:
    return {
        "state": "succeeded",
        "reason": "done",
        "step": 150,
        "spec": {"goal": {"device_budget_bytes": 300 * MIB}},
        "plan": {"batch": batch},
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


BATCH = {"micro_batch_size": 8, "num_accumulation_steps": 1}


@pytest.fixture
def jobs() -> DemoJobs:
    return DemoJobs(
        fitted=job(299, batch=BATCH, sha256="a" * 64),
        refused={"state": "failed", "reason": "out_of_device_memory"},  # type: ignore[typeddict-item]
        plain=job(501, batch=BATCH, sha256="a" * 64),
        num_parameters=10_400_000,
    )


def changed(jobs: DemoJobs, **changes: Any) -> DemoJobs:
    """The same jobs with one value replaced, named as job__key or job__part__key."""
    made = copy.deepcopy(jobs)
    for name, value in changes.items():
        if name == "num_parameters":
            return DemoJobs(**{**vars(made), name: value})
        where, *path, key = name.split("__")
        part = getattr(made, where)
        for step in path:
            part = part[step]
        part[key] = value
    return made


def test_all_claims_hold_for_a_good_run(jobs: DemoJobs) -> None:
    claims = check_jobs(jobs)
    assert len(claims) == 6
    assert all(claim.holds for claim in claims)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_parameters": 9_000_000}, "9.0 M parameters"),
        ({"fitted__step": 149}, "for 149 steps"),
        ({"fitted__summary__device_peak_bytes": 301 * MIB}, "stayed within"),
        ({"plain__summary__device_peak_bytes": 499 * MIB}, "of plain training's measured peak"),
        ({"refused__state": "succeeded"}, "plain training in that budget"),
        ({"refused__reason": "internal"}, "plain training in that budget"),
        ({"fitted__summary__validation_loss": 8.5}, "validation loss fell"),
        ({"plain__summary__weights_sha256": "b" * 64}, "differ from plain training's"),
    ],
)
def test_each_claim_fails_alone_when_its_number_is_wrong(jobs: DemoJobs, changes: dict[str, Any], said: str) -> None:
    failed = [claim.text for claim in check_jobs(changed(jobs, **changes)) if not claim.holds]
    assert len(failed) == 1
    assert said in failed[0]


@pytest.mark.parametrize(("loss", "holds"), [(4.001, True), (4.01, False)])
def test_another_micro_batch_is_allowed_float_noise_and_no_more(jobs: DemoJobs, loss: float, holds: bool) -> None:
    other = {"micro_batch_size": 4, "num_accumulation_steps": 2}
    changes = {"fitted__plan__batch": other, "fitted__summary__weights_sha256": "c" * 64}
    made = changed(jobs, **changes, plain__summary__validation_loss=loss)
    assert check_jobs(made)[-1].holds is holds


def test_the_table_sets_both_runs_side_by_side(jobs: DemoJobs) -> None:
    out = io.StringIO()
    print_table(jobs, console=Console(file=out, width=120))
    assert "device peak, measured                  299 MiB               501 MiB" in out.getvalue()
    assert "40 % less device memory for 0 % more time per step" in out.getvalue()


def test_a_folder_that_does_not_load_is_a_claim_that_fails(tmp_path: Path) -> None:
    claim = check_weights(tmp_path, console=Console(quiet=True))
    assert not claim.holds
    assert claim.text.startswith("the exported folder does not load and generate: ")


def test_a_job_that_never_ends_is_given_up() -> None:
    with pytest.raises(DemoError, match="kjv-demo has not ended within"), time_limit(0.05, what="kjv-demo"):
        time.sleep(30)  # ended by the signal
