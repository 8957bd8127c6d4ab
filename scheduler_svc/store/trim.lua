-- trim: drops journal entries that are folded into the request records.
--
-- KEYS
--   1 state        hash, see commit.lua
--   2 journal      stream
-- ARGV
--   1 epoch
--   2 holder
--   3 first_step   the first one kept
-- RETURN the number of entries dropped. Errors: STALE_EPOCH.
--
-- Atomic, because a former leader must not drop what its successor has not read.

local state = redis.call('HMGET', KEYS[1], 'epoch', 'holder')
if state[1] ~= ARGV[1] or state[2] ~= ARGV[2] then
  return redis.error_reply('STALE_EPOCH the pool is held at epoch ' .. (state[1] or 'none'))
end
return redis.call('XTRIM', KEYS[2], 'MINID', ARGV[3] .. '-0')
