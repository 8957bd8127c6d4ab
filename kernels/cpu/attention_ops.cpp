// `torch.ops.quire.paged_attention`: checks, plans, and has the plan's items done.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <vector>

#include "ops.h"
#include "plan.h"
#include "tensors.h"

namespace quire {
namespace {

const float* per_head(const std::optional<Tensor>& numbers, int64_t num_heads) {
  if (!numbers) return nullptr;
  TORCH_CHECK(numbers->scalar_type() == at::kFloat && numbers->is_contiguous() &&
                  numbers->numel() == num_heads,
              "one dense float32 per query head is needed");
  return numbers->const_data_ptr<float>();
}

// Ids beyond the cache would read and write foreign memory.
void check_batch(const Attention& call, int64_t num_tokens, int64_t num_blocks) {
  TORCH_CHECK_INDEX(call.query_start_loc[0] >= 0, "query_start_loc is negative");
  for (int64_t seq = 0; seq < call.num_seqs; ++seq) {
    TORCH_CHECK_INDEX(call.query_start_loc[seq + 1] >= call.query_start_loc[seq] &&
                          call.query_start_loc[seq + 1] <= num_tokens,
                      "query_start_loc must rise to the number of tokens at most");
    const int64_t blocks = (call.seq_lens[seq] + call.block_size - 1) / call.block_size;
    TORCH_CHECK_INDEX(blocks <= call.block_table_stride, "a block table is too short");
    const int32_t* table = call.block_table + seq * call.block_table_stride;
    for (int64_t i = 0; i < blocks; ++i) {
      TORCH_CHECK_INDEX(table[i] >= 0 && table[i] < num_blocks, "there is no block ", table[i]);
    }
  }
}

// Scratch memory of this thread, at a cache line's start; it stays for the next call.
float* scratch(int64_t num_floats) {
  constexpr int64_t kLineFloats = 16;
  thread_local std::vector<float> memory;
  const auto needed = static_cast<size_t>(num_floats + kLineFloats);
  if (memory.size() < needed) memory.resize(needed);
  const auto address = reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float);
  return memory.data() + (kLineFloats - address % kLineFloats) % kLineFloats;
}

// How a batch is cut, and what its partials take.
struct Cut {
  Plan plan;
  int64_t row_floats, partial_floats;

  Cut(const Attention& call, int64_t partition_keys)
      : plan(plan_attention(call, partition_keys, at::get_num_threads())) {
    int64_t most_rows = 0;
    for (const Merge& merge : plan.merges) {
      const Item& item = merge.whole;
      most_rows = std::max(most_rows, item.num_heads * item.num_tokens * call.group_size());
    }
    // The widest vectors have 16 numbers; two more are the maximum and the sum.
    row_floats = (call.values.head_dim + 15) / 16 * 16 + 2;
    partial_floats = most_rows * row_floats;
  }

  size_t all_floats() const { return plan.num_partials * partial_floats; }
};

}  // namespace

