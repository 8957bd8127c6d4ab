#include "threading/stages.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>

#include "threading/spin_wait.h"
#include "threading/thread_pool.h"

namespace quire {
namespace {

// Threads write to separate cache lines.
constexpr int64_t kLineBytes = 64;
constexpr int64_t kNoChunk = std::numeric_limits<int64_t>::max();
// A chunk is overdue after twice the longest time that a chunk of this stage has taken, at least
// kLeastOverdueNs; while none is done, after kFirstOverdueNs.
constexpr int64_t kLeastOverdueNs = 6'000, kFirstOverdueNs = 300'000;
// A thread that waits looks at all threads once in so many spins per thread, for stragglers.
constexpr int64_t kSpinsPerThread = 2, kMostSpins = 64;

// The first chunk of a thread's range, or of the queue, that has not begun.
struct alignas(kLineBytes) Range {
  std::atomic<int64_t> next;
};

// Which chunks of one stage have begun, and which are done.
class Progress {
 public:
  enum State : uint8_t { kOpen, kBegun, kBegunAgain, kDone };

  // Before any thread begins. `ranges` [num_ranges] and `states` [num_chunks], which are open, belong
  // to the caller.
  void prepare(int64_t num_chunks, int64_t num_ranges, Range* ranges, std::atomic<uint8_t>* states) {
    num_chunks_ = num_chunks;
    num_ranges_ = num_ranges;
    ranges_ = ranges;
    states_ = states;
    num_open_.store(num_chunks, std::memory_order_relaxed);
    for (int64_t range = 0; range < num_ranges; ++range)
      ranges[range].next.store(begin_of(range), std::memory_order_relaxed);
  }

  bool is_done() const { return num_open_ == 0; }

  // Takes a chunk that has not begun, from the thread's own range first; kNoChunk if there is none.
  int64_t begin(int64_t thread) {
    for (int64_t offset = 0; offset < num_ranges_; ++offset) {
      const int64_t range = (thread + offset) % num_ranges_, end = begin_of(range + 1);
      if (ranges_[range].next >= end) continue;
      const int64_t chunk = ranges_[range].next++;
      if (chunk >= end) continue;
      states_[chunk] = kBegun;
      return chunk;
    }
    return kNoChunk;
  }

  // Whether the chunk may begin once more.
  bool begin_again(int64_t chunk) {
    uint8_t state = kBegun;
    return states_[chunk].compare_exchange_strong(state, kBegunAgain);
  }

  void end(int64_t chunk, int64_t took_ns) {
    int64_t longest_ns = longest_ns_;
    while (took_ns > longest_ns && !longest_ns_.compare_exchange_weak(longest_ns, took_ns)) {
    }
    if (states_[chunk].exchange(kDone) != kDone) --num_open_;
  }

  int64_t overdue_ns() const {
    const int64_t longest_ns = longest_ns_;
    return longest_ns ? std::max(kLeastOverdueNs, 2 * longest_ns) : kFirstOverdueNs;
  }

 private:
  int64_t begin_of(int64_t range) const {
    return begin_of_range(range, num_chunks_, num_ranges_);
  }

  int64_t num_chunks_ = 0, num_ranges_ = 0;
  Range* ranges_ = nullptr;
  std::atomic<uint8_t>* states_ = nullptr;
  alignas(kLineBytes) std::atomic<int64_t> num_open_{0};
  std::atomic<int64_t> longest_ns_{0};
};

// The progress of all stages, in three pieces of memory: with pieces for each of hundreds of stages,
// allocating would take as long as some stages.
class AllProgress {
 public:
  AllProgress(const std::vector<Stage>& stages, int64_t num_threads)
      : stages_(new Progress[stages.size()]) {
    const auto num_ranges = [=](const Stage& stage) {
      return stage.order == Stage::kRanges ? num_threads : 1;
    };
    int64_t all_ranges = 0, all_chunks = 0;
    for (const Stage& stage : stages) all_ranges += num_ranges(stage), all_chunks += stage.num_chunks;
    ranges_.reset(new Range[all_ranges]);
    states_.reset(new std::atomic<uint8_t>[all_chunks]);
    for (int64_t i = 0; i < all_chunks; ++i)
      states_[i].store(Progress::kOpen, std::memory_order_relaxed);
    Progress* progress = stages_.get();
    Range* ranges = ranges_.get();
    std::atomic<uint8_t>* states = states_.get();
    for (const Stage& stage : stages) {
      progress++->prepare(stage.num_chunks, num_ranges(stage), ranges, states);
      ranges += num_ranges(stage), states += stage.num_chunks;
    }
  }

  Progress& operator[](int64_t stage) { return stages_[stage]; }

 private:
  const std::unique_ptr<Progress[]> stages_;
  std::unique_ptr<Range[]> ranges_;
  std::unique_ptr<std::atomic<uint8_t>[]> states_;
};

// What the threads fetch while they wait: the first reads of the next stage that has any.
class ReadAhead {
 public:
  ReadAhead(const std::vector<Stage>& stages, int64_t num_threads)
      : stages_(stages), readers_(stages.size()), places_(new Place[num_threads]) {
    int64_t reader = kNone;
    for (auto stage = static_cast<int64_t>(stages.size()); stage-- > 0;) {
      readers_[stage] = reader;
      if (!stages[stage].first_reads.empty()) reader = stage;
    }
  }

