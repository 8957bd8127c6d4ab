-- raise_epoch: makes the caller the leader and fences every former one.
--
-- KEYS
--   1 leadership   hash: epoch, holder
-- ARGV
--   1 holder       random
-- RETURN the epoch: above every one before it, also after lost writes, as long as Redis' clock
--   does not fall behind the last one.
--
-- Atomic, because two callers that read the same stored epoch would get the same number.

local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or 0)
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local epoch = math.max(stored + 1, now_ms)
redis.call('HSET', KEYS[1], 'epoch', epoch, 'holder', ARGV[1])
return epoch
