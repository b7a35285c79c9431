"""Requests that a model's, dataset's or upload's present state does not allow.

HeadroomError
└── CatalogConflict       the API answers 409
    ├── ModelExists       a run's model is there already, or its name is taken
    └── WrongOffset       a piece does not begin where the file ends
"""

from optimizer.base.errors import HeadroomError


class CatalogConflict(HeadroomError):
    """The request is well formed; the present state forbids it."""

    code = "conflict"


class ModelExists(CatalogConflict):
    """Names the model that is there."""

    code = "model_exists"

    def __init__(self, message: str, *, model_id: str, hint: str) -> None:
        super().__init__(message, hint=hint, model_id=model_id)


class WrongOffset(CatalogConflict):
    """Says where to go on."""

    code = "wrong_offset"

    def __init__(self, name: str, *, sent_at: int, received_bytes: int) -> None:
        super().__init__(
            f"the piece of {name} begins at byte {sent_at:,}; {received_bytes:,} bytes are here",
            hint=f"Go on at byte {received_bytes}.",
            received_bytes=received_bytes,
        )
