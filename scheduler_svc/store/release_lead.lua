-- release_lead: leaves the lead to whoever comes; the epoch stays.
--
-- KEYS
--   1 leadership   hash, see take_lead.lua
-- ARGV
--   1 epoch
--   2 holder
-- RETURN 1 if it was the caller's, else 0.
--
-- Atomic, because it must not be the successor's lead that is released.

local stored = redis.call('HMGET', KEYS[1], 'epoch', 'holder')
if stored[1] ~= ARGV[1] or stored[2] ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[1], 'holder', 'address', 'renewed_ms')
return 1
