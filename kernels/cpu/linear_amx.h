// Products of some rows with panels of a weight by the tiles of AMX, which multiply numbers of
// bfloat16 and add in float32. Included once, after linear_tile.h, with AVX-512.
//
// A float32 is the sum of three bfloat16, exactly, and a float16 of two. A product of two such
// numbers is that of their parts, as in Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial
// Intelligence Datatype For Higher-Precision Computations" (2019); of nine products the three that
// are smallest, together below 2^-22 of the whole, are left out. Six by tiles take half as long as
// one by fused multiplications. The rows' parts are rounded to the nearest, so that what is left out
// has either sign as often; the weight's, of which there are more, are cut off.
//
// A row's result depends on no row beside it: each output's parts are added in one order. What is
// infinite makes NaN where it has several parts: the second is infinity minus infinity.

namespace amx {

// A tile has 16 rows of 64 bytes: 16 floats, or 32 bfloat16, which for the right factor are pairs of
// inputs. Four tiles hold sums, [2 x 16 rows, 2 x 16 outputs]; two each the factors.
constexpr int kSide = 16, kStepInputs = 32, kTileBytes = 1024;
constexpr int kHeight = 2 * kSide;
constexpr int kPairs = kStepInputs / 2;
static_assert(kPanelWidth == 2 * kSide);

template <typename T>
constexpr int kPartsOf = std::is_same_v<T, float> ? 3 : std::is_same_v<T, Float16> ? 2 : 1;

constexpr int parts_of(Format format) {
  return format == Format::kFloat32   ? kPartsOf<float>
         : format == Format::kFloat16 ? kPartsOf<Float16>
                                      : kPartsOf<BFloat16>;
}

constexpr int64_t num_steps(int64_t num_inputs) {
  return (num_inputs + kStepInputs - 1) / kStepInputs;
}

// Numbers below the least normal one are taken for zero, as tiles do; otherwise what is left of a very
// small number would take a hundred times as long.
class WithoutDenormals {
 public:
  WithoutDenormals() : control_(_mm_getcsr()) {
    constexpr unsigned int kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
    _mm_setcsr(control_ | kFlushToZero | kDenormalsAreZero);
  }
  ~WithoutDenormals() { _mm_setcsr(control_); }
  WithoutDenormals(const WithoutDenormals&) = delete;

 private:
  const unsigned int control_;
};

// Registers are set up for a piece and given back at its end: whoever is interrupted, and does not
// use them, has none to save. Tiles of rows, and of their sums, have only so many rows as there are
// at most: those of few rows are loaded and multiplied faster.
class Registers {
 public:
  explicit Registers(int64_t num_rows) {
    const Config given = config(std::min<int64_t>(num_rows, kSide));
    asm volatile("ldtilecfg %0" : : "m"(given));
  }
  ~Registers() { asm volatile("tilerelease"); }
  Registers(const Registers&) = delete;

 private:
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };

  static Config config(int64_t num_rows) {
    Config all{};
    all.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      const bool is_of_weight = tile >= 6;
      all.row_bytes[tile] = 64;
      all.rows[tile] = is_of_weight ? kSide : static_cast<uint8_t>(num_rows);
    }
    return all;
  }
};

template <int kTile>
QUIRE_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile>
QUIRE_INLINE void load_tile(const char* from) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(int64_t{64}), "i"(kTile)
               : "memory");
}

// Of a panel's sums.
template <int kTile>
QUIRE_INLINE void store_tile(float* to) {
  constexpr int64_t kRowBytes = kPanelWidth * sizeof(float);
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(kRowBytes), "i"(kTile)
               : "memory");
}

// Adds to the first.
template <int kSums, int kLeft, int kRight>
QUIRE_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kLeft), "i"(kRight));
}

using Words = uint32_t __attribute__((vector_size(kLanes * 4)));

constexpr int32_t kUpper = static_cast<int32_t>(0xFFFF0000);

