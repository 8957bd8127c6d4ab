// `torch.ops.quire.paged_attention`: checks tensors, and executes the batch as work items.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <vector>

#include "attention/work_list.h"
#include "ops.h"
#include "tensors.h"

namespace quire::attention {
namespace {

const float* per_head(const std::optional<Tensor>& numbers, int64_t num_heads) {
  if (!numbers) return nullptr;
  TORCH_CHECK(numbers->scalar_type() == at::kFloat && numbers->is_contiguous() &&
                  numbers->numel() == num_heads,
              "one dense float32 per query head is needed");
  return numbers->const_data_ptr<float>();
}

// Checks ids, as the functions do not: an id beyond the cache would access foreign memory.
void check_batch(const AttentionCall& call, int64_t num_tokens, int64_t num_blocks) {
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

// Scratch memory of this thread, aligned to a cache line; kept for the next call.
float* scratch(int64_t num_floats) {
  constexpr int64_t kLineFloats = 16;
  thread_local std::vector<float> memory;
  const auto needed = static_cast<size_t>(num_floats + kLineFloats);
  if (memory.size() < needed) memory.resize(needed);
  const auto address = reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float);
  return memory.data() + (kLineFloats - address % kLineFloats) % kLineFloats;
}

}  // namespace

std::vector<Stage> stages(const Tensor& out, const Tensor& query, const Tensor& k_cache,
                          const Tensor& v_cache, const Tensor& block_table,
                          const Tensor& query_start_loc, const Tensor& seq_lens, double scale,
                          int64_t sliding_window, double softcap,
                          const std::optional<Tensor>& sinks, double k_scale, double v_scale,
                          int64_t partition_keys, int64_t isa, const Partials& partials) {
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
  const AttentionCall call{
      heads_view(query),
      heads_view(out),
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
  };
  check_batch(call, query.size(0), k_cache.size(0));
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  const auto list = std::make_shared<WorkList>(
      make_work_list(call, partition_keys, at::get_num_threads()));
  partials->reserve(list->num_floats);
  const auto attend = [=, &functions](int64_t i) {
    const WorkItem& item = list->items[i];
    functions.attend(call, item, scratch(functions.scratch_floats(call, item)), partials->data());
  };
  const auto merge = [=, &functions](int64_t i) {
    functions.merge(call, list->merges[i], scratch(list->row_floats), partials->data());
  };
  return {{static_cast<int64_t>(list->items.size()), Stage::kQueue, attend},
          {static_cast<int64_t>(list->merges.size()), Stage::kQueue, merge}};
}

namespace {

void paged_attention(const Tensor& out, const Tensor& query, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& block_table,
                     const Tensor& query_start_loc, const Tensor& seq_lens, double scale,
                     int64_t sliding_window, double softcap, const std::optional<Tensor>& sinks,
                     double k_scale, double v_scale, int64_t partition_keys, int64_t isa) {
  const Tensor dense_query = dense(query);
  run_stages(stages(out, dense_query, k_cache, v_cache, block_table, query_start_loc, seq_lens,
                    scale, sliding_window, softcap, sinks, k_scale, v_scale, partition_keys, isa,
                    std::make_shared<PartialMemory>()),
             Backup::kNever);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor k_cache, Tensor v_cache, "
      "Tensor block_table, Tensor query_start_loc, Tensor seq_lens, float scale, "
      "int sliding_window, float softcap, Tensor? sinks, float k_scale, float v_scale, "
      "int partition_keys, int isa) -> ()",
      &paged_attention);
  library.def("best_isa", [] { return static_cast<int64_t>(best_isa()); });
}

}  // namespace quire::attention
