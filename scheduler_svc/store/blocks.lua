-- blocks: the free order and the prefix index, as commit, open and reclaim see them.
-- A library: it stands before each of these scripts, and takes KEYS 1 to 5 as they do.
--
-- Free order, front to back: negative scores of `free` (no hash), the blocks never used yet
-- (from `fresh` up; they have no entry), positive scores of `free` (hashed when freed).

local STATE, FREE, REFERENCES, HASHES, INDEX = unpack(KEYS, 1, 5)

-- `unpack` fails above 7,999 values. Divisible by 2, 3 and 4, so that no pair, triple or
-- quadruple of arguments is torn.
local CHUNK = 6000

-- Calls `command key arguments...` as often as it takes; replies are laid end to end.
local function call_chunked(command, key, arguments)
  local replies = {}
  for first = 1, #arguments, CHUNK do
    local last = math.min(first + CHUNK - 1, #arguments)
    local reply = redis.call(command, key, unpack(arguments, first, last))
    if type(reply) == 'table' then
      for _, value in ipairs(reply) do
        replies[#replies + 1] = value
      end
    end
  end
  return replies
end

-- The numbers of a packed array of little-endian u32.
local function u32s(packed)
  local numbers, total = {}, #packed / 4
  for first = 0, total - 1, CHUNK do
    local count = math.min(CHUNK, total - first)
    local part = { struct.unpack('<' .. string.rep('I4', count), packed, first * 4 + 1) }
    for i = 1, count do
      numbers[first + i] = part[i]
    end
  end
  return numbers
end

-- The strings of a packed array of fixed width.
local function slices(packed, width)
  local parts = {}
  for first = 1, #packed, width do
    parts[#parts + 1] = string.sub(packed, first, first + width - 1)
  end
  return parts
end

local function pack_u32s(numbers)
  local parts = {}
  for i, number in ipairs(numbers) do
    parts[i] = struct.pack('<I4', number)
  end
  return table.concat(parts)
end

local function references_of(blocks)
  local arguments = {}
  for _, block in ipairs(blocks) do
    arguments[#arguments + 1] = 'GET'
    arguments[#arguments + 1] = 'u32'
    arguments[#arguments + 1] = '#' .. block
  end
  return call_chunked('BITFIELD', REFERENCES, arguments)
end

-- references[i] becomes the number of sequences that hold blocks[i].
local function set_references(blocks, references)
  local arguments = {}
  for i, block in ipairs(blocks) do
    arguments[#arguments + 1] = 'SET'
    arguments[#arguments + 1] = 'u32'
    arguments[#arguments + 1] = '#' .. block
    arguments[#arguments + 1] = references[i]
  end
  call_chunked('BITFIELD', REFERENCES, arguments)
end

-- Enters blocks into the index, behind blocks of equal hash.
local function publish(blocks, hashes)
  local standing = call_chunked('HMGET', INDEX, hashes)
  local entries, by_block, by_hash = {}, {}, {}
  for i, block in ipairs(blocks) do
    local hash = hashes[i]
    entries[hash] = (entries[hash] or standing[i] or '') .. struct.pack('<I4', block)
    by_block[#by_block + 1] = block
    by_block[#by_block + 1] = hash
  end
  for hash, entry in pairs(entries) do
    by_hash[#by_hash + 1] = hash
    by_hash[#by_hash + 1] = entry
  end
  call_chunked('HSET', HASHES, by_block)
  call_chunked('HSET', INDEX, by_hash)
end

local function without(entry, block)
  local packed = struct.pack('<I4', block)
  for first = 1, #entry, 4 do
    if string.sub(entry, first, first + 3) == packed then
      return string.sub(entry, 1, first - 1) .. string.sub(entry, first + 4)
    end
  end
  return entry
end

-- Removes the hashes of blocks, where they have one; equal hashes of other blocks stay.
local function unpublish(blocks)
  local hashed, hashes = {}, {}
  for i, hash in ipairs(call_chunked('HMGET', HASHES, blocks)) do
    if hash then
      hashed[#hashed + 1] = blocks[i]
      hashes[#hashes + 1] = hash
    end
  end
  local standing = call_chunked('HMGET', INDEX, hashes)
  local entries, emptied, kept = {}, {}, {}
  for i, block in ipairs(hashed) do
    local hash = hashes[i]
    entries[hash] = without(entries[hash] or standing[i] or '', block)
  end
  for hash, entry in pairs(entries) do
    if entry == '' then
      emptied[#emptied + 1] = hash
    else
      kept[#kept + 1] = hash
      kept[#kept + 1] = entry
    end
  end
  call_chunked('HDEL', HASHES, hashed)
  call_chunked('HDEL', INDEX, emptied)
  call_chunked('HSET', INDEX, kept)
end

-- Frees blocks that have lost their last reference, in this order: those without a hash to the
-- front, those with one to the back. `order` has the scores used last, and is moved on.
local function put_back(blocks, order)
  local arguments = {}
  for i, hash in ipairs(call_chunked('HMGET', HASHES, blocks)) do
    if hash then
      order.back = order.back + 1
      arguments[#arguments + 1] = order.back
    else
      order.front = order.front - 1
      arguments[#arguments + 1] = order.front
    end
    arguments[#arguments + 1] = blocks[i]
  end
  call_chunked('ZADD', FREE, arguments)
end
