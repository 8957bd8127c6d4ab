-- finish_records: ends live records, and deletes the oldest ended ones beyond the size limit.
-- USES lib/slot.lua
-- USES lib/fencing.lua
--
-- KEYS
--   1 leadership   hash: epoch, holder
--   2 ended        list: the ended records, oldest first; each packed: begin, end, expires_ms,
--                  sequence_id, record, output. `begin` and `end` are running totals of bytes
--                  before and after it, so that the ends of the list determine its size
--   3 records...   two per request, see records.lua
-- ARGV
--   1 epoch
--   2 holder
--   3 ttl_s        time to live of a record and its output
--   4 max_bytes    of all ended records; the oldest are deleted first
--   5 endings...   three per request: state; status; num_cached_tokens
-- RETURN 1. Errors: STALE_EPOCH, LEADERSHIP_LOST.
--
-- Atomic, because the first ending is kept, and an ended record must have a time to live.

local ENDED = KEYS[2]
local OVERHEAD = 512 -- approximate bytes of a record beside its large fields
local LARGE = { 'prompt_token_ids', 'params', 'opaque', 'cache_salt', 'status' }

local denied = leadership_error(KEYS[1])
if denied then
  return denied
end

local function size_of(record, output)
  local size = OVERHEAD
  for _, field in ipairs(LARGE) do
    size = size + redis.call('HSTRLEN', record, field)
  end
  for _, choice in ipairs(redis.call('HKEYS', output)) do
    size = size + redis.call('HSTRLEN', output, choice)
  end
  return size
end

local function ended_at(place)
  local packed = redis.call('LINDEX', ENDED, place)
  return packed and cmsgpack.unpack(packed)
end

-- Deletes an ended record, unless its id has been reused.
local function delete(ended)
  local stored = redis.call('HMGET', ended.record, 'state', 'sequence_id')
  if stored[1] ~= 'live' and stored[2] == ended.sequence_id then
    redis.call('UNLINK', ended.record, ended.output)
  end
end

local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local ttl_ms, max_bytes = tonumber(ARGV[3]) * 1000, tonumber(ARGV[4])
local num_requests, last = (#KEYS - 2) / 2, ended_at(-1)
local total = last and last['end'] or 0
for i = 1, num_requests do
  local record, output = KEYS[2 * i + 1], KEYS[2 * i + 2]
  local stored = redis.call('HMGET', record, 'state', 'sequence_id')
  if stored[1] == 'live' then
    redis.call('HSET', record, 'state', ARGV[3 * i + 2], 'status', ARGV[3 * i + 3],
      'num_cached_tokens', ARGV[3 * i + 4])
    redis.call('PEXPIRE', record, ttl_ms)
    redis.call('PEXPIRE', output, ttl_ms)
    local size = size_of(record, output)
    redis.call('RPUSH', ENDED, cmsgpack.pack({ begin = total, ['end'] = total + size,
      expires_ms = now_ms + ttl_ms, sequence_id = stored[2], record = record, output = output }))
    total = total + size
  end
end
if redis.call('PTTL', ENDED) < ttl_ms then
  redis.call('PEXPIRE', ENDED, ttl_ms)
end

-- A call deletes more records than it adds, so that a few calls reach any limit.
local oldest, num_left = ended_at(0), 4 * num_requests + 16
while oldest and num_left > 0
  and (oldest.expires_ms <= now_ms or total - oldest.begin > max_bytes) do
  delete(oldest)
  redis.call('LPOP', ENDED)
  oldest, num_left = ended_at(0), num_left - 1
end
return 1
