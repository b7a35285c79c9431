"""The headroom command: what it makes of files, options and answers. The service is a table of answers behind real HTTP calls."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headroom.client import HeadroomClient, StreamEvent
from headroom.commands import main as cli
from headroom.commands import submit
from headroom.commands.compare import print_comparison
from headroom.commands.main import describe_job, main
from headroom.commands.submit import (
    JobFailed,
    UsageError,
    connect,
    download_artifacts,
    pick_offer,
    read_job_file,
    submit_job,
    upload_named_files,
    verdict_of,
)
from headroom.commands.tables import moment
from tests.worker.answering import AnsweringService

ROOT = Path(__file__).resolve().parents[3]
JOB: dict[str, Any] = {
    "id": "job_1",
    "name": "kjv-demo",
    "state": "succeeded",
    "reason": "done",
    "message": "",
    "is_terminal": True,
    "step": 150,
    "num_steps": 150,
    "eta_s": None,
    "created_at": "2026-11-21T00:00:00Z",
    "prediction": {"device_peak_bytes": 200 * 1024**2, "step_ms": 900.0},
    "summary": {"device_peak_bytes": 202 * 1024**2, "step_ms": 1000.0, "loss": 4.5, "validation_loss": 4.6},
}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> AnsweringService:
    service = AnsweringService()
    monkeypatch.setattr(cli, "connect", service.connect)
    return service


@pytest.fixture
def client(service: AnsweringService) -> Iterator[HeadroomClient]:
    with service.connect() as client:
        yield client


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nmodel: m\ndataset: d\ngoal: {device_budget_bytes: 360 MiB}\nplan: chosen\n")
    return file


def test_sizes_in_a_job_file_are_read_as_people_write_them(job_file: Path) -> None:
    assert read_job_file(job_file)["goal"]["device_budget_bytes"] == 360 * 1024**2


def test_a_number_with_an_exponent_needs_no_dot(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: 1e5-run\nworkload: {learning_rate: 3e-4, schedule: cosine}\n")
    spec = read_job_file(tmp_path / "job.yaml")
    assert spec == {"name": "1e5-run", "workload": {"learning_rate": 3e-4, "schedule": "cosine"}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("goal: {device_budget_bytes: 12 parsecs}", "goal.device_budget_bytes: size '12 parsecs' is not understood"),
        ("- a\n- b\n", "is not a job"),
        ("a: [", "is not YAML"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_a_job_file_that_cannot_be_read_is_reported_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UsageError) as raised:
        read_job_file(tmp_path / "job.yaml")
    assert said in raised.value.message
    assert "\n" not in raised.value.message


def test_the_demo_s_own_job_file_is_one_that_the_command_reads() -> None:
    spec = read_job_file(ROOT / "demo" / "job.yaml")
    assert spec["workload"]["num_steps"] >= 150
    assert isinstance(spec["workload"]["learning_rate"], float)
    assert isinstance(spec["goal"]["device_budget_bytes"], int)


def test_a_missing_job_file_ends_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", str(tmp_path / "none.yaml")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_without_a_token_the_command_says_how_to_get_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HEADROOM_TOKEN", raising=False)
    assert main(["list"]) == 2
    assert capsys.readouterr().err == (
        "headroom: no API token is known\n  Give --token or HEADROOM_TOKEN, or start a local service with: headroom up\n"
    )


def test_the_local_token_is_never_sent_to_another_address(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADROOM_TOKEN", raising=False)
    (home / "cli.json").write_text('{"url": "http://127.0.0.1:8400", "token": "local"}')
    with connect() as client:
        assert client.url == "http://127.0.0.1:8400"
    with pytest.raises(UsageError, match="no API token is known for http://elsewhere"):
        connect(url="http://elsewhere")


def test_submit_prices_the_spec_and_takes_the_chosen_plan(
    service: AnsweringService, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offers = [{"id": "plan_a", "label": "keep_all"}, {"id": "plan_b", "label": "mixed", "chosen": True}]
    service.answers = {("POST", "/plans"): (200, {"offers": offers}), ("POST", "/jobs"): (201, JOB)}
    assert main(["submit", str(job_file)]) == 0
    assert service.sent("/jobs")[0]["plan_id"] == "plan_b"
    assert "http://headroom/jobs/job_1/" in capsys.readouterr().out


@pytest.mark.parametrize(("has_weights", "recipe"), [(True, "lora"), (False, "exact")])
def test_without_a_file_a_model_with_weights_is_tuned_by_lora_and_another_trained_exactly(
    service: AnsweringService, capsys: pytest.CaptureFixture[str], has_weights: bool, recipe: str
) -> None:
    row = {"id": "mdl_1", "name": "tiny", "has_weights": has_weights}
    service.answers = {
        ("GET", "/models"): (200, {"results": [row], "next": None}),
        ("POST", "/plans"): (200, {"offers": [{"id": "plan_b", "label": "mixed", "chosen": True}]}),
        ("POST", "/jobs"): (201, JOB),
    }
    assert main(["submit", "--model", "tiny", "--dataset", "verse", "--budget", "1 GiB"]) == 0
    assert service.sent("/jobs")[0]["spec"]["recipe"] == recipe
    assert f"recipe {recipe}, device memory at most 1.00 GiB" in capsys.readouterr().out


def test_submit_with_a_label_takes_that_baseline_even_where_nothing_fits(
    service: AnsweringService, client: HeadroomClient
) -> None:
    problem = {"code": "no_feasible_plan", "detail": "too small", "extra": {"offers": [{"id": "plan_a", "label": "keep_all"}]}}
    service.answers = {("POST", "/plans"): (422, problem), ("POST", "/jobs"): (201, JOB)}
    submit_job(client, {"name": "a"}, label="keep_all", override=True, say=print)
    assert service.sent("/jobs") == [{"spec": {"name": "a"}, "plan_id": "plan_a", "override": True}]


def test_where_nothing_fits_submit_ends_with_one_and_the_service_s_words(
    service: AnsweringService, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = {"code": "no_feasible_plan", "detail": "memory budget 1 MiB is under 2 MiB", "hint": "Raise the budget."}
    service.answers = {("POST", "/plans"): (422, problem)}
    assert main(["submit", str(job_file)]) == 1
    assert capsys.readouterr().err == "headroom: memory budget 1 MiB is under 2 MiB\n  Raise the budget.\n"


def test_a_wrong_field_is_named_with_what_is_allowed(
    service: AnsweringService, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = [{"field": "workload.num_steps", "value": 0, "allowed": {"minimum": 1}, "message": "0 is too few"}]
    service.answers = {("POST", "/plans"): (422, {"detail": "the spec is wrong", "code": "invalid_workload", "fields": fields})}
    assert main(["submit", str(job_file)]) == 1
    assert "  workload.num_steps: 0 is too few; allowed: {'minimum': 1}\n" in capsys.readouterr().err


def test_an_unknown_plan_label_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no plan is called 'best'; there are: keep_all, chosen"):
        pick_offer([{"label": "keep_all"}, {"label": "chosen"}], label="best")  # type: ignore[typeddict-item]


def test_a_model_folder_and_a_dataset_file_are_uploaded_and_their_ids_taken(
    service: AnsweringService, client: HeadroomClient, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "text.txt").write_text("hello")
    service.answers = {("POST", "/models"): (201, {"id": "mdl_1"}), ("POST", "/datasets"): (201, {"id": "dat_1"})}
    spec = upload_named_files(client, {"model": "model", "dataset": "text.txt"}, folder=tmp_path)
    assert spec == {"model": "mdl_1", "dataset": "dat_1"}


def test_names_that_are_no_files_are_left_to_the_service(
    service: AnsweringService, client: HeadroomClient, tmp_path: Path
) -> None:
    spec = {"model": "headroom-demo-10m", "dataset": "kjv"}
    assert upload_named_files(client, spec, folder=tmp_path) == spec


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 1), ("cancelled", 1)])
def test_following_ends_with_the_job_s_verdict(
    service: AnsweringService,
    state: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = {**JOB, "state": state, "message": "device memory ran out"}
    service.answers = {("GET", "/jobs/job_1"): (200, job)}
    events = [StreamEvent(kind="snapshot", data={"job": job})]
    monkeypatch.setattr(HeadroomClient, "follow_job", lambda *_, **__: iter(events))
    assert main(["follow", "job_1"]) == code
    assert ("device memory ran out" in capsys.readouterr().err) == bool(code)


def test_a_failed_job_s_own_sentence_and_hint_are_printed() -> None:
    job = {**JOB, "state": "failed", "message": "device memory ran out", "error": {"hint": "Raise the budget."}}
    with pytest.raises(JobFailed, match="kjv-demo failed: device memory ran out") as raised:
        verdict_of(job)
    assert raised.value.hint == "Raise the budget."


def test_show_sets_the_measurement_beside_the_prediction() -> None:
    assert describe_job(JOB) == [
        "kjv-demo  succeeded · step 150 of 150  (job_1)",
        "  device peak  measured 202 MiB, predicted 200 MiB (-1.0 %)",
        "  step time    measured 1,000 ms, predicted 900 ms (-10.0 %)",
        "  loss               4.5000",
        "  validation         4.6000",
    ]


def test_list_prints_a_table_and_an_empty_one_says_what_to_do(
    service: AnsweringService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answers = {("GET", "/jobs"): (200, {"results": [JOB], "next": None})}
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "kjv-demo", "succeeded", "150", "of", "150", "4.500", *moment("2026-11-21T00:00:00Z").split(), "job_1",
    ]  # fmt: skip
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [JOB]
    service.answers = {("GET", "/jobs"): (200, {"results": [], "next": None})}
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "no jobs yet; start one: headroom submit JOB.yaml\n"


def test_cancel_saves_unless_asked_to_discard(service: AnsweringService) -> None:
    service.answers = {("POST", "/jobs/job_1/cancel"): (202, {})}
    main(["cancel", "job_1"])
    main(["cancel", "job_1", "--discard"])
    assert [body["mode"] for body in service.sent("/jobs/job_1/cancel")] == ["save", "discard"]


def test_several_jobs_are_stopped_by_one_request(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    results = [{"id": "job_1", "outcome": "cancelled"}, {"id": "job_2", "outcome": "already_asked"}]
    service.answers = {("POST", "/jobs/cancel"): (200, {"results": results, "num_left": 0})}
    assert main(["jobs", "stop", "job_1", "job_2", "--discard"]) == 0
    assert main(["jobs", "stop", "--tag", "sweep", "--queued"]) == 0
    assert capsys.readouterr().out.splitlines() == ["job_1  cancelled", "job_2  already asked"] * 2
    assert service.sent("/jobs/cancel") == [
        {"ids": ["job_1", "job_2"], "mode": "discard"},
        {"mode": "save", "state": ["queued"], "tag": "sweep"},
    ]


@pytest.mark.parametrize("given", [[], ["job_1", "--queued"]])
def test_stop_needs_jobs_or_a_filter(given: list[str], service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "stop", *given]) == 2
    assert "stop needs jobs, or --tag or --queued, not both" in capsys.readouterr().err
    assert service.bodies == []


def test_a_checkpoint_is_exported_and_branched_from(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    spec = {"name": "a", "model": "m", "dataset": "d", "workload": {"num_steps": 9}, "goal": {}, "plan": "chosen"}
    service.answers = {
        ("POST", "/jobs/job_1/export"): (201, {**JOB, "id": "job_2"}),
        ("GET", "/jobs/job_1"): (200, {**JOB, "spec": spec}),
        ("POST", "/plans"): (200, {"offers": [{"id": "plan_1", "label": "chosen", "chosen": True}], "profile": "ready"}),
        ("POST", "/jobs"): (201, {**JOB, "id": "job_3"}),
    }
    assert main(["export", "job_1", "--step", "4", "--gguf", "q8_0"]) == 0
    assert service.sent("/jobs/job_1/export") == [{"step": 4, "export": {"gguf": "q8_0"}}]
    assert main(["branch", "job_1", "--step", "4", "--steps", "20"]) == 0
    sent = service.sent("/jobs")[-1]["spec"]
    assert sent["resume_from"] == {"job": "job_1", "step": 4}
    assert (sent["name"], sent["workload"]) == ("a, branched", {"num_steps": 20})
    printed = capsys.readouterr().out
    assert "job_2" in printed
    assert "job_3" in printed


def test_artifacts_are_downloaded_under_their_names(
    service: AnsweringService, client: HeadroomClient, tmp_path: Path
) -> None:
    artifacts = [{"id": "art_1", "name": "config.json", "path": "model/config.json", "num_bytes": 2}]
    service.answers = {
        ("GET", "/jobs/job_1/artifacts"): (200, {"results": artifacts, "next": None}),
        ("GET", "/artifacts/art_1/download"): (200, b"{}"),
    }
    download_artifacts(client, "job_1", folder=tmp_path, say=lambda _: None)
    assert (tmp_path / "model" / "config.json").read_bytes() == b"{}"


def test_an_artifact_that_would_leave_the_folder_is_refused(
    service: AnsweringService, client: HeadroomClient, tmp_path: Path
) -> None:
    artifacts = [{"id": "art_1", "name": "evil", "path": "../evil", "num_bytes": 2}]
    service.answers = {("GET", "/jobs/job_1/artifacts"): (200, {"results": artifacts, "next": None})}
    with pytest.raises(Exception, match="would be written outside"):
        download_artifacts(client, "job_1", folder=tmp_path / "out", say=lambda _: None)


def test_an_unknown_command_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["trian"])
    assert raised.value.code == 2


def test_commands_that_talk_to_the_service_import_neither_torch_nor_django() -> None:
    code = "import sys, headroom.commands.main; print(sorted({'torch', 'django', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_follow_to_end_returns_the_job_as_the_service_has_it_then(
    service: AnsweringService, client: HeadroomClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.answers = {("GET", "/jobs/job_1"): (200, {**JOB, "summary": {"loss": 1.0}})}
    monkeypatch.setattr(HeadroomClient, "follow_job", lambda *_, **__: iter([StreamEvent(kind="done", data=JOB)]))
    queued: Any = {**JOB, "state": "queued"}
    job = submit.follow_to_end(client, queued, console=Console(quiet=True))
    assert job["summary"] == {"loss": 1.0}


def test_an_id_cannot_lead_to_another_address(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = (404, {"detail": "nothing is here"})
    service.answers = {("GET", "/jobs/job_/../../../healthz"): nothing}
    assert main(["show", "job_/../../../healthz"]) == 1
    assert capsys.readouterr().err == "headroom: nothing is here\n"


def test_a_job_is_named_by_its_name_or_the_end_of_its_id(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    wanted, other = {**JOB, "id": "job_019a3c77aa55ee"}, {**JOB, "id": "job_019a3c770011ff", "name": "other"}
    service.answers = {
        ("GET", "/jobs"): (200, {"results": [wanted, other], "next": None}),
        ("GET", f"/jobs/{wanted['id']}"): (200, wanted),
    }
    assert main(["show", "kjv-demo"]) == 0
    assert main(["show", "aa55ee"]) == 0
    assert capsys.readouterr().out.count(wanted["id"]) == 2
    assert main(["show", "kjv"]) == 2
    assert 'no job "kjv" in your projects' in capsys.readouterr().err


def test_of_two_jobs_with_one_name_neither_is_taken(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    twins = [{**JOB, "id": f"job_019a3c77{end}"} for end in ("aaaa1111", "bbbb2222")]
    service.answers = {("GET", "/jobs"): (200, {"results": twins, "next": None})}
    assert main(["cancel", "kjv-demo"]) == 2
    assert "aaaa1111 (succeeded), bbbb2222 (succeeded)" in capsys.readouterr().err
    assert [path for path, _ in service.bodies if path.endswith("/cancel")] == []


def test_an_answer_that_is_not_json_is_one_line(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    service.answers = {("GET", "/jobs/job_1"): (200, b"<html>")}
    assert main(["show", "job_1"]) == 1
    assert "does not answer as Headroom does" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["list", "--token", "hr_ü"], "no token has"),
        (["list", "--url", "http://127.0.0.1:x", "--token", "hr_x"], "is not an address"),
    ],
)
def test_a_token_or_address_that_cannot_be_one_is_one_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert reason in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(
    service: AnsweringService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifacts = [{"id": "art_1", "name": "a.txt", "path": "a.txt", "num_bytes": 2}]
    service.answers = {("GET", "/jobs/job_1/artifacts"): (200, {"results": artifacts, "next": None})}
    (tmp_path / "taken").write_text("a file")
    assert main(["download", "job_1", "-o", str(tmp_path / "taken")]) == 1
    assert capsys.readouterr().err == f"headroom: {tmp_path / 'taken'}: File exists\n"


def test_a_job_without_files_says_so(service: AnsweringService, client: HeadroomClient, tmp_path: Path) -> None:
    service.answers = {("GET", "/jobs/job_1/artifacts"): (200, {"results": [], "next": None})}
    said: list[Any] = []
    download_artifacts(client, "job_1", folder=tmp_path, say=said.append)
    assert said == ["the job has left no files"]


@pytest.mark.parametrize("limit", ["0", "-3", "many"])
def test_a_limit_below_one_is_refused(limit: str) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["list", "--limit", limit])
    assert raised.value.code == 2


def test_jobs_are_compared_as_tables_of_only_what_differs(
    service: AnsweringService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answers["GET", "/compare"] = (
        200,
        {
            "jobs": [{"id": "job_1", "name": "one", "state": "succeeded"}, {"id": "job_2", "name": "two", "state": "failed"}],
            "differences": [{"group": "plan", "name": "activations, lifetime", "values": ["keep 4", "recompute 4"]}],
            "outcomes": [
                {"name": "measured peak", "unit": "bytes", "values": [1048576.0, None], "lower_is_better": True},
            ],
            "costs": [
                {"job_index": 1, "decision": "activations", "device_change_bytes": -1048576, "step_change_ms": 12.0,
                 "tokens_per_s_change": 0.0},
            ],
            "unpriced": "",
        },
    )
    assert main(["compare", "job_1", "job_2"]) == 0
    printed = capsys.readouterr().out
    assert "A  job_1  one  (succeeded)" in printed
    assert "measured peak  1.00 MiB  -" in printed
    assert "activations, lifetime  keep 4  recompute 4" in printed
    assert "activations  B      -1.00 MiB      +12 ms  none" in printed


def test_an_empty_queue_says_so(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    service.answers["GET", "/queue"] = (200, {"num_waiting": 0, "num_own": 0, "waiting": [], "live": []})
    assert main(["queue"]) == 0
    assert "no jobs waiting" in capsys.readouterr().out


def test_the_queue_is_a_table_with_the_reason(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"id": "job_1", "name": "one", "position": 2, "priority": 0, "reason": "paused", "sentence": "Paused.", "machines": []}
    service.answers["GET", "/queue"] = (200, {"num_waiting": 5, "num_own": 3, "waiting": [row], "live": []})
    assert main(["queue"]) == 0
    rows = ["2      one   0         Paused.       job_1", "2 more of yours", "2 of other people"]
    assert capsys.readouterr().out.splitlines()[1:] == rows


def test_a_job_is_moved_by_its_priority(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    service.answers["POST", "/jobs/job_1/priority"] = (200, {"id": "job_1", "priority": -3})
    assert main(["priority", "job_1", "-3"]) == 0
    assert service.sent("/jobs/job_1/priority") == [{"priority": -3}]
    assert capsys.readouterr().out == "job_1  priority -3\n"


def arguments_without_help(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from arguments_without_help(command, (*words, word))
        elif not action.help:
            yield " ".join((*words, action.dest))


def test_every_argument_of_every_command_has_a_line_of_help() -> None:
    assert list(arguments_without_help(cli.make_parser(with_optimizer=True))) == []


def test_jobs_are_compared_in_the_words_and_units_of_people(capsys: pytest.CaptureFixture[str]) -> None:
    differences: list[dict[str, Any]] = [
        {"group": "setting", "name": "goal.device_budget_bytes", "values": [1099511627776, 400 * 1024**2]},
        {"group": "setting", "name": "workload.num_steps", "values": [20, 40]},
        {"group": "setting", "name": "goal.allow_lossy", "values": [True, False]},
        {"group": "setting", "name": "goal.forbid", "values": [[], ["offload"]]},
    ]
    jobs = [{"id": "job_a", "name": "a", "state": "succeeded"}, {"id": "job_b", "name": "b", "state": "failed"}]
    print_comparison({"jobs": jobs, "differences": differences, "outcomes": [], "costs": [], "unpriced": ""})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[-4:] == ["device budget 1.00 TiB 400 MiB", "steps 20 40", "allow lossy yes no", "forbid none offload"]


def test_devices_are_part_of_the_goal_and_those_that_the_cpu_plays_share_its_memory(
    service: AnsweringService, job_file: Path, tmp_path: Path
) -> None:
    machines = [{"device": {"kind": "cpu", "memory_bytes": 4096}}, {"device": {"kind": "cuda", "memory_bytes": 3000}}]
    service.answers = {
        ("GET", "/machines"): (200, {"results": machines}),
        ("GET", "/models"): (200, {"results": []}),
        ("POST", "/plans"): (200, {"offers": [{"id": "plan_a", "label": "chosen", "chosen": True}]}),
        ("POST", "/jobs"): (201, JOB),
    }
    assert main(["submit", str(job_file), "--devices", "2"]) == 0
    assert service.sent("/jobs")[0]["spec"]["goal"] == {"device_budget_bytes": 360 * 1024**2, "num_devices": 2}
    assert main(["submit", "--model", "m", "--dataset", "d", "--devices", "2"]) == 0
    assert service.sent("/jobs")[1]["spec"]["goal"] == {"device_budget_bytes": 3000, "num_devices": 2}
