"""Specs of generate jobs: priced with a real profile and real token counts, made into jobs, refused by field."""

from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.errors import InvalidInput, NoFeasiblePlan, PlanStale
from optimizer.base.serialize import to_json
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.estimate.generation.runs import price_run
from optimizer.hardware.calibration import of_generations
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.passes.arrange import MicroBatchShape
from optimizer.plan.passes.run import TimedPass
from optimizer.profile.generation import GenerationProfile
from optimizer.search.generation.baselines import GENERATION_BASELINES
from optimizer.workload import GenerationRequest
from tests.webapp.generation import make_generate_spec, make_prompts, make_writer
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_progress, record_started
from webapp.catalog.models import Dataset, Machine, Model, Profile, PromptTokens
from webapp.jobs.actions import retry_job
from webapp.jobs.models import Job
from webapp.jobs.specs.generation import generation_workload, read_job_spec, summed_workload
from webapp.planning.pricing import price_spec
from webapp.planning.submitting import submit_job

pytestmark = pytest.mark.django_db


def submit(user: User, spec: dict[str, Any], **how: Any) -> Job:
    return submit_job(user, spec=spec, actor=f"user:{user.username}", **how)


def test_a_model_that_never_generated_is_profiled_first(ada: User, machine: Machine, prompts: Dataset) -> None:
    answer = price_spec(ada, make_generate_spec(make_writer(), prompts))
    assert answer.to_json() == {"profile": "pending", "waiting_for": "profile"}
    assert Job.objects.get().spec["generates"]


def test_the_best_plan_stands_beside_the_baselines_and_all_fit(
    ada: User, machine: Machine, writer: Model, prompts: Dataset
) -> None:
    answer = price_spec(ada, make_generate_spec(writer, prompts)).to_json()
    labels = [offer["label"] for offer in answer["offers"]]
    assert labels[0] == "chosen"
    assert set(labels[1:]) <= set(GENERATION_BASELINES)
    chosen = answer["offers"][0]
    assert (chosen["chosen"], chosen["verdict"], chosen["lossless"]) == (True, "fits", True)
    assert GenerationPlan.from_json(chosen["plan"]).batch_size == 2
    assert chosen["explanation"]


def test_plans_are_shown_with_the_price_of_the_lengths_as_they_are(ada: User, machine: Machine, writer: Model) -> None:
    mixed = make_prompts({"prompt": "And"}, {"prompt": "And God said, Let there be light"}, owner=ada)
    spec = make_generate_spec(writer, mixed)
    workload = generation_workload(read_job_spec(ada, spec))
    assert len(set(workload.prompt_lengths)) == 2
    profile = GenerationProfile.from_json(Profile.objects.get().document)
    target = MachineSpec.from_json(machine.document)
    for offer in price_spec(ada, spec).offers:
        plan = GenerationPlan.from_json(offer.row.plan)
        exact = estimate_generation(profile, plan=plan, workload=workload, machine=target)
        assert offer.row.prediction["device_peak_bytes"] == exact.device_peak_bytes


def test_lines_that_ask_for_fewer_tokens_make_the_predicted_job_shorter_and_need_no_more(
    ada: User, machine: Machine, writer: Model
) -> None:
    lines = [{"prompt": "And", "max_new_tokens": 40} for _ in range(4)]
    files = [make_prompts(*given, owner=ada) for given in (lines, [lines[0], *({"prompt": "And", "max_new_tokens": 1},) * 3])]
    most, fewer = (price_spec(ada, make_generate_spec(writer, file)).offers[0].row for file in files)
    assert most.plan == fewer.plan
    assert fewer.prediction["total_s"] < most.prediction["total_s"]
    assert fewer.prediction["device_peak_bytes"] <= most.prediction["device_peak_bytes"]


