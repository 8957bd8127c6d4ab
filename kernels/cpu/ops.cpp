// The operations as torch knows them: `torch.ops.quire`. Checks tensors, describes them to the
// kernels in plain structures, and spreads the work over ATen's threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <vector>

#include "kernels.h"
#include "plan.h"

namespace quire {
namespace {

using at::Tensor;

Format format_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Format::kFloat32;
    case at::kHalf: return Format::kFloat16;
    case at::kBFloat16: return Format::kBFloat16;
    case at::kFloat8_e4m3fn: return Format::kE4M3;
    case at::kFloat8_e5m2: return Format::kE5M2;
    default: TORCH_CHECK_NOT_IMPLEMENTED(false, "no kernel for ", tensor.scalar_type());
  }
}

Tokens tokens_of(const Tensor& tensor) {
  TORCH_CHECK(tensor.dim() == 3 && tensor.is_cpu(), "tokens are [num_tokens, num_heads, dim]");
  TORCH_CHECK(tensor.stride(2) == 1 || tensor.size(2) == 1, "a head's numbers must be dense");
  return {tensor.data_ptr(), format_of(tensor), tensor.stride(0), tensor.stride(1)};
}

Cache cache_of(const Tensor& cache, double scale) {
  TORCH_CHECK(cache.dim() == 4 && cache.is_cpu(),
              "a cache is [num_blocks, block_size, num_kv_heads, head_dim]");
  TORCH_CHECK(cache.stride(3) == 1 || cache.size(3) == 1, "a head's numbers must be dense");
  return {cache.data_ptr(), format_of(cache), cache.stride(0),          cache.stride(1),
          cache.stride(2),  cache.size(3),    static_cast<float>(scale)};
}

const float* per_head(const std::optional<Tensor>& numbers, int64_t num_heads) {
  if (!numbers) return nullptr;
  TORCH_CHECK(numbers->scalar_type() == at::kFloat && numbers->is_contiguous() &&
                  numbers->numel() == num_heads,
              "one dense float32 per query head is needed");
  return numbers->const_data_ptr<float>();
}

const int64_t* int64s(const Tensor& tensor, int64_t count, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kLong && tensor.is_contiguous() && tensor.is_cpu() &&
                  tensor.numel() == count,
              name, " must be ", count, " dense int64 numbers");
  return tensor.const_data_ptr<int64_t>();
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

// Calls `work(i)` for all i below `count`; threads take them in turn.
template <typename Work>
void share_out(int64_t count, const Work& work) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) work(i);
  });
}

void run(const Attention& call, const Plan& plan, const Kernels& kernels) {
  int64_t most_rows = 0;
  for (const Merge& merge : plan.merges) {
    const Item& item = merge.whole;
    most_rows = std::max(most_rows, item.num_heads * item.num_tokens * call.group_size());
  }
  // The widest vectors have 16 numbers; two more are the maximum and the sum.
  const int64_t row_floats = (call.values.head_dim + 15) / 16 * 16 + 2;
  const int64_t partial_floats = most_rows * row_floats;
  std::vector<float> partials(plan.num_partials * partial_floats);
  share_out(static_cast<int64_t>(plan.items.size()), [&](int64_t i) {
    const Item& item = plan.items[i];
    kernels.attend(call, item, scratch(kernels.scratch_floats(call, item)), partials.data(),
                   partial_floats);
  });
  share_out(static_cast<int64_t>(plan.merges.size()), [&](int64_t i) {
    kernels.merge(call, plan.merges[i], scratch(row_floats), partials.data(), partial_floats);
  });
}

void paged_attention(const Tensor& out, const Tensor& query, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& block_table,
                     const Tensor& query_start_loc, const Tensor& seq_lens, double scale,
                     int64_t sliding_window, double softcap, const std::optional<Tensor>& sinks,
                     const std::optional<Tensor>& alibi_slopes, double k_scale, double v_scale,
                     int64_t partition_keys, int64_t isa) {
  const int64_t num_seqs = seq_lens.numel(), num_heads = query.size(1);
  TORCH_CHECK(block_table.dim() == 2 && block_table.size(0) == num_seqs &&
                  block_table.scalar_type() == at::kInt && block_table.is_contiguous(),
              "a block table is dense int32 [num_seqs, max_blocks]");
  TORCH_CHECK(k_cache.scalar_type() == v_cache.scalar_type() &&
                  k_cache.sizes().slice(0, 3) == v_cache.sizes().slice(0, 3),
              "the caches differ in more than their heads' dimensions");
  TORCH_CHECK(num_heads % k_cache.size(2) == 0, "query heads do not divide among key heads");
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
  run(call, plan_attention(call, partition_keys, at::get_num_threads()),
      kernels_of(static_cast<Isa>(isa)));
}

