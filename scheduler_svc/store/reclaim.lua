-- reclaim: frees held blocks of a pool that is being opened, a range of them a call, in
-- descending number.
-- USES blocks.lua
--
-- KEYS
--   1 state        hash, see commit.lua; `unreclaimed` is the end of the blocks still to look at
--   2 free
--   3 references
--   4 hashes
--   5 index
-- ARGV
--   1 epoch
--   2 holder
--   3 num_blocks   to look at in this call
-- RETURN the number of blocks still to look at; 0: the pool is open. Errors: STALE_EPOCH.
--
-- Atomic, because a block without references that is not in the free order would be lost if
-- the caller died in between.

local state = redis.call('HMGET', STATE, 'epoch', 'holder', 'unreclaimed', 'front', 'back')
if state[1] ~= ARGV[1] or state[2] ~= ARGV[2] then
  return redis.error_reply('STALE_EPOCH the pool is held at epoch ' .. (state[1] or 'none'))
end
if not state[3] then
  return 0
end
local order = { front = tonumber(state[4]), back = tonumber(state[5]) }
local last = tonumber(state[3]) - 1
local first = math.max(1, last - tonumber(ARGV[3]) + 1)

local packed = redis.call('GETRANGE', REFERENCES, first * 4, last * 4 + 3)
local held, zeros = {}, {}
for block = math.min(last, first + #packed / 4 - 1), first, -1 do
  if string.sub(packed, (block - first) * 4 + 1, (block - first) * 4 + 4) ~= '\0\0\0\0' then
    held[#held + 1] = block
    zeros[#zeros + 1] = 0
  end
end
set_references(held, zeros)
put_back(held, order)
redis.call('HSET', STATE, 'unreclaimed', first, 'front', order.front, 'back', order.back)
if first == 1 then
  redis.call('HDEL', STATE, 'unreclaimed')
end
return first - 1