// The upper halves of a's numbers below those of b's.
QUIRE_INLINE Ints upper_halves(Ints a, Ints b) {
  const Ints shifted = reinterpret_cast<Ints>(reinterpret_cast<Words>(a) >> 16);
  constexpr int kFirstOrBothOthers = 0xF8;
  return reinterpret_cast<Ints>(_mm512_ternarylogic_epi32(
      reinterpret_cast<__m512i>(shifted), reinterpret_cast<__m512i>(broadcast_bits(kUpper)),
      reinterpret_cast<__m512i>(b), kFirstOrBothOthers));
}

// What is left of x behind the upper half of a number near it.
QUIRE_INLINE Ints rest(Ints x, Ints near) {
  return bits(from_bits(x) - from_bits(near & kUpper));
}

// What makes cutting off rounding to the nearest; nothing where that would be infinity.
QUIRE_INLINE Ints half_a_unit(Ints x) {
  constexpr int32_t kTooLarge = 0x7F7F8000;
  return (x & 0x7FFFFFFF) < kTooLarge ? broadcast_bits(0x8000) : Ints{};
}

// Pairs' parts, `kStride` bytes from one to the next. Each is the upper half of what is left: rounded
// to the nearest, if they are to be, but for the last, which has all that is left, and NaN.
template <int kParts, int kStride, bool kRounded>
QUIRE_INLINE void split(Floats first, Floats second, char* to) {
  Ints a = bits(first), b = bits(second);
#pragma GCC unroll 3
  for (int part = 0; part < kParts; ++part) {
    const bool rounds = kRounded && part + 1 < kParts;
    const Ints near_a = rounds ? a + half_a_unit(a) : a, near_b = rounds ? b + half_a_unit(b) : b;
    store_as(to + part * kStride, upper_halves(near_a, near_b));
    a = rest(a, near_a), b = rest(b, near_b);
  }
}

// A pair of inputs is one of a step's first half and one of its second, so that they lie in the same
// lanes of two vectors.

// The rows' side: [tiles, steps, parts, 16 rows, 16 pairs of inputs, 2].

template <typename T>
QUIRE_INLINE void load_inputs(const T* from, int64_t count, Floats& first, Floats& second) {
  if (count >= kStepInputs) return load_pair(from, first, second);
  first = count >= kLanes ? load(from) : load_first(from, count);
  second = count > kLanes ? load_first(from + kLanes, count - kLanes) : Floats{};
}

// A tile after the other, so that what is written follows what was written.
template <typename T>
static void split_rows(const Product& call, int64_t first_row, int64_t end_row, char* to) {
  constexpr int kParts = kPartsOf<T>;
  const T* const rows = static_cast<const T*>(call.rows);
  for (int64_t top = first_row; top < end_row; top += kSide) {
    const int64_t bottom = std::min<int64_t>(top + kSide, end_row);
    for (int64_t k = 0; k < call.num_inputs; k += kStepInputs, to += kParts * kTileBytes) {
      for (int64_t row = top; row < bottom; ++row) {
        Floats first, second;
        load_inputs(rows + row * call.row_stride + k, call.num_inputs - k, first, second);
        split<kParts, kTileBytes, true>(first, second, to + (row - top) * 64);
      }
    }
  }
}

// The weight's side: steps of a panel, of which one is multiplied while the next one is split:
// [parts, 2 x 16 outputs, 16 pairs of inputs, 16 outputs, 2].

// From an input to the one that it is paired with.
constexpr int kToOther = kPairs * kPanelWidth;

// A pair of inputs, of all outputs.
template <typename W>
QUIRE_INLINE void split_pair(const W* inputs, char* to) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const W* const first = inputs + half * kLanes;
    split<kPartsOf<W>, 2 * kTileBytes, false>(load(first), load(first + kToOther),
                                              to + half * kTileBytes);
  }
}

// Outputs with even numbers first, then the others: nothing crosses lanes.
QUIRE_INLINE void split_pair(const BFloat16* inputs, char* to) {
  const auto a = load_as<Words>(inputs), b = load_as<Words>(inputs + kToOther);
  store_as(to, (a & 0xFFFF) | (b << 16));
  store_as(to + kTileBytes, (a >> 16) | (b & 0xFFFF0000));
}

