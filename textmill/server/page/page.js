"use strict";

const find = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens"];
const TEXTS = ["stop_text", "seed", "system"];
const STORED = [...NUMBERS, ...TEXTS];
const HINTS = {
  chat: "Ask the model something.",
  complete: "Type the beginning of a text; the model continues it.",
  fill: "Type a text with MASK where a token is missing; the model fills it in.",
  compare: "Type several texts, one in each line; the page shows how similar each is to the first.",
};
// In the language that the model's vocabulary was made for.
const EXAMPLES = {
  en: { chat: ["Who are you?", "Tell me a story."], complete: ["Once upon a time", "The king and the queen"], fill: ["The mill stands by the MASK.", "To be, or not to MASK."], compare: ["The mill stands by the river.\nA watermill next to a stream.\nI had soup for lunch."] },
  ko: { chat: ["오늘 기분이 어때?", "재미있는 이야기를 해 줘."], complete: ["옛날 옛적에", "대한민국의 수도는"], fill: ["물레방아는 MASK 옆에 있다."], compare: ["물레방아가 강가에 있다.\n개울 옆의 방앗간.\n점심에 국을 먹었다."] },
  tr: { chat: ["Sen kimsin?", "Bana bir hikâye anlat."], complete: ["Bir varmış bir yokmuş", "Türkiye'nin başkenti"], fill: ["Değirmen MASK yanında duruyor."], compare: ["Değirmen nehrin yanında.\nDere kenarında bir su değirmeni.\nÖğlen çorba içtim."] },
  zh: { chat: ["你是谁?", "给我讲个故事。"], complete: ["从前有一座山", "中国的首都是"], fill: ["磨坊在MASK边。"], compare: ["磨坊在河边。\n溪旁的水磨。\n我午饭喝了汤。"] },
  ja: { chat: ["あなたは誰ですか?", "お話をしてください。"], complete: ["むかしむかし", "日本の首都は"], fill: ["水車は川のMASKにある。"], compare: ["水車が川辺にある。\n小川のそばの水車小屋。\n昼にスープを飲んだ。"] },
  ru: { chat: ["Кто ты?", "Расскажи историю."], complete: ["Жили-были", "Столица России"], fill: ["Мельница стоит у MASK."], compare: ["Мельница стоит у реки.\nВодяная мельница у ручья.\nЯ ел суп на обед."] },
  ar: { chat: ["من أنت؟", "احك لي قصة."], complete: ["كان يا ما كان", "عاصمة مصر"], fill: ["الطاحونة بجانب MASK."], compare: ["الطاحونة بجانب النهر.\nطاحونة ماء قرب الجدول.\nأكلت الحساء في الغداء."] },
};
const PLACEHOLDERS = { chat: "Ask something", complete: "The beginning of a text", fill: "A text with MASK", compare: "One text in each line" };

let models = [];
let model = null;
let running = null;
// {id, title, mode, model, time, turns}. A turn is {role: "user", content}, or an answer {role: "assistant", given,
// versions: [{content, note, tokens}], shown}, or a result of a BERT: {role: "filled" or "compared", text, ...}.
let conversation = null;
let deleted = null;

// The key is stored in this tab; settings, the theme and conversations in this browser.
const tab = {
  get key() { try { return sessionStorage.getItem("textmill-key") || ""; } catch { return this.fallback || ""; } },
  set key(value) { try { sessionStorage.setItem("textmill-key", value); } catch { this.fallback = value; } },
};
function load(key) { try { return JSON.parse(localStorage.getItem(key) || "{}"); } catch { return {}; } }
function loadStored() { return load("textmill"); }
function store(more) { try { localStorage.setItem("textmill", JSON.stringify({ ...loadStored(), ...more })); } catch { /* storage is blocked */ } }

// Each conversation has a key of its own, so that two tabs do not overwrite each other's.
const KEY = "textmill-conversation-";
function loadConversations() {
  let keys = [];
  try { keys = Object.keys(localStorage).filter((key) => key.startsWith(KEY)); } catch { /* storage is blocked */ }
  return keys.map(load).filter((one) => Array.isArray(one.turns)).sort((one, other) => other.time - one.time);
}

