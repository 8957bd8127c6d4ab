-- fold: adds output tokens to live records.
-- USES fencing.lua
--
-- KEYS
--   1 leadership   hash: epoch, holder
--   2 records...   two per run, see records.lua
-- ARGV
--   1 epoch
--   2 holder
--   3 runs...      three per run: choice; first index; packed u32 token ids
-- RETURN 1. Errors: STALE_EPOCH, LEAD_LOST, REQUEST_FAULT; then nothing was changed.
--
-- Atomic, because an append is right only while the output has the length that was looked at.
-- What overlaps the stored output must equal it, so that a journal can be folded twice.

local refused = refusal_by(KEYS[1])
if refused then
  return refused
end
local outputs = {} -- key -> choice -> what it will be
for i = 1, (#KEYS - 1) / 2 do
  local record, output = KEYS[2 * i], KEYS[2 * i + 1]
  local choice, first, tokens = unpack(ARGV, 3 * i, 3 * i + 2)
  if redis.call('HGET', record, 'state') ~= 'live' then
    return redis.error_reply('REQUEST_FAULT output of a request that is not live: ' .. record)
  end
  outputs[output] = outputs[output] or {}
  local stored = outputs[output][choice] or redis.call('HGET', output, choice) or ''
  local offset = tonumber(first) * 4
  local overlap = string.sub(stored, offset + 1, offset + #tokens)
  if offset > #stored or string.sub(tokens, 1, #overlap) ~= overlap then
    return redis.error_reply('REQUEST_FAULT output from index ' .. first .. ', not '
      .. #stored / 4 .. ': ' .. record)
  end
  outputs[output][choice] = stored .. string.sub(tokens, #overlap + 1)
end
for output, choices in pairs(outputs) do
  for choice, tokens in pairs(choices) do
    redis.call('HSET', output, choice, tokens)
  end
end
return 1
