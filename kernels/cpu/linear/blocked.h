// Products panel by panel: all tiles of a chunk are multiplied with a panel, or with a part of it, one
// after another, with their sums in memory. Included once per instruction set, after outputs.h.

// Adds the products of kRows rows and a part of a panel to `sums` [kRows, kPanelWidth], or begins them.
template <int kRows, typename Step>
static void add_tile(const char* rows, int64_t row_bytes, const char* panel, int64_t num_steps,
                     const PrefetchSchedule& prefetch, bool begins, float* sums) {
  Floats all[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
    for (int half = 0; half < 2; ++half)
      all[r][half] = begins ? Floats{} : load(sums + r * kPanelWidth + half * kLanes);
  multiply_tile<kRows, Step>(rows, row_bytes, panel, num_steps, prefetch, all);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
    for (int half = 0; half < 2; ++half) store(sums + r * kPanelWidth + half * kLanes, all[r][half]);
}

using AddTile = void (*)(const char*, int64_t, const char*, int64_t, const PrefetchSchedule&, bool,
                         float*);

// For 1 to kTileRows rows.
template <typename Step, int... kFewer>
static AddTile add_tile_of(int64_t num_rows, std::integer_sequence<int, kFewer...>) {
  static constexpr AddTile kTiles[] = {add_tile<1 + kFewer, Step>...};
  return kTiles[num_rows - 1];
}

template <typename Step>
static AddTile add_tile_of(int64_t num_rows) {
  return add_tile_of<Step>(num_rows, std::make_integer_sequence<int, kTileRows>());
}

// A thread's scratch memory: sums of a block's rows with a panel of each weight, then the kernel's.
struct BlockScratch {
  BlockScratch(int64_t num_rows, char* memory)
      : sums{reinterpret_cast<float*>(memory),
             reinterpret_cast<float*>(memory) + num_rows * kPanelWidth},
        rest(memory + num_bytes(num_rows)) {}

  static int64_t num_bytes(int64_t num_rows) {
    return 2 * num_rows * kPanelWidth * static_cast<int64_t>(sizeof(float));
  }

  float* const sums[2];
  char* const rest;
};

// One of the passes over the tiles of a chunk, one per weight.
struct Pass {
  const char* panel;
  int64_t number;
  int64_t panel_number;
  float* sums;  // [rows of the block, kPanelWidth]
};

// A `Kernel` is constructed with call, chunk and scratch memory, and adds up the products of a pass.
template <typename Kernel>
static void multiply_blocked(const LinearCall& call, const Chunk& chunk, char* scratch) {
  const BlockScratch own(chunk.end_row - chunk.first_row, scratch);
  const Tiles tiles(chunk, Kernel::kMostRows);
  const Kernel kernel(call, chunk, tiles, own.rest);
  for (int64_t panel = chunk.first_panel; panel < chunk.end_panel; ++panel) {
    const Panels panels = call.panels.from(panel);
    kernel.add_up(Pass{panels.first, 0, panel, own.sums[0]});
    if (panels.second) kernel.add_up(Pass{panels.second, 1, panel, own.sums[1]});
    const int64_t from = tiles.begin_of(chunk.first_tile), to = tiles.begin_of(chunk.end_tile);
    write_rows(call, chunk.first_row + from, to - from, panel * kPanelWidth,
               own.sums[0] + from * kPanelWidth, own.sums[1] + from * kPanelWidth);
  }
}
