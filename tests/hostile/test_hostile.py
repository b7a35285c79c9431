"""Hostile uploads: each is refused in words or harmless, whatever it is, and none ends the service."""

from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from benchmarks.hostile import run_cases
from optimizer.base.errors import InvalidInput
from tests.hostile.cases import ALLOWED, Case, hand_cases
from tests.hostile.mutate import mutated
from tests.hostile.upload import checks_here, examine
from webapp.catalog.models import Dataset, Model

CASES = hand_cases()
NUM_GENERATED = 3_000
DATASETS = "/api/v1/datasets"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, settings: Any) -> Path:
    folder = tmp_path / "headroom"
    (folder / "spool").mkdir(parents=True)
    settings.HEADROOM_HOME, settings.FILE_UPLOAD_TEMP_DIR = folder, folder / "spool"
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_is_refused_in_words_or_harmless(case: Case, tmp_path: Path) -> None:
    said = ALLOWED
    try:
        examine(case.upload, tmp_path, is_bomb=case.is_bomb)
    except InvalidInput as refusal:
        said = str(refusal)
    assert case.says in said if case.says else said == ALLOWED


def test_none_is_a_fault_of_the_server_and_a_refusal_leaves_nothing(client: Client, db: None, home: Path) -> None:
    client.force_login(User.objects.create_superuser("root"))
    wrong = {}
    for case in CASES:
        parts = [(part.field, part.as_sent()) for part in case.upload]
        is_model = case.upload[0].field not in ("file", "prompts")
        sent: dict[str, Any] = {"name": "hostile"} | ({} if is_model or parts[0][0] == "file" else {"purpose": "prompts"})
        for field, file in parts:
            sent.setdefault("file" if field == "prompts" else field, []).append(file)
        with checks_here():
            status = 422 if case.is_bomb else client.post("/api/v1/models" if is_model else DATASETS, sent).status_code
        # a form's names lose what stands before a slash, and parts of no bytes and odd names are dropped on the way
        if status >= 500 or (case.says and status == 201 and not _loses_its_name(case)):
            wrong[case.name] = status
    assert wrong == {}
    assert len(list((home / "models").iterdir())) == Model.objects.count()
    assert len(list((home / "datasets").iterdir())) == Dataset.objects.count()
    assert list((home / "spool").iterdir()) == []


def _loses_its_name(case: Case) -> bool:
    return any(not part.name.isprintable() for part in case.upload)


def test_there_are_as_many_cases_as_promised() -> None:
    assert sum(case.says != ALLOWED for case in CASES) >= 120
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_same_seed_makes_the_same_upload() -> None:
    assert [mutated(3, number) for number in range(50)] == [mutated(3, number) for number in range(50)]
    assert mutated(3, 0) != mutated(4, 0)


def test_generated_ones_are_no_fault_no_wrong_allow_and_no_crash() -> None:
    tally = run_cases(NUM_GENERATED, seed=7)
    assert tally.problems == []
    assert tally.num_cases == NUM_GENERATED
    assert tally.allowed.total() > 100
    assert tally.refused.total() > 1_000
