"""A served BERT: embeddings and filled masks equal transformers', for one text and for thousands; and its mistakes."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import web
from tests.support.bert_models import write_bert
from tests.support.live_server import Live
from tests.support.small_models import TEXT
from textmill.cli import main

WORDS = "the mill stands by river and wheel begins to turn every morning 물레방아는 강가에 서 있다".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "encoder"


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[Any, Any]:
    """Transformers' net of the served folder, and the tokenizer."""
    return write_bert(folder)


@pytest.fixture(scope="module")
def bert(new_live: Callable[..., Live], folder: Path, reference: Any) -> Live:
    return new_live({"where": str(folder)})


def embedding_of(reference: tuple[Any, Any], text: str) -> np.ndarray:
    net, tokenizer = reference
    ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
    with torch.no_grad():
        states: np.ndarray = net.bert(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
    return states


def embed(live: Live, given: Any, **more: Any) -> Any:
    return web.post(f"{live.url}/v1/embeddings", json={"input": given, **more}).json()


def vectors_of(reply: Any) -> np.ndarray:
    assert [one["index"] for one in reply["data"]] == list(range(len(reply["data"])))
    return np.array([one["embedding"] for one in reply["data"]], np.float32)


def test_embeddings_equal_transformers(bert: Live, reference: tuple[Any, Any]) -> None:
    wanted = np.array([embedding_of(reference, text) for text in TEXT])
    reply = embed(bert, TEXT, model="encoder", encoding_format="float")
    assert np.abs(vectors_of(reply) - wanted).max() < 1e-5
    tokens = sum(len(reference[1].encode(text)) + 2 for text in TEXT)
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (reply["object"], reply["model"]) == ("list", "encoder")
    one = embed(bert, TEXT[1])
    assert np.abs(vectors_of(one)[0] - wanted[1]).max() < 1e-5
    coded = embed(bert, TEXT, encoding_format="base64", dimensions=32)["data"]
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in coded]
    assert np.abs(np.array(decoded) - wanted).max() < 1e-5


def test_the_openai_client_and_token_lists(bert: Live, reference: tuple[Any, Any]) -> None:
    openai = pytest.importorskip("openai", reason="the openai client is in the extra dev")
    client = openai.OpenAI(base_url=f"{bert.url}/v1", api_key="unused", max_retries=0)
    wanted = np.array([embedding_of(reference, text) for text in TEXT])
    ids = [web.post(f"{bert.url}/tokenize", json={"text": text}).json()["tokens"] for text in TEXT]
    for given in (TEXT, ids):
        reply = client.embeddings.create(model="encoder", input=given)
        assert np.abs(np.array([one.embedding for one in reply.data]) - wanted).max() < 1e-5
    reply = client.embeddings.create(model="encoder", input=ids[0], encoding_format="float")
    assert np.abs(np.array(reply.data[0].embedding) - wanted[0]).max() < 1e-5
    with pytest.raises(openai.NotFoundError, match="unknown model 'other'; this server has 'encoder'"):
        client.embeddings.create(model="other", input="a")
    with pytest.raises(openai.BadRequestError, match="predicts masked tokens, not the next one"):
        client.completions.create(model="encoder", prompt="a")


def test_three_thousand_texts_in_one_request(bert: Live, reference: tuple[Any, Any]) -> None:
    dice = np.random.default_rng(5)
    texts = [" ".join(dice.choice(WORDS, int(dice.integers(1, 12)))) for _ in range(3000)]
    reply = embed(bert, texts, encoding_format="base64")
    assert len(reply.get("data", [])) == 3000, reply
    for number in dice.integers(0, 3000, 20).tolist():
        found = np.frombuffer(base64.b64decode(reply["data"][number]["embedding"]), "<f4")
        assert np.abs(found - embedding_of(reference, texts[number])).max() < 1e-5
    assert reply["usage"]["prompt_tokens"] == sum(len(reference[1].encode(text)) + 2 for text in texts)