// The next pairs of a weight on their way, and what is fetched meanwhile.
template <typename W>
struct Supply {
  const W* from;
  char* to;
  const char* due;
  int64_t due_step;
};

// One more, and what is fetched with it; only that if pairs are there already.
template <bool kSplits, typename W>
QUIRE_INLINE void supply_next(Supply<W>& supply) {
  for (int64_t line = 0; line < supply.due_step; line += kLine)
    __builtin_prefetch(supply.due + line, 0, 2);
  supply.due += supply.due_step;
  if constexpr (kSplits) {
    split_pair(supply.from, supply.to);
    supply.from += kPanelWidth;
    supply.to += 64;
  }
}

// Parts that are multiplied with each other.
struct Factors {
  int row, weight;
};

// All but the smallest products.
constexpr bool counts(Factors parts) { return parts.row + parts.weight <= 2; }

constexpr int num_factors(int row_parts, int weight_parts) {
  int count = 0;
  for (int w = 0; w < weight_parts; ++w)
    for (int r = 0; r < row_parts; ++r) count += counts({r, w});
  return count;
}

constexpr Factors factors(int index, int row_parts, int weight_parts) {
  for (int w = 0; w < weight_parts; ++w)
    for (int r = row_parts - 1; r >= 0; --r)
      if (counts({r, w}) && index-- == 0) return {r, w};
  return {};
}

// One step's inputs of one or two tiles of rows, the second one `second` bytes behind the first;
// and all pairs of the step that comes.
template <int kTiles, int kRowParts, bool kSplits, typename W, int kIndex = 0>
QUIRE_INLINE void multiply_step(const char* rows, int64_t second, const char* weight,
                                Supply<W>& supply) {
  constexpr int kWeightParts = kPartsOf<W>, kCount = num_factors(kRowParts, kWeightParts);
  constexpr Factors kNow = factors(kIndex, kRowParts, kWeightParts);
  if constexpr (kIndex == 0 || factors(kIndex - 1, kRowParts, kWeightParts).weight != kNow.weight) {
    load_tile<6>(weight + 2 * kNow.weight * kTileBytes);
    load_tile<7>(weight + (2 * kNow.weight + 1) * kTileBytes);
  }
  load_tile<4>(rows + kNow.row * kTileBytes);
  multiply_tiles<0, 4, 6>();
  multiply_tiles<1, 4, 7>();
  if constexpr (kTiles == 2) {
    load_tile<5>(rows + second + kNow.row * kTileBytes);
    multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
  }
  // None with the last one, so that all have been written when the next step asks for them.
  constexpr int kShares = std::max(kCount - 1, 1);
  constexpr int kShare =
      kIndex < kShares ? kPairs * (kIndex + 1) / kShares - kPairs * kIndex / kShares : 0;
#pragma GCC unroll 16
  for (int i = 0; i < kShare; ++i) supply_next<kSplits>(supply);
  if constexpr (kIndex + 1 < kCount)
    multiply_step<kTiles, kRowParts, kSplits, W, kIndex + 1>(rows, second, weight, supply);
}

// Where steps of a weight are that were split: two by turns. Or all of a panel, and of the second
// weight's, and one more: they stay for all tiles of a piece. Only those of one part, whose splitting
// takes longer than multiplying; and where they take no more than a quarter of the second-level
// cache of processors with AMX, which is 2 MiB, and the next panel's first step.
struct Slots {
  explicit Slots(const Product& call)
      : num_kept(num_steps(call.num_inputs) * (call.panels.second ? 2 : 1) + 1),
        may_keep(parts_of(call.panel_format) == 1 &&
                 (num_kept - 1) * kKeptBytes <= kMostBytes) {}

  int64_t num_bytes() const {
    return std::max(2 * kSlotBytes, may_keep ? num_kept * kKeptBytes : 0);
  }

  // A multiple of a page's: what is written is found more easily if it is apart from what is read.
  static constexpr int64_t kSlotBytes = 8 * kTileBytes;
  static constexpr int64_t kKeptBytes = 2 * kTileBytes;

  const int64_t num_kept;
  const bool may_keep;

