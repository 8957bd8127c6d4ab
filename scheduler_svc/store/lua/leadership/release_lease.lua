-- release_lease: frees the lease; the epoch stays.
--
-- KEYS
--   1 leadership   hash, see acquire_lease.lua
-- ARGV
--   1 epoch
--   2 holder
-- RETURN 1 if the caller held it, else 0.
--
-- Atomic, because the successor's lease must not be released.

local stored = redis.call('HMGET', KEYS[1], 'epoch', 'holder')
if stored[1] ~= ARGV[1] or stored[2] ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[1], 'holder', 'address', 'renewed_ms')
return 1
