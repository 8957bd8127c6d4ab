// What the instruction sets' versions of the kernels look like from outside: plain structures and
// a table of functions. Knows no torch.
#pragma once

#include <cstdint>

namespace quire {

enum class Format : int { kFloat32, kFloat16, kBFloat16, kE4M3, kE5M2 };

enum class Activation : int { kSilu, kGeluTanh };

// A cache [num_blocks, block_size, num_kv_heads, head_dim], dense in its last dimension. Strides
// are in elements.
struct Cache {
  void* data;
  Format format;
  int64_t block_stride, slot_stride, head_stride;
  int64_t head_dim;
  float scale;  // what a stored number is multiplied with to give the value
};

// Tokens' vectors per head, [num_tokens, num_heads, dim], dense in the last dimension.
struct Tokens {
  void* data;
  Format format;
  int64_t token_stride, head_stride;
};

// One call of paged attention: the batch, the caches and what scores go through.
struct Attention {
  Tokens query, out;
  Cache keys, values;
  int64_t block_size;
  int64_t num_heads, num_kv_heads;
  int64_t num_seqs;
  const int32_t* block_table;  // [num_seqs, block_table_stride]
  int64_t block_table_stride;
  const int64_t* query_start_loc;  // [num_seqs + 1]
  const int64_t* seq_lens;         // [num_seqs]
  float scale;
  float softcap;               // 0: none
  int64_t sliding_window;      // 0: none
  const float* sinks;          // [num_heads] or null
  const float* alibi_slopes;   // [num_heads] or null

  int64_t group_size() const { return num_heads / num_kv_heads; }
};

// Queries of one sequence, and the keys that they meet here: what one thread does in one go.
struct Item {
  int64_t seq;
  int64_t first_head, num_heads;    // key heads
  int64_t first_token, num_tokens;  // of the sequence's queries
  int64_t first_key, end_key;       // of the sequence's keys
  int64_t partial;                  // its place among the partials; -1 if it has all keys
  double cost;
};

// The partials that are parts of the same outputs: those of `count` items that follow each other,
// the first of which is `whole` but for its keys.
struct Merge {
  Item whole;
  int64_t first_partial, count;
};

// New keys or values on their way into a cache.
struct Write {
  Tokens source;
  Cache cache;
  int64_t num_heads, block_size;
  const int64_t* slot_mapping;  // [num_tokens]; -1 is not written
};

// The kernels as one instruction set has them.
struct Kernels {
  // Floats of scratch memory that an item of `num_rows` rows, over all its key heads, needs.
  int64_t (*scratch_floats)(const Attention&, const Item&);
  // Attends, and writes the output or, for a partial, accumulators, maxima and sums.
  void (*attend)(const Attention&, const Item&, float* scratch, float* partials,
                 int64_t partial_floats);
  void (*merge)(const Attention&, const Merge&, float* scratch, const float* partials,
                int64_t partial_floats);
  void (*write)(const Write&, int64_t first_token, int64_t end_token);
};

// Compilers before gcc 11 may come with an assembler that does not know AMX.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)
#define QUIRE_HAS_AMX
#endif

// kAmx: AVX-512, and products by the tiles of AMX.
enum class Isa : int { kPortable, kAvx2, kAvx512, kAmx };

extern const Kernels kPortableKernels;
#ifdef __x86_64__
extern const Kernels kAvx2Kernels, kAvx512Kernels;
#endif

// The most capable that this processor has and that this process may use; for AMX it asks Linux.
Isa best_isa();
const Kernels& kernels_of(Isa isa);

}  // namespace quire
