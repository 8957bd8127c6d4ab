// Work in stages, executed by ATen's number of threads without a barrier between stages.
//
// A thread begins the next stage as soon as all chunks of a stage are done; it does not wait for the
// other threads. A straggler is a chunk whose thread stands still because another process has its core.
// A thread that would otherwise wait executes it a second time. So its own thread is awaited only by a
// stage that overwrites memory of the chunk (`num_must_be_idle`), and at the end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace quire {

// Memory that a thread reads from its beginning on: one piece, or two of the same size alternately.
struct Reads {
  const char *first = nullptr, *second = nullptr;
  int64_t bytes = 0;  // of a piece
};

// Chunks of work that can be executed in any order, in parallel.
struct Stage {
  using Work = std::function<void(int64_t chunk)>;

  enum Order {
    kRanges,  // each thread begins with its own range of adjacent chunks, the same one every time
    kQueue  // all threads take the first chunk that is left
  };

  int64_t num_chunks = 0;
  Order order = kQueue;
  Work work = {};
  // This stage overwrites memory of the first `num_must_be_idle` stages of the list. It begins when no
  // thread executes their chunks any more, stragglers included.
  int64_t num_must_be_idle = 0;
  // What each thread reads first, or empty. A thread that waits for the end of an earlier stage fetches
  // it into its second-level cache: otherwise memory would be idle.
  std::vector<Reads> first_reads = {};
};

// Whether a straggler may be executed by two threads at the same time. Allowed if no stage changes a
// chunk's inputs while it is executed.
enum class Backup { kNever, kStragglers };

// The first chunk of a range, of `num_ranges` equal ones.
constexpr int64_t begin_of_range(int64_t range, int64_t num_chunks, int64_t num_ranges) {
  return range * num_chunks / num_ranges;
}

// Executes all stages in order. Rethrows the first error that work throws, once no thread executes a
// chunk any more; chunks that had not begun by then are skipped.
void run_stages(const std::vector<Stage>& stages, Backup backup);

inline void run(Stage stage) { run_stages({std::move(stage)}, Backup::kNever); }

constexpr int64_t ceil_div(int64_t count, int64_t by) { return (count + by - 1) / by; }

// A stage that calls `work(begin, end)` for ranges of [0, count), each of `per_chunk` but the last.
template <typename Work>
Stage range_stage(int64_t count, int64_t per_chunk, Work work) {
  const auto range = [=](int64_t chunk) {
    const int64_t begin = chunk * per_chunk;
    work(begin, std::min(begin + per_chunk, count));
  };
  return {ceil_div(count, per_chunk), Stage::kRanges, range};
}

}  // namespace quire
