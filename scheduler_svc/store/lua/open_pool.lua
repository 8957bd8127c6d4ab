-- open_pool: takes a pool over for a leader; creates it if absent.
-- USES lib/slot.lua
-- USES lib/blocks.lua
--
-- Removes all sequences, and hashes published for steps that the worker did not finish. A pool
-- behind the steps that the worker or the leader has seen has lost writes: all hashes are removed,
-- since blocks may have been overwritten. A pool of which Redis has evicted a key begins anew. Held
-- blocks are then freed by reclaim_pool, call by call; until then the pool takes no commit.
--
-- KEYS
--   1 state        hash, see commit.lua
--   2 free
--   3 references
--   4 hashes
--   5 index
--   6 published
-- ARGV
--   1 epoch
--   2 holder
--   3 last_finished_step   the worker's
--   4 leader_step           the leader's last commit; 0: none
--   5 num_blocks           the null block included
-- RETURN the step to start above. Errors: STALE_EPOCH, POOL_FAULT.
--
-- Atomic, because a commit of the earlier leader in between would allocate blocks that the new
-- leader counts as free.

local PUBLISHED = KEYS[6]
local epoch, last_finished_step = tonumber(ARGV[1]), tonumber(ARGV[3])
local max_seen_step = math.max(last_finished_step, tonumber(ARGV[4]))

local state = redis.call('HMGET', STATE, 'epoch', 'holder', 'step', 'num_blocks', 'fresh',
  'forgotten', 'num_keys')
local stored_epoch, stored_step = tonumber(state[1] or 0), tonumber(state[3] or 0)
if epoch < stored_epoch or (epoch == stored_epoch and ARGV[2] ~= state[2]) then
  return redis.error_reply('STALE_EPOCH the pool is held at epoch ' .. state[1])
end
if state[4] and state[4] ~= ARGV[5] then
  return redis.error_reply(
    'POOL_FAULT the pool has ' .. state[4] .. ' blocks, the worker ' .. ARGV[5])
end

local is_evicted = state[7] and num_existing(PUBLISHED) ~= tonumber(state[7])
local fresh = not is_evicted and state[5] or 1

if stored_step < max_seen_step or last_finished_step < tonumber(state[6] or 0) then
  -- The pool has lost writes, or `published` lacks publications of unfinished steps.
  redis.call('DEL', HASHES, INDEX)
else
  for _, remembered in ipairs(redis.call('LRANGE', PUBLISHED, 0, -1)) do
    if struct.unpack('<I8', remembered) > last_finished_step then
      local blocks = split(string.sub(remembered, 9), 4)
      read_hashes(blocks)
      for _, block in ipairs(blocks) do
        withdraw(block)
      end
    end
  end
  flush()
end

-- Above all steps seen; a late call of an earlier lane finds no stored reply for this step.
local step = math.max(stored_step, max_seen_step) + 1
if not state[1] or is_evicted then
  -- What is left of a pool of which Redis has evicted a key would list blocks twice, or not at all,
  -- or hashes of blocks that hold something else.
  redis.call('DEL', FREE, REFERENCES, HASHES, INDEX)
  redis.call('HSET', STATE, 'num_blocks', ARGV[5], 'fresh', 1, 'front', 0, 'back', 0)
end
redis.call('DEL', PUBLISHED)
redis.call('HDEL', STATE, 'reply', 'forgotten', 'detached_ms', 'num_keys')
redis.call('HSET', STATE, 'epoch', ARGV[1], 'holder', ARGV[2], 'step', step, 'sequences', '',
  'next_indices', '', 'unreclaimed', fresh)
return step
