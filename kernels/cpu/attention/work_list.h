// Divides a batch of attention into work items: pure functions of lengths and heads.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention.h"

namespace quire::attention {

// The work of a call. Items with part of their keys give partials, which the merges combine.
struct WorkList {
  std::vector<WorkItem> items;  // by descending cost
  std::vector<Merge> merges;
  int64_t num_partials, partial_floats, row_floats;  // floats of a partial, and of one of its rows
};

// Keys per partition of an item that has `num_keys` of them and the share `cost / total_cost` of
// all work: all of them, unless threads would wait for the item.
int64_t choose_partition_keys(int64_t num_keys, double cost, double total_cost,
                              int64_t num_threads);

// `partition_keys` of 0: chosen for each item.
WorkList make_work_list(const AttentionCall& call, int64_t partition_keys, int64_t num_threads);

}  // namespace quire::attention
