"use strict";
const by = id => document.getElementById(id);
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "logprobs"];
let running = null;   // aborts the request that runs
let tokens = [];      // of the text: {text, logprob, top, node}
let shown = -1;       // the one whose alternatives are shown
let written = "";     // the prompt and what follows it

const headers = () => {
  const key = by("key").value.trim();
  return key ? {Authorization: "Bearer " + key} : {};
};
const plain = text => text.startsWith("bytes:") && text.length > 6 ? text.slice(6)
  : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣");
const percent = logprob => {
  const p = 100 * Math.exp(logprob);
  return (p >= 10 ? p.toFixed(1) : p >= 0.1 ? p.toFixed(2) : p.toPrecision(1)) + " %";
};

async function learn() {
  try {
    const answer = await fetch("v1/models", {headers: headers()});
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error.message);
    const [model] = found.data;
    by("model").textContent = `${model.id}, context of ${model.context_length.toLocaleString("en")} tokens`;
    by("max_tokens").max = model.max_tokens;
    if (by("wrong").dataset.of === "learn") complain("");
  } catch (error) {
    by("model").textContent = "no model yet";
    complain(error.message, "learn");
  }
}

function complain(text, of = "") {
  for (const id of ["wrong", "trouble"]) by(id).textContent = text;
  by("wrong").dataset.of = of;
}

const post = (path, names, more) => {
  const body = {...more, stream: true};
  for (const name of names) if (by(name).value !== "") body[name] = Number(by(name).value);
  if (by("halt").value) body.stop = [by("halt").value];
  return fetch(path, {method: "POST", signal: running.signal, body: JSON.stringify(body),
    headers: {"Content-Type": "application/json", ...headers()}});
};

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("the server ended the stream early");
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Error(found.error.message);
      yield found.choices[0];
    }
  }
}

async function generate(prompt) {
  if (running || !by("settings").reportValidity()) return;
  running = new AbortController();
  busy(true);
  complain("");
  by("text").replaceChildren(piece("prompt", prompt));
  tokens = [], shown = -1, written = prompt;
  show(-1);
  by("speed").textContent = "waiting …";
  const begun = performance.now();
  let why = "";
  try {
    const response = await post("v1/completions", NUMBERS, {prompt, overflow: by("overflow").value});
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const choice of events(response)) {
      add(choice);
      why = choice.finish_reason || why;
      speed(begun);
    }
    say(`${tokens.length} tokens, ${why === "stop" ? "stopped at the stop text" : "complete"}`);
  } catch (error) {
    if (error.name === "AbortError") say(`stopped after ${tokens.length} tokens`);
    else complain(error.message);
  } finally {
    if (!tokens.length) by("speed").textContent = "";
    running = null;
    busy(false);
  }
}

function speed(begun) {
  const seconds = Math.max(0.001, (performance.now() - begun) / 1000), rate = tokens.length / seconds;
  const shown = rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
  by("speed").textContent = `${tokens.length} token${tokens.length === 1 ? "" : "s"} in ${seconds.toFixed(2)} s, ${shown} tokens/s`;
}

function busy(is) {
  const focused = document.activeElement;  // which must not be a button that can no longer be pressed
  by("go").disabled = is;
  by("stop").disabled = !is;
  by("more").disabled = is || !tokens.length;
  by("text").setAttribute("aria-busy", is);
  if (is && focused !== by("prompt")) by("stop").focus();
  if (!is && focused === by("stop")) by("text").focus();
}

function piece(kind, text) {
  const node = document.createElement("span");
  node.className = kind;
  node.textContent = text;
  return node;
}

function add(choice) {
  const found = choice.logprobs;
  let node = null;
  if (choice.text) {
    node = piece("token", choice.text);
    by("text").append(node);
    written += choice.text;
  }
  if (!found) return;
  // Characters of several tokens, and what may be a stop text, come late: all their tokens share the piece.
  found.tokens.forEach((text, i) => tokens.push(
    {text, logprob: found.token_logprobs[i], top: found.top_logprobs[i], node: null}));
  if (!node) return;
  for (let i = tokens.length - 1; i >= 0 && !tokens[i].node; i--) tokens[i].node = node;
  node.dataset.last = tokens.length - 1;
}

function show(index) {
  tokens[shown]?.node?.classList.remove("shown");
  shown = index;
  const token = tokens[index];
  by("table").hidden = !token;
  by("how").hidden = !!token;
  by("place").textContent = token ? `Alternatives to token ${index + 1} of ${tokens.length}` : "Alternatives";
  if (!token) return;
  token.node?.classList.add("shown");
  const rows = Object.entries(token.top).sort((a, b) => b[1] - a[1]);
  by("rows").replaceChildren(...rows.map(([text, logprob]) => {
    const row = document.createElement("tr"), bar = piece("bar", "");
    row.className = text === token.text ? "chosen" : "";
    for (const content of [piece("", plain(text)), piece("", percent(logprob)), bar]) {
      const cell = document.createElement("td");
      cell.append(content);
      row.append(cell);
    }
    bar.style.display = "block";
    bar.style.width = 100 * Math.exp(logprob) + "%";
    return row;
  }));
}

function tell() {
  const token = tokens[shown];
  if (!token) return;
  const others = Object.entries(token.top).sort((a, b) => b[1] - a[1]).slice(0, 3)
    .map(([text, logprob]) => `${plain(text)} ${percent(logprob)}`);
  say(`${plain(token.text)} ${percent(token.logprob)}; likeliest: ${others.join(", ")}`);
}

const say = text => { by("said").textContent = text; };
const stop = () => running?.abort();
const act = () => { if (isChat) speak(); else generate(by("prompt").value); };

by("form").addEventListener("submit", event => { event.preventDefault(); generate(by("prompt").value); });
by("settings").addEventListener("submit", event => { event.preventDefault(); act(); });
by("stop").addEventListener("click", stop);
by("more").addEventListener("click", () => { by("prompt").value = written; generate(written); });
by("key").addEventListener("change", learn);
addEventListener("keydown", event => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); act(); }
});
for (const kind of ["mouseover", "click"]) by("text").addEventListener(kind, event => {
  const last = event.target.dataset?.last;
  if (last !== undefined) show(Number(last));
});
by("text").addEventListener("keydown", event => {
  const to = {ArrowLeft: shown < 0 ? tokens.length - 1 : shown - 1, ArrowRight: shown + 1, Home: 0, End: tokens.length - 1}[event.key];
  if (to === undefined || !tokens.length) return;
  event.preventDefault();
  show(Math.max(0, Math.min(tokens.length - 1, to)));
  tell();
});
