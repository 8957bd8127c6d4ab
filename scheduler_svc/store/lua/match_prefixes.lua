-- match_prefixes: the longest cached prefix of each query.
-- USES lib/blocks.lua
--
-- KEYS
--   1 state        as in commit.lua; not read
--   2 free         not read
--   3 references   bit field: u32 per block
--   4 hashes       not read
--   5 index        hash: block hash -> blocks, in order of publication
-- ARGV (packed; hashes 32 bytes, numbers little-endian u32)
--   1 query_lengths
--   2 query_hashes  concatenated
-- RETURN packed u32: per query the number of hits, and how many of them have no references.
--
-- Atomic only so that one query's numbers are consistent; a commit checks again.

local WINDOW = 256 -- hashes looked up per call: a query ends at its first miss

local matches, offset = {}, 0
for _, length in ipairs(u32s(ARGV[1])) do
  local hits, missed = {}, false
  while #hits < length and not missed do
    local from = (offset + #hits) * 32
    local count = math.min(WINDOW, length - #hits)
    local hashes = split(string.sub(ARGV[2], from + 1, from + count * 32), 32)
    read(entry_of, INDEX, hashes)
    for _, hash in ipairs(hashes) do
      if not entry_of[hash] then
        missed = true
        break
      end
      hits[#hits + 1] = string.sub(entry_of[hash], 1, 4)
    end
  end
  read_references(hits)
  local num_free_hits = 0
  for _, block in ipairs(hits) do
    if references[block] == 0 then
      num_free_hits = num_free_hits + 1
    end
  end
  matches[#matches + 1] = struct.pack('<I4I4', #hits, num_free_hits)
  offset = offset + length
end
return table.concat(matches)
