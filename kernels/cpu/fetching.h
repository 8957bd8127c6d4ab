// What a product fetches into the second-level cache while it multiplies, at an even pace, so that
// memory and arithmetic take their time together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear.h"

namespace quire::linear {

constexpr int64_t kLine = 64;

struct Range {
  const char* begin = nullptr;
  int64_t bytes = 0;
};

// Of a tile's inputs those up to `end`: at each of them `step` bytes more are fetched.
struct Stretch {
  int64_t end;
  const char* due;
  int64_t step;
};

// What is fetched while a tile is multiplied with a panel.
struct Ahead {
  Stretch stretches[3];  // up to the last input; what is behind that is of no meaning
};

// What the tiles of a block fetch on their way through the panels.
class Fetching {
 public:
  Fetching(const Product& call, int64_t num_tiles)
      : num_inputs_(std::max<int64_t>(1, call.num_inputs)),
        num_passes_(call.panels.second ? 2 : 1),
        num_tiles_(num_tiles),
        panel_bytes_(call.panels.bytes),
        share_((panel_bytes_ + num_tiles - 1) / num_tiles),
        step_((share_ + num_inputs_ - 1) / num_inputs_) {}

  // For a tile and a panel, in one of the passes, of which there is one per weight: an equal share
  // of what is `coming` after the panel, and of `rows`. A tile that is alone reads as fast as memory
  // gives, and fetches what it needs itself in a moment; so do all where two panels are too much for
  // the second-level caches that are usual.
  Ahead ahead(const char* panel, int64_t pass, int64_t tile, const Panels& coming,
              const Range& rows) const {
    if (num_tiles_ == 1 || panel_bytes_ > kLargestPanel)
      return {{{num_inputs_, panel + kMoment, panel_bytes_ / num_inputs_}}};
    if (coming.bytes > kLargestPanel) return in_turn({share(rows, pass, num_passes_)}, panel);
    if (is_alike(coming) && !rows.bytes) {
      const char* next = pass == 0 ? coming.first : coming.second;
      return {{{num_inputs_, next + tile * share_, step_}}};
    }
    const int64_t turn = pass * num_tiles_ + tile, num_turns = num_passes_ * num_tiles_;
    return in_turn({share(rows, pass, num_passes_),
                    share({coming.first, coming.bytes}, turn, num_turns),
                    share({coming.second, coming.bytes}, turn, num_turns)},
                   panel);
  }

 private:
  static constexpr int64_t kMoment = 8 << 10, kLargestPanel = 512 << 10;

  // Panels of as many bytes and weights, the usual case: each pass fetches those of its own weight.
  bool is_alike(const Panels& coming) const {
    return coming.first && coming.bytes == panel_bytes_ && (coming.second ? 2 : 1) == num_passes_;
  }

  static Range share(const Range& all, int64_t index, int64_t count) {
    if (!all.begin) return {};
    const int64_t from = all.bytes * index / count, to = all.bytes * (index + 1) / count;
    return {all.begin + from, to - from};
  }

  // Each range takes its part of the inputs, and ends early if that is more than two lines for each
  // of them; if there are none, what is `at_hand` is fetched.
  Ahead in_turn(const Range (&ranges)[3], const char* at_hand) const {
    int64_t bytes = 0, bytes_before = 0, begin = 0;
    for (const Range& range : ranges) bytes += range.bytes;
    Ahead ahead{{{num_inputs_, at_hand, 0}}};
    if (!bytes) return ahead;
    for (int i = 0; i < 3; ++i) {
      bytes_before += ranges[i].bytes;
      const int64_t end = num_inputs_ * bytes_before / bytes;
      const int64_t inputs = std::max<int64_t>(1, end - begin);
      const int64_t step = (ranges[i].bytes + inputs - 1) / inputs;
      ahead.stretches[i] = {end, ranges[i].begin, std::min(step, 2 * kLine)};
      begin = end;
    }
    return ahead;
  }

  const int64_t num_inputs_, num_passes_, num_tiles_, panel_bytes_, share_, step_;
};

}  // namespace quire::linear
