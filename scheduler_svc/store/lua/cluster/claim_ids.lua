-- claim_ids: notes which shard has the requests of these ids, which clients chose.
--
-- KEYS
--   ...            string per id: the shard
-- ARGV
--   1 shard        of the caller, or the one that gets the requests
--   2 ttl_s        time after which the note is forgotten
--   3 how          new: only ids that no shard has; known: only ids that any shard has; all
-- RETURN per id the shard that has it, as text; empty for an id that none has.
--
-- Atomic, because two shards must not both have an id.

local shards = {}
for i, key in ipairs(KEYS) do
  local stored = redis.call('GET', key)
  local takes = ARGV[3] == 'all' or (ARGV[3] == 'new') == not stored or stored == ARGV[1]
  if takes then
    redis.call('SET', key, ARGV[1], 'EX', ARGV[2])
  end
  shards[i] = takes and ARGV[1] or stored or ''
end
return shards
