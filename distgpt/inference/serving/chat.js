// The chat: turns go to /v1/chat/completions, and stay in this browser.
const KEPT = "distgpt.chats", MOST = 50;
const SAID = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];
const NEW = () => ({id: Date.now(), turns: [], first: 0});
const isChat = document.body.classList.contains("chats");
const isTouched = matchMedia("(pointer: coarse)").matches;   // a phone: a keyboard would cover the answer
let chats = [];   // {id, turns: [{role, content}], first: the first turn that the model is shown}
let chat = NEW();

function begin() {
  document.title = by("title").textContent = isChat ? "distgpt chat" : "distgpt playground";
  if (!isChat) return by("prompt").focus();
  by("copy").disabled = !navigator.clipboard;  // which browsers offer only on localhost and over HTTPS
  by("max_tokens").value = "", by("max_tokens").required = false, by("max_tokens").placeholder = "as fit";
  try { chats = JSON.parse(localStorage.getItem(KEPT)) || []; } catch { chats = []; }
  open(NEW());
}

function open(other) {
  if (running) return;
  chat = other;
  by("turns").replaceChildren();
  for (const {role, content} of chat.turns) turn(role, content);
  by("pace").textContent = "";
  complain("");
  keep();
  if (!isTouched) by("message").focus();
}

function keep() {
  const others = chats.filter(other => other.id !== chat.id);
  chats = (chat.turns.length ? [chat, ...others] : others).slice(0, MOST);
  try { localStorage.setItem(KEPT, JSON.stringify(chats)); } catch { /* full, or not allowed */ }
  const names = chats.map(each => new Option(each.turns[0].content.slice(0, 60), each.id, false, each === chat));
  by("earlier").replaceChildren(new Option(chats.length ? "Earlier chats" : "No earlier chats", ""), ...names,
    ...chats.length ? [new Option("Forget all of them", "forget")] : []);
  by("earlier").value = chat.turns.length ? chat.id : "";
  by("again").hidden = by("copy").hidden = chat.turns.at(-1)?.role !== "assistant";
  by("copy").textContent = "Copy";
}

function turn(role, content) {
  const node = piece("turn " + role, role === "user" ? content : "");
  if (role !== "user") node.append(...blocks(content));
  by("turns").append(node);
  by("turns").scrollTop = by("turns").scrollHeight;
  return node;
}

const element = (tag, ...inside) => {
  const node = document.createElement(tag);
  node.append(...inside);
  return node;
};

// Markdown of a model as nodes. Its text never becomes HTML, and links stay text.
function blocks(text) {
  const nodes = [], lines = text.trim().split("\n");
  let open = null;  // the paragraph or list item that the next line continues
  while (lines.length) {
    const line = lines.shift(), heading = line.match(/^#{1,6} +(.*)/);
    const item = line.match(/^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)/), before = open;
    open = null;
    if (/^\s*```/.test(line)) {
      const end = lines.findIndex(each => /^\s*```\s*$/.test(each));
      nodes.push(element("pre", element("code", lines.splice(0, end < 0 ? lines.length : end).join("\n"))));
      lines.shift();
    } else if (heading) nodes.push(spans(element("h3"), heading[1]));
    else if (item) {
      const kind = /\d/.test(item[2]) ? "ol" : "ul", list = before?.parentNode;
      open = spans(element("li"), item[3]);
      open.style.marginLeft = Math.min(item[1].length, 12) / 2 + "em";
      if (kind === "ol") open.value = parseInt(item[2]);
      if (list?.localName === kind) list.append(open);
      else nodes.push(element(kind, open));
    } else if (line.trim() && before) open = spans(before, "\n" + line.trim());
    else if (line.trim()) nodes.push(open = spans(element("p"), line));
  }
  return nodes;
}

