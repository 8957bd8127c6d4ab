// The inner kernel: products of some rows with a panel, sums in registers. Included once per
// instruction set, after activations.h.
//
// The scheme is the inner kernel of Goto and van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication" (2008). Every output is one chain of multiplications and additions in the order of
// the inputs, so a row's result does not depend on the rows that are computed beside it.

constexpr int kPanelWidth = 2 * kLanes;
// As many rows as there are registers for their sums.
constexpr int kTileRows = kLanes == 16 ? 12 : 6;

// Weights for a tile of kRows rows, aligned to their size. A single row reads every weight once. A Zen 4
// keeps what is loaded by this instruction from displacing other data in its caches, those of other
// processes included; for other processors it is an ordinary load.
template <int kRows, typename V>
QUIRE_INLINE V load_weights(const void* from) {
#if QUIRE_LANES == 16
  if constexpr (kRows == 1 && sizeof(V) == sizeof(__m512i))
    return reinterpret_cast<V>(_mm512_stream_load_si512(const_cast<void*>(from)));
#endif
  return load_as<V>(static_cast<const char*>(from));
}

// A step of the inner kernel: one float32 of a row, times numbers of type W of a panel's outputs.
template <typename W>
struct WideningStep {
  static constexpr int64_t kPanelBytes = kPanelWidth * sizeof(W);

  template <int kRows>
  QUIRE_INLINE Floats weights(const char* panel, int half) {
    const W* const from = reinterpret_cast<const W*>(panel) + half * kLanes;
    if constexpr (std::is_same_v<W, float>) return load_weights<kRows, Floats>(from);
    else return load(from);
  }
  QUIRE_INLINE Floats row(const char* from) {
    return broadcast(*reinterpret_cast<const float*>(from));
  }
  QUIRE_INLINE void add(Floats& sum, Floats x, Floats weights) { sum += x * weights; }
};

// Up to so many rows a tile is limited by memory.
constexpr int kFewRows = 4;

// Whether such tiles prefetch the panel. A Zen 4 keeps up with panels by itself, and instructions that
// do its work were measured to take time from it; a Zen 3, which has no AVX-512, gains from them.
constexpr bool kFewRowsPrefetch = kLanes == 8;

QUIRE_INLINE void prefetch_line(const char* line) { __builtin_prefetch(line, 0, 2); }

// Adds the products of kRows rows and one panel to their sums. Each step reads four bytes of a row.
template <int kRows, typename Step>
QUIRE_INLINE void multiply_tile(const char* rows, int64_t row_bytes, const char* panel,
                                int64_t num_steps, const PrefetchSchedule& prefetch,
                                Floats (&sums)[kRows][2]) {
  // Six rows are addressed by one pointer and three strides. The asm statement hides how the strides
  // are related: otherwise the compiler keeps a pointer per row, for which there are too few registers.
  constexpr int kGroup = 6;
  int64_t once = row_bytes, thrice = 3 * row_bytes, five_times = 5 * row_bytes;
  asm("" : "+r"(once), "+r"(thrice), "+r"(five_times));
  const int64_t places[kGroup] = {0, once, 2 * once, thrice, 4 * once, five_times};
  const char* groups[(kRows + kGroup - 1) / kGroup];
#pragma GCC unroll 2
  for (const char*& group : groups) group = rows, rows += kGroup * row_bytes;
  const auto add = [&]() __attribute__((always_inline)) {
    const auto left = Step::template weights<kRows>(panel, 0);
    const auto right = Step::template weights<kRows>(panel, 1);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const auto x = Step::row(groups[r / kGroup] + places[r % kGroup]);
      Step::add(sums[r][0], x, left);
      Step::add(sums[r][1], x, right);
    }
    panel += Step::kPanelBytes;
#pragma GCC unroll 2
    for (const char*& group : groups) {
      group += 4;
      asm("" : "+r"(group));
    }
  };
  int64_t k = 0;
  if constexpr (kRows <= kFewRows) {
    constexpr int64_t kSteps = 4, kBytes = kSteps * Step::kPanelBytes;
    while (kFewRowsPrefetch && k + kSteps <= num_steps) {
      for (int64_t line = 0; line < kBytes; line += kLine)
        prefetch_line(panel + kShortDistance + line);
#pragma GCC unroll 4
      for (const int64_t end = k + kSteps; k < end; ++k) add();
    }
#pragma GCC unroll 4
    for (; k < num_steps; ++k) add();
    return;
  }
  for (const PrefetchSpan* span = prefetch.spans; k < num_steps; ++span) {
    const int64_t end = span->end, step = span->step;
    const char* due = span->due;
    for (; k < end; ++k, due += step) {
      prefetch_line(due);
      if (step > kLine) prefetch_line(due + kLine);
      add();
    }
  }
}
