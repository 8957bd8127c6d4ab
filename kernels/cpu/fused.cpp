// Chains of elementwise operations on tensors.
#include "fused.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "ops.h"

namespace quire::fused {
namespace {

// Numbers below which a second thread costs more than it brings.
constexpr int64_t kNumbersPerPiece = 1 << 14;

Format format_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Format::kFloat32;
    case at::kHalf: return Format::kFloat16;
    case at::kBFloat16: return Format::kBFloat16;
    default: TORCH_CHECK_NOT_IMPLEMENTED(false, "no kernel for ", tensor.scalar_type());
  }
}

}  // namespace

Stage normed(const Tensor& input, const Tensor& weight, double epsilon, const Tensor& out,
             int64_t isa) {
  const int64_t dim = input.size(-1);
  TORCH_CHECK(weight.scalar_type() == at::kFloat && weight.is_contiguous() &&
                  weight.numel() == dim,
              "the weight must be dense float32, a number per column");
  const Norm call{input.const_data_ptr(),         out.mutable_data_ptr(),
                  format_of(input),               dim,
                  weight.const_data_ptr<float>(), static_cast<float>(epsilon)};
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  return in_parts(input.numel() / dim, std::max<int64_t>(1, kNumbersPerPiece / dim),
                  [=, &functions](int64_t begin, int64_t end) { functions.norm(call, begin, end); });
}

namespace {

Tensor rms_norm(const Tensor& input, const Tensor& weight, double epsilon, int64_t isa) {
  const Tensor source = input.contiguous();
  Tensor out = at::empty_like(source);
  run(normed(source, weight, epsilon, out, isa));
  return out;
}

Tensor gated_activation(const Tensor& gate, const Tensor& up, int64_t activation, int64_t isa) {
  TORCH_CHECK(gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
              "gate and up must be alike");
  const Tensor dense_gate = gate.contiguous(), dense_up = up.contiguous();
  Tensor out = at::empty_like(dense_gate);
  const Gate call{dense_gate.const_data_ptr(), dense_up.const_data_ptr(), out.mutable_data_ptr(),
                  format_of(dense_gate), static_cast<Activation>(activation)};
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  run(in_parts(gate.numel(), kNumbersPerPiece,
               [&](int64_t begin, int64_t end) { functions.gate(call, begin, end); }));
  return out;
}

Tokens tokens_of(const Tensor& states) {
  TORCH_CHECK(states.stride(3) == 1 || states.size(3) == 1, "a head's numbers must be dense");
  return {states.data_ptr(), format_of(states), states.stride(2), states.stride(1)};
}

Stage turning(const Rotation& call, int64_t num_tokens, const Functions& functions) {
  const int64_t token_numbers = std::max<int64_t>(1, call.num_heads * call.dim);
  return in_parts(
      num_tokens, std::max<int64_t>(1, kNumbersPerPiece / token_numbers),
      [=, &functions](int64_t begin, int64_t end) { functions.rotate(call, begin, end); });
}

// `states` [1, num_heads, num_tokens, dim]; the output's tokens lie one after the other.
Tensor rotated(const Tensor& states, const Tensor& cosines, const Tensor& sines,
               const Functions& functions) {
  const int64_t num_heads = states.size(1), num_tokens = states.size(2), dim = states.size(3);
  TORCH_CHECK(states.dim() == 4 && states.size(0) == 1 && dim % 2 == 0 &&
                  cosines.numel() == num_tokens * dim && sines.numel() == num_tokens * dim,
              "states are [1, num_heads, num_tokens, dim], cosines and sines [num_tokens, dim]");
  Tensor out = at::empty({1, num_tokens, num_heads, dim}, states.options()).transpose(1, 2);
  run(turning({tokens_of(states), tokens_of(out), cosines.const_data_ptr(),
               sines.const_data_ptr(), num_heads, dim, nullptr, 0.0f},
              num_tokens, functions));
  return out;
}

std::tuple<Tensor, Tensor> rotate(const Tensor& query, const Tensor& key, const Tensor& cosines,
                                  const Tensor& sines, int64_t isa) {
  TORCH_CHECK(cosines.scalar_type() == query.scalar_type() &&
                  sines.scalar_type() == query.scalar_type() &&
                  key.scalar_type() == query.scalar_type(),
              "states, cosines and sines must be of one dtype");
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  const Tensor dense_cosines = cosines.contiguous(), dense_sines = sines.contiguous();
  return {rotated(query, dense_cosines, dense_sines, functions),
          rotated(key, dense_cosines, dense_sines, functions)};
}

}  // namespace

Stage turned(const Tensor& heads, const Tensor& cosines, const Tensor& sines,
             const std::optional<Tensor>& norms, double epsilon, const Tensor& out, int64_t isa) {
  TORCH_CHECK(heads.dim() == 3 && heads.size(2) % 2 == 0,
              "heads are [num_tokens, num_heads, dim], the last of them even");
  const int64_t num_tokens = heads.size(0), num_heads = heads.size(1), dim = heads.size(2);
  for (const Tensor* table : {&cosines, &sines})
    TORCH_CHECK(table->scalar_type() == heads.scalar_type() && table->is_contiguous() &&
                    table->numel() == num_tokens * dim,
                "cosines and sines must be dense, of the heads' dtype, [num_tokens, dim]");
  TORCH_CHECK(!norms || (norms->scalar_type() == at::kFloat && norms->is_contiguous() &&
                         norms->numel() == num_heads * dim),
              "norms must be dense float32, [num_heads, dim]");
  TORCH_CHECK(heads.stride(2) == 1, "a head's numbers must be dense");
  const auto tokens = [](const Tensor& of) {
    return Tokens{of.mutable_data_ptr(), format_of(of), of.stride(0), of.stride(1)};
  };
  return turning({tokens(heads), tokens(out), cosines.const_data_ptr(), sines.const_data_ptr(),
                  num_heads, dim, norms ? norms->const_data_ptr<float>() : nullptr,
                  static_cast<float>(epsilon)},
                 num_tokens, functions_of(static_cast<Isa>(isa)));
}

namespace {

void turn_heads(const Tensor& heads, const Tensor& cosines, const Tensor& sines,
                const std::optional<Tensor>& norms, double epsilon, int64_t isa) {
  run(turned(heads, cosines, sines, norms, epsilon, heads, isa));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def("rms_norm(Tensor input, Tensor weight, float epsilon, int isa) -> Tensor");
  library.def("gated_activation(Tensor gate, Tensor up, int activation, int isa) -> Tensor");
  library.def(
      "rotate(Tensor query, Tensor key, Tensor cosines, Tensor sines, int isa) "
      "-> (Tensor, Tensor)");
  library.def(
      "turn_heads(Tensor(a!) heads, Tensor cosines, Tensor sines, Tensor? norms, float epsilon, "
      "int isa) -> ()");
}

TORCH_LIBRARY_IMPL(quire, CPU, library) {
  library.impl("rms_norm", rms_norm);
  library.impl("gated_activation", gated_activation);
  library.impl("rotate", rotate);
  library.impl("turn_heads", turn_heads);
}

}  // namespace quire::fused
