"""A mirror's process says what is new, and nothing secret."""

import json
import os

from worker.mirrors.voice import MAX_TROUBLE_CHARACTERS, Voice

ENVIRONMENT = {"WANDB_API_KEY": "k123456789", "MLFLOW_TRACKING_PASSWORD": "open sesame", "WANDB_PROJECT": "lab"}


def test_a_key_a_password_and_credentials_in_an_address_are_never_said() -> None:
    said = Voice(-1, environment=ENVIRONMENT).clean("k123456789 at https://ada:pw@host/x of lab:\n open sesame")
    assert said == "… at https://host/x of lab: …"


def test_a_long_trouble_is_cut() -> None:
    assert len(Voice(-1, environment={}).clean("x" * 5000)) == MAX_TROUBLE_CHARACTERS + 1


def test_only_what_is_new_is_said() -> None:
    reading, writing = os.pipe()
    voice = Voice(writing, environment={})
    voice.say(trouble="")
    voice.say(trouble="")
    voice.say(url="https://host/run", trouble="away")
    voice.say(trouble="")
    os.close(writing)
    with os.fdopen(reading) as lines:
        said = [json.loads(line) for line in lines]
    assert said == [
        {"url": "", "trouble": ""},
        {"url": "https://host/run", "trouble": "away"},
        {"url": "https://host/run", "trouble": ""},
    ]
