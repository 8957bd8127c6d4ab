-- trim_inbox: removes the oldest entries of a shard's inbox, which its leader has taken.
-- USES lib/fencing.lua
--
-- KEYS
--   1 leadership   hash, see acquire_lease.lua
--   2 inbox        list of requests that other shards have given away, oldest first
-- ARGV
--   1 epoch
--   2 holder
--   3 head_bytes   length of the beginning by which entries differ, see inbox.py
--   4 heads...     the beginning of each entry to remove, oldest first
-- RETURN true. Errors: STALE_EPOCH, LEADERSHIP_LOST.
--
-- Atomic, because an earlier leader would remove entries that it has not taken. A repeated call
-- finds other entries and removes none of them.

local denied = leadership_error(KEYS[1])
if denied then
  return denied
end
for i = 4, #ARGV do
  local entry = redis.call('LINDEX', KEYS[2], 0)
  if not entry or string.sub(entry, 1, tonumber(ARGV[3])) ~= ARGV[i] then
    break
  end
  redis.call('LPOP', KEYS[2])
end
return true
