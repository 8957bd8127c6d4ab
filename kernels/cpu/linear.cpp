// Products with packed weights on tensors.
#include "linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "ops.h"
#include "tensors.h"

namespace quire::linear {
namespace {

// A piece's rows are to stay in the second-level cache while all panels pass by.
constexpr int64_t kPieceBytes = 192 << 10;
// Threads take pieces in turn: one that was held up leaves the others more of them.
constexpr int64_t kPiecesPerThread = 16;
// Rows are widened by whole vectors.
constexpr int64_t kMostLanes = 16;

bool is_weight(const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

int64_t panel_width(int64_t isa) { return functions_of(static_cast<Isa>(isa)).panel_width; }

// How a product is cut: rows first, so that pieces that follow each other share them.
struct Cut {
  int64_t piece_rows, piece_panels;
  int64_t num_row_pieces, num_panel_pieces;

  Cut(const Product& product, const Functions& functions) {
    const int64_t tile = functions.tile_rows;
    const int64_t fitting = kPieceBytes / 4 / std::max<int64_t>(1, product.num_inputs);
    piece_rows = std::max(fitting / tile * tile, 2 * tile);
    num_row_pieces = (product.num_rows + piece_rows - 1) / piece_rows;
    // Equally large ones.
    piece_rows = (product.num_rows + num_row_pieces - 1) / num_row_pieces;
    piece_rows = (piece_rows + tile - 1) / tile * tile;
    num_row_pieces = (product.num_rows + piece_rows - 1) / piece_rows;
    const int64_t width = functions.panel_width;
    const int64_t num_panels = (product.num_outputs + width - 1) / width;
    const int64_t wanted = kPiecesPerThread * at::get_num_threads();
    piece_panels = std::max<int64_t>(1, num_panels * num_row_pieces / wanted);
    num_panel_pieces = (num_panels + piece_panels - 1) / piece_panels;
  }

  Piece piece(int64_t index, const Product& product, int64_t num_panels) const {
    const int64_t first_row = index / num_panel_pieces * piece_rows;
    const int64_t first_panel = index % num_panel_pieces * piece_panels;
    return {first_row, std::min(first_row + piece_rows, product.num_rows), first_panel,
            std::min(first_panel + piece_panels, num_panels)};
  }
};

Stage multiply(const Product& product, const Functions& functions, int64_t num_panels) {
  const Cut cut(product, functions);
  const auto work = [product, cut, num_panels, &functions](int64_t index) {
    thread_local std::vector<float> scratch;
    if (product.format != Format::kFloat32)
      scratch.resize(cut.piece_rows * product.num_inputs + kMostLanes);
    functions.multiply(product, cut.piece(index, product, num_panels), scratch.data());
  };
  return {cut.num_row_pieces * cut.num_panel_pieces, Stage::kRuns, work};
}

void check_weight(const Tensor& panels, const std::optional<Tensor>& bias, int64_t num_inputs,
                  int64_t num_outputs, int64_t width) {
  TORCH_CHECK(panels.dim() == 3 && panels.is_contiguous() && is_weight(panels) &&
                  panels.size(0) == (num_outputs + width - 1) / width && panels.size(1) == num_inputs &&
                  panels.size(2) == width,
              "panels must be [ceil(num_outputs / ", width, "), ", num_inputs, ", ", width, "]");
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->is_contiguous() &&
                        bias->numel() == num_outputs),
              "the bias must be dense float32, a number per output");
}

const float* floats(const std::optional<Tensor>& bias) {
  return bias ? bias->const_data_ptr<float>() : nullptr;
}

}  // namespace

