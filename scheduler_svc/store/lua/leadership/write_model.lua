-- write_model: notes which model the outputs of a shard's live requests are of.
-- USES lib/fencing.lua
--
-- KEYS
--   1 leadership   hash, see acquire_lease.lua
-- ARGV
--   1 epoch
--   2 holder
--   3 model        its fingerprint
-- RETURN 1. Errors: STALE_EPOCH, LEADERSHIP_LOST.
--
-- Atomic, because an earlier leader must not overwrite what its successor has written.

local denied = leadership_error(KEYS[1])
if denied then
  return denied
end
redis.call('HSET', KEYS[1], 'model', ARGV[3])
return 1
