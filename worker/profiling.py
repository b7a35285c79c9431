"""What the attempt's process does for a ``profile`` job."""

import json
from pathlib import Path
from typing import Any


def profile_to_file(config: dict[str, Any], file: Path) -> None:
    """Trace the model that ``config`` describes; the profile's JSON appears at ``file``, whole or not at all."""
    from optimizer.models.spec import read_model_spec
    from optimizer.profile.trace import profile_model

    document = profile_model(read_model_spec(config)).to_json()
    staged = file.with_name(f".{file.name}")
    staged.write_text(json.dumps(document))
    staged.replace(file)
