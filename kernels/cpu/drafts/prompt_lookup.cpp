// `torch.ops.quire.prompt_lookup`.
#include <torch/library.h>

#include <algorithm>
#include <cstdint>

#include "tensors.h"

namespace quire::drafts {
namespace {

constexpr int64_t kBlock = 64;

struct Match {
  int64_t length = 0;
  int64_t next = 0;  // the index of the token behind it
};

// Whether a pair of tokens ends at one of `kBlock` indices from `first` on. Without an early exit, so
// that the compiler uses vector instructions.
bool has_pair(const int32_t* tokens, int64_t first, int32_t before_last, int32_t last) {
  int32_t found = 0;
  for (int64_t i = first; i < first + kBlock; ++i)
    found |= static_cast<int32_t>(tokens[i - 1] == before_last) & static_cast<int32_t>(tokens[i] == last);
  return found != 0;
}

// The longest match of the sequence's end with an earlier part of it, of at most `longest` tokens and at
// least 2; of several the latest.
Match find(const int32_t* tokens, int64_t num_tokens, int64_t longest) {
  Match best;
  if (num_tokens < 3) return best;
  const int32_t before_last = tokens[num_tokens - 2], last = tokens[num_tokens - 1];
  int64_t end = num_tokens - 2;  // of a match that may be found
  while (end >= 1 && best.length < longest) {
    if (end >= kBlock && !has_pair(tokens, end - kBlock + 1, before_last, last)) {
      end -= kBlock;
      continue;
    }
    for (const int64_t stop = std::max<int64_t>(0, end - kBlock); end > stop && best.length < longest;
         --end) {
      if (tokens[end] != last || tokens[end - 1] != before_last) continue;
      int64_t length = 2;
      while (length < longest && length <= end && tokens[end - length] == tokens[num_tokens - 1 - length])
        ++length;
      if (length > best.length) best = {length, end + 1};
    }
  }
  return best;
}

void prompt_lookup(const Tensor& token_table, const Tensor& rows, const Tensor& num_tokens,
                   const Tensor& most, int64_t shortest, int64_t longest, const Tensor& counts) {
  TORCH_CHECK(token_table.dim() == 2 && token_table.scalar_type() == at::kInt &&
                  token_table.is_cpu() && token_table.is_contiguous(),
              "token_table must be contiguous int32 [num_rows, max_len] on the CPU");
  TORCH_CHECK(2 <= shortest && shortest <= longest, "a match has 2 tokens at least");
  const int64_t count = rows.numel(), width = token_table.size(1);
  const int64_t *places = int64s(rows, count, "rows"), *lengths = int64s(num_tokens, count, "num_tokens"),
                *limits = int64s(most, count, "most");
  int64s(counts, count, "counts");
  int64_t* found = counts.mutable_data_ptr<int64_t>();
  int32_t* table = token_table.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(places[i] >= 0 && places[i] < token_table.size(0), "rows has ", places[i], " of ",
                      token_table.size(0));
    TORCH_CHECK_INDEX(limits[i] >= 0 && lengths[i] >= 0 && lengths[i] + limits[i] <= width, "a row of ",
                      width, " tokens has no room for ", lengths[i], " and ", limits[i]);
    int32_t* tokens = table + places[i] * width;
    const Match match = limits[i] > 0 ? find(tokens, lengths[i], longest) : Match{};
    found[i] = match.length >= shortest ? limits[i] : 0;
    // One by one: a match near the end continues with the drafts themselves.
    for (int64_t at = 0; at < found[i]; ++at) tokens[lengths[i] + at] = tokens[match.next + at];
  }
}

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def(
      "prompt_lookup(Tensor(a!) token_table, Tensor rows, Tensor num_tokens, Tensor most, "
      "int shortest, int longest, Tensor(b!) counts) -> ()",
      &prompt_lookup);
}

}  // namespace
}  // namespace quire::drafts
