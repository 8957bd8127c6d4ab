// Requests to the gateway, and streams that continue after a broken connection.

const key = document.querySelector("#key");
key.value = sessionStorage.getItem("key") ?? "";
key.form.addEventListener("submit", (event) => event.preventDefault());
key.addEventListener("change", () => sessionStorage.setItem("key", key.value));

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `The gateway responded with status ${status}.`);
    this.status = status;
    this.code = error?.code;
  }
}

export async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key.value) headers.authorization = `Bearer ${key.value}`;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new ApiError(response.status, body?.error);
  }
  return response;
}

// Yields the data of each event until [DONE]. A broken connection is resumed after the last event,
// for as long as the gateway keeps the request.
export async function* stream(path, body, signal) {
  const id = crypto.randomUUID?.() ?? `page-${Date.now()}-${Math.random().toString(36).slice(2)}`;
  let lastId = null;
  let failures = 0;
  for (;;) {
    try {
      const response = lastId === null
        ? await request(path, {
            method: "POST", signal, body: JSON.stringify({ ...body, stream: true, resume_window_s: 30 }),
            headers: {
              accept: "text/event-stream", "content-type": "application/json", "x-request-id": id,
            },
          })
        : await request(`v1/requests/${id}/events`, { signal, headers: { "last-event-id": lastId } });
      for await (const event of events(response)) {
        lastId = event.id ?? lastId;
        failures = 0;
        if (event.data === "[DONE]") return;
        const data = JSON.parse(event.data);
        if (data.error) throw new ApiError(200, data.error);
        yield data;
      }
    } catch (error) {
      // Network errors are TypeErrors; a response of the gateway is final.
      if (!(error instanceof TypeError) || signal.aborted) throw error;
    }
    failures += 1;
    if (failures > 10) throw new Error("The connection to the gateway was lost.");
    await new Promise((resolve) => setTimeout(resolve, 300 * failures));
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const event = { data: "" };
      for (const line of buffer.slice(0, end).split("\n")) {
        const at = line.indexOf(": ");
        if (at > 0) event[line.slice(0, at)] = line.slice(at + 2);
      }
      buffer = buffer.slice(end + 2);
      if (event.data) yield event;
    }
  }
}
