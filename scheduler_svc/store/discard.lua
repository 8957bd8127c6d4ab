-- discard: deletes the records of requests that were never accepted.
-- USES fencing.lua
--
-- KEYS
--   1 leadership   hash: epoch, holder
--   2 records...   two per request, see records.lua
-- ARGV
--   1 epoch
--   2 holder
--   3 sequences... one per request: the sequence id it was recorded with
-- RETURN 1. Errors: STALE_EPOCH, LEAD_LOST.
--
-- Atomic, because a former leader must not delete what its successor has taken over, nor anybody
-- the record of a request that was there before under the same id.

local refused = refusal_by(KEYS[1])
if refused then
  return refused
end
for i = 1, (#KEYS - 1) / 2 do
  local stored = redis.call('HMGET', KEYS[2 * i], 'state', 'sequence_id')
  if stored[1] == 'live' and stored[2] == ARGV[2 + i] then
    redis.call('DEL', KEYS[2 * i], KEYS[2 * i + 1])
  end
end
return 1
