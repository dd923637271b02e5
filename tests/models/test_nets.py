"""A net is filled from its file without a second copy in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from textmill.models import initial_weights, open_family
from textmill.models.gpt2.family import Shape
from textmill.storage.files import write_bytes
from textmill.storage.tensor_files import encode_safetensors

SHAPE = Shape(vocab=4096, positions=256, layers=4, heads=8, width=512, inner=2048, eos_id=0)
HELD, PEAK = 1.5, 2.6
"""Most copies of the weights: in the net, and at the peak, including the mapped pages of the file."""
FILL = """
import re, sys
from pathlib import Path
from dataclasses import replace
import torch
from textmill.models import initial_weights, read_shape
from textmill.models.nets_torch import fill, new_net, open_net

def held(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

folder, size = Path(sys.argv[1]), int(sys.argv[2])
small = replace(read_shape(folder), layers=1, width=16, inner=32, heads=2, vocab=128)
where = "what is loaded with the first net is not the weights'"
fill(new_net(small, torch.device("cpu")), initial_weights(small, 1), where)
before, own = held("VmHWM"), held("RssAnon")
net = open_net(folder, torch.device("cpu"))
print((held("RssAnon") - own) / size, (held("VmHWM") - before) / size)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, family = tmp_path_factory.mktemp("large"), open_family("gpt2")
    write_bytes(made / "model.safetensors", encode_safetensors(list(initial_weights(SHAPE, 1))))
    (made / "config.json").write_text(json.dumps(family.hf_config_of(SHAPE)))
    return made


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what a process holds")
def test_one_copy_is_enough(folder: Path) -> None:
    words = [str(folder), str((folder / "model.safetensors").stat().st_size)]
    done = subprocess.run([sys.executable, "-c", FILL, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    held, peak = map(float, done.stdout.split())
    print(
        f"a net of {SHAPE.parameters:,} parameters holds {held:.2f} copies of its file, at most {peak:.2f} with the "
        "file's own pages"
    )
    assert 0.9 < held < HELD
    assert peak < PEAK
