// `torch.ops.quire.kv_write` and `torch.ops.quire.copy_blocks`.
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "attention/attention.h"
#include "ops.h"
#include "tensors.h"

namespace quire::attention {
namespace {

// `source` is dense in its last dimension.
KvWrite write_of(const Tensor& source, const Tensor& cache, const Tensor& slot_mapping,
                 double scale) {
  const int64_t num_tokens = source.size(0);
  const KvWrite call{heads_view(source), cache_of(cache, scale), source.size(1), cache.size(1),
                   int64s(slot_mapping, num_tokens, "slot_mapping")};
  TORCH_CHECK(source.size(1) == cache.size(2) && source.size(2) == cache.size(3),
              "the tokens do not fit the cache");
  const int64_t num_slots = cache.size(0) * cache.size(1);
  for (int64_t token = 0; token < num_tokens; ++token) {
    TORCH_CHECK_INDEX(call.slot_mapping[token] < num_slots, "there is no slot ",
                      call.slot_mapping[token]);
  }
  return call;
}

}  // namespace

Stage kv_write_stage(const Tensor& keys, const Tensor& values, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& slot_mapping, double k_scale, double v_scale,
                     int64_t isa) {
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  const std::array<KvWrite, 2> writes = {write_of(keys, k_cache, slot_mapping, k_scale),
                                       write_of(values, v_cache, slot_mapping, v_scale)};
  // Small chunks: memory is the bottleneck, and two threads draw more bandwidth than one.
  constexpr int64_t kTokensPerChunk = 16;
  return range_stage(keys.size(0), kTokensPerChunk, [=, &functions](int64_t begin, int64_t end) {
    for (const KvWrite& write : writes) functions.write(write, begin, end);
  });
}

namespace {

void kv_write(const Tensor& key, const Tensor& value, const Tensor& k_cache, const Tensor& v_cache,
              const Tensor& slot_mapping, double k_scale, double v_scale, int64_t isa) {
  const Tensor keys = dense(key), values = dense(value);
  run(kv_write_stage(keys, values, k_cache, v_cache, slot_mapping, k_scale, v_scale, isa));
}

// Copies blocks of one tensor into another. `through_copy` reads all before it writes.
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
  const auto copy = [&](int64_t i) {
    const bool same = sources[i].const_data_ptr() == destinations[i].const_data_ptr();
    copy_one(sources[i], destinations[i], from_ids, to_ids, count, same && overlapping);
  };
  run({static_cast<int64_t>(sources.size()), Stage::kQueue, copy});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def(
      "kv_write(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor slot_mapping, float k_scale, float v_scale, int isa) -> ()",
      &kv_write);
  library.def(
      "copy_blocks(Tensor[] sources, Tensor(a!)[] destinations, Tensor source_ids, "
      "Tensor destination_ids) -> ()",
      &copy_blocks);
}

}  // namespace quire::attention
