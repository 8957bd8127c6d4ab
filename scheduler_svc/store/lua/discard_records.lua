-- discard_records: deletes the records of requests that were never accepted.
-- USES lib/fencing.lua
--
-- KEYS
--   1 leadership   hash: epoch, holder
--   2 records...   two per request, see records.lua
-- ARGV
--   1 epoch
--   2 holder
--   3 sequences... one per request: the sequence id it was recorded with
-- RETURN 1. Errors: STALE_EPOCH, LEADERSHIP_LOST.
--
-- Atomic, because an earlier leader must not delete what its successor has recovered, and an
-- earlier record of the same id must stay.

local denied = leadership_error(KEYS[1])
if denied then
  return denied
end
for i = 1, (#KEYS - 1) / 2 do
  local stored = redis.call('HMGET', KEYS[2 * i], 'state', 'sequence_id')
  if stored[1] == 'live' and stored[2] == ARGV[2 + i] then
    redis.call('DEL', KEYS[2 * i], KEYS[2 * i + 1])
  end
end
return 1