// Probabilities of tokens would fill the storage, so they are not kept.
function save() {
  if (!conversation.turns.length) { try { localStorage.removeItem(KEY + conversation.id); } catch { /* storage is blocked */ } return showList(); }
  conversation.time = Date.now();
  const text = JSON.stringify(conversation, (name, value) => (name === "tokens" ? undefined : value));
  try {
    localStorage.setItem(KEY + conversation.id, text);
    store({ current: conversation.id });
  } catch {
    showError("The browser cannot keep this conversation; its storage is full or blocked. Export it, or delete others.");
  }
  showList();
}

function newConversation(name, turns = [], title = "") {
  return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title, mode: name, model: model?.id, time: Date.now(), turns };
}

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

async function findModels() {
  try {
    const list = await (await call("/v1/models")).json();
    models = list.data;
    find("models").replaceChildren(...models.map((one) => new Option(one.id, one.id)));
    find("other_model").replaceChildren(new Option("nothing", ""), ...models.filter((one) => one.generate).map((one) => new Option(one.id, one.id)));
    find("other_model").dataset.file = list.preferences ? "yes" : "";
    find("models").hidden = models.length < 2;
    const kept = load(KEY + loadStored().current);
    setModel(models.find((one) => one.id === (kept.model ?? loadStored().model)) ?? models[0]);
    openConversation(kept.turns && modes().includes(kept.mode) ? kept : newConversation(firstMode()));
    showError("");
  } catch (error) {
    find("model").textContent = "no model";
    showError(error.message);
  }
}

function setModel(one) {
  model = one;
  find("models").value = model.id;
  const step = model.step ? `, step ${model.step.toLocaleString("en")}` : "";
  find("model").textContent = `${models.length < 2 ? model.id : ""}${step}, context of ${model.max_model_len.toLocaleString("en")} tokens`.replace(/^, /, "");
  showModes();
  find("mode-chat").disabled = !model.chat;
  find("mode-chat").parentElement.classList.toggle("missing", !model.chat);
  find("mode-chat").parentElement.title = model.chat ? "" : "This model has no chat template; it continues texts.";
  find("max_tokens").max = model.limits.max_tokens;
  fill(changedSettings());
}

// What the model can do: one that predicts the next token chats or continues; others fill in masks or have embeddings only.
function modes() {
  return model.generate ? ["complete", ...(model.chat ? ["chat"] : [])] : ["fill", "compare"].filter((name) => (name === "fill" ? model.mask : model.embedding));
}

function showModes() {
  for (const input of document.querySelectorAll("input[name=mode]")) input.parentElement.hidden = !(modes().includes(input.value) || (model.generate && input.value === "chat"));
  // Only the link to the reference is of use without sampling.
  for (const part of find("settings").children) part.hidden = !model.generate && !part.querySelector("a");
  find("reset").hidden = !model.generate;
}

function firstMode() {
  if (model.generate) return model.chat && loadStored().mode !== "complete" ? "chat" : "complete";
  return modes().includes(loadStored().mode) ? loadStored().mode : modes()[0];
}

function withMask(text) { return text.replaceAll("MASK", model?.mask || "[MASK]"); }

// Only what differs from the model's own settings is stored, for each model.
function changedSettings() { return (loadStored().changed || {})[model?.id] || {}; }

function storeSettings() {
  const changed = {};
  for (const name of NUMBERS) if (find(name).value !== String(model.sample[name] ?? "")) changed[name] = find(name).value;
  for (const name of TEXTS) if (find(name).value) changed[name] = find(name).value;
  store({ changed: { ...loadStored().changed, [model.id]: changed } });
}

function fill(values) {
  for (const name of NUMBERS) find(name).value = values[name] ?? model?.sample[name] ?? "";
  for (const name of TEXTS) find(name).value = values[name] ?? "";
  showNumbers();
}

function showNumbers() {
  for (const name of ["temperature", "top_p", "min_p"]) find(`${name}-out`).textContent = find(name).value;
}

function mode() { return document.querySelector("input[name=mode]:checked").value; }

// Shows a conversation; the one before stays in the list.
function openConversation(one) {
  conversation = one;
  const name = conversation.mode;
  find(`mode-${name}`).checked = true;
  find("system-label").hidden = name !== "chat";
  find("prompt").placeholder = withMask(PLACEHOLDERS[name]);
  find("speed").textContent = "";
  store({ current: conversation.id });
  showTurns();
  showList();
}

function openStored(one) {
  if (running) return;
  const other = models.find((known) => known.id === one.model);
  if (other && other !== model) setModel(other);
  if (!modes().includes(one.mode)) return showError(`This conversation is for another model, ${one.model}.`);
  showError("");
  openConversation(one);
  showPanel("conversations", false);
}

