-- write_tenants: stores what the leader knows of the tenants, for the next leader.
-- USES lib/fencing.lua
--
-- KEYS
--   1 leadership   hash, see acquire_lease.lua
--   2 tenants      hash: state, written_ms; absent if there is nothing to know
-- ARGV
--   1 epoch
--   2 holder
--   3 ttl_s        time after which the state is forgotten
--   4 state        empty to delete the stored one
-- RETURN 1. Errors: STALE_EPOCH, LEADERSHIP_LOST.
--
-- Atomic, because an earlier leader must not overwrite what its successor has written.

local denied = leadership_error(KEYS[1])
if denied then
  return denied
end
if ARGV[4] == '' then
  redis.call('DEL', KEYS[2])
  return 1
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[2], 'state', ARGV[4], 'written_ms',
  tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
