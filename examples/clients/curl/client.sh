#!/usr/bin/env bash
# Quire over HTTP. Usage: client.sh {stream,chat,cancel,resume,errors} URL...   (needs curl and jq)
set -euo pipefail
step=$1
urls=("${@:2}")
url=${urls[0]}
id=example-$RANDOM$RANDOM

post() { # URL BODY [CURL'S ARGUMENTS]
  curl --silent --no-buffer --header 'Content-Type: application/json' --data "$2" "${@:3}" "$1"
}

# The data of server-sent events, up to [DONE].
data() { sed -un 's/^data: //p' | sed -u '/^\[DONE\]$/d'; }

stream() {
  post "$url/v1/completions" \
    '{"prompt": "Return the number of", "max_tokens": 32, "seed": 1, "stream": true}' \
    | data | jq --raw-output --join-output --unbuffered '.choices[].text'
  echo
}

chat() {
  post "$url/v1/chat/completions" \
    '{"messages": [{"role": "user", "content": "What does this function return?"}],
      "max_completion_tokens": 32, "seed": 1}' | jq --raw-output '.choices[0].message.content'
}

# Cancels by the id, which works from anywhere. A stream whose client disconnects ends, too.
cancel() {
  response=$(post "$url/v1/responses" \
    '{"input": "Return a list of", "max_output_tokens": 400, "background": true}' \
    | jq --raw-output .id)
  post "$url/v1/responses/$response/cancel" '' | jq --raw-output .status
}

# Writes the events to a file until the last one is there; each connection continues after the last
# event that is complete. Events have ids for clients that accept them.
resume() {
  local events next=1
  events=$(mktemp)
  post "$url/v1/completions" \
    '{"prompt": "Open the file", "max_tokens": 200, "seed": 1, "ignore_eos": true,
      "stream": true, "resume_window_s": 30}' --header "X-Request-Id: $id" \
    --header 'Accept: text/event-stream' >"$events" || true
  until grep --quiet '^data: \[DONE\]' "$events"; do
    sleep 0.1
    # Without what follows the last blank line, which ends an event.
    complete=$(grep --line-number '^$' "$events" | tail -n 1 | cut -d : -f 1)
    head -n "${complete:-0}" "$events" >"$events.complete" && mv "$events.complete" "$events"
    last=$(sed -n 's/^id: //p' "$events" | tail -n 1)
    curl --silent --no-buffer ${last:+--header "Last-Event-ID: $last"} \
      "${urls[next++ % ${#urls[@]}]}/v1/requests/$id/events" >>"$events" || true
  done
  data <"$events" | jq --raw-output --join-output '.choices[].text'
  echo
  rm "$events"
}

errors() {
  headers=$(mktemp)
  body=$(post "$url/v1/completions" '{"prompt": "a", "top_p": 2}' --dump-header "$headers")
  sed -n '1s/^[^ ]* \([0-9]*\).*/\1: /p' "$headers" | tr -d '\n'
  jq --raw-output '.error | "\(.message)\nparam: \(.param)\ncode: \(.code)"' <<<"$body"
  sed -n 's/^retry-after: \([0-9]*\).*/retry-after: \1 s/ip' "$headers"
  rm "$headers"
}

"$step"
