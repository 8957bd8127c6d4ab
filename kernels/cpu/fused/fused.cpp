// Fused elementwise operations on tensors.
#include "fused/fused.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "ops.h"
#include "tensors.h"

namespace quire::fused {
namespace {

// With fewer numbers, a second thread costs more than it gains.
constexpr int64_t kNumbersPerChunk = 1 << 14;

void check_wide(const Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_wide(tensor), "no kernel for ", tensor.scalar_type());
}

}  // namespace

Stage norm_stage(const Tensor& input, const Tensor& weight, double epsilon, const Tensor& out,
                 int64_t isa) {
  const int64_t dim = input.size(-1);
  check_wide(input);
  TORCH_CHECK(weight.scalar_type() == at::kFloat && weight.is_contiguous() &&
                  weight.numel() == dim,
              "the weight must be dense float32, a number per column");
  const Norm call{input.const_data_ptr(),         out.mutable_data_ptr(),
                  format_of(input),               dim,
                  weight.const_data_ptr<float>(), static_cast<float>(epsilon)};
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  return range_stage(input.numel() / dim, std::max<int64_t>(1, kNumbersPerChunk / dim),
                     [=, &functions](int64_t begin, int64_t end) { functions.norm(call, begin, end); });
}

namespace {

Tensor rms_norm(const Tensor& input, const Tensor& weight, double epsilon, int64_t isa) {
  const Tensor source = input.contiguous();
  Tensor out = at::empty_like(source);
  run(norm_stage(source, weight, epsilon, out, isa));
  return out;
}

Tensor gated_activation(const Tensor& gate, const Tensor& up, int64_t activation, int64_t isa) {
  TORCH_CHECK(gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
              "gate and up must be alike");
  check_wide(gate);
  const Tensor dense_gate = gate.contiguous(), dense_up = up.contiguous();
  Tensor out = at::empty_like(dense_gate);
  const Gate call{dense_gate.const_data_ptr(), dense_up.const_data_ptr(), out.mutable_data_ptr(),
                  format_of(dense_gate), static_cast<Activation>(activation)};
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  run(range_stage(gate.numel(), kNumbersPerChunk,
                  [&](int64_t begin, int64_t end) { functions.gate(call, begin, end); }));
  return out;
}

}  // namespace

Stage rope_stage(const Tensor& heads, const Tensor& cosines, const Tensor& sines,
                 const std::optional<Tensor>& norms, double epsilon, const Tensor& out, int64_t isa) {
  TORCH_CHECK(heads.dim() == 3 && heads.size(2) % 2 == 0,
              "heads are [num_tokens, num_heads, dim], the last of them even");
  check_wide(heads);
  const int64_t num_tokens = heads.size(0), num_heads = heads.size(1), dim = heads.size(2);
  for (const Tensor* table : {&cosines, &sines})
    TORCH_CHECK(table->scalar_type() == heads.scalar_type() && table->is_contiguous() &&
                    table->numel() == num_tokens * dim,
                "cosines and sines must be dense, of the heads' dtype, [num_tokens, dim]");
  TORCH_CHECK(!norms || (norms->scalar_type() == at::kFloat && norms->is_contiguous() &&
                         norms->numel() == num_heads * dim),
              "norms must be dense float32, [num_heads, dim]");
  const Rope call{heads_view(heads), heads_view(out), cosines.const_data_ptr(),
                  sines.const_data_ptr(), num_heads, dim,
                  norms ? norms->const_data_ptr<float>() : nullptr, static_cast<float>(epsilon)};
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  return range_stage(
      num_tokens, std::max<int64_t>(1, kNumbersPerChunk / std::max<int64_t>(1, num_heads * dim)),
      [=, &functions](int64_t begin, int64_t end) { functions.rope(call, begin, end); });
}

Stage widen_stage(const Tensor& input, const Tensor& out, int64_t isa) {
  check_wide(input);
  TORCH_CHECK(input.is_contiguous() && out.dim() == 2 && out.stride(1) == 1 &&
                  out.sizes() == input.sizes(),
              "the output must have dense rows, and the input's size");
  const char* const from = static_cast<const char*>(input.const_data_ptr());
  float* const to = out.mutable_data_ptr<float>();
  const int64_t dim = out.size(1), stride = out.stride(0), row_bytes = dim * input.element_size();
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  if (out.is_contiguous()) {
    const Widen call{from, to, format_of(input)};
    return range_stage(
        input.numel(), kNumbersPerChunk,
        [=, &functions](int64_t begin, int64_t end) { functions.widen(call, begin, end); });
  }
  return range_stage(out.size(0), std::max<int64_t>(1, kNumbersPerChunk / std::max<int64_t>(1, dim)),
                     [=, format = format_of(input), &functions](int64_t begin, int64_t end) {
                       for (int64_t row = begin; row < end; ++row)
                         functions.widen({from + row * row_bytes, to + row * stride, format}, 0, dim);
                     });
}

Stage sum_stage(std::vector<const void*> parts, const Tensor& out, int64_t isa) {
  check_wide(out);
  TORCH_CHECK(out.is_contiguous() && !parts.empty(), "the output must be dense");
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  return range_stage(out.numel(), kNumbersPerChunk,
                     [parts = std::move(parts), to = out.mutable_data_ptr(), format = format_of(out),
                      &functions](int64_t begin, int64_t end) {
                       const Sum call{parts.data(), static_cast<int64_t>(parts.size()), to, format};
                       functions.sum(call, begin, end);
                     });
}

namespace {

// `states` [1, num_heads, num_tokens, dim]; the output is dense by token.
Tensor apply_rope(const Tensor& states, const Tensor& cosines, const Tensor& sines, int64_t isa) {
  TORCH_CHECK(states.dim() == 4 && states.size(0) == 1,
              "states are [1, num_heads, num_tokens, dim]");
  const Tensor heads = states.select(0, 0).transpose(0, 1);
  const Tensor out = at::empty(heads.sizes(), heads.options());
  run(rope_stage(heads, cosines, sines, std::nullopt, 0.0, out, isa));
  return out.transpose(0, 1).unsqueeze(0);
}

std::tuple<Tensor, Tensor> rope(const Tensor& query, const Tensor& key, const Tensor& cosines,
                                const Tensor& sines, int64_t isa) {
  const Tensor dense_cosines = cosines.contiguous(), dense_sines = sines.contiguous();
  return {apply_rope(query, dense_cosines, dense_sines, isa),
          apply_rope(key, dense_cosines, dense_sines, isa)};
}

void qk_norm_rope(const Tensor& heads, const Tensor& cosines, const Tensor& sines,
                  const std::optional<Tensor>& norms, double epsilon, int64_t isa) {
  run(rope_stage(heads, cosines, sines, norms, epsilon, heads, isa));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def("rms_norm(Tensor input, Tensor weight, float epsilon, int isa) -> Tensor");
  library.def("gated_activation(Tensor gate, Tensor up, int activation, int isa) -> Tensor");
  library.def(
      "rope(Tensor query, Tensor key, Tensor cosines, Tensor sines, int isa) "
      "-> (Tensor, Tensor)");
  library.def(
      "qk_norm_rope(Tensor(a!) heads, Tensor cosines, Tensor sines, Tensor? norms, float epsilon, "
      "int isa) -> ()");
}

TORCH_LIBRARY_IMPL(quire, CPU, library) {
  library.impl("rms_norm", rms_norm);
  library.impl("gated_activation", gated_activation);
  library.impl("rope", rope);
  library.impl("qk_norm_rope", qk_norm_rope);
}

}  // namespace quire::fused