void write_one(const Tensor& source, const Tensor& cache, const Tensor& slot_mapping, double scale,
               const Kernels& kernels) {
  const int64_t num_tokens = source.size(0);
  const Write call{tokens_of(source), cache_of(cache, scale), source.size(1), cache.size(1),
                   int64s(slot_mapping, num_tokens, "slot_mapping")};
  TORCH_CHECK(source.size(1) == cache.size(2) && source.size(2) == cache.size(3),
              "the tokens do not fit the cache");
  const int64_t num_slots = cache.size(0) * cache.size(1);
  for (int64_t token = 0; token < num_tokens; ++token) {
    TORCH_CHECK_INDEX(call.slot_mapping[token] < num_slots, "there is no slot ",
                      call.slot_mapping[token]);
  }
  constexpr int64_t kTokensPerTask = 64;
  at::parallel_for(0, num_tokens, kTokensPerTask,
                   [&](int64_t begin, int64_t end) { kernels.write(call, begin, end); });
}

void kv_write(const Tensor& key, const Tensor& value, const Tensor& k_cache, const Tensor& v_cache,
              const Tensor& slot_mapping, double k_scale, double v_scale, int64_t isa) {
  const Kernels& kernels = kernels_of(static_cast<Isa>(isa));
  write_one(key, k_cache, slot_mapping, k_scale, kernels);
  write_one(value, v_cache, slot_mapping, v_scale, kernels);
}

// Blocks of one tensor on their way into another.
void copy_one(const Tensor& from, const Tensor& to, const int64_t* from_ids, const int64_t* to_ids,
              int64_t count, bool through_copy) {
  const int64_t bytes = from.stride(0) * from.element_size();
  const char* source = static_cast<const char*>(from.const_data_ptr());
  char* destination = static_cast<char*>(to.data_ptr());
  std::vector<char> copies;
  if (through_copy) {
    copies.resize(count * bytes);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(copies.data() + i * bytes, source + from_ids[i] * bytes, bytes);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const char* block = through_copy ? copies.data() + i * bytes : source + from_ids[i] * bytes;
    std::memcpy(destination + to_ids[i] * bytes, block, bytes);
  }
}

bool any_in_both(const int64_t* a, const int64_t* b, int64_t count) {
  std::vector<int64_t> sorted(a, a + count);
  std::sort(sorted.begin(), sorted.end());
  return std::any_of(b, b + count, [&](int64_t id) {
    return std::binary_search(sorted.begin(), sorted.end(), id);
  });
}

void check_ids(const int64_t* ids, int64_t count, int64_t num_blocks) {
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(ids[i] >= 0 && ids[i] < num_blocks, "there is no block ", ids[i]);
  }
}

void copy_blocks(at::TensorList sources, at::TensorList destinations, const Tensor& source_ids,
                 const Tensor& destination_ids) {
  const int64_t count = source_ids.numel();
  const int64_t* from_ids = int64s(source_ids, count, "source_ids");
  const int64_t* to_ids = int64s(destination_ids, count, "destination_ids");
  TORCH_CHECK(sources.size() == destinations.size(), "as many sources as destinations are needed");
  for (size_t i = 0; i < sources.size(); ++i) {
    const Tensor &from = sources[i], &to = destinations[i];
    TORCH_CHECK(from.is_contiguous() && to.is_contiguous() && from.is_cpu() && to.is_cpu() &&
                    from.scalar_type() == to.scalar_type() &&
                    from.sizes().slice(1) == to.sizes().slice(1),
                "a source and its destination are not alike");
    check_ids(from_ids, count, from.size(0));
    check_ids(to_ids, count, to.size(0));
  }
  const bool overlapping = any_in_both(from_ids, to_ids, count);
  share_out(static_cast<int64_t>(sources.size()), [&](int64_t i) {
    const bool same = sources[i].const_data_ptr() == destinations[i].const_data_ptr();
    copy_one(sources[i], destinations[i], from_ids, to_ids, count, same && overlapping);
  });
}

// The items of work, eight numbers each: seq, first head, heads, first token, tokens, first key, end key,
// partial.
std::vector<int64_t> attention_items(const Tensor& query_start_loc, const Tensor& seq_lens,
                                     int64_t num_heads, int64_t num_kv_heads,
                                     int64_t sliding_window, int64_t partition_keys,
                                     int64_t num_threads) {
  Attention call{};
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

TORCH_LIBRARY_FRAGMENT(quire, m) {
  m.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor k_cache, Tensor v_cache, "
      "Tensor block_table, Tensor query_start_loc, Tensor seq_lens, float scale, "
      "int sliding_window, float softcap, Tensor? sinks, Tensor? alibi_slopes, float k_scale, "
      "float v_scale, int partition_keys, int isa) -> ()");
  m.def(
      "kv_write(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor slot_mapping, float k_scale, float v_scale, int isa) -> ()");
  m.def(
      "copy_blocks(Tensor[] sources, Tensor(a!)[] destinations, Tensor source_ids, "
      "Tensor destination_ids) -> ()");
  m.def("attention_items", attention_items);
  m.def("best_isa", []() { return static_cast<int64_t>(best_isa()); });
}

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("paged_attention", paged_attention);
  m.impl("kv_write", kv_write);
  m.impl("copy_blocks", copy_blocks);
}

}  // namespace quire
