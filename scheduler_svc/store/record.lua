-- record: writes the records of requests that are to be accepted.
--
-- KEYS
--   1 leadership   hash: epoch, holder
--   2 records...   two per request: hash of the fields below and `state`; hash of its output,
--                  choice -> packed u32
-- ARGV
--   1 epoch
--   2 holder
--   3 fields...    eight per request: principal, request_id, digest, prompt_token_ids (packed
--                  u32), params, sequence_id, deadline_ms (empty: none), opaque
-- RETURN per request 1, or 0 where the id is live already. Errors: STALE_EPOCH.
--
-- Atomic, because two requests of one id that arrive at once must not both be accepted. A repeat
-- of the call, known by its sequence ids, gets the same answers.

local leadership = redis.call('HMGET', KEYS[1], 'epoch', 'holder')
if leadership[1] ~= ARGV[1] or leadership[2] ~= ARGV[2] then
  return redis.error_reply('STALE_EPOCH the epoch is ' .. (leadership[1] or 'none'))
end
local answers = {}
for i = 1, (#KEYS - 1) / 2 do
  local record, output = KEYS[2 * i], KEYS[2 * i + 1]
  local fields = { unpack(ARGV, 8 * i - 5, 8 * i + 2) }
  local stored = redis.call('HMGET', record, 'state', 'sequence_id')
  answers[i] = 1
  if stored[1] ~= 'live' then
    redis.call('DEL', record, output)
    redis.call('HSET', record, 'state', 'live', 'principal', fields[1], 'request_id', fields[2],
      'digest', fields[3], 'prompt_token_ids', fields[4], 'params', fields[5], 'sequence_id',
      fields[6], 'deadline_ms', fields[7], 'opaque', fields[8])
  elseif stored[2] ~= fields[6] then
    answers[i] = 0
  end
end
return answers
