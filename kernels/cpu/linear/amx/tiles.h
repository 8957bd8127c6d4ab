// The tile registers and instructions of AMX. Included once, with AVX-512, after linear_tile.h.

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

// Treats denormal numbers as zero in its scope, as tiles do; otherwise the small parts of split numbers
// would make arithmetic a hundred times slower.
class FlushDenormals {
 public:
  FlushDenormals() : control_(_mm_getcsr()) {
    constexpr unsigned int kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
    _mm_setcsr(control_ | kFlushToZero | kDenormalsAreZero);
  }
  ~FlushDenormals() { _mm_setcsr(control_); }
  FlushDenormals(const FlushDenormals&) = delete;

 private:
  const unsigned int control_;
};

// Configures the tile registers in its scope, and releases them at the end, so that a context switch
// outside of it need not save them. Tiles of rows and of sums have at most `num_rows` rows: smaller
// tiles are loaded and multiplied faster.
class TileRegisters {
 public:
  explicit TileRegisters(int64_t num_rows) {
    const Config given = config(std::min<int64_t>(num_rows, kSide));
    asm volatile("ldtilecfg %0" : : "m"(given));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;

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

// Stores a tile of a panel's sums.
template <int kTile>
QUIRE_INLINE void store_tile(float* to) {
  constexpr int64_t kRowBytes = kPanelWidth * sizeof(float);
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(kRowBytes), "i"(kTile)
               : "memory");
}

// tile kSums += tile kLeft * tile kRight
template <int kSums, int kLeft, int kRight>
QUIRE_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kLeft), "i"(kRight));
}

}  // namespace amx
