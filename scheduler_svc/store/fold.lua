-- fold: adds output tokens to live records.
-- USES fencing.lua
--
-- KEYS
--   1 leadership   hash: epoch, holder
--   2 records...   two per run, see records.lua
-- ARGV
--   1 epoch
--   2 holder
--   3 runs...      four per run: choice; first index; packed u32 token ids; their packed
--                  log-probabilities, equally many bytes for each, or empty
-- RETURN 1. Errors: STALE_EPOCH, LEAD_LOST, REQUEST_FAULT; then nothing was changed.
--
-- Atomic, because an append is right only while the output has the length that was looked at.
-- What overlaps the stored output must equal it, so that a journal can be folded twice.

local refused = refusal_by(KEYS[1])
if refused then
  return refused
end
local outputs = {} -- key -> field -> what it will be

-- Puts `added` behind the first `offset` bytes of a field. What is wrong with that, else nil.
local function put(output, field, offset, added)
  local stored = output.fields[field] or redis.call('HGET', output.key, field) or ''
  local overlap = string.sub(stored, offset + 1, offset + #added)
  if offset > #stored then
    return 'behind a gap'
  elseif string.sub(added, 1, #overlap) ~= overlap then
    return 'against what is there'
  end
  output.fields[field] = stored .. string.sub(added, #overlap + 1)
end

for i = 1, (#KEYS - 1) / 2 do
  local record, key = KEYS[2 * i], KEYS[2 * i + 1]
  local choice, first, tokens, logprobs = unpack(ARGV, 4 * i - 1, 4 * i + 2)
  if redis.call('HGET', record, 'state') ~= 'live' then
    return redis.error_reply('REQUEST_FAULT output of a request that is not live: ' .. record)
  end
  local output = outputs[key] or { key = key, fields = {} }
  outputs[key] = output
  local wrong = put(output, choice, tonumber(first) * 4, tokens)
  if not wrong and #logprobs > 0 then
    local width = #logprobs / (#tokens / 4)
    wrong = put(output, choice .. '/logprobs', tonumber(first) * width, logprobs)
  end
  if wrong then
    return redis.error_reply('REQUEST_FAULT output from index ' .. first .. ' ' .. wrong .. ': '
      .. record)
  end
end
for key, output in pairs(outputs) do
  for field, value in pairs(output.fields) do
    redis.call('HSET', key, field, value)
  end
end
return 1
