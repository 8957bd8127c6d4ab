-- commit: applies one step of a pool.
-- USES lib/slot.lua
-- USES lib/fencing.lua
-- USES lib/blocks.lua
-- USES lib/free.lua
-- USES lib/sequences.lua
--
-- All checks precede the first write. Order: withdraw, publish,
-- journal, remove, share, return, take, add, admit.
--
-- KEYS
--   1 state        hash: epoch, holder, step, reply, num_blocks; sequences, next_indices: see
--                  sequences.lua; and
--                  fresh: the first block never used; no higher one was used either
--                  front: the last score of a block freed without a hash; from 0 downwards
--                  back: the last score of a block freed with a hash; from 0 upwards
--                  forgotten: the newest step removed from `published`; absent if none was
--                  unreclaimed: end of the blocks that reclaim_pool still frees; absent after
--                  num_keys: how many of the keys 2 to 6 exist; with another number Redis has evicted
--                  one, and blocks would be found that hold something else; absent while it is opened
--                  detached_ms: since when it has no lane, see detach_pool.lua; absent with one
--   2 free         sorted set of blocks, see free.lua
--   3 references   bit field: u32 per block
--   4 hashes       hash: block -> its hash
--   5 index        hash: block hash -> blocks, in order of publication
--   6 published    list: packed u64 step, blocks; the last calls that published
--   7 journal      stream: one entry per step with tokens
-- ARGV (arrays are packed; ids are opaque 8 bytes, hashes 32 bytes, blocks and numbers
--   little-endian u32)
--   1 epoch
--   2 holder
--   3 step
--   4 withdrawn_blocks
--   5 published_blocks
--   6 published_hashes
--   7 range_sequences
--   8 range_first_indices        of [first, next), one range per sequence
--   9 range_next_indices
--  10 range_token_ids            concatenated
--  11 range_logprobs             of the tokens: per range its length and itself; empty if none has
--  12 range_prompt_logprobs      the same of prompts, where a range begins an output
--  13 removed_sequences
--  14 shared_blocks
--  15 returned_blocks
--  16 taken_references
--  17 added_sequences
--  18 added_next_indices
--  19 admitted_sequences
--  20 admitted_next_indices
--  21 admitted_num_hits
--  22 admitted_hit_hashes      concatenated
--  23 admitted_num_new_blocks
--  24 admitted_num_fills
--  25 admitted_fill_hashes     concatenated
-- RETURN packed u32: number of free blocks; the blocks taken; per admission the length of its table
--   (0: not admitted) and the table. Errors: STALE_EPOCH, LEADERSHIP_LOST, WRONG_STEP, POOL_FAULT.
--
-- Atomic, because no other call may evict a block between its lookup in the index and its
-- reservation; and a step must be stored with exactly the blocks that its reply allocates.

local PUBLISHED, JOURNAL = unpack(KEYS, 6, 7)
local MAX_REMEMBERED = 16 -- calls that published; more than any number of plans in flight

local function fault(...)
  return redis.error_reply('POOL_FAULT ' .. string.format(...))
end

-- Fencing and the step.

local state = redis.call('HMGET', STATE, 'epoch', 'holder', 'step', 'num_blocks', 'fresh', 'front',
  'back', 'unreclaimed', 'sequences', 'next_indices', 'num_keys')
local denied = pool_error(state[1], state[2])
if denied then
  return denied
end
if state[8] then
  return fault('the pool is being opened')
end
local step, stored_step = tonumber(ARGV[3]), tonumber(state[3])
if step == stored_step then
  local reply = redis.call('HGET', STATE, 'reply')
  if reply then
    return reply
  end
end
if step ~= stored_step + 1 then
  return redis.error_reply('WRONG_STEP step ' .. ARGV[3] .. ' after ' .. state[3])
end
local num_keys = tonumber(state[11])
if num_existing(PUBLISHED) ~= num_keys then
  return fault('keys of the pool were evicted or deleted')
end

-- Withdraw and publish.

local published_blocks, published_hashes = split(ARGV[5], 4), split(ARGV[6], 32)
local hit_hashes, fill_hashes = split(ARGV[22], 32), split(ARGV[25], 32)
read_hashes(split(ARGV[4] .. ARGV[5] .. ARGV[15], 4))
read_references(split(ARGV[5] .. ARGV[14] .. ARGV[15], 4))
read(entry_of, INDEX, published_hashes)
read(entry_of, INDEX, hit_hashes)
read(entry_of, INDEX, fill_hashes)

local newly_published = {}
for _, block in ipairs(split(ARGV[4], 4)) do
  withdraw(block)
