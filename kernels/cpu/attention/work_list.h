// Divides a batch of attention into work items: pure functions of lengths and heads.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention.h"

namespace quire::attention {

// The work of a call. Items that do not have all keys of their rows give partials to the merges.
struct WorkList {
  std::vector<WorkItem> items;   // by descending cost
  std::vector<WorkItem> merges;  // those that were divided by their keys
  int64_t num_floats;            // of all partials
  int64_t row_floats;            // of a row of a partial
};

// Keys per partition of an item whose keys are packed, and which is `shares` of the work per thread:
// all of them, unless threads would wait for the item.
int64_t choose_packed_partition(int64_t num_keys, double shares, int64_t num_threads);

// The same for an item whose keys are streamed: a function of their number alone.
int64_t choose_streamed_partition(int64_t num_keys);

// `partition_keys` of 0: chosen for each item.
WorkList make_work_list(const AttentionCall& call, int64_t partition_keys, int64_t num_threads);

}  // namespace quire::attention
