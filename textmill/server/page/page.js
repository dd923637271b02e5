"use strict";

const find = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens"];
const STORED = [...NUMBERS, "stop_text", "seed", "system"];
const HINTS = {
  chat: ["Ask the model something.", "Who are you?", "Tell me a story.", "오늘 기분이 어때?"],
  complete: ["Type the beginning of a text; the model continues it.", "Once upon a time", "The king and the queen", "옛날 옛적에"],
  fill: ["Type a text with MASK where a token is missing; the model fills it in.", "The mill stands by the MASK.", "To be, or not to MASK."],
  compare: ["Type several texts, one in each line; the page shows how similar each is to the first.", "The mill stands by the river.\nA watermill next to a stream.\nI had soup for lunch."],
};
const PLACEHOLDERS = { chat: "Ask something", complete: "The beginning of a text", fill: "A text with MASK", compare: "One text in each line" };

let model = null;
let running = null;
let messages = [];

// The key is stored in this tab; settings and the theme in this browser.
const tab = {
  get key() { try { return sessionStorage.getItem("textmill-key") || ""; } catch { return this.fallback || ""; } },
  set key(value) { try { sessionStorage.setItem("textmill-key", value); } catch { this.fallback = value; } },
};
function loadStored() { try { return JSON.parse(localStorage.getItem("textmill") || "{}"); } catch { return {}; } }
function store(more) { try { localStorage.setItem("textmill", JSON.stringify({ ...loadStored(), ...more })); } catch { /* storage is blocked */ } }

function showError(text, field) {
  find("error").textContent = text;
  find("error").hidden = !text;
  for (const name of STORED) find(name).setAttribute("aria-invalid", String(name === field));
  if (find("more").contains(field && find(field))) find("more").open = true;
}

async function call(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (tab.key) headers.Authorization = `Bearer ${tab.key}`;
  let reply;
  try {
    reply = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer; it may have been stopped. Try again when it is back.");
  }
  if (reply.status === 401) {
    askKey(Boolean(tab.key));
    throw new Error("The server needs an API key.");
  }
  if (!reply.ok) {
    const error = (await reply.json().catch(() => null))?.error;
    throw Object.assign(new Error(error?.message || `The server answered ${reply.status}.`), { code: error?.code, field: error?.param });
  }
  return reply;
}

function askKey(wrong) {
  const dialog = find("key-dialog");
  find("key-note").textContent = wrong ? "That key is wrong; try another." : "It is stored in this tab only.";
  if (!dialog.open) dialog.showModal();
}

async function findModel() {
  try {
    model = (await (await call("/v1/models")).json()).data[0];
    find("model").textContent = model.id + (model.step ? `, step ${model.step.toLocaleString("en")}` : "") + `, context of ${model.max_model_len.toLocaleString("en")} tokens`;
    showModes();
    find("mode-chat").disabled = !model.chat;
    find("mode-chat").parentElement.classList.toggle("missing", !model.chat);
    find("mode-chat").parentElement.title = model.chat ? "" : "This model has no chat template; it continues texts.";
    setMode(firstMode());
    find("max_tokens").max = model.limits.max_tokens;
    fill(loadStored().settings || {});
    showError("");
  } catch (error) {
    find("model").textContent = "no model";
    showError(error.message);
  }
}

// What the model can do: one that predicts the next token chats or continues; others fill in masks or have embeddings only.
function modes() {
  return model.generate ? ["chat", "complete"] : ["fill", "compare"].filter((name) => (name === "fill" ? model.mask : model.embedding));
}

function showModes() {
  for (const input of document.querySelectorAll("input[name=mode]")) input.parentElement.hidden = !modes().includes(input.value);
  // Only the link to the reference is of use without sampling.
  for (const part of find("settings").children) part.hidden = !model.generate && !part.querySelector("a");
  find("reset").hidden = !model.generate;
}

function firstMode() {
  if (model.generate) return model.chat && loadStored().mode !== "complete" ? "chat" : "complete";
  return modes().includes(loadStored().mode) ? loadStored().mode : modes()[0];
}

function withMask(text) { return text.replaceAll("MASK", model?.mask || "[MASK]"); }

function fill(values) {
  for (const name of NUMBERS) find(name).value = values[name] ?? model?.sample[name] ?? "";
  for (const name of ["stop_text", "seed", "system"]) find(name).value = values[name] ?? "";
  showNumbers();
}

function showNumbers() {
  for (const name of ["temperature", "top_p", "min_p"]) find(`${name}-out`).textContent = find(name).value;
}

function mode() { return document.querySelector("input[name=mode]:checked").value; }

function setMode(name) {
  find(`mode-${name}`).checked = true;
  find("system-label").hidden = name !== "chat";
  find("prompt").placeholder = withMask(PLACEHOLDERS[name]);
  showHint();
}

