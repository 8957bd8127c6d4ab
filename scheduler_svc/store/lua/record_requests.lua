-- record_requests: writes the records of new requests.
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
--   3 requests...  two per request: the packed record; `1` if its gateway resubmits it
-- RETURN per request 1: written; 2: exists with the same digest; 3: its id is taken by another
--   request. Errors: STALE_EPOCH, LEADERSHIP_LOST.
--
-- Atomic, because two concurrent requests of one id must not both be accepted. A repeated call,
-- recognised by its sequence ids, gets the same results.

local denied = leadership_error(KEYS[1])
if denied then
  return denied
end
local NEW, EXISTS, CONFLICT = 1, 2, 3

local function outcome(stored, digest, sequence_id, is_resubmission)
  local state, is_same = stored[1], stored[2] == digest
  if state == 'live' or state == 'finished' then
    if state == 'live' and stored[3] == sequence_id then
      return NEW
    end
    return is_same and EXISTS or CONFLICT
  end
  return state and is_resubmission and is_same and EXISTS or NEW
end

local outcomes = {}
for i = 1, (#KEYS - 1) / 2 do
  local record, output = KEYS[2 * i], KEYS[2 * i + 1]
  local parts, is_resubmission = parts_of(ARGV[2 * i + 1]), ARGV[2 * i + 2] == '1'
  local stored = redis.call('HMGET', record, 'state', 'digest', 'sequence_id')
  outcomes[i] = outcome(stored, parts[3], parts[6], is_resubmission)
  if outcomes[i] == NEW and not (stored[1] == 'live' and stored[3] == parts[6]) then
    write_live(record, output, parts)
  end
end
return outcomes
