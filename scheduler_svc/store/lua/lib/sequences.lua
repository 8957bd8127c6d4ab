-- sequences: the journal index of a pool's sequences: the index of each one's next token.
-- A library: it follows blocks.lua.
--
-- Two packed arrays hold it, ids and next indices. Sequences of the last ranges are first, in
-- the order of the ranges: if the same ones have tokens again, one comparison suffices.

local function sequence_text(id)
  return string.format('%.0f', (struct.unpack('<I8', id)))
end

local function sequences_of(packed_ids, packed_nexts)
  return { packed_ids = packed_ids, packed_nexts = packed_nexts }
end

-- Unpacks the arrays into tables, for changes of single sequences.
local function unpack_sequences(sequences)
  if sequences.next_of then
    return
  end
  sequences.ids, sequences.next_of = split(sequences.packed_ids, 8), {}
  for i, next_index in ipairs(split(sequences.packed_nexts, 4)) do
    sequences.next_of[sequences.ids[i]] = next_index
  end
end

-- Advances by ranges [first, next). Returns a fault, else nil.
local function advance(sequences, packed_ids, packed_firsts, packed_nexts)
  if string.sub(sequences.packed_ids, 1, #packed_ids) == packed_ids
    and string.sub(sequences.packed_nexts, 1, #packed_firsts) == packed_firsts then
    sequences.packed_nexts = packed_nexts .. string.sub(sequences.packed_nexts, #packed_nexts + 1)
    return nil
  end
  unpack_sequences(sequences)
  local next_of, ids = sequences.next_of, split(packed_ids, 8)
  local firsts, nexts = split(packed_firsts, 4), split(packed_nexts, 4)
  for i, id in ipairs(ids) do
    if not next_of[id] then
      return 'tokens of sequence ' .. sequence_text(id) .. ', which is unknown'
    elseif next_of[id] ~= firsts[i] then
      return 'tokens of sequence ' .. sequence_text(id) .. ' from index ' .. number_of(firsts[i])
        .. ', not ' .. number_of(next_of[id])
    end
    next_of[id] = nexts[i]
  end
  for _, id in ipairs(sequences.ids) do
    ids[#ids + 1] = id
  end
  sequences.ids = ids
end

local function remove_sequences(sequences, ids)
  if #ids > 0 then
    unpack_sequences(sequences)
  end
  for _, id in ipairs(ids) do
    sequences.next_of[id] = nil
  end
end

-- Appends sequences. Returns a fault, else nil.
local function add_sequences(sequences, ids, nexts)
  if #ids > 0 then
    unpack_sequences(sequences)
  end
  for i, id in ipairs(ids) do
    if sequences.next_of[id] then
      return 'sequence ' .. sequence_text(id) .. ' is added twice'
    end
    sequences.next_of[id] = nexts[i]
    sequences.ids[#sequences.ids + 1] = id
  end
end

-- The arrays, for `sequences_of`.
local function pack_sequences(sequences)
  if not sequences.next_of then
    return sequences.packed_ids, sequences.packed_nexts
  end
  local ids, nexts, next_of = {}, {}, sequences.next_of
  for _, id in ipairs(sequences.ids) do
    if next_of[id] then -- else it is removed, or packed already
      ids[#ids + 1] = id
      nexts[#nexts + 1] = next_of[id]
      next_of[id] = nil
    end
  end
  return table.concat(ids), table.concat(nexts)
end
