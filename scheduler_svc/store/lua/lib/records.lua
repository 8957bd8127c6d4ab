-- records: stored and packed forms of the record of a live request.
-- A library.
--
-- Two keys per request: a hash of FIELDS, `state` and, once it has ended, `status` and
-- `num_cached_tokens`; and a hash of its output, choice -> packed u32 token ids, and, if requested,
-- choice/logprobs and prompt_logprobs -> packed log-probabilities. The packed record is one string of parts, each
-- after its length as little-endian u32: the values of FIELDS, then the output's names and values.

local FIELDS = { 'principal', 'request_id', 'digest', 'prompt_token_ids', 'params', 'sequence_id',
  'deadline_ms', 'opaque', 'num_choices', 'priority', 'cache_salt', 'resume_window_s',
  'trace_context' }

local function parts_of(packed)
  local parts, position = {}, 1
  while position <= #packed do
    parts[#parts + 1], position = struct.unpack('<I4c0', packed, position)
  end
  return parts
end

-- Writes a live record, replacing any other.
local function write_live(record, output, parts)
  local arguments = { 'state', 'live' }
  for i, field in ipairs(FIELDS) do
    arguments[2 * i + 1], arguments[2 * i + 2] = field, parts[i]
  end
  redis.call('DEL', record, output)
  redis.call('HSET', record, unpack(arguments))
  for i = #FIELDS + 1, #parts, 2 do
    redis.call('HSET', output, parts[i], parts[i + 1])
  end
end

-- Packs a live record; nil if there is none. Fields that an earlier version did not have are empty.
local function packed_live(record, output)
  local stored = redis.call('HMGET', record, 'state', unpack(FIELDS))
  if stored[1] ~= 'live' then
    return nil
  end
  local parts = {}
  for i = 2, #stored do
    local value = stored[i] or ''
    parts[i - 1] = struct.pack('<I4c0', #value, value)
  end
  for _, part in ipairs(redis.call('HGETALL', output)) do
    parts[#parts + 1] = struct.pack('<I4c0', #part, part)
  end
  return table.concat(parts)
end
