"""The chat page in a real browser: type, stream, stop, change settings, reload, and errors when the server is gone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import web
from tests.support.bert_models import write_bert
from tests.support.browser import KEYS, Browser, missing
from tests.support.live_server import Live
from tests.support.waiting import wait_for

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
    browser.errors()  # those of the page before
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
    speeds = """const first = {time: 1000, count: 10}, label = document.getElementById('speed');
        const show = (...given) => { showSpeed(...given); return label.textContent; };
        return [show(60, first, 1500), show(60, first, 1001), show(0, null, 0)]"""
    assert browser.run(speeds) == ["100.0 tokens/s", "", ""], "tokens that come at once do not have a speed"
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
    assert browser.run("return document.querySelectorAll('.again').length") == 2
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
    before = browser.run("return chatMessages().length")
    browser.click(".again")
    browser.wait("return !document.getElementById('stop').disabled")
    browser.wait(f"return document.querySelectorAll('{LAST} .token').length")
    browser.type("body", KEYS["escape"])
    browser.wait(IDLE + " == 1")
    assert browser.run("return chatMessages().length") == before == 2, "another version of the same answer"
    assert browser.text(".version") == "Version 2 of 2"
    browser.click(".version")
    assert browser.text(".version") == "Version 1 of 2"
    browser.click(".version")
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
    assert browser.run("return chatMessages().length") == 8, "nor is the conversation"


ANSWERED = "return document.getElementById('stop').disabled && document.querySelectorAll('.again').length == {}"
TURNS = "return [...document.querySelectorAll('.turn')].map((one) => one.textContent)"
NAMES = "return [...document.querySelectorAll('#list button')].map((one) => one.textContent)"


@needs_browser
def test_conversations_are_kept_and_studied_by_keyboard_alone(browser: Browser, live: Live) -> None:
    """Chat, probabilities, another mode, rename, reload, search, edit, delete and undo, without a pointer."""
    open_page(browser, live.url)
    browser.tab_to("#prompt")
    browser.press("first question" + KEYS["enter"])
    browser.wait(ANSWERED.format(1))
    browser.press("second question" + KEYS["enter"])
    browser.wait(ANSWERED.format(2))
    browser.tab_to(".token")
    browser.press(KEYS["right"] * 2)
    tip = "return !document.getElementById('tip').hidden && document.getElementById('tip').textContent"
    assert "50.0%" in browser.run(tip)
    assert (
        browser.run("return [...document.querySelectorAll('.turn.assistant .token')].indexOf(document.activeElement)")
        == 2
    )
    browser.press(KEYS["escape"])
    assert not browser.run(tip)
    kept = browser.run(TURNS)
    browser.tab_to("input[name=mode]")
    browser.press(KEYS["right"])
    browser.tab_to("#prompt")
    browser.press("a beginning" + KEYS["enter"])
    browser.wait(ANSWERED.format(1))
    assert browser.run(NAMES) == ["a beginning", "first question"]
    browser.tab_to("#list li:nth-child(2) button")
    browser.press(KEYS["enter"])
    assert browser.run(TURNS) == kept, "nothing vanishes when the mode changes"
    browser.tab_to("#title")
    browser.press("a", held="\ue009")
    browser.press("River talk" + KEYS["enter"])
    browser.open(live.url)
    browser.wait("return document.querySelectorAll('.turn').length == 4")
    assert browser.run(TURNS) == kept, "nor when the page is loaded again"
    assert browser.run(NAMES) == ["River talk", "a beginning"]
    browser.tab_to("#search")
    browser.press("beginn")
    assert browser.run(NAMES) == ["a beginning"]
    browser.press(KEYS["backspace"] * 6)
    browser.tab_to(".turn.user:nth-of-type(1) .edit")
    browser.press(KEYS["enter"])
    browser.press("!" + KEYS["tab"] * 2 + KEYS["enter"])
    browser.wait(ANSWERED.format(1))
    assert browser.run("return conversation.turns[0].content").startswith("first question")
    assert len(browser.run(NAMES)) == 3, "an edited message is the start of another conversation"
    browser.tab_to("#delete")
    browser.press(KEYS["enter"])
    assert (len(browser.run(NAMES)), len(browser.run(TURNS))) == (2, 0)
    browser.press(KEYS["enter"])  # undo has the focus
    assert (len(browser.run(NAMES)), len(browser.run(TURNS))) == (3, 2)
    browser.tab_to("#new")
    browser.press(KEYS["enter"])
    assert "Ask the model" in browser.text("#hint")
    assert browser.errors() == []


@needs_browser
def test_two_answers_are_compared_and_the_preferred_one_is_written(
    browser: Browser, new_live: Callable[..., Live], tmp_path: Path
) -> None:
    file = tmp_path / "preferences.jsonl"
    live = new_live({"preferences": str(file)})
    open_page(browser, live.url)
    browser.run("document.getElementById('pair').open = true; document.getElementById('other_model').value = 'mill'")
    browser.run("document.getElementById('other_temperature').value = '0.1'")
    browser.type("#prompt", "which one?" + KEYS["enter"])
    browser.wait("return document.querySelectorAll('.prefer').length == 2")
    titles = browser.run("return [...document.querySelectorAll('.columns > div > p')].map((one) => one.textContent)")
    assert titles == ["mill, temperature 0.8, top p 1", "mill, temperature 0.1, top p 1"]
    shoot(browser, "pair")
    browser.click(".columns > div:nth-child(2) .prefer")
    browser.wait("return document.querySelectorAll('.columns').length == 0")
    assert browser.text(".version") == "Version 2 of 2"
    line = json.loads(wait_for(file.read_text))
    assert line["prompt"] == [{"role": "user", "content": "which one?"}]
    assert line["chosen"][0]["content"].startswith("user: which one?")
    assert (line["chosen_by"]["temperature"], line["rejected_by"]["temperature"]) == (0.1, 0.8)
    reply = web.post(f"{live.url}/preferences", json={"prompt": "a", "chosen": "b", "rejected": "c"})
    assert reply.status_code == 200
    assert json.loads(file.read_text().splitlines()[1])["chosen"] == "b"


@needs_browser
def test_markdown_is_shown_and_never_html(browser: Browser, live: Live) -> None:
    open_page(browser, live.url)
    text = (
        "# Mill\n\nSome **bold** *soft* `a<b` [site](https://x.example/a) [bad](javascript:alert(1))\n"
        '<img src=x onerror=alert(1)>\n\n- one\n- two\n\n3. three\n\n```js\nlet a = "<b>";\n```\nend'
    )
    html = browser.run("return renderMarkdown(arguments[0]).innerHTML", text)
    assert html == (
        '<p class="heading">Mill</p><p>Some <strong>bold</strong> <em>soft</em> <code>a&lt;b</code> '
        '<a href="https://x.example/a" rel="noreferrer" target="_blank">site</a> [bad](javascript:alert(1))\n'
        "&lt;img src=x onerror=alert(1)&gt;</p><ul><li>one</li><li>two</li></ul>"
        '<ol start="3"><li>three</li></ol><pre tabindex="0"><code>let a = "&lt;b&gt;";</code></pre><p>\nend</p>'
    )


@needs_browser
def test_settings_belong_to_a_model_and_only_changed_ones_are_stored(
    browser: Browser, new_live: Callable[..., Live], tmp_path: Path
) -> None:
    open_page(browser, new_live({}).url)
    browser.run(SET_MAX_TOKENS, 5)
    stored = "return JSON.parse(localStorage.getItem('textmill')).changed"
    assert browser.run(stored) == {"mill": {"max_tokens": "5"}}
    browser.run("model = {...model, id: 'other'}; models.push(model); setModel(model)")
    assert browser.run("return document.getElementById('max_tokens').value") != "5"
    browser.run("setModel(models[0])")
    assert browser.run("return document.getElementById('max_tokens').value") == "5"
    browser.click("#reset")
    assert browser.run(stored) == {"mill": {}}


@needs_browser
@pytest.mark.skipif("TEXTMILL_TEST_AXE" not in os.environ, reason="TEXTMILL_TEST_AXE names axe-core's axe.min.js")
def test_axe_finds_nothing(browser: Browser, live: Live) -> None:
    script = Path(os.environ["TEXTMILL_TEST_AXE"]).read_text(encoding="utf-8")
    check = "const done = arguments[0]; axe.run().then((found) => done(found.violations.map((one) => one.id)))"
    open_page(browser, live.url)
    for width, theme in ((1280, "light"), (1280, "dark"), (390, "dark"), (390, "light")):
        browser.size(width, 780)
        browser.run("setTheme(arguments[0])", theme)
        browser.type("#prompt", "hello" + KEYS["enter"])
        browser.wait("return document.getElementById('stop').disabled")
        browser.run(f"{script}; window.axe = axe;")
        assert browser.send("execute/async", script=check, args=[]) == []
    browser.size(1200, 800)


STAINLESS = ("arch", "lang", "os", "package-version", "retry-count", "runtime", "runtime-version", "timeout")
"""Headers of OpenAI's JavaScript client."""
CALL = """const [url, headers, done] = [...arguments];
fetch(url, {method: 'POST', headers, body: JSON.stringify({messages: [{role: 'user', content: 'x'}], max_tokens: 2})})
    .then((reply) => reply.json().then((tree) => done([tree.object, reply.headers.get('x-request-id')])), (error) =>
    done([String(error)]))"""


@needs_browser
def test_page_of_an_allowed_origin_calls_the_server(
    browser: Browser, live: Live, new_live: Callable[..., Live]
) -> None:
    """A browser asks first (preflight) whether it may send the headers of OpenAI's JavaScript client."""
    headers = {f"X-Stainless-{name}": "x" for name in STAINLESS}
    headers |= {"Authorization": "Bearer none", "Content-Type": "application/json"}
    browser.open(f"{live.url}/docs")  # a page of another port, without a script policy that forbids the call
    browser.send("goog/cdp/execute", cmd="Page.setBypassCSP", params={"enabled": True})
    browser.open(f"{live.url}/docs")
    for origins, answered in (([live.url], True), ([], False)):
        other = new_live({"serve": {"allowed_origins": origins}})
        reply = browser.send("execute/async", script=CALL, args=[f"{other.url}/v1/chat/completions", headers])
        assert (reply[0] == "chat.completion" and reply[1].startswith("req-")) == answered, reply
    browser.send("goog/cdp/execute", cmd="Page.setBypassCSP", params={"enabled": False})
    browser.errors()


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
