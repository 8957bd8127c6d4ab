-- reset: removes every hash of a pool. Held blocks keep their references, free ones their places.
--
-- KEYS
--   1 state        hash, see commit.lua
--   2 hashes       hash: block -> its hash
--   3 index        hash: block hash -> blocks
-- ARGV
--   1 epoch
--   2 holder
-- RETURN the number of hashes removed. Errors: STALE_EPOCH.
--
-- Atomic, because index and hashes must say the same, and a former leader must not empty the cache
-- of its successor.

local state = redis.call('HMGET', KEYS[1], 'epoch', 'holder')
if state[1] ~= ARGV[1] or state[2] ~= ARGV[2] then
  return redis.error_reply('STALE_EPOCH the pool is held at epoch ' .. (state[1] or 'none'))
end
local num_hashes = redis.call('HLEN', KEYS[2])
redis.call('UNLINK', KEYS[2], KEYS[3])
return num_hashes
