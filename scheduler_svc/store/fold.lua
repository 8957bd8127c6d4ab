-- fold: adds output tokens to live records.
--
-- KEYS
--   1 leadership   hash: epoch, holder
--   2 records...   two per run, as in record.lua
-- ARGV
--   1 epoch
--   2 holder
--   3 runs...      two per run: first index; packed u32 token ids
-- RETURN 1. Errors: STALE_EPOCH, REQUEST_FAULT; then nothing was changed.
--
-- Atomic, because an append is right only while the output has the length that was looked at.
-- What overlaps the stored output must equal it, so that a journal can be folded twice.

local leadership = redis.call('HMGET', KEYS[1], 'epoch', 'holder')
if leadership[1] ~= ARGV[1] or leadership[2] ~= ARGV[2] then
  return redis.error_reply('STALE_EPOCH the epoch is ' .. (leadership[1] or 'none'))
end
local outputs = {} -- key -> what it will be
for i = 1, (#KEYS - 1) / 2 do
  local record, output = KEYS[2 * i], KEYS[2 * i + 1]
  if redis.call('HGET', record, 'state') ~= 'live' then
    return redis.error_reply('REQUEST_FAULT output of a request that is not live: ' .. record)
  end
  local stored = outputs[output] or redis.call('GET', output) or ''
  local offset, tokens = tonumber(ARGV[2 * i + 1]) * 4, ARGV[2 * i + 2]
  local overlap = string.sub(stored, offset + 1, offset + #tokens)
  if offset > #stored or string.sub(tokens, 1, #overlap) ~= overlap then
    return redis.error_reply('REQUEST_FAULT output from index ' .. ARGV[2 * i + 1] .. ', not '
      .. #stored / 4 .. ': ' .. record)
  end
  outputs[output] = stored .. string.sub(tokens, #overlap + 1)
end
for output, tokens in pairs(outputs) do
  redis.call('SET', output, tokens)
end
return 1
