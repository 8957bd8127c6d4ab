-- fencing: checks that the caller may write.
-- A library: it takes ARGV 1 and 2, the caller's epoch and holder, as every writing script does.

-- Returns nil if the caller's epoch and holder are the stored ones, else an error. Leaders only raise
-- the epoch, so a lower or missing one means that Redis has lost writes.
local function fencing_error(epoch, holder)
  if epoch == ARGV[1] and holder == ARGV[2] then
    return nil
  elseif not epoch or tonumber(epoch) < tonumber(ARGV[1]) then
    return redis.error_reply('LEADERSHIP_LOST epoch ' .. ARGV[1] .. ' is lost, Redis has '
      .. (epoch or 'none'))
  end
  return redis.error_reply('STALE_EPOCH the epoch is ' .. epoch)
end

-- The same for the leadership's hash.
local function leadership_error(key)
  return fencing_error(unpack(redis.call('HMGET', key, 'epoch', 'holder')))
end

-- The same for a pool's state.
local function pool_error(epoch, holder)
  if not epoch then
    return redis.error_reply('POOL_FAULT the pool does not exist')
  end
  return fencing_error(epoch, holder)
end
