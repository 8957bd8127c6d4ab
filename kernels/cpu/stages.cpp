#include "stages.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>

#include "crew.h"
#include "patience.h"

namespace quire {
namespace {

// What threads write stands in lines of its own.
constexpr int64_t kLineBytes = 64;
constexpr int64_t kNowhere = std::numeric_limits<int64_t>::max();
// A piece is overdue after twice the time of the longest that was done in this stage so far, but not
// before the first time, which is that of small ones; where none is done, after the second.
constexpr int64_t kPatienceNs = 30'000, kPatienceWithFirstNs = 300'000;

// Pieces of one stage that were begun, and that are done.
class Progress {
 public:
  Progress(const Stage& stage, int64_t num_threads)
      : stage_(stage),
        num_runs_(stage.order == Stage::kRuns ? num_threads : 1),
        runs_(new Neighbours[num_runs_]),
        states_(new std::atomic<uint8_t>[stage.num_pieces]),
        num_open_(stage.num_pieces) {
    for (int64_t run = 0; run < num_runs_; ++run) runs_[run].next = begin_of(run);
    for (int64_t piece = 0; piece < stage.num_pieces; ++piece) states_[piece] = kOpen;
  }

  bool is_done() const { return num_open_ == 0; }

  // A piece that nobody has begun, the thread's own ones first; kNowhere if there is none.
  int64_t begin(int64_t thread) {
    for (int64_t turn = 0; turn < num_runs_; ++turn) {
      const int64_t run = (thread + turn) % num_runs_, end = begin_of(run + 1);
      if (runs_[run].next >= end) continue;
      const int64_t piece = runs_[run].next++;
      if (piece >= end) continue;
      states_[piece] = kBegun;
      return piece;
    }
    return kNowhere;
  }

  // Whether it may be begun once more.
  bool begin_again(int64_t piece) {
    uint8_t state = kBegun;
    return states_[piece].compare_exchange_strong(state, kBegunAgain);
  }

  void end(int64_t piece, int64_t took_ns) {
    int64_t longest_ns = longest_ns_;
    while (took_ns > longest_ns && !longest_ns_.compare_exchange_weak(longest_ns, took_ns)) {
    }
    if (states_[piece].exchange(kDone) != kDone) --num_open_;
  }

  int64_t overdue_ns() const {
    const int64_t longest_ns = longest_ns_;
    return longest_ns ? std::max(kPatienceNs, 2 * longest_ns) : kPatienceWithFirstNs;
  }

 private:
  enum : uint8_t { kOpen, kBegun, kBegunAgain, kDone };
  struct alignas(kLineBytes) Neighbours {
    std::atomic<int64_t> next;
  };

  int64_t begin_of(int64_t run) const { return begin_of_run(run, stage_.num_pieces, num_runs_); }

  const Stage& stage_;
  const int64_t num_runs_;
  const std::unique_ptr<Neighbours[]> runs_;
  const std::unique_ptr<std::atomic<uint8_t>[]> states_;
  alignas(kLineBytes) std::atomic<int64_t> num_open_;
  std::atomic<int64_t> longest_ns_{0};
};

// One run through all stages.
class Run {
 public:
  Run(const std::vector<Stage>& stages, Twice twice, int64_t num_threads)
      : stages_(stages), twice_(twice), num_threads_(num_threads), places_(new Place[num_threads]) {
    progress_.reserve(stages.size());
    for (const Stage& stage : stages)
      progress_.push_back(std::make_unique<Progress>(stage, num_threads));
  }

  // What one of the threads does, from the first stage to the last.
  void work(int64_t thread) {
    const auto num_stages = static_cast<int64_t>(stages_.size());
    for (int64_t stage = 0; stage < num_stages; ++stage) {
      places_[thread].stage = stage;
      if (progress_[stage]->is_done()) continue;
      wait_for_pieces_of(stages_[stage].num_left);
      do_pieces(stage, thread);
      finish(stage, thread);
    }
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  // Where a thread is.
  struct alignas(kLineBytes) Place {
    std::atomic<int64_t> stage{0}, piece{kNowhere}, since_ns{0};
    std::atomic<bool> at_work{false};
  };

  // Said before a piece is taken and until it is done: who sees a stage done, and then reads that a
  // thread is not at work, knows that it is at no piece of it and takes none any more.
  class AtWork {
   public:
    explicit AtWork(Place& place) : place_(place) { place_.at_work = true; }
    ~AtWork() { place_.at_work = false; }

   private:
    Place& place_;
  };

  // Those of the stages before `num_stages`, all of which are done, though some by others.
  void wait_for_pieces_of(int64_t num_stages) {
    for (int64_t thread = 0; thread < num_threads_; ++thread) {
      const Place& place = places_[thread];
      Patience patience;
      while (place.at_work && place.stage < num_stages) patience.look_again();
    }
  }

  void do_pieces(int64_t stage, int64_t thread) {
    const AtWork at_work(places_[thread]);
    int64_t now = now_ns();
    for (int64_t piece; (piece = progress_[stage]->begin(thread)) != kNowhere;)
      now = do_piece(stage, thread, piece, now);
  }

  // Returns when it was done.
  int64_t do_piece(int64_t stage, int64_t thread, int64_t piece, int64_t begun_ns) {
    Place& place = places_[thread];
    place.since_ns = begun_ns;
    place.piece = piece;
    try {
      if (!failed_) stages_[stage].work(piece);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
      failed_ = true;
    }
    place.piece = kNowhere;
    const int64_t ended_ns = now_ns();
    progress_[stage]->end(piece, ended_ns - begun_ns);
    return ended_ns;
  }

  // Waits until all pieces are done, and does those that others do not get done.
  void finish(int64_t stage, int64_t thread) {
    Patience patience;
    while (!progress_[stage]->is_done()) {
      patience.look_again();
      if (twice_ == Twice::kWhereStalled && patience.is_time_to_look_at_the_clock())
        help(stage, thread);
    }
  }

  void help(int64_t stage, int64_t thread) {
    const AtWork at_work(places_[thread]);
    for (int64_t other = 0; other < num_threads_; ++other) {
      const Place& place = places_[other];
      const int64_t piece = place.piece;
      if (other == thread || place.stage != stage || piece == kNowhere) continue;
      const int64_t now = now_ns();
      if (now - place.since_ns < progress_[stage]->overdue_ns()) continue;
      // It may have gone on since; then it is a piece of this stage all the same, or none at all.
      if (piece < stages_[stage].num_pieces && progress_[stage]->begin_again(piece))
        do_piece(stage, thread, piece, now);
    }
  }

  const std::vector<Stage>& stages_;
  const Twice twice_;
  const int64_t num_threads_;
  const std::unique_ptr<Place[]> places_;
  std::vector<std::unique_ptr<Progress>> progress_;
  std::atomic<bool> failed_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

}  // namespace

void run_stages(const std::vector<Stage>& stages, Twice twice) {
  int64_t most_pieces = 0;
  for (const Stage& stage : stages) most_pieces = std::max(most_pieces, stage.num_pieces);
  const int64_t num_threads = std::min<int64_t>(most_pieces, at::get_num_threads());
  if (num_threads <= 1) {
    for (const Stage& stage : stages)
      for (int64_t piece = 0; piece < stage.num_pieces; ++piece) stage.work(piece);
    return;
  }
  Run run(stages, twice, num_threads);
  work_together(num_threads, [&](int64_t thread) { run.work(thread); });
  run.rethrow();
}

}  // namespace quire
