#include "attention/work_list.h"

#include <algorithm>
#include <cmath>

#include "threading/stages.h"

namespace quire::attention {
namespace {

// Rows of a key head that share a packed tile: at most as many as stay in the second-level cache with
// it, with kMostNumbers numbers each of queries and of sums; fewer where threads would otherwise have
// no work, but enough to be worth the packing.
constexpr int64_t kMostRows = 512, kMostNumbers = 32 * 1024, kLeastRows = 96;
// Up to so many rows, memory is the bottleneck. Then an item has all key heads, which are adjacent in
// memory, so that it reads in the order of addresses.
constexpr int64_t kMostMemoryBoundRows = 16;
// The cost of reading a key and its value, in rows.
constexpr double kReadCost = 8;
// Shares of the work per thread: the last thread finishes at most one share late.
constexpr int64_t kSharesPerThread = 4;
// Items of equally many rows per thread, as far as they have kLeastRows. The last items of a prompt
// see all of its keys, twice the average work, and should still be at most a share.
constexpr int64_t kItemsPerThread = 2 * kSharesPerThread;
// A smaller partition gains less than merging costs.
constexpr int64_t kLeastPartition = 256;
// With fewer keys, partitions would be too few to be of use to all threads. Such an item is divided
// by its heads, so that it is a share of one thread. More parts were measured to be slower, as each
// would read fewer adjacent numbers at a time.
constexpr int64_t kLeastPartitionedKeys = 4 * kLeastPartition;

double cost_of(const WorkItem& item, int64_t group_size) {
  const double rows = static_cast<double>(item.num_tokens * group_size);
  const double keys = static_cast<double>(std::max<int64_t>(item.end_key - item.first_key, 1));
  return static_cast<double>(item.num_heads) * keys * (kReadCost + rows);
}

// The queries of sequence `seq` from `first_token` on, and the keys that any of them sees.
WorkItem item_of(const AttentionCall& call, int64_t seq, int64_t first_token, int64_t num_tokens,
                 int64_t first_head, int64_t num_heads) {
  const int64_t query_len = call.query_start_loc[seq + 1] - call.query_start_loc[seq];
  const int64_t position = call.seq_lens[seq] - query_len + first_token;
  const int64_t end_key = std::max<int64_t>(position + num_tokens, 0);
  const int64_t window_start = position + 1 - call.sliding_window;
  const int64_t first_key = call.sliding_window > 0 ? std::max<int64_t>(window_start, 0) : 0;
  WorkItem item{seq, first_head, num_heads, first_token, num_tokens, first_key, end_key, -1, 0};
  item.cost = cost_of(item, call.group_size());
  return item;
}

// Query tokens of an item.
int64_t choose_item_tokens(const AttentionCall& call, int64_t num_threads) {
  const int64_t num_tokens = call.query_start_loc[call.num_seqs] - call.query_start_loc[0];
  const int64_t share = num_tokens * call.num_heads / (num_threads * kItemsPerThread);
  const int64_t dim = std::max({call.keys.head_dim, call.values.head_dim, int64_t{1}});
  const int64_t wanted = num_threads == 1 ? kMostRows : std::clamp(share, kLeastRows, kMostRows);
  const int64_t rows = std::min(wanted, kMostNumbers / dim);
  return std::max<int64_t>(rows / call.group_size(), 1);
}

// All work items before partitioning.
std::vector<WorkItem> whole_items(const AttentionCall& call, int64_t num_threads) {
  const int64_t group = call.group_size();
  const int64_t item_tokens = choose_item_tokens(call, num_threads);
  std::vector<WorkItem> items;
  for (int64_t seq = 0; seq < call.num_seqs; ++seq) {
    const int64_t query_len = call.query_start_loc[seq + 1] - call.query_start_loc[seq];
    const int64_t heads = query_len * group <= kMostMemoryBoundRows ? call.num_kv_heads : 1;
    const int64_t num_items = std::max<int64_t>(ceil_div(query_len, item_tokens), 1);
    const int64_t share = ceil_div(query_len, num_items);
    for (int64_t token = 0; token < query_len; token += share) {
      const int64_t num_tokens = std::min(share, query_len - token);
      for (int64_t head = 0; head < call.num_kv_heads; head += heads) {
        items.push_back(item_of(call, seq, token, num_tokens, head, heads));
      }
    }
  }
  return items;
}

void add_partitioned(WorkList& list, const WorkItem& whole, int64_t partition_keys,
                     int64_t group_size) {
  const int64_t num_keys = whole.end_key - whole.first_key;
  const int64_t count = ceil_div(num_keys, partition_keys);
  list.merges.push_back({whole, list.num_partials, count});
  const int64_t num_rows = whole.num_heads * whole.num_tokens * group_size;
  list.partial_floats = std::max(list.partial_floats, num_rows * list.row_floats);
  for (int64_t part = 0; part < count; ++part) {
    WorkItem item = whole;
    item.first_key = whole.first_key + part * partition_keys;
    item.end_key = std::min(item.first_key + partition_keys, whole.end_key);
    item.partial = list.num_partials++;
    item.cost = whole.cost * static_cast<double>(item.end_key - item.first_key) /
                static_cast<double>(num_keys);
    list.items.push_back(item);
  }
}

// The parts of an item that is divided by its heads; 1 if it is not.
int64_t choose_head_parts(const WorkItem& item, double total_cost, int64_t num_threads) {
  if (num_threads == 1 || item.end_key - item.first_key >= kLeastPartitionedKeys) return 1;
  const double share = total_cost / static_cast<double>(num_threads);
  // A share that is rounded down makes no further part.
  constexpr double kRounding = 1e-6;
  return std::min(item.num_heads, static_cast<int64_t>(std::ceil(item.cost / share - kRounding)));
}

void add_heads(WorkList& list, const WorkItem& whole, int64_t num_parts) {
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t begin = whole.num_heads * part / num_parts;
    const int64_t end = whole.num_heads * (part + 1) / num_parts;
    WorkItem item = whole;
    item.first_head = whole.first_head + begin;
    item.num_heads = end - begin;
    item.cost = whole.cost * static_cast<double>(item.num_heads) /
                static_cast<double>(whole.num_heads);
    list.items.push_back(item);
  }
}

}  // namespace

