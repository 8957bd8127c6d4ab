// Paged attention and cache writes: what is computed, and the functions that each instruction set
// has for it. Independent of torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "isa/isa.h"
#include "tensor_views.h"

namespace quire::attention {

// One call of paged attention: the batch, the caches and the options of scores.
struct AttentionCall {
  HeadsView query, out;
  Cache keys, values;
  int64_t block_size;
  int64_t num_heads, num_kv_heads;
  int64_t num_seqs;
  const int32_t* block_table;  // [num_seqs, block_table_stride]
  int64_t block_table_stride;
  const int64_t* query_start_loc;  // [num_seqs + 1]
  const int64_t* seq_lens;         // [num_seqs]
  float scale;
  float softcap;           // 0: none
  int64_t sliding_window;  // 0: none
  const float* sinks;      // [num_heads] or null

  int64_t group_size() const { return num_heads / num_kv_heads; }
};

// The most rows per key head for which keys and values are streamed.
constexpr int64_t kMostStreamedRows = 8;

// Queries of one sequence and a range of its keys: a chunk of the attention stage. Each partition of
// the keys yields a partial, and the partials of a row are merged, in the order of keys.
struct WorkItem {
  int64_t seq;
  int64_t first_head, num_heads;    // key heads
  int64_t first_token, num_tokens;  // of the sequence's queries
  int64_t first_key, end_key;       // of the sequence's keys: whole partitions
  int64_t partition_keys;           // of every partition but the last
  // The place of its first partial, in floats; -1: it has all keys, and merges its partials itself.
  int64_t partials_at = -1;
  int64_t partial_floats = 0;
  double cost = 0;

  int64_t num_keys() const { return end_key - first_key; }
  int64_t num_partitions() const {
    return std::max<int64_t>((num_keys() + partition_keys - 1) / partition_keys, 1);
  }
  // The end of the partition that `key` is in.
  int64_t partition_end(int64_t key) const {
    return std::min(key - (key - first_key) % partition_keys + partition_keys, end_key);
  }
};

// New keys or values, and the slots of a cache that they are written to.
struct KvWrite {
  HeadsView source;
  Cache cache;
  int64_t num_heads, block_size;
  const int64_t* slot_mapping;  // [num_tokens]; -1 is not written
};

struct Functions {
  // Floats of scratch memory that an item needs.
  int64_t (*scratch_floats)(const AttentionCall&, const WorkItem&);
  // Computes an item, and writes the output or partials: sums, maxima and totals.
  void (*attend)(const AttentionCall&, const WorkItem&, float* scratch, float* partials);
  // Writes the output of an item, the parts of which have written all its partials.
  void (*merge)(const AttentionCall&, const WorkItem& whole, float* scratch, const float* partials);
  void (*write)(const KvWrite&, int64_t first_token, int64_t end_token);
};

const Functions& functions_of(Isa isa);

}  // namespace quire::attention
