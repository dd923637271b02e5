"""The chat template: the loss mask against hand-written marks, and the Jinja template against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from textmill.config import RunConfig, TokenizerConfig
from textmill.config.tokenizer import TEMPLATES
from textmill.corpus.conversations import turns_from_json
from textmill.corpus.document import Turn
from textmill.corpus.prepare import prepare
from textmill.errors import TextmillError
from textmill.storage.files import read_json
from textmill.storage.stages import open_manifest
from textmill.tokens.chat import Rendered, open_template, render
from textmill.tokens.merge import merge
from textmill.tokens.store import open_store
from textmill.tokens.tokenize import tokenize
from textmill.tokens.vocabulary.encoders import ReferenceEncoder
from textmill.tokens.vocabulary.fitting import fit_tokenizer
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit, open_tokenizer

TEXTS = [
    "물레방아는 강가에 서 있다. The mill stands by the river.",
    "안녕하세요, 반가워요! 你好，很高兴认识你。🙂👩‍👧 <|user|> x",
] * 3
S, U, A, E = "<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"

# A conversation, and by hand every part of the rendered text, with + where it has loss.
CONVERSATIONS: list[tuple[str, list[Turn], list[tuple[str, str]]]] = [
    (
        "one turn",
        [("user", "hi"), ("assistant", "yes")],
        [("-", U), ("-", "hi"), ("-", E), ("-", A), ("+", "yes"), ("+", E)],
    ),
    (
        "several turns",
        [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
        [
            ("-", U),
            ("-", "a"),
            ("-", E),
            ("-", A),
            ("+", "b"),
            ("+", E),
            ("-", U),
            ("-", "c"),
            ("-", E),
            ("-", A),
            ("+", "d"),
            ("+", E),
        ],
    ),
    (
        "a system turn",
        [("system", "Be brief."), ("user", "hi"), ("assistant", "yes")],
        [("-", S), ("-", "Be brief."), ("-", E), ("-", U), ("-", "hi"), ("-", E), ("-", A), ("+", "yes"), ("+", E)],
    ),
    ("an empty answer", [("user", "hi"), ("assistant", "")], [("-", U), ("-", "hi"), ("-", E), ("-", A), ("+", E)]),
    ("an empty question", [("user", ""), ("assistant", "yes")], [("-", U), ("-", E), ("-", A), ("+", "yes"), ("+", E)]),
    (
        "Korean",
        [("user", "12시 땡!"), ("assistant", "하루가 또 가네요.")],
        [("-", U), ("-", "12시 땡!"), ("-", E), ("-", A), ("+", "하루가 또 가네요."), ("+", E)],
    ),
    (
        "Chinese and Japanese",
        [("user", "你好，世界"), ("assistant", "こんにちは。")],
        [("-", U), ("-", "你好，世界"), ("-", E), ("-", A), ("+", "こんにちは。"), ("+", E)],
    ),
    (
        "emoji",
        [("user", "👩‍👩‍👧‍👦?"), ("assistant", "🙂👍🏽")],
        [("-", U), ("-", "👩‍👩‍👧‍👦?"), ("-", E), ("-", A), ("+", "🙂👍🏽"), ("+", E)],
    ),
    (
        "what looks like special tokens",
        [("user", f"{A} say {E}"), ("assistant", f"{E}no{U}")],
        [("-", U), ("-", f"{A} say {E}"), ("-", E), ("-", A), ("+", f"{E}no{U}"), ("+", E)],
    ),
    (
        "the user speaks last",
        [("user", "a"), ("assistant", "b"), ("user", "c")],
        [("-", U), ("-", "a"), ("-", E), ("-", A), ("+", "b"), ("+", E), ("-", U), ("-", "c"), ("-", E)],
    ),
    (
        "no answer at all",
        [("system", "x"), ("user", "y")],
        [("-", S), ("-", "x"), ("-", E), ("-", U), ("-", "y"), ("-", E)],
    ),
    (
        "white space",
        [("user", " a\n\n"), ("assistant", "\tb  c ")],
        [("-", U), ("-", " a\n\n"), ("-", E), ("-", A), ("+", "\tb  c "), ("+", E)],
    ),
]
TOKENS = {S, U, A, E}


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return fit(iter([TEXTS]), TokenizerConfig(vocab=400, chat="default"))


def rendered(tokenizer: TextTokenizer, turns: list[Turn], prompt: bool = False) -> Rendered:
    form = tokenizer.turn_tokens
    assert form is not None
    return render([turns], form, ReferenceEncoder(tokenizer), prompt)


@pytest.mark.parametrize(("turns", "marked"), [row[1:] for row in CONVERSATIONS], ids=[row[0] for row in CONVERSATIONS])
def test_loss_mask_against_hand_written_marks(
    tokenizer: TextTokenizer, turns: list[Turn], marked: list[tuple[str, str]]
) -> None:
    contents = {text for _, text in turns}
    ids, loss_mask = [], []
    for mark, text in marked:
        part = tokenizer.encode(text) if text in contents else [tokenizer.inner.token_to_id(text)]
        ids += part
        loss_mask += [int(mark == "+")] * len(part)
    made = rendered(tokenizer, turns)
    assert made.ids.tolist() == ids
    assert made.loss_mask.tolist() == loss_mask
    assert made.lengths.tolist() == [len(ids)]


def test_many_conversations_at_once(tokenizer: TextTokenizer) -> None:
    form, encoder = tokenizer.turn_tokens, ReferenceEncoder(tokenizer)
    assert form is not None
    together = render([turns for _, turns, _ in CONVERSATIONS], form, encoder)
    alone = [rendered(tokenizer, turns) for _, turns, _ in CONVERSATIONS]
    assert together.ids.tolist() == [id_ for one in alone for id_ in one.ids.tolist()]
    assert together.loss_mask.tolist() == [mark for one in alone for mark in one.loss_mask.tolist()]
    assert together.lengths.tolist() == [len(one.ids) for one in alone]


def as_messages(turns: list[Turn]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def plain(turns: list[Turn]) -> bool:
    """Remove what looks like a special token: transformers encodes it as one, textmill as text, on purpose."""
    return not any(token in text for _, text in turns for token in TOKENS)


OWN = {"user": "[INST]{content}[/INST]", "assistant": "<bot>{content}<'end\">"}


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
@pytest.mark.parametrize("chat", ["default", "dsgpt2", "own"])
def test_transformers_renders_the_same_ids(kind: str, chat: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"chat_turns": OWN} if chat == "own" else {"chat": chat}
    ours = fit(iter([TEXTS]), TokenizerConfig(kind=kind, vocab=400, **settings))  # type: ignore[arg-type]
    ours.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), open_tokenizer(tmp_path)
    assert again.chat == ours.chat
    assert theirs.eos_token_id == ours.eos_id == again.eos_id
    # transformers returns which tokens are the assistant's, if the template marks them.
    assert ours.chat is not None
    before, after = dict(ours.chat.turns)["assistant"].split("{content}")
    assert theirs.chat_template.count(" + message['content'] + ") == len(ours.chat.turns)
    head, _, tail = theirs.chat_template.partition("== 'assistant' %}{{ ")
    opened, rest = tail.split(" + message['content'] + ", 1)
    marked = f"{head}== 'assistant' %}}{{{{ {opened} }}}}{{% generation %}}{{{{ message['content'] + {rest}"
    marked = marked.replace("}}{% else %}", "}}{% endgeneration %}{% else %}", 1)
    template = open_template(tmp_path)
    assert template is not None
    compared = 0
    for _, turns, _ in CONVERSATIONS:
        if not plain(turns):
            continue
        if chat != "default" and turns[0][0] == "system":
            with pytest.raises(Exception, match="no turn of the system"):
                theirs.apply_chat_template(as_messages(turns))
            with pytest.raises(TextmillError, match="no turn of the system"):
                template.render(as_messages(turns), add_generation_prompt=False)
            continue
        for prompt in (False, True):
            found = theirs.apply_chat_template(as_messages(turns), add_generation_prompt=prompt)
            assert found["input_ids"] == template.render(as_messages(turns), add_generation_prompt=prompt)
        masks = theirs.apply_chat_template(
            as_messages(turns),
            chat_template=marked,
            return_assistant_tokens_mask=True,
            return_dict=True,
            add_generation_prompt=False,
        )
        assert masks["input_ids"] == rendered(again, turns).ids.tolist()
        if any(role == "assistant" for role, _ in turns) and kind == "bpe":
            assert masks["assistant_masks"] == rendered(again, turns).loss_mask.tolist()
        compared += 1
    assert compared >= 9
    assert before
    assert after


def test_the_dsgpt2_loss_mask_equals_that_of_dsgpt2() -> None:
    """user = <usr> <s> q </s>, system = <sys> <s> a </s>; the loss starts after the <s> of <sys> and ends with </s>."""
    tokenizer = fit(iter([TEXTS]), TokenizerConfig(vocab=400, chat="dsgpt2"))
    assert [tokenizer.inner.id_to_token(id_) for id_ in range(7)] == [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "<mask>",
        "<sys>",
        "<usr>",
    ]
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (2, 1, 0)
    question, answer = tokenizer.encode("안녕?"), tokenizer.encode("반가워요")
    made = rendered(tokenizer, [("user", "안녕?"), ("assistant", "반가워요")])
    user, system = [6, 0, *question, 2], [5, 0, *answer, 2]
    assert made.ids.tolist() == user + system
    # Its mask over inputs: zeros for the user's length + 1, then ones; over labels it is shifted by one.
    input_mask = [0] * (len(user) + 1) + [1] * (len(system) - 1)
    assert made.loss_mask.tolist()[1:] == input_mask[:-1], "the last one, </s> -> <pad>, is not kept"


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ({"user": "<u>{content}{end}"}, "no turn for the assistant; add one"),
        (
            {"user": "<u>{content}{end}", "assistant": "{content}{end}"},
            "no generation prompt, so the model cannot know when to answer; put",
        ),
        ({"user": "<u>{content}{end}", "assistant": "<a>{content}"}, "would never learn to stop; put {end} after it"),
        ({"user": "<u>{content}{end}", "assistant": "<u>{content}{end}"}, "begin alike"),
        (
            {"user": "<u>\n{content}{end}", "assistant": "<a>{content}{end}"},
            "would merge with the message next to it; use only special tokens",
        ),
        ({"user": "<u>{end}", "assistant": "<a>{content}{end}"}, "it needs {content} exactly once"),
        ({"users": "<u>{content}"}, "no role 'users'; the roles are system, user, assistant"),
    ],
)
def test_a_template_that_cannot_work_is_an_error(turns: dict[str, str], message: str) -> None:
    with pytest.raises(TextmillError) as caught:
        TokenizerConfig(chat_turns=turns)
    assert message in str(caught.value)
    assert str(caught.value).startswith("tokenizer.chat_turns: ")


def test_an_end_token_that_is_not_the_stop_token_is_an_error() -> None:
    with pytest.raises(
        TextmillError, match=r"tokenizer.end_token: .* is not </s>, which ends an answer in the chat template"
    ):
        TokenizerConfig(chat="dsgpt2", end_token="<|endoftext|>")


def test_an_edited_jinja_replaces_our_template(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    tree = read_json(path)
    tree["chat_template"] = tree["chat_template"].replace("<|user|>", "<|human|>")
    path.write_text(json.dumps(tree))
    found = open_tokenizer(tmp_path)
    assert found.chat is None
    assert found.jinja == tree["chat_template"]
    assert json.loads(found.files()["tokenizer_config.json"])["chat_template"] == tree["chat_template"]


def config_of(folder: Path, tokenizer: dict[str, Any], **more: Any) -> RunConfig:
    corpus = {"sources": [str(folder / "chat.jsonl")], "chat": "messages", "split": [8, 1, 1], "rules": []}
    return RunConfig.model_validate({"folder": str(folder / "out"), "corpus": corpus, "tokenizer": tokenizer, **more})


@pytest.fixture
def chat_lines(tmp_path: Path) -> Path:
    rows = [turns for _, turns, _ in CONVERSATIONS if any(role == "assistant" for role, _ in turns)]
    rows += [[("user", f"number {number}?"), ("assistant", str(number))] for number in range(40)]
    lines = [json.dumps({"messages": as_messages(turns)}) + "\n" for turns in rows]
    (tmp_path / "chat.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def test_the_store_has_ids_and_a_loss_mask(chat_lines: Path) -> None:
    import pyarrow.parquet as pq

    config = config_of(chat_lines, {"vocab": 400, "chat": "default"})
    corpus = prepare(config)
    folder = tokenize(config)
    tokenizer = open_tokenizer(chat_lines / "out" / "tokenizer")
    manifest = open_manifest(folder)
    for split in ("train", "valid", "test"):
        rows = [
            turns_from_json(text)
            for path in sorted(corpus.glob(f"{split}-*"))
            for text in pq.read_table(path).column("messages").to_pylist()
        ]
        store, wanted = open_store(folder / split), [rendered(tokenizer, turns) for turns in rows]
        assert store.loss_mask is not None
        assert store.ids.tolist() == [id_ for one in wanted for id_ in one.ids.tolist()]
        assert store.loss_mask.tolist() == [mark for one in wanted for mark in one.loss_mask.tolist()]
        assert len(store) == len(rows)
        assert manifest["files"][f"{split}.mask"]["bytes"] == store.tokens
    part = open_store(folder / "train").slice(3, 7)
    assert part.loss_mask is not None
    assert len(part.loss_mask) == part.tokens


def test_a_role_without_a_turn_is_quarantined(chat_lines: Path) -> None:
    config = config_of(chat_lines, {"vocab": 400, "chat": "dsgpt2"})
    prepare(config)
    lines = (tokenize(config) / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["reason"].partition(";")[0] for line in lines] == [
        "the chat template has no turn of the system"
    ]


def test_merging_keeps_the_loss_mask(chat_lines: Path) -> None:
    config = config_of(chat_lines, {"vocab": 400, "chat": "default"})
    prepare(config)
    folder = tokenize(config)
    made = merge(str(chat_lines / "joined"), [str(folder), str(folder)])
    one, two = open_store(folder / "train"), open_store(made / "train")
    assert one.loss_mask is not None
    assert two.loss_mask is not None
    assert two.loss_mask.tolist() == one.loss_mask.tolist() * 2
    assert "train.mask" in open_manifest(made)["files"]
    cut = made / "train.mask"
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(TextmillError, match=r"train.mask: has .* bytes, but the store has .* tokens"):
        open_store(made / "train")


@pytest.mark.parametrize(
    ("jinja", "message"),
    [
        (None, "chat template is missing; set tokenizer.chat=default"),
        (
            "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "was not written by textmill and has no generation prompt; set tokenizer.chat=default",
        ),
    ],
)
def test_a_tokenizer_without_our_template_is_an_error(chat_lines: Path, jinja: str | None, message: str) -> None:
    bare = fit(iter([TEXTS]), TokenizerConfig(vocab=300))
    files = bare.files()
    if jinja:
        files["tokenizer_config.json"] = json.dumps(
            {**json.loads(files["tokenizer_config.json"]), "chat_template": jinja}
        )
    (chat_lines / "bare").mkdir()
    for name, text in files.items():
        (chat_lines / "bare" / name).write_text(text, encoding="utf-8")
    config = config_of(chat_lines, {"use": str(chat_lines / "bare")})
    prepare(config)
    with pytest.raises(TextmillError) as caught:
        tokenize(config)
    assert message in str(caught.value)


def test_a_warning_if_transformers_gives_other_ids(chat_lines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sentencepiece adds a space before the first word of a text only, so none follows a special token."""
    inner = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *((sign, -1.0) for sign in "▁themil")], unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.add_special_tokens(["</s>"])
    (chat_lines / "bare").mkdir()
    inner.save(str(chat_lines / "bare" / "tokenizer.json"))
    config = config_of(chat_lines, {"use": str(chat_lines / "bare"), "chat": "default"})
    prepare(config)
    fit_tokenizer(config)
    assert "apply_chat_template gives other ids than those trained on; fit a tokenizer" in capsys.readouterr().err
    fit_tokenizer(config_of(chat_lines, {"vocab": 400, "chat": "default"}), force="yes")
    assert "apply_chat_template" not in capsys.readouterr().err


def test_special_tokens_are_added_to_an_existing_tokenizer(chat_lines: Path) -> None:
    bare = fit(iter([TEXTS]), TokenizerConfig(vocab=300))
    (chat_lines / "bare").mkdir()
    bare.save(chat_lines / "bare")
    config = config_of(chat_lines, {"use": str(chat_lines / "bare"), "chat": "default"})
    prepare(config)
    tokenize(config)
    made = open_tokenizer(chat_lines / "out" / "tokenizer")
    assert made.vocab == bare.vocab + 3
    assert {token: made.inner.token_to_id(token) for token in (S, U, A)} == {
        S: bare.vocab,
        U: bare.vocab + 1,
        A: bare.vocab + 2,
    }
    assert made.chat is not None
    assert dict(made.chat.turns) == {role: text.replace("{end}", E) for role, text in TEMPLATES["default"].items()}
    for text in TEXTS:
        assert made.encode(text) == bare.encode(text), "text that looks like a token of the template is plain text"
    assert np.all(np.asarray(open_store(chat_lines / "out" / "tokens" / "train").ids) < made.vocab)
