"""What config needs to know of the model families: their names, sizes and the model types that each reads.

A family is a folder textmill/models/NAME. Its family.json has the `model_type`s of config.json that it reads, the
`defaults` of its numbers, and the numbers of each named size, which override them. It is data, because config imports
no models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIRST = "gpt2"
"""The default family, which lists begin with."""
SIZES: dict[str, dict[str, dict[str, Any]]] = {}
"""The numbers of each named size, by family."""
FAMILY_BY_TYPE: dict[str, str] = {}
"""The family that reads a config.json, by its model_type."""


def _read_families() -> None:
    files = (Path(__file__).parents[1] / "models").glob("*/family.json")
    for file in sorted(files, key=lambda file: (file.parent.name != FIRST, file.parent.name)):
        family = json.loads(file.read_text(encoding="utf-8"))
        name = file.parent.name
        SIZES[name] = {size: {**family["defaults"], **numbers} for size, numbers in family["sizes"].items()}
        FAMILY_BY_TYPE.update(dict.fromkeys(family["model_types"], name))


_read_families()
