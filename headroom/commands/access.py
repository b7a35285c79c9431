"""``headroom projects``, ``tokens``, ``people``, ``audit`` and ``webhooks``: who may do what, and who hears of it."""

import argparse
from collections.abc import Callable

from headroom.client import HeadroomClient
from headroom.client.types import Webhook
from headroom.commands.catalog import Connect, Run, Subparsers, add_group, with_client
from headroom.commands.tables import moment, print_table

ROLES = ("viewer", "member", "admin")
ARGUMENT_HELP = {
    "name": "of the new project",
    "project": "id, as headroom projects list shows it",
    "username": "name to log in with",
    "token": "id, as headroom tokens list shows it",
    "url": "https address, or a mail address",
    "webhook": "id, as headroom webhooks list shows it",
    "delivery": "id, as headroom webhooks log shows it",
}


def add_commands(commands: Subparsers, connection: argparse.ArgumentParser, *, connect: Connect) -> None:
    def add(group: Subparsers, name: str, run: Run, help_text: str, *words: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = group.add_parser(name, help=help_text, parents=[connection])
        command.set_defaults(run=lambda options: with_client(connect, run, options))
        for word in words:
            command.add_argument(word, help=ARGUMENT_HELP[word])
        return command

    _add_projects(commands, add)
    tokens = add_group(commands, "tokens", "your API tokens; new ones are made on the page, after a log-in")
    add(tokens, "list", _list_tokens, "list your tokens")
    add(tokens, "revoke", _revoke_token, "it opens nothing from then on", "token")
    people = add_group(commands, "people", "accounts of the service, for its administrators")
    add(people, "list", _list_people, "all accounts")
    add(people, "add", _add_person, "a new account; its first password is shown once", "username").add_argument(
        "--role", choices=ROLES, default="member", help="default: member"
    )
    change = add(people, "change", _change_person, "another role, or opened and closed", "username")
    change.add_argument("--role", choices=ROLES, help="the new one")
    change.add_argument("--close", dest="is_active", action="store_const", const=False, help="it opens nothing any more")
    change.add_argument("--open", dest="is_active", action="store_const", const=True, help="it opens again")
    audit = add(commands, "audit", _audit, "who did what, newest first")
    audit.add_argument("--project", default="", help="of one project (else of the service, for its administrators)")
    audit.add_argument("--actor", default="", help="who did it, such as user:ada")
    audit.add_argument("--action", default="", help="how it begins, such as job.")
    audit.add_argument("--limit", type=int, default=50, help="so many (default: 50)")
    _add_webhooks(commands, add)


def _add_projects(commands: Subparsers, add: Callable[..., argparse.ArgumentParser]) -> None:
    projects = add_group(commands, "projects", "what is shared, and with whom")
    add(projects, "list", _list_projects, "those you belong to")
    add(projects, "create", _create_project, "a new one, which you administer", "name")
    add(projects, "members", _list_members, "who belongs to one", "project")
    add(projects, "admit", _set_member, "let somebody in, or give them another role", "project", "username").add_argument(
        "--role", choices=ROLES, default="member", help="default: member"
    )
    add(projects, "remove", _remove_member, "somebody no longer belongs to it", "project", "username")


def _add_webhooks(commands: Subparsers, add: Callable[..., argparse.ArgumentParser]) -> None:
    webhooks = add_group(commands, "webhooks", "addresses that hear of a project's jobs")
    add(webhooks, "list", _list_webhooks, "of a project", "project")
    adding = add(webhooks, "add", _add_webhook, "an address to post to, a Slack channel's, or a mail address", "project", "url")
    adding.add_argument("--event", action="append", default=[], metavar="NAME", help="only these; may be given several times")
    adding.add_argument("--kind", choices=("webhook", "slack", "email"), help="seen by the address if not given")
    add(webhooks, "test", _test_webhook, "send a test message", "webhook")
    add(webhooks, "log", _list_deliveries, "what was sent and how it went", "webhook")
    add(webhooks, "replay", _replay, "send a message of the log once more", "delivery")
    add(webhooks, "hold", _hold_webhook, "send nothing there for now", "webhook")
    add(webhooks, "release", _release_webhook, "send there again", "webhook")
    add(webhooks, "secret", _renew_secret, "another secret, shown once", "webhook")
    add(webhooks, "delete", _delete_webhook, "with its log", "webhook")


def _list_projects(client: HeadroomClient, options: argparse.Namespace) -> None:
    rows = [(row["id"], row["name"], row["role"], "yours" if row["is_own"] else "") for row in client.projects()]
    print_table(("id", "name", "your role", ""), rows, empty="no projects")


def _create_project(client: HeadroomClient, options: argparse.Namespace) -> None:
    project = client.create_project(options.name)
    print(f"{project['id']}  {project['name']}")


def _list_members(client: HeadroomClient, options: argparse.Namespace) -> None:
    rows = [(row["username"], row["role"], moment(row["since"])) for row in client.members(options.project)]
    print_table(("name", "role", "since"), rows, empty="nobody")


def _set_member(client: HeadroomClient, options: argparse.Namespace) -> None:
    member = client.set_member(options.project, options.username, role=options.role)
    print(f"{member['username']} is a {member['role']}")


def _remove_member(client: HeadroomClient, options: argparse.Namespace) -> None:
    client.remove_member(options.project, options.username)
    print(f"{options.username} no longer belongs to it")


def _list_tokens(client: HeadroomClient, options: argparse.Namespace) -> None:
    rows = [
        (
            row["id"],
            row["name"],
            row["scope"],
            row["project"] or "all",
            "revoked" if row["revoked_at"] else moment(row["expires_at"]),
        )
        for row in client.tokens()
    ]
    print_table(("id", "name", "scope", "project", "until"), rows, empty="no tokens")


def _revoke_token(client: HeadroomClient, options: argparse.Namespace) -> None:
    client.revoke_token(options.token)
    print("revoked")


def _list_people(client: HeadroomClient, options: argparse.Namespace) -> None:
    rows = [
        (row["username"], row["role"], "" if row["is_active"] else "closed", moment(row["last_login_at"], empty="never"))
        for row in client.people()
    ]
    print_table(("name", "role", "", "last log-in"), rows, empty="nobody")


def _add_person(client: HeadroomClient, options: argparse.Namespace) -> None:
    person = client.create_person(options.username, role=options.role)
    print(f"{person['username']}  {person['role']}  first password, shown this once: {person['password']}")


def _change_person(client: HeadroomClient, options: argparse.Namespace) -> None:
    person = client.change_person(options.username, role=options.role, is_active=options.is_active)
    print(f"{person['username']}  {person['role']}{'' if person['is_active'] else ', closed'}")


def _audit(client: HeadroomClient, options: argparse.Namespace) -> None:
    records = client.audit(
        project_id=options.project, actor=options.actor, action=options.action, limit=options.limit
    )
    rows = [(moment(row["at"]), row["actor"], row["action"], row["outcome"], row["target"], row["detail"]) for row in records]
    print_table(("at", "who", "what", "", "on", ""), rows, empty="nothing yet")


def _list_webhooks(client: HeadroomClient, options: argparse.Namespace) -> None:
    rows = [(row["id"], row["kind"], row["url"], *_webhook_words(row)) for row in client.webhooks(options.project)]
    print_table(("id", "kind", "address", "events", ""), rows, empty="none")


def _webhook_words(webhook: Webhook) -> tuple[str, str]:
    return ", ".join(webhook["events"]) or "all", "" if webhook["is_active"] else "held back"


def _add_webhook(client: HeadroomClient, options: argparse.Namespace) -> None:
    webhook = client.create_webhook(options.project, options.url, events=tuple(options.event), kind=options.kind)
    secret = f"  secret, shown this once: {webhook['secret']}" if webhook["secret"] else f"  {webhook['kind']}"
    print(f"{webhook['id']}{secret}")


def _test_webhook(client: HeadroomClient, options: argparse.Namespace) -> None:
    print(f"{client.test_webhook(options.webhook)['id']}  see: headroom webhooks log {options.webhook}")


def _list_deliveries(client: HeadroomClient, options: argparse.Namespace) -> None:
    rows = [
        (row["id"], moment(row["created_at"]), row["event"], row["state"], str(row["status_code"] or row["trouble"]))
        for row in client.deliveries(options.webhook)
    ]
    print_table(("id", "at", "event", "state", ""), rows, empty="nothing was sent yet")


def _replay(client: HeadroomClient, options: argparse.Namespace) -> None:
    print(client.replay_delivery(options.delivery)["id"])


def _hold_webhook(client: HeadroomClient, options: argparse.Namespace) -> None:
    client.set_webhook_active(options.webhook, is_active=False)
    print("held back")


def _release_webhook(client: HeadroomClient, options: argparse.Namespace) -> None:
    client.set_webhook_active(options.webhook, is_active=True)
    print("sends again")


def _renew_secret(client: HeadroomClient, options: argparse.Namespace) -> None:
    print(f"secret, shown this once: {client.renew_webhook_secret(options.webhook)['secret']}")


def _delete_webhook(client: HeadroomClient, options: argparse.Namespace) -> None:
    client.delete_webhook(options.webhook)
    print("deleted")
