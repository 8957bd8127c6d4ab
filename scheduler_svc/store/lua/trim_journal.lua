-- trim_journal: deletes journal entries that are compacted into the request records.
-- USES lib/fencing.lua
--
-- KEYS
--   1 state        hash, see commit.lua
--   2 journal      stream
-- ARGV
--   1 epoch
--   2 holder
--   3 first_step   the first one kept
-- RETURN the number of entries deleted. Errors: STALE_EPOCH, LEADERSHIP_LOST, POOL_FAULT.
--
-- Atomic, because an earlier leader must not delete what its successor has not read.

local denied = pool_error(unpack(redis.call('HMGET', KEYS[1], 'epoch', 'holder')))
if denied then
  return denied
end
return redis.call('XTRIM', KEYS[2], 'MINID', ARGV[3] .. '-0')
