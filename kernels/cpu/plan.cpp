#include "plan.h"

#include <algorithm>

#include "stages.h"

namespace quire {
namespace {

// Rows of a key head that share the packing of a tile: no more than stay in the second-level cache
// with it, their queries and sums each of so many numbers at most; fewer where threads would else
// have no work, but not so few that each packs a tile for next to none.
constexpr int64_t kMostRows = 512, kMostNumbers = 32 * 1024, kLeastRows = 96;
// So few rows read memory rather than compute. Then an item has all key heads, which lie side by
// side, so that it reads in the order of addresses.
constexpr int64_t kReadingRows = 16;
// What reading a key and its value costs, in rows.
constexpr double kReadCost = 8;
// Shares of the work per thread: the last one to end is late by one of them at most.
constexpr int64_t kSharesPerThread = 4;
// Items of equally many rows per thread, as far as they have kLeastRows: the last ones of a prompt
// see all of its keys, which is twice as much work as it is on average, and should still be no more
// than a share.
constexpr int64_t kItemsPerThread = 2 * kSharesPerThread;
// Below this, merging costs more than is won.
constexpr int64_t kLeastPartition = 256;

double cost_of(const Item& item, int64_t group_size) {
  const double rows = static_cast<double>(item.num_tokens * group_size);
  const double keys = static_cast<double>(std::max<int64_t>(item.end_key - item.first_key, 1));
  return static_cast<double>(item.num_heads) * keys * (kReadCost + rows);
}

// The queries of sequence `seq` from `first_token` on, and the keys that any of them sees.
Item item_of(const Attention& call, int64_t seq, int64_t first_token, int64_t num_tokens,
             int64_t first_head, int64_t num_heads) {
  const int64_t query_len = call.query_start_loc[seq + 1] - call.query_start_loc[seq];
  const int64_t position = call.seq_lens[seq] - query_len + first_token;
  const int64_t end_key = std::max<int64_t>(position + num_tokens, 0);
  const int64_t window_start = position + 1 - call.sliding_window;
  const int64_t first_key = call.sliding_window > 0 ? std::max<int64_t>(window_start, 0) : 0;
  Item item{seq, first_head, num_heads, first_token, num_tokens, first_key, end_key, -1, 0};
  item.cost = cost_of(item, call.group_size());
  return item;
}

// Queries of an item.
int64_t choose_item_tokens(const Attention& call, int64_t num_threads) {
  const int64_t num_tokens = call.query_start_loc[call.num_seqs] - call.query_start_loc[0];
  const int64_t share = num_tokens * call.num_heads / (num_threads * kItemsPerThread);
  const int64_t dim = std::max({call.keys.head_dim, call.values.head_dim, int64_t{1}});
  const int64_t wanted = num_threads == 1 ? kMostRows : std::clamp(share, kLeastRows, kMostRows);
  const int64_t rows = std::min(wanted, kMostNumbers / dim);
  return std::max<int64_t>(rows / call.group_size(), 1);
}

// All the work, no item partitioned.
std::vector<Item> whole_items(const Attention& call, int64_t num_threads) {
  const int64_t group = call.group_size();
  const int64_t item_tokens = choose_item_tokens(call, num_threads);
  std::vector<Item> items;
  for (int64_t seq = 0; seq < call.num_seqs; ++seq) {
    const int64_t query_len = call.query_start_loc[seq + 1] - call.query_start_loc[seq];
    const int64_t heads = query_len * group <= kReadingRows ? call.num_kv_heads : 1;
    const int64_t num_items = std::max<int64_t>(divided_up(query_len, item_tokens), 1);
    const int64_t share = divided_up(query_len, num_items);
    for (int64_t token = 0; token < query_len; token += share) {
      const int64_t num_tokens = std::min(share, query_len - token);
      for (int64_t head = 0; head < call.num_kv_heads; head += heads) {
        items.push_back(item_of(call, seq, token, num_tokens, head, heads));
      }
    }
  }
  return items;
}

void add_partitioned(Plan& plan, const Item& whole, int64_t partition_keys) {
  const int64_t num_keys = whole.end_key - whole.first_key;
  const int64_t count = divided_up(num_keys, partition_keys);
  plan.merges.push_back({whole, plan.num_partials, count});
  for (int64_t part = 0; part < count; ++part) {
    Item item = whole;
    item.first_key = whole.first_key + part * partition_keys;
    item.end_key = std::min(item.first_key + partition_keys, whole.end_key);
    item.partial = plan.num_partials++;
    item.cost = whole.cost * static_cast<double>(item.end_key - item.first_key) /
                static_cast<double>(num_keys);
    plan.items.push_back(item);
  }
}

}  // namespace

int64_t choose_partition_keys(int64_t num_keys, double cost, double total_cost,
                              int64_t num_threads) {
  const double share = total_cost / static_cast<double>(num_threads * kSharesPerThread);
  if (num_threads == 1 || cost <= share) return std::max<int64_t>(num_keys, 1);
  const auto parts = static_cast<int64_t>(cost / share) + 1;
  return std::max(divided_up(num_keys, parts), kLeastPartition);
}

Plan plan_attention(const Attention& call, int64_t partition_keys, int64_t num_threads) {
  const std::vector<Item> wholes = whole_items(call, num_threads);
  double total_cost = 0;
  for (const Item& item : wholes) total_cost += item.cost;
  Plan plan{{}, {}, 0};
  for (const Item& item : wholes) {
    const int64_t num_keys = item.end_key - item.first_key;
    const int64_t keys =
        partition_keys > 0 ? partition_keys
                           : choose_partition_keys(num_keys, item.cost, total_cost, num_threads);
    if (num_keys <= keys) {
      plan.items.push_back(item);
    } else {
      add_partitioned(plan, item, keys);
    }
  }
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const Item& a, const Item& b) { return a.cost > b.cost; });
  return plan;
}

}  // namespace quire
