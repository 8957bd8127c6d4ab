-- retake_lead: raises the epoch of a leader whose entry was lost or may have been.
--
-- KEYS
--   1 leadership   hash, see take_lead.lua
-- ARGV
--   1 epoch        the caller's
--   2 holder       the caller's
--   3 new_holder   random; a caller that got no answer comes again with the same one
--   4 address      where the caller is reached
-- RETURN the new epoch: above the caller's, the stored one and, as long as Redis' clock does not
--   fall behind, every one before. Errors: STALE_EPOCH.
--
-- Atomic, because a standby that has just taken the lead must not lose it to a former leader.

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
