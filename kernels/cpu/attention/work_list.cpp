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
// A smaller partition of packed keys gains less than merging costs.
constexpr int64_t kLeastPartition = 256;
// Packed items with fewer keys are divided by their heads: partitions would be too few to be of use to
// all threads.
constexpr int64_t kLeastPackedKeys = 4 * kLeastPartition;
// From twice as many streamed keys on there are two partitions; then they grow with their number, so
// that their partials stay few beside the keys.
constexpr int64_t kLeastStreamedPartition = 64, kStreamedGrowth = 32;
// They begin at whole blocks of the usual size, which are adjacent in memory.
constexpr int64_t kStreamedStep = 16;
// With so many keys, an item is shared by more pieces than threads, which then end at the same time.
constexpr int64_t kLeastSharedKeys = 1024;

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
  WorkItem item{seq, first_head, num_heads, first_token, num_tokens, first_key, end_key,
                std::max<int64_t>(end_key - first_key, 1)};
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

// How an item is divided among threads: by ranges of its partitions, and of its heads.
struct Division {
  int64_t partition_keys, key_ranges, head_ranges;
};

// The pieces of which none is more than a share. A share that is rounded makes no further piece.
int64_t choose_pieces(double shares) {
  constexpr double kRounding = 1e-6;
  return static_cast<int64_t>(std::ceil(shares - kRounding));
}

// An item of `shares` of the work per thread. The partitions of streamed keys depend on nothing but
// their number: so the other rows of a batch and the number of threads change no bit.
Division divide_streamed(const WorkItem& item, double shares, int64_t num_threads) {
  const int64_t keys = choose_streamed_partition(item.num_keys());
  if (num_threads == 1) return {keys, 1, 1};
  const int64_t wanted =
      choose_pieces(item.num_keys() < kLeastSharedKeys ? shares : shares * kSharesPerThread);
  const int64_t most = std::max<int64_t>(ceil_div(item.num_keys(), keys), 1);
  const int64_t ranges = std::clamp<int64_t>(wanted, 1, most);
  return {keys, ranges, ceil_div(choose_pieces(shares), ranges)};
}

Division divide_packed(const WorkItem& item, double shares, int64_t num_threads) {
  if (num_threads > 1 && item.num_keys() < kLeastPackedKeys)
    return {item.partition_keys, 1, choose_pieces(shares)};
  const int64_t keys = choose_packed_partition(item.num_keys(), shares, num_threads);
  return {keys, ceil_div(item.num_keys(), keys), 1};
}

// Adds ranges of an item's partitions.
void add_keys(WorkList& list, WorkItem whole, int64_t num_ranges, int64_t group_size) {
  if (num_ranges <= 1) {
    list.items.push_back(whole);
    return;
  }
  const int64_t num_partitions = whole.num_partitions();
  whole.partials_at = list.num_floats;
  whole.partial_floats = whole.num_heads * whole.num_tokens * group_size * list.row_floats;
  list.num_floats += num_partitions * whole.partial_floats;
  list.merges.push_back(whole);
  for (int64_t range = 0; range < num_ranges; ++range) {
    const int64_t begin = begin_of_range(range, num_partitions, num_ranges);
    const int64_t end = begin_of_range(range + 1, num_partitions, num_ranges);
    WorkItem item = whole;
    item.first_key = whole.first_key + begin * whole.partition_keys;
    item.end_key = std::min(whole.first_key + end * whole.partition_keys, whole.end_key);
    item.partials_at = whole.partials_at + begin * whole.partial_floats;
    item.cost = whole.cost * static_cast<double>(item.num_keys()) /
                static_cast<double>(whole.num_keys());
    list.items.push_back(item);
  }
}

void add_item(WorkList& list, WorkItem whole, const Division& division, int64_t group_size) {
  whole.partition_keys = division.partition_keys;
  const int64_t num_ranges = std::clamp<int64_t>(division.head_ranges, 1, whole.num_heads);
  for (int64_t range = 0; range < num_ranges; ++range) {
    const int64_t begin = begin_of_range(range, whole.num_heads, num_ranges);
    WorkItem item = whole;
    item.first_head = whole.first_head + begin;
    item.num_heads = begin_of_range(range + 1, whole.num_heads, num_ranges) - begin;
    item.cost = whole.cost * static_cast<double>(item.num_heads) /
                static_cast<double>(whole.num_heads);
    add_keys(list, item, division.key_ranges, group_size);
  }
}

}  // namespace

int64_t choose_packed_partition(int64_t num_keys, double shares, int64_t num_threads) {
  const double wanted = shares * kSharesPerThread;
  if (num_threads == 1 || wanted <= 1) return std::max<int64_t>(num_keys, 1);
  return std::max(ceil_div(num_keys, static_cast<int64_t>(wanted) + 1), kLeastPartition);
}

int64_t choose_streamed_partition(int64_t num_keys) {
  if (num_keys < 2 * kLeastStreamedPartition) return std::max<int64_t>(num_keys, 1);
  int64_t count = 2;
  while (4 * count * count * kStreamedGrowth <= num_keys) count *= 2;
  return ceil_div(ceil_div(num_keys, count), kStreamedStep) * kStreamedStep;
}

WorkList make_work_list(const AttentionCall& call, int64_t partition_keys, int64_t num_threads) {
  const std::vector<WorkItem> wholes = whole_items(call, num_threads);
  double total_cost = 0;
  for (const WorkItem& item : wholes) total_cost += item.cost;
  // The widest vectors have 16 numbers; two more are the maximum and the sum.
  WorkList list{{}, {}, 0, (call.values.head_dim + 15) / 16 * 16 + 2};
  for (const WorkItem& item : wholes) {
    const double shares = item.cost * static_cast<double>(num_threads) / total_cost;
    const bool is_streamed = item.num_tokens * call.group_size() <= kMostStreamedRows;
    const Division division =
        partition_keys > 0 ? Division{partition_keys, ceil_div(item.num_keys(), partition_keys), 1}
        : is_streamed      ? divide_streamed(item, shares, num_threads)
                           : divide_packed(item, shares, num_threads);
    add_item(list, item, division, call.group_size());
  }
  std::stable_sort(list.items.begin(), list.items.end(),
                   [](const WorkItem& a, const WorkItem& b) { return a.cost > b.cost; });
  return list;
}

}  // namespace quire::attention
