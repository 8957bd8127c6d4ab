-- append_output: appends output tokens to live records.
-- USES lib/fencing.lua
--
-- KEYS
--   1 leadership   hash: epoch, holder
--   2 records...   two per range, see records.lua
-- ARGV
--   1 epoch
--   2 holder
--   3 ranges...      five per range: choice; first index; packed u32 token ids; their packed
--                  log-probabilities, equally many bytes for each, or empty; those of the prompt,
--                  with the first token of choice 0, or empty
-- RETURN 1. Errors: STALE_EPOCH, LEADERSHIP_LOST, RECORD_MISMATCH; then nothing was changed.
--
-- Atomic, because an append is valid only for the length of the output that was read. Tokens that
-- overlap the stored output must equal it, so that a journal can be compacted twice.

local denied = leadership_error(KEYS[1])
if denied then
  return denied
end
local outputs = {} -- key -> field -> its new value

-- Writes `added` after the first `offset` bytes of a field. Returns a fault, else nil.
local function put(output, field, offset, added)
  local stored = output.fields[field] or redis.call('HGET', output.key, field) or ''
  local overlap = string.sub(stored, offset + 1, offset + #added)
  if offset > #stored then
    return 'leaves a gap'
  elseif string.sub(added, 1, #overlap) ~= overlap then
    return 'contradicts the stored output'
  end
  output.fields[field] = stored .. string.sub(added, #overlap + 1)
end

for i = 1, (#KEYS - 1) / 2 do
  local record, key = KEYS[2 * i], KEYS[2 * i + 1]
  local choice, first, tokens, logprobs, prompt_logprobs = unpack(ARGV, 5 * i - 2, 5 * i + 2)
  if redis.call('HGET', record, 'state') ~= 'live' then
    return redis.error_reply('RECORD_MISMATCH output of a request that is not live: ' .. record)
  end
  local output = outputs[key] or { key = key, fields = {} }
  outputs[key] = output
  local wrong = put(output, choice, tonumber(first) * 4, tokens)
  if not wrong and #logprobs > 0 then
    local width = #logprobs / (#tokens / 4)
    wrong = put(output, choice .. '/logprobs', tonumber(first) * width, logprobs)
  end
  if not wrong and #prompt_logprobs > 0 then
    wrong = put(output, 'prompt_logprobs', 0, prompt_logprobs)
  end
  if wrong then
    return redis.error_reply('RECORD_MISMATCH output from index ' .. first .. ' ' .. wrong .. ': '
      .. record)
  end
end
for key, output in pairs(outputs) do
  for field, value in pairs(output.fields) do
    redis.call('HSET', key, field, value)
  end
end
return 1
