"""Requests that a model's, dataset's or upload's present state does not allow, or that come while too many files are checked.

HeadroomError
├── ChecksBusy            no file can be checked just now; the API answers 503
└── CatalogConflict       the API answers 409
    ├── ModelExists           a run's model is there already, or its name is taken
    ├── StorageLimitReached   a person or a project stores as much as is allowed
    └── WrongOffset           a piece does not begin where the file ends
"""

from optimizer.base.errors import HeadroomError


class ChecksBusy(HeadroomError):
    """Nothing is wrong with what was sent; it can be sent again in a moment."""

    code = "checks_busy"
    retry_after_s = 5

    def __init__(self, found: str) -> None:
        super().__init__(f"{found}, so this one cannot be checked now", hint=f"Send it again in {self.retry_after_s} seconds.")


class CatalogConflict(HeadroomError):
    """The request is well formed; the present state forbids it."""

    code = "conflict"


class ModelExists(CatalogConflict):
    """Names the model that is there."""

    code = "model_exists"

    def __init__(self, message: str, *, model_id: str, hint: str) -> None:
        super().__init__(message, hint=hint, model_id=model_id)


class StorageLimitReached(CatalogConflict):
    """Its fields name the setting, what is stored and what is allowed."""

    code = "storage_limit_reached"


class WrongOffset(CatalogConflict):
    """Says where to go on."""

    code = "wrong_offset"

    def __init__(self, name: str, *, sent_at: int, received_bytes: int) -> None:
        super().__init__(
            f"the piece of {name} begins at byte {sent_at:,}; {received_bytes:,} bytes are here",
            hint=f"Go on at byte {received_bytes}.",
            received_bytes=received_bytes,
        )