// Continues from a turn in a copy, so that the rest of the conversation is not lost.
function branch(count) {
  openConversation(newConversation(conversation.mode, structuredClone(conversation.turns.slice(0, count)), nameOf(conversation) && `${nameOf(conversation)} (branch)`));
}

function nameOf(one) {
  const [first] = one.turns, text = one.title || first?.content || first?.given || first?.text || (first?.versions ? shownOf(first).content : "");
  return text.trim().replace(/\s+/g, " ").slice(0, 60);
}

function shownOf(turn) { return turn.versions[turn.shown]; }

function showList() {
  const wanted = find("search").value.trim().toLowerCase(), list = loadConversations();
  const text = (one) => JSON.stringify([one.title, one.turns]).toLowerCase();
  find("list").replaceChildren(...list.filter((one) => text(one).includes(wanted)).map((one) => {
    const item = document.createElement("li"), button = newButton(nameOf(one) || "no text", () => openStored(one));
    button.dir = "auto";
    if (one.id === conversation.id) button.setAttribute("aria-current", "true");
    item.append(button);
    return item;
  }));
  const kept = list.some((one) => one.id === conversation.id);
  find("title").value = kept ? nameOf(conversation) : "";
  for (const name of ["title", "export", "delete"]) find(name).disabled = !kept;
}

function removeConversation() {
  deleted = conversation;
  localStorage.removeItem(KEY + deleted.id);
  openConversation(newConversation(mode()));
  find("undo").hidden = false;
  find("undo").focus();
}

function undoRemoval() {
  find("undo").hidden = true;
  if (!deleted) return;
  conversation = deleted;
  deleted = null;
  save();
  openConversation(conversation);
  find("prompt").focus();
}

// One line of JSON in the format of conversations to train on.
function exportConversation() {
  const line = conversation.mode === "chat" ? { messages: chatMessages() } : { texts: conversation.turns.map((turn) => (turn.versions ? turn.given + shownOf(turn).content : turn.text)) };
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${JSON.stringify(line)}\n`], { type: "application/jsonl" }));
  link.download = `${nameOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation"}.jsonl`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function newButton(text, click) {
  const button = document.createElement("button");
  Object.assign(button, { type: "button", textContent: text, onclick: click });
  return button;
}

// Draws all turns of the conversation; examples if it has none.
function showTurns() {
  find("turns").replaceChildren();
  conversation.turns.forEach((turn, index) => showTurn(turn, index));
  if (conversation.turns.length) return toEnd(true);
  const hint = document.createElement("div"), intro = document.createElement("p");
  const examples = (EXAMPLES[model?.language] ?? EXAMPLES.en)[mode()].map(withMask);
  hint.id = "hint";
  intro.textContent = withMask(HINTS[mode()]);
  hint.append(intro, ...examples.map((text) => newButton(text, () => { find("prompt").value = text; fitHeight(); find("prompt").focus(); })));
  find("turns").append(hint);
}

function showTurn(turn, index) {
  if (turn.role === "user") {
    const box = newTurn("user", turn.content);
    addFoot(box, "", turn.content, [["Edit", () => edit(box, index)]]);
  } else if (turn.role === "assistant") showAnswer(newTurn("assistant", ""), turn, index);
  else if (turn.role === "filled") showFilled(newTurn("assistant", ""), turn);
  else showCompared(newTurn("assistant", ""), turn);
}

function showAnswer(box, turn, index) {
  const version = shownOf(turn), last = index === conversation.turns.length - 1, chat = conversation.mode === "chat";
  box.replaceChildren();
  addGiven(box, turn.given);
  if (turn.pair !== undefined) return showPair(box, turn, index);
  const marked = addContent(box, version);
  const actions = [["Again", () => again(turn, index)]];
  if (!chat) actions.push(["Continue", () => ask(turn.given + version.content)]);
  else if (!last) actions.push(["Continue from here", () => { branch(index + 1); find("prompt").focus(); }]);
  if (marked && version.tokens) actions.push([version.asTokens ? "Text" : "Tokens", () => { version.asTokens = !version.asTokens; showAnswer(box, turn, index); }]);
  if (turn.versions.length > 1) {
    const move = (by) => { turn.shown = (turn.shown + by + turn.versions.length) % turn.versions.length; save(); showAnswer(box, turn, index); };
    actions.push([`Version ${turn.shown + 1} of ${turn.versions.length}`, () => move(1)]);
  }
  addFoot(box, version.note, turn.given + version.content, actions);
}

// The text of an answer: as tokens, or as Markdown if it has any and is of a chat. Returns whether it has.
function addContent(box, version) {
  const marked = conversation.mode === "chat" && MARKDOWN.test(version.content);
  if (version.tokens && !(marked && !version.asTokens)) {
    const tokens = new Tokens(box);
    for (const token of version.tokens) tokens.add(token);
    tokens.end(version.content);
  } else box.append(marked ? renderMarkdown(version.content) : version.content);
  return marked;
}

function addGiven(box, text) {
  if (!text) return;
  const given = document.createElement("span");
  given.className = "given";
  given.textContent = text;
  box.append(given);
}

function edit(box, index) {
  if (running) return;
  const form = document.createElement("form"), area = document.createElement("textarea"), row = document.createElement("div"), send = document.createElement("button");
  area.value = conversation.turns[index].content;
  area.dir = "auto";
  area.rows = 3;
  area.setAttribute("aria-label", "Edited message");
  send.textContent = "Send";
  send.className = "main";
  row.className = "row";
  row.append(newButton("Cancel", showTurns), send);
  form.append(area, row);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!area.value.trim()) return;
    branch(index);
    ask(area.value);
  });
  box.replaceChildren(form);
  area.focus();
}

