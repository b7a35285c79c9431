"""Ids that sort by creation time and say what they name: ``job_019a3c…`` (UUIDv7 in hex behind a prefix)."""

import secrets
import time


def new_id(prefix: str) -> str:
    """``prefix`` and 32 hex digits: 48 bits of Unix milliseconds, version 7, 12 bits of the millisecond's fraction, so that rows
    made within one sort too, and 62 random bits (RFC 9562, 6.2, method 3).
    """
    milliseconds, rest_ns = divmod(time.time_ns(), 1_000_000)
    fraction = (rest_ns << 12) // 1_000_000
    value = (milliseconds << 80) | (0x7 << 76) | (fraction << 64) | (0b10 << 62) | secrets.randbits(62)
    return f"{prefix}_{value:032x}"


def new_job_id() -> str:
    return new_id("job")


def new_batch_id() -> str:
    return new_id("batch")


def new_file_id() -> str:
    """With a hyphen, as OpenAI's files have it."""
    return new_id("file").replace("_", "-", 1)


def new_model_id() -> str:
    return new_id("model")


def new_dataset_id() -> str:
    return new_id("dataset")


def new_machine_id() -> str:
    return new_id("machine")


def new_artifact_id() -> str:
    return new_id("artifact")


def new_plan_id() -> str:
    return new_id("plan")


def new_project_id() -> str:
    return new_id("project")


def new_webhook_id() -> str:
    return new_id("webhook")


def new_delivery_id() -> str:
    return new_id("delivery")


def new_audit_id() -> str:
    return new_id("audit")


def new_upload_id() -> str:
    return new_id("upload")
