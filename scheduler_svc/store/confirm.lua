-- confirm: says that the leader is alive, and finds out whether it still leads and may write.
--
-- KEYS
--   1 leadership   hash: epoch, holder, confirmed_ms
-- ARGV
--   1 epoch
--   2 holder
-- RETURN 1. Errors: STALE_EPOCH.
--
-- Atomic, because a leader that has just been fenced must not write into its successor's entry. It
-- writes, because a Redis that only answers reads is of no use.

local leadership = redis.call('HMGET', KEYS[1], 'epoch', 'holder')
if leadership[1] ~= ARGV[1] or leadership[2] ~= ARGV[2] then
  return redis.error_reply('STALE_EPOCH the epoch is ' .. (leadership[1] or 'none'))
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'confirmed_ms',
  tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
return 1
