"""The form for a generate job and the page of one: priced, started, shown in prompts and tokens."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import reverse

from tests.webapp.generation import make_generate_spec
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_progress, record_samples, record_started
from webapp.catalog.models import Dataset, Machine, Model, Profile
from webapp.jobs.models import Job
from webapp.planning.submitting import submit_job

pytestmark = pytest.mark.django_db
MIB = 1024**2


@pytest.fixture
def typed(writer: Model, prompts: Dataset) -> dict[str, str]:
    return {
        "name": "verses",
        "model": writer.pk,
        "prompts": prompts.pk,
        "max_new_tokens": "8",
        "temperature": "0.5",
        "top_k": "0",
        "top_p": "1",
        "seed": "1",
        "stop": "The End\n\nFinis",
        "objective": "throughput",
        "device_budget": "100 MiB",
        "host_budget": "",
        "disk_budget": "",
    }


def test_the_form_offers_models_with_weights_and_prompts_only(
    browser: Client, model: Model, writer: Model, prompts: Dataset, dataset: Dataset
) -> None:
    text = browser.get(reverse("generate_new")).content.decode()
    assert f'value="{writer.pk}"' in text
    assert f'value="{model.pk}"' not in text
    assert f'value="{prompts.pk}"' in text
    assert f'value="{dataset.pk}"' not in text
    training = browser.get(reverse("job_new")).content.decode()
    assert f'value="{prompts.pk}"' not in training


def test_a_form_is_priced_in_tokens_and_prompts(browser: Client, machine: Machine, typed: dict[str, str]) -> None:
    text = browser.post(reverse("generate_price"), typed).content.decode()
    assert ">fits</span>" in text
    assert "first token" in text
    assert "all prompts" in text
    assert "recommended" in text
    assert "on the device" in text


def test_while_the_model_is_profiled_the_same_form_asks_again(
    browser: Client, machine: Machine, typed: dict[str, str]
) -> None:
    Profile.objects.all().delete()
    text = browser.post(reverse("generate_price"), typed).content.decode()
    assert ">unknown</span>: being profiled" in text
    assert f'hx-post="{reverse("generate_price")}"' in text


def test_a_form_starts_the_job_that_its_clone_shows_again(
    browser: Client, machine: Machine, typed: dict[str, str]
) -> None:
    answer = browser.post(reverse("generate_new"), typed)
    job = Job.objects.get()
    assert answer["Location"] == reverse("job", args=[job.pk])
    workload = job.spec["workload"]
    assert (job.kind, workload["stop"], workload["temperature"]) == ("generate", ["The End", "Finis"], 0.5)
    clone = browser.get(reverse("generate_new"), {"from": job.pk}).content.decode()
    assert "The End\nFinis</textarea>" in clone
    assert 'value="100 MiB"' in clone


def test_nothing_is_red_before_somebody_reached_it(
    browser: Client, machine: Machine, writer: Model, typed: dict[str, str]
) -> None:
    Dataset.objects.filter(pk=typed["prompts"]).delete()
    page = browser.get(reverse("generate_new")).content.decode()
    assert re.search(r'<details class="upload" open>\s*<summary>Upload prompts', page)
    priced = browser.post(reverse("generate_price"), {**typed, "prompts": ""}).content.decode()
    assert 'id="id_prompts_error" data-for="id_prompts" hx-swap-oob="true"></ul>' in priced
    assert "unknown</span>: choose prompts to see whether it fits" in priced
    started = browser.post(reverse("generate_new"), {**typed, "prompts": ""}).content.decode()
    assert "<li>Choose one.</li>" in started


def test_decisions_that_are_held_are_kept_by_the_job_and_its_clone(
    browser: Client, machine: Machine, typed: dict[str, str]
) -> None:
    held = {"pin_batch_size": "2", "pin_prefill_tokens": "all", "pin_kv_cache_place": "host"}
    browser.post(reverse("generate_new"), typed | held)
    job = Job.objects.get()
    assert (job.plan["batch_size"], job.plan["prefill_tokens"], job.plan["kv_cache"]["place"]) == (2, None, "host")
    form = browser.get(reverse("generate_new"), {"from": job.pk}).context["form"]
    assert {name: str(form[name].value()) for name in form.fields if name.startswith("pin_") and form[name].value()} == held
    assert form.holds_any


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("pin_batch_size", "0", "must be 1 or more"),
        ("pin_batch_size", "10000", "allowed are 1 to"),
        ("pin_weights_dtype", "bf16", "packed weights)” does not permit that"),
    ],
)
def test_what_is_wrong_with_a_held_decision_stands_beside_it(
    browser: Client, machine: Machine, typed: dict[str, str], field: str, value: str, words: str
) -> None:
    text = browser.post(reverse("generate_price"), {**typed, field: value}).content.decode()
    assert words in text.partition(f'id="id_{field}_error"')[2].partition("</ul>")[0]


def test_what_is_wrong_stands_beside_its_field(browser: Client, machine: Machine, typed: dict[str, str]) -> None:
    text = browser.post(reverse("generate_new"), {**typed, "top_p": "2"}).content.decode()
    beside = text.partition('id="id_top_p_error"')[2].partition("</ul>")[0]
    assert "Top p must be above 0, at most 1" in beside
    assert not Job.objects.exists()


def test_prompts_are_uploaded_beside_the_form_and_selected(browser: Client, writer: Model) -> None:
    file = SimpleUploadedFile("more.jsonl", json.dumps({"prompt": "x"}).encode() + b"\n")
    answer = browser.post(reverse("generate_prompts"), {"name": "more", "file": file})
    made = Dataset.objects.get(name="more")
    assert answer["HX-Trigger-After-Settle"] == "uploaded"
    assert f'value="{made.pk}" selected' in answer.content.decode()
    refused = browser.post(reverse("generate_prompts"), {"name": "none", "file": SimpleUploadedFile("a.jsonl", b"\n")})
    assert "the file holds none" in refused.content.decode()


def test_lines_that_get_no_answer_are_named_when_prompts_are_uploaded_and_chosen(
    browser: Client, machine: Machine, typed: dict[str, str]
) -> None:
    text = '{"prompt": "x"}\n{"text": "no prompt"}\nnot JSON\n'
    sent = {**typed, "name": "bad", "file": SimpleUploadedFile("bad.jsonl", text.encode())}
    answer = browser.post(reverse("generate_prompts"), sent).content.decode()
    assert "bad · 3 prompts · 2 unusable" in answer
    made = Dataset.objects.get(name="bad")
    for page in (
        browser.post(reverse("generate_price"), {**typed, "prompts": made.pk}).content.decode(),
        browser.get(reverse("dataset", args=[made.pk])).content.decode(),
    ):
        assert "2 lines of 3 cannot be used and get no answer" in page
        assert "Line 2: " in page
        assert "Line 3: " in page
    priced = browser.post(reverse("generate_price"), typed).content.decode()
    assert "cannot be used" not in priced


@pytest.fixture
def job(ada: User, machine: Machine, writer: Model, prompts: Dataset) -> Job:
    job = submit_job(ada, spec=make_generate_spec(writer, prompts), actor="user:ada")
    attempt = claim_job(worker="w", machine=machine)
    assert record_started(attempt, pid=1)
    sample = {
        "kind": "generate",
        "step": 5,
        "prompts_done": 1,
        "num_prompts": 2,
        "num_errors": 0,
        "tokens_per_s": 12.0,
        "device_peak_bytes": 3 * MIB,
        "device_bytes": {"weights": 2 * MIB, "kv_cache": MIB},
        "host_bytes": 7,
        "time_s": 1.0,
    }
    assert record_samples(attempt, [sample])
    assert record_progress(attempt, step=1, eta_s=None, summary={"tokens_per_s": 12.0}, num_tokens=5)
    return job


def test_the_page_of_a_job_counts_prompts_and_has_no_loss(browser: Client, job: Job) -> None:
    text = browser.get(reverse("job", args=[job.pk]), {"tab": "plan"}).content.decode()
    assert 'prompt <span class="num" data-live="step">1</span> of <span class="num">2</span>' in text
    assert 'id="chart-memory"' in text
    assert 'id="chart-loss"' not in text
    assert "validation loss" not in text
    assert "KV cache" in text
    assert "first token of a pass" in text


def test_the_tables_behind_its_charts_hold_what_was_measured(browser: Client, job: Job) -> None:
    table = browser.get(reverse("job_csv", args=[job.pk, "memory"])).content.decode()
    assert table.splitlines()[1].startswith(f"5,{3 * MIB},{2 * MIB}")
    metrics = browser.get(f"/api/v1/jobs/{job.pk}/metrics").json()
    assert [sample["step"] for sample in metrics["generated"]] == [5]


def test_predictions_stand_beside_what_a_finished_job_measured(browser: Client, job: Job) -> None:
    times = {"prefill_ms": 4.0, "decode_ms": 2.0}
    measured = {"device_peak_bytes": 3 * MIB, "device_bytes_by_category": {"weights": 3 * MIB}, **times}
    result = {"outcome": "succeeded", "reason": "done", "message": "", "error": None, "step": 2, "measured": measured}
    finish_attempt(job.attempts.get(), result={**result, "summary": {}, "artifacts": []}, exit_code=0)
    text = browser.get(reverse("job", args=[job.pk]), {"tab": "plan"}).content.decode()
    rows = text.partition("Predicted against measured</caption>")[2].partition("</table>")[0]
    assert "4 ms" in rows
    assert "3.00 MiB" in rows


def test_what_is_done_so_far_can_be_read(browser: Client, job: Job, headroom_home: Path) -> None:
    folder = headroom_home / "jobs" / job.pk / "results"
    folder.mkdir(parents=True)
    (folder / "part-001-f1.jsonl").write_text('{"index": 0}\n')
    answer = browser.get(f"/api/v1/jobs/{job.pk}/results")
    assert answer.status_code == 200
    assert answer["Content-Type"].startswith("application/jsonl")


def test_two_generations_are_compared_by_their_own_decisions_and_priced(
    browser: Client, job: Job, prompts: Dataset, writer: Model
) -> None:
    other = submit_job(job.owner, spec=make_generate_spec(writer, prompts), actor="user:ada")
    other.plan = {**other.plan, "kv_cache": {**other.plan["kv_cache"], "dtype": "int8"}}
    other.save()
    text = browser.get("/jobs/compare/", {"job": [job.pk, other.pk]}).content.decode()
    row = text.partition('<th scope="row">Kv cache, dtype</th>')[2].partition("</tr>")[0]
    assert "same" in row
    assert "int8" in row
    assert "device memory" in row
    assert "a token</li>" in row
    assert 'id="compare-loss"' not in text


def test_the_newest_answers_are_shown_as_text(browser: Client, job: Job, headroom_home: Path) -> None:
    folder = headroom_home / "jobs" / job.pk / "results"
    folder.mkdir(parents=True)
    plain = {"id": "a", "line": 1, "text": "was the <b>Word</b>", "finish_reason": "stop"}
    chat = {"choices": [{"message": {"content": "Hello."}, "finish_reason": "length"}]}
    lines = [
        {"index": 0, "record": plain, "is_error": False, "completion_tokens": 4},
        {"index": 1, "record": {"custom_id": "q2", "response": {"body": chat}}, "is_error": False, "completion_tokens": 8},
        {"index": 2, "record": {"id": "c", "error": {"message": "too long"}}, "is_error": True, "completion_tokens": 0},
        {"index": 3, "record": {**plain, "id": "4"}, "is_error": False, "completion_tokens": 4},
    ]
    torn = '{"index": 4, "rec'
    (folder / "part-001-f1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    text = browser.get(reverse("job", args=[job.pk]), {"tab": "samples"}).content.decode()
    assert "was the &lt;b&gt;Word&lt;/b&gt;" in text
    assert "8 tokens, length limit" in text
    assert "too long" in text
    assert "<h3>Line 4</h3>" in text  # a line without a name of its own
    assert text.index("Line 3: c") < text.index("Line 2: q2") < text.index("Line 1: a")


def test_the_page_shows_where_weights_and_cache_are_block_by_block(browser: Client, job: Job) -> None:
    text = browser.get(reverse("job", args=[job.pk])).content.decode()
    assert 'aria-label="KV cache by block"' in text
    assert 'id="chart-lanes"' in text
    assert 'id="chart-links"' in text


def test_the_links_table_shows_what_was_moved(browser: Client, job: Job) -> None:
    attempt = job.attempts.get()
    moved = {"kind": "generate", "step": 9, "run_ms": 1000.0, "copied_bytes": {"host_to_device": 4096}}
    assert record_samples(attempt, [moved])
    lines = browser.get(reverse("job_csv", args=[job.pk, "links"])).content.decode().splitlines()
    assert lines[0].startswith("step,device to host (bytes),host to device (bytes)")
    assert lines[1].startswith("9,,4096")


def test_plans_of_a_generation_stand_side_by_side(browser: Client, machine: Machine, typed: dict[str, str]) -> None:
    text = browser.post(reverse("generate_price"), typed).content.decode()
    address = unescape(re.search(r'href="(/plans/[^"]+)"', text)[1])
    answer = browser.get(address)  # what the form was just priced with is at hand
    assert answer.status_code == 200
    points = answer.context["points"]
    assert points[0].key == "chosen"
    assert answer.context["facts"]["time_of"] == "all prompts"
    groups = {group.label: {line.name for line in group.lines} for group in answer.context["groups"]}
    assert {"loading, at most", "first token", "each later token", "all prompts"} <= groups["the plan"]
    assert {"place", "bits", "lifetime", "bytes at the peak"} <= groups["KV cache"]
    step = browser.get(answer.context["steps"][0][1])
    assert len(step.context["table"].rows) == len(points[0].priced.prediction.timeline)


def test_a_generation_that_fits_nowhere_has_no_plans_but_says_what_it_needs(
    browser: Client, machine: Machine, typed: dict[str, str]
) -> None:
    asked = {"kind": "generate", "model": typed["model"], "prompts": typed["prompts"], "device_budget": "1 KiB"}
    answer = browser.get(reverse("plans"), asked | {"whole": "yes"})
    assert "smallest feasible peak" in answer.content.decode()