 private:
  static constexpr int64_t kMostBytes = 512 << 10;
};

// Where a thread has what it needs for a block, from the begin of its memory on.
struct Room {
  Room(const Product& call, char* memory)
      : tail(memory),
        sums{reinterpret_cast<float*>(tail + kTailBytes),
             reinterpret_cast<float*>(tail + kTailBytes + kSumBytes)},
        slots(tail + kTailBytes + 2 * kSumBytes),
        rows(slots + Slots(call).num_bytes()) {}

  static int64_t num_bytes(const Product& call) {
    return kTailBytes + 2 * kSumBytes + Slots(call).num_bytes();
  }

  char* tail;      // a panel's last inputs, filled up with zeros
  float* sums[2];  // of a product and its gate, [32 rows, 32 outputs]
  char* slots;
  char* rows;

 private:
  static constexpr int64_t kTailBytes = kStepInputs * kPanelWidth * sizeof(float);
  static constexpr int64_t kSumBytes = kHeight * kPanelWidth * sizeof(float);
};

// The way of a piece through its panels: for each, the tiles of 32 rows; for those, the weight, and
// the second one if there are two.
template <typename T, typename W>
class Way {
 public:
  Way(const Product& call, const Piece& piece, char* scratch)
      : call_(call),
        piece_(piece),
        room_(call, scratch),
        num_steps_(num_steps(call.num_inputs)),
        num_passes_(call.panels.second ? 2 : 1),
        slots_(call),
        keeps_(slots_.may_keep && piece.end_tile - piece.first_tile > 1),
        num_slots_(keeps_ ? slots_.num_kept : 2),
        slot_bytes_(keeps_ ? Slots::kKeptBytes : Slots::kSlotBytes),
        rows_per_step_(num_steps_ ? (kHeight + num_steps_ - 1) / num_steps_ : 0),
        fetching_(call, (piece.end_row - piece.first_row + kHeight - 1) / kHeight) {}

  void go() {
    const Registers registers(piece_.end_row - piece_.first_row);
    Turn turn{piece_.first_panel, piece_.first_tile, 0};
    Supply<W> first{inputs(turn, 0), slot(0), nullptr, 0};
    for (int i = 0; i < kPairs; ++i) supply_next<true>(first);
    while (turn.panel < piece_.end_panel) {
      const int64_t tile_row = turn.tile * kHeight, first_row = piece_.first_row + tile_row;
      const int64_t num_rows = std::min<int64_t>(kHeight, piece_.end_row - first_row);
      if (num_rows > kSide)
        add_up<2>(turn, first_row, num_rows);
      else
        add_up<1>(turn, first_row, num_rows);
      if (turn.pass + 1 == num_passes_) write(turn.panel, first_row, num_rows);
      const Turn next = after(turn);
      if (!keeps_)
        first_slot_ += num_steps_;
      else if (next.panel != turn.panel)
        first_slot_ += num_passes_ * num_steps_;
      turn = next;
    }
  }

 private:
  struct Turn {
    int64_t panel, tile, pass;
  };

  Turn after(const Turn& turn) const {
    if (turn.pass + 1 < num_passes_) return {turn.panel, turn.tile, turn.pass + 1};
    if (turn.tile + 1 < piece_.end_tile) return {turn.panel, turn.tile + 1, 0};
    return {turn.panel + 1, piece_.first_tile, 0};
  }

  const char* panel_of(const Turn& turn) const {
    const Panels own = call_.panels.from(turn.panel);
    return turn.pass ? own.second : own.first;
  }

  // Those of a step, all of it.
  const W* inputs(const Turn& turn, int64_t step) const {
    const W* panel = reinterpret_cast<const W*>(panel_of(turn)) + step * kStepInputs * kPanelWidth;
    const int64_t count = call_.num_inputs - step * kStepInputs;
    if (count >= kStepInputs) return panel;
    std::memset(room_.tail, 0, kStepInputs * kPanelWidth * sizeof(W));
    if (count > 0) std::memcpy(room_.tail, panel, count * kPanelWidth * sizeof(W));
    return reinterpret_cast<const W*>(room_.tail);
  }

