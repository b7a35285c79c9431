"""The room that uploads have: what the disk has free, less a reserve, or less where a setting says so."""

import shutil

from django.conf import settings

from optimizer.base.errors import DiskFull
from optimizer.base.units import format_bytes


def upload_limit_bytes(*, promised_bytes: int = 0) -> int:
    """Largest upload that may begin now, never negative. promised_bytes: what other uploads still wait for."""
    free_bytes = shutil.disk_usage(settings.HEADROOM_HOME).free - int(settings.HEADROOM_DISK_RESERVE_BYTES) - promised_bytes
    limit_bytes = int(settings.HEADROOM_MAX_UPLOAD_BYTES)
    return max(0, min(free_bytes, limit_bytes) if limit_bytes else free_bytes)


def require_floor() -> None:
    """Raise DiskFull where less is free than must stay so: what is accepted now could not be worked on."""
    free_bytes, floor_bytes = shutil.disk_usage(settings.HEADROOM_HOME).free, int(settings.HEADROOM_DISK_FLOOR_BYTES)
    if free_bytes < floor_bytes:
        raise DiskFull(
            f"the disk of the service has {format_bytes(free_bytes)} free; "
            f"nothing new is accepted below {format_bytes(floor_bytes)}",
            hint="Delete runs, models or datasets that are no longer needed, or ask an administrator for room.",
            free_bytes=free_bytes,
            floor_bytes=floor_bytes,
        )


def require_room(num_bytes: int, *, promised_bytes: int) -> None:
    """Raise DiskFull with what is asked for and what there is."""
    room_bytes = upload_limit_bytes(promised_bytes=promised_bytes)
    if num_bytes > room_bytes:
        reserve = format_bytes(int(settings.HEADROOM_DISK_RESERVE_BYTES))
        raise DiskFull(
            f"the files have {num_bytes:,} bytes; the disk has room for {room_bytes:,}: what is free, less a reserve "
            f"of {reserve} and {promised_bytes:,} bytes that other uploads wait for",
            hint="Free some disk space, or give up an upload that is open.",
            num_bytes=num_bytes,
            room_bytes=room_bytes,
        )
