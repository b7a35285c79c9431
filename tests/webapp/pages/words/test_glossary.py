"""The glossary explains what the pages can say."""

from typing import get_args

from django.contrib.auth.models import User
from django.test import Client

from optimizer.base.categories import CATEGORY_LABELS, LANES, TIERS
from optimizer.estimate.prediction import Verdict
from optimizer.profile.time_kinds import KINDS
from webapp.jobs.models import State
from webapp.pages.presentation import BLOCK_CHOICES
from webapp.pages.words.glossary import GLOSSARY

TERMS = [term for words in GLOSSARY for term, _ in words.terms]


def test_every_term_is_explained_once() -> None:
    assert len(set(TERMS)) == len(TERMS)


def test_whatever_the_program_can_call_a_thing_is_explained() -> None:
    codes = [*CATEGORY_LABELS.values(), *LANES, *(tier for tier in TIERS if tier != "remote"), *KINDS, *get_args(Verdict)]
    said = {code.replace("_", " ") for code in codes} | set(State.values) | {"remote store"}
    assert said - set(TERMS) == set()


def test_every_letter_of_a_block_is_explained() -> None:
    told = " ".join(meaning for words in GLOSSARY for _, meaning in words.terms)
    letters = [letter for letter, _ in BLOCK_CHOICES.values()]
    assert [letter for letter in letters if f"Letter {letter}." not in told and f"{letter} to " not in told] == []


def test_the_page_opens_for_whoever_is_logged_in(client: Client, ada: User) -> None:
    assert client.get("/words/").status_code == 302
    client.force_login(ada)
    assert "Dropped, and computed again in the backward pass" in client.get("/words/").content.decode()
