-- free: the free order of a pool's blocks.
-- A library: it stands behind blocks.lua.
--
-- Front to back: negative scores of `free` (blocks without a hash), the blocks never used yet
-- (from `fresh` up; they have no entry), positive scores of `free` (blocks with a hash when
-- freed). Blocks are taken in this order, which is read ahead; `remove_taken` writes what left it.

-- Frees blocks that have lost their last reference, in this order: those without a hash to the
-- front, those with one to the back. Their hashes have been read. `scores` has those used last,
-- `front` and `back`, and is moved on.
local function put_back(blocks, scores)
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

-- The order as it stands now. `num_read_ahead`: blocks that will probably be taken.
local function free_order(fresh, num_blocks, num_read_ahead)
  local num_fresh = num_blocks - fresh
  return {
    num_free = redis.call('ZCARD', FREE) + num_fresh,
    fresh = fresh,
    num_fresh = num_fresh,
    num_front = redis.call('ZCOUNT', FREE, '-inf', '(0'),
    num_read_ahead = num_read_ahead,
    blocks = {}, -- the first ones, as far as they have been read
    num_passed = 0, -- of these: taken, or pinned
    num_taken = 0,
    pinned = {},
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

-- Takes the first block, whose hash goes; the order has one.
local function take(order, num_references)
  local block
  repeat
    if order.num_passed == #order.blocks then
      read_ahead(order)
    end
    order.num_passed = order.num_passed + 1
    block = order.blocks[order.num_passed]
  until (references[block] or 0) == 0 -- else it is pinned
  withdraw(block)
  set_references(block, num_references)
  order.num_free = order.num_free - 1
  order.num_taken = order.num_taken + 1
  return block
end

-- Takes a block out of the order for its content. Its references have been read.
local function pin(order, block)
  if references[block] == 0 then
    order.pinned[#order.pinned + 1] = block
    order.num_free = order.num_free - 1
  end
  set_references(block, references[block] + 1)
end

-- Writes what left the order; the first block never used is then the result.
local function remove_taken(order)
  local num_fresh = math.max(0, math.min(order.num_passed - order.num_front, order.num_fresh))
  call_chunked('ZREM', FREE, order.pinned)
  if order.num_taken > num_fresh then -- without the pinned ones they stand in front
    redis.call('ZREMRANGEBYRANK', FREE, 0, order.num_taken - num_fresh - 1)
  end
  return order.fresh + num_fresh
end
