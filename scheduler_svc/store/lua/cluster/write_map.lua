-- write_map: replaces the map of the cluster.
-- USES lib/fencing.lua
--
-- KEYS
--   1 leadership   of shard 0; hash, see acquire_lease.lua
--   2 map          string, see cluster_map.py
-- ARGV
--   1 epoch
--   2 holder
--   3 map
-- RETURN the time in ms: a scheduler whose heartbeat is later has read this map. Errors: STALE_EPOCH,
--   LEADERSHIP_LOST.
--
-- Atomic, because only one leader of shard 0 may decide.

local denied = leadership_error(KEYS[1])
if denied then
  return denied
end
redis.call('SET', KEYS[2], ARGV[3])
local time = redis.call('TIME')
return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
