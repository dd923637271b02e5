"""Exports with the tokens that a text uses: transformers computes the same logits for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.model_folders import TEXT, korean_tokenizer, write_folder
from textmill.cli import main
from textmill.tokens.vocabulary import reduction

USED = [*TEXT[:1], "The mill stands."]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model with more rows than its tokenizer has tokens, and the tokens of a small text."""
    source = write_folder(tmp_path / "source", korean_tokenizer(vocab=400, chat="default"), rows=9)
    (tmp_path / "text.txt").write_text("\n\n".join(USED * 9), encoding="utf-8")
    text = f"corpus: {{sources: [text.txt], documents: block, dedup: none}}\ntokenizer: {{use: {source}}}\n"
    (tmp_path / "my.yaml").write_text(text)
    for command in ("prepare", "fit-tokenizer", "tokenize"):
        assert main([command, str(tmp_path / "my.yaml"), f"folder={tmp_path / 'mine'}", "runner.workers=1"]) == 0
    return source


def test_kept_tokens_have_the_same_logits(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tokens = source.parent / "out", source.parent / "mine" / "tokens"
    export = ["export", str(source), f"export.folder={out}", f"export.vocab_used_in={tokens}"]
    assert main(export) == 0
    assert "of 409 tokens are kept; their logits differ by at most" in capsys.readouterr().out
    before, after = (AutoModelForCausalLM.from_pretrained(one).eval() for one in (source, out))
    old, new = (AutoTokenizer.from_pretrained(one) for one in (source, out))
    kept = torch.tensor(old.convert_tokens_to_ids(new.convert_ids_to_tokens(range(len(new)))))
    assert 256 < len(kept) == after.config.vocab_size < 380
    assert kept[after.config.eos_token_id] == before.config.eos_token_id
    for text in USED:
        assert kept[new(text).input_ids].tolist() == old(text).input_ids
        ids = torch.tensor([new(text).input_ids])
        with torch.no_grad():
            assert (before(kept[ids]).logits[..., kept] - after(ids).logits).abs().max() < 1e-5
    talk = [{"role": "user", "content": "왜?"}]
    assert new.apply_chat_template(talk, tokenize=False) == old.apply_chat_template(talk, tokenize=False)
    assert main(export) == 0
    assert "export: done already" in capsys.readouterr().out
    assert main(["generate", str(out), "sample.max_tokens=3", "engine.device=cpu"]) == 0


def test_tokens_of_another_tokenizer_are_refused(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_folder(source.parent / "other", korean_tokenizer(vocab=300))
    export = ["export", str(other), f"export.folder={source.parent / 'out'}"]
    assert main([*export, f"export.vocab_used_in={source.parent / 'mine' / 'tokens'}"]) == 2
    assert "was made with another tokenizer; tokenize the text with that of the model" in capsys.readouterr().err
    assert main([*export, f"export.vocab_used_in={source.parent / 'mine' / 'tokens' / 'train'}"]) == 2
    assert "name tokens that were made with the model's own tokenizer" in capsys.readouterr().err
    assert main([*export, "export.vocab_used_in=nowhere"]) == 2
    assert "nowhere: no tokens found; name a folder written by textmill tokenize" in capsys.readouterr().err
    assert not (source.parent / "out").exists()


def test_a_tokenizer_that_splits_the_text_differently_is_not_written(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reduce = reduction._MODELS["BPE"]

    def without_last_merges(model: dict[str, Any], wanted: set[str]) -> set[str]:
        kept = reduce(model, wanted)
        model["merges"] = model["merges"][: len(model["merges"]) // 2]
        return kept

    monkeypatch.setitem(reduction._MODELS, "BPE", without_last_merges)
    tokens, out = source.parent / "mine" / "tokens", source.parent / "out"
    assert main(["export", str(source), f"export.folder={out}", f"export.vocab_used_in={tokens}"]) == 2
    assert "the reduced vocabulary would split its text differently" in capsys.readouterr().err
    assert not out.exists()
