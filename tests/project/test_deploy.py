"""The files in deploy/ are valid for the programs that read them, and name files and settings that exist."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.support.own_packages import own_wheel
from textmill.commands.table import COMMANDS
from textmill.where import open_where, recipe_names

DEPLOY = ROOT / "deploy"
SKYPILOT_KEYS = {"name", "num_nodes", "resources", "workdir", "file_mounts", "envs", "setup", "run"}
"""Those of SkyPilot's documentation that the file uses; its own parser needs hundreds of packages."""


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    return found


def check_command(words: list[str]) -> None:
    """The command exists, its recipe too, and all its settings are accepted."""
    assert words[0] in COMMANDS
    where, settings = words[1], [word for word in words[2:] if "=" in word]
    if where.endswith(".yaml"):
        assert Path(where).stem in recipe_names()
    open_where(Path(where).stem if where.endswith(".yaml") else "quickstart", settings)


def from_wheel(pinned: str, path: str) -> Any:
    with zipfile.ZipFile(own_wheel(pinned)) as wheel:
        return json.loads(wheel.read(path))


def test_commands() -> None:
    services = load("compose.yaml")["services"]
    for name in ("train", "serve"):
        check_command(services[name]["command"])
    (container,) = load("kubernetes.yaml")["spec"]["template"]["spec"]["containers"]
    assert (ROOT / "recipes" / "launch" / container["command"][1]).is_file()
    check_command(["train", *container["args"]])
    start = re.findall(r"^ExecStart=(.*)$", (DEPLOY / "textmill.service").read_text(), re.MULTILINE)
    check_command(shlex.split(start[0])[1:])
    config = load("skypilot.yaml")["envs"]["CONFIG"]
    assert (ROOT / config).is_file()


def test_no_image_names_a_registry() -> None:
    images = re.findall(r"^\s*(?:FROM|image:)\s+(\S+)", "\n".join(path.read_text() for path in DEPLOY.iterdir()), re.M)
    assert len(images) >= 4
    assert not [image for image in images if "." in image.partition("/")[0].partition(":")[0]]


def test_dockerfile_copies_what_exists_and_is_not_ignored() -> None:
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().split() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names == kept
    assert all((ROOT / name).exists() for name in names)


@pytest.mark.long
def test_dockerfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(own_wheel("dockerfile-parse==2.0.1")))
    parser = importlib.import_module("dockerfile_parse").DockerfileParser(fileobj=(DEPLOY / "Dockerfile").open("r+b"))
    steps = [(one["instruction"], one["value"]) for one in parser.structure if one["instruction"] != "COMMENT"]
    known = {
        "ARG",
        "FROM",
        "RUN",
        "ENV",
        "WORKDIR",
        "COPY",
        "USER",
        "VOLUME",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    assert {name for name, _ in steps} <= known
    stages = [value.rpartition(" AS ")[2] for name, value in steps if name == "FROM"]
    assert stages == ["build", "cpu", "cuda"]
    assert [value for name, value in steps if name == "USER"][-1] == "textmill"
    (health,) = (value for name, value in steps if name == "HEALTHCHECK")
    assert "/ready" in health
    for name, value in steps:
        if name == "RUN":
            assert subprocess.run(["sh", "-n", "-c", value]).returncode == 0, value


@pytest.mark.long
def test_compose() -> None:
    import jsonschema_rs

    schema = from_wheel("check-jsonschema==0.39.0", "check_jsonschema/builtin_schemas/vendor/compose-spec.json")
    jsonschema_rs.validate(schema, load("compose.yaml"))
    assert load("compose.yaml")["services"]["train"]["build"]["target"] == "${TEXTMILL_TARGET:-cpu}"


@pytest.mark.long
def test_kubernetes() -> None:
    import jsonschema_rs

    folder = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict"
    definitions = from_wheel("kubernetes-validate==1.37.0", f"{folder}/_definitions.json")
    schema = {
        "$schema": definitions["$schema"],
        "$ref": "#/$defs/io.k8s.api.batch.v1.Job",
        "$defs": definitions["$defs"],
    }
    jsonschema_rs.validate(schema, load("kubernetes.yaml"))
    wrong = load("kubernetes.yaml")
    wrong["spec"]["backoflimit"] = 3
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(schema, wrong)


def test_skypilot() -> None:
    task = load("skypilot.yaml")
    assert set(task) <= SKYPILOT_KEYS
    for block in ("setup", "run"):
        assert subprocess.run(["bash", "-n", "-c", task[block]]).returncode == 0
    lines = [shlex.split(line) for line in re.split(r"&&|\n", task["run"]) if "textmill " in line]
    assert [line[line.index("textmill") + 1] for line in lines] == ["prepare", "fit-tokenizer", "tokenize", "train"]


def test_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (Debian: systemd)")
    text = (DEPLOY / "textmill.service").read_text(encoding="utf-8")
    unit = tmp_path / "textmill.service"
    unit.write_text(text.replace("/usr/local/lib/textmill/bin/textmill", sys.executable), encoding="utf-8")
    checked = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "textmill.service" not in checked.stderr, checked.stderr
