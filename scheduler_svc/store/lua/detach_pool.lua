-- detach_pool: notes since when a pool has no lane, unless an earlier leader has.
--
-- KEYS
--   1 state        hash, see commit.lua
-- ARGV
--   1 epoch
--   2 holder
-- RETURN the milliseconds for which the pool has had no lane. Errors: STALE_EPOCH.
--
-- Atomic, because a pool that a later leader has just opened must not count as detached.

local state = redis.call('HMGET', KEYS[1], 'epoch', 'holder', 'detached_ms')
local stored_epoch = tonumber(state[1] or 0)
if tonumber(ARGV[1]) < stored_epoch
  or (tonumber(ARGV[1]) == stored_epoch and state[2] ~= ARGV[2]) then
  return redis.error_reply('STALE_EPOCH the pool is held at epoch ' .. state[1])
end
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if not state[3] then
  redis.call('HSET', KEYS[1], 'detached_ms', now_ms)
end
-- Absolute: after the clock was set back, a pool must not last until that time is reached again.
return math.abs(now_ms - tonumber(state[3] or now_ms))