function newButton(text, click) {
  const button = document.createElement("button");
  Object.assign(button, { type: "button", textContent: text, onclick: click });
  return button;
}

// Examples, shown while there is no text.
function showHint() {
  if (find("turns").querySelector(".turn")) return;
  const hint = document.createElement("div"), intro = document.createElement("p"), [line, ...examples] = HINTS[mode()].map(withMask);
  hint.id = "hint";
  intro.textContent = line;
  hint.append(intro, ...examples.map((text) => newButton(text, () => { find("prompt").value = text; fitHeight(); find("prompt").focus(); })));
  find("turns").replaceChildren(hint);
}

// Makes the text box as high as its text, in browsers without field-sizing.
function fitHeight() {
  const box = find("prompt");
  if (CSS.supports("field-sizing", "content")) return;
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

function settings() {
  const values = {};
  for (const name of NUMBERS) {
    const value = find(name).value;
    if (value !== "" && Number.isFinite(Number(value))) values[name] = Number(value);
  }
  if (find("seed").value !== "") values.seed = Number(find("seed").value);
  if (find("stop_text").value) values.stop = [find("stop_text").value];
  return values;
}

function newTurn(kind, text) {
  find("hint")?.remove();
  const turn = document.createElement("div");
  turn.className = `turn ${kind}`;
  turn.dir = "auto";
  turn.textContent = text;
  find("turns").append(turn);
  toEnd(true);
  return turn;
}

function toEnd(always) {
  const box = find("turns");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}

// Tokens that form one character are shown together once it is complete; invalid bytes become replacement characters.
class Tokens {
  constructor(turn) { this.turn = turn; this.decoder = new TextDecoder("utf-8", { ignoreBOM: true }); this.held = []; this.text = ""; }

  add(token) {
    this.held.push(token);
    const text = this.decoder.decode(new Uint8Array(token.bytes), { stream: true });
    if (text) this.put(text);
  }

  put(text) {
    const span = document.createElement("span");
    const probability = Math.exp(this.held.reduce((sum, token) => sum + token.logprob, 0));
    span.className = `token ${probability > 0.8 ? "" : probability > 0.5 ? "p1" : probability > 0.2 ? "p2" : probability > 0.05 ? "p3" : "p4"}`;
    span.textContent = text;
    const mostLikely = this.held.length === 1 ? this.held[0].top.map(([other, p]) => [other, Math.exp(p)]) : [];
    const others = mostLikely.filter(([other]) => other !== text);
    span.tip = [[text, probability, true], ...others.map((one) => [...one, false])].sort((one, other) => other[1] - one[1]);
    this.turn.append(span);
    this.text += text;
    this.held = [];
  }

  // Shows exactly the text: tokens of a stop string were received but are not part of it.
  end(text) {
    for (let over = this.text.length - text.length; over > 0 && this.turn.lastChild.className?.startsWith("token");) {
      const span = this.turn.lastChild, length = span.textContent.length;
      if (length > over) span.textContent = span.textContent.slice(0, length - over);
      else span.remove();
      over -= length;
    }
    if (text.length > this.text.length) this.turn.append(text.slice(this.text.length));
  }
}

function percent(probability) { return `${(100 * probability).toFixed(probability < 0.0995 ? 2 : 1)}%`; }

function readTokens(choice) {
  if (choice.logprobs?.content) {
    return choice.logprobs.content.map((one) => ({ bytes: one.bytes, logprob: one.logprob, top: one.top_logprobs.map((other) => [other.token, other.logprob]) }));
  }
  const logprobs = choice.logprobs;
  if (!logprobs?.tokens) return [];
  return logprobs.tokens.map((text, index) => ({ bytes: readBytes(text), logprob: logprobs.token_logprobs[index], top: Object.entries(logprobs.top_logprobs[index] || {}) }));
}

function readBytes(text) {
  const parts = /^bytes:((?:\\x[0-9a-f]{2})+)$/.exec(text);
  return parts ? parts[1].slice(2).split("\\x").map((byte) => parseInt(byte, 16)) : [...new TextEncoder().encode(text)];
}

async function* readEvents(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  while (true) {
    let part;
    try { part = await reader.read(); } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server closed the connection before the text was complete.");
    }
    if (part.done) throw new Error("The server closed the connection before the text was complete.");
    held += part.value;
    const lines = held.split("\n\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function withSystem() {
  const system = find("system").value.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...messages];
}

// If the conversation is longer than the model's context, drops its oldest turns and tries again.
async function post(path, body) {
  const before = [...messages];
  for (let dropped = false; ; dropped = true) {
    try {
      const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: running.signal };
      return { reply: await call(path, request), dropped };
    } catch (error) {
      if (error.code !== "context_length_exceeded" || !body.messages || messages.length < 3) {
        messages = before;
        throw error;
      }
      messages = messages.slice(2);
      body.messages = withSystem();
    }
  }
}

