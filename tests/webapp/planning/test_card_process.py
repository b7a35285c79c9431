"""Cards are looked at by a process of its own, which finds what a search in this one finds."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.base.errors import InvalidInput
from optimizer.goal import UNLIMITED_BYTES, GenerationGoal, Goal
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.profile import Profile
from optimizer.workload import GenerationWorkload, TrainingWorkload
from webapp.planning.card_process import CardProcess, CardQuestion, look_at_card


@pytest.fixture
def process() -> Iterator[CardProcess]:
    made = CardProcess()
    yield made
    made.close()


@pytest.fixture
def training(llama_profile: Profile) -> CardQuestion:
    return CardQuestion(
        card="T4",
        profile=llama_profile,
        profile_sha256="of the llama",
        workload=TrainingWorkload(sequence_length=64, global_batch_size=4, num_steps=10),
        goal=Goal(device_budget_bytes=UNLIMITED_BYTES, allow_lossy=True),
    )


@pytest.fixture
def generation(writer_folder: Path) -> CardQuestion:
    return CardQuestion(
        card="T4",
        profile=GenerationProfile.from_json(json.loads((writer_folder / "profile.json").read_text())),
        profile_sha256="of the writer",
        workload=GenerationWorkload(prompt_length=16, num_new_tokens=8, num_sequences=4),
        goal=GenerationGoal(device_budget_bytes=UNLIMITED_BYTES),
    )


def test_it_finds_what_this_process_would_find_of_either_kind(
    process: CardProcess, training: CardQuestion, generation: CardQuestion
) -> None:
    for question in (training, generation, replace(training, card="RTX 4090")):
        found = process.look(question)
        assert found == look_at_card(question)
        assert found.chosen is not None
        assert found.chosen.prediction.timeline == ()


def test_a_profile_is_sent_once_until_another_one_is_asked_about(
    process: CardProcess, training: CardQuestion, generation: CardQuestion
) -> None:
    assert process.look(training) is not None
    unread = replace(training, card="RTX 4090", profile=replace(training.profile, parts=()))
    assert process.look(unread) == look_at_card(replace(training, card="RTX 4090"))
    assert process.look(generation) is not None
    assert process.look(unread) is None


def test_an_error_of_the_search_is_none_and_is_met_by_who_looks_by_themselves(
    process: CardProcess, training: CardQuestion
) -> None:
    unknown = replace(training, card="no such card")
    assert process.look(unknown) is None
    with pytest.raises(InvalidInput, match="no such card"):
        look_at_card(unknown)
    assert process.look(training) is not None


def test_one_that_has_ended_is_started_again(process: CardProcess, training: CardQuestion) -> None:
    assert process.look(training) is not None
    ended = process._process
    assert ended is not None
    ended.kill()
    ended.wait()
    assert process.look(training) == look_at_card(training)
    assert process._process is not ended


def test_it_imports_neither_torch_nor_the_records(process: CardProcess, training: CardQuestion) -> None:
    assert process.look(training) is not None
    assert process._process is not None
    mapped = Path(f"/proc/{process._process.pid}/maps").read_text()
    assert "libtorch" not in mapped
    assert "_sqlite3" not in mapped
