-- record: writes the records of requests that are to be accepted.
-- USES fencing.lua
-- USES records.lua
--
-- KEYS
--   1 leadership   hash: epoch, holder
--   2 records...   two per request, see records.lua
-- ARGV
--   1 epoch
--   2 holder
--   3 requests...  two per request: the record as it travels; `1` if its gateway submits it again
-- RETURN per request 1: it is written; 2: it is there, with the same digest; 3: its id is taken by
--   another request. Errors: STALE_EPOCH, LEAD_LOST.
--
-- Atomic, because two requests of one id that arrive at once must not both be accepted. A repeat
-- of the call, known by its sequence ids, gets the same answers.

local refused = refusal_by(KEYS[1])
if refused then
  return refused
end
local NEW, KNOWN, CONFLICT = 1, 2, 3

local function answer(stored, digest, sequence_id, again)
  local state, is_same = stored[1], stored[2] == digest
  if state == 'live' or state == 'finished' then
    if state == 'live' and stored[3] == sequence_id then
      return NEW
    end
    return is_same and KNOWN or CONFLICT
  end
  return state and again and is_same and KNOWN or NEW
end

local answers = {}
for i = 1, (#KEYS - 1) / 2 do
  local record, output = KEYS[2 * i], KEYS[2 * i + 1]
  local parts, again = parts_of(ARGV[2 * i + 1]), ARGV[2 * i + 2] == '1'
  local stored = redis.call('HMGET', record, 'state', 'digest', 'sequence_id')
  answers[i] = answer(stored, parts[3], parts[6], again)
  if answers[i] == NEW and not (stored[1] == 'live' and stored[3] == parts[6]) then
    write_live(record, output, parts)
  end
end
return answers
