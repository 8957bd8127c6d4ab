// Exchanges tensors between ranks, processes of one host, through memory that they share.
//
// Each rank has two slots, which exchanges use alternately, and the number of the exchange that it has
// arrived at. In an exchange a rank writes its part into its slot, arrives, waits until the others have
// arrived, and reads their slots. A rank that arrives has finished reading the previous exchange. So when
// all have arrived at exchange n - 1, the slots of exchange n, which are those of n - 2, can be written.
#pragma once

#include <torch/custom_class.h>
#include <torch/library.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "ops.h"

namespace quire::ranks {

// Two lines, because processors fetch pairs of them.
constexpr int64_t kRankBytes = 128;

// One rank's progress.
struct alignas(kRankBytes) Arrival {
  std::atomic<uint32_t> number;  // of the last exchange that it has arrived at; a futex
  std::atomic<uint32_t> num_sleeping;  // ranks that wait for it and need to be woken
};
static_assert(sizeof(Arrival) == kRankBytes && std::atomic<uint32_t>::is_always_lock_free);

class Exchange : public torch::CustomClassHolder {
 public:
  // `memory` [bytes]: zeros in the beginning, `head_bytes` with the arrivals, and the slots of each
  // rank. `processes` are file descriptors by which the kernel reports the end of each rank's process,
  // or -1. A wait for another rank fails after `timeout_s`.
  Exchange(Tensor memory, int64_t head_bytes, int64_t rank, int64_t size, int64_t slot_bytes,
           std::vector<int64_t> processes, double timeout_s, int64_t isa);

  bool is_first() const { return rank_ == 0; }
  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t isa() const { return isa_; }

  // The number of the next exchange. All ranks make the same exchanges in the same order.
  uint32_t next() { return ++number_; }

  char* slot(int64_t rank, uint32_t number) const {
    return slots_ + (2 * rank + number % 2) * slot_bytes_;
  }
  // What a rank writes into its slot, or the others read there: like this tensor, which fits into it.
  Tensor slot_like(int64_t rank, uint32_t number, const Tensor& like) const;

  // Returns when this rank may write into its slot. Other threads may call it, too, as all others.
  void wait_for_slot(uint32_t number) { wait_for_all(number - 1); }
  void arrive(uint32_t number);
  // `is_idle`: without a timeout.
  void wait_for(int64_t rank, uint32_t number, bool is_idle = false);
  void wait_for_all(uint32_t number);

  // Stages of a sum over the ranks, whose parts are in the slots: they arrive, wait, and add the parts
  // in the order of ranks. The first stage has to be the one that waits.
  std::vector<Stage> sum_stages(uint32_t number, const Tensor& out);
  // Stages that copy row i of the rank `owners[i]`.
  std::vector<Stage> select_stages(uint32_t number, std::vector<int64_t> owners, const Tensor& out);

  // What exchanges have cost since the last call: their number, bytes that this rank wrote, and
  // nanoseconds that its threads spent waiting, copying and adding.
  std::vector<int64_t> take_usage();
  void count(int64_t num_bytes) { ++num_calls_, num_bytes_ += num_bytes; }

  // Adds the time from its construction to its end.
  class Clock {
   public:
    explicit Clock(Exchange& exchange);
    ~Clock();

   private:
    Exchange& exchange_;
    const int64_t begun_ns_;
  };

 private:
  bool has_arrived(int64_t rank, uint32_t number) const;
  bool spin(int64_t rank, uint32_t number) const;
  void check_alive(int64_t rank) const;
  Stage wait_stage(uint32_t number, int64_t num_bytes);

  const Tensor memory_;
  Arrival* const arrivals_;
  char* const slots_;
  const int64_t rank_, size_, slot_bytes_;
  const std::vector<int64_t> processes_;
  const int64_t timeout_ns_, isa_;
  uint32_t number_ = 0;
  std::atomic<int64_t> num_calls_{0}, num_bytes_{0}, spent_ns_{0};
};

// Registers `torch.classes.quire.Exchange`, before operations that take one.
void define_exchange(torch::Library& library);

}  // namespace quire::ranks
