"""What came with a model leaves with it: special tokens, settings of generation, flags of the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.conversion.test_gguf import greedy
from tests.conversion.test_gguf_llama import write_model
from tests.support.bert_models import write_bert
from textmill.checkpoints.folders import open_model
from textmill.cli import main
from textmill.config import SampleConfig, TorchEngine
from textmill.conversion.compare import TEXTS
from textmill.generation.generator import open_generator
from textmill.tokens.vocabulary.foreign_files import QWEN
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

IDS = {"bos_token_id": 3, "eos_token_id": [5, 7, 9], "pad_token_id": 11}
GENERATION = {**IDS, "do_sample": True, "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.44.0"}
SETTINGS = {"padding_side": "left", "add_bos_token": True, "extra_special_tokens": [], "model_max_length": 50}


def write_foreign(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A folder as others publish it, with special tokens that differ from each other."""
    write_model(folder, changes)
    update(folder / "config.json", IDS)
    update(folder / "tokenizer_config.json", {**SETTINGS, "chat_template": "{{ messages[0]['content'] }}"})
    tokenizer = open_tokenizer(folder)
    begin = tokenizer.inner.id_to_token(3)
    tokenizer.inner.post_processor = processors.TemplateProcessing(f"{begin} $A", f"{begin} $A $B:1", [(begin, 3)])
    (folder / "tokenizer.json").write_text(tokenizer.inner.to_str())
    update(folder / "tokenizer_config.json", {"bos_token": begin})
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def update(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_special_tokens_and_generation_settings_leave_with_a_model(tmp_path: Path, kind: str) -> None:
    folder = write_foreign(tmp_path / "model", GENERATION)
    out, back = tmp_path / "out", tmp_path / "back"
    assert main(["export", str(folder), f"export.folder={out}", f"export.kind={kind}"]) == 0
    if kind == "gguf":
        assert main(["import", str(out), str(back)]) == 0
    result = back if kind == "gguf" else out
    config = AutoConfig.from_pretrained(result)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, [5, 7, 9], 11)
    assert json.loads((result / "generation_config.json").read_text()) == GENERATION
    assert AutoModelForCausalLM.from_pretrained(result).generation_config.eos_token_id == [5, 7, 9]
    theirs, ours = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(result)
    assert ours("The mill").input_ids == theirs("The mill").input_ids
    assert ours("The mill").input_ids[0] == 3
    assert (ours.padding_side, ours.model_max_length, ours.bos_token_id) == ("left", 50, 3)
    assert ours.chat_template == theirs.chat_template


def test_a_gguf_file_names_every_end_and_adds_the_begin_token(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the extra export")
    folder, out = write_foreign(tmp_path / "model"), tmp_path / "out"
    assert main(["export", str(folder), f"export.folder={out}", "export.kind=gguf"]) == 0
    keys = {name: field.contents() for name, field in gguf.GGUFReader(out / "out.gguf").fields.items()}
    found = {name: keys[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot", "eom")}
    eos = open_tokenizer(folder).eos_id
    assert found == {"bos": 3, "eos": eos, "eot": 5, "eom": 7}
    assert keys["tokenizer.ggml.add_bos_token"] is True


def test_ids_of_config_json_become_settings_of_generation(tmp_path: Path) -> None:
    """A folder without generation_config.json: a tokenizer's folder has no other place for them."""
    tokenizer = open_tokenizer(write_foreign(tmp_path / "model"))
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(tmp_path / "tokenizer")
    assert GenerationConfig.from_pretrained(tmp_path / "tokenizer").eos_token_id == [5, 7, 9]
    assert open_tokenizer(tmp_path / "tokenizer").end_ids == tokenizer.end_ids == (0, 5, 7, 9)


def test_generation_stops_at_every_end(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {})
    sample = SampleConfig(temperature=0, max_tokens=30)
    whole = open_generator(open_model(str(folder)), TorchEngine(device="cpu")).sample("물레", sample)
    ids = greedy(folder, open_tokenizer(folder).encode("물레"), 30)
    assert whole.finish_reason == "length"
    later = next(id_ for place, id_ in enumerate(ids) if place > 2 and id_ not in ids[:place])
    update(folder / "config.json", {"eos_token_id": [0, later]})
    cut = open_generator(open_model(str(folder)), TorchEngine(device="cpu")).sample("물레", sample)
    assert cut.finish_reason == "stop"
    assert cut.tokens == ids.index(later)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_transformers_gives_our_ids_for_every_model_type(tmp_path: Path, model_type: str) -> None:
    """AutoTokenizer splits as Qwen does in every folder of qwen2, whatever its tokenizer.json has."""
    folder, out = write_model(tmp_path / "model", {"model_type": model_type}), tmp_path / "out"
    assert main(["export", str(folder), f"export.folder={out}"]) == 0
    ours, theirs = open_tokenizer(folder), AutoTokenizer.from_pretrained(out)
    for text in TEXTS:
        assert theirs(text).input_ids == ours.encode(text)
    assert AutoModelForCausalLM.from_pretrained(out).dtype.is_floating_point
    assert main(["import", str(out), str(tmp_path / "back")]) == 0


def test_a_real_qwen_tokenizer_keeps_its_model_type(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {"model_type": "qwen2"})
    tree = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_]}
    tree["normalizer"] = {"type": "NFC"}
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    out = tmp_path / "out"
    assert main(["export", str(folder), f"export.folder={out}"]) == 0
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen2"
    ours, theirs = open_tokenizer(folder), AutoTokenizer.from_pretrained(out)
    assert [theirs(text).input_ids for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_a_berts_tokenizer_returns_segments(tmp_path: Path) -> None:
    write_bert(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), f"export.folder={tmp_path / 'out'}"]) == 0
    found = AutoTokenizer.from_pretrained(tmp_path / "out")("The mill", "the river")
    assert set(found["token_type_ids"]) == {0, 1}
