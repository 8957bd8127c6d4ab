-- discard: deletes the records of requests that were never accepted.
--
-- KEYS
--   1 leadership   hash: epoch, holder
--   2 records...   two per request, as in record.lua
-- ARGV
--   1 epoch
--   2 holder
-- RETURN 1. Errors: STALE_EPOCH.
--
-- Atomic, because a former leader must not delete what its successor has taken over.

local leadership = redis.call('HMGET', KEYS[1], 'epoch', 'holder')
if leadership[1] ~= ARGV[1] or leadership[2] ~= ARGV[2] then
  return redis.error_reply('STALE_EPOCH the epoch is ' .. (leadership[1] or 'none'))
end
for i = 1, (#KEYS - 1) / 2 do
  if redis.call('HGET', KEYS[2 * i], 'state') == 'live' then
    redis.call('DEL', KEYS[2 * i], KEYS[2 * i + 1])
  end
end
return 1
