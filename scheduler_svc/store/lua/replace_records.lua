-- replace_records: overwrites live records with the leader's state.
-- USES lib/slot.lua
-- USES lib/fencing.lua
-- USES lib/records.lua
--
-- KEYS
--   1 leadership   hash: epoch, holder
--   2 records...   two per request, see records.lua
-- ARGV
--   1 epoch
--   2 holder
--   3 requests...  one per request, packed
-- RETURN 1. Errors: STALE_EPOCH, LEADERSHIP_LOST.
--
-- Atomic, because an earlier leader must not overwrite its successor's records, and a record must
-- match its output.

local denied = leadership_error(KEYS[1])
if denied then
  return denied
end
for i = 1, (#KEYS - 1) / 2 do
  write_live(KEYS[2 * i], KEYS[2 * i + 1], parts_of(ARGV[2 + i]))
end
return 1
