"""lm-evaluation-harness's requests to a live server, compared with transformers; and the harness itself."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import web
from tests.support.live_server import Live
from tests.support.small_models import TEXT
from tests.support.waiting import LONGEST

pytestmark = pytest.mark.long

PAIRS = [
    ("The mill stands", " by the river"),
    ("물레방아는", " 강가에 서 있다."),
    ("Değirmen", " köprünün üstünde"),
    ("a", "b"),
]
CLOSE = 2e-5
STREAMED = int(os.environ.get("TEXTMILL_TEST_STREAMED", "40"))


@pytest.fixture(scope="module")
def served(small_model: Path, new_live: Callable[..., Live]) -> Live:
    return new_live({"model": str(small_model), "chat": False})


@pytest.fixture(scope="module")
def tokenizer(small_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(small_model)


@pytest.fixture(scope="module")
def judge(small_model: Path) -> Callable[[list[int]], torch.Tensor]:
    """Return a function for the log-probabilities of all next tokens, by transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(small_model).float().eval()

    def rows(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return found

    return rows


def request_choices(live: Live, prompt: Any, **more: Any) -> list[dict[str, Any]]:
    body = {
        "model": "mill",
        "prompt": prompt,
        "temperature": 0,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
        "max_tokens": 1,
        **more,
    }
    reply = web.post(f"{live.url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    choices: list[dict[str, Any]] = reply.json()["choices"]
    return sorted(choices, key=lambda choice: choice["index"])


@pytest.mark.parametrize("new", [1, 0])
def test_prompt_logprobs_equal_transformers(
    served: Live, tokenizer: Any, judge: Callable[..., torch.Tensor], new: int
) -> None:
    prompts = [tokenizer.encode(context + continuation) for context, continuation in PAIRS]
    for ids, choice in zip(prompts, request_choices(served, prompts, max_tokens=new), strict=True):
        rows, logprobs = judge(ids), choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(ids) + new
        assert logprobs["token_logprobs"][0] is None
        wanted = [float(rows[place, id_]) for place, id_ in enumerate(ids[1:])]
        assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(wanted, abs=CLOSE)
        greedy = [
            max(top.values()) == chosen
            for chosen, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True)
        ]
        likeliest = [int(rows[place].argmax()) == id_ for place, id_ in enumerate(ids[1:])] + [True] * new
        assert greedy == likeliest
        if new:
            assert logprobs["token_logprobs"][-1] == pytest.approx(float(rows[-1].max()), abs=CLOSE)


def test_logprobs_of_new_tokens_equal_transformers(
    served: Live, tokenizer: Any, judge: Callable[..., torch.Tensor]
) -> None:
    ids = tokenizer.encode("The mill")
    choice = request_choices(served, ids, echo=False, logprobs=5, max_tokens=12)[0]
    new = web.post(f"{served.url}/tokenize", json={"text": choice["text"]}).json()["tokens"]
    tops = choice["logprobs"]["top_logprobs"]
    context = list(ids)
    for logprob, top in zip(choice["logprobs"]["token_logprobs"], tops, strict=True):
        row = judge(context)[-1]
        assert logprob == pytest.approx(float(row.max()), abs=CLOSE)
        assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(5).values.tolist(), abs=CLOSE)
        context.append(int(row.argmax()))
    assert tokenizer.decode(context[len(ids) :]).startswith(choice["text"].rstrip("�"))
    assert new


def test_streamed_chunks_join_to_the_full_texts_of_many_prompts(served: Live) -> None:
    dice = random.Random(5)
    signs = [*"🎡🏞👩‍👧🇰🇷👍🏽물레방아강가에 aé漢", "The ", " mill", "\n"]
    with httpx.Client(base_url=served.url, timeout=LONGEST) as client:
        for number in range(STREAMED):
            prompt = "".join(dice.choices(signs, k=dice.randint(1, 12)))
            body = {"prompt": prompt, "max_tokens": 24, "seed": number, "temperature": 1.5}
            full = client.post("/v1/completions", json=body).json()["choices"][0]
            lines = client.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
            chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
            assert "".join(chunk["text"] for chunk in chunks) == full["text"], prompt
            assert chunks[-1]["finish_reason"] == full["finish_reason"]


def test_generate_until_a_stop_string(served: Live, tokenizer: Any) -> None:
    body = {"model": "mill", "prompt": ["The mill", "강가에"], "max_tokens": 20, "temperature": 0, "seed": 1234}
    full = [choice["text"] for choice in web.post(f"{served.url}/v1/completions", json=body).json()["choices"]]
    stop = full[0][3:5]
    cut = web.post(f"{served.url}/v1/completions", json={**body, "stop": [stop, "<|endoftext|>"]}).json()["choices"]
    assert cut[0]["text"] == full[0][: full[0].index(stop)]
    assert cut[0]["finish_reason"] == "stop"