// What Markdown is for, in answers of a chat: code, headings, lists, emphasis and links. It makes nodes, never HTML.
const MARKDOWN = /```|`[^`]+`|^#{1,4} |^\s*([-*]|\d+\.) |\*\*\S|\[[^\]]+\]\(https?:/m;

function renderMarkdown(text) {
  const root = document.createElement("div");
  root.className = "markdown";
  const add = (name, content) => {
    const node = document.createElement(name);
    if (content !== undefined) addInline(node, content);
    (name === "li" ? root.lastChild : root).append(node);
    return node;
  };
  text.split(/^```(.*)$/m).forEach((part, index) => {
    // Parts: text, the language of a code block, its code, the rest of the line that ends it, text ...
    if (index % 4 === 1 || index % 4 === 3) return;
    if (index % 4 === 2) {
      const code = document.createElement("code"), block = add("pre");
      code.textContent = part.replace(/^\n|\n$/g, "");
      block.tabIndex = 0;
      block.append(code);
      return;
    }
    for (const paragraph of part.split(/\n\s*\n/)) {
      let lines = [];
      const flush = () => { if (lines.join("").trim()) add("p", lines.join("\n")); lines = []; };
      for (const line of paragraph.split("\n")) {
        const heading = /^#{1,6} (.*)/.exec(line), item = /^\s*(?:[-*]|(\d+)\.) (.*)/.exec(line);
        if (!heading && !item) { lines.push(line); continue; }
        flush();
        if (heading) { add("p", heading[1]).className = "heading"; continue; }
        const list = item[1] ? "ol" : "ul";
        if (root.lastChild?.localName !== list) add(list).start = item[1] || 1;
        add("li", item[2]);
      }
      flush();
    }
  });
  return root;
}

function addInline(node, text) {
  const pattern = /`([^`]+)`|\*\*(.+?)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:[^\s)]+)\)/g;
  let end = 0;
  for (const found of text.matchAll(pattern)) {
    const [whole, code, bold, italic, name, address] = found;
    const inner = document.createElement(code ? "code" : bold ? "strong" : italic ? "em" : "a");
    inner.textContent = code ?? bold ?? italic ?? name;
    if (address) Object.assign(inner, { href: address, rel: "noreferrer", target: "_blank" });
    node.append(text.slice(end, found.index), inner);
    end = found.index + whole.length;
  }
  node.append(text.slice(end));
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
  constructor(turn) { this.turn = turn; this.all = []; this.decoder = new TextDecoder("utf-8", { ignoreBOM: true }); this.held = []; this.text = ""; }

  add(token) {
    this.all.push(token);
    this.held.push(token);
    const text = this.decoder.decode(new Uint8Array(token.bytes), { stream: true });
    if (text) this.put(text);
  }

  put(text) {
    const span = document.createElement("span");
    const probability = Math.exp(this.held.reduce((sum, token) => sum + token.logprob, 0));
    span.className = `token ${probability > 0.8 ? "" : probability > 0.5 ? "p1" : probability > 0.2 ? "p2" : probability > 0.05 ? "p3" : "p4"}`;
    span.textContent = text;
    span.tabIndex = this.turn.querySelector(".token") ? -1 : 0;
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

function chatMessages(count = conversation.turns.length) {
  const system = find("system").value.trim();
  const turns = conversation.turns.slice(0, count).map((turn) => ({ role: turn.role, content: turn.content ?? shownOf(turn).content }));
  return [...(system ? [{ role: "system", content: system }] : []), ...turns];
}

async function ask(text) {
  if (running) return;
  forgetDeleted();
  if (mode() === "fill") return encode("/fill", { prompt: text, top_k: 8 }, (reply) => ({ role: "filled", text, reply }));
  if (mode() === "compare") return compare(text);
  if (mode() === "chat") {
    conversation.turns.push({ role: "user", content: text });
    save();
    showTurns();
  }
  await answer(mode() === "chat" ? "" : text);
}

function forgetDeleted() { deleted = null; find("undo").hidden = true; }

// Another version of the last answer of a chat, a branch for an earlier one; in the other mode a text below.
function again(turn, index) {
  if (running) return;
  if (conversation.mode !== "chat") return answer(turn.given);
  const last = index === conversation.turns.length - 1;
  if (!last) branch(index);
  return answer("", last ? turn : null);
}

// Streams an answer: a new turn, or another version of one.
async function answer(given, again = null) {
  const chat = mode() === "chat", count = conversation.turns.length - (again ? 1 : 0);
  const turn = again ?? { role: "assistant", given, versions: [], shown: 0 };
  find("hint")?.remove();
  const box = again ? find("turns").lastChild : newTurn("assistant", "");
  box.replaceChildren();
  addGiven(box, given);
  const body = { stream: true, stream_options: { include_usage: true } };
  if (chat) Object.assign(body, { messages: chatMessages(count), logprobs: true, top_logprobs: 5 });
  else Object.assign(body, { prompt: given, logprobs: 5 });
  const sides = [{ model: model.id, ...settings() }, ...otherSide()];
  const boxes = sides.length > 1 ? addColumns(box, sides) : [box];
  running = new AbortController();
  setBusy(true, box);
  showError("");
  const found = await Promise.all(sides.map(async (side, index) => ({
    ...(await follow(chat ? "/v1/chat/completions" : "/v1/completions", { ...side, ...body }, boxes[index], chat)), by: side,
  })));
  setBusy(false, box);
  const versions = found.filter((version) => version.content || (version.note && !chat));
  if (versions.length) {
    turn.pair = versions.length > 1 ? turn.versions.length : undefined;
    turn.versions.push(...versions);
    turn.shown = turn.pair ?? turn.versions.length - 1;
    if (!again) conversation.turns.push(turn);
  } else if (chat && !again) {
    // A message without an answer goes back to the text box.
    find("prompt").value ||= conversation.turns.pop().content;
    fitHeight();
  }
  save();
  const end = find("turns").scrollHeight - find("turns").scrollTop - find("turns").clientHeight, top = find("turns").scrollTop;
  showTurns();
  if (end >= 120) find("turns").scrollTop = top;
}

// The model and settings to compare with, if one is chosen.
function otherSide() {
  const name = find("other_model").value, side = { ...settings(), model: name };
  for (const key of ["temperature", "top_p"]) if (find(`other_${key}`).value !== "") side[key] = Number(find(`other_${key}`).value);
  return name && models.find((one) => one.id === name)?.chat === model.chat ? [side] : [];
}

function describeSide(side) { return `${side.model}, temperature ${side.temperature}, top p ${side.top_p}`; }

function addColumns(box, sides) {
  const columns = document.createElement("div");
  columns.className = "columns";
  columns.append(...sides.map((side) => {
    const column = document.createElement("div"), title = document.createElement("p");
    title.className = "note";
    title.textContent = describeSide(side);
    column.append(title);
    return column;
  }));
  box.append(columns);
  return [...columns.children];
}

// Two answers next to each other: the preferred one stays, and the choice is written to the server's file.
function showPair(box, turn, index) {
  const pair = turn.versions.slice(turn.pair, turn.pair + 2), boxes = addColumns(box, pair.map((version) => version.by));
  boxes.forEach((column, side) => {
    addContent(column, pair[side]);
    addFoot(column, pair[side].note, pair[side].content, [["Prefer this", () => prefer(turn, index, side)]]);
  });
}

async function prefer(turn, index, side) {
  const [chosen, rejected] = [turn.versions[turn.pair + side], turn.versions[turn.pair + 1 - side]];
  const prompt = conversation.mode === "chat" ? { messages: chatMessages(index) } : { prompt: turn.given };
  turn.shown = turn.pair + side;
  delete turn.pair;
  save();
  showTurns();
  if (!find("other_model").dataset.file) return;
  const body = { ...prompt, chosen: chosen.content, rejected: rejected.content, chosen_by: chosen.by, rejected_by: rejected.by };
  try {
    await call("/preferences", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  } catch (error) { showError(error.message); }
}

// A request whose reply comes at once, without a stream.
async function encode(path, body, read) {
  const box = newTurn("assistant", "");
  running = new AbortController();
  setBusy(true, box);
  showError("");
  try {
    const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...body, model: model.id }), signal: running.signal };
    conversation.turns.push(read(await (await call(path, request)).json()));
    save();
  } catch (error) {
    if (error.name !== "AbortError") showError(error.message, error.field);
  }
  setBusy(false, box);
  showTurns();
}

// The text with the most likely token in each mask; the others are in its tip and below.
function showFilled(box, { text, reply }) {
  const [filled] = reply.data;
  text.split(model.mask).forEach((part, index) => {
    box.append(part);
    const choices = filled.masks[index];
    if (!choices) return;
    const span = document.createElement("span");
    span.className = "token filled";
    span.tabIndex = index ? -1 : 0;
    span.textContent = choices[0].token;
    span.tip = choices.map((one, place) => [one.token, one.probability, place === 0]);
    box.append(span);
  });
  for (const choices of filled.masks) addRows(box, choices.map((one) => [one.probability, percent(one.probability), one.token]));
  addFoot(box, `${reply.usage.prompt_tokens} tokens`, filled.text);
}

function compare(text) {
  const texts = text.split("\n").filter((line) => line.trim());
  if (texts.length < 2) return showError("Type two or more texts, one in each line (Shift and Enter start a new line).");
  return encode("/v1/embeddings", { input: texts, truncate: true }, (reply) => {
    const vectors = reply.data.map((one) => one.embedding), product = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);
    const size = (a) => Math.sqrt(product(a, a)) || 1;
    const rows = vectors.map((vector, index) => [product(vectors[0], vector) / size(vectors[0]) / size(vector), texts[index]]).slice(1);
    return { role: "compared", text, rows: rows.sort((one, other) => other[0] - one[0]), dimensions: vectors[0].length };
  });
}

