-- match: the longest cached prefix of each query.
-- USES blocks.lua
--
-- KEYS
--   1 state        as in commit.lua; not read
--   2 free         not read
--   3 references   bit field: u32 per block
--   4 hashes       not read
--   5 index        hash: block hash -> packed u32 block numbers, in order of publication
-- ARGV (packed; hashes 32 bytes, numbers little-endian u32)
--   1 query_lengths
--   2 query_hashes  concatenated
-- RETURN packed u32: per query the number of hits, and how many of them have no references.
--
-- Atomic only so that one query's numbers fit together; a commit looks again.

local WINDOW = 256 -- hashes looked up at once: a query ends at its first miss

local answers, offset = {}, 0
for _, length in ipairs(u32s(ARGV[1])) do
  local hits, missed = {}, false
  while #hits < length and not missed do
    local from = (offset + #hits) * 32
    local count = math.min(WINDOW, length - #hits)
    local hashes = slices(string.sub(ARGV[2], from + 1, from + count * 32), 32)
    for _, entry in ipairs(call_chunked('HMGET', INDEX, hashes)) do
      if not entry then
        missed = true
        break
      end
      hits[#hits + 1] = (struct.unpack('<I4', entry))
    end
  end
  local num_free_hits = 0
  for _, count in ipairs(references_of(hits)) do
    if count == 0 then
      num_free_hits = num_free_hits + 1
    end
  end
  answers[#answers + 1] = #hits
  answers[#answers + 1] = num_free_hits
  offset = offset + length
end
return pack_u32s(answers)
