-- finish: ends live records.
--
-- KEYS
--   1 leadership   hash: epoch, holder
--   2 records...   two per request, as in record.lua
-- ARGV
--   1 epoch
--   2 holder
--   3 ttl_s        how long the record and its output stay
--   4 states...    one per request
-- RETURN 1. Errors: STALE_EPOCH.
--
-- Atomic, because the first ending stands, and a record without `live` must have a time to live.

local leadership = redis.call('HMGET', KEYS[1], 'epoch', 'holder')
if leadership[1] ~= ARGV[1] or leadership[2] ~= ARGV[2] then
  return redis.error_reply('STALE_EPOCH the epoch is ' .. (leadership[1] or 'none'))
end
for i = 1, (#KEYS - 1) / 2 do
  local record, output = KEYS[2 * i], KEYS[2 * i + 1]
  if redis.call('HGET', record, 'state') == 'live' then
    redis.call('HSET', record, 'state', ARGV[3 + i])
    redis.call('EXPIRE', record, ARGV[3])
    redis.call('EXPIRE', output, ARGV[3])
  end
end
return 1
