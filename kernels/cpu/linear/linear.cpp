// Products with packed weights on tensors.
#include "linear/linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "linear/weight_tensors.h"
#include "ops.h"
#include "tensors.h"

namespace quire::linear {
namespace {

// Threads take chunks dynamically: other threads make up for one that is delayed.
constexpr int64_t kChunksPerThread = 16;
// A chunk of few rows reads at most so many bytes of panels, to be short enough to wait for at the end.
constexpr int64_t kMostChunkBytes = 1 << 20;
// A chunk of fewer multiplications is short enough to wait for, and not divided further.
constexpr int64_t kLeastMultiplications = 1 << 20;

// The most bytes of a block of rows: half of the second-level cache, where the rows stay while all
// panels are read. The other half is for panels and outputs. Threads that share a second-level cache
// get too much, which costs only time.
int64_t most_block_bytes() {
#ifdef _SC_LEVEL2_CACHE_SIZE
  static const int64_t cache_bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
  constexpr int64_t cache_bytes = 0;
#endif
  constexpr int64_t kUsualBytes = 1 << 20;
  return (cache_bytes > 0 ? cache_bytes : kUsualBytes) / 2;
}

// Divides a product into chunks: blocks of rows times groups of panels. If that gives too few chunks, a
// block's tiles are divided, too; those parts are adjacent chunks, as they share panels.
class Tiling {
 public:
  // Rows of that format.
  Tiling(int64_t num_rows, Format format, const Weight& weight, const Multiplier& multiplier)
      : num_rows_(num_rows),
        num_panels_(weight.num_panels),
        tile_rows_(multiplier.tile_rows) {
    const int64_t row_bytes = std::max<int64_t>(1, multiplier.row_bytes(format, weight));
    const int64_t most_rows = std::min(most_block_bytes() / row_bytes, multiplier.most_block_rows);
    // At least two tiles, so that a panel is used more than once.
    const int64_t most_tiles = std::max<int64_t>(2, most_rows / tile_rows_);
    const int64_t num_tiles = ceil_div(num_rows_, tile_rows_);
    // Blocks of about equal size.
    const int64_t block_tiles = ceil_div(num_tiles, ceil_div(num_tiles, most_tiles));
    block_rows_ = std::min(block_tiles * tile_rows_, num_rows_);
    num_blocks_ = ceil_div(num_rows_, block_rows_);

    const int64_t wanted = kChunksPerThread * at::get_num_threads();
    const int64_t most_panels = kMostChunkBytes / std::max<int64_t>(1, weight.panel_bytes);
    chunk_panels_ = std::max<int64_t>(1, std::min(num_panels_ * num_blocks_ / wanted, most_panels));
    num_panel_chunks_ = ceil_div(num_panels_, chunk_panels_);
    const int64_t multiplications = block_rows_ * weight.num_inputs * chunk_panels_ * weight.panel_width;
    const int64_t most_parts = std::min(block_tiles, multiplications / kLeastMultiplications);
    num_parts_ = std::clamp<int64_t>(ceil_div(wanted, num_blocks_ * num_panel_chunks_), 1,
                                     std::max<int64_t>(1, most_parts));
  }

  int64_t num_chunks() const { return num_blocks_ * num_panel_chunks_ * num_parts_; }

  Chunk chunk(int64_t index) const {
    const int64_t part = index % num_parts_, others = index / num_parts_;
    const int64_t first_panel = others % num_panel_chunks_ * chunk_panels_;
    const int64_t first_row = others / num_panel_chunks_ * block_rows_;
    const int64_t end_row = std::min(first_row + block_rows_, num_rows_);
    const int64_t num_tiles = ceil_div(end_row - first_row, tile_rows_);
    return {first_row,
            end_row,
            num_tiles * part / num_parts_,
            num_tiles * (part + 1) / num_parts_,
            first_panel,
            std::min(first_panel + chunk_panels_, num_panels_),
            first_panel == 0 || others == begin_of(range_of(index)) / num_parts_,
            {}};
  }

