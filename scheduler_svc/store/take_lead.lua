-- take_lead: makes the caller the leader where nobody leads, and fences every former one.
--
-- KEYS
--   1 leadership   hash: epoch, holder, address, renewed_ms; the last three are absent where the
--                  lead was released
-- ARGV
--   1 holder       random; a caller that got no answer comes again with the same one
--   2 address      where the caller is reached
--   3 lease_ms     a leader that has not renewed for so long has lost the lead
-- RETURN the epoch; 0 where another leads. It is above every one before it, also after lost
--   writes, as long as Redis' clock does not fall behind the last one.
--
-- Atomic, because two callers that see the same lease run out must not both lead.

local stored = redis.call('HMGET', KEYS[1], 'epoch', 'holder', 'renewed_ms')
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
-- Either way: after a clock that was set back nobody waits until it is that late again.
local idle_ms = math.abs(now_ms - tonumber(stored[3] or 0))
if stored[2] and stored[2] ~= ARGV[1] and idle_ms < tonumber(ARGV[3]) then
  return 0
end
local epoch = math.max(tonumber(stored[1] or 0) + 1, now_ms)
redis.call('HSET', KEYS[1], 'epoch', epoch, 'holder', ARGV[1], 'address', ARGV[2], 'renewed_ms',
  now_ms)
return epoch
