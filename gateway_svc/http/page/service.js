// The live picture of the service, at most once a second, while the page is visible.

import { request } from "./api.js";

const INTERVAL_MS = 1000;
const state = document.querySelector("#service-state");
const totals = document.querySelector("#totals");
const workers = document.querySelector("#workers");
const number = (value) => Math.round(value).toLocaleString();
// The file's name of a unix socket; other addresses are short.
const shortened = (address) => address.startsWith("unix:") ? address.split("/").pop() : address;
let previous = null;

function field(name, value) {
  const box = document.createElement("div");
  const [title, content] = [document.createElement("dt"), document.createElement("dd")];
  title.textContent = name;
  content.textContent = value;
  box.append(title, content);
  return box;
}

function rate(now, before, name, seconds) {
  return before && seconds > 0 ? Math.max(0, now[name] - before[name]) / seconds : 0;
}

function led(now) {
  if (now.shards.length === 1) {
    return `${shortened(now.leader)} leads with epoch ${now.epoch}`;
  }
  const leaders = new Set(now.shards.filter(Boolean));
  const missing = now.shards.filter((leader) => !leader).length;
  return `${now.shards.length} shards are led by ${[...leaders].map(shortened).join(", ")}` +
    (missing ? `; ${missing} without a leader` : "");
}

function draw(now) {
  const before = previous?.epoch === now.epoch ? previous : null;
  const seconds = before ? (now.uptime_ms - before.uptime_ms) / 1000 : 0;
  const earlier = new Map(before?.workers.map((worker) => [worker.incarnation, worker]));
  const rates = now.workers.map((worker) =>
    rate(worker, earlier.get(worker.incarnation), "num_sampled_tokens", seconds));
  state.textContent = led(now) + (now.workers.length ? "." : "; no worker has joined.");
  for (const refused of now.refused_workers) {
    state.textContent += ` ${shortened(refused.address)} is refused: ${refused.reason}.`;
  }
  totals.replaceChildren(
    field("Workers", number(now.workers.length)),
    field("Output tokens/s", number(rates.reduce((sum, one) => sum + one, 0))),
    field("Queued requests", number(now.queue.num_requests)),
    field("Accepted", number(now.num_accepted)),
    field("Refused", number(now.num_refused)),
  );
  workers.replaceChildren(...now.workers.map((worker, at) => card(worker, rates[at])));
  previous = now;
}

function card(worker, tokensPerSecond) {
  const article = document.createElement("article");
  const title = document.createElement("h3");
  const facts = document.createElement("p");
  const canvas = document.createElement("canvas");
  const held = worker.num_blocks - worker.num_free_blocks;
  title.textContent = shortened(worker.address) + (worker.draining ? " (draining)" : "");
  title.title = worker.address;
  facts.textContent = `${number(tokensPerSecond)} tokens/s · ${worker.num_running} running, ` +
    `${worker.num_assigned} waiting, ${worker.num_swapped} swapped · ` +
    `${number(held)} of ${number(worker.num_blocks)} blocks held`;
  article.append(title, facts);
  if (worker.blocks.length) {
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", facts.textContent);
    paint(canvas, worker.blocks);
    article.append(canvas);
  }
  return article;
}

// `blocks` has a character per cell: h held, c cached, f free.
function paint(canvas, blocks) {
  const columns = Math.min(96, blocks.length);
  const rows = Math.ceil(blocks.length / columns);
  const style = getComputedStyle(document.documentElement);
  const probe = document.createElement("i");
  document.body.append(probe);
  const colors = Object.fromEntries([["h", "held"], ["c", "cached"], ["f", "free"]].map(([kind, name]) => {
    probe.style.color = style.getPropertyValue(`--${name}`);
    return [kind, getComputedStyle(probe).color];
  }));
  probe.remove();
  [canvas.width, canvas.height] = [columns * 6, rows * 6];
  const context = canvas.getContext("2d");
  [...blocks].forEach((kind, at) => {
    context.fillStyle = colors[kind];
    context.fillRect((at % columns) * 6, Math.floor(at / columns) * 6, 5, 5);
  });
}

async function update() {
  if (!document.hidden) {
    try {
      draw(await (await request("status")).json());
    } catch (error) {
      state.textContent = error instanceof TypeError ? "The gateway cannot be reached." : error.message;
    }
  }
  setTimeout(update, INTERVAL_MS);
}

update();
