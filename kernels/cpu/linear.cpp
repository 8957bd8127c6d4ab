// Products with packed weights on tensors, on ATen's threads.
#include "linear.h"

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
constexpr int64_t kPiecesPerThread = 8;
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

void multiply(const Product& product, const Functions& functions, int64_t num_panels) {
  const Cut cut(product, functions);
  const int64_t count = cut.num_row_pieces * cut.num_panel_pieces;
  const bool widens = product.format != Format::kFloat32;
  share_out_runs(count, [&](int64_t index) {
    thread_local std::vector<float> scratch;
    if (widens) scratch.resize(cut.piece_rows * product.num_inputs + kMostLanes);
    functions.multiply(product, cut.piece(index, product, num_panels), scratch.data());
  });
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

Tensor linear(const Tensor& input, const Tensor& panels, int64_t num_outputs,
              const std::optional<Tensor>& bias, const std::optional<Tensor>& second_panels,
              const std::optional<Tensor>& second_bias, int64_t activation,
              const std::optional<Tensor>& residual, int64_t isa) {
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  const int64_t num_inputs = input.size(-1);
  TORCH_CHECK(is_weight(input), "no kernel for ", input.scalar_type());
  check_weight(panels, bias, num_inputs, num_outputs, functions.panel_width);
  if (second_panels) {
    check_weight(*second_panels, second_bias, num_inputs, num_outputs, functions.panel_width);
    TORCH_CHECK(second_panels->scalar_type() == panels.scalar_type(), "weights must be alike");
  }
  const Tensor rows = input.reshape({-1, num_inputs});
  const Tensor source = rows.stride(1) == 1 ? rows : rows.contiguous();
  auto shape = input.sizes().vec();
  shape.back() = num_outputs;
  Tensor out = at::empty(shape, input.options());
  TORCH_CHECK(!residual || (residual->sizes() == out.sizes() && residual->is_contiguous() &&
                            residual->scalar_type() == out.scalar_type()),
              "what is added must be dense, and like the outputs");
  if (!out.numel()) return out;
  const Product product{source.const_data_ptr(),
                        format_of(source),
                        source.stride(0),
                        source.size(0),
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
  multiply(product, functions, panels.size(0));
  return out;
}

namespace {

// Number by number: of a row, panels have one per input.
template <typename Number>
void look_up(const Tensor& panels, const int64_t* rows, int64_t num_rows, Tensor& out) {
  const int64_t num_inputs = panels.size(1), width = panels.size(2);
  const auto* from = static_cast<const Number*>(panels.const_data_ptr());
  auto* to = static_cast<Number*>(out.mutable_data_ptr());
  share_out(num_rows, [&](int64_t i) {
    const Number* column = from + rows[i] / width * num_inputs * width + rows[i] % width;
    for (int64_t k = 0; k < num_inputs; ++k) to[i * num_inputs + k] = column[k * width];
  });
}

}  // namespace

Tensor panel_rows(const Tensor& panels, int64_t num_outputs, const Tensor& rows) {
  check_weight(panels, std::nullopt, panels.size(1), num_outputs, panels.size(2));
  const int64_t count = rows.numel();
  const int64_t* numbers = int64s(rows, count, "rows");
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(numbers[i] >= 0 && numbers[i] < num_outputs, "there is no row ", numbers[i]);
  }
  Tensor out = at::empty({count, panels.size(1)}, panels.options());
  if (panels.element_size() == sizeof(uint32_t)) {
    look_up<uint32_t>(panels, numbers, count, out);
  } else {
    look_up<uint16_t>(panels, numbers, count, out);
  }
  return out;
}

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
