#include "ranks/exchange.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <poll.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "ranks/futex.h"
#include "threading/spin_wait.h"

namespace quire::ranks {
namespace {

// A rank that is about to arrive is awaited without a system call, and then, while other threads may
// use the core, up to kSpinNs: longer than ranks with cores of their own are apart.
constexpr int64_t kPauseNs = 20'000, kSpinNs = 500'000;
// Then the rank sleeps, at first for kFirstSleepNs, and between checks whether the other one is alive
// longer and longer.
constexpr int64_t kFirstSleepNs = 20'000'000, kLongestSleepNs = 1'000'000'000;
constexpr int64_t kCopyBytes = 1 << 16;

}  // namespace

Exchange::Exchange(Tensor memory, int64_t head_bytes, int64_t rank, int64_t size, int64_t slot_bytes,
                   std::vector<int64_t> processes, double timeout_s, int64_t isa)
    : memory_(std::move(memory)),
      arrivals_(static_cast<Arrival*>(memory_.mutable_data_ptr())),
      slots_(static_cast<char*>(memory_.mutable_data_ptr()) + head_bytes),
      rank_(rank),
      size_(size),
      slot_bytes_(slot_bytes),
      processes_(std::move(processes)),
      timeout_ns_(static_cast<int64_t>(timeout_s * 1e9)),
      isa_(isa) {
  TORCH_CHECK(memory_.is_contiguous() && memory_.scalar_type() == at::kByte &&
                  memory_.numel() >= head_bytes + 2 * size * slot_bytes &&
                  head_bytes >= size * kRankBytes,
              "the memory must be bytes for the arrivals and two slots per rank");
  TORCH_CHECK(0 <= rank && rank < size && static_cast<int64_t>(processes_.size()) == size,
              "there must be a process per rank");
  TORCH_CHECK(slot_bytes > 0 && slot_bytes % kRankBytes == 0 && head_bytes % kRankBytes == 0,
              "slots must begin with a line");
}

Tensor Exchange::slot_like(int64_t rank, uint32_t number, const Tensor& like) const {
  TORCH_CHECK(static_cast<int64_t>(like.nbytes()) <= slot_bytes_, "a tensor is larger than a slot");
  return at::from_blob(slot(rank, number), like.sizes(), like.options());
}

bool Exchange::has_arrived(int64_t rank, uint32_t number) const {
  // Numbers may overflow.
  return static_cast<int32_t>(arrivals_[rank].number.load(std::memory_order_acquire) - number) >= 0;
}

void Exchange::arrive(uint32_t number) {
  Arrival& own = arrivals_[rank_];
  own.number.store(number, std::memory_order_seq_cst);
  // A rank that is about to sleep counts itself, and then reads the number once more.
  if (own.num_sleeping.load(std::memory_order_seq_cst)) wake_all(own.number);
}

bool Exchange::spin(int64_t rank, uint32_t number) const {
  SpinWait wait;
  const int64_t begun_ns = now_ns();
  while (!has_arrived(rank, number)) {
    wait.spin_once();
    if (!wait.is_clock_due()) continue;
    const int64_t spent_ns = now_ns() - begun_ns;
    if (spent_ns > kSpinNs) return false;
    if (spent_ns > kPauseNs) std::this_thread::yield();
  }
  return true;
}

void Exchange::wait_for(int64_t rank, uint32_t number, bool is_idle) {
  if (rank == rank_ || spin(rank, number)) return;
  Arrival& other = arrivals_[rank];
  const int64_t begun_ns = now_ns();
  int64_t sleep_ns = kFirstSleepNs;
  for (;;) {
    other.num_sleeping.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = other.number.load(std::memory_order_seq_cst);
    if (!has_arrived(rank, number)) sleep_while_equal(other.number, seen, sleep_ns);
    other.num_sleeping.fetch_sub(1, std::memory_order_seq_cst);
    if (has_arrived(rank, number)) return;
    check_alive(rank);
    TORCH_CHECK(is_idle || now_ns() - begun_ns < timeout_ns_, "rank ", rank,
                " has not arrived at an exchange within ", timeout_ns_ / 1'000'000, " ms");
    sleep_ns = std::min(2 * sleep_ns, kLongestSleepNs);
  }
}

void Exchange::check_alive(int64_t rank) const {
  pollfd process{static_cast<int>(processes_[rank]), POLLIN, 0};
  // Of a negative descriptor nothing is reported.
  const bool has_ended = poll(&process, 1, 0) > 0;
  TORCH_CHECK(!has_ended, "the process of rank ", rank, " has ended");
}

void Exchange::wait_for_all(uint32_t number) {
  for (int64_t rank = 0; rank < size_; ++rank) wait_for(rank, number);
}

Exchange::Clock::Clock(Exchange& exchange) : exchange_(exchange), begun_ns_(now_ns()) {}

Exchange::Clock::~Clock() { exchange_.spent_ns_ += now_ns() - begun_ns_; }

std::vector<int64_t> Exchange::take_usage() {
  return {num_calls_.exchange(0), num_bytes_.exchange(0), spent_ns_.exchange(0)};
}

// A single chunk: it may be executed twice, and arrives at the same number.
Stage Exchange::wait_stage(uint32_t number, int64_t num_bytes) {
  count(num_bytes);
  return {1, Stage::kQueue, [this, number](int64_t) {
            const Clock clock(*this);
            arrive(number);
            wait_for_all(number);
          }};
}

std::vector<Stage> Exchange::sum_stages(uint32_t number, const Tensor& out) {
  std::vector<const void*> parts;
  for (int64_t rank = 0; rank < size_; ++rank) parts.push_back(slot(rank, number));
  Stage add = fused::sum_stage(std::move(parts), out, isa_);
  add.work = [this, work = std::move(add.work)](int64_t chunk) {
    const Clock clock(*this);
    work(chunk);
  };
  return {wait_stage(number, out.nbytes()), std::move(add)};
}

std::vector<Stage> Exchange::select_stages(uint32_t number, std::vector<int64_t> owners,
                                           const Tensor& out) {
  const int64_t row_bytes = out.stride(0) * out.element_size();
  auto* const rows = static_cast<char*>(out.mutable_data_ptr());
  const auto copy = [this, number, rows, row_bytes, owners = std::move(owners)](int64_t begin,
                                                                               int64_t end) {
    const Clock clock(*this);
    for (int64_t row = begin; row < end; ++row)
      std::memcpy(rows + row * row_bytes, slot(owners[row], number) + row * row_bytes, row_bytes);
  };
  return {wait_stage(number, out.nbytes()),
          range_stage(out.size(0), std::max<int64_t>(1, kCopyBytes / std::max<int64_t>(1, row_bytes)),
                      copy)};
}

namespace {

using ExchangePtr = c10::intrusive_ptr<Exchange>;

// Calls `exchange_piece(first, bytes)` for each part of `num_bytes` that fits into a slot.
template <typename Piece>
void for_pieces(const ExchangePtr& exchange, int64_t num_bytes, Piece exchange_piece) {
  for (int64_t first = 0; first < num_bytes; first += exchange->slot_bytes())
    exchange_piece(first, std::min(exchange->slot_bytes(), num_bytes - first));
}

// The sum of all ranks' tensors, in another tensor; the same bits on all ranks.
Tensor sum(const ExchangePtr& exchange, const Tensor& part) {
  TORCH_CHECK(part.is_contiguous(), "a part of a sum must be dense");
  const Tensor out = at::empty_like(part), flat = out.view({-1});
  const auto* bytes = static_cast<const char*>(part.const_data_ptr());
  const int64_t item = part.element_size();
  for_pieces(exchange, part.nbytes(), [&](int64_t first, int64_t size) {
    const uint32_t number = exchange->next();
    {
      const Exchange::Clock clock(*exchange);
      exchange->wait_for_slot(number);
      std::memcpy(exchange->slot(exchange->rank(), number), bytes + first, size);
    }
    run_stages(exchange->sum_stages(number, flat.narrow(0, first / item, size / item)),
               Backup::kNever);
  });
  return out;
}

// Copies the bytes of rank 0 to all others, which may wait for them for any time. The tensor is dense.
void broadcast(const ExchangePtr& exchange, const Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "a message must be dense");
  auto* const bytes = static_cast<char*>(tensor.mutable_data_ptr());
  for_pieces(exchange, tensor.nbytes(), [&](int64_t first, int64_t size) {
    const uint32_t number = exchange->next();
    const Exchange::Clock clock(*exchange);
    exchange->count(size);
    if (exchange->is_first()) {
      exchange->wait_for_slot(number);
      std::memcpy(exchange->slot(0, number), bytes + first, size);
    } else {
      exchange->wait_for(0, number, /*is_idle=*/true);
      std::memcpy(bytes + first, exchange->slot(0, number), size);
    }
    exchange->arrive(number);
  });
}

// Returns, on rank 0, when all ranks have called this: they have written `num_bytes` each elsewhere.
void gather(const ExchangePtr& exchange, int64_t num_bytes) {
  const Exchange::Clock clock(*exchange);
  const uint32_t number = exchange->next();
  exchange->count(num_bytes);
  exchange->arrive(number);
  if (exchange->is_first()) exchange->wait_for_all(number);
}

}  // namespace

void define_exchange(torch::Library& library) {
  library.class_<Exchange>("Exchange")
      .def(torch::init<Tensor, int64_t, int64_t, int64_t, int64_t, std::vector<int64_t>, double,
                       int64_t>())
      .def("sum", sum)
      .def("broadcast", broadcast)
      .def("gather", gather)
      .def("take_usage", [](const ExchangePtr& exchange) { return exchange->take_usage(); });
}

}  // namespace quire::ranks