function showCompared(box, { text, rows, dimensions }) {
  box.append(text.split("\n").find((line) => line.trim()));
  addRows(box, rows.map(([similarity, line]) => [similarity, similarity.toFixed(3), line]));
  addFoot(box, `cosine similarity of embeddings with ${dimensions} dimensions`, text);
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

// What is below a turn: a note, a button to copy its text, and other actions [name, function].
function addFoot(turn, note, text, actions = []) {
  const foot = document.createElement("div"), status = document.createElement("span");
  foot.className = "foot";
  foot.dir = "ltr";
  status.className = "note";
  status.textContent = note;
  const copy = newButton("Copy", async () => {
    try { await navigator.clipboard.writeText(text); copy.textContent = "Copied"; } catch { getSelection().selectAllChildren(turn); }
  });
  foot.append(...(note ? [status] : []), copy);
  for (const [name, act] of actions) {
    const button = newButton(name, () => { if (!running) act(); });
    button.className = name.split(" ")[0].toLowerCase();
    foot.append(button);
  }
  turn.append(foot);
}

// Shows a stream as it comes; returns its text, why it ended, and its tokens.
async function follow(path, body, turn, chat) {
  const tokens = new Tokens(turn);
  let text = "", count = 0, first = null, last = 0, reason = "", note = "";
  try {
    const reply = await call(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: running.signal });
    for await (const event of readEvents(reply)) {
      const choice = event.choices[0];
      if (!choice) { count = event.usage.completion_tokens; continue; }
      text += (chat ? choice.delta.content : choice.text) || "";
      const received = readTokens(choice);
      for (const token of received) tokens.add(token);
      count += received.length;
      if (received.length) { last = performance.now(); first ??= { time: last, count }; }
      reason = choice.ended || choice.finish_reason || reason;
      showSpeed(count, first, last);
      toEnd(false);
    }
    note = reason === "stop" ? "ended" : reason === "length" ? "reached the maximum" : reason;
    if (reply.headers.get("x-dropped-messages")) note += "; the conversation is longer than the model's context, its oldest turns were dropped";
  } catch (error) {
    note = error.name === "AbortError" ? "stopped" : "failed";
    if (error.name !== "AbortError") showError(error.message, error.field);
  }
  showSpeed(count, first, last);
  return { content: text, note: note === "failed" && !text ? "" : `${count} tokens, ${note}`, tokens: tokens.all };
}

