// Quire over gRPC. Usage: node client.js {stream,chat,cancel,resume,errors} TARGET...
import { randomUUID } from "node:crypto";
import path from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import googleProtos from "google-proto-files";

// A project of your own has a copy of protos/quire/v1.
const PROTOS = fileURLToPath(new URL("../../../protos", import.meta.url));
const options = {
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
  includeDirs: [PROTOS, path.dirname(googleProtos.getProtoPath("..")), googleProtos.getProtoPath("..")],
};
const { quire } = grpc.loadPackageDefinition(
  loader.loadSync("quire/v1/inference.proto", options),
);
const rpcTypes = loader.loadSync(["google/rpc/status.proto", "google/rpc/error_details.proto"], options);
const deadline = (seconds) => ({ deadline: Date.now() + seconds * 1000 });

async function stream(gateway) {
  const request = { text: "Return the number of", sampling_params: { max_tokens: 32, seed: 1 } };
  for await (const message of gateway.StreamGenerate(request, deadline(60))) {
    for (const delta of message.deltas) process.stdout.write(delta.text);
  }
  process.stdout.write("\n");
}

async function chat(gateway) {
  const response = await unary(gateway, "Generate", {
    conversation: { messages: [{ role: "user", content: "What does this function return?" }] },
    sampling_params: { max_tokens: 32, seed: 1 },
  });
  console.log(response.choices[0].text);
}

// Cancels by the id, which works from anywhere; call.cancel() ends the request, too.
async function cancel(gateway) {
  const request_id = randomUUID();
  const call = gateway.StreamGenerate(
    { request_id, text: "Return a list of", sampling_params: { max_tokens: 400, ignore_eos: true } },
    deadline(60),
  );
  let isCancelled = false;
  try {
    for await (const _ of call) {
      if (!isCancelled) await unary(gateway, "CancelGenerate", { request_id });
      isCancelled = true;
    }
  } catch (error) {
    console.log(grpc.status[error.code]);
  }
}

// Continues after the tokens received so far, at the next gateway, until the end.
async function resume(gateways) {
  const request = {
    request_id: randomUUID(),
    text: "Open the file",
    sampling_params: { max_tokens: 200, seed: 1, ignore_eos: true },
    resume_window_s: 30,
  };
  let nextToken = 0;
  let hasEnd = false;
  let call = gateways[0].StreamGenerate(request, deadline(60));
  for (let failures = 0; ; failures++) {
    try {
      for await (const message of call) {
        for (const delta of message.deltas) {
          if (!hasEnd) process.stdout.write(delta.text);
          if (delta.token_ids.length) nextToken = delta.first_token_index + delta.token_ids.length;
          if (delta.finish_reason !== "FINISH_REASON_UNSPECIFIED") hasEnd = true;
        }
      }
      process.stdout.write("\n");
      return;
    } catch (error) {
      await sleep(Math.min(50 * 2 ** failures, 2000));
      const gateway = gateways[(failures + 1) % gateways.length];
      if (details(error).ErrorInfo?.reason === "UNKNOWN_REQUEST" && nextToken === 0) {
        call = gateway.StreamGenerate(request, deadline(60));
      } else if (isResumable(error)) {
        const again = { request_id: request.request_id, next_token_indices: [nextToken] };
        call = gateway.ResumeGenerate(again, deadline(60));
      } else {
        throw error;
      }
    }
  }
}

function isResumable(error) {
  const info = details(error).ErrorInfo;
  if (error.code === grpc.status.UNAVAILABLE) return true;
  return info ? info.metadata.resumable === "true" : error.code === grpc.status.CANCELLED;
}

async function errors(gateway) {
  try {
    await unary(gateway, "Generate", { text: "a", sampling_params: { top_p: 2 } });
  } catch (error) {
    console.log(`${grpc.status[error.code]}: ${error.details}`);
    const { BadRequest, ErrorInfo, RetryInfo } = details(error);
    if (BadRequest) console.log(`BadRequest: ${BadRequest.field_violations[0].field}`);
    if (ErrorInfo) console.log(`ErrorInfo: ${ErrorInfo.reason}`);
    if (RetryInfo) {
      const { seconds, nanos } = RetryInfo.retry_delay;
      console.log(`RetryInfo: ${seconds * 1000 + nanos / 1e6} ms`);
    }
  }
}

// The details of an error, by the names of their types.
function details(error) {
  const [packed] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (!packed) return {};
  const status = rpcTypes["google.rpc.Status"].deserialize(packed);
  return Object.fromEntries(
    status.details.map(({ type_url, value }) => {
      const name = type_url.split("/").at(-1);
      return [name.split(".").at(-1), rpcTypes[name].deserialize(value)];
    }),
  );
}

function unary(gateway, method, request) {
  return new Promise((resolve, reject) => {
    gateway[method](request, deadline(60), (error, response) => {
      error ? reject(error) : resolve(response);
    });
  });
}

const [step, ...targets] = process.argv.slice(2);
// Responses with log-probabilities may be larger than gRPC's default limit, 4 MiB.
const channelOptions = { "grpc.max_receive_message_length": 32 * 2 ** 20 };
const gateways = targets.map(
  (target) =>
    new quire.v1.InferenceService(target, grpc.credentials.createInsecure(), channelOptions),
);
const steps = { stream, chat, cancel, errors };
await (step === "resume" ? resume(gateways) : steps[step](gateways[0]));
for (const gateway of gateways) gateway.close();
