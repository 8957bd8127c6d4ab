// The scratch memory of a thread that multiplies by AMX tiles. Included once, after tiles.h.

namespace amx {

// The ring buffer of a weight's split steps. It holds two steps, or all steps of a panel, and of the
// second weight's, for all tiles of a chunk, plus the next panel's first step. All are kept if numbers
// have one part, because splitting then takes longer than multiplying, and if they take at most a
// quarter of the second-level cache, which is 2 MiB on processors with AMX.
struct StepRing {
  explicit StepRing(const LinearCall& call)
      : num_kept(num_steps(call.weight.num_inputs) * (call.panels.second ? 2 : 1) + 1),
        may_keep(parts_of(call.weight.format) == 1 &&
                 (num_kept - 1) * kKeptBytes <= kMostBytes) {}

  int64_t num_bytes() const {
    return std::max(2 * kStepBytes, may_keep ? num_kept * kKeptBytes : 0);
  }

  // A multiple of a page: writes and reads should not be close.
  static constexpr int64_t kStepBytes = 8 * kTileBytes;
  static constexpr int64_t kKeptBytes = 2 * kTileBytes;

  const int64_t num_kept;
  const bool may_keep;

 private:
  static constexpr int64_t kMostBytes = 512 << 10;
};

// The layout of a thread's scratch memory for a block.
struct Scratch {
  Scratch(const LinearCall& call, char* memory)
      : tail(memory),
        sums{reinterpret_cast<float*>(tail + kTailBytes),
             reinterpret_cast<float*>(tail + kTailBytes + kSumBytes)},
        ring(tail + kTailBytes + 2 * kSumBytes),
        rows(ring + StepRing(call).num_bytes()) {}

  static int64_t num_bytes(const LinearCall& call) {
    return kTailBytes + 2 * kSumBytes + StepRing(call).num_bytes();
  }

  char* tail;      // a panel's last inputs, padded with zeros
  float* sums[2];  // of a product and its gate, [32 rows, 32 outputs]
  char* ring;
  char* rows;

 private:
  static constexpr int64_t kTailBytes = kStepInputs * kPanelWidth * sizeof(float);
  static constexpr int64_t kSumBytes = kHeight * kPanelWidth * sizeof(float);
};

}  // namespace amx
