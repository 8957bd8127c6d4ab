-- reset: removes every hash of a pool. Held blocks keep their references, free ones their places.
-- USES fencing.lua
--
-- KEYS
--   1 state        hash, see commit.lua
--   2 hashes       hash: block -> its hash
--   3 index        hash: block hash -> blocks
-- ARGV
--   1 epoch
--   2 holder
-- RETURN the number of hashes removed. Errors: STALE_EPOCH, LEAD_LOST, POOL_FAULT.
--
-- Atomic, because index and hashes must say the same, and a former leader must not empty the cache
-- of its successor.

local refused = refusal_of_pool(unpack(redis.call('HMGET', KEYS[1], 'epoch', 'holder')))
if refused then
  return refused
end
local num_hashes = redis.call('HLEN', KEYS[2])
redis.call('UNLINK', KEYS[2], KEYS[3])
return num_hashes