function spans(node, text) {
  const span = /`([^`]+)`|\*\*(\*?[^\s*](?:.*?\S)??)\*\*(?!\*)|\*([^\s*](?:.*?[^\s*])??)\*|\b_([^\s_](?:.*?[^\s_])??)_\b/;
  for (let found; (found = span.exec(text)); text = text.slice(found.index + found[0].length)) {
    const [, code, bold, ...slanted] = found;
    node.append(text.slice(0, found.index));
    node.append(code ? element("code", code) : spans(element(bold ? "strong" : "em"), bold || slanted.join("")));
  }
  node.append(text);
  return node;
}

// What the model is shown; where that is too much for its context, without the oldest turns.
async function answered() {
  for (;;) {
    const system = by("system").value.trim();
    const messages = [...system ? [{role: "system", content: system}] : [], ...chat.turns.slice(chat.first)];
    const response = await post("v1/chat/completions", SAID, {messages});
    if (response.ok) return response;
    const {error} = await response.json();
    if (error.code !== "context_length_exceeded" || chat.first + 2 >= chat.turns.length) throw new Error(error.message);
    chat.first += 2;
  }
}

async function speak() {
  const text = by("message").value.trim();
  if (running || !text || !by("settings").reportValidity()) return;
  chat.turns.push({role: "user", content: text});
  turn("user", text);
  by("message").value = "";
  grow();
  if (!await answer()) { chat.turns.pop(); by("turns").lastChild.remove(); by("message").value = text; grow(); keep(); }
}

// Stream an answer to the last turn; false if nothing came of it.
async function answer() {
  const node = turn("assistant", ""), begun = performance.now();
  const seconds = () => (performance.now() - begun) / 1000;
  let count = 0, first = 0, why = "", said = "";
  running = new AbortController();
  busyChat(true);
  by("pace").textContent = "";
  complain("");
  try {
    for await (const choice of events(await answered())) {
      const box = by("turns"), isBelow = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      first = first || seconds();
      count += 1, why = choice.finish_reason || why;
      said += choice.delta.content || "";
      node.replaceChildren(...blocks(said));
      if (isBelow) box.scrollTop = box.scrollHeight;
      const rate = (count - 1) / Math.max(0.001, seconds() - first);
      by("pace").textContent = `${first.toFixed(2)} s to the first token, ${rate.toFixed(1)} tokens/s`;
    }
    if (why === "length") by("pace").textContent += "; cut, as it may not be longer";
    say(said);
  } catch (error) {
    if (error.name === "AbortError") {
      say("stopped");
      by("pace").append(by("pace").textContent && "; ", "stopped");
    } else complain(error.message);
  }
  if (chat.first) by("pace").textContent += "; the oldest turns are no longer shown to the model";
  running = null;
  if (said) chat.turns.push({role: "assistant", content: said});
  else node.remove();
  busyChat(false);
  keep();
  return !!said;
}

function busyChat(is) {
  by("send").hidden = is;
  if (is) by("again").hidden = by("copy").hidden = true;
  by("halted").hidden = !is;
  by("fresh").disabled = by("earlier").disabled = is;
  by("turns").setAttribute("aria-busy", is);
  if (!is && !isTouched) by("message").focus();
}

function grow() {
  by("message").style.height = "auto";
  by("message").style.height = by("message").scrollHeight + 2 + "px";
}

by("ask").addEventListener("submit", event => { event.preventDefault(); speak(); });
by("halted").addEventListener("click", stop);
by("message").addEventListener("input", grow);
by("message").addEventListener("keydown", event => {  // on a phone the key begins a line
  if (event.key !== "Enter" || event.shiftKey || event.ctrlKey || event.isComposing || isTouched) return;
  event.preventDefault();
  speak();
});
by("again").addEventListener("click", () => { chat.turns.pop(); by("turns").lastChild.remove(); answer(); });
by("copy").addEventListener("click", () => navigator.clipboard.writeText(chat.turns.at(-1).content.trim())
  .then(() => { by("copy").textContent = "Copied"; }, error => complain(error.message)));
by("fresh").addEventListener("click", () => open(NEW()));
by("earlier").addEventListener("change", event => {
  if (event.target.value === "forget") { chats = []; open(NEW()); }
  else open(chats.find(each => each.id === Number(event.target.value)) || NEW());
});
by("toggle").addEventListener("click", () => {
  by("toggle").setAttribute("aria-expanded", document.body.classList.toggle("open"));
});
begin();
learn();