def test_filled_masks_equal_transformers(bert: Live, reference: tuple[Any, Any], folder: Path, capsys: Any) -> None:
    net, tokenizer = reference
    prompts = ["The mill stands [MASK] the river", "[MASK] [MASK]"]
    reply = web.post(f"{bert.url}/fill", json={"prompt": prompts, "top_k": 3}).json()
    for prompt, one in zip(prompts, reply["data"], strict=True):
        parts = [tokenizer.encode(part) for part in prompt.split("[MASK]")]
        ids = [tokenizer.cls_id, *parts[0]]
        for part in parts[1:]:
            ids += [tokenizer.mask_id, *part]
        with torch.no_grad():
            logits = net(torch.tensor([[*ids, tokenizer.sep_id]])).logits[0]
        chances = logits[[place for place, id_ in enumerate(ids) if id_ == tokenizer.mask_id]].softmax(-1)
        values, tokens = chances.topk(3)
        assert [[choice["id"] for choice in mask] for mask in one["masks"]] == tokens.tolist()
        found = [[choice["probability"] for choice in mask] for mask in one["masks"]]
        assert np.abs(np.array(found) - values.numpy()).max() < 1e-5
    assert main(["fill", str(folder), f"sample.prompt={prompts[0]}", "sample.top_k=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == reply["data"][0]["text"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": ""}, "input.0: is empty"),
        ("/v1/embeddings", {"input": []}, "input: is empty; send at least one text"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input.1: is empty"),
        ("/v1/embeddings", {"input": [[]]}, "input.0: is empty"),
        ("/v1/embeddings", {}, "input: is missing"),
        ("/v1/embeddings", {"input": 5}, "input: must be a text, a list of texts"),
        ("/v1/embeddings", {"input": [[1], [100000]]}, "input.1: 100000 is not a token id"),
        ("/v1/embeddings", {"input": ["a", "the wheel " * 60]}, "tokens; the limit is 48; send a shorter one, or "),
        ("/v1/embeddings", {"input": "a", "dimensions": 16}, "dimensions: 16; this model has 32; leave it out"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format: "),
        ("/v1/embeddings", {"input": ["a"] * 4097}, "input: 4,097 texts in one request; the limit is 4,096"),
        ("/v1/embeddings", {"input": "half \ud83d"}, "input.0: has a lone surrogate"),
        ("/fill", {"prompt": "no mask"}, "prompt: 'no mask' has no [MASK]; write it where a token is missing"),
        ("/fill", {"prompt": ["[MASK]", "[MASK] " * 60]}, "prompt.1: "),
        ("/fill", {"prompt": []}, "prompt: is empty"),
        ("/fill", {"prompt": [1, 2]}, "prompt: must be a text or a list of texts, with the mask token"),
        ("/fill", {"prompt": 5}, "prompt: must be a text or a list of texts, with the mask token"),
        ("/fill", {"prompt": "[MASK]", "top_k": "many"}, "top_k: "),
        ("/fill", {"prompt": ["[MASK][MASK]"] * 51, "top_k": 1000}, "top_k: 1,000 tokens for each of 102 masks; the "),
        ("/v1/completions", {"prompt": "a"}, "cannot continue texts or chat; use POST /fill or POST /v1/embeddings"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "use POST /fill or"),
    ],
)
def test_mistakes_are_one_sentence(bert: Live, path: str, body: Any, message: str) -> None:
    reply = web.post(bert.url + path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    assert web.get(f"{bert.url}/health").status_code == 200


def test_a_long_text_is_truncated_on_request(bert: Live, reference: tuple[Any, Any]) -> None:
    tokenizer = reference[1]
    reply = embed(bert, "the wheel " * 60, truncate=True)
    kept = tokenizer.decode(tokenizer.encode("the wheel " * 60)[:46])
    assert reply["usage"]["prompt_tokens"] == 48
    assert np.abs(vectors_of(reply)[0] - embedding_of(reference, kept)).max() < 1e-5


def test_the_page_knows_what_the_model_can_do(bert: Live) -> None:
    model = web.get(f"{bert.url}/v1/models").json()["data"][0]
    assert (model["generate"], model["chat"], model["mask"]) == (False, False, "[MASK]")
    assert model["embedding"] == {"dimensions": 32, "tokens": 48}
    page = web.get(bert.url).text
    assert all(f'value="{mode}"' in page for mode in ("fill", "compare", "chat", "complete"))


@pytest.mark.long
def test_a_next_token_model_embeds_while_it_generates(
    new_live: Callable[..., Live], small_model: Path, tmp_path: Path
) -> None:
    import transformers

    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small_model / name, tmp_path)
    live = new_live({"where": str(tmp_path)})
    net = transformers.GPT2Model.from_pretrained(small_model).eval()
    done = threading.Event()
    found: list[Any] = []

    def generate() -> None:
        body = {"prompt": "The mill", "max_tokens": 600, "min_tokens": 600, "stream": True, "seed": 4}
        with web.stream("POST", f"{live.url}/v1/completions", json=body) as reply:
            found.extend(json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {"))
        done.set()

    thread = threading.Thread(target=generate)
    thread.start()
    answered = 0
    while not done.is_set() or not answered:
        reply = embed(live, TEXT)
        answered += 1
        ids = web.post(f"{live.url}/tokenize", json={"text": TEXT[answered % 3]}).json()["tokens"][:96]
        with torch.no_grad():
            wanted = net(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
        assert np.abs(vectors_of(reply)[answered % 3] - wanted).max() < 1e-4
    thread.join()
    text = "".join(event["choices"][0]["text"] for event in found if event["choices"])
    whole = {"prompt": "The mill", "max_tokens": 600, "min_tokens": 600, "seed": 4}
    assert web.post(f"{live.url}/v1/completions", json=whole).json()["choices"][0]["text"] == text
    fill = web.post(f"{live.url}/fill", json={"prompt": "[MASK]"})
    assert "does not predict masked tokens; use POST /v1/completions" in fill.json()["error"]["message"]
    live.wait_idle()


@pytest.mark.long
def test_a_stopped_server_ends_with_its_encoder(new_live: Callable[..., Live], folder: Path, reference: Any) -> None:
    live = new_live({"where": str(folder)})
    assert len(embed(live, TEXT)["data"]) == 3
    assert live.stop() == 0
    assert not any("Traceback" in line for line in live.output)
