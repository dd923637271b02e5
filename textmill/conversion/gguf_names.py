"""Names of tensors in a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping


def read_name(name: str, names: Mapping[str, str]) -> tuple[str | None, str, str] | None:
    """The block, the module by its family's name (`names` has the file's), and weight or bias.

    The block is None outside the blocks; nothing is returned for a module that `names` does not have.
    """
    ours = {theirs: mine for mine, theirs in names.items()}
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    stem, ending = (block[2], block[3]) if block else name.rsplit(".", 1) if "." in name else (name, "")
    return (block[1] if block else None, ours[stem], ending) if stem in ours else None
