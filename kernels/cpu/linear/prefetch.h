// Schedules what a linear layer prefetches into the second-level cache while it multiplies, at an even
// pace, so that memory accesses and arithmetic overlap.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear/linear.h"

namespace quire::linear {

constexpr int64_t kLine = 64;

// What is read in order is prefetched so many bytes ahead.
constexpr int64_t kShortDistance = 8 << 10;

struct ByteRange {
  const char* begin = nullptr;
  int64_t bytes = 0;
};

// The tile's steps up to `end`: at each of them the next `step` bytes from `due` are prefetched.
struct PrefetchSpan {
  int64_t end;
  const char* due;
  int64_t step;
};

// What is prefetched while a tile is multiplied with a panel.
struct PrefetchSchedule {
  PrefetchSpan spans[3];  // up to the last step; the spans after that are undefined
};

// Schedules the prefetching of a block's tiles.
class Prefetcher {
 public:
  // A tile takes `num_steps` steps for a panel.
  Prefetcher(const LinearCall& call, int64_t num_tiles, int64_t num_steps)
      : num_steps_(std::max<int64_t>(1, num_steps)),
        num_passes_(call.panels.second ? 2 : 1),
        num_tiles_(num_tiles),
        panel_bytes_(call.panels.bytes),
        share_((panel_bytes_ + num_tiles - 1) / num_tiles),
        step_((share_ + num_steps_ - 1) / num_steps_) {}

  // The schedule for a tile and a panel, in one of the passes, one per weight: an equal share of the
  // next panels and of `rows`. A single tile is bound by memory, and prefetches the panel that it is
  // reading, a short distance ahead; so do all tiles if two panels exceed usual second-level caches.
  // But with two weights, between which it alternates, a single tile prefetches the next panels, if
  // they are small: after a change there would be nothing at hand.
  PrefetchSchedule schedule(const char* panel, int64_t pass, int64_t tile, const Panels& next,
                    const ByteRange& rows) const {
    if (is_sequential() || panel_bytes_ > kLargestPanel)
      return {{{num_steps_, panel + kShortDistance, panel_bytes_ / num_steps_}}};
    if (next.bytes > kLargestPanel) return in_sequence({share(rows, pass, num_passes_)}, panel);
    if (has_same_shape(next) && !rows.bytes) {
      const char* panels = pass == 0 ? next.first : next.second;
      return {{{num_steps_, panels + tile * share_, step_}}};
    }
    const int64_t index = pass * num_tiles_ + tile, count = num_passes_ * num_tiles_;
    return in_sequence({share(rows, pass, num_passes_),
                    share({next.first, next.bytes}, index, count),
                    share({next.second, next.bytes}, index, count)},
                       panel);
  }

  // The schedule for a tile that prefetches what it reads, a short distance ahead: the rest of its
  // panel, then the first bytes of `following`, which is read afterwards. Null: of what is adjacent.
  PrefetchSchedule ahead(const char* panel, const char* following) const {
    const int64_t step = panel_bytes_ / num_steps_;
    if (!following) return {{{num_steps_, panel + kShortDistance, step}}};
    const int64_t bytes = std::min(panel_bytes_, kShortDistance);
    const int64_t own_steps = num_steps_ * (panel_bytes_ - bytes) / panel_bytes_;
    return {{{own_steps, panel + bytes, step}, {num_steps_, following, step}}};
  }

 private:
  static constexpr int64_t kLargestPanel = 512 << 10, kLargestPanelAhead = 48 << 10;

  bool is_sequential() const {
    return num_tiles_ == 1 && (num_passes_ == 1 || panel_bytes_ > kLargestPanelAhead);
  }

  // The usual case, panels of the same size and number of weights: each pass prefetches its weight's.
  bool has_same_shape(const Panels& next) const {
    return next.first && next.bytes == panel_bytes_ && (next.second ? 2 : 1) == num_passes_;
  }

  static ByteRange share(const ByteRange& all, int64_t index, int64_t count) {
    if (!all.begin) return {};
    const int64_t from = all.bytes * index / count, to = all.bytes * (index + 1) / count;
    return {all.begin + from, to - from};
  }

  // Assigns each range a share of the steps by its bytes, at most two lines for each step; the rest
  // of the range is not prefetched. Without ranges, prefetches `at_hand`, which costs nothing.
  PrefetchSchedule in_sequence(const ByteRange (&ranges)[3], const char* at_hand) const {
    int64_t bytes = 0, bytes_before = 0, begin = 0;
    for (const ByteRange& range : ranges) bytes += range.bytes;
    PrefetchSchedule schedule{{{num_steps_, at_hand, 0}}};
    if (!bytes) return schedule;
    for (int i = 0; i < 3; ++i) {
      bytes_before += ranges[i].bytes;
      const int64_t end = num_steps_ * bytes_before / bytes;
      const int64_t steps = std::max<int64_t>(1, end - begin);
      const int64_t step = (ranges[i].bytes + steps - 1) / steps;
      schedule.spans[i] = {end, ranges[i].begin, std::min(step, 2 * kLine)};
      begin = end;
    }
    return schedule;
  }

  const int64_t num_steps_, num_passes_, num_tiles_, panel_bytes_, share_, step_;
};

}  // namespace quire::linear
