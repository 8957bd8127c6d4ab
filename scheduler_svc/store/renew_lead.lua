-- renew_lead: says that the leader is alive, and finds out whether it still leads and may write.
-- USES fencing.lua
--
-- KEYS
--   1 leadership   hash, see take_lead.lua
-- ARGV
--   1 epoch
--   2 holder
-- RETURN Redis' run id, another one after every restart. Errors: STALE_EPOCH, LEAD_LOST.
--
-- Atomic, because a leader that has just been fenced must not write into its successor's entry.

local refused = refusal_by(KEYS[1])
if refused then
  return refused
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'renewed_ms',
  tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
