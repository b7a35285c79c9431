"""Headers of answers, as the real server sends them."""

import httpx
import pytest
from django.contrib.auth.models import User
from django.test import Client

from tests.webapp.conftest import make_person
from tests.webapp.served import LIMIT_S, served
from webapp.accounts.tokens import create_token
from webapp.live.record import from_database


@pytest.mark.django_db(transaction=True)
async def test_no_answer_names_the_server_or_is_kept() -> None:
    token = await from_database(lambda: create_token(user=make_person("ada"), name="laptop")[1])
    headers = {"Authorization": f"Bearer {token}"}
    async with served() as port, httpx.AsyncClient(timeout=LIMIT_S, trust_env=False, headers=headers) as client:
        answers = [
            await client.get(f"http://127.0.0.1:{port}{path}") for path in ("/api/v1/jobs", "/login/", "/healthz")
        ]
    for answer in answers:
        assert answer.status_code == 200
        assert "server" not in answer.headers
        assert "no-store" in answer.headers["cache-control"]
        assert "camera=()" in answer.headers["permissions-policy"]


@pytest.mark.parametrize("path", ["/jobs/", "/jobs/new/", "/settings/", "/jobs/none/"])
def test_pages_of_somebody_who_is_signed_in_are_kept_in_no_cache(client: Client, ada: User, path: str) -> None:
    client.force_login(ada)
    assert client.get(path)["Cache-Control"] == "no-store"
