-- blocks: cached reads and buffered writes of a pool's blocks.
-- A library: it precedes the scripts that use it, and takes KEYS 1 to 5 as they do.
--
-- Values are read in batches into tables and changed there; `flush` writes the changes. A script
-- that stops before has changed nothing. A block is its number as a packed little-endian u32,
-- except in the bit field.

local STATE, FREE, REFERENCES, HASHES, INDEX = unpack(KEYS, 1, 5)

-- `unpack` fails above 7,999 values. Divisible by 2, 3 and 4, so that no pair, triple or
-- quadruple of arguments is split.
local CHUNK = 6000

-- Values read or changed; false: absent in Redis.
local references, hash_of, entry_of = {}, {}, {}
-- Names in these tables whose changes are not written yet.
local changed_references, changed_hashes, changed_entries = {}, {}, {}

-- Calls `command key arguments...` in chunks; the replies are concatenated.
local function call_chunked(command, key, arguments)
  if #arguments == 0 then
    return {}
  elseif #arguments <= CHUNK then
    return redis.call(command, key, unpack(arguments))
  end
  local replies = {}
  for first = 1, #arguments, CHUNK do
    local last = math.min(first + CHUNK - 1, #arguments)
    local reply = redis.call(command, key, unpack(arguments, first, last))
    for _, value in ipairs(type(reply) == 'table' and reply or {}) do
      replies[#replies + 1] = value
    end
  end
  return replies
end

-- The elements of a packed array, each `width` bytes in the struct library's `format`.
local function elements(packed, width, format)
  local values, total = {}, #packed / width
  for first = 0, total - 1, CHUNK do
    local count = math.min(CHUNK, total - first)
    local part = { struct.unpack(string.rep(format, count), packed, first * width + 1) }
    part[count + 1] = nil -- the position after the last one
    if count == total then
      return part
    end
    for i = 1, count do
      values[first + i] = part[i]
    end
  end
  return values
end

local function split(packed, width)
  return elements(packed, width, 'c' .. width)
end

local function u32s(packed)
  return elements(packed, 4, '<I4')
end

-- How many of the pool's keys besides its state exist.
local function num_existing(published)
  return redis.call('EXISTS', FREE, REFERENCES, HASHES, INDEX, published)
end

local function number_of(block)
  return (struct.unpack('<I4', block))
end

-- Reads the fields of a hash that are not in the table yet.
local function read(known, key, names)
  local unknown, n = {}, 0
  for _, name in ipairs(names) do
    if known[name] == nil then
      known[name] = false
      n = n + 1
      unknown[n] = name
    end
  end
  for i, value in ipairs(call_chunked('HMGET', key, unknown)) do
    known[unknown[i]] = value
  end
end

local function read_references(blocks)
  local unknown, arguments, n = {}, {}, 0
  for _, block in ipairs(blocks) do
    if references[block] == nil then
      references[block] = 0
      unknown[n / 3 + 1] = block
      arguments[n + 1], arguments[n + 2], arguments[n + 3] = 'GET', 'u32', '#' .. number_of(block)
      n = n + 3
    end
  end
  for i, count in ipairs(call_chunked('BITFIELD', REFERENCES, arguments)) do
    references[unknown[i]] = count
  end
end

-- Reads the hashes of blocks and their index entries.
local function read_hashes(blocks)
  read(hash_of, HASHES, blocks)
  local hashes = {}
  for _, block in ipairs(blocks) do
    hashes[#hashes + 1] = hash_of[block] or nil
  end
  read(entry_of, INDEX, hashes)
end

local function set_references(block, count)
  references[block] = count
  changed_references[block] = true
end

local function set_hash(block, hash, entry)
  local indexed = hash or hash_of[block]
  hash_of[block], entry_of[indexed] = hash, entry
  changed_hashes[block], changed_entries[indexed] = true, true
end

-- Adds a block to the index, after blocks of equal hash. Its entry has been read.
local function publish(block, hash)
  set_hash(block, hash, (entry_of[hash] or '') .. block)
end

-- Removes the hash of a block, if it has one; equal hashes of other blocks stay.
local function withdraw(block)
  local entry = hash_of[block] and entry_of[hash_of[block]]
  if entry == block then
    set_hash(block, false, false)
  elseif entry then
    local remaining = split(entry, 4)
    for i = #remaining, 1, -1 do
      if remaining[i] == block then
        table.remove(remaining, i)
      end
    end
    set_hash(block, false, table.concat(remaining))
  end
end

-- Writes the changed fields of a hash.
local function write(known, key, changed)
  local set, deleted, n = {}, {}, 0
  for name in pairs(changed) do
    local value = known[name]
    if value then
      set[n + 1], set[n + 2] = name, value
      n = n + 2
    else
      deleted[#deleted + 1] = name
    end
  end
  call_chunked('HDEL', key, deleted)
  call_chunked('HSET', key, set)
end

-- Writes all changes.
local function flush()
  local arguments, n = {}, 0
  for block in pairs(changed_references) do
    arguments[n + 1], arguments[n + 2] = 'SET', 'u32'
    arguments[n + 3], arguments[n + 4] = '#' .. number_of(block), references[block]
    n = n + 4
  end
  call_chunked('BITFIELD', REFERENCES, arguments)
  write(hash_of, HASHES, changed_hashes)
  write(entry_of, INDEX, changed_entries)
end
