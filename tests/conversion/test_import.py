"""Model files of other tools, read with `textmill import` and through `model.init_from`; logits from transformers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import textmill
from tests.support import megatron_net
from tests.support.model_folders import TEXT, korean_tokenizer, write_folder
from textmill.cli import main
from textmill.conversion.formats import KINDS, open_format
from textmill.storage.tensor_files import read_model, read_tensors

IDS = torch.from_numpy(np.random.default_rng(2).integers(0, 300, (2, 16)))


def logits(folder: Path) -> Any:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(IDS).logits.numpy()


def transformers_net() -> Any:
    torch.manual_seed(5)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=24, n_positions=20, vocab_size=310)).eval()


def same_weights(one: Path, other: Path) -> bool:
    before, after = dict(read_model(one)), dict(read_model(other))
    return before.keys() == after.keys() and all(np.array_equal(values, after[name]) for name, values in before.items())


def pack_array(values: Any) -> msgpack.ExtType:
    """As flax's serialization writes an array; one of several parts as a dict."""
    parts = msgpack.packb((values.shape, values.dtype.name, values.tobytes()), use_bin_type=True)
    return msgpack.ExtType(1, parts)


def flax_params(net: Any) -> dict[str, Any]:
    """The parameters by flax's names: kernels the other way round than torch's, the embedding in two parts."""
    tree: dict[str, Any] = {}
    for name, tensor in net.transformer.state_dict().items():
        *parents, leaf = name.split(".")
        values = tensor.numpy()
        is_kernel = leaf == "weight" and "c_" in name
        leaf = "kernel" if is_kernel else leaf
        leaf = {"weight": "embedding" if parents[0] in ("wte", "wpe") else "scale"}.get(leaf, leaf)
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[leaf] = pack_array(np.ascontiguousarray(values.T if is_kernel else values))
        if name == "wte.weight":
            chunks = {str(number): pack_array(part) for number, part in enumerate(np.split(values.ravel(), 2))}
            shape = {"0": values.shape[0], "1": values.shape[1]}
            inner[leaf] = {"__msgpack_chunked_array__": True, "shape": shape, "chunks": chunks}
    return {"transformer": tree}


def test_flax_and_bare_torch_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """flax_model.msgpack, the training state checkpoint_N, and model.bin of extract_gpt2_layers.py."""
    net = transformers_net()
    folder = tmp_path / "artifacts"
    net.config.save_pretrained(folder)
    state = {"step": 7, "params": flax_params(net), "opt_state": {"0": {"count": 7}}}
    (folder / "flax_model.msgpack").write_bytes(msgpack.packb(state["params"]))
    (tmp_path / "checkpoint_7").write_bytes(msgpack.packb(state))
    torch.save(net.state_dict(), tmp_path / "model.bin")
    config = str(folder / "config.json")
    assert main(["import", str(folder), str(tmp_path / "one")]) == 0
    for number, name in enumerate(("checkpoint_7", "model.bin")):
        out = tmp_path / f"imported-{number}"
        assert main(["import", str(tmp_path / name), str(out)]) == 2
        assert f"{name}: has no config.json next to it; import it with --config" in capsys.readouterr().err
        assert main(["import", str(tmp_path / name), str(out), "--config", config]) == 0
        assert same_weights(tmp_path / "one", out)
    assert np.array_equal(logits(tmp_path / "one"), net(IDS).logits.detach().numpy())
    (folder / "flax_model.msgpack").write_bytes(msgpack.packb(state)[:99])
    assert main(["import", str(folder), str(tmp_path / "two")]) == 2
    assert "not a complete file of flax" in capsys.readouterr().err