  // The panel that a range begins with.
  int64_t first_panel_of(int64_t range) const { return chunk(begin_of(range)).first_panel; }

  // The range that has a chunk.
  int64_t range_of(int64_t index) const { return ((index + 1) * num_ranges_ - 1) / num_chunks(); }

  // The panel after those of a chunk in its range; -1 if the range ends there.
  int64_t panel_after(int64_t index) const {
    const int64_t next = (index / num_parts_ + 1) * num_parts_;
    return next < begin_of(range_of(index) + 1) ? chunk(next).first_panel : -1;
  }

 private:
  int64_t begin_of(int64_t range) const { return begin_of_range(range, num_chunks(), num_ranges_); }

  int64_t num_rows_, num_panels_, tile_rows_;
  int64_t num_ranges_ = at::get_num_threads();
  int64_t block_rows_, num_blocks_;
  int64_t chunk_panels_, num_panel_chunks_, num_parts_;
};

// The panels that each thread begins with in the next product, of rows of that format.
std::vector<Panels> first_panels(const NextLinear& next, Format format, const Functions& functions) {
  std::vector<Panels> first(at::get_num_threads());
  if (!next.panels || !next.num_rows || !next.panels->numel()) return first;
  const Weight weight = weight_of(*next.panels);
  const Tiling tiling(next.num_rows, format, weight, functions.multiplier(format, weight));
  const Panels all = panels_of(weight, *next.panels, next.second_panels);
  for (size_t range = 0; range < first.size(); ++range)
    first[range] = all.from(tiling.first_panel_of(range));
  return first;
}

// What each thread reads first of the panels, as much as leaves room in its cache for what it reads
// before. Many rows are limited by arithmetic instead.
std::vector<Reads> first_reads(const LinearCall& call, const Tiling& tiling) {
  constexpr int64_t kMostRows = 4, kMostBytes = 256 << 10;
  if (call.num_rows > kMostRows) return {};
  const int64_t most_bytes = std::min(kMostBytes, most_block_bytes()) / (call.panels.second ? 2 : 1);
  std::vector<Reads> reads(at::get_num_threads());
  const auto num_ranges = static_cast<int64_t>(reads.size());
  const int64_t range_bytes = ceil_div(call.weight.num_panels, num_ranges) * call.panels.bytes;
  for (int64_t range = 0; range < num_ranges; ++range) {
    const int64_t panel = tiling.first_panel_of(range);
    const Panels first = call.panels.from(panel);
    const int64_t left_bytes = (call.weight.num_panels - panel) * first.bytes;
    reads[range] = {first.first, first.second, std::min({range_bytes, left_bytes, most_bytes})};
  }
  return reads;
}

// A thread's memory for converted rows, kept while the thread has chunks of their block.
class Scratch {
 public:
  char* with_rows_of(int64_t number, const LinearCall& call, int64_t first_row, int64_t end_row,
                     const Multiplier& multiplier) {
    const int64_t needed = multiplier.scratch_bytes(call, end_row - first_row);
    if (needed > num_bytes_) {
      memory_.reset(static_cast<char*>(std::aligned_alloc(kPage, ceil_div(needed, kPage) * kPage)));
      num_bytes_ = memory_ ? needed : 0;
      if (!memory_) throw std::bad_alloc();
      number_ = kNone;
    }
    if (number_ != number || first_row_ != first_row) {
      multiplier.prepare(call, first_row, end_row, memory_.get());
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

Stage multiply_stage(const LinearCall& call, const Tiling& tiling, std::vector<Panels> next,
                     const Multiplier& multiplier) {
  // The number is unique in the process: a thread recognises the rows in its scratch memory by it. So
  // a stage can be executed only once.
  static std::atomic<int64_t> num_products{0};
  auto work = [call, tiling, next = std::move(next), &multiplier,
               number = num_products++](int64_t index) {
    thread_local Scratch scratch;
    Chunk chunk = tiling.chunk(index);
    if (chunk.first_tile == chunk.end_tile) return;
    const int64_t panel = tiling.panel_after(index);
    chunk.next_panels = panel < 0 ? next[tiling.range_of(index)] : call.panels.from(panel);
    multiplier.multiply(
        call, chunk,
        scratch.with_rows_of(number, call, chunk.first_row, chunk.end_row, multiplier));
  };
  return {tiling.num_chunks(), Stage::kRanges, std::move(work), 0, first_reads(call, tiling)};
}

void check_weight(const Weight& weight, const std::optional<Tensor>& bias, int64_t num_inputs,
                  int64_t num_outputs, int64_t width) {
  TORCH_CHECK(weight.num_panels == ceil_div(num_outputs, width) && weight.num_inputs == num_inputs &&
                  weight.panel_width == width,
              "panels must be of ", num_inputs, " inputs and ", num_outputs, " outputs, ", width,
              " each");
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->is_contiguous() &&
                        bias->numel() == num_outputs),
              "the bias must be dense float32, a number per output");
}

const float* floats(const std::optional<Tensor>& bias) {
  return bias ? bias->const_data_ptr<float>() : nullptr;
}

}  // namespace

Stage linear_stage(const Tensor& input, const Tensor& panels, const std::optional<Tensor>& bias,
                   const std::optional<Tensor>& second_panels,
                   const std::optional<Tensor>& second_bias, int64_t activation,
                   const std::optional<Tensor>& residual, const Tensor& out, int64_t isa,
                   const NextLinear& next) {
  const Functions& functions = functions_of(static_cast<Isa>(isa));
  const int64_t num_inputs = input.size(1), num_outputs = out.size(-1);
  TORCH_CHECK(is_wide(input), "no kernel for ", input.scalar_type());
  const Weight weight = weight_of(panels);
  check_weight(weight, bias, num_inputs, num_outputs, functions.panel_width);
  if (second_panels) {
    const Weight second = weight_of(*second_panels);
    check_weight(second, second_bias, num_inputs, num_outputs, functions.panel_width);
    TORCH_CHECK(are_alike(weight, second), "weights must be alike");
  }
  // The columns of a wider matrix are dense in their rows alone.
  const bool is_dense = out.is_contiguous();
  TORCH_CHECK(out.scalar_type() == input.scalar_type() &&
                  (is_dense || (out.dim() == 2 && out.stride(1) == 1)) &&
                  out.numel() == input.size(0) * num_outputs,
              "outputs must have dense rows, and be of the inputs' dtype");
  TORCH_CHECK(!residual || (residual->sizes() == out.sizes() && residual->is_contiguous() && is_dense &&
                            residual->scalar_type() == out.scalar_type()),
              "the residual must be dense, and like the outputs");
  // A chunk may be executed twice, which would add outputs in place twice. A gated product would be
  // rounded before the addition or after it, depending on the number of rows.
  TORCH_CHECK(!residual || (!second_panels && !residual->is_alias_of(out)),
              "a residual is not supported for gated products, and may not be the outputs");
  if (!out.numel()) return {};
  const LinearCall call{input.const_data_ptr(),
                        format_of(input),
                        input.stride(0),
                        input.size(0),
                        num_outputs,
                        weight,
                        panels_of(weight, panels, second_panels ? &*second_panels : nullptr),
                        floats(bias),
                        floats(second_bias),
                        static_cast<Activation>(activation),
                        residual ? residual->const_data_ptr() : nullptr,
                        out.mutable_data_ptr(),
                        is_dense ? num_outputs : out.stride(0)};
  const Multiplier& multiplier = functions.multiplier(call.format, weight);
  return multiply_stage(call, Tiling(call.num_rows, call.format, weight, multiplier),
                        first_panels(next, call.format, functions), multiplier);
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
  run(linear_stage(rows, panels, bias, second_panels, second_bias, activation, residual, out, isa));
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def(
      "linear(Tensor input, Tensor panels, int num_outputs, Tensor? bias, Tensor? second_panels, "
      "Tensor? second_bias, int activation, Tensor? residual, int isa) -> Tensor");
}

TORCH_LIBRARY_IMPL(quire, CPU, library) {
  library.impl("linear", linear);
}

}  // namespace quire::linear
