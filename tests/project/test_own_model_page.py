"""The code of docs/own-model.md is the family that the tests train, shard, adapt and serve."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_shows_the_tested_family() -> None:
    page = (ROOT / "docs" / "own-model.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    family = (ROOT / "tests" / "support" / "mynet.py").read_text(encoding="utf-8")
    assert len(code) > 5
    assert "".join(code).split() == family.split()
