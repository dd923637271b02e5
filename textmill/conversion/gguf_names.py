"""Names of tensors in a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping


def read_name(name: str, names: Mapping[str, str]) -> tuple[str | None, str, str] | None:
    """The block, the module by its family's name, and weight or bias; `names`: from the family's names to the file's.

    blk.3.attn_q.weight -> ("3", "self_attn.q_proj", "weight"). The block is None outside the blocks; None is returned
    for a module that `names` does not have.
    """
    family_names = {gguf_name: family_name for family_name, gguf_name in names.items()}
    block: str | None = None
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        block, stem, ending = match.groups()
    elif "." in name:
        stem, ending = name.rsplit(".", 1)
    else:
        stem = name
        ending = ""
    return (block, family_names[stem], ending) if stem in family_names else None
