-- trim_inbox: removes the oldest entries of a shard's inbox, which its leader has taken.
-- USES lib/fencing.lua
--
-- KEYS
--   1 leadership   hash, see acquire_lease.lua
--   2 inbox        list of requests that other shards have given away, oldest first
-- ARGV
--   1 epoch
--   2 holder
--   3 count        how many
-- RETURN true. Errors: STALE_EPOCH, LEADERSHIP_LOST.
--
-- Atomic, because an earlier leader would remove entries that it has not taken.

local denied = leadership_error(KEYS[1])
if denied then
  return denied
end
redis.call('LTRIM', KEYS[2], ARGV[3], -1)
return true
