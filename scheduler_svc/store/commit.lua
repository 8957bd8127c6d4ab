-- commit: applies one step of a pool.
-- USES blocks.lua
--
-- Everything that can fault is looked at before the first write. Order of the writes: withdraw,
-- publish, journal, release, append, admit.
--
-- KEYS
--   1 state        hash: epoch, holder, step, reply, num_blocks, fresh, front, back, forgotten,
--                  unreclaimed
--   2 free         sorted set of block numbers, see blocks.lua
--   3 references   bit field: u32 per block
--   4 hashes       hash: block number -> its hash
--   5 index        hash: block hash -> packed u32 block numbers, in order of publication
--   6 sequences    hash: sequence id -> next journal index, packed u32; '' -> see open.lua
--   7 published    list: packed u64 step, u32 block numbers; the last calls that published
--   8 journal      stream: one entry per step with tokens
-- ARGV (arrays are packed; ids are opaque 8 bytes, hashes 32 bytes, numbers little-endian u32)
--   1 epoch
--   2 holder
--   3 step
--   4 withdrawn_blocks
--   5 published_blocks
--   6 published_hashes
--   7 run_sequences
--   8 run_first_indices        of [first, next), one interval per run
--   9 run_next_indices
--  10 run_token_ids            concatenated
--  11 departed_sequences
--  12 departed_num_blocks
--  13 departed_blocks          concatenated
--  14 appended_sequences
--  15 appended_num_blocks
--  16 admitted_sequences
--  17 admitted_next_indices
--  18 admitted_num_hits
--  19 admitted_hit_hashes      concatenated
--  20 admitted_num_new_blocks
--  21 admitted_num_fills
--  22 admitted_fill_hashes     concatenated
-- RETURN packed u32: free blocks; the blocks of each append; per admission the length of its
--   table (0: left out) and the table. Errors: STALE_EPOCH, WRONG_STEP, POOL_FAULT.
--
-- Atomic, because between a look at the index and the reservation no other call may evict the
-- block that was seen; and a step must be stored with exactly the blocks its reply hands out.

local SEQUENCES, PUBLISHED, JOURNAL = unpack(KEYS, 6, 8)
local MAX_REMEMBERED = 16 -- calls that published; more than any number of plans in flight

local function fault(...)
  return redis.error_reply('POOL_FAULT ' .. string.format(...))
end

local function id_text(id)
  return string.format('%.0f', (struct.unpack('<I8', id)))
end

-- Fencing and the step.

local state = redis.call('HMGET', STATE, 'epoch', 'holder', 'step', 'num_blocks', 'fresh', 'front',
  'back', 'unreclaimed')
if not state[1] then
  return fault('the pool is not there')
end
if state[1] ~= ARGV[1] or state[2] ~= ARGV[2] then
  return redis.error_reply('STALE_EPOCH the pool is held at epoch ' .. state[1])
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
local num_blocks, fresh = tonumber(state[4]), tonumber(state[5])
local order = { front = tonumber(state[6]), back = tonumber(state[7]) }

-- Validation: no write before its end.

local withdrawn = u32s(ARGV[4])
local published, published_hashes = u32s(ARGV[5]), slices(ARGV[6], 32)
local is_withdrawn = {}
for _, block in ipairs(withdrawn) do
  is_withdrawn[block] = true