std::vector<Stage> attention(const Tensor& out, const Tensor& query, const Tensor& k_cache,
                             const Tensor& v_cache, const Tensor& block_table,
                             const Tensor& query_start_loc, const Tensor& seq_lens, double scale,
                             int64_t sliding_window, double softcap,
                             const std::optional<Tensor>& sinks,
                             const std::optional<Tensor>& alibi_slopes, double k_scale,
                             double v_scale, int64_t partition_keys, int64_t isa,
                             const Partials& partials) {
  const int64_t num_seqs = seq_lens.numel(), num_heads = query.size(1);
  TORCH_CHECK(block_table.dim() == 2 && block_table.size(0) == num_seqs &&
                  block_table.scalar_type() == at::kInt && block_table.is_contiguous(),
              "a block table is dense int32 [num_seqs, max_blocks]");
  TORCH_CHECK(k_cache.scalar_type() == v_cache.scalar_type() &&
                  k_cache.sizes().slice(0, 3) == v_cache.sizes().slice(0, 3),
              "the caches differ in more than their heads' dimensions");
  TORCH_CHECK(num_heads && k_cache.size(2) && num_heads % k_cache.size(2) == 0,
              "query heads do not divide among key heads");
  TORCH_CHECK(query.size(2) == k_cache.size(3) && out.size(0) == query.size(0) &&
                  out.size(1) == num_heads && out.size(2) == v_cache.size(3),
              "query, output and caches do not fit");
  const Attention call{
      tokens_of(query),
      tokens_of(out),
      cache_of(k_cache, k_scale),
      cache_of(v_cache, v_scale),
      k_cache.size(1),
      num_heads,
      k_cache.size(2),
      num_seqs,
      block_table.const_data_ptr<int32_t>(),
      block_table.size(1),
      int64s(query_start_loc, num_seqs + 1, "query_start_loc"),
      int64s(seq_lens, num_seqs, "seq_lens"),
      static_cast<float>(scale),
      static_cast<float>(softcap),
      sliding_window,
      per_head(sinks, num_heads),
      per_head(alibi_slopes, num_heads),
  };
  check_batch(call, query.size(0), k_cache.size(0));
  const Kernels& kernels = kernels_of(static_cast<Isa>(isa));
  const auto cut = std::make_shared<Cut>(call, partition_keys);
  if (partials->size() < cut->all_floats()) partials->resize(cut->all_floats());
  const auto attend = [=, &kernels](int64_t i) {
    const Item& item = cut->plan.items[i];
    kernels.attend(call, item, scratch(kernels.scratch_floats(call, item)), partials->data(),
                   cut->partial_floats);
  };
  const auto merge = [=, &kernels](int64_t i) {
    kernels.merge(call, cut->plan.merges[i], scratch(cut->row_floats), partials->data(),
                  cut->partial_floats);
  };
  return {{static_cast<int64_t>(cut->plan.items.size()), Stage::kQueue, attend},
          {static_cast<int64_t>(cut->plan.merges.size()), Stage::kQueue, merge}};
}

namespace {

void paged_attention(const Tensor& out, const Tensor& query, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& block_table,
                     const Tensor& query_start_loc, const Tensor& seq_lens, double scale,
                     int64_t sliding_window, double softcap, const std::optional<Tensor>& sinks,
                     const std::optional<Tensor>& alibi_slopes, double k_scale, double v_scale,
                     int64_t partition_keys, int64_t isa) {
  const Tensor dense_query = dense(query);
  run_stages(attention(out, dense_query, k_cache, v_cache, block_table, query_start_loc, seq_lens,
                       scale, sliding_window, softcap, sinks, alibi_slopes, k_scale, v_scale,
                       partition_keys, isa, std::make_shared<std::vector<float>>()),
             Twice::kNever);
}

// The items of work, eight numbers each: seq, first head, heads, first token, tokens, first key, end
// key, partial.
std::vector<int64_t> attention_items(const Tensor& query_start_loc, const Tensor& seq_lens,
                                     int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                     int64_t sliding_window, int64_t partition_keys,
                                     int64_t num_threads) {
  TORCH_CHECK(num_threads > 0, "there are no threads");
  Attention call{};
  call.keys.head_dim = call.values.head_dim = head_dim;
  call.num_heads = num_heads;
  call.num_kv_heads = num_kv_heads;
  call.sliding_window = sliding_window;
  call.num_seqs = seq_lens.numel();
  call.query_start_loc = int64s(query_start_loc, call.num_seqs + 1, "query_start_loc");
  call.seq_lens = int64s(seq_lens, call.num_seqs, "seq_lens");
  const Plan plan = plan_attention(call, partition_keys, num_threads);
  std::vector<int64_t> numbers;
  for (const Item& item : plan.items) {
    numbers.insert(numbers.end(), {item.seq, item.first_head, item.num_heads, item.first_token,
                                   item.num_tokens, item.first_key, item.end_key, item.partial});
  }
  return numbers;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor k_cache, Tensor v_cache, "
      "Tensor block_table, Tensor query_start_loc, Tensor seq_lens, float scale, "
      "int sliding_window, float softcap, Tensor? sinks, Tensor? alibi_slopes, float k_scale, "
      "float v_scale, int partition_keys, int isa) -> ()",
      &paged_attention);
  library.def("attention_items", &attention_items);
  library.def("choose_partition_keys", &choose_partition_keys);
  library.def("best_isa", [] { return static_cast<int64_t>(best_isa()); });
}

}  // namespace quire
