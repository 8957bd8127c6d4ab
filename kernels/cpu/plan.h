// How a batch of attention is cut into items of work: pure functions of lengths and heads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace quire {

struct Plan {
  std::vector<Item> items;  // the costly ones first
  std::vector<Merge> merges;
  int64_t num_partials;
};

// Keys per partition of an item that has `num_keys` of them and the share `cost / total_cost` of
// all work: as many as it has, unless threads would wait for it.
int64_t choose_partition_keys(int64_t num_keys, double cost, double total_cost,
                              int64_t num_threads);

// `partition_keys` 0: chosen for each item.
Plan plan_attention(const Attention& call, int64_t partition_keys, int64_t num_threads);

}  // namespace quire
