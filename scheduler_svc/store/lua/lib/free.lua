-- free: the free order of a pool's blocks.
-- A library: it follows blocks.lua.
--
-- Front to back: negative scores of `free` (blocks without a hash), the blocks never used yet
-- (from `fresh` up; they have no entry), positive scores of `free` (blocks with a hash when
-- freed). Blocks are taken in this order, which is read ahead; `remove_taken` writes the removals.

-- Frees blocks that have lost their last reference, in this order: those without a hash to the
-- front, those with one to the back. Their hashes have been read. `scores` holds the last scores
-- used, `front` and `back`, and is updated.
local function free_blocks(blocks, scores)
  local arguments = {}
  for _, block in ipairs(blocks) do
    if hash_of[block] then
      scores.back = scores.back + 1
      arguments[#arguments + 1] = scores.back
    else
      scores.front = scores.front - 1
      arguments[#arguments + 1] = scores.front
    end
    arguments[#arguments + 1] = block
  end
  call_chunked('ZADD', FREE, arguments)
end

-- Returns the current order. `num_read_ahead`: blocks that will probably be taken.
local function free_order(fresh, num_blocks, num_read_ahead)
  local num_fresh = num_blocks - fresh
  return {
    num_free = redis.call('ZCARD', FREE) + num_fresh,
    fresh = fresh,
    num_fresh = num_fresh,
    num_front = redis.call('ZCOUNT', FREE, '-inf', '(0'),
    num_read_ahead = num_read_ahead,
    blocks = {}, -- the first blocks, as far as read
    num_passed = 0, -- of these: taken, or hits
    num_taken = 0,
    free_hits = {}, -- hits that were in the order
  }
end

local function read_ahead(order)
  local blocks, num_front, num_fresh = order.blocks, order.num_front, order.num_fresh
  local first = #blocks
  local last = first + order.num_read_ahead - 1
  local function add(more)
    for _, block in ipairs(more) do
      blocks[#blocks + 1] = block
    end
  end
  if first < num_front then
    add(redis.call('ZRANGE', FREE, first, math.min(last, num_front - 1)))
  end
  for i = math.max(first - num_front, 0), math.min(last - num_front, num_fresh - 1) do
    blocks[#blocks + 1] = struct.pack('<I4', order.fresh + i)
  end
  if last >= num_front + num_fresh then
    first = math.max(first - num_fresh, num_front)
    local hashed = redis.call('ZRANGE', FREE, first, last - num_fresh)
    read_hashes(hashed)
    add(hashed)
  end
end

-- Takes the first block and removes its hash; the order is not empty.
local function take(order, num_references)
  local block
  repeat
    if order.num_passed == #order.blocks then
      read_ahead(order)
    end
    order.num_passed = order.num_passed + 1
    block = order.blocks[order.num_passed]
  until (references[block] or 0) == 0 -- else it is a hit
  withdraw(block)
  set_references(block, num_references)
  order.num_free = order.num_free - 1
  order.num_taken = order.num_taken + 1
  return block
end

-- Adds a reference to a hit; a free one leaves the order. Its references have been read.
local function add_reference(order, block)
  if references[block] == 0 then
    order.free_hits[#order.free_hits + 1] = block
    order.num_free = order.num_free - 1
  end
  set_references(block, references[block] + 1)
end

-- Writes the removals; returns the first block never used.
local function remove_taken(order)
  local num_fresh = math.max(0, math.min(order.num_passed - order.num_front, order.num_fresh))
  call_chunked('ZREM', FREE, order.free_hits)
  if order.num_taken > num_fresh then -- without the hits, the taken ones rank first
    redis.call('ZREMRANGEBYRANK', FREE, 0, order.num_taken - num_fresh - 1)
  end
  return order.fresh + num_fresh
end
