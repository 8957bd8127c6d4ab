// Pure functions of the C++ kernels, as C functions. They write numbers to `out` and return their count.
#include <initializer_list>

#include "attention/work_list.h"
#include "linear/prefetch.h"

namespace {

const char* at(int64_t address) { return reinterpret_cast<const char*>(address); }

int64_t* append(int64_t* out, std::initializer_list<int64_t> numbers) {
  return std::copy(numbers.begin(), numbers.end(), out);
}

}  // namespace

extern "C" {

// The work items of a batch, ten numbers each: seq, first head, heads, first token, tokens, first key,
// end key, keys per partition, place of the first partial, floats of a partial.
int64_t attention_items(const int64_t* query_start_loc, const int64_t* seq_lens, int64_t num_seqs,
                        int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                        int64_t sliding_window, int64_t partition_keys, int64_t num_threads,
                        int64_t* out) {
  quire::attention::AttentionCall call{};
  call.keys.head_dim = call.values.head_dim = head_dim;
  call.num_heads = num_heads;
  call.num_kv_heads = num_kv_heads;
  call.sliding_window = sliding_window;
  call.num_seqs = num_seqs;
  call.query_start_loc = query_start_loc;
  call.seq_lens = seq_lens;
  int64_t* end = out;
  for (const auto& item : quire::attention::make_work_list(call, partition_keys, num_threads).items)
    end = append(end, {item.seq, item.first_head, item.num_heads, item.first_token, item.num_tokens,
                       item.first_key, item.end_key, item.partition_keys, item.partials_at,
                       item.partial_floats});
  return end - out;
}

int64_t choose_packed_partition(int64_t num_keys, double shares, int64_t num_threads) {
  return quire::attention::choose_packed_partition(num_keys, shares, num_threads);
}

int64_t choose_streamed_partition(int64_t num_keys) {
  return quire::attention::choose_streamed_partition(num_keys);
}

// What a block's tiles prefetch during a panel of one weight or two. `own` and `next` are the two
// addresses of the panels and of the next ones (0: none). Per pass and tile, the spans up to the last
// input: end, address and step of each.
int64_t prefetched(int64_t num_inputs, int64_t num_tiles, const int64_t* own, int64_t own_bytes,
                   const int64_t* next, int64_t next_bytes, int64_t rows, int64_t row_bytes,
                   int64_t* out) {
  quire::linear::LinearCall call{};
  call.panels = {at(own[0]), at(own[1]), own_bytes};
  const quire::linear::Prefetcher prefetcher(call, num_tiles, num_inputs);
  int64_t* written = out;
  for (int64_t pass = 0; pass < (own[1] ? 2 : 1); ++pass) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const auto schedule = prefetcher.schedule(at(own[pass]), pass, tile,
                                        {at(next[0]), at(next[1]), next_bytes}, {at(rows), row_bytes});
      int64_t end = 0;
      for (const auto& span : schedule.spans) {
        if (end == num_inputs) break;
        end = span.end;
        written = append(written, {end, reinterpret_cast<int64_t>(span.due), span.step});
      }
    }
  }
  return written - out;
}

// What a tile prefetches that reads a panel and then `following` (0: none): the spans up to the last
// step, as above.
int64_t prefetched_ahead(int64_t num_steps, int64_t panel, int64_t panel_bytes, int64_t following,
                         int64_t* out) {
  quire::linear::LinearCall call{};
  call.panels = {at(panel), nullptr, panel_bytes};
  const auto schedule =
      quire::linear::Prefetcher(call, 1, num_steps).ahead(at(panel), at(following));
  int64_t *written = out, end = 0;
  for (const auto& span : schedule.spans) {
    if (end == num_steps) break;
    end = span.end;
    written = append(written, {end, reinterpret_cast<int64_t>(span.due), span.step});
  }
  return written - out;
}

}  // extern "C"
