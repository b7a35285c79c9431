"""The client's calls about people and what they may do: projects, tokens, accounts, the audit trail, webhooks."""

from typing import cast

from headroom.client import types
from headroom.client.connection import Connection, in_path


class AccessCalls(Connection):
    """Calls about permissions and about the audit trail."""

    def tokens(self) -> list[types.Token]:
        """One's own. A new one is made on the page: a token makes no others."""
        return self._all_rows("tokens")

    def revoke_token(self, token_id: str) -> None:
        self._request("DELETE", f"tokens/{in_path(token_id)}")

    def projects(self) -> list[types.Project]:
        return self._all_rows("projects")

    def create_project(self, name: str) -> types.Project:
        return cast(types.Project, self._json("POST", "projects", json={"name": name}))

    def members(self, project_id: str) -> list[types.Member]:
        return self._all_rows(f"projects/{in_path(project_id)}/members")

    def set_member(self, project_id: str, username: str, *, role: types.Role) -> types.Member:
        """Let somebody in, or give them another role."""
        path = f"projects/{in_path(project_id)}/members/{in_path(username)}"
        return cast(types.Member, self._json("PUT", path, json={"role": role}))

    def remove_member(self, project_id: str, username: str) -> None:
        self._request("DELETE", f"projects/{in_path(project_id)}/members/{in_path(username)}")

    def people(self) -> list[types.Person]:
        return self._all_rows("people")

    def create_person(self, username: str, *, role: types.Role = "member") -> types.NewPerson:
        return cast(types.NewPerson, self._json("POST", "people", json={"username": username, "role": role}))

    def change_person(
        self, username: str, *, role: types.Role | None = None, is_active: bool | None = None
    ) -> types.Person:
        changes = {"role": role, "is_active": is_active}
        body = {name: value for name, value in changes.items() if value is not None}
        return cast(types.Person, self._json("PATCH", f"people/{in_path(username)}", json=body))

    def audit(
        self, *, project_id: str = "", actor: str = "", action: str = "", limit: int = 50
    ) -> list[types.AuditRecord]:
        """Newest first: of a project, else of the service. action: how it begins, such as ``job.``"""
        path = f"projects/{in_path(project_id)}/audit" if project_id else "audit"
        params = {"actor": actor, "action": action, "page_size": min(limit, 100)}
        return self._all_rows(path, params={name: value for name, value in params.items() if value}, limit=limit)

    def webhooks(self, project_id: str) -> list[types.Webhook]:
        return self._all_rows(f"projects/{in_path(project_id)}/webhooks")

    def create_webhook(
        self, project_id: str, url: str, *, events: tuple[str, ...] = (), kind: str | None = None
    ) -> types.NewWebhook:
        """url: to post to, or a mail address. kind: ``webhook``, ``slack`` or ``email``; seen by the address if not given."""
        body = {"url": url, "events": list(events), **({"kind": kind} if kind else {})}
        path = f"projects/{in_path(project_id)}/webhooks"
        return cast(types.NewWebhook, self._json("POST", path, json=body))

    def set_webhook_active(self, webhook_id: str, *, is_active: bool) -> types.Webhook:
        return cast(types.Webhook, self._json("PATCH", f"webhooks/{in_path(webhook_id)}", json={"is_active": is_active}))

    def renew_webhook_secret(self, webhook_id: str) -> types.NewWebhook:
        return cast(types.NewWebhook, self._json("POST", f"webhooks/{in_path(webhook_id)}/secret"))

    def delete_webhook(self, webhook_id: str) -> None:
        self._request("DELETE", f"webhooks/{in_path(webhook_id)}")

    def test_webhook(self, webhook_id: str) -> types.Delivery:
        return cast(types.Delivery, self._json("POST", f"webhooks/{in_path(webhook_id)}/test"))

    def deliveries(self, webhook_id: str, *, limit: int = 50) -> list[types.Delivery]:
        return self._all_rows(f"webhooks/{in_path(webhook_id)}/deliveries", limit=limit)

    def replay_delivery(self, delivery_id: str) -> types.Delivery:
        return cast(types.Delivery, self._json("POST", f"deliveries/{in_path(delivery_id)}/replay"))
