// Sampling on tensors.
#include "sampling/sampling.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "threading/stages.h"

namespace quire::sampling {
namespace {

using at::Tensor;

// Short rows share a chunk: a thread for each would cost more than it gains.
constexpr int64_t kTokensPerChunk = 1 << 15;

int64_t rows_per_chunk(int64_t vocab_size) {
  return std::max<int64_t>(1, kTokensPerChunk / std::max<int64_t>(1, vocab_size));
}

void check_logits(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.is_cpu(),
              "logits must be float32 [num_rows, vocab_size] on the CPU");
  TORCH_CHECK(logits.size(1) > 0 && (logits.stride(1) == 1 || logits.size(1) == 1),
              "a row of logits must be dense, and not empty");
}

void check_column(const Tensor& column, const char* name, at::ScalarType dtype, int64_t size) {
  TORCH_CHECK(column.dim() == 1 && column.size(0) == size && column.scalar_type() == dtype &&
                  column.is_contiguous() && column.is_cpu(),
              name, " must be contiguous ", dtype, " [", size, "] on the CPU");
}

Tensor sample(const Tensor& logits, const Tensor& temperatures, const Tensor& top_ks,
              const Tensor& top_ps, const Tensor& min_ps, const Tensor& seeds,
              const Tensor& positions, int64_t isa) {
  check_logits(logits);
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  check_column(temperatures, "temperatures", at::kFloat, num_rows);
  check_column(top_ks, "top_ks", at::kLong, num_rows);
  check_column(top_ps, "top_ps", at::kFloat, num_rows);
  check_column(min_ps, "min_ps", at::kFloat, num_rows);
  check_column(seeds, "seeds", at::kLong, num_rows);
  check_column(positions, "positions", at::kLong, num_rows);
  Tensor token_ids = at::empty({num_rows}, seeds.options());
  const float* data = logits.const_data_ptr<float>();
  const int64_t stride = logits.stride(0);
  int64_t* tokens = token_ids.mutable_data_ptr<int64_t>();
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  run(range_stage(num_rows, rows_per_chunk(vocab_size), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    for (int64_t row = begin; row < end; ++row) {
      const RowParams params{
          temperatures.const_data_ptr<float>()[row],
          top_ks.const_data_ptr<int64_t>()[row],
          top_ps.const_data_ptr<float>()[row],
          min_ps.const_data_ptr<float>()[row],
          static_cast<uint64_t>(seeds.const_data_ptr<int64_t>()[row]),
          static_cast<uint32_t>(positions.const_data_ptr<int64_t>()[row]),
      };
      tokens[row] = functions.sample(data + row * stride, vocab_size, params, scratch);
    }
  }));
  return token_ids;
}

std::tuple<Tensor, Tensor, Tensor> token_logprobs(const Tensor& logits, const Tensor& token_ids,
                                                  int64_t num_top, int64_t isa) {
  check_logits(logits);
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1), width = 1 + num_top;
  check_column(token_ids, "token_ids", at::kLong, num_rows);
  TORCH_CHECK(num_top >= 0 && num_top <= vocab_size, "num_top must be 0 to the vocabulary's size");
  Tensor ids = at::empty({num_rows, width}, token_ids.options());
  Tensor logprobs = at::empty({num_rows, width}, logits.options());
  Tensor ranks = at::empty({num_rows, width}, token_ids.options());
  const float* data = logits.const_data_ptr<float>();
  const int64_t stride = logits.stride(0);
  const int64_t* chosen = token_ids.const_data_ptr<int64_t>();
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  for (int64_t row = 0; row < num_rows; ++row)
    TORCH_CHECK(chosen[row] >= 0 && chosen[row] < vocab_size, "no such token: ", chosen[row]);
  run(range_stage(num_rows, rows_per_chunk(vocab_size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      functions.logprobs(data + row * stride, vocab_size, chosen[row], num_top,
                         ids.mutable_data_ptr<int64_t>() + row * width,
                         logprobs.mutable_data_ptr<float>() + row * width,
                         ranks.mutable_data_ptr<int64_t>() + row * width);
  }));
  return {ids, logprobs, ranks};
}

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def(
      "sample(Tensor logits, Tensor temperatures, Tensor top_ks, Tensor top_ps, Tensor min_ps, "
      "Tensor seeds, Tensor positions, int isa) -> Tensor",
      &sample);
  library.def(
      "token_logprobs(Tensor logits, Tensor token_ids, int num_top, int isa) "
      "-> (Tensor, Tensor, Tensor)",
      &token_logprobs);
}

}  // namespace
}  // namespace quire::sampling
