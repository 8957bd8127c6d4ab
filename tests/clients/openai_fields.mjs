// Runs the cases of openai_fields.json with OpenAI's client for Node, streamed and not.
//
//   node openai_fields.mjs CASES BASE_URL MODEL
//
// Prints a line for each case whose outcome is not the expected one, and the number of calls.

import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [file, baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ apiKey: "none", baseURL, maxRetries: 0 });
const apis = {
  completions: {
    create: (body) => client.completions.create(body),
    text: (made) => made.choices.map((choice) => choice.text),
    add: (texts, chunk) => chunk.choices.forEach((c) => { texts[c.index] = (texts[c.index] ?? "") + c.text; }),
  },
  chat: {
    create: (body) => client.chat.completions.create(body),
    text: (made) => made.choices.map((choice) => choice.message.content),
    add: (texts, chunk) => chunk.choices.forEach((c) => {
      texts[c.index] = (texts[c.index] ?? "") + (c.delta.content ?? "");
    }),
  },
  responses: {
    create: (body) => client.responses.create(body),
    text: (made) => [made.output_text],
    add: (texts, event) => {
      // Empty if the output is a call.
      texts[0] ??= "";
      if (event.type === "response.output_text.delta") texts[0] += event.delta;
    },
  },
};

async function outcome(api, body) {
  try {
    const made = await api.create(body);
    if (!body.stream) return { texts: api.text(made) };
    const texts = [];
    for await (const chunk of made) api.add(texts, chunk);
    return { texts };
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    return { refused: (error.param ?? "").split(/[.[]/)[0], status: error.status };
  }
}

let calls = 0;
for (const [name, { base, cases }] of Object.entries(JSON.parse(readFileSync(file, "utf8")))) {
  for (const { change, refused } of cases) {
    const body = { model, ...base, ...change };
    if ("max_completion_tokens" in change) delete body.max_tokens;
    const streams = "stream" in change || change.background ? [change.stream ?? false] : [false, true];
    const texts = [];
    for (const stream of streams) {
      const found = await outcome(apis[name], { ...body, stream });
      calls += 1;
      texts.push(JSON.stringify(found.texts));
      if (found.refused !== refused || (found.status ?? 0) >= 500) {
        console.log(`${name} ${JSON.stringify(change)} stream ${stream}: ${JSON.stringify(found)}`);
      }
    }
    if (texts.length === 2 && texts[0] !== texts[1]) {
      console.log(`${name} ${JSON.stringify(change)}: ${texts[0]} streamed ${texts[1]}`);
    }
  }
}
console.log(`${calls} calls`);