  // Fetches a part of what a thread that waits for the end of a stage reads next.
  void continue_at(int64_t stage, int64_t thread) {
    const int64_t reader = readers_[stage];
    if (reader == kNone) return;
    Place& place = places_[thread];
    if (place.reader != reader) place.reader = reader, place.done = 0;
    const Reads& reads = stages_[reader].first_reads[thread];
    const int64_t end = std::min(place.done + kBytesAtOnce, reads.bytes);
    for (; place.done < end; place.done += kLineBytes) {
      __builtin_prefetch(reads.first + place.done, 0, 2);
      if (reads.second) __builtin_prefetch(reads.second + place.done, 0, 2);
    }
  }

 private:
  static constexpr int64_t kNone = -1, kBytesAtOnce = 512;

  struct alignas(kLineBytes) Place {
    int64_t reader = kNone, done = 0;
  };

  const std::vector<Stage>& stages_;
  std::vector<int64_t> readers_;  // the next stage with first reads, by stage
  const std::unique_ptr<Place[]> places_;
};

// One execution of all stages.
class Execution {
 public:
  Execution(const std::vector<Stage>& stages, Backup backup, int64_t num_threads)
      : stages_(stages),
        backup_(backup),
        num_threads_(num_threads),
        threads_(new ThreadState[num_threads]),
        progress_(stages, num_threads),
        read_ahead_(stages, num_threads) {}

  // Executes all stages on one of the threads.
  void work(int64_t thread) {
    const auto num_stages = static_cast<int64_t>(stages_.size());
    for (int64_t stage = 0; stage < num_stages; ++stage) {
      threads_[thread].stage = stage;
      if (progress_[stage].is_done()) continue;
      wait_until_idle(stages_[stage].num_must_be_idle);
      execute_chunks(stage, thread);
      wait_for_end(stage, thread);
    }
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  struct alignas(kLineBytes) ThreadState {
    std::atomic<int64_t> stage{0}, chunk{kNoChunk}, since_ns{0};
    std::atomic<bool> is_busy{false};
  };

  // Marks a thread busy from before it takes a chunk until the chunk is done. After a stage is seen
  // to be done, a thread that is not busy executes no chunk of it and will take none.
  class BusyMark {
   public:
    explicit BusyMark(ThreadState& state) : state_(state) { state_.is_busy = true; }
    ~BusyMark() { state_.is_busy = false; }

   private:
    ThreadState& state_;
  };

  // Waits until no thread executes a chunk of the first `num_stages` stages. All their chunks are
  // done, some of them by backups.
  void wait_until_idle(int64_t num_stages) {
    for (int64_t thread = 0; thread < num_threads_; ++thread) {
      const ThreadState& state = threads_[thread];
      SpinWait wait;
      while (state.is_busy && state.stage < num_stages) wait.spin_once();
    }
  }

  void execute_chunks(int64_t stage, int64_t thread) {
    const BusyMark busy(threads_[thread]);
    int64_t now = now_ns();
    for (int64_t chunk; (chunk = progress_[stage].begin(thread)) != kNoChunk;)
      now = execute(stage, thread, chunk, now);
  }

  // Returns the time when the chunk was done.
  int64_t execute(int64_t stage, int64_t thread, int64_t chunk, int64_t begun_ns) {
    ThreadState& state = threads_[thread];
    state.since_ns = begun_ns;
    state.chunk = chunk;
    try {
      if (!failed_) stages_[stage].work(chunk);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
      failed_ = true;
    }
    state.chunk = kNoChunk;
    const int64_t ended_ns = now_ns();
    progress_[stage].end(chunk, ended_ns - begun_ns);
    return ended_ns;
  }

  // Waits until all chunks are done, executes stragglers, and fetches what comes next.
  void wait_for_end(int64_t stage, int64_t thread) {
    const int64_t spins_per_look = std::min(kMostSpins, kSpinsPerThread * num_threads_);
    SpinWait wait;
    for (int64_t spins = 1; !progress_[stage].is_done(); ++spins) {
      read_ahead_.continue_at(stage, thread);
      wait.spin_once();
      if (backup_ == Backup::kStragglers && spins % spins_per_look == 0)
        execute_stragglers(stage, thread);
    }
  }

  void execute_stragglers(int64_t stage, int64_t thread) {
    const BusyMark busy(threads_[thread]);
    for (int64_t other = 0; other < num_threads_; ++other) {
      const ThreadState& state = threads_[other];
      const int64_t chunk = state.chunk;
      if (other == thread || state.stage != stage || chunk == kNoChunk) continue;
      const int64_t now = now_ns();
      if (now - state.since_ns < progress_[stage].overdue_ns()) continue;
      // The thread may have moved on since. Then `chunk` is another chunk of this stage, or out of
      // its range.
      if (chunk < stages_[stage].num_chunks && progress_[stage].begin_again(chunk))
        execute(stage, thread, chunk, now);
    }
  }

  const std::vector<Stage>& stages_;
  const Backup backup_;
  const int64_t num_threads_;
  const std::unique_ptr<ThreadState[]> threads_;
  AllProgress progress_;
  ReadAhead read_ahead_;
  std::atomic<bool> failed_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

}  // namespace

void run_stages(const std::vector<Stage>& stages, Backup backup) {
  int64_t most_chunks = 0;
  for (const Stage& stage : stages) most_chunks = std::max(most_chunks, stage.num_chunks);
  const int64_t num_threads = std::min<int64_t>(most_chunks, at::get_num_threads());
  if (num_threads <= 1) {
    for (const Stage& stage : stages)
      for (int64_t chunk = 0; chunk < stage.num_chunks; ++chunk) stage.work(chunk);
    return;
  }
  Execution execution(stages, backup, num_threads);
  run_on_pool(num_threads, [&](int64_t thread) { execution.work(thread); });
  execution.rethrow();
}

}  // namespace quire
