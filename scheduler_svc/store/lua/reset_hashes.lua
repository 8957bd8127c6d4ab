-- reset_hashes: removes all hashes of a pool. References and the free order stay.
-- USES lib/slot.lua
-- USES lib/fencing.lua
--
-- KEYS
--   1 state        hash, see commit.lua
--   2 hashes       hash: block -> its hash
--   3 index        hash: block hash -> blocks
-- ARGV
--   1 epoch
--   2 holder
-- RETURN the number of hashes removed. Errors: STALE_EPOCH, LEADERSHIP_LOST, POOL_FAULT.
--
-- Atomic, because index and hashes must agree, and an earlier leader must not empty its successor's
-- cache.

local denied = pool_error(unpack(redis.call('HMGET', KEYS[1], 'epoch', 'holder')))
if denied then
  return denied
end
local num_hashes = redis.call('HLEN', KEYS[2])
local num_removed = redis.call('UNLINK', KEYS[2], KEYS[3])
redis.call('HINCRBY', KEYS[1], 'num_keys', 0 - num_removed) -- "-0" is no integer
return num_hashes
