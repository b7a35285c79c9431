"""Shapes of answers that several routes give."""

from typing import Any, Literal

from ninja import Field, Schema

RETRY_AFTER_S = "2"


class ModelRow(Schema):
    """A model of a list."""

    id: str
    name: str
    project: str | None
    preset: str
    model_type: str
    num_parameters: int | None
    has_weights: bool
    linked_from: str | None
    """The folder on the server where its weights stay; null where they are kept here."""
    generation: dict[str, Any]
    """Sampling that its makers ask for, used where a generate job says nothing."""
    has_tokenizer: bool
    has_chat: bool
    unread: list[str] = Field(description="what its config.json asked for that no price has, in sentences")
    from_job: str | None = Field(description="the run that trained it; null for what was uploaded")
    created_at: str
    profile: Literal["ready", "pending", "failed"]


class Pending(Schema):
    """Ask again after Retry-After."""

    profile: Literal["pending"] = "pending"
    waiting_for: Literal["profile"] = "profile"


class PricedPlan(Schema):
    """One plan with its price."""

    label: str
    plan: dict[str, Any]
    prediction: dict[str, Any]
    verdict: Literal["fits", "tight", "does_not_fit", "unknown"]