Stage product(const Tensor& input, const Tensor& panels, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& second_panels, const std::optional<Tensor>& second_bias,
              int64_t activation, const std::optional<Tensor>& residual, const Tensor& out,
              int64_t isa) {
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  const int64_t num_inputs = input.size(1), num_outputs = out.size(-1);
  TORCH_CHECK(is_weight(input), "no kernel for ", input.scalar_type());
  check_weight(panels, bias, num_inputs, num_outputs, functions.panel_width);
  if (second_panels) {
    check_weight(*second_panels, second_bias, num_inputs, num_outputs, functions.panel_width);
    TORCH_CHECK(second_panels->scalar_type() == panels.scalar_type(), "weights must be alike");
  }
  TORCH_CHECK(out.scalar_type() == input.scalar_type() && out.is_contiguous() &&
                  out.numel() == input.size(0) * num_outputs,
              "outputs must be dense, and of the inputs' dtype");
  TORCH_CHECK(!residual || (residual->sizes() == out.sizes() && residual->is_contiguous() &&
                            residual->scalar_type() == out.scalar_type()),
              "what is added must be dense, and like the outputs");
  if (!out.numel()) return {};
  const Product product{input.const_data_ptr(),
                        format_of(input),
                        input.stride(0),
                        input.size(0),
                        num_inputs,
                        num_outputs,
                        panels.const_data_ptr(),
                        format_of(panels),
                        floats(bias),
                        second_panels ? second_panels->const_data_ptr() : nullptr,
                        floats(second_bias),
                        static_cast<Activation>(activation),
                        residual ? residual->const_data_ptr() : nullptr,
                        out.mutable_data_ptr()};
  return multiply(product, functions, panels.size(0));
}

namespace {

Tensor linear(const Tensor& input, const Tensor& panels, int64_t num_outputs,
              const std::optional<Tensor>& bias, const std::optional<Tensor>& second_panels,
              const std::optional<Tensor>& second_bias, int64_t activation,
              const std::optional<Tensor>& residual, int64_t isa) {
  const Tensor rows = dense(input.reshape({-1, input.size(-1)}));
  auto shape = input.sizes().vec();
  shape.back() = num_outputs;
  Tensor out = at::empty(shape, input.options());
  run(product(rows, panels, bias, second_panels, second_bias, activation, residual, out, isa));
  return out;
}

// A row's numbers, of which panels have one per input.
template <typename Number>
void look_up(const Number* panels, int64_t width, int64_t row, Number* out, int64_t num_inputs) {
  const Number* column = panels + row / width * num_inputs * width + row % width;
  for (int64_t k = 0; k < num_inputs; ++k) out[k] = column[k * width];
}

template <typename Number>
Stage look_up_all(const Tensor& panels, const int64_t* rows, const Tensor& out) {
  const auto* from = static_cast<const Number*>(panels.const_data_ptr());
  auto* to = static_cast<Number*>(out.mutable_data_ptr());
  const int64_t num_inputs = panels.size(1), width = panels.size(2);
  constexpr int64_t kRowsPerPiece = 4;
  return in_parts(out.size(0), kRowsPerPiece, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      look_up(from, width, rows[i], to + i * num_inputs, num_inputs);
  });
}

}  // namespace

Stage looked_up(const Tensor& panels, int64_t num_outputs, const Tensor& rows, const Tensor& out) {
  TORCH_CHECK(panels.dim() == 3 && panels.is_contiguous() && is_weight(panels) &&
                  num_outputs <= panels.size(0) * panels.size(2),
              "panels must be dense, and have all rows");
  TORCH_CHECK(out.dim() == 2 && out.size(1) == panels.size(1) && out.is_contiguous() &&
                  out.scalar_type() == panels.scalar_type(),
              "rows go where there are as many numbers of their dtype");
  const int64_t* numbers = int64s(rows, out.size(0), "rows");
  for (int64_t i = 0; i < out.size(0); ++i) {
    TORCH_CHECK_INDEX(numbers[i] >= 0 && numbers[i] < num_outputs, "there is no row ", numbers[i]);
  }
  return panels.element_size() == sizeof(uint32_t) ? look_up_all<uint32_t>(panels, numbers, out)
                                                   : look_up_all<uint16_t>(panels, numbers, out);
}

namespace {

Tensor panel_rows(const Tensor& panels, int64_t num_outputs, const Tensor& rows) {
  Tensor out = at::empty({rows.numel(), panels.size(1)}, panels.options());
  run(looked_up(panels, num_outputs, rows, out));
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def("panel_width(int isa) -> int", panel_width);
  library.def(
      "linear(Tensor input, Tensor panels, int num_outputs, Tensor? bias, Tensor? second_panels, "
      "Tensor? second_bias, int activation, Tensor? residual, int isa) -> Tensor");
  library.def("panel_rows(Tensor panels, int num_outputs, Tensor rows) -> Tensor");
}

TORCH_LIBRARY_IMPL(quire, CPU, library) {
  library.impl("linear", linear);
  library.impl("panel_rows", panel_rows);
}

}  // namespace quire::linear