int64_t choose_partition_keys(int64_t num_keys, double cost, double total_cost,
                              int64_t num_threads) {
  const double share = total_cost / static_cast<double>(num_threads * kSharesPerThread);
  if (num_threads == 1 || cost <= share) return std::max<int64_t>(num_keys, 1);
  const auto parts = static_cast<int64_t>(cost / share) + 1;
  return std::max(ceil_div(num_keys, parts), kLeastPartition);
}

WorkList make_work_list(const AttentionCall& call, int64_t partition_keys, int64_t num_threads) {
  const std::vector<WorkItem> wholes = whole_items(call, num_threads);
  double total_cost = 0;
  for (const WorkItem& item : wholes) total_cost += item.cost;
  // The widest vectors have 16 numbers; two more are the maximum and the sum.
  WorkList list{{}, {}, 0, 0, (call.values.head_dim + 15) / 16 * 16 + 2};
  for (const WorkItem& item : wholes) {
    const int64_t num_keys = item.end_key - item.first_key;
    const int64_t head_parts =
        partition_keys > 0 ? 1 : choose_head_parts(item, total_cost, num_threads);
    if (head_parts > 1) {
      add_heads(list, item, head_parts);
      continue;
    }
    const int64_t keys =
        partition_keys > 0 ? partition_keys
                           : choose_partition_keys(num_keys, item.cost, total_cost, num_threads);
    if (num_keys <= keys) {
      list.items.push_back(item);
    } else {
      add_partitioned(list, item, keys, call.group_size());
    }
  }
  std::stable_sort(list.items.begin(), list.items.end(),
                   [](const WorkItem& a, const WorkItem& b) { return a.cost > b.cost; });
  return list;
}

}  // namespace quire::attention
