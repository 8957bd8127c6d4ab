-- reacquire_lease: raises the epoch of a leader whose entry was or may be lost.
--
-- KEYS
--   1 leadership   hash, see acquire_lease.lua
-- ARGV
--   1 epoch        the caller's
--   2 holder       the caller's
--   3 new_holder   random; a caller without a reply repeats the call with the same one
--   4 address      address of the caller
-- RETURN the new epoch: above the caller's, the stored one and, unless Redis' clock is set back,
--   all earlier ones. Errors: STALE_EPOCH.
--
-- Atomic, because an earlier leader must not take the lease from a standby that just acquired it.

local stored = redis.call('HMGET', KEYS[1], 'epoch', 'holder')
local own_epoch, stored_epoch = tonumber(ARGV[1]), tonumber(stored[1] or 0)
local is_own = stored[2] == ARGV[3] or (stored_epoch == own_epoch and stored[2] == ARGV[2])
if stored_epoch >= own_epoch and not is_own then
  return redis.error_reply('STALE_EPOCH the epoch is ' .. stored[1])
end
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local epoch = math.max(stored_epoch + 1, own_epoch + 1, now_ms)
redis.call('HSET', KEYS[1], 'epoch', epoch, 'holder', ARGV[3], 'address', ARGV[4], 'renewed_ms',
  now_ms)
return epoch
