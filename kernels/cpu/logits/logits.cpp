// `torch.ops.quire.apply_bitmask`, `apply_penalties` and `apply_typical_p`.
#include "logits/logits.h"

#include <torch/library.h>

#include "tensors.h"
#include "threading/stages.h"

namespace quire::logits {
namespace {

// A multiple of the bits of a mask's word.
constexpr int64_t kTokensPerChunk = 1 << 14;

void check_logits(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.is_cpu(),
              "logits must be float32 [num_lines, vocab_size] on the CPU");
  TORCH_CHECK(logits.stride(1) == 1 || logits.size(1) == 1, "a line of logits must be dense");
}

void check_ids(const int64_t* ids, int64_t count, int64_t end, const char* name) {
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK_INDEX(ids[i] >= 0 && ids[i] < end, name, " has ", ids[i], " of ", end);
}

// Calls `work(i, first, size)` for pieces of each of `count` lines, in parallel.
template <typename Work>
void for_pieces(int64_t count, int64_t vocab_size, Work work) {
  if (vocab_size == 0) return;
  const int64_t pieces = ceil_div(vocab_size, kTokensPerChunk);
  // Short lines share a chunk: a thread for each would cost more than it gains.
  const int64_t per_chunk = std::max<int64_t>(1, kTokensPerChunk / vocab_size);
  run(range_stage(count * pieces, per_chunk, [=](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t first = piece % pieces * kTokensPerChunk;
      work(piece / pieces, first, std::min(kTokensPerChunk, vocab_size - first));
    }
  }));
}

void apply_bitmask(const Tensor& logits, const Tensor& bitmask, const Tensor& lines, int64_t isa) {
  check_logits(logits);
  const int64_t count = lines.numel(), vocab_size = logits.size(1);
  const int64_t* places = int64s(lines, count, "lines");
  check_ids(places, count, logits.size(0), "lines");
  TORCH_CHECK(bitmask.dim() == 2 && bitmask.scalar_type() == at::kInt && bitmask.is_cpu() &&
                  bitmask.size(0) == count && bitmask.size(1) == ceil_div(vocab_size, 32) &&
                  bitmask.is_contiguous(),
              "bitmask must be contiguous int32 [", count, ", ", ceil_div(vocab_size, 32), "]");
  float* data = logits.mutable_data_ptr<float>();
  const int32_t* words = bitmask.const_data_ptr<int32_t>();
  const int64_t stride = logits.stride(0), width = bitmask.size(1);
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  for_pieces(count, vocab_size, [=, &functions](int64_t i, int64_t first, int64_t size) {
    functions.mask(data + places[i] * stride + first, words + i * width + first / 32, size);
  });
}

void apply_penalties(const Tensor& logits, const Tensor& counts, const Tensor& lines,
                     const Tensor& slots, const Tensor& penalties, int64_t isa) {
  check_logits(logits);
  const int64_t count = lines.numel(), vocab_size = logits.size(1);
  const int64_t* places = int64s(lines, count, "lines");
  const int64_t* tables = int64s(slots, count, "slots");
  check_ids(places, count, logits.size(0), "lines");
  check_ids(tables, count, counts.size(0), "slots");
  TORCH_CHECK(counts.dim() == 2 && counts.scalar_type() == at::kInt && counts.is_cpu() &&
                  counts.size(1) == vocab_size && counts.is_contiguous(),
              "counts must be contiguous int32 [num_slots, ", vocab_size, "]");
  TORCH_CHECK(penalties.dim() == 2 && penalties.scalar_type() == at::kFloat &&
                  penalties.is_cpu() && penalties.size(0) == counts.size(0) &&
                  penalties.size(1) == 3 && penalties.is_contiguous(),
              "penalties must be contiguous float32 [", counts.size(0), ", 3]");
  float* data = logits.mutable_data_ptr<float>();
  const int32_t* table = counts.const_data_ptr<int32_t>();
  const float* values = penalties.const_data_ptr<float>();
  const int64_t stride = logits.stride(0);
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  for_pieces(count, vocab_size, [=, &functions](int64_t i, int64_t first, int64_t size) {
    const float* of_slot = values + 3 * tables[i];
    functions.penalize(data + places[i] * stride + first, table + tables[i] * vocab_size + first,
                       size, {of_slot[0], of_slot[1], of_slot[2]});
  });
}

const float* floats(const Tensor& tensor, int64_t count, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.is_cpu() &&
                  tensor.numel() == count,
              name, " must be ", count, " dense float32 numbers");
  return tensor.const_data_ptr<float>();
}

void apply_typical_p(const Tensor& logits, const Tensor& lines, const Tensor& temperatures,
                     const Tensor& typical_ps, int64_t isa) {
  check_logits(logits);
  const int64_t count = lines.numel(), vocab_size = logits.size(1);
  const int64_t* places = int64s(lines, count, "lines");
  check_ids(places, count, logits.size(0), "lines");
  const float* of_temperature = floats(temperatures, count, "temperatures");
  const float* of_typical = floats(typical_ps, count, "typical_ps");
  float* data = logits.mutable_data_ptr<float>();
  const int64_t stride = logits.stride(0);
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  run(range_stage(count, 1, [=, &functions](int64_t begin, int64_t end) {
    std::vector<TypicalToken> scratch;
    for (int64_t i = begin; i < end; ++i)
      functions.keep_typical(data + places[i] * stride, vocab_size, of_temperature[i],
                             of_typical[i], scratch);
  }));
}

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def("apply_bitmask(Tensor(a!) logits, Tensor bitmask, Tensor lines, int isa) -> ()",
              &apply_bitmask);
  library.def(
      "apply_penalties(Tensor(a!) logits, Tensor counts, Tensor lines, Tensor slots, "
      "Tensor penalties, int isa) -> ()",
      &apply_penalties);
  library.def(
      "apply_typical_p(Tensor(a!) logits, Tensor lines, Tensor temperatures, Tensor typical_ps, "
      "int isa) -> ()",
      &apply_typical_p);
}

}  // namespace
}  // namespace quire::logits
