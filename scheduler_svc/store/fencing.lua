-- fencing: who may write.
-- A library: it takes ARGV 1 and 2, the caller's epoch and holder, as every writing script does.

-- The error of a caller whose epoch and holder are not the stored ones; nil where they are. A
-- lower epoch or none is no other leader's doing: Redis has lost writes.
local function refusal(epoch, holder)
  if epoch == ARGV[1] and holder == ARGV[2] then
    return nil
  elseif not epoch or tonumber(epoch) < tonumber(ARGV[1]) then
    return redis.error_reply('LEAD_LOST epoch ' .. ARGV[1] .. ' is lost, Redis has '
      .. (epoch or 'none'))
  end
  return redis.error_reply('STALE_EPOCH the epoch is ' .. epoch)
end

-- The same of the leadership's hash.
local function refusal_by(key)
  return refusal(unpack(redis.call('HMGET', key, 'epoch', 'holder')))
end

-- The same of a pool's state.
local function refusal_of_pool(epoch, holder)
  if not epoch then
    return redis.error_reply('POOL_FAULT the pool is not there')
  end
  return refusal(epoch, holder)
end