async function ask(text) {
  if (mode() === "fill") return encode("/fill", { prompt: text, top_k: 8 }, (turn, reply) => showFilled(turn, text, reply));
  if (mode() === "compare") return compare(text);
  if (mode() === "chat") {
    newTurn("user", text);
    messages.push({ role: "user", content: text });
  }
  await answer(text);
}

async function answer(text) {
  const chat = mode() === "chat", turn = newTurn("assistant", "");
  const body = { ...settings(), stream: true, stream_options: { include_usage: true } };
  if (model) body.model = model.id;
  if (chat) {
    Object.assign(body, { messages: withSystem(), logprobs: true, top_logprobs: 5 });
  } else {
    Object.assign(body, { prompt: text, logprobs: 5 });
    const given = document.createElement("span");
    given.className = "given";
    given.textContent = text;
    turn.append(given);
  }
  await follow(chat ? "/v1/chat/completions" : "/v1/completions", body, turn, chat);
}

// A request whose reply comes at once, without a stream.
async function encode(path, body, show) {
  const turn = newTurn("assistant", "");
  running = new AbortController();
  setBusy(true, turn);
  showError("");
  try {
    const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: running.signal };
    show(turn, await (await call(path, request)).json());
  } catch (error) {
    turn.remove();
    if (error.name !== "AbortError") showError(error.message, error.field);
  }
  setBusy(false, turn);
  toEnd(true);
}

// The text with the most likely token in each mask; the others are in its tip and below.
function showFilled(turn, text, reply) {
  const [filled] = reply.data;
  text.split(model.mask).forEach((part, index) => {
    turn.append(part);
    const choices = filled.masks[index];
    if (!choices) return;
    const span = document.createElement("span");
    span.className = "token filled";
    span.textContent = choices[0].token;
    span.tip = choices.map((one, place) => [one.token, one.probability, place === 0]);
    turn.append(span);
  });
  for (const choices of filled.masks) addRows(turn, choices.map((one) => [one.probability, percent(one.probability), one.token]));
  addFoot(turn, `${reply.usage.prompt_tokens} tokens`, filled.text);
}

function compare(text) {
  const texts = text.split("\n").filter((line) => line.trim());
  if (texts.length < 2) return showError("Type two or more texts, one in each line (Shift and Enter start a new line).");
  return encode("/v1/embeddings", { input: texts, truncate: true }, (turn, reply) => {
    const vectors = reply.data.map((one) => one.embedding), product = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);
    const size = (a) => Math.sqrt(product(a, a)) || 1;
    const rows = vectors.map((vector, index) => [product(vectors[0], vector) / size(vectors[0]) / size(vector), texts[index]]).slice(1);
    turn.append(texts[0]);
    addRows(turn, rows.sort((one, other) => other[0] - one[0]).map(([similarity, line]) => [similarity, similarity.toFixed(3), line]));
    addFoot(turn, `cosine similarity of embeddings with ${vectors[0].length} dimensions`, text);
  });
}

function addRows(turn, rows) {
  const list = document.createElement("div");
  list.className = "rows";
  list.append(...rows.map(([share, figure, text]) => {
    const row = document.createElement("div"), bar = document.createElement("i"), name = document.createElement("b"), number = document.createElement("span");
    bar.style.width = `${100 * Math.max(0, Math.min(share, 1))}%`;
    name.textContent = text;
    number.textContent = figure;
    row.append(bar, name, number);
    return row;
  }));
  turn.append(list);
}

// In a chat the new answer replaces the last one; a new continuation is added below.
function regenerate(turn, text) {
  if (running) return;
  if (mode() === "chat") { messages.pop(); turn.remove(); }
  answer(text);
}

function addFoot(turn, note, text, given) {
  const foot = document.createElement("div"), status = document.createElement("span");
  foot.className = "foot";
  foot.dir = "ltr";
  status.className = "note";
  status.textContent = note;
  const copy = newButton("Copy", async () => {
    try { await navigator.clipboard.writeText(text); copy.textContent = "Copied"; } catch { getSelection().selectAllChildren(turn); }
  });
  for (const old of document.querySelectorAll(".again")) old.remove();
  foot.append(status, copy);
  if (given !== undefined) {
    const more = newButton("Again", () => regenerate(turn, given));
    more.className = "again";
    foot.append(more);
  }
  turn.append(foot);
}