end
local references = references_of(published)
local standing_hashes = call_chunked('HMGET', HASHES, published)
local new_blocks, new_hashes, new_hash_of = {}, {}, {}
for i, block in ipairs(published) do
  local hash = published_hashes[i]
  local standing = new_hash_of[block] or (not is_withdrawn[block] and standing_hashes[i])
  if references[i] == 0 then
    return fault('block %d is published, but nobody holds it', block)
  elseif not standing then
    new_hash_of[block] = hash
    new_blocks[#new_blocks + 1] = block
    new_hashes[#new_hashes + 1] = hash
  elseif standing ~= hash then
    return fault('block %d is published with another hash than it has', block)
  end
end

local run_ids, run_firsts, run_nexts = slices(ARGV[7], 8), slices(ARGV[8], 4), slices(ARGV[9], 4)
local stored_nexts = call_chunked('HMGET', SEQUENCES, run_ids)
local next_of, journaled = {}, {}
for i, id in ipairs(run_ids) do
  local expected = next_of[id] or stored_nexts[i]
  if expected ~= run_firsts[i] then
    if not expected then
      return fault('tokens of sequence %s, which is not there', id_text(id))
    end
    return fault('tokens of sequence %s from index %d, not %d', id_text(id),
      struct.unpack('<I4', run_firsts[i]), (struct.unpack('<I4', expected)))
  end
  next_of[id] = run_nexts[i]
  journaled[2 * i - 1] = id
  journaled[2 * i] = run_nexts[i]
end

local departed_ids, departed_counts = slices(ARGV[11], 8), u32s(ARGV[12])
local departed_blocks = u32s(ARGV[13])
local is_departed = {}
for i, next_index in ipairs(call_chunked('HMGET', SEQUENCES, departed_ids)) do
  local id = departed_ids[i]
  if not next_index or is_departed[id] then
    return fault('departure of sequence %s, which is not there', id_text(id))
  end
  is_departed[id] = true
end
local remaining, freed = {}, {} -- references once the departures are done; blocks in free order
local references_before = references_of(departed_blocks)
local first = 1
for _, count in ipairs(departed_counts) do
  for i = first + count - 1, first, -1 do
    local block = departed_blocks[i]
    local left = (remaining[block] or references_before[i]) - 1
    if left < 0 then
      return fault('block %d is given back, but nobody holds it', block)
    elseif left == 0 then
      freed[#freed + 1] = block
    end
    remaining[block] = left
  end
  first = first + count
end

local appended_ids, appended_counts = slices(ARGV[14], 8), u32s(ARGV[15])
local num_appended = 0
for i, next_index in ipairs(call_chunked('HMGET', SEQUENCES, appended_ids)) do
  local id = appended_ids[i]
  if not next_index or is_departed[id] then
    return fault('blocks for sequence %s, which is not there', id_text(id))
  end
  num_appended = num_appended + appended_counts[i]
end
local num_free = redis.call('ZCARD', FREE) + num_blocks - fresh + #freed
if num_appended > num_free then
  return fault('%d blocks to append, %d free', num_appended, num_free)
end

local admitted_ids, admitted_nexts = slices(ARGV[16], 8), slices(ARGV[17], 4)
local is_admitted = {}
for i, next_index in ipairs(call_chunked('HMGET', SEQUENCES, admitted_ids)) do
  local id = admitted_ids[i]
  if (next_index and not is_departed[id]) or is_admitted[id] then
    return fault('admission of sequence %s, which is there', id_text(id))
  end
  is_admitted[id] = true
end

-- Withdraw, publish, journal.

unpublish(withdrawn)
publish(new_blocks, new_hashes)
call_chunked('HSET', SEQUENCES, journaled)
if #run_ids > 0 then
  redis.call('XADD', JOURNAL, ARGV[3] .. '-0', 'sequences', ARGV[7], 'first_indices', ARGV[8],
    'next_indices', ARGV[9], 'token_ids', ARGV[10])
end

-- Release.

local released, counts = {}, {}
for block, count in pairs(remaining) do
  released[#released + 1] = block
  counts[#counts + 1] = count
end
set_references(released, counts)
put_back(freed, order)
call_chunked('HDEL', SEQUENCES, departed_ids)

-- Append and admit.

local function free_between(low, high, count)
  local blocks = redis.call('ZRANGEBYSCORE', FREE, low, high, 'LIMIT', 0, count)
  for i, block in ipairs(blocks) do
    blocks[i] = tonumber(block)
  end
  call_chunked('ZREM', FREE, blocks)
  return blocks
end

-- Takes blocks from the front of the free order, which has as many.
local function take(count)
  local taken = free_between('-inf', '(0', count)
  while #taken < count and fresh < num_blocks do
    taken[#taken + 1] = fresh
    fresh = fresh + 1
  end
  local evicted = free_between('(0', '+inf', count - #taken)
  unpublish(evicted)
  for _, block in ipairs(evicted) do
    taken[#taken + 1] = block
  end
  local ones = {}
  for i = 1, count do
    ones[i] = 1
  end
  set_references(taken, ones)
  num_free = num_free - count
  return taken
end

local reply = {}
local function answer(blocks)
  for _, block in ipairs(blocks) do
    reply[#reply + 1] = block
  end
end

for _, count in ipairs(appended_counts) do
  answer(take(count))
end

-- The blocks of hits, in order; nil if one of them is gone.
local function resolve(hashes)
  local blocks = {}
  for i, entry in ipairs(call_chunked('HMGET', INDEX, hashes)) do
    if not entry then
      return nil
    end
    blocks[i] = (struct.unpack('<I4', entry))
  end
  return blocks
end

-- Adds a reference to each block, and takes the free ones among them out of the free order.
-- False, and no effect, if that and `num_new` more do not fit.
local function pin(blocks, num_new)
  local pinned, counts = {}, {}
  for i, count in ipairs(references_of(blocks)) do
    counts[i] = count + 1
    if count == 0 then
      pinned[#pinned + 1] = blocks[i]
    end
  end
  if #pinned + num_new > num_free then
    return false
  end
  call_chunked('ZREM', FREE, pinned)
  set_references(blocks, counts)
  num_free = num_free - #pinned
  return true
end

-- Lists that were laid end to end, one after the other.
local function reader(values)
  local offset = 0
  return function(count)
    local part = {}
    for i = 1, count do
      part[i] = values[offset + i]
    end
    offset = offset + count
    return part
  end
end

local next_hits, next_fills = reader(slices(ARGV[19], 32)), reader(slices(ARGV[22], 32))
local hit_counts, new_counts, fill_counts = u32s(ARGV[18]), u32s(ARGV[20]), u32s(ARGV[21])
local joined = {}
for i, id in ipairs(admitted_ids) do
  local hits, fills = resolve(next_hits(hit_counts[i])), next_fills(fill_counts[i])
  if hits and pin(hits, new_counts[i]) then
    local taken = take(new_counts[i])
    local filled = reader(taken)(#fills)
    publish(filled, fills)
    for _, block in ipairs(filled) do
      new_blocks[#new_blocks + 1] = block
    end
    joined[#joined + 1] = id
    joined[#joined + 1] = admitted_nexts[i]
    reply[#reply + 1] = #hits + #taken
    answer(hits)
    answer(taken)
  else
    reply[#reply + 1] = 0
  end
end
call_chunked('HSET', SEQUENCES, joined)

-- Remember the step.

if #new_blocks > 0 then
  local remembered = struct.pack('<I8', step) .. pack_u32s(new_blocks)
  if redis.call('RPUSH', PUBLISHED, remembered) > MAX_REMEMBERED then
    local forgotten = struct.unpack('<I8', redis.call('LPOP', PUBLISHED))
    redis.call('HSET', STATE, 'forgotten', forgotten)
  end
end
local packed_reply = pack_u32s({ num_free }) .. pack_u32s(reply)
redis.call('HSET', STATE, 'step', ARGV[3], 'reply', packed_reply, 'fresh', fresh, 'front',
  order.front, 'back', order.back)
return packed_reply