end
for i, block in ipairs(published_blocks) do
  if references[block] == 0 then
    return fault('block %d is published without a reference', number_of(block))
  elseif not hash_of[block] then
    publish(block, published_hashes[i])
    newly_published[#newly_published + 1] = block
  elseif hash_of[block] ~= published_hashes[i] then
    return fault('block %d is published with a different hash', number_of(block))
  end
end

-- The journal's index: ranges, then removed sequences, then added ones.

local sequences, admitted_ids = sequences_of(state[9], state[10]), split(ARGV[19], 8)
local contradiction = advance(sequences, ARGV[7], ARGV[8], ARGV[9])
if contradiction then
  return fault(contradiction)
end
remove_sequences(sequences, split(ARGV[13], 8))
contradiction = add_sequences(sequences, split(ARGV[17] .. ARGV[19], 8), split(ARGV[18] .. ARGV[20], 4))
if contradiction then
  return fault(contradiction)
end

-- Share and return.

for _, block in ipairs(split(ARGV[14], 4)) do
  if references[block] == 0 then
    return fault('block %d is shared without a reference', number_of(block))
  end
  set_references(block, references[block] + 1)
end
local freed = {}
for _, block in ipairs(split(ARGV[15], 4)) do
  if references[block] == 0 then
    return fault('block %d is returned without a reference', number_of(block))
  end
  set_references(block, references[block] - 1)
  if references[block] == 0 then
    freed[#freed + 1] = block
  end
end

-- Take. After the last checks come the first writes.

local taken_references, new_counts = u32s(ARGV[16]), u32s(ARGV[23])
local num_wanted = #taken_references
for _, num_references in ipairs(taken_references) do
  if num_references == 0 then
    return fault('a block is to be taken without a reference')
  end
end
for _, count in ipairs(new_counts) do
  num_wanted = num_wanted + count
end
local num_blocks, fresh = tonumber(state[4]), tonumber(state[5])
local num_free = redis.call('ZCARD', FREE) + num_blocks - fresh + #freed
if #taken_references > num_free then
  return fault('%d blocks to take, %d free', #taken_references, num_free)
end
local scores = { front = tonumber(state[6]), back = tonumber(state[7]) }
free_blocks(freed, scores)
if #ARGV[7] > 0 then
  local entry = { 'sequences', ARGV[7], 'first_indices', ARGV[8], 'next_indices', ARGV[9],
    'token_ids', ARGV[10] }
  if #ARGV[11] > 0 then
    entry[#entry + 1], entry[#entry + 2] = 'logprobs', ARGV[11]
  end
  if #ARGV[12] > 0 then
    entry[#entry + 1], entry[#entry + 2] = 'prompt_logprobs', ARGV[12]
  end
  redis.call('XADD', JOURNAL, ARGV[3] .. '-0', unpack(entry))
end

local order = free_order(fresh, num_blocks, math.max(num_wanted, 1))
local reply = { '' } -- the number of free blocks, at the end
for _, num_references in ipairs(taken_references) do
  reply[#reply + 1] = take(order, num_references)
end

-- Admit.

-- The blocks of hits, with their references read; nil if one is no longer cached.
local function resolve(first, last)
  local blocks = {}
  for i = first, last do
    local entry = entry_of[hit_hashes[i]]
    if not entry then
      return nil
    end
    blocks[#blocks + 1] = string.sub(entry, 1, 4)
  end
  read_references(blocks)
  return blocks
end

local function fits(hits, num_new)
  local num_needed = num_new
  for _, block in ipairs(hits) do
    if references[block] == 0 then
      num_needed = num_needed + 1
    end
  end
  return num_needed <= order.num_free
end

local hit_counts, fill_counts = u32s(ARGV[21]), u32s(ARGV[24])
local first_hit, first_fill = 1, 1
for i, id in ipairs(admitted_ids) do
  local hits = resolve(first_hit, first_hit + hit_counts[i] - 1)
  if hits and fits(hits, new_counts[i]) then
    reply[#reply + 1] = struct.pack('<I4', #hits + new_counts[i])
    for _, block in ipairs(hits) do
      add_reference(order, block)
      reply[#reply + 1] = block
    end
    for position = 1, new_counts[i] do
      local block = take(order, 1)
      reply[#reply + 1] = block
      if position <= fill_counts[i] then
        publish(block, fill_hashes[first_fill + position - 1])
        newly_published[#newly_published + 1] = block
      end
    end
  else
    reply[#reply + 1] = '\0\0\0\0'
    remove_sequences(sequences, { id })
  end
  first_hit, first_fill = first_hit + hit_counts[i], first_fill + fill_counts[i]
end

-- Write, and store the reply of the step.

flush()
fresh = remove_taken(order)
if #newly_published > 0 then
  local remembered = struct.pack('<I8', step) .. table.concat(newly_published)
  if redis.call('RPUSH', PUBLISHED, remembered) > MAX_REMEMBERED then
    local forgotten = struct.unpack('<I8', redis.call('LPOP', PUBLISHED))
    redis.call('HSET', STATE, 'forgotten', forgotten)
  end
end
if next(changed_references) or next(changed_hashes) then -- else no key came or went
  num_keys = num_existing(PUBLISHED)
end
reply[1] = struct.pack('<I4', order.num_free)
local packed_reply, packed_ids, packed_nexts = table.concat(reply), pack_sequences(sequences)
redis.call('HSET', STATE, 'step', ARGV[3], 'reply', packed_reply, 'fresh', fresh, 'front',
  scores.front, 'back', scores.back, 'sequences', packed_ids, 'next_indices', packed_nexts,
  'num_keys', num_keys)
return packed_reply
