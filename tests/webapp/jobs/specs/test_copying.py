"""A job's spec, to be sent again."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User

from headroom.commands.submit import read_job_file
from tests.webapp.conftest import make_spec
from tests.webapp.generation import make_generate_spec
from webapp.catalog.models import Dataset, Model
from webapp.jobs.specs.copying import as_curl, as_yaml, copies_of
from webapp.jobs.specs.generation import read_job_spec
from webapp.jobs.specs.training import read_spec

URL = "http://127.0.0.1:8400"


@pytest.fixture
def spec(model: Model, dataset: Dataset) -> dict[str, Any]:
    return {**make_spec(model, dataset), "name": 'it\'s "HEADROOM": $HOME `x`'}


@pytest.mark.django_db
def test_the_yaml_reads_back_as_the_same_spec(spec: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(as_yaml(spec))
    assert read_job_file(file) == spec


@pytest.mark.django_db
def test_a_shell_hands_the_curl_body_over_untouched(spec: dict[str, Any]) -> None:
    script = as_curl(spec, url=URL).replace("curl --fail-with-body", "show", 1)
    program = 'show() { printf "%s\\n" "$@" >&2; cat; }\n' + script
    done = subprocess.run(["sh", "-c", program], capture_output=True, text=True, check=True, env={"HEADROOM_TOKEN": "hr_secret"})
    assert json.loads(done.stdout) == {"spec": spec}
    assert f"{URL}/api/v1/jobs" in done.stderr.splitlines()
    assert "Authorization: Bearer hr_secret" in done.stderr.splitlines()


@pytest.mark.django_db
def test_a_shell_hands_the_command_the_same_yaml(spec: dict[str, Any]) -> None:
    command = next(copy.text for copy in copies_of(spec, url=URL, names={}) if copy.key == "cli")
    program = 'headroom() { printf "%s\\n" "$@" >&2; cat; }\n' + command
    done = subprocess.run(["sh", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == as_yaml(spec)
    assert done.stderr.split() == ["submit", "/dev/stdin", "--url", URL, "--follow"]


@pytest.mark.django_db
@pytest.mark.parametrize(("recipe", "has_weights"), [("exact", False), ("lora", True), (None, True), (None, False)])
def test_a_jobs_whole_spec_is_copied_short_and_asks_for_the_same_again(
    spec: dict[str, Any], model: Model, ada: User, tmp_path: Path, recipe: str | None, *, has_weights: bool
) -> None:
    Model.objects.filter(pk=model.pk).update(has_weights=has_weights)
    asked = {**spec, "recipe": recipe} if recipe else spec
    kept = read_spec(ada, asked).to_json()
    file = tmp_path / "job.yaml"
    file.write_text(as_yaml(kept))
    assert read_spec(ada, read_job_file(file)).to_json() == kept
    text = file.read_text()
    assert "null" not in text
    assert "{}" not in text
    assert "[]" not in text
    assert "device_budget_bytes: 100 MiB" in text


@pytest.mark.django_db
def test_a_generate_jobs_whole_spec_asks_for_the_same_again(writer: Model, prompts: Dataset, ada: User, tmp_path: Path) -> None:
    kept = read_job_spec(ada, make_generate_spec(writer, prompts)).to_json()
    file = tmp_path / "job.yaml"
    file.write_text(as_yaml(kept))
    assert read_job_spec(ada, read_job_file(file)).to_json() == kept
