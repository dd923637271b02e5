"""The inputs that the recipes name, much smaller, and settings that make each recipe small."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from textmill.config import TokenizerConfig
from textmill.tokens.vocabulary.tokenizer import fit

TINY = ["model.shape.layers=2", "model.shape.heads=2", "model.shape.width=32"]
"""The net of a recipe, much smaller, with its activation, norms and dropout."""
SMALLER = {
    "gpt2-small": ["model.size=nano"],
    "llama-small": ["model.size=nano"],
    "bert-base": ["model.size=tiny", "tokenizer.vocab=2000"],
    "bert-ko": ["model.size=tiny", "tokenizer.vocab=2000"],
    "bert-classify": ["tokenizer.use=encoder", "model.init_from=encoder"],
    "distilgpt2": [
        "tokenizer.use=pretrained",
        "model.init_from=pretrained",
        "model.init_layers=[0]",
        "train.distil.teachers=[pretrained]",
    ],
    "chat-ko": [],
    "ko-gpt2": [*TINY, "tokenizer.vocab=400"],
    "tr-gpt2": [*TINY, "tokenizer.vocab=400", "train.decay_steps=2"],
    "megatron-gpt2": [*TINY, "tokenizer.vocab=400", "corpus.min_words=5", "corpus.languages=[]"],
    "megatron-bert": [
        *TINY,
        "tokenizer.vocab=400",
        "corpus.min_words=5",
        "train.decay_steps=2",
        "train.masked.max_predictions=5",
    ],
    "yuan-4.7b": [*TINY, "train.tokens=null", "engine.offload_optimizer=null"],
    "jax-wikitext": [
        *TINY,
        "corpus.sources=texts/*.txt",
        "corpus.section_chars=400",
        "tokenizer.use=pretrained",
        "tokens.features.max_length=32",
        "tokens.features.min_length=4",
        "tokens.features.stride=16",
        "runner.options=[]",
        "train.epochs=null",
    ],
}
"""Settings for recipes that would take minutes without a GPU."""
SYSTEMS = ("ko-gpt2", "tr-gpt2", "megatron-gpt2", "megatron-bert", "yuan-4.7b", "jax-wikitext")
"""Recipes that tests/project/test_systems.py runs, with the commands around them."""


def write_inputs(folder: Path) -> None:
    """Write what the recipes name, next to a folder of texts."""
    texts = folder / "texts"
    _write_pairs(folder / "ChatbotData.csv")
    _write_exam(folder / "exam.jsonl")
    _write_reviews(folder / "reviews.csv")
    _write_encoder(folder / "encoder", texts)
    _write_model(folder / "pretrained", texts)
    _write_lines(texts)
    _write_vocab(folder / "vocab.txt", texts)


def _write_pairs(path: Path) -> None:
    """Write a few questions and answers in the format of songys/Chatbot_data."""
    pairs = [(f"{number}시에 뭐 해?", f"{number}시에는 물레방아를 돌려요.") for number in range(60)]
    path.write_text("Q,A,label\n" + "".join(f"{question},{answer},0\n" for question, answer in pairs), encoding="utf-8")


def _write_exam(path: Path) -> None:
    """Write a few questions in the format of the task choices."""
    contexts = [f"The old mill beside the river has {number} wheels, and each of them" for number in range(9)]
    questions = [{"context": context, "choices": ["turns", "grinds"], "answer": 0} for context in contexts]
    path.write_text("".join(json.dumps(one) + "\n" for one in questions), encoding="utf-8")


def _write_reviews(path: Path) -> None:
    """Write a few texts with labels."""
    path.write_text("text,label\n" + "".join(f"the mill {number},{number % 2}\n" for number in range(60)))


def _write_encoder(folder: Path, texts: Path) -> None:
    """Write a BERT of transformers and its tokenizer."""
    texts_of = iter([[path.read_text(encoding="utf-8")] for path in texts.iterdir()])
    tokenizer = fit(texts_of, TokenizerConfig(kind="wordpiece", vocab=300))
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    net = BertForMaskedLM(BertConfig(**sizes, max_position_embeddings=64, vocab_size=tokenizer.vocab))
    net.save_pretrained(folder)
    tokenizer.save(folder)


def _write_model(folder: Path, texts: Path) -> None:
    """Write a transformers model and its tokenizer."""
    folder.mkdir()
    tokenizer = fit(iter([[path.read_text(encoding="utf-8")] for path in texts.iterdir()]), TokenizerConfig(vocab=300))
    tokenizer.save(folder)
    GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=32, vocab_size=tokenizer.vocab)
    ).save_pretrained(folder)


def _write_lines(texts: Path) -> None:
    """Write the paragraphs of the texts as JSON lines too, with the fields of Megatron's example."""
    for path in list(texts.glob("*.txt")):
        blocks = path.read_text(encoding="utf-8").split("\n\n")
        rows = [
            {"src": path.stem, "text": f"{block} {number}", "id": str(number)} for number, block in enumerate(blocks)
        ]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.with_suffix(".jsonl").write_text(lines, encoding="utf-8")


def _write_vocab(path: Path, texts: Path) -> None:
    """Write a vocab.txt in the format of Yuan: special pieces, marks for space and line end, then characters."""
    characters = sorted({character for file in texts.glob("*.txt") for character in file.read_text(encoding="utf-8")})
    pieces = ["<s>", "<unk>", "<pad>", "<eod>", "\u2582", "\u2583", *(one for one in characters if not one.isspace())]
    path.write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
