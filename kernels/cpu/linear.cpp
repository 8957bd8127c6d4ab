// Products with packed weights on tensors.
#include "linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "fetching.h"
#include "ops.h"
#include "tensors.h"

namespace quire::linear {
namespace {

// Threads take pieces in turn: one that was held up leaves the others more of them.
constexpr int64_t kPiecesPerThread = 16;
// A piece of fewer multiplications is no trouble to wait for, and not parted further.
constexpr int64_t kLeastMultiplications = 1 << 20;

bool is_weight(const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

int64_t panel_width(int64_t isa) { return functions_of(static_cast<Isa>(isa)).panel_width; }

// Bytes that a block of rows may have, for they stay in the second-level cache while all panels
// pass by: half of it. The other half is for panels and outputs. Where threads share that cache they
// get too much, which costs time and nothing else.
int64_t most_block_bytes() {
#ifdef _SC_LEVEL2_CACHE_SIZE
  static const int64_t cache_bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
  constexpr int64_t cache_bytes = 0;
#endif
  constexpr int64_t kUsualBytes = 1 << 20;
  return (cache_bytes > 0 ? cache_bytes : kUsualBytes) / 2;
}

// How a product is cut: into blocks of rows, which meet one panel after the other. Where that gives
// too few pieces a block's tiles are parted, too, and those parts follow each other: they share a
// panel.
class Cut {
 public:
  // Rows of that format; `panels` [num_panels, num_inputs, panel_width]
  Cut(int64_t num_rows, Format format, const Tensor& panels, const Functions& functions)
      : num_rows_(num_rows), num_panels_(panels.size(0)), tile_rows_(functions.tile_rows) {
    const int64_t num_inputs = panels.size(1);
    const int64_t row_bytes = functions.row_bytes(format, std::max<int64_t>(1, num_inputs));
    const int64_t most_rows = std::min(most_block_bytes() / row_bytes, functions.most_block_rows);
    // Two at least, so that a panel is read for more than one.
    const int64_t most_tiles = std::max<int64_t>(2, most_rows / tile_rows_);
    const int64_t num_tiles = divided_up(num_rows_, tile_rows_);
    // About equally large ones.
    const int64_t block_tiles = divided_up(num_tiles, divided_up(num_tiles, most_tiles));
    block_rows_ = std::min(block_tiles * tile_rows_, num_rows_);
    num_blocks_ = divided_up(num_rows_, block_rows_);

    const int64_t wanted = kPiecesPerThread * at::get_num_threads();
    piece_panels_ = std::max<int64_t>(1, num_panels_ * num_blocks_ / wanted);
    num_panel_pieces_ = divided_up(num_panels_, piece_panels_);
    const int64_t multiplications = block_rows_ * num_inputs * piece_panels_ * panels.size(2);
    const int64_t most_parts = std::min(block_tiles, multiplications / kLeastMultiplications);
    num_parts_ = std::clamp<int64_t>(divided_up(wanted, num_blocks_ * num_panel_pieces_), 1,
                                     std::max<int64_t>(1, most_parts));
  }

  int64_t num_pieces() const { return num_blocks_ * num_panel_pieces_ * num_parts_; }

  Piece piece(int64_t index) const {
    const int64_t part = index % num_parts_, others = index / num_parts_;
    const int64_t first_panel = others % num_panel_pieces_ * piece_panels_;
    const int64_t first_row = others / num_panel_pieces_ * block_rows_;
    const int64_t end_row = std::min(first_row + block_rows_, num_rows_);
    const int64_t num_tiles = divided_up(end_row - first_row, tile_rows_);
    return {first_row,
            end_row,
            num_tiles * part / num_parts_,
            num_tiles * (part + 1) / num_parts_,
            first_panel,
            std::min(first_panel + piece_panels_, num_panels_),
            first_panel == 0 || others == begin_of(run_of(index)) / num_parts_,
            {}};
  }

  // The panel that a thread begins with.
  int64_t first_panel_of(int64_t run) const { return piece(begin_of(run)).first_panel; }

  // The run that a piece is of.
  int64_t run_of(int64_t index) const { return ((index + 1) * num_runs_ - 1) / num_pieces(); }

  // The panel that comes after those of a piece in its run; -1 if the run ends there.
  int64_t panel_after(int64_t index) const {
    const int64_t next = (index / num_parts_ + 1) * num_parts_;
    return next < begin_of(run_of(index) + 1) ? piece(next).first_panel : -1;
  }

 private:
  int64_t begin_of(int64_t run) const { return begin_of_run(run, num_pieces(), num_runs_); }

  int64_t num_rows_, num_panels_, tile_rows_;
  int64_t num_runs_ = at::get_num_threads();
  int64_t block_rows_, num_blocks_;
  int64_t piece_panels_, num_panel_pieces_, num_parts_;
};

Panels panels_of(const Tensor& panels, const Tensor* second_panels) {
  const auto at = [](const Tensor& all) { return static_cast<const char*>(all.const_data_ptr()); };
  return {at(panels), second_panels ? at(*second_panels) : nullptr,
          panels.size(1) * panels.size(2) * static_cast<int64_t>(panels.element_size())};
}

// What each thread begins with after a product of rows of that format.
std::vector<Panels> first_panels(const After& after, Format format, const Functions& functions) {
  std::vector<Panels> first(at::get_num_threads());
  if (!after.panels || !after.num_rows || !after.panels->numel()) return first;
  const Cut cut(after.num_rows, format, *after.panels, functions);
  const Panels all = panels_of(*after.panels, after.second_panels);
  for (size_t run = 0; run < first.size(); ++run) first[run] = all.from(cut.first_panel_of(run));
  return first;
}

// A thread's memory for rows as a product meets them. They stay while it has pieces of their block.
class Scratch {
 public:
  char* with_rows_of(int64_t number, const Product& product, int64_t first_row, int64_t end_row,
                     const Functions& functions) {
    const int64_t needed = functions.scratch_bytes(product, end_row - first_row);
    if (needed > num_bytes_) {
      memory_.reset(static_cast<char*>(std::aligned_alloc(kPage, divided_up(needed, kPage) * kPage)));
      num_bytes_ = memory_ ? needed : 0;
      if (!memory_) throw std::bad_alloc();
      number_ = kNone;
    }
    if (number_ != number || first_row_ != first_row) {
      functions.prepare(product, first_row, end_row, memory_.get());
      number_ = number;
      first_row_ = first_row;
    }
    return memory_.get();
  }

 private:
  static constexpr int64_t kNone = -1, kPage = 4096;
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t num_bytes_ = 0, number_ = kNone, first_row_ = 0;
};

Stage multiply(const Product& product, const Cut& cut, const std::vector<Panels>& after,
               const Functions& functions) {
  // No two products of the process have the same: a thread knows by it whose rows it has. So a stage
  // is for one run.
  static std::atomic<int64_t> num_products{0};
  const auto work = [product, cut, after, &functions, number = num_products++](int64_t index) {
    thread_local Scratch scratch;
    Piece piece = cut.piece(index);
    if (piece.first_tile == piece.end_tile) return;
    const int64_t next = cut.panel_after(index);
    piece.coming = next < 0 ? after[cut.run_of(index)] : product.panels.from(next);
    functions.multiply(
        product, piece,
        scratch.with_rows_of(number, product, piece.first_row, piece.end_row, functions));
  };
  return {cut.num_pieces(), Stage::kRuns, work};
}

void check_weight(const Tensor& panels, const std::optional<Tensor>& bias, int64_t num_inputs,
                  int64_t num_outputs, int64_t width) {
  TORCH_CHECK(panels.dim() == 3 && panels.is_contiguous() && is_weight(panels) &&
                  panels.size(0) == divided_up(num_outputs, width) &&
                  panels.size(1) == num_inputs && panels.size(2) == width,
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
              int64_t isa, const After& after) {
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
  // A piece may be done twice, which would add the outputs to themselves twice. And a gated product
  // may be rounded together with what is added for some numbers of rows, and before it for others.
  TORCH_CHECK(!residual || (!second_panels && !residual->is_alias_of(out)),
              "nothing is added to gated products, and never the outputs themselves");
  if (!out.numel()) return {};
  const Product product{input.const_data_ptr(),
                        format_of(input),
                        input.stride(0),
                        input.size(0),
                        num_inputs,
                        num_outputs,
                        panels_of(panels, second_panels ? &*second_panels : nullptr),
                        format_of(panels),
                        floats(bias),
                        floats(second_bias),
                        static_cast<Activation>(activation),
                        residual ? residual->const_data_ptr() : nullptr,
                        out.mutable_data_ptr()};
  return multiply(product, Cut(product.num_rows, product.format, panels, functions),
                  first_panels(after, product.format, functions), functions);
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

// What a block's tiles fetch on their way through a panel of one weight or two, before one of others
// and with rows at these addresses (0: none). Per pass and tile, the stretches up to the last input:
// each its end, address and step.
std::vector<int64_t> fetched(int64_t num_inputs, int64_t num_tiles, at::IntArrayRef own,
                             int64_t own_bytes, at::IntArrayRef coming, int64_t coming_bytes,
                             int64_t rows, int64_t row_bytes) {
  const auto at = [](int64_t address) { return reinterpret_cast<const char*>(address); };
  TORCH_CHECK(num_tiles > 0, "there are no tiles");
  TORCH_CHECK(own.size() == 2 && coming.size() == 2, "two addresses are needed");
  Product product{};
  product.num_inputs = num_inputs;
  product.panels = {at(own[0]), at(own[1]), own_bytes};
  const Fetching fetching(product, num_tiles);
  std::vector<int64_t> numbers;
  for (int64_t pass = 0; pass < (own[1] ? 2 : 1); ++pass) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const Ahead ahead = fetching.ahead(at(own[pass]), pass, tile,
                                         {at(coming[0]), at(coming[1]), coming_bytes},
                                         {at(rows), row_bytes});
      int64_t end = 0;
      for (const Stretch& stretch : ahead.stretches) {
        if (end == num_inputs) break;
        end = stretch.end;
        numbers.insert(numbers.end(),
                       {end, reinterpret_cast<int64_t>(stretch.due), stretch.step});
      }
    }
  }
  return numbers;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def("panel_width(int isa) -> int", panel_width);
  library.def("linear_fetched", &fetched);
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
