-- list_live_records: reads the live records among these.
-- USES lib/records.lua
--
-- KEYS
--   1 records...   two per request, see records.lua
-- ARGV none
-- RETURN the live ones, packed.
--
-- Atomic only so that a record matches its output.

local live = {}
for i = 1, #KEYS, 2 do
  live[#live + 1] = packed_live(KEYS[i], KEYS[i + 1])
end
return live
