// A conversation with the model.

import { request, stream } from "./api.js";

const find = (selector) => document.querySelector(selector);
const [form, prompt, log, send, stop] = ["#form", "#prompt", "#log", "#send", "#stop"].map(find);
const messages = [];
let running = null;

request("v1/models").then(async (response) => {
  const [model] = (await response.json()).data;
  find("#model").textContent = `${model.id} · ${model.max_model_len.toLocaleString()} tokens of context`;
}).catch((error) => { find("#model").textContent = error.message; });

function show(author, text) {
  const article = document.createElement("article");
  const title = document.createElement("h3");
  const content = document.createElement("p");
  const note = document.createElement("small");
  title.textContent = author;
  content.textContent = text;
  article.append(title, content, note);
  log.append(article);
  log.scrollTop = log.scrollHeight;
  return { content, note };
}

async function generate(text) {
  const isChat = form.elements.mode.value === "chat";
  const shared = {
    temperature: Number(find("#temperature").value),
    max_tokens: Number(find("#max-tokens").value),
    stream_options: { include_usage: true },
  };
  show(isChat ? "You" : "Text", text);
  if (isChat) messages.push({ role: "user", content: text });
  const { content, note } = show(isChat ? "Model" : "Continuation", "");
  running = new AbortController();
  send.disabled = true;
  stop.disabled = false;
  const started = performance.now();
  let first = null;
  try {
    const source = isChat
      ? stream("v1/chat/completions", { ...shared, messages }, running.signal)
      : stream("v1/completions", { ...shared, prompt: text }, running.signal);
    for await (const chunk of source) {
      const [choice] = chunk.choices;
      const part = choice?.delta?.content ?? choice?.text ?? "";
      if (part && first === null) first = performance.now() - started;
      content.textContent += part;
      if (chunk.usage) note.textContent = summary(chunk.usage, first, performance.now() - started);
      log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (running.signal.aborted) note.textContent = "Stopped.";
    else { note.textContent = error.message; note.className = "error"; }
  }
  if (isChat) messages.push({ role: "assistant", content: content.textContent });
  running = null;
  send.disabled = false;
  stop.disabled = true;
  prompt.focus();
}

function summary(usage, first, total) {
  const rate = usage.completion_tokens / (total / 1000);
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return `${usage.prompt_tokens} prompt tokens (${cached} cached), ${usage.completion_tokens} generated, ` +
    `first after ${Math.round(first ?? total)} ms, ${rate.toFixed(0)} tokens/s`;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value;
  if (!text || running) return;
  prompt.value = "";
  generate(text);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
stop.addEventListener("click", () => running?.abort());
find("#clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  log.replaceChildren();
  prompt.focus();
});
prompt.focus();