  char* slot(int64_t number) const { return room_.slots + number % num_slots_ * slot_bytes_; }

  char* following(char* slot) const {
    slot += slot_bytes_;
    return slot == room_.slots + num_slots_ * slot_bytes_ ? room_.slots : slot;
  }

  // Of a turn's first step; the others follow.
  int64_t slot_of(const Turn& turn) const {
    return first_slot_ + (keeps_ ? turn.pass * num_steps_ : 0);
  }

  // Whether the steps of a turn are split for it.
  bool is_split(const Turn& turn) const {
    return turn.panel < piece_.end_panel && (!keeps_ || turn.tile == piece_.first_tile);
  }

  // A tile's sums. The step that comes after its last one is the first of the next turn.
  template <int kTiles>
  void add_up(const Turn& turn, int64_t first_row, int64_t num_rows) {
    const Turn next = after(turn);
    const Panels coming = turn.panel + 1 < piece_.end_panel ? call_.panels.from(turn.panel + 1)
                                                            : piece_.coming;
    const Ahead ahead = fetching_.ahead(panel_of(turn), turn.pass, turn.tile, coming, {});
    const Stretch* stretch = ahead.stretches;
    const char* due = stretch->due;
    int64_t rows_due = turn.pass == 0 ? num_rows : 0;
    constexpr int kRowParts = kPartsOf<T>;
    constexpr int64_t kStepBytes = kRowParts * kTileBytes;
    const int64_t tile_bytes = num_steps_ * kStepBytes;
    const char* rows = room_.rows + 2 * turn.tile * tile_bytes;
    clear_tile<0>(), clear_tile<1>();
    if constexpr (kTiles == 2) clear_tile<2>(), clear_tile<3>();
    char* now = slot(slot_of(turn));
    for (int64_t step = 0; step < num_steps_; ++step, rows += kStepBytes) {
      while (step * kStepInputs >= stretch->end && stretch->end < call_.num_inputs)
        due = (++stretch)->due;
      if (rows_due > 0) {
        const int64_t count = std::min(rows_due, rows_per_step_);
        fetch_outputs(call_, first_row + num_rows - rows_due, count, turn.panel * kPanelWidth);
        rows_due -= count;
      }
      const char* const weight = now;
      now = following(now);
      const bool is_last = step + 1 == num_steps_, splits = is_split(is_last ? next : turn);
      const W* from = !splits ? nullptr : is_last ? inputs(next, 0) : inputs(turn, step + 1);
      Supply<W> supply{from, now, due, 2 * stretch->step};
      due += kStepInputs * stretch->step;
      if (splits)
        multiply_step<kTiles, kRowParts, true, W>(rows, tile_bytes, weight, supply);
      else
        multiply_step<kTiles, kRowParts, false, W>(rows, tile_bytes, weight, supply);
    }
    float* const sums = room_.sums[turn.pass];
    store_tile<0>(sums), store_tile<1>(sums + kSide);
    if constexpr (kTiles == 2) {
      float* const lower = sums + kSide * kPanelWidth;
      store_tile<2>(lower), store_tile<3>(lower + kSide);
    }
  }

  // A row's sums, in the order of outputs.
  static void load_sums(const float* sums, Floats (&row)[2]) {
    row[0] = load(sums), row[1] = load(sums + kLanes);
    if constexpr (std::is_same_v<W, BFloat16>) {
      constexpr auto kAll = std::make_index_sequence<kLanes>();
      const Floats even = row[0], odd = row[1];
      row[0] = in_turn<0>(even, odd, kAll), row[1] = in_turn<kLanes / 2>(even, odd, kAll);
    }
  }

  template <int kFirst, std::size_t... kLane>
  static Floats in_turn(Floats even, Floats odd, std::index_sequence<kLane...>) {
    return __builtin_shufflevector(even, odd, (kFirst + kLane / 2 + kLane % 2 * kLanes)...);
  }

  // Sums of a pass, plus their bias.
  void finish_sums(int64_t pass, int64_t row, const float* biases, Floats (&outputs)[2]) const {
    load_sums(room_.sums[pass] + row * kPanelWidth, outputs);
    for (int half = 0; half < 2; ++half) outputs[half] += load(biases + half * kLanes);
  }

