-- live: the live ones among records.
-- USES records.lua
--
-- KEYS
--   1 records...   two per request, see records.lua
-- ARGV none
-- RETURN those that are live, as they travel.
--
-- Atomic only so that a record fits its output.

local live = {}
for i = 1, #KEYS, 2 do
  live[#live + 1] = packed_live(KEYS[i], KEYS[i + 1])
end
return live