def test_tokens_are_counted_once_for_a_model(
    ada: User, machine: Machine, writer: Model, prompts: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    price_spec(ada, make_generate_spec(writer, prompts))
    monkeypatch.setattr("webapp.catalog.actions.run_limited", None)
    price_spec(ada, make_generate_spec(writer, prompts))
    assert PromptTokens.objects.get().counts[0][2] == 1


def test_an_offer_becomes_a_job_that_counts_prompts(
    ada: User, machine: Machine, writer: Model, prompts: Dataset
) -> None:
    spec = make_generate_spec(writer, prompts)
    offer = price_spec(ada, spec).offers[0].row
    job = submit(ada, spec, plan_id=offer.pk)
    assert (job.kind, job.num_steps, job.dataset, job.plan) == ("generate", 2, prompts, offer.plan)
    assert job.spec["workload"]["max_new_tokens"] == 8
    assert job.need_device_bytes == offer.prediction["device_peak_high_bytes"]


def test_an_offer_for_other_sampling_is_stale(ada: User, machine: Machine, writer: Model, prompts: Dataset) -> None:
    offer = price_spec(ada, make_generate_spec(writer, prompts)).offers[0].row
    changed = make_generate_spec(writer, prompts, workload={"max_new_tokens": 9})
    with pytest.raises(PlanStale, match="priced for another spec"):
        submit(ada, changed, plan_id=offer.pk)


def test_where_nothing_fits_the_smallest_budget_is_named(
    ada: User, machine: Machine, writer: Model, prompts: Dataset
) -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        price_spec(ada, make_generate_spec(writer, prompts, goal={"device_budget_bytes": 1000}))
    assert caught.value.fields["smallest_feasible_bytes"] > 1000
    assert caught.value.fields["offers"]


def test_lines_without_room_are_not_priced_and_a_file_of_nothing_else_is_refused(
    ada: User, machine: Machine, writer: Model
) -> None:
    long = {"prompt": "In the beginning God created the heaven. " * 20}
    some = make_prompts(long, {"prompt": "And"}, owner=ada)
    assert price_spec(ada, make_generate_spec(writer, some)).offers[0].row.plan["batch_size"] == 1
    none = make_prompts(long, owner=ada)
    with pytest.raises(InvalidInput, match="no line can be generated for") as caught:
        price_spec(ada, make_generate_spec(writer, none))
    assert caught.value.fields["field"] == "prompts"


def test_the_price_is_of_each_prompts_length_and_of_the_tokens_that_its_line_asks_for() -> None:
    workload = summed_workload([(4, 8, 3), (20, 2, 1)], max_sequence_length=64)
    assert (workload.prompt_length, workload.num_new_tokens, workload.num_sequences) == (20, 8, 4)
    assert workload.lengths == ((4, 8), (4, 8), (4, 8), (20, 2))
    assert workload.total_new_tokens == 26
    near_the_end = summed_workload([(4, 60, 1), (60, 4, 1)], max_sequence_length=64)
    assert near_the_end.longest == (4, 60)
    GenerationPlan().check(workload=near_the_end, max_sequence_length=64)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"kind": "dance"}, "kind", "allowed: train, generate"),
        ({"dataset": "x"}, "dataset", "not a known field"),
        ({"prompts": "x"}, "prompts", "is not there"),
        ({"goal": None}, "goal", "goal is missing"),
        ({"workload": {"temperature": 3}}, "workload.temperature", "a number from 0 to 2"),
        ({"workload": {"stop": ["a"] * 5}}, "workload.stop", "at most 4 texts"),
        ({"plan": "keep_all"}, "plan", "resident"),
    ],
)
def test_what_is_wrong_is_refused_by_field(
    ada: User, writer: Model, prompts: Dataset, changes: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        read_job_spec(ada, make_generate_spec(writer, prompts, **changes))
    assert caught.value.fields["field"] == field


def test_random_weights_and_texts_to_train_on_are_refused(
    ada: User, model: Model, writer: Model, prompts: Dataset, dataset: Dataset
) -> None:
    with pytest.raises(InvalidInput, match="has no weights"):
        read_job_spec(ada, make_generate_spec(model, prompts))
    with pytest.raises(InvalidInput, match="prompts .* is not there"):
        read_job_spec(ada, make_generate_spec(writer, dataset))


def test_prompts_are_nothing_to_train_on(ada: User, writer: Model, prompts: Dataset) -> None:
    spec = {"model": writer.pk, "dataset": prompts.pk, "goal": {"device_budget_bytes": 1}}
    with pytest.raises(InvalidInput, match="dataset .* is not there"):
        read_job_spec(ada, spec)


def test_a_normalized_spec_reads_back_to_itself(ada: User, writer: Model, prompts: Dataset) -> None:
    read = read_job_spec(ada, make_generate_spec(writer, prompts))
    assert read_job_spec(ada, read.to_json()) == read
    assert read.workload == GenerationRequest(max_new_tokens=8)


def test_a_pass_that_has_finished_no_prompt_yet_is_progress_all_the_same(
    ada: User, machine: Machine, writer: Model, prompts: Dataset
) -> None:
    job = submit(ada, make_generate_spec(writer, prompts))
    attempt = claim_job(worker="w", machine=machine)
    assert record_started(attempt, pid=1)
    moments = []
    for num_tokens in (5, 5, 9):
        record_progress(attempt, step=0, eta_s=None, summary={}, num_tokens=num_tokens)
        moments.append(Job.objects.get(pk=job.pk).progress_at)
    assert moments[0] == moments[1] < moments[2]


def test_what_was_measured_is_kept_beside_the_prediction_and_a_retry_is_a_generate_job_again(
    ada: User, machine: Machine, writer: Model, prompts: Dataset
) -> None:
    job = submit(ada, make_generate_spec(writer, prompts))
    attempt = claim_job(worker="w", machine=machine)
    assert record_started(attempt, pid=1)
    measured = {"device_peak_bytes": 5, "tokens_per_s": 9.0, "prefill_ms": 2.0, "decode_ms": 1.0}
    result = {"outcome": "failed", "reason": "disk_full", "message": "full", "measured": measured, "summary": {}}
    failed = {**result, "reason": "internal"}
    assert finish_attempt(attempt, result=failed, exit_code=1) == "failed"
    job.refresh_from_db()
    attempt.refresh_from_db()
    assert (attempt.measured, attempt.prediction) == (measured, job.prediction)
    assert job.summary["decode_ms"] == 1.0
    again = retry_job(job, actor="user:ada")
    assert (again.kind, again.num_steps, again.plan) == ("generate", 2, job.plan)


def test_a_finished_job_corrects_the_price_of_the_next_and_what_it_ran_is_what_counts(
    ada: User, machine: Machine, writer: Model, prompts: Dataset
) -> None:
    """Its passes took twice their price; that it did half of the prompts after a crash makes no difference."""
    spec = make_generate_spec(writer, prompts)
    before = price_spec(ada, spec).offers[0].row
    submit(ada, spec, plan_id=before.pk)
    attempt = claim_job(worker="w", machine=machine)
    assert record_started(attempt, pid=1)
    profile = GenerationProfile.from_json(Profile.objects.get().document)
    ran = (MicroBatchShape(batch_size=1, prompt_length=4, num_steps=8),)
    plan, target = GenerationPlan.from_json(before.plan), MachineSpec.from_json(machine.document)
    [own] = [TimedPass(micro_batches=ran, count=1, total_ms=0.0)]
    twice_ms = 2 * price_run(profile, plan=plan, passes=[own], draws=False, machine=target).total_ms
    measured = {"device_peak_bytes": 1, "passes": [{**to_json(own), "total_ms": twice_ms}], "draws": False}
    result = {
        "outcome": "succeeded", "reason": "done", "message": "", "error": None, "step": 2, "measured": measured,
        "summary": {}, "artifacts": [],
    }  # fmt: skip
    assert finish_attempt(attempt, result=result, exit_code=0) == "succeeded"
    machine.refresh_from_db()
    assert of_generations(machine.calibration)["step_time_factor"] == pytest.approx(2, rel=0.1)
    after = price_spec(ada, spec).offers[0].row
    assert after.prediction["total_s"] == pytest.approx(2 * before.prediction["total_s"], rel=0.1)


def test_a_job_whose_worker_reported_no_passes_or_wrong_ones_teaches_nothing(
    ada: User, machine: Machine, writer: Model, prompts: Dataset
) -> None:
    spec = make_generate_spec(writer, prompts)
    for passes in ([], [{"count": 1}]):
        submit(ada, spec, plan_id=price_spec(ada, spec).offers[0].row.pk)
        attempt = claim_job(worker="w", machine=machine)
        assert record_started(attempt, pid=1)
        result = {
            "outcome": "succeeded", "reason": "done", "message": "", "error": None, "step": 2, "summary": {}, "artifacts": [],
            "measured": {"device_peak_bytes": 1, "passes": passes},
        }  # fmt: skip
        assert finish_attempt(attempt, result=result, exit_code=0) == "succeeded"
    machine.refresh_from_db()
    assert machine.calibration == {}
