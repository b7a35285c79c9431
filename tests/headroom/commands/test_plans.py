"""``headroom frontier``, ``cards`` and ``models show``: what they ask, and what they make of answers. The service is a table."""

from pathlib import Path
from typing import Any

import pytest

from headroom.commands import main as cli
from tests.worker.answering import AnsweringService

PREDICTION: dict[str, Any] = {"device_peak_bytes": 3 * 1024**2, "total_s": 90.0, "tokens_per_s": 1234.5}
JOB_FILE = """
kind: generate
name: verses
model: model_1
prompts: verses.jsonl
workload: {max_new_tokens: 8}
goal: {device_budget_bytes: 2 GiB}
plan: chosen
"""
ROW: dict[str, Any] = {"id": "model_1", "name": "tiny", "model_type": "gpt2", "num_parameters": 5, "has_weights": False}
ROW |= {"unread": ["layerdrop 0.1"], "from_job": None}
STRUCTURE: dict[str, Any] = {"embedding_parameters": 1, "head_parameters": 0, "other_parameters": 4, "stacks": []}
ANSWERS = {
    ("GET", "/machines"): (200, {"results": [{"id": "machine_1"}], "next": None}),
    ("POST", "/plans/best"): (
        200,
        {
            "kind": "generation",
            "frontier": [{"label": "8 at once, bf16", "prediction": PREDICTION}],
            "explanation": ["8 sequences run in one pass"],
        },
    ),
    ("POST", "/plans/cards"): (
        200,
        {"cards": [{"card": "T4", "memory_bytes": 2**34, "tokens_per_s": 99.0, "what": "8 at once"}]},
    ),
    ("GET", "/models"): (200, {"results": [ROW], "next": None}),
    ("GET", "/models/model_1"): (200, {**ROW, "structure": STRUCTURE}),
}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> AnsweringService:
    service = AnsweringService(ANSWERS)
    monkeypatch.setattr(cli, "connect", service.connect)
    monkeypatch.setattr(
        "headroom.commands.submit.HeadroomClient.create_dataset",
        lambda *_, **how: {"id": f"dataset_{how['purpose']}", "facts": {}},
    )
    return service


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    (tmp_path / "verses.jsonl").write_text('{"prompt": "In the beginning"}\n')
    file = tmp_path / "job.yaml"
    file.write_text(JOB_FILE)
    return str(file)


ASKED: dict[str, Any] = {
    "model": "model_1",
    "prompts": "dataset_prompts",
    "workload": {"max_new_tokens": 8},
    "goal": {"device_budget_bytes": 2 * 1024**3},
}


def test_the_plans_of_a_generate_jobs_file_are_listed_by_time_and_speed(
    service: AnsweringService, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["frontier", job_file]) == 0
    assert service.sent("/plans/best") == [{**ASKED, "machine": "machine_1"}]
    said = capsys.readouterr().out
    assert "all prompts" in said
    assert "1,234" in said
    assert "8 sequences run in one pass" in said


def test_cards_are_ranked_for_a_generate_jobs_file(
    service: AnsweringService, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cards", job_file, "--card", "T4"]) == 0
    assert service.sent("/plans/cards") == [{**ASKED, "order": "speed", "cards": ["T4"]}]
    assert "8 at once" in capsys.readouterr().out


def test_what_of_a_models_config_is_in_no_price_is_printed(
    service: AnsweringService, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["models", "show", "tiny"]) == 0
    assert "not read of its config.json, and in no price:\n  layerdrop 0.1" in capsys.readouterr().out
