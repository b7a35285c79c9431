"""``manage.py setup_headroom`` on an empty database, and again."""

import io
import json
from pathlib import Path

import pytest
from django.contrib.auth import authenticate
from django.core.management import call_command

from webapp.accounts.tokens import find_token_user
from webapp.catalog.models import Dataset, Model


def set_up() -> dict[str, str]:
    out = io.StringIO()
    call_command("setup_headroom", "--json", stdout=out)
    return json.loads(out.getvalue())


@pytest.mark.django_db
def test_the_first_run_prints_the_secrets_and_the_second_none() -> None:
    made = set_up()
    assert find_token_user(made["token"]).is_superuser
    assert authenticate(username=made["user"], password=made["password"]).get_username() == "admin"
    rows = list(Model.objects.order_by("pk").values_list("pk", flat=True))
    assert set_up() == {}
    assert list(Model.objects.order_by("pk").values_list("pk", flat=True)) == rows


@pytest.mark.django_db
def test_presets_and_the_shipped_text_belong_to_everyone(headroom_home: Path) -> None:
    set_up()
    preset = Model.objects.get(preset="gpt2")
    assert preset.owner is None
    assert preset.num_parameters == 124_439_808
    assert (headroom_home / preset.folder / "config.json").is_file()
    text = Dataset.objects.get(name="kjv")
    assert (text.owner, text.num_bytes > 1_000_000) == (None, True)
