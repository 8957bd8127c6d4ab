-- renew_lease: extends the lease, and checks that the caller still leads and may write.
-- USES lib/fencing.lua
--
-- KEYS
--   1 leadership   hash, see acquire_lease.lua
-- ARGV
--   1 epoch
--   2 holder
-- RETURN Redis' run id, which changes with every restart. Errors: STALE_EPOCH, LEADERSHIP_LOST.
--
-- Atomic, because a leader that has just been fenced must not write to its successor's entry.

local denied = leadership_error(KEYS[1])
if denied then
  return denied
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'renewed_ms',
  tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
