"""The chat page in a real browser: type, stream, stop, change settings, reload, and errors when the server is gone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import web
from tests.support.bert_models import write_bert
from tests.support.browser import KEYS, Browser, missing
from tests.support.live_server import Live

pytestmark = pytest.mark.long

HANGUL = "강가에 서 있다"
ARABIC = "كان يا ما كان"
IDLE = "return document.getElementById('stop').disabled && document.querySelectorAll('.note').length"
LAST = ".turn.assistant:last-child"
SET_MAX_TOKENS = (
    "const field = document.getElementById('max_tokens'); field.value = arguments[0];"
    " field.dispatchEvent(new Event('input', {bubbles: true}))"
)

needs_browser = pytest.mark.skipif(bool(missing()), reason=missing() or "there is one")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    window = Browser()
    yield window
    window.close()


@pytest.fixture(scope="module")
def slow(new_live: Callable[..., Live]) -> Live:
    return new_live({"delay": 0.01, "sample": {"max_tokens": 60}})


def open_page(browser: Browser, url: str) -> None:
    """Open the page as a new visitor."""
    browser.open(url)
    browser.run("localStorage.clear(); sessionStorage.clear()")
    browser.open(url)
    browser.wait(
        "return document.getElementById('model').textContent.includes('mill')"
        " || document.getElementById('key-dialog').open"
    )


def shoot(browser: Browser, name: str) -> None:
    """Save a screenshot if a folder for them is set."""
    if folder := os.environ.get("TEXTMILL_TEST_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(Path(folder) / f"{name}.png")


def test_page_loads_nothing_from_other_hosts(live: Live) -> None:
    for path in ("/", "/page.css", "/page.js"):
        reply = web.get(live.url + path)
        assert "http:" not in reply.text
        assert "https:" not in reply.text
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


@needs_browser
def test_completion_streams_with_probabilities(browser: Browser, slow: Live) -> None:
    open_page(browser, slow.url)
    assert browser.text("#model") == "mill, step 7, context of 512 tokens"
    assert "Ask the model" in browser.text("#hint")
    browser.click("label:has(#mode-complete)")
    browser.click("#hint button")
    assert browser.run("return document.getElementById('prompt').value") == browser.text("#hint button"), (
        "an example is one click away"
    )
    browser.run("document.getElementById('prompt').value = ''")
    browser.type("#prompt", HANGUL + KEYS["enter"])
    browser.wait("return document.querySelectorAll('.token').length > 3 && !document.getElementById('stop').disabled")
    browser.wait(IDLE)
    full = web.post(f"{slow.url}/v1/completions", json={"prompt": HANGUL, "max_tokens": 60}).json()["choices"][0][
        "text"
    ]
    shown = browser.run("return [...document.querySelectorAll('.token')].map((one) => one.textContent).join('')")
    assert full.rstrip("�").startswith(shown)
    assert len(shown) > 20
    assert browser.text(".note") == "60 tokens, reached the maximum"
    assert "tokens/s" in browser.text("#speed")
    browser.hover(".token:nth-of-type(4)")
    # Bytes that never make a character hide nothing that comes after them, and a stop string is not shown.
    broken = [[0xEA, 0xB0], [0x61], [0xEA, 0xB0, 0x95], [0x62, 0x63]]
    script = """const turn = document.createElement('div'), tokens = new Tokens(turn);
        for (const bytes of arguments[0]) tokens.add({bytes, logprob: -1, top: []});
        const seen = turn.textContent; tokens.end(seen.slice(0, -1)); return [seen, turn.textContent]"""
    full = b"".join(map(bytes, broken)).decode(errors="replace")
    assert browser.run(script, broken) == [full, full[:-1]]
    assert "%" in browser.wait(
        "return !document.getElementById('tip').hidden && document.getElementById('tip').textContent"
    )
    shoot(browser, "continue-light-wide")
    shaded = "return getComputedStyle(document.querySelector('.token.p2:not(:hover)')).backgroundColor"
    assert browser.run(shaded) == "rgba(0, 0, 0, 0)"
    browser.click("#shade")
    assert browser.run(shaded) != "rgba(0, 0, 0, 0)"
    browser.click(".again")
    browser.wait(IDLE + " == 2")
    assert browser.run("return document.querySelectorAll('.again').length") == 1
    assert browser.errors() == []
    browser.run("document.getElementById('top_k').value = -1")
    browser.type("#prompt", KEYS["enter"])
    browser.wait(
        "return document.getElementById('top_k').ariaInvalid == 'true' && document.getElementById('more').open"
    )
    assert "top_k: must be at least 0; found -1" in browser.text("#error")
    assert browser.run("return document.querySelectorAll('.turn').length") == 2, (
        "what was refused leaves nothing behind"
    )
    assert ["400" in line for line in browser.errors()] == [True]


@needs_browser
def test_chat_in_both_text_directions_and_the_stop_button(browser: Browser, slow: Live) -> None:
    open_page(browser, slow.url)
    browser.click("label:has(#mode-chat)")
    browser.type("#prompt", ARABIC + KEYS["enter"])
    browser.wait(IDLE)
    assert browser.run("return getComputedStyle(document.querySelector('.turn.user')).direction") == "rtl"
    before = browser.run("return messages.length")
    browser.click(".again")
    browser.wait("return !document.getElementById('stop').disabled")
    browser.wait(f"return document.querySelectorAll('{LAST} .token').length")
    browser.type("body", KEYS["escape"])
    browser.wait(IDLE + " == 1")
    assert browser.run("return messages.length") == before == 2, "another answer takes the place of the first"
    assert "stopped" in browser.text(f"{LAST} .note")
    browser.run(SET_MAX_TOKENS, 400)
    browser.type("#prompt", HANGUL + KEYS["enter"])
    browser.wait(f"return document.querySelectorAll('{LAST} .token').length > 2")
    browser.click("#stop")
    browser.wait("return document.querySelectorAll('.note').length == 2")
    assert "stopped" in browser.text(f"{LAST} .note")
    turns = "[...document.querySelectorAll('.turn.user')]"
    sides = f"return {turns}.map((turn) => Math.round(turn.getBoundingClientRect().right))"
    assert len(set(browser.run(sides))) == 1, "the user's turns are on the same side in both directions"
    slow.wait_idle()
    browser.run("document.getElementById('theme').click()")
    shoot(browser, "chat-dark-wide")
    browser.size(390, 780)
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), (
        "nothing runs out of a phone's screen"
    )
    shoot(browser, "chat-dark-narrow")
    browser.click("#show-settings")
    shoot(browser, "settings-dark-narrow")
    browser.run("document.getElementById('theme').click()")
    shoot(browser, "settings-light-narrow")
    open_ = "return document.getElementById('settings').checkVisibility()"
    assert browser.run(open_)
    browser.type("body", KEYS["escape"])
    assert not browser.run(open_), "the settings panel can be closed"
    browser.size(1200, 800)
    assert browser.errors() == []


@needs_browser
def test_settings_are_kept_and_sent_to_the_server(browser: Browser, slow: Live) -> None:
    open_page(browser, slow.url)
    browser.click("label:has(#mode-complete)")
    browser.run(SET_MAX_TOKENS, 5)
    browser.click("#theme")
    theme = browser.run("return document.documentElement.dataset.theme")
    browser.open(slow.url)
    browser.wait("return document.getElementById('model').textContent.includes('mill')")
    assert browser.run("return document.getElementById('max_tokens').value") == "5"
    assert browser.run("return document.documentElement.dataset.theme") == theme
    browser.type("#prompt", "The mill" + KEYS["enter"])
    browser.wait(IDLE)
    assert browser.text(".note") == "5 tokens, reached the maximum"


@needs_browser
def test_conversation_longer_than_the_context_continues(browser: Browser, new_live: Callable[..., Live]) -> None:
    quick = new_live({"delay": 0.0005, "sample": {"max_tokens": 150}})
    open_page(browser, quick.url)
    browser.click("label:has(#mode-chat)")
    for number in range(1, 5):
        browser.type("#prompt", f"The mill {number}" + KEYS["enter"])
        browser.wait(
            f"return document.getElementById('stop').disabled && document.querySelectorAll('.note').length == {number}"
        )
    assert "dropped" in browser.text(f"{LAST} .note")
    assert browser.run("return document.getElementById('error').hidden")
    long = "mill " * 400
    browser.run("document.getElementById('prompt').value = arguments[0]", long)
    browser.type("#prompt", KEYS["enter"])
    browser.wait("return !document.getElementById('error').hidden && document.getElementById('stop').disabled")
    assert "tokens; the limit is" in browser.text("#error")
    assert browser.run("return document.getElementById('prompt').value") == long, "what got no answer is not lost"
    assert browser.run("return document.querySelectorAll('.turn').length") == 8
    assert browser.run("return messages.length") == 6, (
        "nor is the conversation: the context of the last answer, and that answer"
    )


@needs_browser
def test_page_requests_the_key(browser: Browser, new_live: Callable[..., Live]) -> None:
    guarded = new_live({}, {"TEXTMILL_API_KEY": "a-long-secret"})
    open_page(browser, guarded.url)
    assert browser.run("return document.getElementById('key-dialog').open")
    shoot(browser, "key-light-wide")
    browser.type("#key", "wrong-one" + KEYS["enter"])
    browser.wait("return document.getElementById('key-note').textContent.includes('wrong')")
    browser.run("document.getElementById('key').value = ''")
    browser.type("#key", "a-long-secret" + KEYS["enter"])
    browser.wait("return document.getElementById('model').textContent.includes('mill')")
    assert browser.run("return document.getElementById('error').hidden")


@needs_browser
def test_page_reports_a_server_that_is_gone(browser: Browser, new_live: Callable[..., Live]) -> None:
    doomed = new_live({"delay": 0.02, "sample": {"max_tokens": 400}})
    open_page(browser, doomed.url)
    browser.type("#prompt", "The mill" + KEYS["enter"])
    browser.wait("return document.querySelectorAll('.token').length > 2")
    doomed.process.kill()
    browser.wait("return !document.getElementById('error').hidden")
    assert "closed the connection" in browser.text("#error")
    assert "failed" in browser.text(".note")
    browser.type("#prompt", "again" + KEYS["enter"])
    browser.wait("return document.getElementById('error').textContent.includes('does not answer')")
    shoot(browser, "gone-light-wide")


@needs_browser
def test_a_bert_fills_in_and_compares(browser: Browser, new_live: Callable[..., Live], tmp_path: Path) -> None:
    """The page offers what the model can do, and nothing that it cannot."""
    write_bert(tmp_path / "bert-mill")
    live = new_live({"where": str(tmp_path / "bert-mill")})
    open_page(browser, live.url)
    shown = (
        "return [...document.querySelectorAll('.modes label')].filter((one) => !one.hidden).map((one) => one.innerText)"
    )
    browser.wait("return document.getElementById('mode-fill').checked")
    assert browser.run(shown) == ["Fill in", "Compare"]
    browser.type("#prompt", "The mill stands [MASK] the river" + KEYS["enter"])
    browser.wait("return document.querySelectorAll('.filled').length === 1")
    choices = "return [...document.querySelectorAll('.rows div')].map((one) => one.innerText)"
    assert len(browser.run(choices)) == 8
    reply = web.post(f"{live.url}/fill", json={"prompt": "The mill stands [MASK] the river"}).json()["data"][0]
    assert browser.run("return document.querySelector('.filled').textContent") == reply["masks"][0][0]["token"]
    shoot(browser, "fill")
    browser.run("document.getElementById('mode-compare').click()")
    browser.run(
        "document.getElementById('prompt').value = 'the mill\\nthe river\\nthe mill';"
        "document.getElementById('ask').requestSubmit()"
    )
    browser.wait("return document.querySelectorAll('.rows div').length === 2")
    assert "1.000" in browser.run(choices)[0], "the same text comes first"
    shoot(browser, "compare")
    browser.run("document.getElementById('prompt').value = 'one'; document.getElementById('ask').requestSubmit()")
    browser.wait("return document.getElementById('error').textContent.includes('two or more')")
