-- trim: drops journal entries that are folded into the request records.
-- USES fencing.lua
--
-- KEYS
--   1 state        hash, see commit.lua
--   2 journal      stream
-- ARGV
--   1 epoch
--   2 holder
--   3 first_step   the first one kept
-- RETURN the number of entries dropped. Errors: STALE_EPOCH, LEAD_LOST, POOL_FAULT.
--
-- Atomic, because a former leader must not drop what its successor has not read.

local refused = refusal_of_pool(unpack(redis.call('HMGET', KEYS[1], 'epoch', 'holder')))
if refused then
  return refused
end
return redis.call('XTRIM', KEYS[2], 'MINID', ARGV[3] .. '-0')
