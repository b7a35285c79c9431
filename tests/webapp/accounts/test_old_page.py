"""A form of a page that was opened before its reader last logged in."""

from django.contrib.auth.models import User
from django.test import Client


def test_an_old_form_is_refused_in_words_and_marked_for_the_script(ada: User) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(ada)
    answer = client.post("/jobs/new/price/", {"num_steps": "3"})
    assert answer.status_code == 403
    assert answer["X-Login-Changed"] == "yes"
    assert "this page was opened before you last logged in" in answer.content.decode().lower()
    assert "reload the page" in answer.content.decode()