// The tokens after the first chunk, and the time from it to the last one; a shorter time says nothing about the speed.
function showSpeed(count, first, last) {
  const seconds = first ? (last - first.time) / 1000 : 0;
  find("speed").textContent = seconds >= 0.1 ? `${((count - first.count) / seconds).toFixed(1)} tokens/s` : "";
}

function setBusy(busy, turn) {
  turn.classList.toggle("busy", busy);
  find("send").disabled = busy;
  find("stop").disabled = !busy;
  for (const name of ["new", "models", "delete"]) find(name).disabled = busy;
  for (const input of document.querySelectorAll("input[name=mode]")) input.disabled = busy || (input.value === "chat" && !model?.chat);
  if (!busy) { running = null; find("prompt").focus(); }
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

// Arrow keys move between the tokens of a turn.
function moveToken(event) {
  const token = event.target.closest?.(".token"), by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!token || !by) return;
  const tokens = [...token.parentElement.querySelectorAll(".token")], next = tokens[tokens.indexOf(token) + by];
  if (!next) return;
  event.preventDefault();
  token.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// On a narrow screen the settings and the list of conversations cover the text until they are closed.
function showPanel(name, open) {
  find(name).classList.toggle("open", open);
  find(`show-${name}`).setAttribute("aria-expanded", String(open));
}

function closePanels() { showPanel("settings", false); showPanel("conversations", false); }

function send() {
  const text = find("prompt").value;
  if (running || (mode() !== "complete" && !text.trim())) return;
  closePanels();
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
  find("tip").hidden = true;
  closePanels();
});
find("stop").addEventListener("click", () => running?.abort());
function startNew() { forgetDeleted(); showError(""); openConversation(newConversation(mode())); closePanels(); find("prompt").focus(); }
find("new").addEventListener("click", startNew);
find("search").addEventListener("input", showList);
find("title").addEventListener("change", () => { conversation.title = find("title").value.trim(); save(); });
find("export").addEventListener("click", exportConversation);
find("delete").addEventListener("click", removeConversation);
find("undo").addEventListener("click", undoRemoval);
find("models").addEventListener("change", () => {
  setModel(models.find((one) => one.id === find("models").value));
  store({ model: model.id });
  const turns = modes().includes(conversation.mode) ? conversation.turns : null;
  if (turns) { conversation.model = model.id; save(); showTurns(); } else openConversation(newConversation(firstMode()));
});
find("theme").addEventListener("click", () => {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  store({ theme: document.documentElement.dataset.theme });
});
for (const name of ["settings", "conversations"]) {
  find(`show-${name}`).addEventListener("click", () => {
    const open = !find(name).classList.contains("open");
    closePanels();
    showPanel(name, open);
  });
}
find("conversation").addEventListener("pointerdown", closePanels);
find("reset").addEventListener("click", () => { fill({}); storeSettings(); });
find("settings").addEventListener("input", (event) => {
  showNumbers();
  if (STORED.includes(event.target.id)) storeSettings();
});
for (const input of document.querySelectorAll("input[name=mode]")) {
  input.addEventListener("change", () => { store({ mode: input.value }); openConversation(newConversation(input.value)); });
}
find("key-dialog").addEventListener("close", () => { const key = find("key").value.trim(); if (key) { tab.key = key; findModels(); } });
document.addEventListener("pointerover", showTip);
document.addEventListener("focusin", showTip);
document.addEventListener("keydown", moveToken);
find("turns").addEventListener("scroll", () => { find("tip").hidden = true; });
find("shade").checked = Boolean(loadStored().shade);
document.body.classList.toggle("shaded", find("shade").checked);
setTheme(loadStored().theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
findModels();
