-- block_map: the kind of each block of a pool, for display.
--
-- KEYS
--   1 state        hash, see commit.lua
--   2 references   bit field: u32 per block
--   3 hashes       hash: block -> its hash
-- ARGV none
-- RETURN a byte per block: 0 the null block, 1 free, 2 free with a hash, 3 held; empty if
--   there is no pool.
--
-- Atomic only so that the bytes are consistent.

local kinds = {}
for block = 1, (tonumber(redis.call('HGET', KEYS[1], 'num_blocks')) or 0) do
  kinds[block] = '\1' -- of block - 1: Lua counts from 1, blocks from 0
end
if #kinds == 0 then
  return ''
end
for _, block in ipairs(redis.call('HKEYS', KEYS[3])) do
  kinds[struct.unpack('<I4', block) + 1] = '\2'
end
local references = redis.call('GET', KEYS[2]) or ''
for block = 0, #references / 4 - 1 do
  if string.sub(references, block * 4 + 1, block * 4 + 4) ~= '\0\0\0\0' then
    kinds[block + 1] = '\3'
  end
end
kinds[1] = '\0'
return table.concat(kinds)
