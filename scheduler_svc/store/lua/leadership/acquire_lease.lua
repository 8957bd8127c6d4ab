-- acquire_lease: makes the caller the leader if the lease is free, and fences earlier leaders.
--
-- KEYS
--   1 leadership   hash: epoch, holder, address, renewed_ms; the last three are absent after
--                  a release. model, see write_model.lua
-- ARGV
--   1 holder       random; a caller without a reply repeats the call with the same one
--   2 address      address of the caller
--   3 lease_ms     time after its last renewal at which a leader has lost the lease
--   4 lost_epoch   epoch whose leader is known to have ended; its lease counts as free. Empty: none
-- RETURN the epoch; 0 if another scheduler leads. It is above all earlier ones, also after lost
--   writes, unless Redis' clock is set back behind the last one.
--
-- Atomic, because two callers that see the same lease expire must not both lead.

local stored = redis.call('HMGET', KEYS[1], 'epoch', 'holder', 'renewed_ms')
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
-- Absolute: after the clock was set back, a lease must not last until that time is reached again.
local idle_ms = math.abs(now_ms - tonumber(stored[3] or 0))
local is_held = stored[2] and stored[1] ~= ARGV[4] and idle_ms < tonumber(ARGV[3])
if is_held and stored[2] ~= ARGV[1] then
  return 0
end
local epoch = math.max(tonumber(stored[1] or 0) + 1, now_ms)
redis.call('HSET', KEYS[1], 'epoch', epoch, 'holder', ARGV[1], 'address', ARGV[2], 'renewed_ms',
  now_ms)
return epoch
