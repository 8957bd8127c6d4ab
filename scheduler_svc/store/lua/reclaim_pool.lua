-- reclaim_pool: frees held blocks of a pool that is being opened, one range per call, in descending
-- number.
-- USES lib/slot.lua
-- USES lib/fencing.lua
-- USES lib/blocks.lua
-- USES lib/free.lua
--
-- KEYS
--   1 state        hash, see commit.lua; `unreclaimed` is the end of the blocks still to check
--   2 free
--   3 references
--   4 hashes
--   5 index
--   6 published
-- ARGV
--   1 epoch
--   2 holder
--   3 num_blocks   to check in this call
-- RETURN the number of blocks still to check; 0: the pool is open. Errors: STALE_EPOCH,
--   LEADERSHIP_LOST, POOL_FAULT.
--
-- Atomic, because a block without references that is not in the free order would be lost if
-- the caller died in between.

local PUBLISHED = KEYS[6]
local state = redis.call('HMGET', STATE, 'epoch', 'holder', 'unreclaimed', 'front', 'back')
local denied = pool_error(state[1], state[2])
if denied then
  return denied
end
if not state[3] then
  return 0
end
local scores = { front = tonumber(state[4]), back = tonumber(state[5]) }
local last = tonumber(state[3]) - 1
local first = math.max(1, last - tonumber(ARGV[3]) + 1)

local counts = split(redis.call('GETRANGE', REFERENCES, first * 4, last * 4 + 3), 4)
local held = {}
for i = #counts, 1, -1 do
  if counts[i] ~= '\0\0\0\0' then
    local block = struct.pack('<I4', first + i - 1)
    held[#held + 1] = block
    set_references(block, 0)
  end
end
read_hashes(held)
free_blocks(held, scores)
flush()
redis.call('HSET', STATE, 'unreclaimed', first, 'front', scores.front, 'back', scores.back)
if first == 1 then
  redis.call('HDEL', STATE, 'unreclaimed')
  redis.call('HSET', STATE, 'num_keys', num_existing(PUBLISHED))
end
return first - 1