def split_windows(ids: list[int], end: int, length: int) -> list[tuple[list[int], int]]:
    """Split a long text into windows as the harness does; return each with its number of scored tokens."""
    first = ([end, *ids[:length]], min(length, len(ids)))
    rest = [
        (ids[max(stop - length - 1, 0) : stop], stop - begin)
        for begin in range(length, len(ids), length)
        for stop in (min(begin + length, len(ids)),)
    ]
    return [first, *rest]


LONG = " ".join(TEXT * 4)
"""Longer than the model's context."""


def test_long_text_is_scored_in_windows(served: Live, tokenizer: Any, judge: Callable[..., torch.Tensor]) -> None:
    windows = split_windows(tokenizer.encode(LONG), tokenizer.eos_token_id, 94)
    assert len(windows) > 2
    assert sum(count for _, count in windows) == len(tokenizer.encode(LONG))
    for (ids, count), choice in zip(windows, request_choices(served, [ids for ids, _ in windows]), strict=True):
        wanted = sum(float(judge(ids)[place - 1, ids[place]]) for place in range(len(ids) - count, len(ids)))
        assert sum(choice["logprobs"]["token_logprobs"][-count - 1 : -1]) == pytest.approx(wanted, abs=1e-3)


def test_special_tokens_are_recognised_in_prompts(served: Live, tokenizer: Any) -> None:
    info = web.get(f"{served.url}/tokenizer_info").json()
    assert info["eos_token"] == tokenizer.eos_token
    for text in (tokenizer.eos_token, f"The mill{tokenizer.eos_token}강가에{tokenizer.eos_token}", "The mill"):
        body = {"prompt": text, "add_special_tokens": False}
        assert web.post(f"{served.url}/tokenize", json=body).json()["tokens"] == tokenizer.encode(text)
    plain = web.post(f"{served.url}/tokenize", json={"text": tokenizer.eos_token}).json()["tokens"]
    assert len(plain) > 1, "in `text` they are plain text"


def test_chat_until_a_stop_string(live: Live) -> None:
    turns = [{"role": "user", "content": "The mill", "type": "text"}]
    body = {"messages": turns, "model": "mill", "max_tokens": 30, "temperature": 0, "seed": 1234}
    full = web.post(f"{live.url}/v1/chat/completions", json={**body, "stop": []}).json()["choices"][0]["message"][
        "content"
    ]
    assert full.startswith("user: The mill\nassistant:"), "the echo model repeats the prompt"
    cut = web.post(f"{live.url}/v1/chat/completions", json={**body, "stop": [":"]}).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (full[: full.index(":")], "stop")


@pytest.mark.parametrize("backend", ["remote", "huggingface"])
def test_harness_scores_like_transformers(
    served: Live, small_model: Path, tokenizer: Any, judge: Callable[..., torch.Tensor], backend: str
) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is in the extra eval")
    pytest.importorskip("tenacity", reason="lm-evaluation-harness asks servers with its own extra api only")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    more = {"tokenizer": str(small_model)} if backend == "huggingface" else {}
    model = LocalCompletionsAPI(
        base_url=f"{served.url}/v1/completions",
        model="mill",
        tokenizer_backend=backend,
        max_length=96,
        batch_size=2,
        **more,
    )
    requests = [Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(PAIRS)]
    for (context, continuation), (found, greedy) in zip(PAIRS, model.loglikelihood(requests), strict=True):
        ids, begin = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
        rows = judge(ids)
        chosen = [(place - 1, ids[place]) for place in range(begin, len(ids))]
        assert found == pytest.approx(sum(float(rows[place, id_]) for place, id_ in chosen), abs=1e-4)
        assert greedy == all(int(rows[place].argmax()) == id_ for place, id_ in chosen)
    assert model.prefix_token_id == tokenizer.eos_token_id
    wanted = sum(
        float(judge(ids)[place - 1, ids[place]])
        for ids, count in split_windows(tokenizer.encode(LONG), tokenizer.eos_token_id, 94)
        for place in range(len(ids) - count, len(ids))
    )
    rolled = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (LONG,), 0)])
    assert rolled == pytest.approx([wanted], abs=1e-3)
    made = model.generate_until([Instance("generate_until", {}, ("The mill", {"until": ["\n"], "max_gen_toks": 8}), 0)])
    direct = web.post(
        f"{served.url}/v1/completions", json={"prompt": "The mill", "max_tokens": 8, "temperature": 0, "stop": ["\n"]}
    ).json()
    assert made == [direct["choices"][0]["text"]]


def test_harness_chats(live: Live) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is in the extra eval")
    pytest.importorskip("tenacity", reason="lm-evaluation-harness asks servers with its own extra api only")
    from lm_eval.api.instance import Instance
    from lm_eval.models.api_models import JsonChatStr
    from lm_eval.models.openai_completions import LocalChatCompletion

    model = LocalChatCompletion(base_url=f"{live.url}/v1/chat/completions", model="mill", tokenized_requests=False)
    turns = JsonChatStr(model.apply_chat_template([{"role": "user", "content": "The mill"}]).prompt)
    made = model.generate_until([Instance("generate_until", {}, (turns, {"until": ["\n"], "max_gen_toks": 40}), 0)])
    assert made == ["user: The mill"]
