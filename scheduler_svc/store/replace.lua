-- replace: writes live records as the leader has them, whatever is stored.
-- USES fencing.lua
-- USES records.lua
--
-- KEYS
--   1 leadership   hash: epoch, holder
--   2 records...   two per request, see records.lua
-- ARGV
--   1 epoch
--   2 holder
--   3 requests...  one per request, as it travels
-- RETURN 1. Errors: STALE_EPOCH, LEAD_LOST.
--
-- Atomic, because a former leader must not write over what its successor has, and a record and
-- its output must say the same.

local refused = refusal_by(KEYS[1])
if refused then
  return refused
end
for i = 1, (#KEYS - 1) / 2 do
  write_live(KEYS[2 * i], KEYS[2 * i + 1], parts_of(ARGV[2 + i]))
end
return 1
