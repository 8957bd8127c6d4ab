-- drop_pool: deletes a pool.
--
-- KEYS
--   1 state        hash, see commit.lua
--   2 rest...      every other key of the pool
-- ARGV
--   1 epoch
--   2 holder
-- RETURN the number of keys deleted. Errors: STALE_EPOCH.
--
-- Atomic, because an earlier leader must not delete a pool that its successor has just opened.

local state = redis.call('HMGET', KEYS[1], 'epoch', 'holder')
local stored_epoch = tonumber(state[1] or 0)
if tonumber(ARGV[1]) < stored_epoch
  or (tonumber(ARGV[1]) == stored_epoch and state[2] ~= ARGV[2]) then
  return redis.error_reply('STALE_EPOCH the pool is held at epoch ' .. state[1])
end
return redis.call('UNLINK', unpack(KEYS))