  template <bool kIsGated, bool kIsWhole>
  void write_rows(int64_t first_output, int64_t first_row, int64_t num_rows,
                  const float (&biases)[2][kPanelWidth]) const {
    for (int64_t r = 0; r < num_rows; ++r) {
      Floats outputs[2];
      finish_sums(0, r, biases[0], outputs);
      if constexpr (kIsGated) {
        Floats values[2];
        finish_sums(1, r, biases[1], values);
        for (int half = 0; half < 2; ++half)
          outputs[half] = activated(call_.activation, outputs[half]) * values[half];
      }
      if constexpr (kIsWhole)
        store_row<T>(call_, first_row + r, first_output, outputs);
      else
        store_part(call_, first_row + r, first_output, outputs);
    }
  }

  void write(int64_t panel, int64_t first_row, int64_t num_rows) const {
    const int64_t first_output = panel * kPanelWidth;
    const int64_t count = std::min<int64_t>(kPanelWidth, call_.num_outputs - first_output);
    float biases[2][kPanelWidth] = {};
    const float* const given[] = {call_.bias, call_.second_bias};
    for (int64_t pass = 0; pass < num_passes_; ++pass)
      if (given[pass])
        std::memcpy(biases[pass], given[pass] + first_output, count * sizeof(float));
    const bool is_gated = num_passes_ == 2, whole = is_whole(call_, first_output);
    const auto write_all =
        is_gated ? (whole ? &Way::write_rows<true, true> : &Way::write_rows<true, false>)
                 : (whole ? &Way::write_rows<false, true> : &Way::write_rows<false, false>);
    (this->*write_all)(first_output, first_row, num_rows, biases);
  }

  const Product& call_;
  const Piece& piece_;
  const Room room_;
  const int64_t num_steps_, num_passes_;
  const Slots slots_;
  const bool keeps_;
  const int64_t num_slots_, slot_bytes_, rows_per_step_;
  const Fetching fetching_;
  int64_t first_slot_ = 0;  // of the panel if it is kept, else of the turn
};

template <typename T>
static void go(const Product& call, const Piece& piece, char* scratch) {
  switch (call.panel_format) {
    case Format::kFloat16: return Way<T, Float16>(call, piece, scratch).go();
    case Format::kBFloat16: return Way<T, BFloat16>(call, piece, scratch).go();
    default: return Way<T, float>(call, piece, scratch).go();
  }
}

static void multiply(const Product& call, const Piece& piece, char* scratch) {
  const WithoutDenormals without_denormals;
  switch (call.format) {
    case Format::kFloat16: return go<Float16>(call, piece, scratch);
    case Format::kBFloat16: return go<BFloat16>(call, piece, scratch);
    default: return go<float>(call, piece, scratch);
  }
}

static int64_t row_bytes(Format format, int64_t num_inputs) {
  return num_steps(num_inputs) * parts_of(format) * kStepInputs * sizeof(BFloat16);
}

static int64_t scratch_bytes(const Product& call, int64_t num_rows) {
  const int64_t padded_rows = (num_rows + kSide - 1) / kSide * kSide;
  return Room::num_bytes(call) + padded_rows * row_bytes(call.format, call.num_inputs);
}

static void prepare(const Product& call, int64_t first_row, int64_t end_row, char* scratch) {
  const WithoutDenormals without_denormals;
  char* const to = Room(call, scratch).rows;
  switch (call.format) {
    case Format::kFloat16: return split_rows<Float16>(call, first_row, end_row, to);
    case Format::kBFloat16: return split_rows<BFloat16>(call, first_row, end_row, to);
    default: return split_rows<float>(call, first_row, end_row, to);
  }
}

// Of more rows, so that panels come from memory less often than they can be multiplied.
constexpr int64_t kMostBlockRows = 192;

constexpr Functions kFunctions{kPanelWidth,   kHeight, kMostBlockRows, row_bytes,
                               scratch_bytes, prepare, multiply};

}  // namespace amx
