// Work in stages, done by as many threads as ATen is told to use, which do not meet between them.
//
// A thread that finds no piece of a stage left goes on with the next one as soon as all pieces are
// done, not when all threads are there. And a piece whose thread stands still, because another
// process has its core, is done once more by one that would otherwise wait. So nobody is waited for
// but whoever is in the midst of a piece whose memory is needed again, and, at the end, whoever is
// there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace quire {

// Pieces that can be done in any order, side by side.
struct Stage {
  using Work = std::function<void(int64_t piece)>;

  enum Order {
    kRuns,  // each thread begins with its own run of neighbours, the same one every time
    kQueue  // all threads take the first piece that is left
  };

  int64_t num_pieces = 0;
  Order order = kQueue;
  Work work = {};
  // Of so many stages, from the list's first on, no piece may be at work any more, not even one that
  // was done by others meanwhile: because this stage overwrites what they read or write.
  int64_t num_left = 0;
};

// Whether pieces may be done twice, at the same time: if each writes nothing but what follows from
// what no stage changes while it is at work.
enum class Twice { kNever, kWhereStalled };

// The first piece of a run, of `num_runs` equal ones.
constexpr int64_t begin_of_run(int64_t run, int64_t num_pieces, int64_t num_runs) {
  return run * num_pieces / num_runs;
}

// Does all stages, one after the other. The first error that work throws is thrown when nobody is
// at work any more; what was not begun by then is left undone.
void run_stages(const std::vector<Stage>& stages, Twice twice);

inline void run(Stage stage) { run_stages({std::move(stage)}, Twice::kNever); }

// How many parts of at most `by` make `count`.
constexpr int64_t divided_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

// Calls `work(begin, end)` for parts of 0 to `count`, `per_piece` in each but the last.
template <typename Work>
Stage in_parts(int64_t count, int64_t per_piece, Work work) {
  const auto part = [=](int64_t piece) {
    const int64_t begin = piece * per_piece;
    work(begin, std::min(begin + per_piece, count));
  };
  return {divided_up(count, per_piece), Stage::kRuns, part};
}

}  // namespace quire