async function follow(path, body, turn, chat) {
  const tokens = new Tokens(turn);
  let text = "", count = 0, first = 0, reason = "", note = "";
  running = new AbortController();
  setBusy(true, turn);
  showError("");
  try {
    const { reply, dropped } = await post(path, body);
    for await (const event of readEvents(reply)) {
      const choice = event.choices[0];
      if (!choice) { count = event.usage.completion_tokens; continue; }
      text += (chat ? choice.delta.content : choice.text) || "";
      for (const token of readTokens(choice)) { tokens.add(token); count += 1; first ||= performance.now(); }
      reason = choice.ended || choice.finish_reason || reason;
      showSpeed(count, first);
      toEnd(false);
    }
    note = reason === "stop" ? "ended" : reason === "length" ? "reached the maximum" : reason;
    if (dropped) note += "; the conversation is longer than the model's context, its oldest turns were dropped";
  } catch (error) {
    note = error.name === "AbortError" ? "stopped" : "failed";
    if (error.name !== "AbortError") showError(error.message, error.field);
  }
  tokens.end(text);
  if (chat && text) messages.push({ role: "assistant", content: text });
  else if (chat) {
    // A message without an answer goes back to the text box.
    const unanswered = messages.pop().content;
    find("prompt").value ||= unanswered;
    fitHeight();
    turn.previousElementSibling.remove();
  }
  if (text || (note !== "failed" && !chat)) addFoot(turn, `${count} tokens, ${note}`, (body.prompt ?? "") + text, body.prompt ?? "");
  else turn.remove();
  showSpeed(count, first);
  setBusy(false, turn);
  toEnd(false);
}

function showSpeed(count, first) {
  const seconds = (performance.now() - first) / 1000;
  find("speed").textContent = first && count > 1 && seconds > 0 ? `${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
}

function setBusy(busy, turn) {
  turn.classList.toggle("busy", busy);
  find("send").disabled = busy;
  find("stop").disabled = !busy;
  find("clear").disabled = busy;
  for (const input of document.querySelectorAll("input[name=mode]")) input.disabled = busy || (input.value === "chat" && !model?.chat);
  if (!busy) { running = null; showHint(); find("prompt").focus(); }
}

function clearAll() {
  messages = [];
  find("turns").replaceChildren();
  showHint();
  find("speed").textContent = "";
  showError("");
  find("prompt").focus();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
}

function showTip(event) {
  const tip = find("tip");
  const token = event.target.closest?.(".token");
  tip.hidden = !token;
  if (!token) return;
  tip.replaceChildren(...token.tip.map(([text, probability, chosen]) => {
    const row = document.createElement("div"), bar = document.createElement("i"), name = document.createElement("b");
    row.className = chosen ? "chosen" : "";
    bar.style.width = `${Math.min(100 * probability, 100)}%`;
    name.textContent = text.startsWith("bytes:\\x") ? text.slice(6).replaceAll("\\x", " ").trim() : JSON.stringify(text);
    row.append(bar, name, percent(probability));
    return row;
  }));
  const box = token.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${box.bottom + tip.offsetHeight + 4 > innerHeight ? box.top - tip.offsetHeight - 4 : box.bottom + 4}px`;
}

// On a narrow screen the settings cover the text until they are closed.
function showSettings(open) {
  find("settings").classList.toggle("open", open);
  find("show-settings").setAttribute("aria-expanded", String(open));
}

function send() {
  const text = find("prompt").value;
  if (running || (mode() !== "complete" && !text.trim())) return;
  showSettings(false);
  if (mode() === "chat") { find("prompt").value = ""; fitHeight(); }
  ask(text);
}

find("prompt").addEventListener("input", fitHeight);
find("shade").addEventListener("input", () => { document.body.classList.toggle("shaded", find("shade").checked); store({ shade: find("shade").checked }); });
find("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
find("prompt").addEventListener("keydown", (event) => {
  // While an input method composes a character (Korean, Chinese, Japanese), Enter belongs to it.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  running?.abort();
  showSettings(false);
});
find("stop").addEventListener("click", () => running?.abort());
find("clear").addEventListener("click", clearAll);
find("theme").addEventListener("click", () => {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  store({ theme: document.documentElement.dataset.theme });
});
find("show-settings").addEventListener("click", () => showSettings(!find("settings").classList.contains("open")));
find("conversation").addEventListener("pointerdown", () => showSettings(false));
find("reset").addEventListener("click", () => { store({ settings: {} }); fill({}); });
find("settings").addEventListener("input", () => {
  showNumbers();
  store({ settings: Object.fromEntries(STORED.map((name) => [name, find(name).value])) });
});
for (const input of document.querySelectorAll("input[name=mode]")) {
  input.addEventListener("change", () => { setMode(input.value); store({ mode: input.value }); clearAll(); });
}
find("key-dialog").addEventListener("close", () => { const key = find("key").value.trim(); if (key) { tab.key = key; findModel(); } });
document.addEventListener("pointerover", showTip);
find("turns").addEventListener("scroll", () => { find("tip").hidden = true; });
find("shade").checked = Boolean(loadStored().shade);
document.body.classList.toggle("shaded", find("shade").checked);
setTheme(loadStored().theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
findModel();
