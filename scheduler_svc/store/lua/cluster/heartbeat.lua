-- heartbeat: notes that a scheduler runs, and the loads of the shards that it leads; reads the others.
--
-- KEYS
--   1 schedulers   hash: scheduler id -> time of its last heartbeat in ms, a space, its address, or
--                  nothing if it drains
--   2 loads        hash: shard -> time in ms, a space, the load as its leader has written it
--   3 map          string: the map of the cluster, see cluster_map.py
-- ARGV
--   1 id           of the caller
--   2 address      of the caller; empty: it drains
--   3 expiry_ms    time without a heartbeat after which a scheduler is forgotten
--   4 shard        of each shard that the caller leads, with
--   5 load         its load
-- RETURN the time in ms; schedulers and loads as flat lists; the map or false.
--
-- Atomic, because a scheduler that is forgotten here must not send a heartbeat meanwhile.

local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('HSET', KEYS[1], ARGV[1], now_ms .. ' ' .. ARGV[2])
for i = 4, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[i], now_ms .. ' ' .. ARGV[i + 1])
end
local schedulers = redis.call('HGETALL', KEYS[1])
for i = 2, #schedulers, 2 do
  -- Absolute: Redis' clock may have been set back.
  local written_ms = tonumber(string.match(schedulers[i], '^%d+') or 0)
  if math.abs(now_ms - written_ms) > tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], schedulers[i - 1])
  end
end
return {now_ms, redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]),
  redis.call('GET', KEYS[3])}