SHAPES: dict[str, dict[str, Any]] = {
    "odd": {"layers": 3, "heads": 3, "width": 24, "positions": 17},
    "wide": {"layers": 1, "heads": 4, "width": 64, "inner": 96, "positions": 40},
    "untied": {"positions": 20, "untied": True},
}
WRITTEN = [kind for kind in KINDS if open_format(kind).PRECISIONS]
CASES = [
    pytest.param(kind, name, marks=() if name == "odd" or (kind, name) == ("gguf", "untied") else pytest.mark.long)
    for kind in WRITTEN
    for name in SHAPES
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_what_export_writes_comes_back_bit_for_bit(kind: str, name: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", korean_tokenizer(chat="default"), **SHAPES[name])
    out, back = tmp_path / "out", tmp_path / "back"
    assert main(["export", str(source), f"export.folder={out}", f"export.kind={kind}"]) == 0
    assert main(["check", str(out)]) == 0
    assert main(["import", str(out), str(back), "--kind", kind]) == 0
    assert same_weights(source, back)
    assert np.array_equal(logits(back), logits(source))
    theirs, before = (AutoTokenizer.from_pretrained(folder) for folder in (back, source))
    for text in (*TEXT, "<|user|> is text", "don't 12,345"):
        ids = before(text).input_ids
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == before.decode(ids)
    talk = [{"role": "user", "content": "왜?"}]
    assert theirs.apply_chat_template(talk, tokenize=False) == "<|user|>왜?<|endoftext|>"
    assert main(["generate", str(back), "sample.max_tokens=3", "engine.device=cpu"]) == 0


def test_an_import_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "source", korean_tokenizer())
    for message in ("logits differ by at most 0 (bound", "import: done already"):
        assert main(["import", str(source), str(tmp_path / "back")]) == 0
        assert message in capsys.readouterr().out


def test_pickled_weights_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file, and several with an index; an extra object in the file is not built."""
    net = transformers_net()
    state, folder = net.state_dict(), tmp_path / "pickled"
    net.config.save_pretrained(folder)
    torch.save({**state, "trainer": Canary(tmp_path / "canary")}, folder / "pytorch_model.bin")
    assert main(["import", str(folder), str(tmp_path / "one")]) == 0
    assert "has no tokenizer that textmill reads" in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()
    assert np.array_equal(logits(tmp_path / "one"), net(IDS).logits.detach().numpy())
    (folder / "pytorch_model.bin").unlink()
    names, index = list(state), {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: state[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert textmill.import_model(str(folder), str(tmp_path / "two")) == tmp_path / "two"
    assert same_weights(tmp_path / "one", tmp_path / "two")
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    assert main(["import", str(folder), str(tmp_path / "three")]) == 2
    assert "lacks the file pytorch_model-00002-of-00002.bin" in capsys.readouterr().err
    assert not list(tmp_path.glob("three*"))


def test_overlapping_and_wrong_headers_of_safetensors_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two weights that claim the same bytes, a gap, and a weight beyond the end of the file."""
    source = write_folder(tmp_path / "source", korean_tokenizer())
    data = (source / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, name = json.loads(data[8 : 8 + length]), "transformer.h.0.ln_1.bias"
    size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
    for shift in (-size, size, 1 << 40):
        offsets = [offset + shift for offset in header[name]["data_offsets"]]
        text = json.dumps({**header, name: {**header[name], "data_offsets": offsets}}).encode()
        folder = tmp_path / f"shifted{shift}"
        shutil.copytree(source, folder)
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        for command in (["import", str(folder), str(tmp_path / "out")], ["generate", str(folder)]):
            assert main(command) == 2
            assert "model.safetensors: not readable as safetensors (" in capsys.readouterr().err
        assert main(["export", str(folder), f"export.folder={tmp_path / 'out'}"]) == 2
        assert not list(tmp_path.glob("out*"))


class Canary:
    """Creates a file when it is unpickled by a reader that trusts its input."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_training_starts_from_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "source", korean_tokenizer())
    assert main(["export", str(source), f"export.folder={tmp_path / 'out'}", "export.kind=gguf"]) == 0
    (tmp_path / "text.txt").write_text("\n\n".join(TEXT * 40), encoding="utf-8")
    text = f"corpus: {{sources: [text.txt], section_chars: 100, dedup: none}}\ntokenizer: {{use: {source}}}\n"
    (tmp_path / "my.yaml").write_text(text)
    settings = ["train.steps=2", "train.warmup=0", "train.batch=2", "train.length=16", "engine.device=cpu"]
    where = [str(tmp_path / "my.yaml"), f"folder={tmp_path / 'mine'}", f"model.init_from={tmp_path / 'out/out.gguf'}"]
    for command in ("prepare", "fit-tokenizer", "tokenize"):
        assert main([command, *where]) == 0
    train = ["train", *where, *settings, "train.learning_rate=1e-30", "train.min_learning_rate=0"]
    assert main(train) == 0, capsys.readouterr().err
    assert same_weights(source, tmp_path / "mine/run/step-0000002")
    capsys.readouterr()
    assert main(train) == 0, "the same command again finds the same weights"
    assert "train: done already" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "mine" / "run")
    (tmp_path / "out/out.gguf").write_bytes(b"GGUF")
    assert main(train) == 2
    assert "not a readable GGUF file" in capsys.readouterr().err
    assert not (tmp_path / "mine" / "run").exists()


@pytest.mark.parametrize("kind", ["gguf", "nanogpt", "onnx", "pytorch_model.bin", "deepspeed", "megatron"])
def test_a_count_of_layers_beyond_the_file_is_refused_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Building the list of weights of so many layers would take hours."""
    source, out, many = write_folder(tmp_path / "source", korean_tokenizer()), tmp_path / "out", 10**9
    if kind == "pytorch_model.bin":
        out.mkdir()
        tensors = {name: torch.tensor(values) for name, values in read_tensors(source / "model.safetensors")}
        torch.save(tensors, out / kind)
        (out / "config.json").write_text((source / "config.json").read_text())
    elif kind == "megatron":
        megatron_net.write(out)
    elif kind == "nanogpt":
        out.mkdir()
        args = {"n_layer": many, "n_head": 2, "n_embd": 24, "block_size": 20, "bias": True, "vocab_size": 320}
        torch.save({"model": {}, "model_args": args}, out / "ckpt.pt")
    elif kind == "deepspeed":
        out.mkdir()
        torch.save({"module": {}}, out / "mp_rank_00_model_states.pt")
        (out / "config.json").write_text((source / "config.json").read_text())
    else:
        assert main(["export", str(source), f"export.folder={out}", f"export.kind={kind}"]) == 0
    if kind == "gguf":
        data = (out / "out.gguf").read_bytes()
        place = data.index(b"gpt2.block_count") + len(b"gpt2.block_count") + 4  # after the type of the number
        (out / "out.gguf").write_bytes(data[:place] + many.to_bytes(4, "little") + data[place + 4 :])
    elif kind == "megatron":
        file = next(out.rglob("*.pt"))
        tree = torch.load(file, weights_only=False)
        tree["args"].num_layers = many
        torch.save(tree, file)
    elif kind != "nanogpt":
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({**config, "n_layer": many}))
    capsys.readouterr()
    assert main(["import", str(out), str(tmp_path / "back")]) == 2
    assert "1,000,000,000 layers" in capsys.readouterr().err


LIKE: dict[str, dict[str, Any]] = {
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    },
    "gemma": {"head_dim": 16},
    "phi3": {"pad_token_id": 0, "sliding_window": None},
}


@pytest.mark.parametrize("kind", ["granite", *(pytest.param(one, marks=pytest.mark.long) for one in ("gemma", "phi3"))])
def test_a_model_like_a_llama_has_the_same_logits(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "eos_token_id": 2}
    torch.manual_seed(4)
    config = transformers.AutoConfig.for_model(kind, **sizes, **LIKE[kind])
    net = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    source, out = tmp_path / "source", tmp_path / "out"
    net.save_pretrained(source)
    korean_tokenizer().save(source)
    assert main(["generate", str(source)]) == 2
    assert "textmill reads it as a llama: textmill import" in capsys.readouterr().err
    assert main(["import", str(source), str(out)]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(again).__name__ == "LlamaForCausalLM"
    ids = torch.randint(0, 320, (2, 50))
    with torch.no_grad():
        wanted, found = net(ids).logits, again(ids).logits
    # Other factors are rounded; float32 has 24 bits, and a logit is a sum over a few hundred products.
    assert float((wanted - found).abs().max()) < 2**-24 * 300 * float(wanted.abs().max())
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**settings, "model_type": "gemma2"}))
    assert main(["import", str(source), str(tmp_path / "other")]) == 2
    assert "a gemma2 has norms after attention and MLP" in capsys.readouterr().err
