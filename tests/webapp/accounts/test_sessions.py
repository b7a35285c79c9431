"""Sessions and what a browser keeps of them: a new one at each log-in, none after the log-out, cookies that only TLS carries."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.test import Client

ROOT = Path(__file__).resolve().parents[3]
CREDENTIALS = {"username": "ada", "password": "correct horse battery"}


def session_of(client: Client) -> str:
    return client.cookies["sessionid"].value


def test_a_session_that_was_planted_before_the_log_in_opens_nothing_after_it(client: Client, ada: User) -> None:
    planted = client.session
    planted["project"] = ""
    planted.save()
    client.post("/login/", CREDENTIALS)
    assert client.get("/jobs/").status_code == 200
    assert session_of(client) != planted.session_key
    assert len(session_of(client)) >= 32
    assert Client(headers={"Cookie": f"sessionid={planted.session_key}"}).get("/jobs/").status_code == 302


def test_after_the_log_out_the_session_opens_nothing(client: Client, ada: User) -> None:
    client.post("/login/", CREDENTIALS)
    kept = session_of(client)
    stolen = Client(headers={"Cookie": f"sessionid={kept}"})
    assert stolen.get("/jobs/").status_code == 200
    client.post("/logout/")
    assert stolen.get("/jobs/").status_code == 302


def test_a_password_counts_exactly_as_it_was_typed(client: Client, ada: User) -> None:
    for password in ("Correct horse battery", "correct horse battery ", "correct horse batter", "correct horse battery1"):
        assert client.post("/login/", {**CREDENTIALS, "password": password}).status_code == 200
        assert "sessionid" not in client.cookies


@pytest.mark.parametrize("path", ["/login/", "/password/"])
def test_passwords_are_masked_and_may_be_pasted(client: Client, ada: User, path: str) -> None:
    if path == "/password/":
        client.force_login(ada)
    page = client.get(path).content.decode()
    inputs = [tag for tag in re.findall(r"<input[^>]*>", page) if "password" in tag]
    assert inputs
    assert all('type="password"' in tag and 'autocomplete="off"' not in tag for tag in inputs)
    assert "onpaste" not in page


def test_no_other_site_may_read_an_answer(client: Client, ada: User) -> None:
    client.force_login(ada)
    for path in ("/jobs/", "/api/v1/jobs"):
        answer = client.get(path, headers={"Origin": "https://evil.example"})
        assert "Access-Control-Allow-Origin" not in answer


@pytest.mark.parametrize("path", ["/.git/HEAD", "/static/../.git/HEAD", "/.env", "/static/.git/config", "/pyproject.toml"])
def test_no_file_of_the_program_can_be_fetched(client: Client, path: str, db: None) -> None:
    assert client.get(path).status_code in (301, 404)


def test_behind_tls_cookies_are_bound_to_it_and_browsers_stay_on_it(tmp_path: Path) -> None:
    code = (
        "from webapp import settings as s; print(s.SESSION_COOKIE_NAME, s.CSRF_COOKIE_NAME, s.SESSION_COOKIE_SECURE, "
        "s.CSRF_COOKIE_SECURE, s.SESSION_COOKIE_HTTPONLY, s.SECURE_HSTS_SECONDS, s.SECURE_SSL_REDIRECT)"
    )
    environment = {**os.environ, "HEADROOM_PRODUCTION": "1", "HEADROOM_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["__Host-sessionid", "__Host-csrftoken", "True", "True", "True", "31536000", "True"]


def test_passwords_are_kept_by_argon2() -> None:
    from webapp import settings

    assert settings.PASSWORD_HASHERS[0] == "django.contrib.auth.hashers.Argon2PasswordHasher"
